//! FUSE mount of the test host's own kernel, whose messages a `SharedDirServer` in this process answers.
//!
//! ```text
//! the test (its own mount namespace: the guest) ─▶ kernel ─▶ /dev/fuse ─▶ pumps (outside: the daemon) ─▶ SharedDirServer
//! ```

use std::ffi::CString;
use std::fs::{self, File, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{RwLock, mpsc};
use std::thread;
use std::time::Duration;

use coracle_share::{SharedDirServer, SharedDirSpec, Submounts};
use coracle_testkit::netns::Netns;
use coracle_testkit::tools;
use rustix::fs::{Gid, Uid};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Time after which an access counts as hanging.
const PATIENCE: Duration = Duration::from_secs(120);
/// Maximum size of a message: 128 KiB of data and its headers.
const MESSAGE_MAX: usize = 128 * 1024 + 4096;
/// Number of threads that answer.
const PUMPS: usize = 2;

/// Options of the served directory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MountOptions {
    pub(crate) read_only: bool,
    /// Number of messages after which the daemon dies with its reply; the next daemon gets the message again.
    pub(crate) dies_every: Option<u32>,
    /// User of the daemon, instead of root.
    pub(crate) daemon: Option<u32>,
    /// Makes the directory an overlay over `lower`, which has a file of this name with the content `lower`.
    pub(crate) overlay: Option<&'static str>,
}

/// Mounted directory, as the guest sees it.
pub(crate) struct Mount<'a> {
    /// Mount point in the guest.
    pub(crate) guest: PathBuf,
    /// Directory on the host.
    pub(crate) host: PathBuf,
    served: &'a Served<'a>,
}

impl Mount<'_> {
    pub(crate) fn restart(&self) {
        self.served.restart();
    }

    /// Ends the daemon, calls `between` with the path of its table, and starts the next one.
    pub(crate) fn restart_after(&self, between: impl FnOnce(&Path)) {
        let mut server = self.served.server.write().unwrap();
        *server = None;
        between(&self.served.spec.table);
        *server = Some(SharedDirServer::open(self.served.spec.clone()).unwrap());
    }

    /// Number of messages that were answered so far.
    pub(crate) fn messages(&self) -> u32 {
        self.served.messages.load(Ordering::Relaxed)
    }
}

/// Runs `body` while the directory `host` is mounted as `guest`. Next to it is a directory `outside` with a file `secret` that
/// the daemon can see and the guest cannot.
pub(crate) fn run_on_mount(options: MountOptions, body: impl FnOnce(&Mount<'_>) + Send) {
    let Some(netns) = Netns::new_or_skip() else { return };
    let fuse = match File::options().read(true).write(true).open("/dev/fuse") {
        Ok(fuse) => fuse,
        Err(error) => return tools::skip(&format!("/dev/fuse cannot be opened: {error}")),
    };
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["", "host", "guest", "outside", "state"] {
        fs::create_dir_all(at(name)).unwrap();
        fs::set_permissions(at(name), Permissions::from_mode(0o755)).unwrap();
    }
    fs::write(at("outside/secret"), "not for guests").unwrap();
    for name in ["host", "state"] {
        chown(at(name), options.daemon, options.daemon).unwrap();
    }
    let (root, table) = (at("host"), at("state/ids.table"));
    let spec = SharedDirSpec {
        root,
        read_only: options.read_only,
        submounts: Submounts::default(),
        ids: None,
        table,
    };
    let (server, messages) = (RwLock::new(None), AtomicU32::new(0));
    let served = Served { spec, options, netns: &netns, server, messages };
    let guest = at("guest");
    netns.sync(|| {
        mount("covered", at("outside"), "tmpfs", MountFlags::empty(), None).unwrap();
        if let Some(name) = options.overlay {
            overlay(&at("host"), &at("lower"), name);
        }
        let fd = fuse.as_raw_fd();
        let options = format!("fd={fd},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other");
        let options = CString::new(options).unwrap();
        mount("coracle", &guest, "fuse", MountFlags::NODEV | MountFlags::NOSUID, options.as_c_str()).unwrap();
    });
    let ends = || Ends(&netns, &guest);
    let _ends = ends();
    served.daemon(|| served.restart());
    let (ended, end) = mpsc::channel::<()>();
    thread::scope(|scope| {
        for _ in 0..PUMPS {
            scope.spawn(|| {
                let _ends = ends();
                served.daemon(|| served.pump(&fuse).unwrap());
            });
        }
        scope.spawn(move || {
            // If the body hangs, the mount is ended, so that its accesses fail.
            if end.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
                drop(ends());
            }
        });
        let _ended = ended; // when this is dropped, the watch ends
        let _ends = ends();
        netns.sync(|| body(&Mount { guest: guest.clone(), host: at("host"), served: &served }));
    });
}

