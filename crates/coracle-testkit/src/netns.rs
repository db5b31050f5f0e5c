//! Network namespaces for tests: taps, bridges, servers and load stay inside and disappear with it.
//!
//! ```no_run
//! # use coracle_testkit::netns;
//! #[test]
//! fn bridge_is_removed() {
//!     netns::run(|| async { /* make taps, start processes, dial 127.0.0.1 */ });
//! }
//! ```
//!
//! The body runs on a thread of its own in a fresh network *and* mount namespace, on a multi-thread runtime whose workers, and
//! so all child processes, are in these namespaces too. `/sys/class/net` is right because of the mount namespace: a sysfs shows
//! the network namespace of the process that mounted it. `/sys/fs/cgroup` stays as it was.
//!
//! `/proc/self` is the *process*, whose first thread stays outside. Inside, read `/proc/thread-self/{net,mountinfo,ns}`.

#![expect(unsafe_code, reason = "namespaces and interface flags are bare system calls")]

use std::{
    collections::BTreeSet,
    ffi::CString,
    fs::{self, File},
    io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    panic,
    path::Path,
    process, ptr, thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};

use crate::eventually::SLOWEST;
use crate::{TestResult, leaks, tools};

/// Default deadline of a test.
pub const DEADLINE: Duration = Duration::from_secs(120);
/// Time limit for the processes of an ended test to exit.
const SETTLE: Duration = Duration::from_secs(6);

/// Runs `body` in a fresh namespace and fails when it leaves a process, interface, nft table or mount behind. Needs root:
/// without it, prints the reason and skips the test, or fails it in CI.
pub fn run<F, Fut>(body: F)
where
    F: FnOnce() -> Fut + Send,
    Fut: Future<Output: TestResult>,
{
    run_within(DEADLINE, body);
}

/// Like [`run`], with a deadline other than [`DEADLINE`].
pub fn run_within<F, Fut>(deadline: Duration, body: F)
where
    F: FnOnce() -> Fut + Send,
    Fut: Future<Output: TestResult>,
{
    let Some(netns) = Netns::new_or_skip() else { return };
    let before = netns.sync(Contents::capture);
    let result = panic::catch_unwind(panic::AssertUnwindSafe(|| netns.enter(deadline, body)));
    let left = netns.sync(|| Contents::settled(before.as_ref().ok(), SETTLE));
    netns.sync(|| kill_members(SETTLE));
    if let Err(cause) = result {
        panic::resume_unwind(cause);
    }
    if let Err(left) = left {
        settle_err(left);
    }
}

#[expect(clippy::panic, reason = "this is how a test fails")]
fn settle_err(error: anyhow::Error) {
    panic!("left behind in the namespace: {error:#}");
}

/// Network and mount namespace, held open by descriptors. The namespace ends when they are closed and its last process has
/// exited.
#[derive(Debug)]
pub struct Netns {
    net: OwnedFd,
    mnt: OwnedFd,
}

impl Netns {
    /// Creates a fresh namespace with loopback up.
    ///
    /// # Errors
    /// Without root, or when the kernel refuses.
    pub fn new() -> anyhow::Result<Self> {
        thread::scope(|scope| {
            scope.spawn(Self::create).join().unwrap_or_else(|cause| panic::resume_unwind(cause))
        })
    }

    /// Creates a fresh namespace. Without root, skips the test, or fails it in CI.
    #[must_use]
    pub fn new_or_skip() -> Option<Self> {
        if fs::metadata("/proc/self").is_ok_and(|m| m.uid() != 0) {
            tools::skip("network namespaces need root");
            return None;
        }
        match Self::new() {
            Ok(netns) => Some(netns),
            Err(error) => {
                settle_err(error);
                None
            }
        }
    }

