//! Guest agent as `/init`: the first process of the guest, and its last. The kernel never selects it when memory is short
//! (`oom_unkillable_task` in `mm/oom_kill.c`).

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use rustix::process::{Resource, Rlimit};

use crate::agent::Agent;
use crate::console::{self, say};
use crate::{base_mounts, channel, disks, modules, mounts, net, pit, session, shutdown, vsock};

/// Number of threads for file operations next to the serving one. A thread costs only the touched part of its stack.
const FILE_THREADS: usize = 8;
const STACK_BYTES: usize = 256 * 1024;
/// Limit of open file descriptors of a process, as container engines set it.
const FILES: Rlimit = Rlimit { current: Some(1024), maximum: Some(524_288) };
/// File that expedites RCU grace periods. A process that joins a cgroup waits for one: otherwise several clock ticks, half of
/// the time of an exec (kernel, Documentation/admin-guide/kernel-parameters.txt, `rcupdate.rcu_expedited`).
const RCU_EXPEDITED: &str = "/sys/kernel/rcu_expedited";
/// Time that idle threads are kept: practically for ever, without an overflow.
const KEEP: Duration = Duration::from_secs(10 * 365 * 86_400);
/// Pause after a failed open of the port.
const PAUSE: Duration = Duration::from_millis(10);

/// Boots the guest, serves until a shutdown is requested, and powers off.
pub fn run() {
    mounts::mount_own();
    console::open();
    if let Some(fault) = coracle_procfs::timer::fault() {
        // The host starts the VM again.
        say!("{fault}: going off");
        return shutdown::end_vm();
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
    say!("version {} up after {} ms", env!("CARGO_PKG_VERSION"), crate::sys::uptime_ms());
    let agent = Agent::as_pid1();
    if let Err(e) = serve(&agent) {
        say!("cannot serve: {e}");
    }
    shutdown::power_off(&agent);
}

/// Prepares everything that does not depend on a VM, so that clones need not. A failure is logged, and the step is repeated
/// when the guest is configured.
fn prepare() {
    disks::prepare();
    let ready = mounts::prepare().and_then(|()| base_mounts::prepare()).and_then(|()| net::prepare());
    if let Err(e) = ready {
        say!("prepare: {e}");
    }
}

/// Serves sessions until a shutdown is requested.
///
/// # Errors
/// When the kernel refuses the resources of a runtime.
pub(crate) fn serve(agent: &Arc<Agent>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_stack_size(STACK_BYTES)
        .max_blocking_threads(FILE_THREADS)
        .thread_keep_alive(KEEP)
        .build()?;
    runtime.block_on(async {
        start_threads().await;
        let off = async {
            shutdown::await_shutdown(agent).await;
            agent.unmount_idle_volumes().await; // while the host still serves its directories
            agent.close();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            result = agent.reap() => result,
            () = serve_sessions(agent) => Ok(()),
            () = off => Ok(()),
        }
    })?;
    agent.forget_root();
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

/// Starts threads for file operations in advance. One at least: when a fork bomb uses up all processes, file operations wait for
/// it instead of panicking. The second one takes an operation that follows another at once, whose thread is not idle yet: a
/// clone would start a thread for it, a tenth of what its guest does.
async fn start_threads() {
    const THREADS: usize = 2;
    let all_run = Arc::new(Barrier::new(THREADS));
    let threads = [(); THREADS].map(|()| {
        let all_run = Arc::clone(&all_run);
        tokio::task::spawn_blocking(move || {
            all_run.wait();
        })
    });
    for thread in threads {
        let _runs = thread.await;
    }
}

/// Channel to the host.
enum HostChannel {
    /// Port of a virtio-serial device, which is opened again for each session.
    Serial,
    /// Vsock.
    Vsock(vsock::Listener),
}

impl HostChannel {
    fn detect() -> Self {
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

/// Serves one session after the other, until the shutdown.
async fn serve_sessions(agent: &Arc<Agent>) {
    let host_channel = HostChannel::detect();
    let mut number = 0u64;
    while !agent.is_closing() {
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
