//! Containers of a sandbox: process trees of images, created, started, stopped and removed while the VM runs.
//!
//! ```text
//! create ──▶ Created ──start──▶ Running ──exit──▶ Exited ──remove──▶ (removed)
//!               └──────start, cannot run────────────▲
//! ```

mod attach;
mod isolation;
mod plan;
mod root;
mod session;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use coracle_proto::guest::{
    CgroupLimits, ContainerExited, ContainerStatistics, ContainerStatus, CreateContainerRequest, ProcessUser,
    WorkloadState,
};
use rustix::process::{PidfdFlags, Signal};
use tokio::sync::watch;

pub(crate) use self::attach::attach_workload;
use self::isolation::{First, FirstPid, Joins, Limits};
use self::plan::{PidMode, Plan};
use self::root::{ContainerRoot, Images};
use crate::cgroup::{CONTAINERS, Cgroup, Joined};
use crate::console::say;
use crate::error::Error;
use crate::exit::exit_status;
use crate::logs::Logs;
use crate::process::Isolation;
use crate::rootfs::Root;
use crate::workload::{Workload, WorkloadPhase, number};
use coracle_spawn::UserNamespace;
use coracle_spawn::{Exit, Reaper};

/// Maximum number of containers of one sandbox.
const CONTAINERS_MAX: usize = 128;
/// Time for killed processes to be reaped.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// Container that exists.
#[derive(Debug)]
struct Container {
    plan: Plan,
    place: ContainerRoot,
    /// Root, held open while the container exists: it keeps the file systems below mounted.
    root: Mutex<Option<Arc<Root>>>,
    cgroup: Cgroup,
    workload: Arc<Workload>,
    user_namespace: Option<UserNamespace>,
    /// First process, once started.
    first: OnceLock<Arc<OwnedFd>>,
}

/// Environment for a process that joins a container.
pub(crate) struct Join {
    pub(crate) root: Arc<Root>,
    pub(crate) isolation: Box<dyn Isolation>,
    pub(crate) cgroup: Joined,
}

/// Containers of this guest, by id.
#[derive(Debug)]
pub(crate) struct Containers {
    all: Mutex<BTreeMap<String, Arc<Container>>>,
    /// Lock for creations and removals, because they mount file systems.
    mounting: tokio::sync::Mutex<()>,
    images: Arc<Images>,
    /// Changes when a container is created, started or removed.
    changed: watch::Sender<u64>,
}

