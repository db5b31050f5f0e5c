//! Firecracker's jailer: a directory, a user and a namespace for each process (docs/jailer).
//!
//! ```text
//! <base>/firecracker/<id>/root/           the jail: what the process sees as /
//!     firecracker                         copied in by the jailer
//!     vmlinux initrd slot0 … empty        linked or copied in by us, readable for its user
//!     api.sock guest.sock console.in …
//! ```
//! The jailer leaves everything behind; whoever removes the VM removes the jail.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

use coracle_hypervisor::launch::LOG_FILE;
use coracle_hypervisor::{Disk, VmmConfig};

use crate::calls::slot_path;
use crate::folder::{self, API_SOCKET, CONSOLE, elf_kernel};

/// Names of kernel and initramfs in the jail.
pub(crate) const KERNEL: &str = "vmlinux";
pub(crate) const INITRD: &str = "initrd";

/// How the jailer is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Jail {
    /// `jailer`, of the same version as Firecracker.
    pub program: PathBuf,
    /// Where jails are; on the file system of the disks, which are linked into them.
    pub base: PathBuf,
    /// User and group of the processes.
    pub owner: (u32, u32),
    /// The cgroup that the VM's is made under, for cgroup v2; `None`: no limits.
    pub parent_cgroup: Option<String>,
}

impl Jail {
    /// What the process of this VM sees as its root.
    #[must_use]
    pub fn root(&self, program: &Path, vmm_config: &VmmConfig) -> PathBuf {
        let name = program.file_name().unwrap_or_default();
        // The whole id would make sockets' paths too long (107 bytes).
        self.base.join(name).join(vmm_config.id.short()).join("root")
    }

