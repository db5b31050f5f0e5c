//! In-memory fake of the runtime and the API server for one pod, on the simulated clock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use coracle_host::PullPolicy;
use coracle_oci::Credentials;
use coracle_pod::container_spec::NewContainer;
use coracle_pod::container_spec::key;
use coracle_pod::events::PodEvent;
use coracle_pod::observed::{
    ContainerPhase, ContainerView, Exited, RuntimeState, SandboxPhase, SandboxState,
};
use coracle_pod::probe::ProbeOutcome;
use coracle_pod::probe::http::HttpRequest;
use coracle_pod::probe::prober::Network;
use coracle_pod::runtime::{ErrorKind, Exec, PodObject, PodRuntime, RuntimeError};
use coracle_pod::step::SandboxSpec;
use coracle_pod::time::{add, until};
use coracle_pod::volume::Token;
use coracle_pod::volume::{Layout, MeasuredVolume, TokenRequest, VolumeContent};
use coracle_record::ContainerId;
use coracle_testkit::elapse;
use coracle_testkit::sim::Sim;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodStatus;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

/// Behaviour of a container after its start.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Behaviour {
    /// Runs until it is stopped, and then exits with 0.
    Runs,
    /// Exits by itself.
    Exits { after: Duration, code: i32 },
    /// Runs, and ignores the stop signal.
    Stubborn,
}

#[derive(Clone, Debug)]
struct Container {
    view: ContainerView,
    behaviour: Behaviour,
    /// Time and code of the exit.
    end: Option<(Timestamp, i32)>,
}

/// State of the fake: everything that exists of the pod, and the faults that the test injects.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) sandbox: Option<SandboxState>,
    containers: BTreeMap<ContainerId, Container>,
    /// Behaviours of a container's starts, in order; the last one applies to all further starts.
    pub(crate) behaviours: BTreeMap<String, Vec<Behaviour>>,
    /// Effects in order, each with its time in seconds since the start.
    pub(crate) effects: Vec<(u64, String)>,
    /// Images that cannot be pulled.
    pub(crate) bad_images: BTreeSet<String>,
    /// Usage of volumes in bytes.
    pub(crate) held: BTreeMap<String, u64>,
    /// Ports that do not answer.
    pub(crate) down_ports: BTreeSet<u16>,
    /// Commands that fail.
    pub(crate) bad_commands: BTreeSet<String>,
    /// Files of volumes, by name of the volume.
    pub(crate) volumes: BTreeMap<String, String>,
    /// Status that the API server has.
    pub(crate) status: PodStatus,
    /// Number of statuses that were stored.
    pub(crate) reports: u64,
    /// The API server does not answer.
    pub(crate) api_down: bool,
    /// The object was removed.
    pub(crate) object_removed: bool,
    pub(crate) events: Vec<PodEvent>,
    tokens: u32,
}

/// The fake. Clones share its state.
#[derive(Clone)]
pub(crate) struct Fake {
    sim: Sim,
    began: Timestamp,
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
    /// Number of changes, for waiters.
    version: Arc<watch::Sender<u64>>,
}

impl Fake {
    pub(crate) fn new(sim: &Sim) -> Self {
        let began = Timestamp::from_millisecond(sim.clock().now().0).unwrap();
        Self {
            sim: sim.clone(),
            began,
            state: Arc::default(),
            changed: Arc::default(),
            version: Arc::new(watch::channel(0).0),
        }
    }