impl Containers {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            all: Mutex::default(),
            mounting: tokio::sync::Mutex::default(),
            images: Arc::default(),
            changed: watch::Sender::new(0),
        })
    }

    /// Creates a container. `Ok` if the same one exists already. Cancel-safe: a creation that has begun is completed.
    ///
    /// # Errors
    /// An invalid request, another container with the id, or an error of the kernel.
    pub(crate) async fn create(
        self: &Arc<Self>,
        request: CreateContainerRequest,
    ) -> Result<Option<ProcessUser>, Error> {
        let plan = Plan::parse(request)?;
        let _one_at_a_time = self.mounting.lock().await;
        if let Some(existing) = self.lock().get(&plan.id) {
            let why = format!("container {} exists and is another one", plan.id);
            return if existing.plan == plan { Ok(existing.user()) } else { Err(Error::State(why)) };
        }
        if self.lock().len() >= CONTAINERS_MAX {
            return Err(Error::State(format!("{CONTAINERS_MAX} containers exist already")));
        }
        let containers = Arc::clone(self);
        let made = tokio::task::spawn_blocking(move || containers.make(plan)).await;
        made.map_err(|_| Error::TimedOut("making a container"))?
    }

    fn make(&self, plan: Plan) -> Result<Option<ProcessUser>, Error> {
        let cgroup = Cgroup::create(Path::new(CONTAINERS).join(&plan.id), &plan.cgroup)?;
        let user_namespace = plan.security.ids.map(UserNamespace::new).transpose();
        let made = user_namespace.map_err(Error::io("make a user namespace")).and_then(|user_namespace| {
            let (place, root) = ContainerRoot::mount(&plan, user_namespace.as_ref(), &self.images)?;
            Ok((user_namespace, place, root))
        });
        let (user_namespace, place, root) = match made {
            Ok(made) => made,
            Err(error) => {
                let _empty = cgroup.remove();
                return Err(error);
            }
        };
        let (root, workload, id) =
            (Mutex::new(Some(Arc::new(root))), Workload::new(Logs::new(Some(0))), plan.id.clone());
        let first = OnceLock::new();
        let container = Container { plan, place, root, cgroup, workload, user_namespace, first };
        let user = container.user();
        self.lock().insert(id, Arc::new(container));
        self.changed.send_modify(|n| *n = n.wrapping_add(1));
        Ok(user)
    }

    /// Starts the container's process, once. Returns its process id, 0 if it has ended, and the reason if it could not run.
    ///
    /// # Errors
    /// The container does not exist, or its process is invalid.
    pub(crate) fn start(&self, id: &str, reaper: &Reaper) -> Result<(u32, Option<Exit>), Error> {
        let container = self.get(id)?;
        if !matches!(container.workload.progress(), WorkloadPhase::NotStarted) {
            return Ok((container.pid(), container.failure()));
        }
        let isolation = self.isolation(&container)?;
        let (root, process) = (container.root()?, &container.plan.process);
        let pid = container.workload.start_isolated(reaper, &root, process, Box::new(isolation))?;
        if let WorkloadPhase::Running(first) = container.workload.progress()
            && let Ok(process) = rustix::process::pidfd_open(first, PidfdFlags::empty())
        {
            let _once = container.first.set(Arc::new(process));
        }
        self.changed.send_modify(|n| *n = n.wrapping_add(1));
        Ok((pid, container.failure()))
    }

    fn isolation(&self, container: &Container) -> Result<First, Error> {
        let plan = &container.plan;
        let pid_namespace = match &plan.pid_namespace {
            PidMode::Own => FirstPid::Own,
            PidMode::Pod => FirstPid::Pod,
            PidMode::Target(target) => FirstPid::Of(self.get(target)?.first_process()?),
        };
        Ok(First {
            cgroup: container.cgroup.procs().map_err(Error::io("open the container's cgroup"))?,
            pid_namespace,
            root: isolation::path(&container.place.place).map_err(Error::io("name the container's root"))?,
            read_only_root: plan.read_only_root,
            user_namespace: container.user_namespace.clone(),
            limits: Limits::of(&plan.security),
        })
    }

    /// Prepares the join of a process to a running container.
    ///
    /// # Errors
    /// The container does not exist, or does not run.
    pub(crate) fn join(&self, id: &str) -> Result<Join, Error> {
        let container = self.get(id)?;
        let first = container.first_process()?;
        let joined = container.cgroup.join().map_err(Error::io("make a cgroup in the container's"))?;
        let cgroup = joined.procs().map_err(Error::io("open the cgroup"))?;
        let user_namespace = container.user_namespace.clone();
        let limits = Limits::of(&container.plan.security);
        let joins = Joins { cgroup, first, user_namespace, limits };
        Ok(Join { root: container.root()?, isolation: Box::new(joins), cgroup: joined })
    }

    /// Root of a container, for copies of files.
    ///
    /// # Errors
    /// The container does not exist.
    pub(crate) fn root(&self, id: &str) -> Result<Arc<Root>, Error> {
        self.get(id)?.root()
    }

    /// Sends the stop signal, waits for the grace, and kills all processes of the container. Returns how the first one ended.
    ///
    /// # Errors
    /// The container does not exist, was not started, or the kernel does not end it.
    pub(crate) async fn stop(&self, id: &str, grace: Duration, reaper: &Reaper) -> Result<Exit, Error> {
        let container = self.get(id)?;
        if container.workload.progress() == WorkloadPhase::NotStarted {
            return Err(Error::State(format!("container {id} was not started")));
        }
        if !grace.is_zero() && container.signal(container.plan.stop_signal, reaper) {
            let _late = tokio::time::timeout(grace, container.workload.wait_exit()).await;
        }
        container.cgroup.kill();
        let ended = tokio::time::timeout(KILL_LIMIT, container.workload.wait_exit()).await;
        ended.map_err(|_| Error::TimedOut("the end of a container"))
    }

    /// Sends a signal to the first process; SIGKILL goes to all processes.
    ///
    /// # Errors
    /// The container does not exist or does not run, or the signal is invalid.
    pub(crate) fn kill(&self, id: &str, signal: i32, reaper: &Reaper) -> Result<(), Error> {
        let (container, signal) = (self.get(id)?, plan::signal(signal)?);
        let killed = match container.workload.progress() {
            WorkloadPhase::Running(_) if signal == Signal::KILL => {
                container.cgroup.kill();
                true
            }
            _ => container.signal(signal, reaper),
        };
        if killed { Ok(()) } else { Err(Error::State(format!("container {id} is not running"))) }
    }

    /// Ends and removes a container. `Ok` if it does not exist.
    ///
    /// # Errors
    /// When the kernel does not end the container, or the disk fails.
    pub(crate) async fn remove(self: &Arc<Self>, id: &str) -> Result<(), Error> {
        let _one_at_a_time = self.mounting.lock().await;
        let Ok(container) = self.get(id) else { return Ok(()) };
        container.cgroup.kill();
        container.workload.logs().set_received(None); // its output does not wait for the host any more
        // A process that is being started mounts in the root, and joins the cgroup first.
        let starting = container.clone();
        let settled = tokio::task::spawn_blocking(move || starting.workload.settle());
        let settled = tokio::time::timeout(KILL_LIMIT, settled).await;
        let _joined = settled.map_err(|_| Error::TimedOut("the start of a container"))?;
        container.cgroup.kill();
        if matches!(container.workload.progress(), WorkloadPhase::Running(_)) {
            let ended = tokio::time::timeout(KILL_LIMIT, container.workload.wait_exit()).await;
            ended.map_err(|_| Error::TimedOut("the end of a container"))?;
        }
        let images = self.images.clone();
        let removing = container.clone();
        let removed = tokio::task::spawn_blocking(move || {
            removing.close_root();
            removing.place.remove(&images)?;
            removing.cgroup.remove()
        });
        removed
            .await
            .map_err(|_| Error::TimedOut("removing a container"))?
            .map_err(Error::io(format!("remove container {id}")))?;
        self.lock().remove(id);
        self.changed.send_modify(|n| *n = n.wrapping_add(1));
        Ok(())
    }

    /// Changes the limits of a container.
    ///
    /// # Errors
    /// The container does not exist, or the kernel refuses a limit.
    pub(crate) fn update(&self, id: &str, limits: &CgroupLimits) -> Result<(), Error> {
        self.get(id)?.cgroup.update(limits)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Lists all containers with their current status.
    pub(crate) fn list(&self) -> Vec<ContainerStatus> {
        self.snapshot().iter().map(|container| container.status()).collect()
    }

    /// Ends all containers before the power-off: stop signals, the grace, SIGKILL.
    pub(crate) async fn stop_all(&self, grace: Duration, reaper: &Reaper) {
        let running: Vec<_> = self.snapshot();
        let stops = running.iter().map(|container| async {
            if let Err(error) = self.stop(&container.plan.id, grace, reaper).await {
                say!("stop container {}: {error}", container.plan.id);
            }
        });
        futures_util::future::join_all(stops).await;
    }

    /// Unmounts the containers' file systems, so that the disk is clean. Best effort.
    pub(crate) fn unmount_all(&self) {
        for container in std::mem::take(&mut *self.lock()).into_values() {
            container.close_root();
            container.place.unmount_all(&self.images);
        }
    }

    fn statistics(&self) -> Vec<ContainerStatistics> {
        let running =
            |container: &&Arc<Container>| matches!(container.workload.progress(), WorkloadPhase::Running(_));
        self.snapshot().iter().filter(running).map(|container| container.statistics()).collect()
    }

    fn snapshot(&self) -> Vec<Arc<Container>> {
        self.lock().values().cloned().collect()
    }

    fn get(&self, id: &str) -> Result<Arc<Container>, Error> {
        let missing = || Error::NotFound(format!("container {id} not found"));
        self.lock().get(id).cloned().ok_or_else(missing)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Container>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Container {
    fn pid(&self) -> u32 {
        match self.workload.progress() {
            WorkloadPhase::Running(pid) => number(pid),
            WorkloadPhase::NotStarted | WorkloadPhase::Exited(_) => 0,
        }
    }

    /// Root of the container, until it is removed.
    fn root(&self) -> Result<Arc<Root>, Error> {
        let root = self.root.lock().unwrap_or_else(PoisonError::into_inner).clone();
        root.ok_or_else(|| Error::State(format!("container {} is being removed", self.plan.id)))
    }

    fn close_root(&self) {
        self.root.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Reason why the container never ran.
    fn failure(&self) -> Option<Exit> {
        match self.workload.progress() {
            WorkloadPhase::Exited(exit) => Some(exit).filter(|exit| !exit.error.is_empty()),
            WorkloadPhase::NotStarted | WorkloadPhase::Running(_) => None,
        }
    }

    /// User of the container's process; `None` if the image does not have that user.
    fn user(&self) -> Option<ProcessUser> {
        let user = crate::process::identity(self.root().ok()?.as_ref(), &self.plan.process).ok()?;
        Some(ProcessUser { uid: user.uid, gid: user.gid, groups: user.groups })
    }

    fn first_process(&self) -> Result<Arc<OwnedFd>, Error> {
        let runs = matches!(self.workload.progress(), WorkloadPhase::Running(_));
        let process = self.first.get().filter(|_| runs).cloned();
        process.ok_or_else(|| Error::State(format!("container {} is not running", self.plan.id)))
    }

    fn signal(&self, signal: Signal, reaper: &Reaper) -> bool {
        match self.workload.progress() {
            WorkloadPhase::Running(pid) => reaper.signal_process(pid, signal),
            WorkloadPhase::NotStarted | WorkloadPhase::Exited(_) => false,
        }
    }

    fn status(&self) -> ContainerStatus {
        let state = match self.workload.progress() {
            WorkloadPhase::NotStarted => WorkloadState::NotStarted,
            WorkloadPhase::Running(_) => WorkloadState::Running,
            WorkloadPhase::Exited(_) => WorkloadState::Exited,
        };
        ContainerStatus { id: self.plan.id.clone(), state: state.into(), pid: self.pid(), exit: self.exit() }
    }

    /// Exit of the container, if it has ended.
    fn exit(&self) -> Option<ContainerExited> {
        let WorkloadPhase::Exited(exit) = self.workload.progress() else { return None };
        let termination_message = match &self.plan.termination_message {
            Some(_) => self.place.termination_message(),
            None => vec![],
        };
        Some(ContainerExited {
            container: self.plan.id.clone(),
            exit: Some(exit_status(exit)),
            oom_killed: self.cgroup.oom_killed(),
            end_offset: self.workload.logs().end(),
            termination_message,
            time_unix_ns: self.workload.exited_at_ns(),
        })
    }

    fn statistics(&self) -> ContainerStatistics {
        let (filesystem_used_bytes, filesystem_inodes) = self.place.usage();
        ContainerStatistics {
            container: self.plan.id.clone(),
            filesystem_used_bytes,
            filesystem_inodes,
            ..self.cgroup.statistics()
        }
    }
}
