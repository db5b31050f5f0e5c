//! Simulated world of a VM: jobs succeed, in order, unless a test says otherwise.

mod cuts;
mod tables;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use coracle_hypervisor::{Accelerator, Compatibility, ProcessId};
use coracle_record::{
    ContainerRecord, ContainerRecords, ContainerSpec, ContainerState, Record, Sandbox, SavedMemory, example,
};
use coracle_types::{InstanceId, Op, UnixMillis, VmState};
use tokio::time::Instant;

use super::*;
use crate::container_request::{ContainerImage, ContainerRequest};
use crate::volume::{VolumeRequest, VolumeSource, inspect_source};
use crate::{ContainerId, HostConfig};

/// Scenario: a VM and a request to it.
struct Scenario {
    why: &'static str,
    state: VmState,
    call: fn() -> Call,
}

/// Returns every request that is carried out by jobs, and the adoption after a restart of the daemon.
fn scenarios() -> Vec<Scenario> {
    use VmState::{Created, Hibernated, Paused, Running, Stopped};
    let suspend = |why, state, call| Scenario { why, state, call };
    vec![
        Scenario { why: "start", state: Stopped, call: || Call::Start { fence: None } },
        Scenario { why: "load memory", state: Hibernated, call: || Call::Start { fence: None } },
        Scenario { why: "stop", state: Running, call: || stop(30) },
        Scenario { why: "stop at once", state: Running, call: || stop(0) },
        Scenario { why: "stop a paused guest", state: Paused, call: || stop(30) },
        Scenario { why: "stop what never ran", state: Created, call: || stop(0) },
        Scenario { why: "delete", state: Stopped, call: || delete(false) },
        Scenario { why: "delete by force", state: Running, call: || delete(true) },
        suspend("pause", Running, || Call::Suspend { op: Op::Pause, fence: None }),
        suspend("resume", Paused, || Call::Suspend { op: Op::Resume, fence: None }),
        suspend("hibernate", Running, || Call::Suspend { op: Op::Hibernate, fence: None }),
        Scenario { why: "copy", state: Running, call: || Call::Snapshot { dir: "/copy".into() } },
        Scenario { why: "copy at rest", state: Hibernated, call: || Call::Snapshot { dir: "/copy".into() } },
        Scenario { why: "attach", state: Running, call: attach },
        Scenario { why: "attach at rest", state: Stopped, call: attach },
        Scenario {
            why: "detach",
            state: Running,
            call: || Call::Detach { volume: "held".to_owned(), fence: None },
        },
        Scenario { why: "make a container", state: Running, call: make_container },
        Scenario {
            why: "start a container",
            state: Running,
            call: || container(ContainerRequest::Start { id: id("new") }),
        },
        Scenario {
            why: "stop a container",
            state: Running,
            call: || container(ContainerRequest::Stop { id: id("main"), grace: Duration::ZERO }),
        },
        Scenario {
            why: "remove a container",
            state: Running,
            call: || container(ContainerRequest::Remove { id: id("new") }),
        },
    ]
}

fn stop(seconds: u64) -> Call {
    Call::Stop { grace: Duration::from_secs(seconds), fence: None }
}

fn delete(force: bool) -> Call {
    Call::Delete { force, fence: None }
}

fn container(request: ContainerRequest) -> Call {
    Call::Container(request)
}

fn make_container() -> Call {
    let spec = Box::new(ContainerSpec::default());
    let image = ContainerImage { digest: "sha256:b".to_owned(), rootfs: "/b.erofs".into() };
    container(ContainerRequest::Create { id: id("third"), spec, image, mounted: vec![] })
}

fn attach() -> Call {
    let (request, found) = disk("more");
    Call::Attach { request, found, fence: None }
}

fn id(text: &str) -> ContainerId {
    text.parse().unwrap()
}

/// Returns a disk on the node, as requested by a caller and as inspected.
fn disk(name: &str) -> (VolumeRequest, VolumeSource) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, [0; 4096]).unwrap();
    let source = path.to_str().unwrap().to_owned();
    let request =
        VolumeRequest { name: name.to_owned(), source, local_user: Some(0), ..VolumeRequest::default() };
    let config = HostConfig::new("/state".into(), PathBuf::new(), PathBuf::new());
    let found = inspect_source(&config, &VolumeRequest { local_user: Some(owner()), ..request.clone() });
    (request, found.unwrap())
}

