//! The task of one pod: observe, plan, execute, report, until nothing is left of the pod.
//!
//! Steps are jobs: the task waits only for their ends, for changes, and for timers. So a pull does not delay a deletion, and an
//! unavailable API server delays nothing.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use coracle_types::Clock;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::events::{self, PodEvent};
use crate::execute::{Peers, execute, now};
use crate::node::NodeFacts;
use crate::objects::Objects;
use crate::observed::{Memory, Observed, PodFailure, RuntimeState};
use crate::outcome::{Effect, forget_removed_containers, record_result};
use crate::plan::{Plan, plan};
use crate::probe::prober::Network;
use crate::probe::{self, ProbeTiming};
use crate::runtime::{PodObject, PodRuntime, RuntimeError};
use crate::step::{Step, Target};

/// Limit of a call to the API server.
const API_LIMIT: Duration = Duration::from_secs(30);
/// Limit of an observation.
const OBSERVE_LIMIT: Duration = Duration::from_secs(30);
/// Delay after a failed observation or a failed call to the API server.
const RETRY: Duration = Duration::from_secs(5);
/// Delay before a non-urgent status change is reported, so that further changes join it.
const REPORT_DELAY: Duration = Duration::from_secs(1);
/// Interval after which the pod is observed again without a change.
const RESYNC: Duration = Duration::from_secs(60);

/// Input from the frontend. A new value is planned for at once.
#[derive(Clone, Debug)]
pub struct PodInput {
    /// Pod object, as it was read last.
    pub pod: Arc<Pod>,
    /// Objects that the pod refers to.
    pub objects: Arc<Objects>,
    /// Node of the pod.
    pub node: Arc<NodeFacts>,
    /// Decision of the node against the pod.
    pub failure: Option<PodFailure>,
    /// The object vanished: end everything at once.
    pub forced: bool,
}

/// Peers of a pod's task.
#[derive(Clone)]
pub struct PodPeers {
    /// VM and containers of the pod.
    pub runtime: Arc<dyn PodRuntime>,
    /// Object at the API server.
    pub object: Arc<dyn PodObject>,
    /// Network of the node.
    pub network: Arc<dyn Network>,
    /// The wall clock.
    pub clock: Clock,
}

/// Reason why the task of a pod ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The VM and files of the pod are gone, and its object is removed.
    Removed,
    /// The task was stopped, or its frontend is gone. The pod keeps running.
    Stopped,
}

/// Result of a job.
enum JobEnd {
    Step {
        serial: u64,
        step: Arc<Step>,
        result: Result<Effect, RuntimeError>,
    },
    Reported {
        status: Arc<PodStatus>,
        result: Result<(), RuntimeError>,
    },
    Removed(Result<(), RuntimeError>),
    /// The delay after a failed call to the API server is over.
    ApiRested,
}

/// Step under way.
struct Running {
    target: Target,
    /// Serial number of the step.
    serial: u64,
    job: AbortHandle,
}

struct Task {
    peers: PodPeers,
    memory: Memory,
    reported: Arc<PodStatus>,
    /// Status from the last plan.
    status: Arc<PodStatus>,
    /// Whether this task has reported a status.
    has_reported: bool,
    /// Time since which the status differs from the reported one.
    differs_since: Option<Instant>,
    jobs: JoinSet<JobEnd>,
    /// Jobs of steps, one for each target. A list, because there are few jobs, and most of the time none.
    running: Vec<Running>,
    serial: u64,
    /// A call to the API server is under way, or its retry delay runs.
    api_busy: bool,
    /// Events of the last plan. An event is sent when it appears.
    shown: BTreeSet<PodEvent>,
    removed: bool,
}

/// Runs a pod until nothing of it is left, or until `stop`. The caller joins the task. Cancel-safe: a later run continues from
/// the existing VM and containers.
pub async fn run(peers: PodPeers, mut input: watch::Receiver<PodInput>, stop: CancellationToken) -> Ended {
    let reported = Arc::new(input.borrow().pod.status.clone().unwrap_or_default());
    let mut task = Task {
        peers,
        memory: Memory::default(),
        status: reported.clone(),
        reported,
        has_reported: false,
        differs_since: None,
        jobs: JoinSet::new(),
        running: Vec::new(),
        serial: 0,
        api_busy: false,
        shown: BTreeSet::new(),
        removed: false,
    };
    let ended = task.until_end(&mut input, &stop).await;
    task.jobs.shutdown().await;
    ended
}