    pub(crate) fn now(&self) -> Timestamp {
        Timestamp::from_millisecond(self.sim.clock().now().0).unwrap()
    }

    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        let done = work(&mut self.state.lock());
        self.changed.notify_one();
        self.version.send_modify(|version| *version += 1);
        done
    }

    pub(crate) fn read<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.state.lock())
    }

    pub(crate) fn versions(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Effects without times.
    pub(crate) fn effects(&self) -> Vec<String> {
        self.state.lock().effects.iter().map(|(_, effect)| effect.clone()).collect()
    }

    /// Seconds at which an effect happened.
    pub(crate) fn seconds_of(&self, effect: &str) -> Vec<u64> {
        let state = self.state.lock();
        state.effects.iter().filter(|(_, done)| done == effect).map(|(second, _)| *second).collect()
    }

    pub(crate) fn has_event(&self, reason: &str) -> bool {
        self.state.lock().events.iter().any(|event| event.reason == reason)
    }

    /// Ends the VM unexpectedly.
    pub(crate) fn crash_vm(&self) {
        let now = self.now();
        self.with(|state| {
            state.power_off(now, 255);
            state.effects.push((0, "vm crashed".to_owned()));
        });
    }

    async fn record_effect(&self, effect: Option<String>, call: &str) {
        if let Some(effect) = effect {
            let second = until(self.began, self.now()).as_secs();
            self.with(|state| state.effects.push((second, effect)));
        }
        self.sim.after_call(call).await;
    }

    fn name_of(&self, id: &ContainerId) -> Result<String, RuntimeError> {
        let state = self.state.lock();
        let found = state.containers.get(id).map(|container| container.view.name.clone());
        found.ok_or_else(|| RuntimeError { message: "container not found".into(), kind: ErrorKind::NotFound })
    }
}

impl State {
    fn power_off(&mut self, now: Timestamp, code: i32) {
        if let Some(sandbox) = &mut self.sandbox {
            (sandbox.phase, sandbox.addresses) = (SandboxPhase::Down, vec![]);
        }
        for container in self.containers.values_mut().filter(|one| one.end.is_none_or(|(end, _)| end > now)) {
            container.end = Some((now, code));
        }
    }

    fn views(&self, now: Timestamp) -> Vec<ContainerView> {
        let view = |container: &Container| {
            let mut view = container.view.clone();
            if let Some((at, code)) = container.end.filter(|(at, _)| *at <= now) {
                let (signal, error, message) = (i32::from(code == 137) * 9, String::new(), String::new());
                view.phase =
                    ContainerPhase::Exited(Exited { at, code, signal, oom_killed: false, error, message });
            }
            view
        };
        self.containers.values().map(view).collect()
    }

    fn next_end(&self, now: Timestamp) -> Option<Timestamp> {
        self.containers.values().filter_map(|one| one.end).map(|(at, _)| at).filter(|at| *at > now).min()
    }
}

#[async_trait]
impl PodRuntime for Fake {
    async fn observe(&self) -> Result<RuntimeState, RuntimeError> {
        let (state, now) = (self.state.lock(), self.now());
        Ok(RuntimeState { sandbox: state.sandbox.clone(), containers: state.views(now) })
    }

