//! The task that owns a VM: requests from a queue, reports from jobs, one at a time.

mod containers;
mod finish;
mod remove;
mod suspend;
mod volumes;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use coracle_hypervisor::{Driver as _, ProcessId, VmmConfig};
use coracle_types::{Op, VmState};
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until};

use self::finish::Committing;
use super::boot::CONFIGURE_LIMIT;
use super::container_table::{ContainerLogs, ContainerTable};
use super::follow::Outputs;
use super::{Handle, JobEvent, JobEventKind, Reply, Request, Shared, Up, View, boot, follow};
use crate::adopt::{Adoption, Seen, adopt};
use crate::events::EventKind;
use crate::instances::InstanceOwner;
use crate::vmm_config::{VmPaths, configuration, vmm_config};
use crate::{ConsoleHandle, Fence, GuestClient, HostError, HostEvent, Record, files};
use coracle_logs::LogWriter;
use coracle_logs::{self as console, ConsoleInput};
use coracle_proto::guest as pb;
use coracle_record::{ContainerRecord, millis};
use coracle_share::SharedDirServer;

/// Requests that may wait for one VM.
const QUEUE: usize = 32;

/// A guest whose workload ended by itself is off within this, or is killed.
const POWER_OFF_GRACE: Duration = Duration::from_secs(5);

/// What the guest gets beyond its workload's grace, to sync and unmount.
const SYNC_GRACE: Duration = Duration::from_secs(3);

/// Begins the message of a running VM whose network could not be restored.
const CUT_OFF: &str = "cut off from the network";

pub(crate) use self::finish::{Commit, Committed};

struct Actor {
    shared: Arc<Shared>,
    record: Record,
    paths: VmPaths,
    view: watch::Sender<Arc<View>>,
    guest: Option<GuestClient>,
    console: ConsoleHandle,
    keys: Arc<tokio::sync::Mutex<ConsoleInput>>,
    log: Arc<Mutex<LogWriter>>,
    requests: mpsc::Receiver<Request>,
    job_event_queue: mpsc::Receiver<JobEvent>,
    job_events: mpsc::Sender<JobEvent>,
    containers: ContainerTable,
    container_logs: ContainerLogs,
    statistics: watch::Sender<Option<Arc<pb::Statistics>>>,
    /// Directories that the guest is served, by volume.
    shared_dirs: BTreeMap<String, Arc<SharedDirServer>>,
    /// Everything that runs for the present boot; ends with it.
    jobs: JoinSet<()>,
    /// The job that stays in touch with the guest.
    follower: Option<AbortHandle>,
    commit: Commit,
    /// An image of what the workload left, while it is being made.
    committing: Option<Committing>,
    /// The guest's CPUs are held.
    paused: watch::Sender<bool>,
    /// The record on disk is older than the one here.
    unsaved: bool,
    /// The pre-snapshot hook has run, the post-snapshot hook has not.
    post_snapshot_due: bool,
    starters: Vec<Reply>,
    stoppers: Vec<Reply>,
    /// When patience with a guest that was asked to stop is over.
    kill_at: Option<Instant>,
    boot_began: Instant,
    /// Takes the VM out of the host's list; called before its removal is acknowledged.
    gone: Option<Box<dyn FnOnce() + Send + Sync>>,
}

