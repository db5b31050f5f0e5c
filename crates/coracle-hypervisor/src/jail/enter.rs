//! Work of the child between fork(2) and execve(2): system calls on prepared data, without allocation.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, MoveMountFlags, UnmountFlags};
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, Gid, Uid, UnshareFlags};

use super::{Access, PreparedJail, Step, landlock};
use crate::cgroup::Entrances;

/// Last capability of the kernel's interface (linux/capability.h, `CAP_CHECKPOINT_RESTORE`), with room for more. The kernel
/// rejects numbers that it does not know.
const LAST_CAPABILITY: u32 = 63;
/// Flag of clone3 (linux/sched.h); the constant of the libc crate has too few bits.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
/// Maximum number of open files of a VMM.
const FILES_MAX: u64 = 4096;

impl PreparedJail {
    /// Enters new namespaces and a new process in them. Returns in the process that becomes the VMM, once `in_child` has run
    /// there with the host's `/proc` still visible; the parent of that process exits.
    pub(crate) fn enter(&self, in_child: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        for exit in &self.exits {
            let _forbidden = rustix::io::write(exit, b"0");
        }
        let mut namespaces =
            UnshareFlags::NEWNS | UnshareFlags::NEWPID | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
        if self.own_network {
            namespaces |= UnshareFlags::NEWNET;
        }
        // SAFETY: none of these namespaces affects the descriptors or the address space, on which other code relies.
        #[allow(unsafe_code, reason = "unsafe for flags that are not used here")]
        let unshared = unsafe { rustix::thread::unshare_unsafe(namespaces) };
        log_failure("unshare", c"", unshared)?;
        fork_in(&self.cgroup)?;
        in_child()?;
        // Handle for setting up the user namespace when the host's /proc is no longer visible.
        let own = rustix::fs::open(
            c"/proc/self",
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        );
        let own = log_failure("open", c"/proc/self", own)?;
        self.build_root()?;
        self.become_user(own.as_fd())
    }