impl Task {
    async fn until_end(&mut self, input: &mut watch::Receiver<PodInput>, stop: &CancellationToken) -> Ended {
        loop {
            let seen = input.borrow_and_update().clone();
            let wait = match self.observe().await {
                Ok(runtime) => {
                    forget_removed_containers(&mut self.memory, &runtime);
                    let Plan { steps, events, status, requeue, finished } = self.plan(&seen, &runtime);
                    if *self.status != status {
                        self.status = Arc::new(status);
                    }
                    self.peers.object.observe(&self.status);
                    let requeue = requeue.unwrap_or(RESYNC).min(RESYNC);
                    if self.follow(&seen, steps, events, finished) {
                        return Ended::Removed;
                    }
                    let report = self.differs_since.map(|since| REPORT_DELAY.saturating_sub(since.elapsed()));
                    requeue.min(report.unwrap_or(RESYNC))
                }
                Err(error) => {
                    tracing::warn!(%error, "observe pod failed");
                    RETRY
                }
            };
            let runtime = Arc::clone(&self.peers.runtime);
            tokio::select! {
                () = stop.cancelled() => return Ended::Stopped,
                changed = input.changed() => if changed.is_err() { return Ended::Stopped },
                Some(end) = self.jobs.join_next(), if !self.jobs.is_empty() => {
                    if let Ok(end) = end {
                        self.job_ended(&seen, end);
                    }
                }
                () = runtime.changed() => {}
                () = sleep(wait) => {}
            }
            if self.removed {
                return Ended::Removed;
            }
        }
    }

    async fn observe(&self) -> Result<RuntimeState, RuntimeError> {
        let limit = || RuntimeError::other(format!("no answer within {} s", OBSERVE_LIMIT.as_secs()));
        timeout(OBSERVE_LIMIT, self.peers.runtime.observe()).await.unwrap_or_else(|_| Err(limit()))
    }

