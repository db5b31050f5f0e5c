//! The jail of a VMM: a process with a user of its own that sees nothing but its own files.
//!
//! ```text
//! daemon ─fork▶ child ─ new namespaces ─fork▶ VMM to be: process file ─▶ root of its own ─▶ user of its own ─▶ exec
//!                 └─ exits                     (pid 1 of its namespace)
//! ```
//! What the VMM works on comes by descriptor; its root has its program, the libraries of the host and the files that it can
//! only open by name, and it may write none of them. Everything is decided before fork(2): the child makes system calls alone
//! (signal-safety(7)).

mod enter;

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use coracle_types::InstanceId;

use crate::cgroup::{self, Limits};

/// First uid of the VMMs of a node, and how many there are: above the ranges that systemd and container
/// engines assign (systemd, "Users, Groups, UIDs and GIDs on systemd Systems").
const FIRST_UID: u32 = 1_900_000_000;
/// Number of uids from [`FIRST_UID`] on.
const UIDS: u32 = 1 << 27;

/// Directories of the host with programs and libraries, which every jail has. Where distributions have links instead, so
/// has the jail.
const SYSTEM: [&str; 6] = ["/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache"];
/// Devices that a VMM may open, where the host has them.
const DEVICES: [&str; 4] = ["/dev/kvm", "/dev/null", "/dev/zero", "/dev/urandom"];

/// What one VMM may see and who it is.
#[derive(Clone, Debug)]
pub struct Jail {
    /// Its user, and its only group beside that of `/dev/kvm`.
    pub uid: u32,
    /// An empty directory of the host, below which the child makes the root, in a mount namespace of its own.
    pub root: PathBuf,
    /// Files and directories that it finds where the host has them, and may not write.
    pub read_only: Vec<PathBuf>,
    /// What it may take of the host, where the host has cgroups that this process may make.
    pub limits: Option<Limits>,
    /// False: it uses the network of the host, as user-mode networking must.
    pub own_network: bool,
}

/// A step of building the root; paths are below the new root unless they say otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// A directory, mode 0755.
    Directory(CString),
    /// An empty file, for something to be mounted on.
    File(CString),
    /// A link `.1` that leads to `.0`.
    Link(CString, CString),
    /// The host's `.0` at `.1`.
    Bind(CString, CString, Access),
}

/// How a bind mount is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    ReadOnly,
    /// Its device works.
    Device,
}

/// A jail with all decisions made; see [`Jail::prepare`].
#[derive(Debug)]
pub(crate) struct Prepared {
    uid: u32,
    root: CString,
    steps: Vec<Step>,
    /// The group of `/dev/kvm`, if its members may use it.
    group: Option<u32>,
    /// Files of its cgroup by which a process moves itself there.
    cgroup: Vec<File>,
    own_network: bool,
}

/// What lies at a path of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Entry {
    Directory,
    File,
    Link(PathBuf),
}

impl Jail {
    /// Can this process give VMMs users of their own? It is root, and the uids mean something in its user namespace
    /// (user_namespaces(7)).
    #[must_use]
    pub fn is_possible() -> bool {
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        rustix::process::geteuid().is_root() && maps(&map, FIRST_UID) && maps(&map, FIRST_UID + UIDS - 1)
    }