/// Mounts an overlay over a new `lower` with one file.
fn overlay(at: &Path, lower: &Path, name: &str) {
    let beside = |part: &str| lower.with_file_name(part);
    for part in ["lower", "upper", "work"] {
        fs::create_dir(beside(part)).unwrap();
    }
    fs::write(lower.join(name), "lower").unwrap();
    let [lower, upper, work] =
        ["lower", "upper", "work"].map(|part| beside(part).into_os_string().into_string().unwrap());
    let options = CString::new(format!("lowerdir={lower},upperdir={upper},workdir={work}")).unwrap();
    mount("overlay", at, "overlay", MountFlags::empty(), options.as_c_str()).unwrap();
}

/// Ends the mount when dropped, and with it all pending accesses. Idempotent.
struct Ends<'a>(&'a Netns, &'a Path);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.sync(|| {
            let _ = unmount(self.1, UnmountFlags::FORCE | UnmountFlags::DETACH);
        });
    }
}

struct Served<'a> {
    netns: &'a Netns,
    spec: SharedDirSpec,
    options: MountOptions,
    server: RwLock<Option<SharedDirServer>>,
    messages: AtomicU32,
}

impl Served<'_> {
    fn restart(&self) {
        let mut server = self.server.write().unwrap();
        *server = None;
        *server = Some(SharedDirServer::open(self.spec.clone()).unwrap());
    }

    /// Runs `work` on a thread with the user of the daemon, and in the mount namespace of the overlay, if there is one.
    fn daemon(&self, work: impl FnOnce() + Send) {
        let daemon = || {
            if self.options.overlay.is_some() {
                self.netns.join_thread().unwrap();
            }
            if let Some(id) = self.options.daemon {
                let (uid, gid) = (Uid::from_raw(id), Gid::from_raw(id));
                rustix::thread::set_thread_groups(&[]).unwrap();
                rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
                rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            }
            work();
        };
        thread::scope(|scope| scope.spawn(daemon).join()).unwrap();
    }

    /// Answers messages until the mount has ended.
    fn pump(&self, mut fuse: &File) -> io::Result<()> {
        let mut message = vec![0; MESSAGE_MAX];
        let is = |error: &io::Error, one_of: &[Errno]| {
            Errno::from_io_error(error).is_some_and(|e| one_of.contains(&e))
        };
        loop {
            let len = match fuse.read(&mut message) {
                Ok(len) => len,
                Err(error) if is(&error, &[Errno::NODEV, Errno::CONNABORTED]) => return Ok(()),
                // The process that made the request has given up.
                Err(error) if is(&error, &[Errno::NOENT, Errno::INTR]) => continue,
                Err(error) => return Err(error),
            };
            let Some(reply) = self.answer(&message[..len]) else { continue };
            match fuse.write(&reply) {
                Ok(_) => {}
                Err(error) if is(&error, &[Errno::NOENT, Errno::NODEV]) => {}
                Err(error) => {
                    let told =
                        format!("reply {:?} to {:?}", &reply[..reply.len().min(64)], &message[..len.min(64)]);
                    return Err(io::Error::other(format!("{told}: {error}")));
                }
            }
        }
    }

    fn answer(&self, message: &[u8]) -> Option<Vec<u8>> {
        let count = self.messages.fetch_add(1, Ordering::Relaxed);
        let answer = || self.server.read().unwrap().as_ref().unwrap().answer(message);
        let answered = answer();
        if self.options.dies_every.is_some_and(|every| count % every == every - 1) {
            self.restart();
            answered?; // the kernel does not wait, so it does not repeat the request
            return answer();
        }
        answered
    }
}