    /// Builds the root file system, which no process can write.
    fn build_root(&self) -> io::Result<()> {
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        log_failure("make private", c"/", rustix::mount::mount_change(c"/", private))?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        log_failure(
            "mount",
            &self.root,
            rustix::mount::mount(c"root", &self.root, c"tmpfs", flags, Some(c"mode=0755,size=1m")),
        )?;
        let root =
            rustix::fs::open(&self.root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let root = log_failure("open", &self.root, root)?;
        log_failure("enter", &self.root, rustix::process::fchdir(&root))?;
        // The umask of daemons hides their files from others; the files made here are for the VMM's user.
        let umask = rustix::process::umask(Mode::empty());
        for step in &self.steps {
            self.take(step)?;
        }
        rustix::process::umask(umask);
        let devices = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NOEXEC;
        log_failure("close", c"/dev", rustix::mount::mount_remount(c"dev", devices, c""))?;
        // The old root is stacked on top of the new one, then unmounted (pivot_root(2), "pivot_root(".", ".")").
        log_failure("pivot_root", &self.root, rustix::process::pivot_root(c".", c"."))?;
        log_failure("unmount", c"/", rustix::mount::unmount(c".", UnmountFlags::DETACH))?;
        let proc = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        log_failure(
            "mount",
            c"/proc",
            rustix::mount::mount(c"proc", c"/proc", c"proc", proc, None::<&CStr>),
        )?;
        let read_only = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
        log_failure("close", c"/", rustix::mount::mount_remount(c"/", read_only, c""))?;
        log_failure("enter", &self.working_dir, rustix::process::chdir(&self.working_dir))
    }

    fn take(&self, step: &Step) -> io::Result<()> {
        match step {
            Step::Directory(path) => {
                let made = match rustix::fs::mkdir(path, Mode::from_raw_mode(0o755)) {
                    Err(Errno::EXIST) => Ok(()),
                    made => made,
                };
                log_failure("make", path, made)
            }
            Step::File(path) => make_file(path, Mode::empty()).map(drop),
            Step::Link(to, path) => log_failure("link", path, rustix::fs::symlink(to, path)),
            Step::Bind(from, path, access) => bind(from, path, *access),
            Step::Memory(path, options) => {
                // Only /dev has device nodes, and no other files can be created there.
                let nodes = if path.as_c_str() == c"dev" { MountFlags::empty() } else { MountFlags::NODEV };
                let flags = MountFlags::NOSUID | MountFlags::NOEXEC | nodes;
                let options = Some(options.as_c_str());
                log_failure("mount", path, rustix::mount::mount(c"memory", path, c"tmpfs", flags, options))
            }
            Step::Sparse(path, bytes) => {
                let file = make_file(path, Mode::RUSR | Mode::WUSR)?;
                log_failure("extend", path, rustix::fs::ftruncate(&file, *bytes))?;
                log_failure("give", path, rustix::fs::fchown(&file, Some(self.user().0), Some(self.user().1)))
            }
            Step::Node(from, path, number) => self.make_node(from, path, *number),
            Step::Owned(at, path) => {
                let Some(mount) = self.mounts.get(*at) else { return Err(io::ErrorKind::NotFound.into()) };
                let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
                log_failure(
                    "place",
                    path,
                    rustix::mount::move_mount(mount, c"", rustix::fs::CWD, path, flags),
                )
            }
        }
    }

    /// Creates a device node of the VMM's own. If the host's container forbids that, bind-mounts the host's node with its
    /// permissions.
    fn make_node(&self, from: &CStr, path: &CStr, number: u64) -> io::Result<()> {
        let mode = Mode::RUSR | Mode::WUSR;
        match rustix::fs::mknodat(rustix::fs::CWD, path, FileType::CharacterDevice, mode, number) {
            Err(Errno::PERM) => {
                make_file(path, Mode::empty())?;
                bind(from, path, Access::Device)
            }
            made => {
                log_failure("make", path, made)?;
                log_failure("give", path, rustix::fs::chown(path, Some(self.user().0), Some(self.user().1)))
            }
        }
    }

    fn user(&self) -> (Uid, Gid) {
        (Uid::from_raw(self.uid), Gid::from_raw(self.uid))
    }

    /// Becomes a user without rights, now and after execve(2).
    fn become_user(&self, own: BorrowedFd<'_>) -> io::Result<()> {
        close_bounding_set()?;
        let limit = |number| Rlimit { current: Some(number), maximum: Some(number) };
        log_failure("limit", c"core", rustix::process::setrlimit(Resource::Core, limit(0)))?;
        log_failure("limit", c"files", rustix::process::setrlimit(Resource::Nofile, limit(FILES_MAX)))?;
        if let Some(bytes) = self.file_bytes_max {
            log_failure("limit", c"file size", rustix::process::setrlimit(Resource::Fsize, limit(bytes)))?;
        }
        let (uid, gid) = self.user();
        let group = self.group.map(Gid::from_raw);
        log_failure("set groups", c"", rustix::thread::set_thread_groups(group.as_slice()))?;
        log_failure("set gid", c"", rustix::thread::set_thread_res_gid(gid, gid, gid))?;
        log_failure("set uid", c"", rustix::thread::set_thread_res_uid(uid, uid, uid))?;
        // A user namespace isolates further, but some hosts forbid it to unprivileged users.
        if own_user_namespace(own, self.uid)? {
            close_bounding_set()?;
        }
        let none = CapabilitySet::empty();
        let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
        log_failure("drop capabilities", c"", rustix::thread::set_capabilities(None, none))?;
        log_failure("set no_new_privs", c"", rustix::thread::set_no_new_privs(true))?;
        self.ruleset
            .as_ref()
            .map_or(Ok(()), |ruleset| log_failure("restrict", c"sockets", landlock::restrict(ruleset)))
    }
}

/// Continues as the first process of the new PID namespace, in its cgroup; the parent exits.
pub(crate) fn fork_in(cgroup: &Entrances) -> io::Result<()> {
    for tasks in &cgroup.tasks {
        log_failure("enter the cgroup", c"", rustix::io::write(tasks, b"0").map(drop))?;
    }
    fork_and_leave(cgroup.v2.as_ref().map(AsFd::as_fd))
}

/// Continues as a child process, in this cgroup of version 2; the calling process exits.
fn fork_and_leave(cgroup: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let forked = match cgroup.map(fork_into) {
        Some(Ok(pid)) => pid,
        // The kernel is older, or there is no such cgroup.
        Some(Err(_)) | None => {
            cgroup.map_or(Ok(()), move_into)?;
            // SAFETY: this process has one thread, since it was forked itself, and only makes system calls until execve.
            #[allow(unsafe_code, reason = "fork has no safe form")]
            unsafe {
                libc::fork()
            }
        }
    };
    match forked {
        0 => Ok(()),
        n if n < 0 => Err(io::Error::last_os_error()),
        // SAFETY: ends the process without running anything of the daemon's.
        #[allow(unsafe_code, reason = "the daemon's exit handlers must not run")]
        _ => unsafe { libc::_exit(0) },
    }
}

/// Moves the calling process to this cgroup of version 2.
fn move_into(cgroup: BorrowedFd<'_>) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let entrance = rustix::fs::openat(cgroup, c"cgroup.procs", flags, Mode::empty());
    let entered = entrance.and_then(|entrance| rustix::io::write(&entrance, b"0").map(drop));
    log_failure("enter the cgroup", c"", entered)
}

/// Forks a child directly into this cgroup of version 2 (clone(2), Linux 5.7), which avoids the wait of a move.
///
/// # Errors
/// If the kernel is older, or a container forbids the call.
fn fork_into(cgroup: BorrowedFd<'_>) -> io::Result<libc::pid_t> {
    // SAFETY: the structure consists of plain numbers, for which zero means unset.
    #[allow(unsafe_code, reason = "the structure has no constructor")]
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = CLONE_INTO_CGROUP;
    arguments.exit_signal = libc::SIGCHLD.cast_unsigned().into();
    arguments.cgroup = cgroup.as_raw_fd().cast_unsigned().into();
    // SAFETY: as for fork in the caller: one thread, and only system calls until execve; the child has a copy of the stack.
    #[allow(unsafe_code, reason = "clone3 has no safe form")]
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of::<libc::clone_args>()) };
    match libc::pid_t::try_from(pid) {
        Ok(pid) if pid >= 0 => Ok(pid),
        _ => Err(io::Error::last_os_error()),
    }
}

