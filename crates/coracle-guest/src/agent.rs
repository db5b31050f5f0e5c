//! State of the guest agent. It outlives sessions: what the host has configured and started still exists in the next session.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_proto::guest::{
    ConfigureRequest, ConfigureResponse, ConfigureSandboxRequest, MetricsResponse, PrepareRequest, Process,
    ShutdownRequest, StartWorkloadResponse, StatusResponse, WaitWorkloadResponse, WorkloadState,
};
use rustix::process::Signal;
use tokio::sync::watch;
use tokio::task::JoinError;

use crate::cgroup::{self, Cgroup};
use crate::configure::{self, Plan};
use crate::containers::Containers;
use crate::error::Error;
use crate::exit::exit_status;
use crate::logs::Logs;
use crate::reset::Before;
use crate::rootfs::Root;
use crate::shared_dir::SharedDir;
use crate::volumes::{self, Volumes};
use crate::workload::{Workload, WorkloadPhase};
use crate::{metrics, mounts, process, sys};
use coracle_spawn::{Exit, Reaper, Scope, Thread};

/// Optional features of this agent.
const FEATURES: [&str; 10] =
    ["attach", "containers", "copy", "exec", "logs", "metrics", "port-forward", "session", "tty", "volumes"];
/// Time limit of one Configure.
const CONFIGURE: Duration = Duration::from_secs(20);
/// Time limit to mount or unmount a volume: a disk may have much to write.
const VOLUME: Duration = Duration::from_secs(20);
/// Time limit to unmount idle volumes at power-off.
const LEAVE: Duration = Duration::from_secs(2);

/// Root of the container, once mounted.
type RootSlot = Arc<Mutex<Option<Arc<Root>>>>;

/// Role of the agent in its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// PID 1, which configures everything.
    Pid1,
    /// Service of a system from a disk image, which itself handles names and network in its first boot.
    SystemService,
    /// Agent for one directory (tests), which cannot be configured, because that would change the host itself.
    TestDirectory,
}

/// State that requests read and change.
#[derive(Debug)]
pub struct Agent {
    role: Role,
    /// Current configuration. The lock permits one Configure at a time, even if its caller has gone.
    configured: Arc<tokio::sync::Mutex<Option<Plan>>>,
    /// State of the guest when its disk was prepared, which Reset restores.
    before: Arc<Mutex<Option<Before>>>,
    root: RootSlot,
    /// Cgroup of the workload, if it has limits of its own.
    limits: Arc<Mutex<Option<Cgroup>>>,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) reaper: Arc<Reaper>,
    pub(crate) workload: Arc<Workload>,
    pub(crate) containers: Arc<Containers>,
    pub(crate) shutdown: watch::Sender<Option<ShutdownRequest>>,
    closed: watch::Sender<bool>,
}

impl Agent {
    /// Makes an agent that is PID 1 of its guest and waits to be configured.
    #[must_use]
    pub fn as_pid1() -> Arc<Self> {
        Self::new(Role::Pid1, None, Scope::Everything)
    }

    /// Makes an agent that is a service of a system.
    #[must_use]
    pub fn of_system(root: Root) -> Arc<Self> {
        Self::new(Role::SystemService, Some(Arc::new(root)), Scope::Own)
    }

    /// Makes an agent for one directory, which cannot be configured.
    #[must_use]
    pub fn of_directory(root: Root) -> Arc<Self> {
        Self::new(Role::TestDirectory, Some(Arc::new(root)), Scope::Own)
    }

    fn new(role: Role, root: Option<Arc<Root>>, scope: Scope) -> Arc<Self> {
        Arc::new(Self {
            role,
            configured: Arc::default(),
            before: Arc::default(),
            root: Arc::new(Mutex::new(root)),
            limits: Arc::default(),
            volumes: Arc::default(),
            reaper: Reaper::new(scope),
            workload: Workload::new(Logs::new(None)),
            containers: Containers::new(),
            shutdown: watch::Sender::new(None),
            closed: watch::Sender::new(false),
        })
    }

    /// Collects the exit statuses of children. Runs next to the sessions and never returns.
    ///
    /// # Errors
    /// When SIGCHLD cannot be watched.
    pub async fn reap(&self) -> std::io::Result<()> {
        self.reaper.run().await
    }