    /// Removes the jail. Blocking, idempotent.
    pub(crate) fn remove(&self, program: &Path, vmm_config: &VmmConfig) -> io::Result<()> {
        let root = self.root(program, vmm_config);
        match fs::remove_dir_all(root.parent().unwrap_or(&root)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Makes the jail anew, with everything that the API will name. Blocking, idempotent.
    pub(crate) fn prepare(&self, program: &Path, vmm_config: &VmmConfig, filled: bool) -> io::Result<()> {
        let root = self.root(program, vmm_config);
        fs::create_dir_all(&root)?;
        // The jailer makes these itself, and fails when they are there.
        for left in ["dev", "run"] {
            let _absent = fs::remove_dir_all(root.join(left));
        }
        let _absent = fs::remove_file(root.join(program.file_name().unwrap_or_default()));
        folder::prepare(vmm_config, &root, filled)?;
        for slot in 0..vmm_config.slots.total() {
            self.fill(&root, slot, vmm_config.disk_in(slot).filter(|_| filled))?;
        }
        for (from, to) in [(elf_kernel(&vmm_config.kernel), KERNEL), (vmm_config.initrd.clone(), INITRD)] {
            let _absent = fs::remove_file(root.join(to));
            link(&from, &root.join(to))?;
        }
        // The same file as outside, so that its last words are found there.
        let log = vmm_config.state_dir.join(LOG_FILE);
        fs::File::options().create(true).append(true).open(&log)?;
        let _absent = fs::remove_file(root.join(LOG_FILE));
        link(&log, &root.join(LOG_FILE))?;
        for name in CONSOLE.iter().chain([&LOG_FILE]) {
            self.give(&root.join(name))?;
        }
        self.give(&root)
    }

    /// Puts a disk into a slot of the jail, or nothing.
    pub(crate) fn fill(&self, root: &Path, slot: usize, disk: Option<&Disk>) -> io::Result<()> {
        let place = root.join(slot_path(slot));
        fs::remove_file(&place)?;
        match disk {
            Some(disk) => link(&disk.path, &place)?,
            None => fs::hard_link(root.join("empty"), &place)?,
        }
        self.give(&place)
    }

    /// To the user of the processes, who must write disks and make sockets.
    fn give(&self, path: &Path) -> io::Result<()> {
        let (uid, gid) = self.owner;
        chown(path, Some(uid), Some(gid))
    }

    pub(crate) fn arguments(&self, program: &Path, vmm_config: &VmmConfig) -> Vec<String> {
        jailer_arguments(self, program, vmm_config)
    }
}

/// A link where both are on one file system, else a copy that everybody may read: kernels are small, and a disk that is
/// copied would not be the VM's disk, so that is refused.
fn link(from: &Path, to: &Path) -> io::Result<()> {
    match fs::hard_link(from, to) {
        Err(e)
            if e.kind() == io::ErrorKind::CrossesDevices
                && !to.ends_with(KERNEL)
                && !to.ends_with(INITRD) =>
        {
            let why = format!(
                "{} is on another file system than the jails: set their directory there",
                from.display()
            );
            Err(io::Error::new(io::ErrorKind::CrossesDevices, why))
        }
        Err(e) if e.kind() == io::ErrorKind::CrossesDevices => {
            fs::copy(from, to)?;
            fs::set_permissions(to, fs::Permissions::from_mode(0o444))
        }
        other => other,
    }
}

/// The jailer's arguments, and behind `--` Firecracker's. Pure.
#[must_use]
pub fn jailer_arguments(jail: &Jail, program: &Path, vmm_config: &VmmConfig) -> Vec<String> {
    let (uid, gid) = jail.owner;
    let mut pairs = vec![
        ("--id", vmm_config.id.short().to_owned()),
        ("--exec-file", program.display().to_string()),
        ("--uid", uid.to_string()),
        ("--gid", gid.to_string()),
        ("--chroot-base-dir", jail.base.display().to_string()),
        ("--cgroup-version", "2".to_owned()),
    ];
    pairs.extend(jail.parent_cgroup.iter().map(|parent| ("--parent-cgroup", parent.clone())));
    let args = pairs.into_iter().flat_map(|(name, value)| [name.to_owned(), value]);
    let own = ["--", "--api-sock", API_SOCKET, "--log-path", LOG_FILE, "--level", "Warn", "--enable-pci"]
        .map(str::to_owned);
    args.chain(own).collect()
}

#[cfg(test)]
mod tests {
    use coracle_hypervisor::{Accelerator, Slots};
    use coracle_types::VmId;

    use super::*;

    fn vmm_config(dir: &Path) -> VmmConfig {
        VmmConfig {
            id: VmId::of_name(&"web".parse().unwrap()).into(),
            vcpus: 1.try_into().unwrap(),
            memory: 128.try_into().unwrap(),
            kernel: dir.join("vmlinuz"),
            initrd: dir.join("initrd"),
            disks: vec![Disk::raw(1, dir.join("overlay"), false)],
            slots: Slots { read_only: 1, writable: 1 },
            machine_type: Default::default(),
            nic: None,
            display: None,
            state_dir: dir.into(),
            run_dir: dir.into(),
            accelerator: Accelerator::Kvm,
            driver: String::new(),
            uid: None,
        }
    }

    fn jail(base: &Path) -> Jail {
        // Our own user: a test must not need another.
        let owner = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        Jail { program: "/usr/bin/jailer".into(), base: base.into(), owner, parent_cgroup: None }
    }

    #[test]
    fn golden_arguments() {
        let jail = Jail {
            owner: (30_001, 30_002),
            parent_cgroup: Some("coracle/web".into()),
            ..jail(Path::new("/srv/jailer"))
        };
        let arguments =
            jailer_arguments(&jail, Path::new("/usr/bin/firecracker"), &vmm_config(Path::new("/x")));
        let mut text = arguments.join("\n");
        text = text.replace(vmm_config(Path::new("/x")).id.short(), "ID");
        insta::assert_snapshot!(text);
    }

    #[test]
    fn jail_holds_every_path_of_the_api_and_the_vms_own_disk() {
        let dir = tempfile::tempdir().unwrap();
        let vmm_config = vmm_config(dir.path());
        for name in ["vmlinuz", "initrd", "overlay"] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        let jail = jail(&dir.path().join("jails"));
        for _ in 0..2 {
            jail.prepare(Path::new("/usr/bin/firecracker"), &vmm_config, true).unwrap();
        }
        let root = jail.root(Path::new("/usr/bin/firecracker"), &vmm_config);
        assert_eq!(fs::read_to_string(root.join(KERNEL)).unwrap(), "vmlinuz");
        fs::write(root.join("slot1"), "written by the guest").unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("overlay")).unwrap(), "written by the guest");
        assert_eq!(fs::metadata(root.join("slot0")).unwrap().len(), 1 << 40);
        for _ in 0..2 {
            jail.remove(Path::new("/usr/bin/firecracker"), &vmm_config).unwrap();
        }
        assert!(
            !root.exists() && dir.path().join("overlay").exists(),
            "the disk is the VM's, not the jail's"
        );
    }
}