fn make_file(path: &CStr, mode: Mode) -> io::Result<OwnedFd> {
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    log_failure("make", path, rustix::fs::open(path, flags, mode))
}

fn bind(from: &CStr, path: &CStr, access: Access) -> io::Result<()> {
    log_failure("bind", from, rustix::mount::mount_bind(from, path))?;
    let flags = match access {
        Access::ReadOnly => MountFlags::RDONLY | MountFlags::NODEV | MountFlags::NOSUID,
        Access::Device => MountFlags::NOSUID,
    };
    log_failure("close", from, rustix::mount::mount_remount(path, MountFlags::BIND | flags, c""))
}

/// Empties the capability bounding set, so that no program executed later gains a capability (capabilities(7)).
fn close_bounding_set() -> io::Result<()> {
    for number in 0..=LAST_CAPABILITY {
        let one = CapabilitySet::from_bits_retain(1 << number);
        match rustix::thread::remove_capability_from_bounding_set(one) {
            // Either the kernel knows no more capabilities, or this process may not drop them; an unprivileged user gains none
            // from a program that it executes.
            Err(Errno::INVAL | Errno::PERM) => break,
            removed => log_failure("drop a capability", c"", removed)?,
        }
    }
    Ok(())
}

/// Enters a user namespace with this single user. Returns false if the host forbids it.
fn own_user_namespace(own: BorrowedFd<'_>, uid: u32) -> io::Result<bool> {
    // The files of the process below /proc belong to root again since it changed its user (proc(5), "dumpable").
    log_failure("keep /proc", c"", rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable))?;
    // SAFETY: as for the namespaces in [`PreparedJail::enter`].
    #[allow(unsafe_code, reason = "unsafe for flags that are not used here")]
    let unshared = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER) };
    match unshared {
        Err(Errno::PERM | Errno::NOSPC | Errno::INVAL) => return Ok(false),
        unshared => log_failure("unshare", c"user", unshared)?,
    }
    let mut line = [0; 32];
    let length = id_map(uid, &mut line);
    let (map, _) = line.split_at(length);
    for (name, text) in [(c"setgroups", &b"deny"[..]), (c"gid_map", map), (c"uid_map", map)] {
        let file = rustix::fs::openat(own, name, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
        let file: OwnedFd = log_failure("open", name, file)?;
        log_failure("write", name, rustix::io::write(file, text).map(drop))?;
    }
    Ok(true)
}

/// Writes `ID ID 1` and returns its length.
fn id_map(id: u32, line: &mut [u8; 32]) -> usize {
    use io::Write as _;
    let mut rest = &mut line[..];
    let _fits = write!(rest, "{id} {id} 1");
    32 - rest.len()
}

/// Leaves a message in the VMM's log when a step fails, because only the error number reaches the daemon.
fn log_failure<T>(operation: &str, what: &CStr, outcome: Result<T, Errno>) -> io::Result<T> {
    outcome.map_err(|error| {
        for part in ["jail: ".as_bytes(), operation.as_bytes(), b" ", what.to_bytes(), b"\n"] {
            let _best_effort = rustix::io::write(io::stderr(), part);
        }
        error.into()
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt as _;
    use std::path::PathBuf;
    use std::process::Command;

    use super::*;

    #[test]
    fn child_process_starts_in_its_cgroup_v2() {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        let root =
            mounts.lines().find(|line| line.starts_with("cgroup2 ")).and_then(|line| line.split(' ').nth(1));
        let dir = PathBuf::from(root.expect("a host with cgroups of version 2")).join("coracle-born");
        std::fs::create_dir_all(&dir).unwrap();
        let cgroup = std::fs::File::open(&dir).unwrap();
        let mut command = Command::new("cat");
        command.arg("/proc/self/cgroup");
        // SAFETY: as in `launch::prepare_child`, only system calls that take no memory and touch only the child.
        #[allow(unsafe_code, reason = "pre_exec has no safe form")]
        unsafe {
            command.pre_exec(move || fork_and_leave(Some(cgroup.as_fd())));
        }
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let removed = (0..200).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(5)); // its process is about to be gone
            std::fs::remove_dir(&dir).is_ok()
        });
        assert!(text.lines().any(|line| line == "0::/coracle-born"), "{text}");
        assert!(removed, "nothing is left in it");
    }
}