    fn create() -> anyhow::Result<Self> {
        // SAFETY: plain system call. The calling thread was created for it, and shares nothing that the call would take away.
        check(unsafe { libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) })
            .context("unshare network and mounts")?;
        loopback_up().context("set loopback up")?;
        own_sysfs().context("mount a sysfs of the namespace")?;
        Ok(Self {
            net: File::open("/proc/thread-self/ns/net")?.into(),
            mnt: File::open("/proc/thread-self/ns/mnt")?.into(),
        })
    }

    /// Moves the calling thread, and so its future children, into the namespace permanently.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn join_thread(&self) -> anyhow::Result<()> {
        // SAFETY: plain system calls on descriptors that we own. CLONE_FS comes first: the kernel refuses a mount namespace to
        // a thread that shares its working directory with others.
        unsafe {
            check(libc::unshare(libc::CLONE_FS)).context("unshare working directory")?;
            check(libc::setns(self.net.as_raw_fd(), libc::CLONE_NEWNET))
                .context("enter network namespace")?;
            check(libc::setns(self.mnt.as_raw_fd(), libc::CLONE_NEWNS)).context("enter mount namespace")?;
        }
        Ok(())
    }

    /// Runs `f` on a thread in the namespace.
    pub fn sync<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        let inside = || {
            if let Err(error) = self.join_thread() {
                settle_err(error);
            }
            f()
        };
        thread::scope(|scope| scope.spawn(inside).join().unwrap_or_else(|cause| panic::resume_unwind(cause)))
    }

    /// Runs `body` in the namespace on a multi-thread runtime of its own, for at most `deadline` (on a usual host, see
    /// [`SLOWEST`]).
    ///
    /// # Panics
    /// When `body` panics, returns an error, or does not end in time.
    pub fn enter<F, Fut>(&self, deadline: Duration, body: F)
    where
        F: FnOnce() -> Fut + Send,
        Fut: Future<Output: TestResult>,
    {
        let deadline = deadline * SLOWEST;
        self.sync(|| {
            let runtime = runtime();
            let ended = runtime.block_on(async { tokio::time::timeout(deadline, Box::pin(body())).await });
            // Drops the tasks of an ended body now, because they may own processes.
            runtime.shutdown_timeout(Duration::from_secs(2));
            match ended {
                Ok(outcome) => outcome.settle(),
                Err(_) => settle_err(anyhow::anyhow!("the test did not end within {deadline:?}")),
            }
        });
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime needs only threads and an epoll descriptor")
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sets IFF_UP on `lo` (netdevice(7)).
fn loopback_up() -> io::Result<()> {
    // SAFETY: the descriptor is new and owned here; `ifreq` is plain data, zeroed, and outlives both calls.
    unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        check(fd)?;
        let socket = OwnedFd::from_raw_fd(fd);
        let mut request: libc::ifreq = std::mem::zeroed();
        for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
            *to = libc::c_char::try_from(*from).unwrap_or_default();
        }
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request))?;
        request.ifr_ifru.ifru_flags |= libc::c_short::try_from(libc::IFF_UP).unwrap_or_default();
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request))
    }
}

/// Mounts a sysfs with the interfaces of this namespace over `/sys`, and mounts the cgroup trees on top again.
fn own_sysfs() -> anyhow::Result<()> {
    mount(None, "/", None, libc::MS_REC | libc::MS_PRIVATE)?;
    let held = tempfile::tempdir()?;
    let hold = held.path().to_str().context("temporary folder is not UTF-8")?;
    mount(Some("/sys/fs/cgroup"), hold, None, libc::MS_BIND | libc::MS_REC)?;
    mount(Some("sysfs"), "/sys", Some("sysfs"), libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC)?;
    mount(Some(hold), "/sys/fs/cgroup", None, libc::MS_BIND | libc::MS_REC)?;
    let target = CString::new(hold)?;
    // SAFETY: the path is NUL-terminated and outlives the call.
    check(unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) })?;
    Ok(())
}

