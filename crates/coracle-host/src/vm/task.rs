//! Task that owns a VM. It waits only for inputs; slow work is done in jobs.

mod jobs;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use coracle_hypervisor::Driver as _;
use coracle_oci::Reference;
use coracle_proto::guest as pb;
use coracle_record::ContainerRecord;
use coracle_types::VmId;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until};
use tracing::Span;

use super::container_table::ContainerLogs;
use super::effects::{Retired, Writer, known_vmm_config};
use super::reports::{Reports, Sessions};
use super::shared_dirs::SharedDirs;
use super::{Handle, ReplyTo, Request, Shared, View, VmCopy};
use crate::events::EventKind;
use crate::vmm_config::VmPaths;
use crate::{ConsoleHandle, Exit, HostEvent, Record};
use coracle_lifecycle::{Abilities, Answer, Committed, Effect, Input, JobId, Now, State, Ticket, step};
use coracle_logs::{ConsoleInput, LogWriter};

/// Maximum number of queued requests, and of queued inputs from jobs.
const QUEUE: usize = 32;

/// Makes an image of a VM whose command has succeeded, and pushes it. Provided by the host core, because the task of a VM has
/// no access to registries.
pub(crate) type Commit = Box<
    dyn Fn(VmId, Exit, Reference) -> std::pin::Pin<Box<dyn Future<Output = Committed> + Send>> + Send + Sync,
>;

struct Task {
    shared: Arc<Shared>,
    paths: VmPaths,
    // Boxed, because a queue allocates many slots at once, and most VMs have no messages.
    requests: mpsc::Receiver<Box<Request>>,
    inputs: mpsc::Receiver<Box<Input>>,
    /// Sender of inputs, for jobs.
    reports: mpsc::Sender<Box<Input>>,
    view: watch::Sender<Arc<View>>,
    console: ConsoleHandle,
    keys: Arc<tokio::sync::Mutex<ConsoleInput>>,
    log: Arc<Mutex<LogWriter>>,
    container_logs: ContainerLogs,
    statistics: watch::Sender<Option<Arc<pb::Statistics>>>,
    shared_dirs: SharedDirs,
    sessions: Arc<Sessions>,
    writer: Arc<Writer>,
    /// Whether the vCPUs are paused.
    paused: watch::Sender<bool>,
    /// Waiting callers, and the ticket of the last one.
    callers: BTreeMap<Ticket, (ReplyTo, Span)>,
    last_ticket: u64,
    /// Jobs that end with the run.
    run: JoinSet<()>,
    retired: Retired,
    /// Jobs that outlive the run.
    jobs: JoinSet<()>,
    aborts: BTreeMap<JobId, AbortHandle>,
    follower: Option<AbortHandle>,
    commit_job: Option<AbortHandle>,
    /// Resumes a VMM that has loaded its memory.
    loaded: Option<oneshot::Sender<()>>,
    commit: Commit,
    /// Removes the VM from the host's directory; called before the deletion is acknowledged.
    gone: Option<Box<dyn FnOnce() + Send + Sync>>,
    /// Whether a VMM of the VM has not ended although the VM is deleted.
    is_vmm_left: bool,
}