/// Starts the task of a VM whose record is on disk. It first does what a restart
/// of the daemon asks for, then serves requests until the VM is deleted or the
/// daemon stops.
pub(crate) fn spawn(
    shared: Arc<Shared>,
    record: Record,
    tasks: &mut JoinSet<()>,
    commit: Commit,
    gone: impl FnOnce() + Send + Sync + 'static,
) -> io::Result<Handle> {
    let paths = VmPaths::of(&shared.node.config, &record.id);
    let (console, keys) = ConsoleHandle::open(&paths.console())?;
    let log = LogWriter::open(&paths.state)?;
    let printed = log.changed();
    let (requests, queue) = mpsc::channel(QUEUE);
    let (job_events, job_event_queue) = mpsc::channel(QUEUE);
    let containers = ContainerTable::new(ContainerRecord::load_all(&paths.containers())?);
    let (container_logs, statistics) = (ContainerLogs::default(), watch::Sender::new(None));
    let shown = View { record: record.clone(), guest: None, containers: containers.records() };
    let (view, reader) = watch::channel(Arc::new(shown));
    let handle = Handle {
        id: record.id.clone(),
        requests,
        view: reader,
        console: console.clone(),
        printed,
        container_logs: container_logs.clone(),
        statistics: statistics.subscribe(),
    };
    let actor = Actor {
        shared,
        record,
        paths,
        view,
        guest: None,
        console,
        keys: Arc::new(tokio::sync::Mutex::new(keys)),
        log: Arc::new(Mutex::new(log)),
        requests: queue,
        job_event_queue,
        job_events,
        containers,
        container_logs,
        statistics,
        shared_dirs: BTreeMap::new(),
        jobs: JoinSet::new(),
        follower: None,
        commit,
        committing: None,
        paused: watch::Sender::new(false),
        unsaved: false,
        post_snapshot_due: false,
        starters: vec![],
        stoppers: vec![],
        kill_at: None,
        boot_began: Instant::now(),
        gone: Some(Box::new(gone)),
    };
    tasks.spawn(actor.run());
    Ok(handle)
}

impl Actor {
    /// Its VMM, for finding one and speaking to it, not for starting one.
    fn vmm_config(&self) -> VmmConfig {
        let of_run = self.record.accelerator.filter(|_| self.record.state.has_vmm());
        let accelerator = of_run.unwrap_or_else(|| self.shared.node.accelerator(&self.record.driver));
        vmm_config(&self.shared.node.config, &self.record, accelerator, None)
    }

    /// Takes the accelerator from the VMM: a driver may have fallen back to another than the node's.
    fn record_accelerator(&mut self, vmm: ProcessId) {
        self.record.accelerator = None;
        self.record.accelerator = Some(self.shared.node.driver.accelerator_of(&self.vmm_config(), vmm));
    }

    /// Until the VM is gone or the daemon stops.
    async fn run(mut self) {
        self.open_logs();
        if self.adopt().await {
            return;
        }
        let stop = self.shared.node.stop.clone();
        loop {
            let kill_at = self.kill_at;
            tokio::select! {
                () = stop.cancelled() => return,
                Some(event) = self.job_event_queue.recv() => self.handle_job_event(event).await,
                Some(request) = self.requests.recv() => {
                    if self.request(request).await {
                        return;
                    }
                }
                () = async { sleep_until(kill_at.unwrap_or_else(Instant::now)).await }, if kill_at.is_some() => {
                    self.end_run(VmState::Stopped, "killed: the guest did not power off in time".to_owned()).await;
                }
            }
        }
    }

    /// What a restart asks for. True when nothing is left of the VM.
    async fn adopt(&mut self) -> bool {
        let found = self.find().await;
        let seen = match found {
            None => Seen::Nothing,
            Some(vmm) if self.record.process == Some(vmm) => Seen::Known,
            Some(_) => Seen::Unrecorded,
        };
        let adoption = adopt(self.record.state, seen, self.record.saved.is_some());
        if adoption != Adoption::Rest {
            tracing::info!(vm = %self.record.id, ?adoption, "adopt");
        }
        match (adoption, found) {
            (Adoption::Rest, _) => {}
            (Adoption::Discard | Adoption::FinishDelete, _) => return self.remove().await.is_ok(),
            (Adoption::KillStray, _) => {
                let (state, message) = (self.record.state, self.record.message.clone());
                self.end_run(state, message).await;
            }
            (Adoption::Start, _) => match self.end_vmm().await {
                Ok(()) => self.begin_boot().await,
                Err(error) => self.end_run(VmState::Failed, error.chain()).await,
            },
            (Adoption::FinishStop, _) => self.end_run(VmState::Stopped, String::new()).await,
            (Adoption::Lost, _) | (Adoption::Attach | Adoption::WakeUp, None) => {
                let why = "the VMM went away while the node was down".to_owned();
                self.end_run(VmState::Failed, why).await;
            }
            (Adoption::Attach | Adoption::WakeUp, Some(vmm)) => self.attach(vmm).await,
        }
        false
    }