    pub(crate) fn status(&self) -> StatusResponse {
        let (workload, exit) = match self.workload.progress() {
            WorkloadPhase::NotStarted => (WorkloadState::NotStarted, None),
            WorkloadPhase::Running(_) => (WorkloadState::Running, None),
            WorkloadPhase::Exited(exit) => (WorkloadState::Exited, Some(exit_status(exit))),
        };
        StatusResponse {
            agent_version: env!("CARGO_PKG_VERSION").into(),
            features: FEATURES.iter().map(|f| (*f).to_owned()).collect(),
            // A locked configuration is being changed, so the guest is not configured yet.
            configured: self.configured.try_lock().is_ok_and(|c| c.is_some()),
            workload: workload.into(),
            exit,
            uptime_ms: sys::uptime_ms(),
        }
    }

    /// Mounts the disk that clones of this guest begin with, and a root on it.
    pub(crate) async fn prepare(&self, request: &PrepareRequest) -> Result<(), Error> {
        let disk = mounts::device(&request.overlay_device)?;
        let image = |device: &str| (!device.is_empty()).then(|| mounts::device(device)).transpose();
        let (image, warm_up) = (image(&request.image_device)?, image(&request.warm_up_image_device)?);
        let configured = Arc::clone(&self.configured).lock_owned().await;
        if self.role != Role::Pid1 || configured.is_some() {
            return Err(Error::State("only a guest that is not configured can be prepared".into()));
        }
        let before = Arc::clone(&self.before);
        let work = move || {
            let _until_it_is_done = configured;
            mounts::prepare_disk(&disk, image.as_deref(), warm_up.as_deref())?;
            *lock(&before) = Some(Before::capture()?);
            Ok(())
        };
        run_within(CONFIGURE, "preparing a disk", tokio::task::spawn_blocking(work)).await
    }

    /// Undoes everything since the disk was prepared.
    pub(crate) async fn reset(&self, thread: Thread) -> Result<(), Error> {
        let mut configured = Arc::clone(&self.configured).lock_owned().await;
        let Some(plan) = configured.clone() else { return Ok(()) };
        let is_idle = self.volumes.is_empty() && self.containers.is_empty() && self.workload.is_over();
        if !is_idle || lock(&self.before).is_none() {
            let why = "only a guest whose disk was prepared can be reset, and only while nothing runs in it";
            return Err(Error::State(why.into()));
        }
        let (before, root, limits) =
            (Arc::clone(&self.before), Arc::clone(&self.root), Arc::clone(&self.limits));
        let workload = Arc::clone(&self.workload);
        let work = move || {
            drop(lock(&root).take());
            lock(&limits).take();
            Cgroup::at(plan.cgroup_name()).remove_all().map_err(Error::io("remove a cgroup"))?;
            let before = lock(&before);
            match (before.as_ref(), &plan.sandbox) {
                (Some(before), None) => before.restore(plan.root.as_ref())?,
                (Some(before), Some(_)) => before.restore_sandbox()?,
                (None, _) => {}
            }
            workload.reset();
            *configured = None;
            Ok(())
        };
        run_within(CONFIGURE, "resetting the machine", thread.run(work)).await
    }

    pub(crate) async fn configure(
        &self,
        request: ConfigureRequest,
        thread: Thread,
    ) -> Result<ConfigureResponse, Error> {
        self.apply_plan(Plan::parse(request)?, thread).await
    }

    pub(crate) async fn configure_sandbox(
        &self,
        request: ConfigureSandboxRequest,
    ) -> Result<ConfigureResponse, Error> {
        if self.role != Role::Pid1 {
            return Err(Error::State("this guest has no containers".into()));
        }
        self.apply_plan(Plan::parse_sandbox(request)?, Thread::OfFiles).await
    }

    /// Starts the workload, once.
    ///
    /// # Errors
    /// [`Error::State`] without a root, or if the guest has containers; [`Error::Invalid`]. A command that cannot run counts as an
    /// exit.
    pub(crate) async fn start_workload(
        &self,
        process: Process,
        thread: Thread,
    ) -> Result<StartWorkloadResponse, Error> {
        if !self.containers.is_empty() {
            return Err(Error::State("this guest has containers".into()));
        }
        let (workload, reaper) = (Arc::clone(&self.workload), Arc::clone(&self.reaper));
        let (root, cgroup) = (self.root()?, self.join_workload()?);
        let pid =
            process::run_start(thread, move || workload.start(&reaper, &root, &process, cgroup)).await??;
        Ok(StartWorkloadResponse { pid })
    }

