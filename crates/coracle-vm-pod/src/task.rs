//! Task of one pod: observe, plan, execute one step, report, until the pod is removed.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use coracle_api::cocoon::{LifecycleState, VmRuntimeAnnotations};
use coracle_host::Host;
use coracle_pod::ImageKeys;
use coracle_pod::host::PodId;
use coracle_pod::runtime::{PodObject, RuntimeError};
use coracle_types::{MemoryMib, VmId};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::events;
use crate::execute::{Executor, StepError};
use crate::exported::ExportedSnapshots;
use crate::facts::{Facts, Failure, ForkSource, Memory, Noted, Saved, VmFacts, VmOwner, Wanted};
use crate::metrics::{Metrics, PodOperation};
use crate::plan::{Plan, plan};
use crate::pod;
use crate::probe::{Answers, Probe};
use crate::saved::Registry;
use crate::status::{StatusInput, status};
use crate::step::{Finish, Note, Purpose, Step};
use crate::vm_pod_state::VmPodState;

/// Limit of a call to the API server.
const API_LIMIT: Duration = Duration::from_secs(10);
/// Delay after a failed call to the API server.
const API_RETRY: Duration = Duration::from_secs(3);
/// Interval after which the pod is observed again without a change.
const RESYNC: Duration = Duration::from_secs(60);
/// Number of tries to save the VM of a pod that ends.
const TRIES_MAX: u32 = 3;
/// Longest delay after a failed step.
const REST_MAX: Duration = Duration::from_secs(60);

/// Returns whether a pod with this uid is on the node.
pub type KnownPods = dyn Fn(&str) -> bool + Send + Sync;

/// Object of a pod at the API server.
#[async_trait]
pub trait VmPodObject: PodObject {
    /// Sets annotations, and removes those without a value. Idempotent; `Ok` when the object is gone.
    async fn annotate(&self, changes: BTreeMap<String, Option<String>>) -> Result<(), RuntimeError>;

    /// Takes the id of the pod's VM. Returns at once.
    fn show(&self, vm: Option<&VmId>);
}

/// Input from the frontend. A new value is planned for at once.
#[derive(Clone, Debug)]
pub struct VmPodInput {
    /// Pod object, as it was read last.
    pub pod: Arc<Pod>,
    /// The object is gone.
    pub forced: bool,
    /// The node refuses the pod, with this reason and message.
    pub refused: Option<(String, String)>,
    /// Addresses of the node.
    pub node: Vec<IpAddr>,
}

/// Peers of a pod's task.
#[derive(Clone)]
pub struct VmPodPeers {
    /// Host core of this node.
    pub host: Host,
    /// Object at the API server.
    pub object: Arc<dyn VmPodObject>,
    /// Registry for saved states; `None`: states are saved only on this node.
    pub registry: Option<Registry>,
    /// File with the leases of a DHCP server of this node.
    pub leases: Option<PathBuf>,
    /// Exported snapshots that pods may name by their directory.
    pub exported: ExportedSnapshots,
    /// Memory of a VM whose pod requests none.
    pub default_memory: MemoryMib,
    /// Pods that are on this node.
    pub known: Arc<KnownPods>,
    /// Keys that must have signed the images of the pod.
    pub image_keys: ImageKeys,
    /// Metrics of the node.
    pub metrics: Metrics,
}

/// Reason why the task of a pod ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The object was removed.
    Removed,
    /// The task was stopped. The VM keeps running.
    Stopped,
}

struct Task {
    executor: Executor,
    object: Arc<dyn VmPodObject>,
    known: Arc<KnownPods>,
    memory: Memory,
    saved: Saved,
    reported: Arc<PodStatus>,
    /// Whether the API server has the status.
    is_reported: bool,
    probed: Option<(Probe, Answers)>,
    /// Probe under way, if any.
    probing: JoinSet<bool>,
    /// Time at which a failed step may be retried.
    rests_until: Option<Instant>,
    /// Object at the last observation.
    looked_at: Option<Arc<Pod>>,
    /// Annotations of the object before the last write, and the written ones.
    written: Option<(Noted, Noted)>,
}

