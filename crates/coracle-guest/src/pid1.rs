//! The agent as `/init`: the machine's first process, and its last.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, Rlimit};

use crate::agent::Agent;
use crate::console::{self, say};
use crate::{base_mounts, channel, disks, modules, mounts, net, pit, session, shutdown, vsock};

/// Threads for file work beside the one that serves; each costs its stack only where touched.
const FILE_THREADS: usize = 8;
const STACK_BYTES: usize = 256 * 1024;
/// Descriptors that a process may open: what container engines grant.
const FILES: Rlimit = Rlimit { current: Some(1024), maximum: Some(524_288) };
/// A process that joins a cgroup waits for a grace period of RCU: several ticks of the clock, half of the time of an exec,
/// unless it is expedited (kernel, Documentation/admin-guide/kernel-parameters.txt, `rcupdate.rcu_expedited`).
const RCU_EXPEDITED: &str = "/sys/kernel/rcu_expedited";
/// Idle threads stay: as good as for ever, without an overflow.
const KEEP: Duration = Duration::from_secs(10 * 365 * 86_400);
/// After an opening of the port that went wrong.
const PAUSE: Duration = Duration::from_millis(10);

/// Boots the machine, serves until it shall go off, and switches it off.
pub fn run() {
    mounts::at_boot();
    console::open();
    if let Some(fault) = coracle_procfs::timer::fault() {
        // Its host starts it again.
        say!("{fault}: going off");
        return shutdown::end();
    }
    modules::load();
    if let Err(e) = std::fs::write(RCU_EXPEDITED, "1") {
        say!("write {RCU_EXPEDITED}: {e}");
    }
    if let Err(e) = pit::stop_unused() {
        say!("stop the interval timer: {e}");
    }
    prepare();
    let _ = rustix::process::setrlimit(Resource::Nofile, FILES);
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    say!("version {} up after {} ms", env!("CARGO_PKG_VERSION"), crate::sys::uptime_ms());
    let agent = Agent::of_machine();
    if let Err(e) = serve(&agent) {
        say!("cannot serve: {e}");
    }
    shutdown::power_off(&agent);
}

/// What can be done before the machine is anybody's, so that its clones need not. What fails is tried again, and told,
/// when the machine is configured.
fn prepare() {
    disks::prepare();
    let ready = mounts::prepare().and_then(|()| base_mounts::prepare()).and_then(|()| net::prepare());
    if let Err(e) = ready {
        say!("prepare: {e}");
    }
}

/// Serves sessions until the machine shall go off.
///
/// # Errors
/// When the kernel refuses what a runtime needs.
pub(crate) fn serve(agent: &Arc<Agent>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_stack_size(STACK_BYTES)
        .max_blocking_threads(FILE_THREADS)
        .thread_keep_alive(KEEP)
        .build()?;
    runtime.block_on(async {
        // One thread from the start: when a fork bomb has taken all others, file work waits for it instead of panicking.
        let _ = tokio::task::spawn_blocking(|| ()).await;
        let off = async {
            shutdown::requested(agent).await;
            agent.leave_volumes().await; // while the host still serves its directories
            agent.close();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            result = agent.reap() => result,
            () = sessions(agent) => Ok(()),
            () = off => Ok(()),
        }
    })?;
    agent.forget_root();
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

/// The host's way in.
enum HostChannel {
    /// A port of a virtio-serial device, which is opened anew for each session.
    Serial,
    /// A vsock.
    Vsock(vsock::Listener),
}

impl HostChannel {
    fn of_machine() -> Self {
        match modules::has_vsock().then(vsock::Listener::bind) {
            Some(Ok(listener)) => return Self::Vsock(listener),
            Some(Err(e)) => say!("vsock: {e}"),
            None => {}
        }
        Self::Serial
    }

    async fn open(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Serial => Ok(channel::open(Path::new("/sys"), Path::new("/dev")).await),
            Self::Vsock(listener) => listener.accept().await,
        }
    }
}

/// One session after the other, until the machine goes off.
async fn sessions(agent: &Arc<Agent>) {
    let host_channel = HostChannel::of_machine();
    let mut number = 0u64;
    while !agent.closing() {
        number = number.saturating_add(1);
        let session = async { session::serve_port(host_channel.open().await?, number, agent).await };
        let waiting = async {
            agent.closed().await;
            tokio::time::sleep(Duration::from_secs(1)).await; // a session under way closes itself, sooner
        };
        let result = tokio::select! {
            result = session => result,
            () = waiting => return,
        };
        if let Err(e) = result {
            say!("session {number}: {e}");
            tokio::time::sleep(PAUSE).await;
        }
    }
}
