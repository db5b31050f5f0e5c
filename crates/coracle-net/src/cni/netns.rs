//! Network namespaces that exist without a process: each is bind-mounted below `/run/netns` (ip-netns(8)).

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use coracle_types::{InstanceId, VmId};
use rustix::mount::{UnmountFlags, mount_bind, unmount};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

use super::error::CniError;

/// Magic number of the file system of namespaces (Linux, include/uapi/linux/magic.h).
const NSFS_MAGIC: u64 = 0x6e73_6673;

const DIR: &str = "/run/netns";

/// Path of a VM's namespace, on the node with these digits.
pub(super) fn path(node: &str, id: &VmId) -> PathBuf {
    let tap = InstanceId::from(id.clone()).tap_name();
    Path::new(DIR).join(format!("cor{node}-{}", tap.trim_start_matches("ct")))
}

/// Whether the path is a namespace and not a plain file.
pub(super) fn exists(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|fs| u64::try_from(fs.f_type).is_ok_and(|kind| kind == NSFS_MAGIC))
}

/// Makes an empty namespace. Idempotent.
pub(super) fn make(path: &Path) -> Result<(), CniError> {
    if exists(path) {
        return Ok(());
    }
    let made = || {
        std::fs::create_dir_all(DIR)?;
        File::create(path)?;
        run_on_thread(|| {
            #[expect(unsafe_code, reason = "unshare")]
            // SAFETY: the thread was made for this call; it shares no descriptor table flags and ends at once.
            unsafe {
                rustix::thread::unshare_unsafe(UnshareFlags::NEWNET)?;
            }
            Ok(mount_bind("/proc/thread-self/ns/net", path)?)
        })
    };
    made().map_err(|source| {
        let _nothing_was_mounted = remove(path);
        CniError::Node { operation: format!("make network namespace {}", path.display()), source }
    })
}

/// Removes a namespace with the interfaces in it. Idempotent.
pub(super) fn remove(path: &Path) -> Result<(), CniError> {
    let removed = || {
        if exists(path) {
            unmount(path, UnmountFlags::DETACH)?;
        }
        coracle_files::remove_file(path)
    };
    removed().map_err(|source| CniError::Node {
        operation: format!("remove network namespace {}", path.display()),
        source,
    })
}

/// Runs `f` in a namespace, on a thread that ends after it.
pub(super) fn run_in_netns<T: Send>(path: &Path, f: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let namespace = File::open(path)?;
    run_on_thread(move || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        f()
    })
}

fn run_on_thread<T: Send>(f: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let ended = std::thread::scope(|scope| scope.spawn(f).join());
    ended.unwrap_or_else(|_| Err(io::Error::other("the thread ended early")))
}