    /// Enters a jail once and runs nothing of use in it: what the checks of [`Jail::is_possible`] do not show, such as
    /// mounts that a container forbids. `root` is made and removed. Blocking.
    ///
    /// # Errors
    /// With the reason why VMMs cannot run in jails here.
    pub fn probe(root: &Path) -> io::Result<()> {
        if !Self::is_possible() {
            let why = format!("only root makes jails, where uids up to {} exist", FIRST_UID + UIDS - 1);
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        let (uid, root_dir) = (FIRST_UID, root.to_owned());
        let jail = Self { uid, root: root_dir, read_only: vec![], limits: None, own_network: true };
        let prepared = jail.prepare(&InstanceId::new("probe", 0))?;
        let mut command = Command::new("/bin/true");
        command.env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: as of `launch::prepare_child`.
        #[allow(unsafe_code, reason = "pre_exec has no safe form")]
        unsafe {
            command.pre_exec(move || prepared.enter(|| Ok(())));
        }
        let outcome = command.status().map(drop);
        std::fs::remove_dir(root)?;
        outcome
    }

    /// The uid of an instance. Two instances may have the same one; who makes an instance makes another instead.
    #[must_use]
    pub fn uid_of(id: &InstanceId) -> u32 {
        let digits = u64::from_str_radix(id.short(), 16).unwrap_or_default();
        FIRST_UID + u32::try_from(digits % u64::from(UIDS)).unwrap_or_default()
    }

    /// Looks at the files of the host and decides on every step.
    pub(crate) fn prepare(&self, id: &InstanceId) -> io::Result<Prepared> {
        std::fs::create_dir_all(&self.root)?;
        let look = |path: &Path| match std::fs::symlink_metadata(path) {
            Ok(found) if found.is_symlink() => std::fs::read_link(path).map(|to| Some(Entry::Link(to))),
            Ok(found) if found.is_dir() => Ok(Some(Entry::Directory)),
            Ok(_) => Ok(Some(Entry::File)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        };
        let kvm = std::fs::metadata("/dev/kvm").ok().filter(|kvm| kvm.mode() & 0o060 == 0o060);
        let cgroup = self.limits.map_or(Ok(vec![]), |limits| cgroup::create(id, limits));
        let cgroup = cgroup.unwrap_or_else(|error| {
            tracing::warn!(instance = %id, %error, "VMM without a cgroup");
            vec![]
        });
        Ok(Prepared {
            uid: self.uid,
            root: c(&self.root)?,
            steps: self.steps(look)?,
            group: kvm.map(|kvm| kvm.gid()),
            cgroup,
            own_network: self.own_network,
        })
    }

    /// The steps that build the root. Pure but for `look`, which says what lies at a path of the host.
    fn steps(&self, look: impl Fn(&Path) -> io::Result<Option<Entry>>) -> io::Result<Vec<Step>> {
        let system = SYSTEM.iter().map(|path| (Path::new(path), Access::ReadOnly, false));
        let devices = DEVICES.iter().map(|path| (Path::new(path), Access::Device, false));
        let read_only = self.read_only.iter().map(|path| (path.as_path(), Access::ReadOnly, true));
        let mut steps = vec![Step::Directory(c"proc".to_owned())];
        let mut seen: Vec<&Path> = Vec::new();
        for (path, access, must_be) in system.chain(devices).chain(read_only) {
            // What lies in a directory that the jail has is there already.
            if access == Access::ReadOnly && seen.iter().any(|dir| path.starts_with(dir)) {
                continue;
            }
            let Some(entry) = look(path)? else {
                if must_be {
                    return Err(io::Error::new(io::ErrorKind::NotFound, format!("no {}", path.display())));
                }
                continue;
            };
            let inside = path.strip_prefix("/").map_err(io::Error::other)?;
            for dir in parents(inside) {
                let step = Step::Directory(c(dir)?);
                if !steps.contains(&step) {
                    steps.push(step);
                }
            }
            match entry {
                Entry::Link(to) if !must_be => {
                    steps.push(Step::Link(c(&to)?, c(inside)?));
                    continue;
                }
                Entry::Directory => steps.push(Step::Directory(c(inside)?)),
                Entry::Link(_) | Entry::File => steps.push(Step::File(c(inside)?)),
            }
            steps.push(Step::Bind(c(path)?, c(inside)?, access));
            seen.push(path);
        }
        Ok(steps)
    }
}

fn c(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

/// The directories above a relative path, the outermost first.
fn parents(inside: &Path) -> Vec<&Path> {
    let mut parents: Vec<_> = inside.ancestors().skip(1).filter(|dir| !dir.as_os_str().is_empty()).collect();
    parents.reverse();
    parents
}

/// Does a map of user ids (user_namespaces(7)) have this id of the namespace?
fn maps(map: &str, id: u32) -> bool {
    map.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace().map(str::parse::<u64>);
        match (fields.next(), fields.next(), fields.next()) {
            (Some(Ok(inside)), Some(Ok(_)), Some(Ok(count))) => {
                (inside..inside.saturating_add(count)).contains(&u64::from(id))
            }
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_a_root_table() {
        let jail = Jail {
            uid: FIRST_UID,
            root: "/state/root".into(),
            read_only: vec!["/boot/vmlinuz".into(), "/usr/bin/vmm".into()],
            limits: None,
            own_network: true,
        };
        let host = |path: &Path| {
            Ok(match path.to_str().unwrap() {
                "/usr" => Some(Entry::Directory),
                "/lib" => Some(Entry::Link("usr/lib".into())),
                "/dev/null" | "/boot/vmlinuz" => Some(Entry::File),
                _ => None,
            })
        };
        let s = |text: &str| CString::new(text).unwrap();
        let dir = |path| Step::Directory(s(path));
        let bind = |path: &str, access| Step::Bind(s(path), s(&path[1..]), access);
        assert_eq!(
            jail.steps(host).unwrap(),
            [
                dir("proc"),
                dir("usr"),
                bind("/usr", Access::ReadOnly),
                Step::Link(s("usr/lib"), s("lib")),
                dir("dev"),
                Step::File(s("dev/null")),
                bind("/dev/null", Access::Device),
                dir("boot"),
                Step::File(s("boot/vmlinuz")),
                bind("/boot/vmlinuz", Access::ReadOnly),
            ]
        );
        let error = Jail { read_only: vec!["/absent".into()], ..jail }.steps(host).unwrap_err();
        assert_eq!(error.to_string(), "no /absent");
    }

    #[test]
    fn probe_leaves_nothing() {
        assert!(Jail::is_possible(), "this test runs as root of the host");
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("probe");
        for _ in 0..2 {
            Jail::probe(&root).unwrap();
            assert!(!root.exists());
        }
    }

    #[test]
    fn uid_map_table() {
        for (map, id, want) in [
            ("         0          0 4294967295\n", FIRST_UID, true),
            ("0 1000 1\n", 0, true),
            ("0 1000 1\n", FIRST_UID, false),
            ("0 1000 1\n1 100000 65536\n", 65_536, true),
            ("0 1000 1\n1 100000 65536\n", 65_537, false),
            ("", 0, false),
            ("nonsense", 0, false),
        ] {
            assert_eq!(maps(map, id), want, "{map:?} {id}");
        }
    }
}