    /// Adopts a running VMM and restores the recorded power state.
    async fn attach(&mut self, vmm: ProcessId) {
        self.record.process = Some(vmm);
        self.record_accelerator(vmm);
        self.watch(vmm);
        if self.record.state == VmState::Starting {
            self.boot_began = Instant::now();
            self.spawn_boot();
            return;
        }
        let message = match self.restore_network().await {
            Ok(()) if self.record.message.starts_with(CUT_OFF) => String::new(),
            Ok(()) => self.record.message.clone(),
            Err(error) => {
                let error = error.chain();
                tracing::error!(vm = %self.record.id, error, "restore network failed");
                format!("{CUT_OFF}: {error}")
            }
        };
        if message != self.record.message {
            self.record.message = message;
            self.save_quietly().await;
        }
        if let Err(error) = self.restore_power_state().await {
            tracing::warn!(vm = %self.record.id, %error, "restore recorded power state failed");
        }
        self.follow(None);
        self.forget_saved().await;
    }

    /// Connects a VMM that runs. When it fails no packet of its guest passes.
    async fn restore_network(&self) -> Result<(), HostError> {
        let (network, record) = (&self.shared.node.network, &self.record);
        let Some(instance) = &record.instance else { return Ok(()) };
        let outcome = match network.lease(&record.id, record.address) {
            Ok(lease) => network.attach(instance, &record.endpoint(lease)).await.map(drop),
            Err(error) => {
                if let Err(error) = network.cut_off(instance).await {
                    tracing::error!(vm = %record.id, %error, "take down tap failed");
                }
                Err(error)
            }
        };
        outcome.map_err(|source| HostError::Network { name: record.name.to_string(), source })
    }

    /// True when the VM is gone.
    async fn request(&mut self, request: Request) -> bool {
        let (op, fence) = match &request {
            Request::Start { fence, .. } => (Op::Start, fence),
            Request::Stop { fence, .. } => (Op::Stop, fence),
            Request::Suspend { op, fence, .. } => (*op, fence),
            Request::Snapshot { .. } => (Op::Snapshot, &None),
            Request::Container { .. } => (Op::Guest, &None),
            Request::Attach { fence, .. } | Request::Detach { fence, .. } => (Op::Volume, fence),
            Request::Delete { fence, force, .. } => (Op::Delete { force: *force }, fence),
        };
        let allowed = self.check_fence(fence.as_ref()).and_then(|()| {
            let refused = |source| HostError::Refused { name: self.record.name.to_string(), source };
            self.record.state.admit(op).map_err(refused)
        });
        match (request, allowed) {
            // Some of them need no guest: each is admitted by itself.
            (Request::Container { request, reply }, _) => self.container_request(request, reply).await,
            (
                Request::Start { reply, .. }
                | Request::Stop { reply, .. }
                | Request::Suspend { reply, .. }
                | Request::Attach { reply, .. }
                | Request::Detach { reply, .. }
                | Request::Delete { reply, .. },
                Err(e),
            ) => {
                let _caller_gone = reply.send(Err(e));
            }
            (Request::Snapshot { reply, .. }, Err(e)) => {
                let _caller_gone = reply.send(Err(e));
            }
            (Request::Start { reply, .. }, Ok(())) => self.start(reply).await,
            (Request::Stop { grace, reply, .. }, Ok(())) => self.stop(grace, reply).await,
            (Request::Suspend { op, reply, .. }, Ok(())) => self.suspend(op, reply).await,
            (Request::Snapshot { dir, reply }, Ok(())) => self.snapshot(dir, reply).await,
            (Request::Attach { request, found, reply, .. }, Ok(())) => {
                let done = self.attach_volume(&request, &found).await;
                let _caller_gone = reply.send(done.map(|()| self.record.clone()));
            }
            (Request::Detach { volume, reply, .. }, Ok(())) => {
                let done = self.detach_volume(&volume).await;
                let _caller_gone = reply.send(done.map(|()| self.record.clone()));
            }
            (Request::Delete { reply, .. }, Ok(())) => {
                let result = self.remove().await;
                let gone = result.is_ok();
                let _caller_gone = reply.send(result.map(|()| self.record.clone()));
                return gone;
            }
        }
        false
    }