    async fn apply_plan(&self, plan: Plan, thread: Thread) -> Result<ConfigureResponse, Error> {
        match self.role {
            Role::Pid1 => {}
            Role::SystemService if plan.root.is_none() => {}
            Role::SystemService => return Err(Error::State("this machine has a root of its own".into())),
            Role::TestDirectory => return Err(Error::State("this agent does not own its machine".into())),
        }
        let role = self.role;
        let work = async {
            let mut before = Arc::clone(&self.configured).lock_owned().await;
            let root = Arc::clone(&self.root);
            let limits = Arc::clone(&self.limits);
            let volumes = Arc::clone(&self.volumes);
            let started =
                self.workload.progress() != WorkloadPhase::NotStarted || !self.containers.is_empty();
            // Keeps the lock until the work has ended, even if this call has timed out on a disk that hangs.
            let apply = move || {
                let made = plan.cgroup()?;
                let applied = apply(role, &mut before, plan, &root, &volumes, started)?;
                *lock(&limits) = made;
                Ok(applied)
            };
            thread.run(apply).await
        };
        run_within(CONFIGURE, "configuring the machine", work).await
    }

    /// Root of the container.
    ///
    /// # Errors
    /// [`Error::State`] before a Configure has mounted the root.
    pub(crate) fn root(&self) -> Result<Arc<Root>, Error> {
        self.root_slot()
            .clone()
            .ok_or_else(|| Error::State("no root is mounted: configure the machine first".into()))
    }

    /// Whether containers can be created.
    pub(crate) fn is_sandbox(&self) -> bool {
        // A locked configuration is being changed, so the guest is not configured yet.
        self.configured.try_lock().is_ok_and(|plan| plan.as_ref().is_some_and(|plan| plan.sandbox.is_some()))
    }

    /// Upper directory of the container's root; `None` if the root is not an overlay of the agent.
    ///
    /// # Errors
    /// [`Error::State`] before a Configure has mounted the root.
    pub(crate) fn upper(&self) -> Result<Option<Root>, Error> {
        self.root()?;
        match self.role {
            Role::Pid1 => mounts::upper().map(Some),
            Role::SystemService | Role::TestDirectory => Ok(None),
        }
    }

    /// Mounts a volume in the container. `Ok` if it is mounted already.
    pub(crate) async fn mount_volume(&self, plan: volumes::Plan) -> Result<(), Error> {
        self.with_volumes("mounting a volume", move |volumes, root| volumes.mount(root, plan)).await
    }

    /// Unmounts a volume from the container. `Ok` if it is not mounted.
    pub(crate) async fn unmount_volume(&self, name: String) -> Result<(), Error> {
        self.with_volumes("unmounting a volume", move |volumes, root| volumes.unmount(root, &name)).await
    }

    /// Unmounts idle volumes, within a limit: the host may not answer for its directories.
    pub(crate) async fn unmount_idle_volumes(&self) {
        let volumes = Arc::clone(&self.volumes);
        let left = tokio::task::spawn_blocking(move || volumes.unmount_idle());
        let _ = tokio::time::timeout(LEAVE, left).await;
    }

    /// Returns the shared directory of that name, to be served.
    pub(crate) async fn shared_dir(&self, name: String) -> Result<Arc<SharedDir>, Error> {
        self.with_volumes("finding a directory", move |volumes, _| volumes.shared_dir(&name)).await
    }

