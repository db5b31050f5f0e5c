//! User namespaces of containers, whose users, groups and root are mapped to other ids of the guest.

mod sys;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use coracle_types::IdMapping;
use rustix::mount::OpenTreeFlags;
use rustix::process::{Pid, Signal, WaitOptions};
use rustix::thread::CapabilitySet;

/// User namespace, and its ids in the guest.
#[derive(Clone, Debug)]
pub struct UserNamespace {
    /// Ids in the guest.
    pub ids: IdMapping,
    /// Descriptor of the namespace.
    pub handle: Arc<OwnedFd>,
}

impl UserNamespace {
    /// Makes a user namespace. A process must be in it while it is set up (user_namespaces(7)). Blocking.
    ///
    /// # Errors
    /// When the kernel does not support user namespaces, or its limit is reached.
    pub fn new(ids: IdMapping) -> io::Result<Self> {
        let first = Waiting(sys::wait_in_user_namespace()?);
        let process = Path::new("/proc").join(first.0.as_raw_nonzero().to_string());
        for map in ["uid_map", "gid_map"] {
            std::fs::write(process.join(map), format!("0 {} {}", ids.first(), ids.length()))?;
        }
        let handle = std::fs::File::open(process.join("ns/user"))?;
        Ok(Self { ids, handle: Arc::new(handle.into()) })
    }

    /// Makes a detached mount of `source` with owners mapped to the namespace (mount_setattr(2)).
    ///
    /// # Errors
    /// When the file system cannot map owners.
    pub fn mount(&self, source: impl AsFd) -> io::Result<OwnedFd> {
        let flags =
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        let mount = rustix::mount::open_tree(source.as_fd(), c"", flags)?;
        sys::map_owners(mount.as_fd(), self.handle.as_fd())?;
        Ok(mount)
    }
}

/// Process that holds a namespace during its set-up. Dropping this kills the process.
struct Waiting(Pid);

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ended = rustix::process::kill_process(self.0, Signal::KILL);
        // The reaper may already have collected the process.
        let _collected = rustix::process::waitpid(Some(self.0), WaitOptions::empty());
    }
}

/// Guard that makes root of a user namespace the owner of all files that its thread makes. The thread keeps its capabilities.
pub struct MakesFiles {
    /// The guard belongs to one thread.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl MakesFiles {
    /// Sets the file system ids of the current thread.
    ///
    /// # Errors
    /// When the kernel does not restore the capabilities that setfsuid(2) drops.
    pub fn as_root_of(ids: IdMapping) -> io::Result<Self> {
        sys::set_filesystem_ids(ids.first());
        let it = Self { _not_send: std::marker::PhantomData };
        let mut sets = rustix::thread::capabilities(None)?;
        sets.effective = sets.permitted & CapabilitySet::all();
        rustix::thread::set_capabilities(None, sets)?;
        Ok(it)
    }
}

impl Drop for MakesFiles {
    fn drop(&mut self) {
        sys::set_filesystem_ids(0);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn files_are_owned_by_namespace_root_while_guard_exists() {
        assert!(rustix::process::geteuid().is_root(), "this test runs as root");
        let dir = tempfile::tempdir().unwrap();
        let ids = IdMapping::new(100_000, 65_536).unwrap();
        let owner = |name: &str| {
            std::fs::create_dir(dir.path().join(name)).unwrap();
            std::fs::metadata(dir.path().join(name)).unwrap().uid()
        };
        {
            let _as_root = MakesFiles::as_root_of(ids).unwrap();
            assert_eq!(owner("mapped"), 100_000, "although the directory belongs to another");
        }
        assert_eq!(owner("plain"), 0);
    }

    #[test]
    fn owners_of_a_mount_are_mapped() {
        assert!(rustix::process::geteuid().is_root(), "this test runs as root");
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        let namespace = UserNamespace::new(IdMapping::new(100_000, 65_536).unwrap()).unwrap();
        let mount = namespace.mount(std::fs::File::open(dir.path()).unwrap()).unwrap();
        let stat = rustix::fs::statat(&mount, c"file", rustix::fs::AtFlags::empty()).unwrap();
        assert_eq!((stat.st_uid, stat.st_gid), (100_000, 100_000));
    }
}