/// Runs a pod until its object is removed, or until `stop`. Cancel-safe: a later run continues from the existing VM.
pub async fn run(
    peers: VmPodPeers,
    id: PodId,
    mut input: watch::Receiver<VmPodInput>,
    stop: CancellationToken,
) -> Ended {
    let VmPodPeers { host, object, registry, leases, exported, default_memory, known, image_keys, metrics } =
        peers;
    let reported = Arc::new(input.borrow().pod.status.clone().unwrap_or_default());
    let first = pod::read(&input.borrow().pod, false);
    let is_new = !first.begun && first.noted == Noted::default();
    let mut task = Task {
        executor: Executor { host, pod: id, registry, leases, exported, default_memory, image_keys, metrics },
        object,
        known,
        memory: Memory { is_new, ..Memory::default() },
        saved: Saved::Unknown,
        reported,
        is_reported: true,
        probed: None,
        probing: JoinSet::new(),
        rests_until: None,
        looked_at: None,
        written: None,
    };
    loop {
        let turn = async {
            let seen = input.borrow_and_update().clone();
            task.turn(&seen, &mut input).await
        };
        match stop.run_until_cancelled(turn).await {
            None => return Ended::Stopped,
            Some(Turn::Removed) => return Ended::Removed,
            Some(Turn::Gone) => return Ended::Stopped,
            Some(Turn::Again) => {}
        }
    }
}

/// Result of one turn of the task.
enum Turn {
    Again,
    /// The object was removed.
    Removed,
    /// The frontend is gone.
    Gone,
}

impl Task {
    async fn turn(&mut self, seen: &VmPodInput, input: &mut watch::Receiver<VmPodInput>) -> Turn {
        // Subscribe before the observation, so that no change is missed.
        let mut vm_changes = self.changes_of(seen);
        // Boxed, like the futures below: the task of a waiting pod needs no memory for them.
        let facts = Box::pin(self.observe(seen)).await;
        let plan = plan(&facts);
        self.count(seen, &facts, &plan);
        Box::pin(self.report(seen, &facts, &plan.vm_pod_state)).await;
        match &plan.step {
            Some(Step::Finish(how)) => {
                self.object.event(events::finish_event(*how));
                match Box::pin(self.finish(*how)).await {
                    Ok(()) => Turn::Removed,
                    Err(error) => self.on_step_failure(&facts, &Step::Finish(*how), error),
                }
            }
            Some(step) => Box::pin(self.step(step, seen, &facts, input)).await,
            None => self.wait(&plan, &facts, input, &mut vm_changes).await,
        }
    }

    fn changes_of(&self, seen: &VmPodInput) -> Option<watch::Receiver<Arc<coracle_host::View>>> {
        let wanted = pod::read(&seen.pod, seen.forced).wanted.ok()?;
        self.executor.host.observe(wanted.vm.as_str()).ok()
    }

    async fn observe(&mut self, seen: &VmPodInput) -> Facts {
        let mut facts_of_pod = pod::read(&seen.pod, seen.forced);
        match &self.written {
            // The watch does not show the written annotations yet.
            Some((before, after)) if facts_of_pod.noted == *before => facts_of_pod.noted.clone_from(after),
            _ => self.written = None,
        }
        facts_of_pod.refused.clone_from(&seen.refused);
        let wanted = facts_of_pod.wanted.as_ref().ok();
        let vm = match wanted {
            Some(wanted) => self.executor.vm(wanted, &*self.known).await,
            None => None,
        };
        let (mut has_clone_source, mut fork) = (false, ForkSource::None);
        if let (Some(wanted), None) = (wanted, &vm) {
            has_clone_source = self.executor.has_clone_source(wanted).await;
            fork = self.executor.fork_source(wanted).await;
        }
        // A VM of another owner is not shown, because users could access it.
        let own = vm.as_ref().filter(|vm| !matches!(vm.owner, VmOwner::Other(_)));
        self.object.show(own.map(|vm| &vm.id));
        let is_answering = self.is_answering(wanted, vm.as_ref());
        if let (Some(failure), Some(until)) = (&mut self.memory.failure, self.rests_until) {
            failure.rest = until.saturating_duration_since(Instant::now());
        }
        Facts {
            pod: facts_of_pod,
            vm,
            saved: self.saved.clone(),
            has_registry: self.executor.registry.is_some(),
            has_clone_source,
            fork,
            memory: self.memory.clone(),
            is_answering,
            now: self.executor.host.clock().now(),
        }
    }

