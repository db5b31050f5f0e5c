//! Jobs of a VM's task.

use std::time::Duration;

use coracle_guest_client::Backoff;
use coracle_hypervisor::{Driver as _, ProcessId};
use coracle_logs::{self as console};
use coracle_oci::Reference;
use coracle_types::VmId;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tracing::{Instrument as _, info_span};

use super::Task;
use crate::instances::InstanceOwner;
use crate::vm::Shared;
use crate::vm::boot::{self, Boot, last_words};
use crate::vm::effects::{Context, Retired, end_retired, known_vmm_config};
use crate::vm::follow::{self, Outputs};
use crate::vm::hooks;
use crate::vm::workload::WorkloadLog;
use crate::{Exit, HostError};
use coracle_lifecycle::Hook;
use coracle_lifecycle::{Action, Input, JobId, RunEvent, Scope, SessionId, State};

/// Time limit to commit and push an image, while which the VM is kept.
const COMMIT_LIMIT: Duration = Duration::from_secs(3600);
/// Pause between two tries to connect to a console.
const CONSOLE_PAUSE: Duration = Duration::from_millis(100);
/// Time limit of one try to end a VMM that was left.
const END_LIMIT: Duration = Duration::from_secs(20);

impl Task {
    pub(super) fn spawn_job(&mut self, state: &State, id: JobId, scope: Scope, actions: Vec<Action>) {
        let ends_run = actions.iter().any(is_end);
        let context = Context {
            shared: self.shared.clone(),
            record: (*state.record).clone(),
            paths: self.paths.clone(),
            session: state.session.and_then(|session| self.sessions.get(session)),
            writer: self.writer.clone(),
            log: self.log.clone(),
            container_logs: self.container_logs.clone(),
            shared_dirs: self.shared_dirs.clone(),
            ending: ends_run.then(|| std::mem::take(&mut self.run)),
            retired: self.retired.clone(),
        };
        let reports = self.reports.clone();
        let job = async move {
            let result = context.run(actions).await;
            let _task_gone = reports.send(Box::new(Input::Done(id, result))).await;
        };
        let jobs = match scope {
            Scope::Run => &mut self.run,
            Scope::Vm => &mut self.jobs,
        };
        self.aborts.insert(id, jobs.spawn(job));
    }

    pub(super) fn spawn_boot(&mut self, state: &State) {
        let (loaded, recorded) = oneshot::channel();
        self.loaded = Some(loaded);
        // Parent is the first waiting caller, which requested the start; a restart by policy has none.
        let caller = self.callers.values().map(|(_, span)| span).find(|span| !span.is_none());
        let span = match caller {
            Some(caller) => info_span!(parent: caller, "start_vm", vm = %state.record.id),
            None => info_span!(parent: None, "start_vm", vm = %state.record.id),
        };
        let boot = boot::run(Boot {
            shared: self.shared.clone(),
            record: (*state.record).clone(),
            requested_at: Instant::now(),
            console: self.console.clone(),
            reports: self.reports_of(state),
            recorded,
            shared_dirs: self.shared_dirs.clone(),
            served: JoinSet::new(),
        });
        self.run.spawn(boot.instrument(span));
    }

    /// Starts the jobs that last as long as the VMM: waiting for its end, and its console.
    pub(super) fn spawn_watch(&mut self, state: &State, vmm: ProcessId) {
        let (shared, reports, history) = (self.shared.clone(), self.reports_of(state), self.console.clone());
        self.run.spawn(async move {
            if shared.node.driver.exited(vmm).await.is_ok() {
                reports.send(RunEvent::VmmGone { last_words: last_words(&history) }).await;
            }
        });
        let shared = self.shared.clone();
        let vmm_config = known_vmm_config(&shared, &state.record);
        let (console, keys) = (self.console.clone(), self.keys.clone());
        self.run.spawn(async move {
            let mut keys = keys.lock().await;
            loop {
                if let Ok(socket) = shared.node.driver.console(&vmm_config).await {
                    console::pump(socket, &console, &mut keys).await;
                }
                // Stops with the VMM: later input is for the VMM of the next start.
                tokio::select! {
                    _ = shared.node.driver.exited(vmm) => return,
                    () = sleep(CONSOLE_PAUSE) => {}
                }
            }
        });
    }