/// Starts the task of a VM whose record is on disk. The task first completes what the restart of a daemon requires, and then
/// serves requests until the VM is deleted or the daemon stops.
pub(crate) fn spawn(
    shared: Arc<Shared>,
    record: Record,
    tasks: &mut JoinSet<()>,
    commit: Commit,
    gone: impl FnOnce() + Send + Sync + 'static,
) -> io::Result<Handle> {
    let paths = VmPaths::of(&shared.node.config, &record.id);
    let (console, keys) = ConsoleHandle::new(&paths.console());
    let log = LogWriter::open(&paths.state)?;
    let printed = log.changed();
    let (requests, queue) = mpsc::channel(QUEUE);
    let (reports, inputs) = mpsc::channel(QUEUE);
    let containers = ContainerRecord::load_all(&paths.containers())?;
    let (container_logs, statistics) = (ContainerLogs::default(), watch::Sender::new(None));
    let abilities = abilities(&shared, &record);
    let state = State::new(record, containers, abilities, Instant::now());
    let shown = View { record: state.record.version(), guest: None, containers: state.containers.clone() };
    let (view, reader) = watch::channel(Arc::new(shown));
    let handle = Handle {
        id: state.record.id.clone(),
        requests,
        view: reader,
        console: console.clone(),
        printed,
        container_logs: container_logs.clone(),
        statistics: statistics.subscribe(),
    };
    let task = Box::new(Task {
        shared,
        paths,
        requests: queue,
        inputs,
        reports,
        view,
        console,
        keys: Arc::new(tokio::sync::Mutex::new(keys)),
        log: Arc::new(Mutex::new(log)),
        container_logs,
        statistics,
        shared_dirs: SharedDirs::default(),
        sessions: Arc::default(),
        writer: Arc::default(),
        paused: watch::Sender::new(false),
        callers: BTreeMap::new(),
        last_ticket: 0,
        run: JoinSet::new(),
        retired: Retired::default(),
        jobs: JoinSet::new(),
        aborts: BTreeMap::new(),
        follower: None,
        commit_job: None,
        loaded: None,
        commit,
        gone: Some(Box::new(gone)),
        is_vmm_left: false,
    });
    tasks.spawn(task.run(Box::new(state)));
    Ok(handle)
}

impl Task {
    /// Runs until the VM is deleted or the daemon stops. The arguments are boxed, because a future stores them in addition to
    /// their moved values.
    async fn run(mut self: Box<Self>, mut state: Box<State>) {
        let stop = self.shared.node.stop.clone();
        *state = self.step(*state, Input::Begin);
        while !state.is_gone {
            let kill_at = state.kill_at;
            let input = tokio::select! {
                () = stop.cancelled() => return,
                Some(input) = self.inputs.recv() => *input,
                Some(request) = self.requests.recv() => {
                    let Request { call, reply, span } = *request;
                    self.last_ticket += 1;
                    let ticket = Ticket(self.last_ticket);
                    self.callers.insert(ticket, (reply, span));
                    Input::Call(ticket, call)
                }
                () = async { sleep_until(kill_at.unwrap_or_else(Instant::now)).await }, if kill_at.is_some() => {
                    Input::Timer
                }
                // Ended jobs are reaped.
                Some(_) = self.run.join_next(), if !self.run.is_empty() => continue,
                Some(_) = self.jobs.join_next(), if !self.jobs.is_empty() => continue,
            };
            *state = self.step(*state, input);
        }
        if self.is_vmm_left {
            let id = state.record.id.clone();
            // Callers learn that the VM is deleted while the task still waits for its last VMM.
            drop(std::mem::take(&mut self.callers));
            self.requests.close();
            Box::pin(jobs::end_left_vmm(&self.shared, &self.retired, &id)).await;
        }
        Box::pin(crate::host::settle(&self.shared)).await;
    }

    fn step(&mut self, state: State, input: Input) -> State {
        if let Input::Done(job, _) = &input {
            self.aborts.remove(job);
        }
        let now = Now { at: Instant::now(), time: self.shared.node.clock.now() };
        let (state, effects) = step(state, input, now);
        for effect in effects {
            self.carry_out(&state, effect);
        }
        state
    }