    /// Returns whether the VM answers. Without a probed port, a connected agent is sufficient.
    fn is_answering(&mut self, wanted: Option<&Wanted>, vm: Option<&VmFacts>) -> bool {
        let Some(wanted) = wanted else { return false };
        if wanted.probe_port.is_none() && vm.is_some_and(|vm| vm.has_agent) {
            return true;
        }
        let ip = match &wanted.source {
            crate::facts::Source::Static { ip, .. } => Some(*ip),
            _ => vm.and_then(|vm| vm.ips.first().copied()),
        };
        let Some(probe) = ip.and_then(|ip| Probe::of(ip, wanted.probe_port)) else { return false };
        match self.probed {
            Some((known, answers)) if known == probe => answers.is_answering,
            _ => {
                self.probing.abort_all();
                self.probed = Some((probe, Answers::default()));
                false
            }
        }
    }

    /// Updates counters after an observation: once for a missing name or an existing VM, and for changes of the object that do
    /// not concern the VM.
    fn count(&mut self, seen: &VmPodInput, facts: &Facts, plan: &Plan) {
        let metrics = &self.executor.metrics;
        let Some(before) = self.looked_at.replace(seen.pod.clone()) else {
            if facts.pod.wanted.is_err() {
                metrics.count(PodOperation::NameMissing);
            }
            let own = facts.vm.as_ref().filter(|vm| !matches!(vm.owner, VmOwner::Other(_)));
            if own.is_some() && facts.pod.noted.id.is_none() {
                metrics.count_adopted_by_name();
            }
            return;
        };
        if !pod::asks_the_same(&before, &seen.pod) && plan.step.is_none() && !facts.pod.ending {
            metrics.count(PodOperation::Unchanged);
        }
    }

    /// Publishes the status, and sends it to the API server when it differs from the reported one.
    async fn report(&mut self, seen: &VmPodInput, facts: &Facts, vm_pod_state: &VmPodState) {
        let vm = facts.vm.as_ref();
        let id = vm.map(|vm| vm.id.to_string()).unwrap_or_default();
        let input = StatusInput {
            pod: &seen.pod,
            reported: &self.reported,
            vm: &id,
            restarts: vm.map_or(0, |vm| vm.boots.saturating_sub(1)),
            node: &seen.node,
            now: facts.now,
        };
        if let Some(now) = status(&input, vm_pod_state)
            && now != *self.reported
        {
            (self.reported, self.is_reported) = (Arc::new(now), false);
            self.object.observe(&self.reported);
        }
        if self.is_reported || seen.forced {
            return;
        }
        match timeout(API_LIMIT, self.object.report(&self.reported)).await {
            Ok(Ok(())) => self.is_reported = true,
            Ok(Err(error)) => {
                tracing::warn!(pod = self.executor.pod.name, error = error.message, "report failed")
            }
            Err(_) => tracing::warn!(pod = self.executor.pod.name, "report timed out"),
        }
    }