    pub(super) fn spawn_follower(&mut self, state: &State, session: Option<SessionId>) {
        let vmm_config = known_vmm_config(&self.shared, &state.record);
        let containers =
            state.record.sandbox.is_some().then(|| (self.container_logs.clone(), self.statistics.clone()));
        let log = WorkloadLog {
            writer: self.log.clone(),
            boot: state.record.boots,
            before: state.record.output_before,
        };
        let outputs = Outputs { log, containers };
        let guest = session.and_then(|session| self.sessions.get(session));
        let job = follow::run(
            self.shared.clone(),
            Box::new(vmm_config),
            outputs,
            guest,
            self.paused.subscribe(),
            self.reports_of(state),
        );
        self.follower = Some(self.run.spawn(job));
    }

    pub(super) fn spawn_commit(&mut self, state: &State, exit: Exit, reference: Reference) {
        let reports = self.reports_of(state);
        let work = (self.commit)(state.record.id.clone(), exit, reference);
        let job = self.run.spawn(async move {
            let late = |_| Err(format!("it took longer than {} minutes", COMMIT_LIMIT.as_secs() / 60));
            let outcome = timeout(COMMIT_LIMIT, work).await.unwrap_or_else(late);
            reports.send(RunEvent::Committed(outcome)).await;
        });
        self.commit_job = Some(job);
    }

    pub(super) fn spawn_post_snapshot_hook(&mut self, state: &State, session: SessionId) {
        let Some(guest) = self.sessions.get(session) else { return };
        let (name, reports) = (state.record.name.clone(), self.reports_of(state));
        self.run.spawn(async move {
            match hooks::run(&guest, name.as_str(), Hook::PostSnapshot).await {
                Ok(()) => {}
                Err(HostError::Guest { .. }) => reports.send(RunEvent::HookInterrupted(session)).await,
                Err(error) => {
                    tracing::warn!(vm = %name, error = error.chain(), "post-snapshot hook failed");
                }
            }
        });
    }

    pub(super) fn spawn_shared_dir(&mut self, state: &State, volume: String) {
        let Some(session) = state.session else { return };
        if let Some(guest) = self.sessions.get(session) {
            self.run.spawn(self.shared_dirs.clone().serve(volume, session, guest));
        }
    }
}

fn is_end(action: &Action) -> bool {
    match action {
        Action::EndVmm => true,
        Action::Within(_, action) | Action::Try(action) => is_end(action),
        _ => false,
    }
}

/// Ends a VMM that the kernel could not end when its VM was deleted, and releases its resources. Until then no VM with that id
/// starts, and its disks stay claimed.
pub(super) async fn end_left_vmm(shared: &Shared, retired: &Retired, id: &VmId) {
    tokio::select! {
        () = shared.node.stop.cancelled() => return,
        () = end_retired(retired, None) => {}
    }
    let mut backoff = Backoff::new();
    let owner = InstanceOwner::Vm(id.clone());
    let left = shared.node.instances.ids_of(&owner);
    for instance in left {
        loop {
            tokio::select! {
                () = shared.node.stop.cancelled() => return,
                ended = timeout(END_LIMIT, shared.node.instances.end(&instance, None)) => match ended {
                    Ok(Ok(())) => break,
                    Ok(Err(error)) => tracing::warn!(%instance, error = error.chain(), "end VMM failed"),
                    Err(_) => tracing::warn!(%instance, "VMM has not ended yet"),
                },
            }
            sleep(backoff.pause()).await;
        }
    }
    shared.claims.release_all(id);
}