    async fn changed(&self) {
        let next = self.state.lock().next_end(self.now());
        let end = async {
            match next {
                Some(at) => elapse(until(self.now(), at)).await, // until the container ends
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.changed.notified() => {}
            () = end => {}
        }
    }

    async fn start_sandbox(&self, _spec: &SandboxSpec) -> Result<(), RuntimeError> {
        elapse(Duration::from_millis(100)).await; // boot time
        let now = self.now();
        let started = self.with(|state| {
            let running = state.sandbox.as_ref().is_some_and(|sandbox| sandbox.phase == SandboxPhase::Ready);
            if !running {
                let addresses = vec!["10.1.0.9".parse().unwrap()];
                let (phase, started_at, message) = (SandboxPhase::Ready, Some(now), String::new());
                state.sandbox = Some(SandboxState { phase, addresses, started_at, message });
            }
            !running
        });
        self.record_effect(started.then(|| "start vm".to_owned()), "start_sandbox").await;
        Ok(())
    }

    async fn stop_sandbox(&self, _grace: Duration) -> Result<(), RuntimeError> {
        let now = self.now();
        let stopped = self.with(|state| {
            let running = state.sandbox.as_ref().is_some_and(|sandbox| sandbox.phase == SandboxPhase::Ready);
            state.power_off(now, 137);
            running
        });
        self.record_effect(stopped.then(|| "stop vm".to_owned()), "stop_sandbox").await;
        Ok(())
    }

    async fn remove_sandbox(&self) -> Result<(), RuntimeError> {
        let removed = self.with(|state| {
            state.containers.clear();
            state.volumes.clear();
            state.sandbox.take().is_some()
        });
        self.record_effect(removed.then(|| "remove vm".to_owned()), "remove_sandbox").await;
        Ok(())
    }

    async fn write_volume(&self, content: &VolumeContent) -> Result<(), RuntimeError> {
        let shown = match &content.layout {
            Layout::Directory => "directory".to_owned(),
            Layout::Files(files) => {
                let one = |(path, file): (&String, &coracle_pod::volume::FileContent)| {
                    format!("{path}={}", String::from_utf8_lossy(&file.bytes))
                };
                files.iter().map(one).collect::<Vec<_>>().join(" ")
            }
        };
        self.with(|state| state.volumes.insert(content.name.clone(), shown));
        self.record_effect(None, &format!("write_volume {}", content.name)).await;
        Ok(())
    }

    async fn measure_volumes(
        &self,
        volumes: &[MeasuredVolume],
    ) -> Result<BTreeMap<String, u64>, RuntimeError> {
        self.record_effect(None, "measure_volumes").await;
        let state = self.state.lock();
        let held = |volume: &MeasuredVolume| state.held.get(&volume.name).copied().unwrap_or_default();
        Ok(volumes.iter().map(|volume| (volume.name.clone(), held(volume))).collect())
    }

    async fn pull_image(
        &self,
        image: &str,
        _policy: PullPolicy,
        _credentials: &[Credentials],
    ) -> Result<(), RuntimeError> {
        elapse(Duration::from_millis(200)).await; // transfer time
        self.record_effect(None, &format!("pull_image {image}")).await;
        match self.state.lock().bad_images.contains(image) {
            true => Err(RuntimeError::other("manifest unknown")),
            false => Ok(()),
        }
    }

    async fn create_container(&self, id: &ContainerId, new: &NewContainer) -> Result<(), RuntimeError> {
        let (now, name) = (self.now(), new.spec.metadata[key::NAME].clone());
        let made = self.with(|state| {
            if state.containers.contains_key(id) {
                return false;
            }
            let behaviours = state.behaviours.get(&name).cloned().unwrap_or_default();
            let attempt = usize::try_from(new.spec.attempt).unwrap();
            let behaviour = behaviours.get(attempt).or(behaviours.last()).copied().unwrap_or(Behaviour::Runs);
            let view = ContainerView {
                id: id.clone(),
                name: name.clone(),
                attempt: new.spec.attempt,
                streak: new.spec.metadata[key::STREAK].parse().unwrap(),
                phase: ContainerPhase::Created,
                created_at: now,
                started_at: None,
                image: new.spec.image.clone(),
                image_id: "sha256:0".into(),
                user: None,
            };
            state.containers.insert(id.clone(), Container { view, behaviour, end: None });
            true
        });
        self.record_effect(made.then(|| format!("create {name}")), &format!("create_container {name}")).await;
        Ok(())
    }

    async fn start_container(&self, id: &ContainerId) -> Result<(), RuntimeError> {
        let (now, name) = (self.now(), self.name_of(id)?);
        let started = self.with(|state| {
            let container =
                state.containers.get_mut(id).filter(|one| one.view.phase == ContainerPhase::Created);
            let Some(container) = container else { return false };
            container.view.phase = ContainerPhase::Running;
            container.view.started_at = Some(now);
            if let Behaviour::Exits { after, code } = container.behaviour {
                container.end = Some((add(now, after), code));
            }
            true
        });
        self.record_effect(started.then(|| format!("start {name}")), &format!("start_container {name}"))
            .await;
        Ok(())
    }

    async fn stop_container(&self, id: &ContainerId, grace: Duration) -> Result<(), RuntimeError> {
        let (now, name) = (self.now(), self.name_of(id)?);
        let (end, first) = self.with(|state| {
            let container = state.containers.get_mut(id).unwrap();
            let (at, code) = match container.behaviour {
                Behaviour::Stubborn => (add(now, grace), 137),
                Behaviour::Runs | Behaviour::Exits { .. } => (add(now, Duration::from_millis(500)), 0),
            };
            let first = container.end.is_none_or(|(end, _)| end > now);
            let end = container.end.filter(|(end, _)| *end <= at).unwrap_or((at, code));
            container.end = Some(end);
            (end.0, first)
        });
        elapse(until(now, end)).await; // until its process ends
        self.record_effect(first.then(|| format!("stop {name}")), &format!("stop_container {name}")).await;
        Ok(())
    }

    async fn remove_container(&self, id: &ContainerId) -> Result<(), RuntimeError> {
        let name = self.name_of(id)?;
        let removed = self.with(|state| state.containers.remove(id).is_some());
        self.record_effect(removed.then(|| format!("remove {name}")), &format!("remove_container {name}"))
            .await;
        Ok(())
    }

    async fn exec(&self, id: &ContainerId, argv: &[String], limit: Duration) -> Result<Exec, RuntimeError> {
        let (name, command) = (self.name_of(id)?, argv.join(" "));
        if command == "hang" {
            elapse(limit).await; // the limit, at which the runtime kills it
            return Ok(Exec::TimedOut);
        }
        self.record_effect(Some(format!("exec {name}: {command}")), &format!("exec {name}")).await;
        let code = i32::from(self.state.lock().bad_commands.contains(&command));
        Ok(Exec::Exited { code, output: String::new() })
    }
}

#[async_trait]
impl PodObject for Fake {
    async fn report(&self, status: &PodStatus) -> Result<(), RuntimeError> {
        if self.state.lock().api_down {
            return Err(RuntimeError::other("connection refused"));
        }
        // The stored status must equal the written one, although the API server keeps whole seconds.
        let json = serde_json::to_value(status).unwrap();
        let stored: PodStatus = serde_json::from_value(json).unwrap();
        assert_eq!(&stored, status, "a status changes when it is stored");
        self.with(|state| (state.status, state.reports) = (stored, state.reports + 1));
        self.record_effect(None, "report").await;
        Ok(())
    }

