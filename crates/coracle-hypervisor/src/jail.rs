//! Jail of a VMM: a process with a user of its own, which sees only its own files.
//!
//! ```text
//! daemon ─fork▶ child ─ new namespaces ─fork▶ VMM to be: process file ─▶ root of its own ─▶ user of its own ─▶ exec
//!                 └─ exits                     (pid 1 of its namespace)
//! ```
//! The VMM gets its files as descriptors where it supports that. Its root file system contains its program, the host's
//! libraries and the files that it can open only by name. Of these the VMM may write the disks of its VM and the files that it
//! creates in [`JAIL_RUN_DIR`], a small file system in memory. All decisions are made before fork(2): the child only makes
//! system calls (signal-safety(7)).

mod bounds;
mod disks;
mod enter;
#[cfg(test)]
pub(crate) use enter::fork_in;
mod landlock;
mod owned;
mod parts;
mod running;

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use coracle_types::InstanceId;

pub use self::bounds::{allow_file_bytes, can_bound_files};
pub use self::disks::{attach_to_jail, detach_from_jail, share_with_jail};
pub use self::parts::{JailPart, jail_parts};

use self::owned::Owners;
use crate::cgroup::{self, Entrances, Limits};
use crate::{Disk, VmmConfig};

/// First uid of the VMMs of a node: above the ranges that systemd and container engines assign (systemd, "Users, Groups, UIDs
/// and GIDs on systemd Systems").
const FIRST_UID: u32 = 1_900_000_000;
/// Number of uids from [`FIRST_UID`] on.
const UIDS: u32 = 1 << 27;

/// Directories of the host with programs and libraries, which every jail contains. A symbolic link of the distribution is a
/// link in the jail, too.
const SYSTEM: [&str; 6] = ["/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache"];
/// User namespace of a process.
const USER_NAMESPACE: &str = "/proc/self/ns/user";
/// Devices that a VMM may open, if the host has them.
const DEVICES: [&str; 4] = ["/dev/kvm", "/dev/null", "/dev/zero", "/dev/urandom"];

/// Working directory of a VMM in a jail, where it creates its files, mostly sockets.
pub const JAIL_RUN_DIR: &str = "/run";
/// Mount point below [`JAIL_RUN_DIR`] for the host directory in which a VMM saves its state or finds a saved state.
pub const JAIL_SAVED_DIR: &str = "/run/saved";
/// Paths of kernel and initramfs in the jail of a VMM that opens them by name.
pub const JAIL_BOOT_FILES: [&str; 2] = ["/vmm/kernel", "/vmm/initrd"];
/// Size of [`JAIL_RUN_DIR`], bytes: the device state of a VM is its largest file.
const RUN_DIR_BYTES: u64 = 80 << 20;

/// User, files and limits of one jailed VMM.
#[derive(Clone, Debug)]
pub struct Jail {
    /// User of the VMM, and its only group beside that of `/dev/kvm`.
    pub uid: u32,
    /// Empty host directory, on which the child builds the root in a mount namespace of its own.
    pub root: PathBuf,
    /// Files and directories that the VMM sees read-only at their paths on the host.
    pub read_only: Vec<PathBuf>,
    /// Files and directories that the VMM sees at other paths, as owned by its user.
    pub owned: Vec<OwnedFile>,
    /// [`JAIL_RUN_DIR`] with these empty files, of these lengths in bytes, as mount points of disks; `None`: no such directory.
    pub run_dir: Option<Vec<(String, u64)>>,
    /// Devices of the host that no other VMM may open: the jail has device nodes of its own for them.
    pub devices: Vec<PathBuf>,
    /// Resource limits, if the host has cgroups that this process may create.
    pub limits: Option<Limits>,
    /// Maximum length of a file that the VMM may write, bytes.
    pub file_bytes_max: Option<u64>,
    /// False: the VMM uses the network of the host, as user-mode networking must.
    pub own_network: bool,
    /// Restricts the VMM to its tap in the network that it uses, if the kernel can enforce that.
    pub has_no_sockets: bool,
}

/// File or directory of the host that a jail shows at another path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedFile {
    /// Path on the host.
    pub from: PathBuf,
    /// Absolute path in the jail.
    pub at: PathBuf,
    /// The VMM may write the file.
    pub is_writable: bool,
}

/// Step of building the root. Paths are relative to the new root unless stated otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// Creates a directory, mode 0755.
    Directory(CString),
    /// Creates an empty file as a mount point.
    File(CString),
    /// Creates a symbolic link `.1` to `.0`.
    Link(CString, CString),
    /// Bind-mounts the host's `.0` at `.1`.
    Bind(CString, CString, Access),
    /// Mounts a tmpfs at this directory, with these options.
    Memory(CString, CString),
    /// Creates a sparse file of this length, owned by the VMM's user.
    Sparse(CString, u64),
    /// Creates a device node like the host's `.0` at `.1`, owned by the VMM's user.
    Node(CString, CString, u64),
    /// Attaches the mount of this index at `.1`.
    Owned(usize, CString),
}

