//! Owners of files, with a daemon that is root and one that is not.

use std::fs::{self, File, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use crate::mount::{MountOptions, run_on_mount};
use crate::work;

const USER: u32 = 12_345;
const GROUP: u32 = 23_456;

/// Runs a shell line as an unprivileged user of the guest. Returns true if it succeeds.
fn shell(at: &Path, line: &str) -> bool {
    let ran = Command::new("sh").args(["-c", line]).current_dir(at).uid(USER).gid(GROUP).output().unwrap();
    ran.status.success()
}

fn owner(path: impl AsRef<Path>) -> (u32, u32) {
    let of = fs::symlink_metadata(path).unwrap();
    (of.uid(), of.gid())
}

#[test]
fn files_belong_to_the_guest_user_who_made_them() {
    run_on_mount(MountOptions::default(), |m| {
        fs::set_permissions(&m.host, Permissions::from_mode(0o777)).unwrap();
        assert!(shell(
            &m.guest,
            "umask 027; echo x > file; mkdir directory; ln -s file symbolic; mkfifo fifo"
        ));
        for name in ["file", "directory", "symbolic", "fifo"] {
            assert_eq!(owner(m.host.join(name)), (USER, GROUP), "{name}");
        }
        let mode = |name: &str| fs::metadata(m.host.join(name)).unwrap().mode() & 0o7777;
        assert_eq!((mode("file"), mode("directory"), mode("fifo")), (0o640, 0o750, 0o640));
        fs::write(m.guest.join("root"), "").unwrap();
        assert_eq!(owner(m.host.join("root")), (0, 0));
        chown(m.guest.join("root"), Some(USER), Some(7)).unwrap();
        assert_eq!(owner(m.host.join("root")), (USER, 7));
    });
}

#[test]
fn guest_kernel_checks_permissions() {
    run_on_mount(MountOptions::default(), |m| {
        fs::write(m.host.join("private"), "x").unwrap();
        fs::set_permissions(m.host.join("private"), Permissions::from_mode(0o600)).unwrap();
        for line in
            ["cat private", "echo y >> private", "chmod 666 private", "echo y > new", "mv private moved"]
        {
            assert!(!shell(&m.guest, line), "{line}");
        }
        assert_eq!(fs::read_to_string(m.host.join("private")).unwrap(), "x");
    });
}

#[test]
fn set_gid_directory_passes_its_group_on() {
    run_on_mount(MountOptions::default(), |m| {
        chown(&m.host, None, Some(999)).unwrap();
        fs::set_permissions(&m.host, Permissions::from_mode(0o2777)).unwrap();
        assert!(shell(&m.guest, "echo x > file; mkdir directory"));
        assert_eq!((owner(m.host.join("file")), owner(m.host.join("directory"))), ((USER, 999), (USER, 999)));
        assert_eq!(fs::metadata(m.host.join("directory")).unwrap().mode() & 0o2000, 0o2000);
    });
}

#[test]
fn write_clears_set_id_bits() {
    run_on_mount(MountOptions::default(), |m| {
        fs::write(m.host.join("program"), "x").unwrap();
        fs::set_permissions(m.host.join("program"), Permissions::from_mode(0o6755)).unwrap();
        assert_eq!(fs::metadata(m.guest.join("program")).unwrap().mode() & 0o7777, 0o6755);
        File::options().append(true).open(m.guest.join("program")).unwrap().write_all(b"y").unwrap();
        assert_eq!(fs::metadata(m.host.join("program")).unwrap().mode() & 0o7777, 0o755);
    });
}

#[test]
fn unprivileged_daemon_owns_new_files() {
    run_on_mount(MountOptions { daemon: Some(USER), ..MountOptions::default() }, |m| {
        work::files(m);
        work::attributes(m);
        fs::write(m.guest.join("file"), "by the guest's root").unwrap();
        assert_eq!(owner(m.host.join("file")), (USER, USER));
        fs::write(m.host.join("foreign"), "x").unwrap();
        fs::set_permissions(m.host.join("foreign"), Permissions::from_mode(0o600)).unwrap();
        assert!(
            fs::read(m.guest.join("foreign")).is_err(),
            "what the daemon may not read, its guest may not"
        );
        assert!(chown(m.guest.join("file"), Some(0), Some(0)).is_err());
    });
}
