//! Warm-up: a pooled clone runs the configure path once on dummy data, so that a later assignment finds translated code.
//! Under TCG, code is slow the first time that it runs in a VMM. All changes are undone.

use std::collections::HashSet;
use std::ffi::OsString;
use std::time::Duration;

use coracle_proto::guest::{ConfigureRequest, Network, PrepareRequest, Process, RootMount};
use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::configure::{self, Plan};
use crate::error::Error;
use crate::process::{self, SpawnError};
use crate::reap::Reaper;
use crate::rootfs::Root;
use crate::sys::IfValue;
use crate::{base_mounts, mounts, net};

/// The image's program, and how long it may run.
const PROGRAM: &str = "/bin/program";
const PROGRAM_LIMIT: Duration = Duration::from_secs(5);
/// Addresses of no machine: one that is locally administered, and one of TEST-NET-1 (RFC 5737).
const MAC: &str = "02:00:00:00:00:01";
const ADDRESS: &str = "192.0.2.2/24";
const GATEWAY: &str = "192.0.2.1";

/// What is configured; `None` where nothing was asked for.
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
    let request = ConfigureRequest {
        hostname: "pooled".into(),
        machine_id: "0".repeat(32),
        network: net::hardware()?.map(|_| network),
        root: Some(root),
        ..ConfigureRequest::default()
    };
    Plan::parse(request).map(Some)
}

/// Does it, and undoes it. The disk is prepared. Blocking, on a thread of the runtime's.
///
/// # Errors
/// When a step of either fails: the machine is of no use then.
pub(crate) fn run(plan: &Plan, reaper: &Reaper) -> Result<(), Error> {
    let before = Before::look()?;
    let root = configure::apply(plan, None, true)?.root;
    let root = root.ok_or_else(|| Error::State("no root for the warm-up".into()))?;
    let ran = Handle::current().block_on(program(reaper, &root));
    drop(root);
    before.restore()?;
    ran
}

/// Runs the image's program until it ends, with any result.
async fn program(reaper: &Reaper, root: &Root) -> Result<(), Error> {
    let process = Process { argv: vec![PROGRAM.into()], ..Process::default() };
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
        self.hardware.map_or(Ok(()), net::forget)?;
        rustix::system::sethostname(&self.hostname).map_err(Error::io("set the host name"))?;
        base_mounts::prepare()
    }
}