    /// Starts the execution of an effect. Never waits.
    fn carry_out(&mut self, state: &State, effect: Effect) {
        match effect {
            Effect::Job(id, scope, actions) => self.spawn_job(state, id, scope, actions),
            Effect::Cancel(job) => {
                if let Some(job) = self.aborts.remove(&job) {
                    job.abort();
                }
            }
            Effect::Boot => self.spawn_boot(state),
            Effect::ResumeRestored => {
                if let Some(loaded) = self.loaded.take() {
                    let _job_gone = loaded.send(());
                }
            }
            Effect::Watch(vmm) => self.spawn_watch(state, vmm),
            Effect::Follow(session) => self.spawn_follower(state, session),
            Effect::StopFollowing => abort(&mut self.follower),
            Effect::Commit(exit, reference) => self.spawn_commit(state, exit, reference),
            Effect::StopCommit => abort(&mut self.commit_job),
            Effect::PostSnapshotHook(session) => self.spawn_post_snapshot_hook(state, session),
            Effect::ServeSharedDir(volume) => self.spawn_shared_dir(state, volume),
            Effect::CloseSharedDir(volume) => self.shared_dirs.close(&volume),
            Effect::CloseSharedDirs => self.shared_dirs.close_all(),
            Effect::CloseSession => {
                if let Some(session) = self.sessions.take(None) {
                    session.close();
                }
            }
            Effect::ForgetSession(up_to) => drop(self.sessions.take(up_to)),
            Effect::SetPaused(paused) => drop(self.paused.send_replace(paused)),
            Effect::Publish(kind) => self.publish(state, kind),
            Effect::Answer(ticket, answer) => self.answer(state, ticket, answer),
            Effect::ReleaseClaim(volume) => self.shared.claims.release(&state.record.id, &volume),
            Effect::Gone { vmm_left } => self.release_resources(state, vmm_left),
        }
    }

    fn publish(&self, state: &State, kind: EventKind) {
        let guest = state.session.and_then(|session| self.sessions.get(session));
        let (record, containers) = (state.record.version(), state.containers.clone());
        self.view.send_replace(Arc::new(View { record: record.clone(), guest, containers }));
        let time = self.shared.node.clock.now();
        let _no_watcher = self.shared.events.send(HostEvent { kind, record, time });
    }

    fn answer(&mut self, state: &State, ticket: Ticket, answer: Answer) {
        let Some((caller, _span)) = self.callers.remove(&ticket) else { return };
        match (caller, answer) {
            (ReplyTo::Record(reply), Answer::Done) => drop(reply.send(Ok((*state.record).clone()))),
            (ReplyTo::Record(reply), Answer::Failed(error)) => drop(reply.send(Err(error))),
            (ReplyTo::Container(reply), Answer::Container(record)) => {
                drop(reply.send(Ok(Arc::unwrap_or_clone(record))))
            }
            (ReplyTo::Container(reply), Answer::Failed(error)) => drop(reply.send(Err(error))),
            (ReplyTo::Copy(reply), Answer::Copied(saved)) => {
                let (record, containers) = ((*state.record).clone(), state.containers.clone());
                drop(reply.send(Ok(VmCopy { record, containers, saved: *saved })));
            }
            (ReplyTo::Copy(reply), Answer::Failed(error)) => drop(reply.send(Err(error))),
            (caller, answer) => {
                tracing::error!(vm = %state.record.id, ?caller, ?answer, "answer of another kind than the request");
            }
        }
    }

    fn release_resources(&mut self, state: &State, vmm_left: bool) {
        self.is_vmm_left = vmm_left;
        self.shared.node.network.release(&state.record.id);
        if !vmm_left {
            self.shared.claims.release_all(&state.record.id);
        }
        if let Some(gone) = self.gone.take() {
            gone();
        }
    }

    fn reports_of(&self, state: &State) -> Reports {
        Reports { run: state.run, inputs: self.reports.clone(), sessions: self.sessions.clone() }
    }
}

fn abort(job: &mut Option<AbortHandle>) {
    if let Some(job) = job.take() {
        job.abort();
    }
}

/// Abilities of the VM's driver, which do not change while the daemon runs.
fn abilities(shared: &Shared, record: &Record) -> Abilities {
    let can_save = shared.node.driver.snapshots(&known_vmm_config(shared, record)).is_some();
    Abilities { driver: shared.node.driver_name(&record.driver), can_save }
}
