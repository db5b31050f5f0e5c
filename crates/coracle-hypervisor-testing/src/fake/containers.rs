//! Containers of a fake guest. `echo TEXT` prints and exits with 0, `exit CODE` exits, `leave TEXT` exits with 1 and that text
//! as its termination message, `oom` is killed by the OOM killer, `missing` cannot run; any other command runs until it is
//! stopped.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use coracle_proto::guest as pb;
use coracle_proto::guest::WorkloadState;
use coracle_proto::guest::guest_frame::Message;
use coracle_proto::guest::host_frame::Message as HostMessage;
use futures_util::stream::BoxStream;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::hostile::{AttackTraffic, Hostility};

/// Interval between reports of statistics.
const STATISTICS_PERIOD: Duration = Duration::from_secs(10);

/// Container without a process.
#[derive(Clone, Debug, PartialEq)]
struct Container {
    request: pb::CreateContainerRequest,
    state: WorkloadState,
    output: Vec<u8>,
    exit: Option<pb::ContainerExited>,
}

/// Containers of a guest, by id.
#[derive(Clone, Debug)]
pub(super) struct Containers(watch::Sender<BTreeMap<String, Container>>, Arc<AttackTraffic>);

impl Default for Containers {
    fn default() -> Self {
        Self(watch::Sender::new(BTreeMap::new()), Arc::default())
    }
}

impl Containers {
    /// Returns what hostile containers have done to the host.
    pub(super) fn attack_traffic(&self) -> &AttackTraffic {
        &self.1
    }

    /// Waits while a container freezes the guest.
    pub(super) async fn wait_thawed(&self) {
        let mut all = self.0.subscribe();
        let freezes = |all: &BTreeMap<String, Container>| {
            all.values().any(|one| one.hostility() == Some(Hostility::Freeze))
        };
        let _gone = all.wait_for(|all| !freezes(all)).await;
    }

    pub(super) fn create(&self, request: pb::CreateContainerRequest) -> Result<(), Status> {
        if request.id.is_empty() || request.process.as_ref().is_none_or(|p| p.argv.is_empty()) {
            return Err(Status::invalid_argument("a container needs an id and a command"));
        }
        let known = self.0.borrow().get(&request.id).map(|known| known.request == request);
        match known {
            Some(true) => return Ok(()),
            Some(false) => return Err(Status::failed_precondition("another container has this id")),
            None => {}
        }
        let (id, output) = (request.id.clone(), vec![]);
        let made = Container { request, state: WorkloadState::NotStarted, output, exit: None };
        self.0.send_modify(|all| {
            all.insert(id, made);
        });
        Ok(())
    }

    pub(super) fn start(&self, id: &str) -> Result<pb::StartContainerResponse, Status> {
        self.change(id, |container| {
            if container.state != WorkloadState::NotStarted {
                return;
            }
            container.state = WorkloadState::Running;
            let argv = container.request.process.clone().unwrap_or_default().argv;
            match argv.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
                ["echo", words @ ..] => {
                    container.output = format!("{}\n", words.join(" ")).into_bytes();
                    container.end(0, false);
                }
                ["missing"] => {
                    container.end(127, false);
                    let exit = container.exit.as_mut().and_then(|exited| exited.exit.as_mut());
                    exit.into_iter().for_each(|exit| exit.error = "missing: not found".to_owned());
                }
                [.., pb::WARM_UP] => container.end(0, false),
                ["exit", code] => container.end(code.parse().unwrap_or(255), false),
                ["leave", text] => {
                    container.end(1, false);
                    let has_file = !container.request.termination_message_path.is_empty();
                    for exited in container.exit.iter_mut().filter(|_| has_file) {
                        exited.termination_message = text.as_bytes().to_vec();
                    }
                }
                ["oom"] => container.end(137, true),
                _ => {}
            }
        })?;
        let exit = self.change(id, |container| container.exit.clone())?.and_then(|exited| exited.exit);
        let exit = exit.filter(|exit| !exit.error.is_empty());
        Ok(pb::StartContainerResponse { pid: u32::from(self.is_running(id)) * 2, exit })
    }

    pub(super) fn stop(&self, id: &str) -> Result<pb::ExitStatus, Status> {
        let ended = self.change(id, |container| {
            if container.state == WorkloadState::Running {
                container.end(143, false);
            }
            container.exit.clone()
        })?;
        let exit = ended.and_then(|exited| exited.exit);
        exit.ok_or_else(|| Status::failed_precondition(format!("container {id} was not started")))
    }

    pub(super) fn kill(&self, id: &str, signal: i32) -> Result<(), Status> {
        let killed = self.change(id, |container| {
            let runs = container.state == WorkloadState::Running;
            if runs {
                container.end(signal.saturating_add(128), false);
            }
            runs
        })?;
        if killed {
            Ok(())
        } else {
            Err(Status::failed_precondition(format!("container {id} is not running")))
        }
    }

    pub(super) fn remove(&self, id: &str) {
        self.0.send_modify(|all| {
            all.remove(id);
        });
    }

    pub(super) fn update(&self, id: &str) -> Result<(), Status> {
        self.change(id, |_| ())
    }

    pub(super) fn list(&self) -> Vec<pb::ContainerStatus> {
        let status = |(id, container): (&String, &Container)| pb::ContainerStatus {
            id: id.clone(),
            state: container.state.into(),
            pid: u32::from(container.state == WorkloadState::Running) * 2,
            exit: container.exit.clone(),
        };
        self.0.borrow().iter().map(status).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    pub(super) fn is_running(&self, id: &str) -> bool {
        self.0.borrow().get(id).is_some_and(|container| container.state == WorkloadState::Running)
    }

    pub(super) async fn session(
        &self,
        mut input: Streaming<pb::HostFrame>,
    ) -> Result<BoxStream<'static, Result<pb::GuestFrame, Status>>, Status> {
        let first = input.message().await?.and_then(|frame| frame.message);
        let Some(HostMessage::Resume(resume)) = first else {
            return Err(Status::invalid_argument("the first message is not `resume`"));
        };
        let (frames, stream) = mpsc::channel(8);
        let (all, attack_traffic) = (self.0.subscribe(), self.1.clone());
        attack_traffic.sessions.fetch_add(1, Ordering::Relaxed);
        let hostile = run_attack(self.0.subscribe(), frames.clone(), attack_traffic);
        let serve = async move {
            tokio::select! {
                () = hostile => {}
                _ = async { while let Ok(Some(_)) = input.message().await {} } => {}
                () = follow(all, resume.from_offsets, &frames) => {}
                () = report(&frames) => {}
            }
        };
        #[expect(clippy::disallowed_methods, reason = "ends with the stream that it serves")]
        tokio::spawn(serve);
        Ok(Box::pin(ReceiverStream::new(stream)))
    }

    fn change<T>(&self, id: &str, change: impl FnOnce(&mut Container) -> T) -> Result<T, Status> {
        let mut changed = None;
        self.0.send_modify(|all| changed = all.get_mut(id).map(change));
        changed.ok_or_else(|| Status::not_found(format!("container {id} not found")))
    }
}