    fn observed<'a>(&'a self, input: &'a PodInput, runtime: &'a RuntimeState) -> Observed<'a> {
        Observed {
            pod: &input.pod,
            node: &input.node,
            objects: &input.objects,
            runtime,
            memory: &self.memory,
            reported: &self.reported,
            failure: input.failure.as_ref(),
            forced: input.forced,
            now: now(&self.peers.clock),
        }
    }

    fn plan(&self, input: &PodInput, runtime: &RuntimeState) -> Plan {
        plan(&self.observed(input, runtime))
    }

    /// Starts the steps of a plan, and sends its events and status. Returns true when nothing is left to do for a vanished pod.
    fn follow(&mut self, input: &PodInput, steps: Vec<Step>, events: Vec<PodEvent>, finished: bool) -> bool {
        let events: BTreeSet<_> = events.into_iter().collect();
        for event in events.difference(&self.shown) {
            self.peers.object.event(event.clone());
        }
        self.shown = events;
        for step in steps {
            self.begin(step);
        }
        if input.forced {
            self.differs_since = None;
            return finished;
        }
        if !self.api_busy {
            if self.status == self.reported {
                self.differs_since = None;
                if finished {
                    self.remove();
                }
            } else if self.is_due(input) {
                self.report();
            }
        }
        false
    }

    /// Returns whether a changed status is reported now. The first status of a task, a change of readiness and the end of the
    /// pod are urgent. The rest is delayed, so that the start of a pod takes a few writes and not one for each container.
    fn is_due(&mut self, input: &PodInput) -> bool {
        let status = &self.status;
        let since = *self.differs_since.get_or_insert_with(Instant::now);
        let ends = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"))
            || input.pod.metadata.deletion_timestamp.is_some();
        let urgent = !self.has_reported || ends || is_ready(status) != is_ready(&self.reported);
        urgent || since.elapsed() >= REPORT_DELAY
    }

    /// Starts a step and cuts off a step with the same target.
    fn begin(&mut self, step: Step) {
        let target = step.target();
        if let Some(earlier) = self.running.iter().position(|one| one.target == target) {
            self.running.swap_remove(earlier).job.abort();
            self.memory.busy.remove(&target);
        }
        if matches!(step, Step::Cancel(_)) {
            return;
        }
        if let Some(event) = events::start_event(&step) {
            self.peers.object.event(event);
        }
        tracing::debug!(step = step.verb(), container = step.container(), "begin step");
        self.serial += 1;
        let (serial, peers, step) = (self.serial, self.peers.clone(), Arc::new(step));
        self.memory.busy.insert(target.clone(), step.clone());
        let job = async move {
            let used = Peers {
                runtime: &*peers.runtime,
                object: &*peers.object,
                network: &*peers.network,
                clock: &peers.clock,
            };
            let result = execute(&used, &step).await;
            JobEnd::Step { serial, step, result }
        };
        let job = self.jobs.spawn(job);
        self.running.push(Running { target, serial, job });
    }

    fn report(&mut self) {
        (self.api_busy, self.has_reported, self.differs_since) = (true, true, None);
        let (object, status) = (Arc::clone(&self.peers.object), self.status.clone());
        self.jobs.spawn(async move {
            let result = call_with_timeout(object.report(&status)).await;
            JobEnd::Reported { status, result }
        });
    }

    fn remove(&mut self) {
        self.api_busy = true;
        let object = Arc::clone(&self.peers.object);
        self.jobs.spawn(async move { JobEnd::Removed(call_with_timeout(object.remove()).await) });
    }

    fn job_ended(&mut self, input: &PodInput, end: JobEnd) {
        match end {
            JobEnd::Step { serial, step, result } => self.step_ended(input, serial, &step, result),
            JobEnd::Reported { status, result } => match result {
                Ok(()) => {
                    self.api_busy = false;
                    self.reported = status;
                }
                Err(error) => self.rest_api("report status", &error),
            },
            JobEnd::Removed(result) => match result {
                Ok(()) => self.removed = true,
                Err(error) => self.rest_api("remove pod", &error),
            },
            JobEnd::ApiRested => self.api_busy = false,
        }
    }

    fn rest_api(&mut self, operation: &'static str, error: &RuntimeError) {
        tracing::warn!(operation, %error, "call to the API server failed");
        self.jobs.spawn(async {
            sleep(RETRY).await;
            JobEnd::ApiRested
        });
    }

    fn step_ended(
        &mut self,
        input: &PodInput,
        serial: u64,
        step: &Step,
        result: Result<Effect, RuntimeError>,
    ) {
        // The result of a replaced step is ignored, even if it ended before it could be cut off.
        let Some(own) = self.running.iter().position(|one| one.serial == serial) else { return };
        self.running.swap_remove(own);
        if let Err(error) = &result {
            tracing::warn!(step = step.verb(), container = step.container(), %error, "step of pod failed");
        }
        if let (Step::Probe { name, kind, .. }, Ok(Effect::Checked(outcome))) = (step, &result) {
            self.peers.object.probed(name, *kind, outcome);
        }
        let timing = timing_of(input, step);
        if let Some(event) = record_result(&mut self.memory, step, result, timing, now(&self.peers.clock)) {
            self.peers.object.event(event);
        }
    }
}

fn is_ready(status: &PodStatus) -> bool {
    status.conditions.iter().flatten().any(|one| one.type_ == "Ready" && one.status == "True")
}

/// Returns the timing of the probe that a step belongs to.
fn timing_of(input: &PodInput, step: &Step) -> Option<ProbeTiming> {
    let Step::Probe { name, kind, .. } = step else { return None };
    let all = crate::declared::declared(&input.pod);
    let one = all.iter().find(|one| one.name() == name)?;
    kind.of(&one.container).map(probe::timing)
}

async fn call_with_timeout(call: impl Future<Output = Result<(), RuntimeError>>) -> Result<(), RuntimeError> {
    let limit = || RuntimeError::other(format!("no answer within {} s", API_LIMIT.as_secs()));
    timeout(API_LIMIT, call).await.unwrap_or_else(|_| Err(limit()))
}
