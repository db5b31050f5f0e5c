//! Firecracker's jailer: a folder, a user and a namespace for each process (docs/jailer).
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
use coracle_hypervisor::{Disk, VmRecipe};

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
    pub fn root(&self, program: &Path, recipe: &VmRecipe) -> PathBuf {
        let name = program.file_name().unwrap_or_default();
        // The whole id would make sockets' paths too long (107 bytes).
        self.base.join(name).join(recipe.id.short()).join("root")
    }

    /// Removes the jail. Blocking, idempotent.
    pub(crate) fn remove(&self, program: &Path, recipe: &VmRecipe) -> io::Result<()> {
        let root = self.root(program, recipe);
        match fs::remove_dir_all(root.parent().unwrap_or(&root)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Makes the jail anew, with everything that the API will name. Blocking, idempotent.
    pub(crate) fn prepare(&self, program: &Path, recipe: &VmRecipe, filled: bool) -> io::Result<()> {
        let root = self.root(program, recipe);
        fs::create_dir_all(&root)?;
        // The jailer makes these itself, and fails when they are there.
        for left in ["dev", "run"] {
            let _absent = fs::remove_dir_all(root.join(left));
        }
        let _absent = fs::remove_file(root.join(program.file_name().unwrap_or_default()));
        folder::prepare(recipe, &root, filled)?;
        for slot in 0..recipe.slots.total() {
            self.fill(&root, slot, recipe.disk_in(slot).filter(|_| filled))?;
        }
        for (from, to) in [(elf_kernel(&recipe.kernel), KERNEL), (recipe.initrd.clone(), INITRD)] {
            let _absent = fs::remove_file(root.join(to));
            link(&from, &root.join(to))?;
        }
        // The same file as outside, so that its last words are found there.
        let log = recipe.state_dir.join(LOG_FILE);
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

    pub(crate) fn arguments(&self, program: &Path, recipe: &VmRecipe) -> Vec<String> {
        jailer_arguments(self, program, recipe)
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
                "{} is on another file system than the jails: set their folder there",
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
pub fn jailer_arguments(jail: &Jail, program: &Path, recipe: &VmRecipe) -> Vec<String> {
    let (uid, gid) = jail.owner;
    let mut pairs = vec![
        ("--id", recipe.id.short().to_owned()),
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

    fn recipe(dir: &Path) -> VmRecipe {
        VmRecipe {
            id: VmId::of_name(&"web".parse().unwrap()),
            vcpus: 1.try_into().unwrap(),
            memory: 128.try_into().unwrap(),
            kernel: dir.join("vmlinuz"),
            initrd: dir.join("initrd"),
            disks: vec![Disk::raw(1, dir.join("overlay"), false)],
            slots: Slots { read_only: 1, writable: 1 },
            machine: Default::default(),
            nic: None,
            state_dir: dir.into(),
            run_dir: dir.into(),
            accelerator: Accelerator::Kvm,
            driver: String::new(),
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
        let arguments = jailer_arguments(&jail, Path::new("/usr/bin/firecracker"), &recipe(Path::new("/x")));
        let mut text = arguments.join("\n");
        text = text.replace(recipe(Path::new("/x")).id.short(), "ID");
        insta::assert_snapshot!(text);
    }

    #[test]
    fn a_jail_has_all_that_the_api_names_and_the_disk_in_it_is_the_vms_disk() {
        let dir = tempfile::tempdir().unwrap();
        let recipe = recipe(dir.path());
        for name in ["vmlinuz", "initrd", "overlay"] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        let jail = jail(&dir.path().join("jails"));
        for _ in 0..2 {
            jail.prepare(Path::new("/usr/bin/firecracker"), &recipe, true).unwrap();
        }
        let root = jail.root(Path::new("/usr/bin/firecracker"), &recipe);
        assert_eq!(fs::read_to_string(root.join(KERNEL)).unwrap(), "vmlinuz");
        fs::write(root.join("slot1"), "written by the guest").unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("overlay")).unwrap(), "written by the guest");
        assert_eq!(fs::metadata(root.join("slot0")).unwrap().len(), 1 << 40);
        for _ in 0..2 {
            jail.remove(Path::new("/usr/bin/firecracker"), &recipe).unwrap();
        }
        assert!(
            !root.exists() && dir.path().join("overlay").exists(),
            "the disk is the VM's, not the jail's"
        );
    }
}
