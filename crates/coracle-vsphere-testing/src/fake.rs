//! vCenter in memory for simulations. It counts calls, injects failures, delays tasks, and can halt all calls directly before
//! or after any one of them, so that a test can kill the caller and start it again.

mod calls;
mod effects;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use parking_lot::{Mutex, MutexGuard};
use tokio::{sync::watch, time::Instant};

use coracle_vsphere::{
    Connect, Credentials, Fault, Network, Object, Question, Site, SiteSpec, SiteVms, Store, TaskId, Vm,
    VmDatastores, Vsphere, VsphereError,
};
use effects::Effect;

/// Default of the longest wait for a task.
const TASK: Duration = Duration::from_secs(120);
/// Delay of a task that waits for an answer.
const HELD: Duration = Duration::from_secs(1_000_000);

/// Injected failure of a call.
#[derive(Clone, Debug)]
pub enum FakeFault {
    /// The call returns a fault of the type and does nothing.
    Call(&'static str),
    /// The task of the call ends in a fault of the type.
    Task(&'static str),
    /// The call takes effect, but its reply is lost.
    AnswerLost,
}

/// Hook that runs after the work of a call and before its reply.
#[derive(Clone)]
struct AfterCall(Arc<dyn Fn(&'static str) -> BoxFuture<'static, ()> + Send + Sync>);

impl fmt::Debug for AfterCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AfterCall")
    }
}

#[derive(Debug)]
struct Rule {
    method: &'static str,
    skip: usize,
    count: usize,
    fault: FakeFault,
}

/// Task, and the effect that it has when it is due.
#[derive(Debug)]
struct Task {
    due: Instant,
    effect: Option<Effect>,
    end: Option<Result<Option<Object>, Fault>>,
}

#[derive(Debug, Default)]
struct State {
    next: u32,
    vms: BTreeMap<String, Vm>,
    tasks: HashMap<String, Task>,
    order: Vec<String>,
    files: BTreeMap<String, u64>,
    digests: BTreeMap<String, String>,
    locked: BTreeSet<String>,
    folders: BTreeSet<String>,
    tags: BTreeMap<String, BTreeSet<String>>,
    calls: Vec<&'static str>,
    rules: Vec<Rule>,
    halt: Option<(usize, bool)>,
    halted: bool,
    task_delay: Duration,
    sites: HashMap<SiteSpec, Arc<Site>>,
    missing: BTreeSet<String>,
    logins: usize,
    refuse_login: bool,
    loses_new_vms: bool,
    /// VMs that have been powered on at least once.
    ran: BTreeSet<String>,
    after_call: Option<AfterCall>,
    /// Longest wait for a task, if a test set it.
    task_limit: Option<Duration>,
    /// Question that VMs ask when they are powered on. The task continues after the answer.
    asks: Option<Question>,
    /// Tasks that wait for an answer, by VM.
    asking: HashMap<String, String>,
    /// Answers that were received.
    answers: Vec<String>,
    /// Whether the creation of a VM must name a host.
    needs_host: bool,
    /// Whether powering on a VM checks that its image exists.
    looks_at_images: bool,
}

/// In-memory vCenter; clones share it.
#[derive(Clone, Debug)]
pub struct FakeVsphere {
    state: Arc<Mutex<State>>,
    machines: watch::Sender<Arc<SiteVms>>,
    halted: watch::Sender<bool>,
}

impl Default for FakeVsphere {
    fn default() -> Self {
        let machines = SiteVms { is_current: true, ..SiteVms::default() };
        Self {
            state: Arc::default(),
            machines: watch::Sender::new(Arc::new(machines)),
            halted: watch::Sender::new(false),
        }
    }
}

impl FakeVsphere {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Calls that changed or searched for something, in order.
    #[must_use]
    pub fn calls(&self) -> Vec<&'static str> {
        self.lock().calls.clone()
    }

    /// Clears the recorded calls.
    pub fn forget_calls(&self) {
        self.lock().calls.clear();
    }

    /// Number of logins so far.
    #[must_use]
    pub fn logins(&self) -> usize {
        self.lock().logins
    }

