//! Isolates a process of a container between fork and exec: only system calls on values prepared before the fork.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use coracle_types::IdMapping;
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags};
use rustix::thread::{CapabilitySet, LinkNameSpaceType, ThreadNameSpaceType, UnshareFlags};

use super::plan::SecurityPlan;
use crate::base_mounts::BOOT_ID;
use crate::mounts::PLAIN;
use crate::process::{Isolation, PidNamespace};
use coracle_spawn::UserNamespace;

const OUR_BOOT_ID: &CStr = c"/proc/sys/kernel/random/boot_id";
const SCORE: &CStr = c"/proc/self/oom_score_adj";

/// Isolation of the first process of a container.
pub(super) struct First {
    pub(super) cgroup: OwnedFd,
    pub(super) pid_namespace: FirstPid,
    /// Path of its root in the agent's file system.
    pub(super) root: CString,
    pub(super) read_only_root: bool,
    pub(super) user_namespace: Option<UserNamespace>,
    pub(super) limits: Limits,
}

/// PID namespace of a container's first process.
pub(super) enum FirstPid {
    Own,
    /// Namespace of the agent.
    Pod,
    Of(Arc<OwnedFd>),
}

/// Isolation of a process that joins a container.
pub(super) struct Joins {
    pub(super) cgroup: OwnedFd,
    /// First process of the container.
    pub(super) first: Arc<OwnedFd>,
    pub(super) user_namespace: Option<UserNamespace>,
    pub(super) limits: Limits,
}

/// Privileges that every process of a container drops.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    security: SecurityPlan,
    score: CString,
    boot_id: CString,
}

impl Limits {
    pub(super) fn of(security: &SecurityPlan) -> Self {
        let text = |text: String| CString::new(text).unwrap_or_default();
        let score = text(security.oom_score_adj.to_string());
        Self { security: security.clone(), score, boot_id: text(BOOT_ID.to_owned()) }
    }

    /// Applies the limits before the user is set, as the last step with the privileges of the guest's root.
    fn apply(&self, user_namespace: Option<&UserNamespace>) -> io::Result<()> {
        for (resource, limit) in &self.security.rlimits {
            rustix::process::setrlimit(*resource, *limit)?;
        }
        // The process has all capabilities in the new namespace, and none in the guest's (user_namespaces(7)).
        if let Some(namespace) = user_namespace {
            let kind = Some(LinkNameSpaceType::User);
            rustix::thread::move_into_link_name_space(namespace.handle.as_fd(), kind)?;
        }
        let kept = CapabilitySet::from_bits_retain(self.security.capabilities);
        for capability in CapabilitySet::all().difference(kept).iter() {
            match rustix::thread::remove_capability_from_bounding_set(capability) {
                Ok(()) | Err(Errno::INVAL) => {} // newer than the kernel
                Err(e) => return Err(e.into()),
            }
        }
        // Without no_new_privs installing a filter needs a privilege that is dropped below; runc uses the same order.
        if !self.security.no_new_privileges && !self.security.seccomp.is_empty() {
            crate::sys::seccomp_filter(&self.security.seccomp)?;
        }
        Ok(())
    }

    /// Drops capabilities, after the user is set.
    fn restrict(&self) -> io::Result<()> {
        let kept = CapabilitySet::from_bits_retain(self.security.capabilities);
        let mut sets = rustix::thread::capabilities(None)?;
        sets.effective = sets.effective.intersection(kept);
        sets.permitted = sets.permitted.intersection(kept);
        sets.inheritable = CapabilitySet::empty();
        rustix::thread::set_capabilities(None, sets)?;
        if self.security.no_new_privileges {
            rustix::thread::set_no_new_privs(true)?;
            if !self.security.seccomp.is_empty() {
                crate::sys::seccomp_filter(&self.security.seccomp)?;
            }
        }
        Ok(())
    }
}

impl Isolation for First {
    fn pid_namespace(&self) -> Option<PidNamespace> {
        match &self.pid_namespace {
            FirstPid::Own => Some(PidNamespace::New),
            FirstPid::Pod => None,
            FirstPid::Of(process) => Some(PidNamespace::Of(process.clone())),
        }
    }