/// Access of a bind mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    ReadOnly,
    /// Device nodes work.
    Device,
}

/// Jail with all decisions made; see [`Jail::prepare`].
#[derive(Debug)]
pub struct PreparedJail {
    uid: u32,
    root: CString,
    /// Working directory of the VMM, in its own root.
    working_dir: CString,
    steps: Vec<Step>,
    /// Detached mounts that [`Step::Owned`] attaches.
    mounts: Vec<OwnedFd>,
    file_bytes_max: Option<u64>,
    /// Group of `/dev/kvm`, if its members may use the device.
    group: Option<u32>,
    /// Entry into the cgroup of the VMM.
    cgroup: Entrances,
    /// Files for leaving the daemon's cgroup in hierarchies where the VMM has none of its own.
    exits: Vec<File>,
    own_network: bool,
    /// Landlock ruleset that denies the sockets of the network.
    ruleset: Option<OwnedFd>,
}

/// Kind of the entry at a path of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Entry {
    Directory,
    File,
    /// Character device, with its number.
    Device(u64),
    Link(PathBuf),
}

impl Jail {
    /// Returns the basic jail of every VMM of this VMM config, still without files of the VM; `None` where VMMs have the rights
    /// of the daemon. Inspects the disks; blocking.
    #[must_use]
    pub fn of(vmm_config: &VmmConfig) -> Option<Self> {
        vmm_config.uid.map(|uid| Self {
            root: vmm_config.state_dir.join("root"),
            limits: Some(Limits::of(vmm_config)),
            file_bytes_max: bounds::file_bytes_max(vmm_config),
            ..Self::with(uid)
        })
    }

    fn with(uid: u32) -> Self {
        Self {
            uid,
            root: PathBuf::new(),
            read_only: vec![],
            owned: vec![],
            run_dir: None,
            devices: vec![],
            limits: None,
            file_bytes_max: None,
            own_network: true,
            has_no_sockets: false,
        }
    }

    /// Adds the files of a VMM that opens them by name: its program, its boot files, a run directory with a mount point of
    /// `empty_slot_bytes` bytes for the disk of every slot, and the disks that it starts with.
    pub fn add_files(
        &mut self,
        vmm_config: &VmmConfig,
        program: &Path,
        empty_slot_bytes: u64,
        disks: &[Disk],
    ) {
        self.read_only.push(program.to_owned());
        for (from, at) in [&vmm_config.kernel, &vmm_config.initrd].into_iter().zip(JAIL_BOOT_FILES) {
            self.owned.push(OwnedFile { from: from.clone(), at: at.into(), is_writable: false });
        }
        let slots = (0..vmm_config.slots.total()).map(|slot| (format!("slot{slot}"), empty_slot_bytes));
        self.run_dir = Some(slots.collect());
        self.owned.extend(disks.iter().map(|disk| OwnedFile {
            from: disk.path.clone(),
            at: slot_in_jail(disk.slot),
            is_writable: !disk.read_only,
        }));
    }

    /// Returns whether this process can give VMMs users of their own: it is root, and its user namespace maps the uids
    /// (user_namespaces(7)).
    #[must_use]
    pub fn is_possible() -> bool {
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        rustix::process::geteuid().is_root()
            && map_contains(&map, FIRST_UID)
            && map_contains(&map, FIRST_UID + UIDS - 1)
    }