    /// Skips `skip` calls of `method`, then makes `count` of them fail with `fault`.
    pub fn fail(&self, method: &'static str, skip: usize, count: usize, fault: FakeFault) {
        self.lock().rules.push(Rule { method, skip, count, fault });
    }

    /// Removes all injected failures.
    pub fn heal(&self) {
        self.lock().rules.clear();
    }

    /// Sets whether logins are refused.
    pub fn refuse_login(&self, yes: bool) {
        self.lock().refuse_login = yes;
    }

    /// Makes a login clear the identity of VMs that never ran: a deliberate violation of the contract, to test the tests.
    pub fn lose_new_vms(&self) {
        self.lock().loses_new_vms = true;
    }

    /// Runs `hook` after the work of each call and before its reply. Simulations stop the caller there.
    pub fn after_each_call(
        &self,
        hook: impl Fn(&'static str) -> BoxFuture<'static, ()> + Send + Sync + 'static,
    ) {
        self.lock().after_call = Some(AfterCall(Arc::new(hook)));
    }

    /// Removes the inventory object of a field such as `vsphere.network`.
    pub fn remove_inventory(&self, field: &str) {
        self.lock().missing.insert(field.to_owned());
    }

    /// Sets the duration of tasks that start from now on.
    pub fn slow_tasks(&self, by: Duration) {
        self.lock().task_delay = by;
    }

    /// Ends the tasks that run, with their effects; those that start later end at once.
    pub fn end_tasks(&self) {
        let mut state = self.lock();
        state.task_delay = Duration::ZERO;
        let now = Instant::now();
        state.tasks.values_mut().for_each(|task| task.due = now);
        drop(state);
        self.settle();
    }

    /// Limits waits for tasks to this time; the tasks continue.
    pub fn limit_waits(&self, to: Duration) {
        self.lock().task_limit = Some(to);
    }

    /// Makes VMs that are powered on from now on ask this question first; `None` stops that.
    pub fn ask_at_power_on(&self, question: Option<Question>) {
        self.lock().asks = question;
    }

    /// Keys of the choices that were answered.
    #[must_use]
    pub fn answers(&self) -> Vec<String> {
        self.lock().answers.clone()
    }

    /// Sets whether creations end in a fault unless they name a host, as where DRS is off.
    pub fn need_host(&self, yes: bool) {
        self.lock().needs_host = yes;
    }

    /// Makes powering on a VM fail if the image in its drive does not exist, as at a real host. The simulator does not check
    /// this.
    pub fn check_images(&self) {
        self.lock().looks_at_images = true;
    }

    /// Halts all calls at call number `call` (the first is 0), directly before or after its work. Every call hangs from then
    /// on, until [`Self::resume`].
    pub fn halt_at(&self, call: usize, before: bool) {
        self.lock().halt = Some((call, before));
    }

    /// Waits until all calls are halted. Cancel-safe.
    pub async fn until_halted(&self) {
        // `self` owns the sender, so the wait cannot fail.
        let _ = self.halted.subscribe().wait_for(|halted| *halted).await;
    }

    /// Resumes halted calls.
    pub fn resume(&self) {
        let mut state = self.lock();
        (state.halt, state.halted) = (None, false);
        state.calls.clear();
        drop(state);
        self.halted.send_replace(false);
    }

    /// Present VMs.
    #[must_use]
    pub fn vms(&self) -> Vec<Vm> {
        self.settle();
        self.lock().vms.values().cloned().collect()
    }

    /// Files of the ISO datastore and their sizes.
    #[must_use]
    pub fn stored(&self) -> BTreeMap<String, u64> {
        self.lock().files.clone()
    }

    /// Tags of a VM.
    #[must_use]
    pub fn tags_of(&self, id: &str) -> BTreeSet<String> {
        self.lock().tags.get(id).cloned().unwrap_or_default()
    }

    /// Changes a VM as another client would; setting the `Option` to `None` removes the VM.
    pub fn change_vm(&self, id: &str, change: impl FnOnce(&mut Option<Vm>)) {
        self.settle();
        let mut state = self.lock();
        let mut vm = state.vms.remove(id);
        change(&mut vm);
        if let Some(vm) = vm {
            state.vms.insert(vm.object.id.clone(), vm);
        }
        drop(state);
        self.publish();
    }

    /// Changes the content of a file, but not its size.
    pub fn corrupt_file(&self, path: &str) {
        self.lock().digests.insert(path.to_owned(), "0".repeat(64));
    }

    /// Sets whether a VM holds a file open, so that the file cannot be read.
    pub fn lock_file(&self, path: &str, yes: bool) {
        let mut state = self.lock();
        if yes {
            state.locked.insert(path.to_owned())
        } else {
            state.locked.remove(path)
        };
    }

    /// Makes a VM ask a question that blocks it.
    pub fn ask(&self, id: &str, question: coracle_vsphere::Question) {
        self.change_vm(id, |vm| {
            if let Some(vm) = vm {
                vm.question = Some(question);
            }
        });
    }

    /// Removes a file as another client would.
    pub fn lose_file(&self, path: &str) {
        self.lock().files.remove(path);
    }

    fn publish(&self) {
        let vms = self.lock().vms.iter().map(|(id, vm)| (id.clone(), Arc::new(vm.clone()))).collect();
        self.machines.send_replace(Arc::new(SiteVms { is_current: true, vms }));
    }

    /// Applies the effects of tasks that are due.
    fn settle(&self) {
        let now = Instant::now();
        let mut state = self.lock();
        let due: Vec<_> = state
            .order
            .iter()
            .filter(|id| state.tasks.get(*id).is_some_and(|t| t.effect.is_some() && t.due <= now))
            .cloned()
            .collect();
        for id in &due {
            let effect = state.tasks.get_mut(id).and_then(|t| t.effect.take());
            if let Some(effect) = effect.as_ref().filter(|effect| state.asks_first(id, effect)) {
                state.hold(id, effect.clone());
                continue;
            }
            let end = effect.map_or(Ok(None), |effect| effect.apply(&mut state));
            if let Some(task) = state.tasks.get_mut(id) {
                task.end = Some(end);
            }
        }
        drop(state);
        if !due.is_empty() {
            self.publish();
        }
    }

    /// Begins a call: records it, hangs if calls are halted, and may fail.
    async fn begin(&self, method: &'static str) -> Result<Call, VsphereError> {
        self.settle();
        let (number, hangs, fault) = {
            let mut state = self.lock();
            let number = state.calls.len();
            let hangs = state.halted || state.halt == Some((number, true));
            if hangs {
                state.halted = true;
            } else {
                state.calls.push(method);
            }
            (number, hangs, if hangs { None } else { state.fault(method) })
        };
        if hangs {
            self.halted.send_replace(true);
            return std::future::pending().await;
        }
        match fault {
            Some(FakeFault::Call(kind)) => {
                Err(VsphereError::Fault { operation: method.into(), fault: Fault::of(kind) })
            }
            other => Ok(Call { number, method, fault: other }),
        }
    }

    /// Ends a call.
    async fn finish<T>(&self, call: &Call, value: T) -> Result<T, VsphereError> {
        let hangs = {
            let mut state = self.lock();
            let hangs = state.halted || state.halt == Some((call.number, false));
            state.halted |= hangs;
            hangs
        };
        if hangs {
            self.halted.send_replace(true);
            return std::future::pending().await;
        }
        let hook = self.lock().after_call.clone();
        if let Some(AfterCall(hook)) = hook {
            hook(call.method).await;
        }
        match call.fault {
            Some(FakeFault::AnswerLost) => {
                Err(VsphereError::Status { operation: call.method.into(), status: 503 })
            }
            _ => Ok(value),
        }
    }

    async fn start(&self, method: &'static str, effect: Effect) -> Result<TaskId, VsphereError> {
        let call = self.begin(method).await?;
        let id = {
            let mut state = self.lock();
            state.next += 1;
            let id = format!("task-{}", state.next);
            let due = Instant::now() + state.task_delay;
            let effect = match call.fault {
                Some(FakeFault::Task(kind)) => Effect::Fail(kind),
                _ => effect,
            };
            state.tasks.insert(id.clone(), Task { due, effect: Some(effect), end: None });
            state.order.push(id.clone());
            id
        };
        self.settle();
        self.finish(&call, TaskId(id)).await
    }
}

struct Call {
    number: usize,
    method: &'static str,
    fault: Option<FakeFault>,
}

impl State {
    fn lose_new_vms(&mut self) {
        for (id, vm) in self.vms.iter_mut().filter(|(id, _)| !self.ran.contains(*id)) {
            vm.name = format!("lost-{id}");
            vm.uuid.clear();
            vm.instance_uuid.clear();
        }
    }