fn owner() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn vmm() -> RunningVmm {
    RunningVmm {
        instance: InstanceId::new("web", 1),
        process: ProcessId { pid: 7, start_ticks: 7 },
        accelerator: Accelerator::Tcg,
    }
}

fn booted() -> RunEvent {
    let (session, identity, workload) = (Some(SessionId(9)), Duration::ZERO, Duration::ZERO);
    RunEvent::Booted(Ok(Up { session, identity, workload }))
}

fn saved() -> SavedMemory {
    let machine = Compatibility::default();
    let (saved_at, agent) = (UnixMillis(0), String::new());
    SavedMemory { machine, bytes: 1, saved_at, of: None, same_identity: false, agent }
}

/// Returns a VM in this state, with a volume and two containers.
fn vm(state: VmState) -> (Record, ContainerRecords) {
    let mut record = example("web", state);
    record.sandbox = Some(Sandbox::default());
    record.saved = (state == VmState::Hibernated).then(saved);
    let (request, found) = disk("held");
    let mut volume = crate::volume::plan_volume(&[], &[], &request, &found).unwrap();
    volume.read_only = true;
    record.volumes.push(volume);
    if state.has_vmm() {
        (record.instance, record.process) = (Some(vmm().instance), Some(vmm().process));
    }
    let mut containers = BTreeMap::new();
    for (name, state) in [("main", ContainerState::Running), ("new", ContainerState::Created)] {
        let mut one =
            ContainerRecord::new(id(name), ContainerSpec::default(), "sha256:a".to_owned(), UnixMillis(0));
        one.state = state;
        containers.insert(id(name), Arc::new(one));
    }
    if state.has_vmm() {
        let (digest, rootfs) = ("sha256:a".to_owned(), "/a.erofs".into());
        record.images.push(coracle_record::AttachedImage { digest, rootfs, slot: 1 });
    }
    (record, containers)
}

/// VM with its environment.
struct World {
    state: Option<State>,
    began: Instant,
    /// Next inputs.
    queue: VecDeque<Input>,
    /// Effects in short form, since the last check.
    log: Vec<String>,
    /// Answers to each caller.
    answers: BTreeMap<Ticket, Vec<String>>,
    callers: u64,
    /// Record on disk.
    record: Record,
    containers: ContainerRecords,
    /// Latest write of each container; an earlier write does not overwrite it.
    written: BTreeMap<ContainerId, WriteId>,
    is_erased: bool,
    has_vmm: bool,
    /// Whether the guest has rebooted by itself, so that its agent has lost its state.
    rebooted: bool,
    /// Running jobs, with their remaining actions.
    running: BTreeMap<JobId, (Scope, Vec<Action>)>,
}

impl World {
    fn is_without_agent(&self) -> bool {
        self.record.disk_image_vm.as_ref().is_some_and(|settings| settings.without_agent)
    }

    /// Opens the world like a start of the daemon.
    fn open(record: Record, containers: ContainerRecords, has_vmm: bool) -> Self {
        let abilities = Abilities { driver: "fake", can_save: true };
        let began = Instant::now();
        let mut world = Self {
            state: Some(State::new(record.clone(), containers.clone(), abilities, began)),
            began,
            queue: VecDeque::new(),
            log: vec![],
            answers: BTreeMap::new(),
            callers: 0,
            record,
            containers,
            written: BTreeMap::new(),
            is_erased: false,
            has_vmm,
            rebooted: false,
            running: BTreeMap::new(),
        };
        world.feed(Input::Begin);
        world
    }

    /// Returns an idle VM in this state.
    fn of(state: VmState) -> Self {
        let (record, containers) = vm(state);
        let mut world = Self::open(record, containers, state.has_vmm());
        world.settle();
        assert_eq!(world.state().record.state, state);
        world.log.clear();
        world
    }