    fn ids(&self) -> Option<IdMapping> {
        self.user_namespace.as_ref().map(|namespace| namespace.ids)
    }

    fn enter(&self) -> io::Result<()> {
        let _may_be_forbidden = crate::sys::write_file(SCORE, self.limits.score.as_bytes());
        rustix::io::write(&self.cgroup, b"0")?;
        crate::sys::unshare(UnshareFlags::NEWNS | UnshareFlags::NEWCGROUP)?;
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change(c"/", private)?;
        let boot_id = rustix::mount::open_tree(
            CWD,
            self.limits.boot_id.as_c_str(),
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC,
        );
        become_root(&self.root)?;
        rustix::mount::mount(c"proc", c"/proc", c"proc", PLAIN, c"")?;
        if let Ok(boot_id) = boot_id {
            let empty = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
            let _nuisance = rustix::mount::move_mount(boot_id.as_fd(), c"", CWD, OUR_BOOT_ID, empty);
        }
        let security = &self.limits.security;
        let mut flags = PLAIN;
        flags.set(MountFlags::RDONLY, !security.privileged);
        let _no_such_directory = rustix::mount::mount(c"cgroup2", c"/sys/fs/cgroup", c"cgroup2", flags, c"");
        security.masked_paths.iter().try_for_each(|path| mask(path))?;
        security.read_only_paths.iter().try_for_each(|path| make_read_only(path))?;
        if self.read_only_root {
            rustix::mount::mount_remount(c"/", MountFlags::BIND | MountFlags::RDONLY, c"")?;
        }
        self.limits.apply(self.user_namespace.as_ref())
    }

    fn restrict(&self) -> io::Result<()> {
        self.limits.restrict()
    }
}

impl Isolation for Joins {
    fn pid_namespace(&self) -> Option<PidNamespace> {
        Some(PidNamespace::Of(self.first.clone()))
    }

    fn ids(&self) -> Option<IdMapping> {
        self.user_namespace.as_ref().map(|namespace| namespace.ids)
    }

    fn enter(&self) -> io::Result<()> {
        let _may_be_forbidden = crate::sys::write_file(SCORE, self.limits.score.as_bytes());
        rustix::io::write(&self.cgroup, b"0")?;
        let namespaces = ThreadNameSpaceType::MOUNT | ThreadNameSpaceType::CONTROL_GROUP;
        rustix::thread::move_into_thread_name_spaces(self.first.as_fd(), namespaces)?;
        self.limits.apply(self.user_namespace.as_ref())
    }

    fn restrict(&self) -> io::Result<()> {
        self.limits.restrict()
    }
}

/// Makes a mounted directory the root. pivot_root(2) cannot leave the agent's root, an initramfs; so the container's root is
/// moved over it, as switch_root(8) does.
fn become_root(root: &CStr) -> io::Result<()> {
    rustix::process::chdir(root)?;
    rustix::mount::mount_move(c".", c"/")?;
    rustix::process::chroot(c".")?;
    rustix::process::chdir(c"/")?;
    Ok(())
}

/// Covers a file by /dev/null, and a directory by an empty one. Missing paths are ignored.
fn mask(path: &CStr) -> io::Result<()> {
    let Ok(stat) = rustix::fs::stat(path) else { return Ok(()) };
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::Directory {
        let flags = PLAIN | MountFlags::RDONLY;
        return Ok(rustix::mount::mount(c"tmpfs", path, c"tmpfs", flags, c"size=0k")?);
    }
    Ok(rustix::mount::mount_bind(c"/dev/null", path)?)
}

fn make_read_only(path: &CStr) -> io::Result<()> {
    if rustix::fs::stat(path).is_err() {
        return Ok(());
    }
    rustix::mount::mount_bind_recursive(path, path)?;
    let flags = MountFlags::BIND | MountFlags::RDONLY | PLAIN;
    Ok(rustix::mount::mount_remount(path, flags, c"")?)
}

/// Path of a root, for the child.
pub(super) fn path(root: &Path) -> io::Result<CString> {
    CString::new(root.as_os_str().as_encoded_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}