    /// Makes the VM ask its question, if `effect` powers it on. Returns whether the task waits for an answer.
    fn asks_first(&mut self, task: &str, effect: &Effect) -> bool {
        let Effect::Power(id, true) = effect else { return false };
        let (Some(question), Some(vm)) = (self.asks.clone(), self.vms.get_mut(id)) else { return false };
        vm.question = Some(question);
        self.asking.insert(id.clone(), task.to_owned());
        true
    }

    /// Postpones a task until its question is answered.
    fn hold(&mut self, task: &str, effect: Effect) {
        if let Some(task) = self.tasks.get_mut(task) {
            (task.due, task.effect) = (Instant::now() + HELD, Some(effect));
        }
    }

    fn fault(&mut self, method: &str) -> Option<FakeFault> {
        let at = self.rules.iter_mut().position(|rule| {
            let fits = rule.method == method;
            let skips = fits && rule.skip > 0;
            if skips {
                rule.skip -= 1;
            }
            fits && !skips
        })?;
        let rule = self.rules.get_mut(at)?;
        let fault = rule.fault.clone();
        rule.count = rule.count.saturating_sub(1);
        if rule.count == 0 {
            self.rules.remove(at);
        }
        Some(fault)
    }
}

#[async_trait]
impl Connect for FakeVsphere {
    async fn connect(&self, credentials: &Credentials) -> Result<Arc<dyn Vsphere>, VsphereError> {
        let call = self.begin("Login").await?;
        let refused = {
            let mut state = self.lock();
            state.logins += 1;
            if state.loses_new_vms {
                state.lose_new_vms();
            }
            state.refuse_login
        };
        if refused {
            let operation = format!("Login of {}", credentials.username);
            return Err(VsphereError::Fault { operation, fault: Fault::of("InvalidLogin") });
        }
        let same: Arc<dyn Vsphere> = Arc::new(self.clone());
        self.finish(&call, same).await
    }
}

fn site_of(state: &mut State, spec: &SiteSpec) -> Result<Arc<Site>, VsphereError> {
    let names: [(&'static str, &'static str, &str); 5] = [
        ("vsphere.datacenter", "datacenter", &spec.datacenter),
        ("vsphere.resourcePool", "resource pool below the host folder", &spec.resource_pool),
        ("vsphere.isoDatastore", "datastore", &spec.iso_datastore),
        ("vsphere.datastoreCluster", "datastore cluster or datastore", &spec.datastore_cluster),
        ("vsphere.network", "network", &spec.network),
    ];
    for (field, kind, name) in names {
        if state.missing.contains(field) {
            return Err(VsphereError::NoSuchName { field, kind, name: name.to_owned() });
        }
    }
    let site = state.sites.entry(spec.clone()).or_insert_with(|| {
        let store = |kind: &str, name: &str| Store { object: Object::new(kind, name), name: name.to_owned() };
        Arc::new(Site {
            spec: spec.clone(),
            datacenter: Object::new("Datacenter", &spec.datacenter),
            folder: Object::new("Folder", &spec.folder),
            folder_path: format!("{}/vm/{}", spec.datacenter, spec.folder),
            pool: Object::new("ResourcePool", &spec.resource_pool),
            storage: VmDatastores::Pod(store("StoragePod", &spec.datastore_cluster)),
            iso: store("Datastore", &spec.iso_datastore),
            network: Network::Standard {
                object: Object::new("Network", &spec.network),
                name: spec.network.clone(),
            },
        })
    });
    Ok(site.clone())
}