fn mount(source: Option<&str>, target: &str, kind: Option<&str>, flags: libc::c_ulong) -> anyhow::Result<()> {
    let text = |s: Option<&str>| s.map(CString::new).transpose();
    let (source, at, kind) = (text(source)?, CString::new(target)?, text(kind)?);
    let raw = |s: &Option<CString>| s.as_ref().map_or(ptr::null(), |s| s.as_ptr());
    // SAFETY: each pointer is null or a NUL-terminated string that outlives the call.
    check(unsafe { libc::mount(raw(&source), at.as_ptr(), raw(&kind), flags, ptr::null()) })
        .with_context(|| format!("mount {target}"))
}

/// Objects in the calling thread's namespaces that outlive a thread.
#[derive(Clone, Debug, Default, PartialEq)]
struct Contents(BTreeSet<String>);

impl Contents {
    fn capture() -> anyhow::Result<Self> {
        let mut all = BTreeSet::new();
        all.extend(members()?.into_iter().map(|(pid, name)| format!("process {pid} {name}")));
        all.extend(leaks::interfaces().into_iter().map(|name| format!("interface {name}")));
        all.extend(leaks::nft_tables().into_iter().map(|name| format!("nft table {name}")));
        all.extend(leaks::mount_points().into_iter().map(|at| format!("mount {at}")));
        Ok(Self(all))
    }

    /// Waits until every object that was not there `before` is gone. Processes get until `limit` to exit.
    fn settled(before: Option<&Self>, limit: Duration) -> anyhow::Result<()> {
        let before = before.context("no inventory was taken at the start")?;
        let end = Instant::now() + limit;
        loop {
            let now = Self::capture()?;
            let left: Vec<_> = now.0.difference(&before.0).cloned().collect();
            if left.is_empty() {
                return Ok(());
            }
            ensure!(Instant::now() < end, "{}", left.join("; "));
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Other processes in the calling thread's network namespace, without zombies.
fn members() -> anyhow::Result<Vec<(libc::pid_t, String)>> {
    let ours = fs::metadata("/proc/thread-self/ns/net")?.ino();
    let interfaces = leaks::interfaces();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<libc::pid_t>().ok()) else {
            continue;
        };
        let inside = fs::metadata(entry.path().join("ns/net")).is_ok_and(|m| m.ino() == ours);
        if (inside || has_tap_of(&entry.path(), &interfaces)) && pid.unsigned_abs() != process::id() {
            let name =
                fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default().replace('\0', " ");
            if !name.is_empty() {
                found.push((pid, name));
            }
        }
    }
    Ok(found)
}

/// True when the process has one of these interfaces open. A VMM in a jail runs as another user in a network namespace of its
/// own, but its tap is in the namespace of its daemon (Linux, drivers/net/tun.c, `tun_chr_show_fdinfo`).
fn has_tap_of(process: &Path, interfaces: &BTreeSet<String>) -> bool {
    let own = fs::metadata("/proc/self").map(|m| m.uid()).ok();
    let is_other_user = fs::metadata(process).is_ok_and(|m| Some(m.uid()) != own);
    let files = is_other_user.then(|| fs::read_dir(process.join("fdinfo")).ok()).flatten();
    files.into_iter().flatten().flatten().any(|file| {
        let info = fs::read_to_string(file.path()).unwrap_or_default();
        let tap = info.lines().find_map(|line| line.strip_prefix("iff:")).map(str::trim);
        tap.is_some_and(|tap| interfaces.contains(tap))
    })
}

/// Kills the processes that a test left in its namespace. All of them belong to the test.
fn kill_members(limit: Duration) {
    let end = Instant::now() + limit;
    while let Ok(left) = members() {
        if left.is_empty() || Instant::now() > end {
            return;
        }
        for (pid, _) in left {
            // SAFETY: plain system call; the process is in a namespace that this test created.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Fails outside a namespace of this module: a guard for helpers that change the network.
///
/// # Errors
/// When the calling thread is in the network namespace in which the process started.
pub fn ensure_inside() -> anyhow::Result<()> {
    let ours = fs::metadata("/proc/thread-self/ns/net")?.ino();
    let outside = fs::metadata("/proc/self/ns/net")?.ino();
    if ours == outside {
        bail!("this would change the machine's own network: run it inside netns::run");
    }
    Ok(())
}