    /// Enters a jail once with a trivial program, to find obstacles that [`Jail::is_possible`] does not see, such as mounts
    /// that a container forbids. Returns true if the jail had a user namespace of its own. `root` is created and removed.
    /// Blocking.
    ///
    /// # Errors
    /// With the reason why VMMs cannot run in jails here.
    pub fn probe(root: &Path) -> io::Result<bool> {
        if !Self::is_possible() {
            let why = format!("only root makes jails, where uids up to {} exist", FIRST_UID + UIDS - 1);
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        let jail = Self { root: root.to_owned(), ..Self::with(FIRST_UID) };
        let prepared = jail.prepare(&InstanceId::new("probe", 0))?;
        let mut command = Command::new("/bin/readlink");
        command.arg(USER_NAMESPACE).env_clear().stdin(Stdio::null()).stderr(Stdio::null());
        // SAFETY: as in `launch::prepare_child`, only system calls that take no memory and touch only the child.
        #[allow(unsafe_code, reason = "pre_exec has no safe form")]
        unsafe {
            command.pre_exec(move || prepared.enter(|| Ok(())));
        }
        let outcome = command.output();
        std::fs::remove_dir(root)?;
        let own = std::fs::read_link(USER_NAMESPACE)?;
        outcome.map(|output| String::from_utf8_lossy(&output.stdout).trim() != own.to_string_lossy())
    }

    /// Returns the uid of an instance. Two instances may collide; the creator of an instance then chooses another id.
    #[must_use]
    pub fn uid_of(id: &InstanceId) -> u32 {
        let digits = u64::from_str_radix(id.short(), 16).unwrap_or_default();
        FIRST_UID + u32::try_from(digits % u64::from(UIDS)).unwrap_or_default()
    }

    /// Inspects the files of the host and decides on every step. Blocking.
    ///
    /// # Errors
    /// With the file that does not exist, or whose owner cannot be mapped.
    pub fn prepare(&self, id: &InstanceId) -> io::Result<PreparedJail> {
        std::fs::create_dir_all(&self.root)?;
        let mut owners = Owners::of(self.uid);
        let mounts = self.owned.iter().map(|file| owners.mount(&file.from, file.is_writable));
        let kvm = std::fs::metadata("/dev/kvm").ok().filter(|kvm| kvm.mode() & 0o060 == 0o060);
        let cgroup =
            self.limits.as_ref().map_or(Ok(Entrances::default()), |limits| cgroup::create(id, limits));
        let cgroup = cgroup.unwrap_or_else(|error| {
            tracing::warn!(instance = %id, %error, "VMM without a cgroup");
            Entrances::default()
        });
        Ok(PreparedJail {
            uid: self.uid,
            root: c(&self.root)?,
            working_dir: c(Path::new(if self.run_dir.is_some() { JAIL_RUN_DIR } else { "/" }))?,
            steps: self.steps(look)?,
            mounts: mounts.collect::<io::Result<_>>()?,
            file_bytes_max: self.file_bytes_max,
            group: kvm.map(|kvm| kvm.gid()),
            cgroup,
            exits: cgroup::open_exit_files()?,
            own_network: self.own_network,
            ruleset: self.has_no_sockets.then(landlock::ruleset).transpose()?.flatten(),
        })
    }

    /// Returns the steps that build the root. Pure but for `look`, which returns the entry at a path of the host.
    fn steps(&self, look: impl Fn(&Path) -> io::Result<Option<Entry>>) -> io::Result<Vec<Step>> {
        let system = SYSTEM.iter().map(|path| (Path::new(path), Access::ReadOnly, false));
        let devices = DEVICES.iter().map(|path| (Path::new(path), Access::Device, false));
        let read_only = self.read_only.iter().map(|path| (path.as_path(), Access::ReadOnly, true));
        let mut steps = vec![Step::Directory(c"proc".to_owned()), Step::Directory(c"dev".to_owned())];
        steps.push(Step::Memory(c"dev".to_owned(), c"mode=0755,size=64k".to_owned()));
        let mut seen: Vec<&Path> = Vec::new();
        for (path, access, must_be) in system.chain(devices).chain(read_only) {
            // A directory that the jail already contains includes this path.
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
            add_parents(&mut steps, inside)?;
            match entry {
                Entry::Link(to) if !must_be => {
                    // The link leads to another of these directories.
                    steps.push(Step::Link(c(&to)?, c(inside)?));
                    seen.push(path);
                    continue;
                }
                Entry::Directory => steps.push(Step::Directory(c(inside)?)),
                Entry::Link(_) | Entry::File | Entry::Device(_) => steps.push(Step::File(c(inside)?)),
            }
            steps.push(Step::Bind(c(path)?, c(inside)?, access));
            seen.push(path);
        }
        self.add_own(&mut steps, look)?;
        Ok(steps)
    }

    /// Adds the steps for files and devices that no other VMM has.
    fn add_own(
        &self,
        steps: &mut Vec<Step>,
        look: impl Fn(&Path) -> io::Result<Option<Entry>>,
    ) -> io::Result<()> {
        for device in &self.devices {
            if let Some(Entry::Device(number)) = look(device)? {
                let inside = device.strip_prefix("/").map_err(io::Error::other)?;
                add_parents(steps, inside)?;
                steps.push(Step::Node(c(device)?, c(inside)?, number));
            }
        }
        if let Some(files) = &self.run_dir {
            let options = format!("mode=0700,uid={0},gid={0},size={RUN_DIR_BYTES},nr_inodes=1024", self.uid);
            steps.push(Step::Directory(c"run".to_owned()));
            steps.push(Step::Memory(c"run".to_owned(), CString::new(options)?));
            steps.push(Step::Directory(c(Path::new(JAIL_SAVED_DIR.trim_start_matches('/')))?));
            for (name, bytes) in files {
                steps.push(Step::Sparse(c(&Path::new("run").join(name))?, *bytes));
            }
        }
        for (at, file) in self.owned.iter().enumerate() {
            let inside = file.at.strip_prefix("/").map_err(io::Error::other)?;
            add_parents(steps, inside)?;
            match look(&file.from)? {
                Some(Entry::Directory) => add_directory(steps, inside)?,
                _ if file.at.starts_with(JAIL_RUN_DIR) => {}
                _ => steps.push(Step::File(c(inside)?)),
            }
            steps.push(Step::Owned(at, c(inside)?));
        }
        Ok(())
    }
}

/// Returns the path of a slot's disk in a jail with [`Jail::add_files`].
#[must_use]
pub fn slot_in_jail(slot: usize) -> PathBuf {
    Path::new(JAIL_RUN_DIR).join(format!("slot{slot}"))
}

/// Returns the entry at a path of the host; `None`: it does not exist.
fn look(path: &Path) -> io::Result<Option<Entry>> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => std::fs::read_link(path).map(|to| Some(Entry::Link(to))),
        Ok(found) if found.is_dir() => Ok(Some(Entry::Directory)),
        Ok(found) if found.file_type().is_char_device() => Ok(Some(Entry::Device(found.rdev()))),
        Ok(_) => Ok(Some(Entry::File)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn add_parents(steps: &mut Vec<Step>, inside: &Path) -> io::Result<()> {
    parents(inside).into_iter().try_for_each(|dir| add_directory(steps, dir))
}

fn add_directory(steps: &mut Vec<Step>, inside: &Path) -> io::Result<()> {
    let step = Step::Directory(c(inside)?);
    if !steps.contains(&step) {
        steps.push(step);
    }
    Ok(())
}

fn c(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

/// Returns the directories above a relative path, the outermost first.
fn parents(inside: &Path) -> Vec<&Path> {
    let mut parents: Vec<_> = inside.ancestors().skip(1).filter(|dir| !dir.as_os_str().is_empty()).collect();
    parents.reverse();
    parents
}

/// Returns whether a map of user ids (user_namespaces(7)) contains this id of the namespace.
fn map_contains(map: &str, id: u32) -> bool {
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

    fn owned(from: &str, at: &str, is_writable: bool) -> OwnedFile {
        OwnedFile { from: from.into(), at: at.into(), is_writable }
    }

    #[test]
    fn steps_of_a_root_table() {
        let jail = Jail {
            root: "/state/root".into(),
            read_only: vec!["/boot/vmlinuz".into(), "/usr/bin/vmm".into(), "/lib/vmm".into()],
            owned: vec![owned("/images/a", "/run/slot0", false), owned("/saving", "/run/saved", true)],
            run_dir: Some(vec![("slot0".into(), 1 << 40)]),
            devices: vec!["/dev/net/tun".into(), "/dev/absent".into()],
            ..Jail::with(FIRST_UID)
        };
        let host = |path: &Path| {
            Ok(match path.to_str().unwrap() {
                "/usr" => Some(Entry::Directory),
                "/lib" => Some(Entry::Link("usr/lib".into())),
                "/dev/null" | "/boot/vmlinuz" | "/images/a" => Some(Entry::File),
                "/dev/net/tun" => Some(Entry::Device(0xac8)),
                "/saving" => Some(Entry::Directory),
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
                dir("dev"),
                Step::Memory(s("dev"), s("mode=0755,size=64k")),
                dir("usr"),
                bind("/usr", Access::ReadOnly),
                Step::Link(s("usr/lib"), s("lib")),
                Step::File(s("dev/null")),
                bind("/dev/null", Access::Device),
                dir("boot"),
                Step::File(s("boot/vmlinuz")),
                bind("/boot/vmlinuz", Access::ReadOnly),
                dir("dev/net"),
                Step::Node(s("/dev/net/tun"), s("dev/net/tun"), 0xac8),
                dir("run"),
                Step::Memory(
                    s("run"),
                    s("mode=0700,uid=1900000000,gid=1900000000,size=83886080,nr_inodes=1024")
                ),
                dir("run/saved"),
                Step::Sparse(s("run/slot0"), 1 << 40),
                Step::Owned(0, s("run/slot0")),
                Step::Owned(1, s("run/saved")),
            ]
        );
        let error = Jail { read_only: vec!["/absent".into()], ..jail }.steps(host).unwrap_err();
        assert_eq!(error.to_string(), "no /absent");
    }

    #[test]
    fn jail_probe_leaves_no_files() {
        assert!(Jail::is_possible(), "this test runs as root of the host");
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("probe");
        for _ in 0..2 {
            assert!(Jail::probe(&root).unwrap(), "a user namespace of its own");
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
            assert_eq!(map_contains(map, id), want, "{map:?} {id}");
        }
    }
}