    fn state(&self) -> &State {
        self.state.as_ref().unwrap()
    }

    fn call(&mut self, call: Call) -> Ticket {
        self.callers += 1;
        let ticket = Ticket(self.callers);
        self.feed(Input::Call(ticket, call));
        ticket
    }

    fn feed(&mut self, input: Input) {
        if let Input::Done(job, result) = &input {
            let (_, actions) = self.running.remove(job).unwrap_or((Scope::Vm, vec![]));
            let done = result.as_ref().map_or_else(|failure| failure.done, |_| actions.len());
            actions.iter().take(done).for_each(|action| self.apply_action(action));
        }
        let now = Now { at: self.began + Duration::from_secs(1), time: UnixMillis(1000) };
        let (state, effects) = step(self.state.take().unwrap(), input, now);
        self.state = Some(state);
        for effect in effects {
            self.note(effect);
        }
    }

    /// Applies an action that was carried out.
    fn apply_action(&mut self, action: &Action) {
        match action {
            Action::Try(action) | Action::Within(_, action) => self.apply_action(action),
            Action::SaveRecord(_, record) => self.record = (**record).clone(),
            Action::SaveContainer(write, record) if self.is_latest(&record.id, *write) => {
                self.containers.insert(record.id.clone(), record.clone());
            }
            Action::RemoveContainerFiles(write, id) if self.is_latest(id, *write) => {
                self.containers.remove(id);
            }
            Action::EndVmm => self.has_vmm = false,
            Action::Erase => self.is_erased = true,
            _ => {}
        }
    }

    fn is_latest(&mut self, id: &ContainerId, write: WriteId) -> bool {
        let is_latest = self.written.get(id).is_none_or(|latest| *latest <= write);
        if is_latest {
            self.written.insert(id.clone(), write);
        }
        is_latest
    }

    fn note(&mut self, effect: Effect) {
        self.log.push(verb(&effect));
        let run = self.state().run;
        match effect {
            Effect::Job(id, scope, actions) => {
                let outcome = actions.last().map_or(JobOutcome::Done, |action| self.outcome(action));
                self.running.insert(id, (scope, actions));
                self.queue.push_back(Input::Done(id, Ok(outcome)));
            }
            Effect::Cancel(job) => {
                self.running.remove(&job);
                self.queue.retain(|input| !matches!(input, Input::Done(id, _) if *id == job));
            }
            Effect::Boot => {
                self.has_vmm = true;
                match self.state().record.saved {
                    Some(_) => self.queue.push_back(Input::Run(run, RunEvent::Loaded(vmm()))),
                    None => {
                        let spawned = RunEvent::Spawned(vmm(), StartedFrom::default());
                        let mut up = booted();
                        if let RunEvent::Booted(Ok(up)) = &mut up {
                            up.session = up.session.filter(|_| !self.is_without_agent());
                        }
                        self.queue.extend([spawned, up].map(|event| Input::Run(run, event)));
                    }
                }
            }
            Effect::ResumeRestored => self.queue.push_back(Input::Run(run, booted())),
            Effect::Follow(None) if self.is_without_agent() => {}
            Effect::Follow(session) => {
                let session = session.unwrap_or(SessionId(run + 20));
                self.queue.push_back(Input::Run(run, RunEvent::Session(Some(session))));
            }
            Effect::Answer(ticket, answer) => {
                let text = match &answer {
                    Answer::Failed(error) => error.chain(),
                    _ => "ok".to_owned(),
                };
                self.answers.entry(ticket).or_default().push(text);
            }
            _ => {}
        }
    }