impl Container {
    /// Returns the behaviour of the guest while this container runs: `hostile WORD`.
    fn hostility(&self) -> Option<Hostility> {
        let argv = &self.request.process.as_ref()?.argv;
        let [first, word] = argv.as_slice() else { return None };
        (first == "hostile" && self.state == WorkloadState::Running).then(|| Hostility::of(word)).flatten()
    }

    fn end(&mut self, code: i32, oom_killed: bool) {
        self.state = WorkloadState::Exited;
        let exit = pb::ExitStatus { code, signal: (code - 128).max(0), ..Default::default() };
        self.exit = Some(pb::ContainerExited {
            container: self.request.id.clone(),
            exit: Some(exit),
            oom_killed,
            end_offset: self.output.len() as u64,
            time_unix_ns: 1,
            termination_message: vec![],
        });
    }
}

/// Behaves as the first hostile container says; does nothing without one.
async fn run_attack(
    mut all: watch::Receiver<BTreeMap<String, Container>>,
    frames: Frames,
    attack_traffic: Arc<AttackTraffic>,
) {
    let found = |all: &BTreeMap<String, Container>| {
        all.iter().find_map(|(id, container)| Some((id.clone(), container.hostility()?)))
    };
    let chosen = all.wait_for(|all| found(all).is_some()).await.ok().and_then(|all| found(&all));
    if let Some((id, hostility)) = chosen {
        hostility.attack(&id, &frames, &attack_traffic).await;
    }
}

pub(super) type Frames = mpsc::Sender<Result<pb::GuestFrame, Status>>;

async fn follow(
    mut all: watch::Receiver<BTreeMap<String, Container>>,
    from_offsets: BTreeMap<String, u64>,
    frames: &Frames,
) {
    let (mut started, mut ended) = (BTreeSet::new(), BTreeSet::new());
    loop {
        let now = all.borrow_and_update().clone();
        started.retain(|id| now.contains_key(id));
        ended.retain(|id| now.contains_key(id));
        for (id, container) in now {
            let mut messages = vec![];
            if container.state != WorkloadState::NotStarted && started.insert(id.clone()) {
                let running = container.state == WorkloadState::Running;
                let start = pb::ContainerStarted { container: id.clone(), pid: 2 };
                messages.extend(running.then_some(Message::Started(start)));
            }
            if let Some(exit) = container.exit.filter(|_| ended.insert(id.clone())) {
                let from = from_offsets.get(&id).copied().unwrap_or(0);
                let rest = container.output.get(usize::try_from(from).unwrap_or(usize::MAX)..);
                let data = rest.unwrap_or_default().to_vec();
                let output = pb::ContainerOutput {
                    container: id,
                    offset: from,
                    stream: pb::Stream::Stdout.into(),
                    time_unix_ns: 1,
                    data,
                };
                messages.extend((!output.data.is_empty()).then_some(Message::Output(output)));
                messages.push(Message::Exited(exit));
            }
            for message in messages {
                if send(frames, message).await.is_err() {
                    return;
                }
            }
        }
        if all.changed().await.is_err() {
            return;
        }
    }
}

async fn report(frames: &Frames) {
    loop {
        let statistics =
            pb::Statistics { sandbox: Some(pb::MetricsResponse::default()), ..Default::default() };
        if send(frames, Message::Statistics(statistics)).await.is_err() {
            return;
        }
        tokio::time::sleep(STATISTICS_PERIOD).await;
    }
}

pub(super) async fn send(frames: &Frames, message: Message) -> Result<(), ()> {
    frames.send(Ok(pb::GuestFrame { message: Some(message) })).await.map_err(drop)
}