    /// A caller that speaks for another object, or for an older generation, is refused.
    fn check_fence(&mut self, fence: Option<&Fence>) -> Result<(), HostError> {
        let owner = &mut self.record.owner;
        match fence {
            Some(fence) if !owner.uid.is_empty() => {
                if fence.uid != owner.uid || fence.generation < owner.generation {
                    return Err(HostError::Fenced {
                        name: self.record.name.to_string(),
                        holder: format!("uid {} generation {}", owner.uid, owner.generation),
                        caller: format!("uid {} generation {}", fence.uid, fence.generation),
                    });
                }
                owner.generation = fence.generation;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    async fn start(&mut self, reply: Reply) {
        if matches!(self.record.state, VmState::Running | VmState::Paused) {
            let done = self.resume_vcpus().await;
            let _caller_gone = reply.send(done.map(|()| self.record.clone()));
            return;
        }
        self.starters.push(reply);
        if self.record.state != VmState::Starting {
            self.begin_boot().await;
        }
    }

    async fn begin_boot(&mut self) {
        // A guest that continues from saved memory does not boot, and its output continues.
        if self.record.saved.is_none() {
            self.record.boots += 1;
            self.drop_half_volumes();
            self.lose_containers("its VM was started anew").await;
        }
        self.record.exit = None;
        self.record.committed = None;
        self.record.finished_at = None;
        self.record.address_acknowledged = false;
        let before = std::mem::replace(&mut self.record.state, VmState::Starting);
        self.boot_began = Instant::now();
        // It does not wait for the disk: a VMM that no record asks for is ended (`adopt.rs`).
        self.spawn_boot();
        if let Err(error) = self.change_from(before, VmState::Starting, String::new()).await {
            let starters = std::mem::take(&mut self.starters);
            self.end_run(before, error.chain()).await;
            self.starters = starters;
            self.answer_starters(Err(error));
        }
    }

    fn spawn_boot(&mut self) {
        let job = boot::run(
            self.shared.clone(),
            self.record.clone(),
            self.console.clone(),
            self.job_events.clone(),
        );
        self.jobs.spawn(job);
    }

    async fn stop(&mut self, grace: Duration, reply: Reply) {
        match self.record.state {
            state if state.has_vmm() => {}
            state => {
                // A VM that never ran is Stopped from now on.
                let done = match state {
                    VmState::Created => self.change(VmState::Stopped, String::new()).await,
                    // Its end was not recorded, for want of space, and so not acknowledged yet.
                    _ if self.unsaved => self.save().await,
                    _ => Ok(()),
                };
                let _caller_gone = reply.send(done.map(|()| self.record.clone()));
                return;
            }
        }
        self.stoppers.push(reply);
        if self.record.state == VmState::Starting && self.record.saved.is_some() {
            self.end_run(VmState::Hibernated, String::new()).await;
        } else if grace.is_zero() || matches!(self.record.state, VmState::Starting | VmState::Hibernating) {
            self.end_run(VmState::Stopped, String::new()).await;
        } else {
            if let Err(error) = self.resume_vcpus().await {
                tracing::warn!(vm = %self.record.id, %error, "resume before power-off failed");
            }
            self.ask_to_power_off(grace).await;
        }
    }

    /// Asks the guest and sets a limit; a second request can only shorten it.
    async fn ask_to_power_off(&mut self, grace: Duration) {
        let limit = Instant::now() + grace + SYNC_GRACE;
        self.kill_at = Some(self.kill_at.map_or(limit, |earlier| earlier.min(limit)));
        if self.record.state == VmState::Stopping {
            return;
        }
        let message = self.record.message.clone();
        if let Err(error) = self.change(VmState::Stopping, message).await {
            tracing::warn!(vm = %self.record.id, %error, "record stop failed");
        }
        if let Some(guest) = self.guest.clone() {
            self.jobs.spawn(async move {
                let asked = guest.shutdown(grace, Duration::from_secs(5)).await;
                if let Err(error) = asked {
                    tracing::debug!(%error, "guest shutdown request failed");
                }
            });
        }
    }

    async fn handle_job_event(&mut self, event: JobEvent) {
        if event.boot != self.record.boots || !self.record.state.has_vmm() {
            return; // of an earlier run
        }
        match event.kind {
            JobEventKind::Spawned { instance, vmm, from } => {
                self.record.instance = Some(instance);
                self.record.process = Some(vmm);
                self.record.template = from.template;
                self.record.premounted = from.premounted;
                self.record.pooled = from.pooled;
                self.record_accelerator(vmm);
                self.save_quietly().await;
                self.watch(vmm);
            }
            JobEventKind::Loaded { instance, vmm, go } => self.loaded(instance, vmm, go).await,
            JobEventKind::Booted(Ok(up)) if self.record.state == VmState::Starting => self.booted(up).await,
            JobEventKind::Booted(Ok(_)) => {}
            JobEventKind::Booted(Err(error)) => {
                let message = error.chain();
                tracing::warn!(vm = %self.record.id, error = message, "start VM failed");
                // The record changes before the callers get the error.
                let starters = std::mem::take(&mut self.starters);
                // Nothing is lost while its memory is there.
                let end = if self.record.saved.is_some() { VmState::Hibernated } else { VmState::Failed };
                self.end_run(end, message).await;
                self.starters = starters;
                self.answer_starters(Err(error));
            }
            JobEventKind::HookInterrupted(session) => {
                self.post_snapshot_due = true;
                // The next session may have begun before this note came.
                if self.guest.as_ref().is_some_and(|guest| !guest.is_same_session(&session)) {
                    self.run_post_snapshot_hook();
                }
            }
            JobEventKind::Session(guest) => self.session(guest).await,
            JobEventKind::Exited(exit) => self.exited(exit).await,
            JobEventKind::Drained => self.drained().await,
            JobEventKind::ContainerStarted(id) => {
                let done = self.container_started(&id).await;
                self.log_container_error(&id, done);
            }
            JobEventKind::ContainerExited(end) => {
                let id = end.id.clone();
                let done = self.container_exited(end).await;
                self.log_container_error(&id, done);
            }
            JobEventKind::ContainerStopFailed(id, error) => self.container_stop_failed(&id, error),
            JobEventKind::Committed(outcome) => self.committed(outcome).await,
            JobEventKind::VmmGone => self.vmm_gone().await,
        }
    }

    /// A session that begins, or that has ended. What of its volumes was cut off can be finished now.
    async fn session(&mut self, guest: Option<GuestClient>) {
        self.guest = guest.clone();
        if let Some(guest) = guest {
            self.configure_again(&guest).await;
            self.settle_volumes(&guest).await;
            self.settle_containers(&guest).await;
            self.run_post_snapshot_hook();
        }
        self.publish(EventKind::Updated);
    }

    /// A system that started anew by itself has an agent that knows nothing yet.
    async fn configure_again(&self, guest: &GuestClient) {
        if self.record.disk_image_vm.is_none() || guest.status().await.is_ok_and(|status| status.configured) {
            return;
        }
        let (shared, entropy) = (&self.shared, rand::random::<[u8; 64]>());
        let subnet = shared.node.network.subnet();
        let request = configuration(
            &shared.node.config,
            &self.record,
            subnet,
            entropy.to_vec(),
            shared.node.clock.now(),
        );
        if let Err(error) = guest.configure(request, CONFIGURE_LIMIT).await {
            tracing::warn!(vm = %self.record.id, %error, "configure a rebooted guest failed");
        }
    }

    async fn booted(&mut self, Up { guest, identity, workload }: Up) {
        self.record.started_at = Some(self.shared.node.clock.now());
        self.record.boot_ms = millis(self.boot_began.elapsed());
        self.record.identity_ms = millis(identity);
        self.record.workload_ms = millis(workload);
        self.record.address_acknowledged = self.record.address.is_some();
        self.guest = Some(guest.clone());
        if let Err(error) = self.change(VmState::Running, String::new()).await {
            self.answer_starters(Err(error));
            return;
        }
        let record = self.record.clone();
        self.answer_starters(Ok(record));
        self.follow(Some(guest));
        self.forget_saved().await;
    }

    async fn vmm_gone(&mut self) {
        match self.record.state {
            // The job that boots sees it too, and knows more.
            VmState::Starting => {}
            VmState::Stopping => {
                let message = self.record.message.clone();
                self.end_run(VmState::Stopped, message).await;
            }
            VmState::Running if self.record.disk_image_vm.is_some() => {
                self.end_run(VmState::Stopped, "the guest powered off".to_owned()).await;
            }
            _ if self.record.exit.is_some() => {
                let message = self.record.message.clone();
                self.end_run(VmState::Stopped, message).await;
            }
            _ => {
                let why = format!("the VMM exited{}", boot::last_words(&self.console));
                self.end_run(VmState::Failed, why).await;
            }
        }
    }

    /// Ends the VMM, releases what only a running VM needs, and records it.
    async fn end_run(&mut self, state: VmState, message: String) {
        self.jobs.shutdown().await;
        let message = self.last_word(message);
        // What they still had to say is of a run that is over.
        while self.job_event_queue.try_recv().is_ok() {}
        self.guest = None;
        self.kill_at = None;
        self.post_snapshot_due = false;
        self.paused.send_replace(false);
        if let Err(error) = self.end_vmm().await {
            tracing::error!(vm = %self.record.id, %error, "end VMM failed");
        }
        if state != VmState::Hibernated {
            self.lose_containers("its VM ended").await;
            // A directory that is open keeps its file system mounted. A hibernated guest has files of it open.
            self.shared_dirs.clear();
        }
        self.record.process = None;
        self.record.address_acknowledged = false;
        self.record.finished_at = Some(self.shared.node.clock.now());
        let result = self.change(state, message).await;
        let failed = |_| HostError::Boot {
            name: self.record.name.to_string(),
            why: "it was stopped before it ran".to_owned(),
        };
        let stopped = self.record.clone();
        for reply in self.starters.drain(..) {
            let _caller_gone = reply.send(Err(failed(())));
        }
        // What was not recorded is not acknowledged, and whoever asked hears why.
        if let Err(error) = &result {
            tracing::error!(vm = %self.record.id, error = error.chain(), "write record failed");
            self.publish(EventKind::Updated);
        }
        for reply in self.stoppers.drain(..) {
            let answer = result.as_ref().map(|()| stopped.clone()).map_err(again);
            let _caller_gone = reply.send(answer);
        }
    }

    /// Ends every instance of the VM, one that its record does not name yet included.
    async fn end_vmm(&mut self) -> Result<(), HostError> {
        let owner = InstanceOwner::Vm(self.record.id.clone());
        let log = self.paths.vmm_log();
        self.shared.node.instances.end_all(|one| *one == owner, Some(&log)).await?;
        self.record.instance = None;
        Ok(())
    }

    async fn find(&self) -> Option<ProcessId> {
        self.record.instance.as_ref()?;
        let vmm_config = self.vmm_config();
        match self.shared.node.driver.find(&vmm_config).await {
            Ok(found) => found,
            Err(error) => {
                tracing::error!(vm = %self.record.id, %error, "read process table failed");
                None
            }
        }
    }

    /// Jobs that last as long as the VMM: its end, and its console.
    fn watch(&mut self, vmm: ProcessId) {
        let (shared, job_events, boot) = (self.shared.clone(), self.job_events.clone(), self.record.boots);
        self.jobs.spawn(async move {
            if shared.node.driver.exited(vmm).await.is_ok() {
                let _task_gone = job_events.send(JobEvent { boot, kind: JobEventKind::VmmGone }).await;
            }
        });
        let shared = self.shared.clone();
        let vmm_config = self.vmm_config();
        let (console, keys) = (self.console.clone(), self.keys.clone());
        self.jobs.spawn(async move {
            let mut keys = keys.lock().await;
            loop {
                if let Ok(socket) = shared.node.driver.console(&vmm_config).await {
                    console::pump(socket, &console, &mut keys).await;
                }
                sleep(Duration::from_millis(100)).await;
            }
        });
    }

    fn follow(&mut self, guest: Option<GuestClient>) {
        let vmm_config = self.vmm_config();
        let (boot, log, job_events) = (self.record.boots, self.log.clone(), self.job_events.clone());
        let paused = self.paused.subscribe();
        let containers =
            self.record.sandbox.is_some().then(|| (self.container_logs.clone(), self.statistics.clone()));
        let outputs = Outputs { log, containers };
        let job = follow::run(self.shared.clone(), vmm_config, boot, outputs, guest, paused, job_events);
        self.follower = Some(self.jobs.spawn(job));
    }

    /// Records a new state, then tells everybody.
    async fn change(&mut self, state: VmState, message: String) -> Result<(), HostError> {
        self.change_from(self.record.state, state, message).await
    }

    async fn change_from(
        &mut self,
        before: VmState,
        state: VmState,
        message: String,
    ) -> Result<(), HostError> {
        self.record.state = state;
        self.record.message = message;
        self.save().await?;
        self.publish(EventKind::of_change(before, state));
        Ok(())
    }

    async fn save(&mut self) -> Result<(), HostError> {
        let (record, path) = (self.record.clone(), self.paths.record());
        let saved = files::blocking(move || record.save(&path)).await;
        self.unsaved = saved.is_err();
        saved.map_err(|source| HostError::Files {
            operation: "write the record",
            id: self.record.id.clone(),
            source,
        })
    }

    /// For what the world knows better than the record: a miss is repaired at adoption.
    async fn save_quietly(&mut self) {
        if let Err(error) = self.save().await {
            tracing::warn!(vm = %self.record.id, %error, "write record failed");
        }
        self.publish(EventKind::Updated);
    }

    fn publish(&self, kind: EventKind) {
        let (record, guest) = (self.record.clone(), self.guest.clone());
        self.view.send_replace(Arc::new(View { record, guest, containers: self.containers.records() }));
        let event = HostEvent { kind, record: self.record.clone(), time: self.shared.node.clock.now() };
        let _no_watcher = self.shared.events.send(event);
    }

    /// The first hears the reason itself, the others its text.
    fn answer_starters(&mut self, result: Result<Record, HostError>) {
        let name = self.record.name.to_string();
        let copy = |result: &Result<Record, HostError>| match result {
            Ok(record) => Ok(record.clone()),
            Err(error) => Err(HostError::Boot { name: name.clone(), why: error.chain() }),
        };
        let mut starters = self.starters.drain(..);
        if let Some(first) = starters.next() {
            for other in starters {
                let _caller_gone = other.send(copy(&result));
            }
            let _caller_gone = first.send(result);
        }
    }
}

/// A copy of an error for one more caller.
fn again(error: &HostError) -> HostError {
    match error {
        HostError::Files { operation, id, source } => {
            let source = io::Error::new(source.kind(), source.to_string());
            HostError::Files { operation, id: id.clone(), source }
        }
        error => HostError::Invalid { message: error.chain() },
    }
}