    fn outcome(&self, last: &Action) -> JobOutcome {
        match last {
            Action::Find => JobOutcome::Found(self.has_vmm.then(vmm)),
            Action::AskAgentVersion => JobOutcome::Agent("1".to_owned()),
            Action::InspectSystem => {
                let knows = !self.rebooted;
                JobOutcome::System { configured: knows, has_command: knows, output_end: 42 }
            }
            Action::SaveMemory(_) => JobOutcome::Saved(Box::new(saved())),
            Action::CreateContainer(_) => JobOutcome::User(None),
            Action::StartContainer(_) => JobOutcome::NotRun(None),
            Action::ListContainers => {
                let listed =
                    self.state().containers.values().map(|one| coracle_proto::guest::ContainerStatus {
                        id: one.id.to_string(),
                        state: match one.state {
                            ContainerState::Created => coracle_proto::guest::WorkloadState::NotStarted.into(),
                            ContainerState::Running => coracle_proto::guest::WorkloadState::Running.into(),
                            ContainerState::Exited => coracle_proto::guest::WorkloadState::Exited.into(),
                        },
                        ..Default::default()
                    });
                JobOutcome::Containers(listed.collect())
            }
            _ => JobOutcome::Done,
        }
    }

    /// Handles the next input; returns false when there is none.
    fn next(&mut self) -> bool {
        let Some(input) = self.queue.pop_front() else { return false };
        if !self.state().is_gone {
            self.feed(input);
        }
        true
    }

    /// Handles inputs until there is none.
    fn settle(&mut self) {
        for _ in 0..200 {
            if !self.next() {
                return;
            }
        }
        panic!("it never comes to rest: {:?}", self.log);
    }

    /// Drops all pending reports; only jobs that begin from now on report.
    fn freeze(&mut self) {
        self.queue.clear();
    }

    /// Like [`World::freeze`], but files of the node can be written, and the end of a VMM has a time limit.
    fn freeze_run(&mut self) {
        let running = &self.running;
        let of_vm = |job: &JobId| running.get(job).is_some_and(|(scope, _)| *scope == Scope::Vm);
        self.queue.retain(|input| matches!(input, Input::Done(job, _) if of_vm(job)));
    }

    /// Asserts the properties of every idle VM.
    fn assert_at_rest(&self, why: &str) {
        let state = self.state();
        let waiting: Vec<_> =
            (1..=self.callers).map(Ticket).filter(|t| !self.answers.contains_key(t)).collect();
        let stoppers = state.container_stoppers.values().flatten();
        let known: Vec<_> = state.starters.iter().chain(&state.stoppers).chain(stoppers).collect();
        assert!(waiting.iter().all(|ticket| known.contains(&ticket)), "{why}: {waiting:?} wait in vain");
        for (ticket, answers) in &self.answers {
            assert_eq!(answers.len(), 1, "{why}: {ticket:?} heard {answers:?}");
        }
        assert_eq!(state.busy, None, "{why}: {:?}", state.under_way());
        assert!(state.waiting.is_empty(), "{why}");
        if !state.is_gone && !state.unsaved {
            assert_eq!(self.record.state, state.record.state, "{why}: the record says what is");
        }
    }
}

/// Returns the error of a full disk.
fn no_space() -> HostError {
    let source = io::Error::from_raw_os_error(28);
    HostError::Files { operation: "write the record", id: example("web", VmState::Stopped).id, source }
}

/// Returns the error of a reached time limit.
fn time_limit_error() -> HostError {
    let source = io::ErrorKind::TimedOut.into();
    HostError::Files { operation: "end the VMM", id: example("web", VmState::Stopped).id, source }
}

/// Returns an effect in a word or two.
fn verb(effect: &Effect) -> String {
    match effect {
        Effect::Job(_, _, actions) => actions.iter().map(action).collect::<Vec<_>>().join("+"),
        Effect::Answer(_, Answer::Failed(_)) => "refuse".to_owned(),
        Effect::Answer(..) => "answer".to_owned(),
        Effect::Publish(kind) => format!("{kind:?}").to_lowercase(),
        effect => {
            let text = format!("{effect:?}");
            text.split(['(', ' ']).next().unwrap_or_default().to_owned()
        }
    }
}

fn action(action: &Action) -> String {
    match action {
        Action::Try(inner) => format!("try {}", self::action(inner)),
        Action::Within(_, inner) => self::action(inner),
        Action::SaveRecord(_, record) => record.state.to_string(),
        Action::SaveContainer(_, record) => format!("{} {:?}", record.id, record.state),
        action => {
            let text = format!("{action:?}");
            text.split(['(', ' ']).next().unwrap_or_default().to_owned()
        }
    }
}