    async fn step(
        &mut self,
        step: &Step,
        seen: &VmPodInput,
        facts: &Facts,
        input: &mut watch::Receiver<VmPodInput>,
    ) -> Turn {
        let Ok(wanted) = &facts.pod.wanted else { return Turn::Again };
        tracing::info!(pod = self.executor.pod.name, ns = self.executor.pod.namespace, vm = %wanted.vm, ?step, "step");
        let result = match step {
            Step::Note(note) => self.note(note, wanted).await.map(|()| None),
            Step::PullImage | Step::PullSnapshot | Step::Import if !facts.pod.ending => {
                let work = self.executor.run(step, &seen.pod, wanted);
                // Downloaded data is kept. A pod that ends does not wait for the rest.
                tokio::select! {
                    result = work => result,
                    turn = wait_for_end(input) => return turn,
                }
            }
            step => self.executor.run(step, &seen.pod, wanted).await,
        };
        match result {
            Ok(found) => {
                self.on_step_success(step, seen, facts, found);
                Turn::Again
            }
            Err(error) => self.on_step_failure(facts, step, error),
        }
    }

    fn on_step_success(&mut self, step: &Step, seen: &VmPodInput, facts: &Facts, found: Option<Saved>) {
        (self.memory.failure, self.rests_until) = (None, None);
        let memory = &mut self.memory;
        match step {
            Step::FindSaved => self.saved = found.unwrap_or(Saved::Unknown),
            Step::PullImage => memory.has_image = true,
            Step::Run | Step::Clone | Step::Fork => memory.is_new = false,
            Step::Hibernate | Step::Resume | Step::Start => (memory.copied, memory.pushed) = (None, None),
            Step::Copy(purpose) => (memory.copied, memory.pushed) = (Some(*purpose), None),
            Step::Push(purpose) => {
                memory.pushed = Some(*purpose);
                if *purpose == Purpose::Hibernation {
                    self.saved = Saved::Own { same_pod: true };
                }
            }
            Step::RemoveVm { .. } => {
                (memory.copied, memory.pushed, memory.is_imported) = (None, None, false);
                memory.is_removed = facts.pod.ending;
            }
            Step::Import => memory.is_imported = true,
            Step::DropSaved => self.saved = Saved::Absent,
            Step::Wake => memory.is_imported = false,
            _ => {}
        }
        if let Step::Note(note) = step {
            self.record_note(note, seen, facts);
        }
        if let Some(happened) = events::success_operation(step, facts) {
            self.executor.metrics.count(happened);
        }
        if let Some(event) = events::success_event(step, facts) {
            self.object.event(event);
        }
    }

    /// Records the written annotations, which apply at once; the watch shows them later.
    fn record_note(&mut self, note: &Note, seen: &VmPodInput, facts: &Facts) {
        let (id, ip) = note.vm.clone().unwrap_or_default();
        let text = |text: String| Some(text).filter(|text| !text.is_empty());
        let after = Noted {
            id: text(id),
            ip: ip.and_then(text),
            state: Some(note.state),
            generation: facts.pod.wanted.as_ref().ok().and_then(|wanted| wanted.generation),
            message: text(note.message.clone()),
        };
        self.written = Some((pod::read(&seen.pod, seen.forced).noted, after));
        if note.state == LifecycleState::Ready {
            self.saved = Saved::Unknown;
        }
    }

    fn on_step_failure(&mut self, facts: &Facts, step: &Step, error: StepError) -> Turn {
        let times = match &self.memory.failure {
            Some(before) if before.step == *step => before.times.saturating_add(1),
            _ => 1,
        };
        let rest = Duration::from_secs(1 << times.min(6)).min(REST_MAX);
        if facts.pod.ending {
            match step {
                // The registry client has retried already, and the copy on this node stays.
                Step::Push(_) => self.memory.push_given_up = true,
                Step::Hibernate | Step::Copy(_) if times >= TRIES_MAX => self.memory.save_given_up = true,
                _ => {}
            }
        }
        // The saved state may have changed: query it again.
        if let Step::Wake | Step::Import | Step::DropSaved = step {
            (self.saved, self.memory.is_imported) = (Saved::Unknown, false);
        }
        tracing::warn!(pod = self.executor.pod.name, ?step, error = error.message, times, "step failed");
        if times == 1
            && let Some(happened) = events::failure_operation(step, facts)
        {
            self.executor.metrics.count(happened);
        }
        self.object.event(events::failure_event(step, &error));
        self.rests_until = Some(Instant::now() + rest);
        let StepError { reason, message } = error;
        self.memory.failure = Some(Failure { step: step.clone(), reason, message, times, rest });
        Turn::Again
    }