    async fn remove(&self) -> Result<(), RuntimeError> {
        self.with(|state| {
            assert!(state.sandbox.is_none(), "the object is removed while its VM exists");
            state.object_removed = true;
        });
        self.record_effect(None, "remove").await;
        Ok(())
    }

    async fn request_token(&self, request: &TokenRequest, now: Timestamp) -> Result<Token, RuntimeError> {
        let number = self.with(|state| {
            state.tokens += 1;
            state.tokens
        });
        self.record_effect(None, "request_token").await;
        Ok(Token { value: format!("token{number}"), issued_at: now, expires_at: add(now, request.lifetime) })
    }

    fn event(&self, event: PodEvent) {
        self.with(|state| state.events.push(event));
    }
}

#[async_trait]
impl Network for Fake {
    async fn http(&self, request: &HttpRequest, _limit: Duration) -> ProbeOutcome {
        self.tcp(&request.host, request.port, Duration::ZERO).await
    }

    async fn tcp(&self, _host: &str, port: u16, _limit: Duration) -> ProbeOutcome {
        match self.state.lock().down_ports.contains(&port) {
            true => ProbeOutcome::Failure("connection refused".into()),
            false => ProbeOutcome::Success,
        }
    }

    async fn grpc(&self, host: &str, port: u16, _service: &str, limit: Duration) -> ProbeOutcome {
        self.tcp(host, port, limit).await
    }
}