    async fn with_volumes<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Volumes, &Root) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let (root, volumes) = (self.root()?, Arc::clone(&self.volumes));
        run_within(VOLUME, what, tokio::task::spawn_blocking(move || work(&volumes, &root))).await
    }

    pub(crate) fn metrics(&self) -> MetricsResponse {
        metrics::collect(self.writable())
    }

    /// Directory on the writable disk.
    pub(crate) fn writable(&self) -> &'static Path {
        Path::new(if self.role == Role::Pid1 { mounts::OVERLAY } else { "/" })
    }

    /// Opens the `cgroup.procs` by which a process outside of the containers gets the limits of the workload.
    ///
    /// # Errors
    /// When the cgroup does not exist any more.
    pub(crate) fn join_workload(&self) -> Result<Option<OwnedFd>, Error> {
        let limits = lock(&self.limits);
        let procs = limits.as_ref().filter(|_| !self.is_sandbox()).map(Cgroup::procs);
        procs.transpose().map_err(Error::io("open the workload's cgroup"))
    }

    /// Root of a container, or for an empty name the root of Configure.
    ///
    /// # Errors
    /// The container does not exist, or no root is mounted yet.
    pub(crate) fn root_of(&self, container: &str) -> Result<Arc<Root>, Error> {
        if container.is_empty() { self.root() } else { self.containers.root(container) }
    }

    /// Closes the root, so that it can be unmounted.
    pub(crate) fn forget_root(&self) {
        self.root_slot().take();
    }

    /// Whether the agent is a service of a system, which may have a command as well.
    pub(crate) fn is_system(&self) -> bool {
        self.role == Role::SystemService
    }

    /// Waits for the exit of the workload. Cancel-safe.
    pub(crate) async fn workload_exit(&self) -> WaitWorkloadResponse {
        let exit = self.workload.wait_exit().await;
        let oom_killed = exit.signal == Signal::KILL.as_raw() && cgroup::was_out_of_memory();
        WaitWorkloadResponse { exit: Some(exit_status(exit)), oom_killed }
    }

    /// Waits for the end of a system's command, whether it was started already or not. Its writes are on disk then, because the
    /// host may make an image of the disk. Cancel-safe.
    pub(crate) async fn system_exit(&self) -> Exit {
        let exit = self.workload.wait_exit().await;
        // A disk that hangs delays the report to the host, as it would delay the command.
        let _synced = tokio::task::spawn_blocking(rustix::fs::sync).await;
        exit
    }

    /// Ends all sessions before the power-off.
    pub(crate) fn close(&self) {
        self.closed.send_replace(true);
    }

    pub(crate) fn is_closing(&self) -> bool {
        *self.closed.borrow()
    }

    pub(crate) async fn closed(&self) {
        let mut closed = self.closed.subscribe();
        if closed.wait_for(|closed| *closed).await.is_err() {
            std::future::pending::<()>().await; // the sender lives in `self`
        }
    }

    fn root_slot(&self) -> MutexGuard<'_, Option<Arc<Root>>> {
        lock(&self.root)
    }
}

/// Changes the guest's configuration from `before` to `plan`; blocking.
fn apply(
    role: Role,
    before: &mut Option<Plan>,
    plan: Plan,
    root: &RootSlot,
    volumes: &Volumes,
    started: bool,
) -> Result<ConfigureResponse, Error> {
    let changed = before.as_ref() != Some(&plan);
    if started && changed && !plan.takes_over() {
        return Err(Error::State(
            "the workload has started: its machine can no longer be configured differently".into(),
        ));
    }
    let mounted = lock(root).clone();
    let kept = before.as_ref().and_then(|b| b.root.as_ref());
    let kept_sandbox = before.as_ref().and_then(|b| b.sandbox.as_ref());
    let other_root = plan.root.is_some() && plan.root.as_ref() != kept;
    let other_sandbox = plan.sandbox.is_some() && plan.sandbox.as_ref() != kept_sandbox;
    if mounted.is_some() && (other_root || other_sandbox) {
        return Err(Error::State("the root is mounted from other disks already".into()));
    }
    let applied = match (role, &mounted) {
        (Role::SystemService, Some(root)) => configure::apply_to_system(&plan, root)?,
        _ => configure::apply(&plan, mounted.as_deref(), changed)?,
    };
    if let Some(mounted) = applied.root {
        *lock(root) = Some(Arc::new(mounted));
    }
    if let Some(root) = lock(root).clone() {
        plan.volumes().iter().try_for_each(|volume| volumes.mount(&root, volume.clone()))?;
    }
    let kept = kept.cloned();
    *before = Some(plan.or_root(kept));
    Ok(ConfigureResponse { addresses: applied.addresses })
}

/// Waits for the result of blocking work within a limit. After the limit the work continues unattended.
async fn run_within<T>(
    limit: Duration,
    what: &'static str,
    work: impl Future<Output = Result<Result<T, Error>, JoinError>>,
) -> Result<T, Error> {
    let done = tokio::time::timeout(limit, work).await.map_err(|_| Error::TimedOut(what))?;
    done.map_err(|_| Error::TimedOut(what))?
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