    async fn note(&self, note: &Note, wanted: &Wanted) -> Result<(), StepError> {
        let (id, ip) = note.vm.clone().unwrap_or_default();
        let noted = VmRuntimeAnnotations {
            id,
            ip: ip.unwrap_or_default(),
            lifecycle_state: Some(note.state),
            lifecycle_observed_generation: wanted.generation,
            lifecycle_state_message: note.message.clone(),
            ..VmRuntimeAnnotations::default()
        };
        let mut changes = noted.patch();
        // The display of an adopted VM is set by the author of the pod.
        changes.remove(coracle_api::cocoon::keys::VNC_PORT);
        changes.remove(coracle_api::cocoon::keys::POST_CLONE_HINT);
        self.call(self.object.annotate(changes)).await
    }

    async fn finish(&self, how: Finish) -> Result<(), StepError> {
        self.call(self.object.remove()).await?;
        self.executor.metrics.count(match how {
            Finish::NoVm => PodOperation::DeletedWithoutVm,
            Finish::Removed | Finish::LeftAlone => PodOperation::Deleted,
            Finish::Kept => PodOperation::DeleteFailed,
        });
        Ok(())
    }

    async fn call(&self, call: impl Future<Output = Result<(), RuntimeError>>) -> Result<(), StepError> {
        let failed = |message| StepError { reason: "APIServerUnavailable", message };
        match timeout(API_LIMIT, call).await {
            Ok(done) => done.map_err(|error| failed(error.message)),
            Err(_) => Err(failed("the API server does not answer".to_owned())),
        }
    }

    /// Waits for a change, a probe, or the time that the plan contains.
    async fn wait(
        &mut self,
        plan: &Plan,
        facts: &Facts,
        input: &mut watch::Receiver<VmPodInput>,
        vm: &mut Option<watch::Receiver<Arc<coracle_host::View>>>,
    ) -> Turn {
        let retry = (!self.is_reported).then_some(API_RETRY);
        let again = [plan.again, retry].into_iter().flatten().min().unwrap_or(RESYNC);
        self.begin_probe(facts);
        let changed = async {
            match vm {
                // The removal of a VM counts as a change.
                Some(vm) => drop(vm.changed().await),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            seen = input.changed() => if seen.is_err() { return Turn::Gone },
            () = changed => {}
            Some(probed) = self.probing.join_next(), if !self.probing.is_empty() => {
                // A cancelled probe was for another address.
                if let (Ok(answered), Some((_, answers))) = (probed, &mut self.probed) {
                    *answers = answers.after(answered);
                }
            }
            () = sleep(again) => {}
        }
        Turn::Again
    }

    fn begin_probe(&mut self, facts: &Facts) {
        let runs = matches!(&facts.vm, Some(vm) if !vm.ips.is_empty())
            || matches!(&facts.pod.wanted, Ok(Wanted { source: crate::facts::Source::Static { .. }, .. }));
        let Some((probe, answers)) = self.probed.filter(|_| runs && !facts.pod.ending) else {
            self.probing.abort_all();
            return;
        };
        if self.probing.is_empty() {
            let metrics = self.executor.metrics.clone();
            self.probing.spawn(async move {
                sleep(answers.rest).await;
                let began = Instant::now();
                let answered = probe.ask().await;
                metrics.observe_probe(began.elapsed());
                answered
            });
        }
    }
}

/// Resolves when the pod is being deleted, or its frontend is gone.
async fn wait_for_end(input: &mut watch::Receiver<VmPodInput>) -> Turn {
    let is_ending = |seen: &VmPodInput| seen.forced || seen.pod.metadata.deletion_timestamp.is_some();
    match input.wait_for(is_ending).await {
        Ok(_) => Turn::Again,
        Err(_) => Turn::Gone,
    }
}
