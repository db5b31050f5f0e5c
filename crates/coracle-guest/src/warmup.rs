//! Warm-up: a pooled clone runs the configure path once on dummy data, and a container after it, so that a later assignment
//! finds translated code. Under TCG, code is slow the first time that it runs in a VMM. All changes are undone.

use std::collections::HashSet;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use coracle_proto::guest::{
    CgroupLimits, ConfigureRequest, ConfigureSandboxRequest, CreateContainerRequest, Network, PrepareRequest,
    Process, RootMount, Security,
};
use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::cgroup::{CONTAINERS, Cgroup};
use crate::configure;
use crate::console::say;
use crate::containers::Containers;
use crate::error::Error;
use crate::process::{self, SpawnError};
use crate::reap::Reaper;
use crate::rootfs::Root;
use crate::sys::IfValue;
use crate::{base_mounts, mounts, net};

/// The image's program, and how long it may run.
const PROGRAM: &str = "/bin/program";
const PROGRAM_LIMIT: Duration = Duration::from_secs(5);
/// With this argument it ends at once, also as the first process of a container.
pub const WARM_UP: &str = "warm-up";
/// Addresses of no machine: one that is locally administered, and one of TEST-NET-1 (RFC 5737).
const MAC: &str = "02:00:00:00:00:01";
const ADDRESS: &str = "192.0.2.2/24";
const GATEWAY: &str = "192.0.2.1";

const HOSTNAME: &str = "pooled";
/// What containers have covered by default.
const MASKED: &str = "/proc/kcore";
const READ_ONLY: &str = "/proc/sys";

/// What a warm-up does.
pub(crate) struct Plan {
    /// A machine with the image as its root.
    machine: configure::Plan,
    /// A machine for containers, and one of them.
    sandbox: configure::Plan,
    container: CreateContainerRequest,
}

/// What is done; `None` where nothing was asked for.
pub(crate) fn plan(request: &PrepareRequest) -> Result<Option<Plan>, Error> {
    if request.image_device.is_empty() {
        return Ok(None);
    }
    let network = Network {
        mac: MAC.into(),
        address: ADDRESS.into(),
        gateway: GATEWAY.into(),
        nameservers: vec![GATEWAY.into()],
        ..Network::default()
    };
    let root = RootMount {
        image_device: request.image_device.clone(),
        image_fs: "erofs".into(),
        overlay_device: request.overlay_device.clone(),
    };
    let machine = ConfigureRequest {
        hostname: HOSTNAME.into(),
        machine_id: "0".repeat(32),
        network: net::hardware()?.map(|_| network),
        root: Some(root),
        ..ConfigureRequest::default()
    };
    let sandbox = ConfigureSandboxRequest {
        hostname: HOSTNAME.into(),
        overlay_device: request.overlay_device.clone(),
        ..ConfigureSandboxRequest::default()
    };
    let container = CreateContainerRequest {
        id: HOSTNAME.into(),
        image_device: request.image_device.clone(),
        image_fs: "erofs".into(),
        process: Some(process()),
        security: Some(Security {
            masked_paths: vec![MASKED.into()],
            read_only_paths: vec![READ_ONLY.into()],
            ..Security::default()
        }),
        ..CreateContainerRequest::default()
    };
    let machine = configure::Plan::parse(machine)?;
    let sandbox = configure::Plan::parse_sandbox(sandbox)?;
    Ok(Some(Plan { machine, sandbox, container }))
}

/// Does it, and undoes it. The disk is prepared. Blocking, on a thread of the runtime's.
///
/// # Errors
/// When a step of either fails: the machine is of no use then.
pub(crate) fn run(plan: Plan, containers: &Arc<Containers>, reaper: &Reaper) -> Result<(), Error> {
    let before = Before::look()?;
    let root = configure::apply(&plan.machine, None, true)?.root;
    let root = root.ok_or_else(|| Error::State("no root for the warm-up".into()))?;
    let ran = Handle::current().block_on(program(reaper, &root));
    drop(root);
    before.restore()?;
    ran?;
    let before = Before::look()?;
    let cgroup = Cgroup::create(CONTAINERS, &CgroupLimits::default())?;
    configure::apply(&plan.sandbox, None, true)?;
    let ran = Handle::current().block_on(container(containers, plan.container, reaper));
    cgroup.remove_all().map_err(Error::io("remove the cgroup of containers"))?;
    before.restore_sandbox()?;
    ran
}

fn process() -> Process {
    Process { argv: vec![PROGRAM.into(), WARM_UP.into()], ..Process::default() }
}

/// Makes a container, runs its program until it ends, with any result, and removes it. A kernel that cannot have containers
/// is warmed up for a machine without them.
///
/// # Errors
/// When something of the container is left.
async fn container(
    containers: &Arc<Containers>,
    request: CreateContainerRequest,
    reaper: &Reaper,
) -> Result<(), Error> {
    let ran = async {
        containers.create(request).await?;
        containers.start(HOSTNAME, reaper)?;
        containers.stop(HOSTNAME, PROGRAM_LIMIT, reaper).await
    };
    if let Err(error) = ran.await {
        say!("container of the warm-up: {error}");
    }
    containers.remove(HOSTNAME).await
}

/// Runs the image's program until it ends, with any result.
async fn program(reaper: &Reaper, root: &Root) -> Result<(), Error> {
    let process = process();
    match process::start(reaper, root, &process, true, None) {
        Ok(running) => match timeout(PROGRAM_LIMIT, running.exit).await {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::TimedOut("the program of the warm-up")),
        },
        Err(SpawnError::Request(error)) => Err(error),
        Err(SpawnError::Cannot(exit)) => Err(Error::State(exit.error)),
    }
}

/// What the machine was.
struct Before {
    hostname: Vec<u8>,
    hardware: Option<IfValue>,
    upper: HashSet<OsString>,
}

impl Before {
    fn look() -> Result<Self, Error> {
        Ok(Self {
            hostname: rustix::system::uname().nodename().to_bytes().to_owned(),
            hardware: net::hardware()?,
            upper: mounts::in_upper().map_err(Error::io("list the disk"))?,
        })
    }

    fn restore(self) -> Result<(), Error> {
        mounts::undo_root(&self.upper).map_err(Error::io("take the root apart"))?;
        self.forget()
    }

    fn restore_sandbox(self) -> Result<(), Error> {
        let undone = mounts::undo_sandbox();
        undone.map_err(Error::io("take the sandbox apart"))?;
        self.forget()
    }

    fn forget(self) -> Result<(), Error> {
        self.hardware.map_or(Ok(()), net::forget)?;
        rustix::system::sethostname(&self.hostname).map_err(Error::io("set the host name"))?;
        base_mounts::prepare()
    }
}
