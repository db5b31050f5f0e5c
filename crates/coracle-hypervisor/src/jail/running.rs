//! Files that are mounted in a jail, and unmounted, while its VMM runs. A process of the daemon enters the VMM's mount
//! namespace, which the VMM itself cannot change.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, UnmountFlags};
use rustix::thread::LinkNameSpaceType;

use super::c;
use super::owned::Owners;
use crate::ProcessId;

/// Mounts `from`, a file or directory of the host, at `at` in the jail of a living VMM, owned by its user `uid`. A previous
/// mount at `at` is removed. Blocking, idempotent.
///
/// # Errors
/// If the VMM or `at` in its jail does not exist, or owners cannot be mapped.
pub(super) fn mount_in_jail(
    vmm: ProcessId,
    uid: u32,
    from: &Path,
    at: &Path,
    is_writable: bool,
) -> io::Result<()> {
    let mount = Owners::of(uid).mount(from, is_writable)?;
    change(vmm, Some(mount), at)
}

/// Unmounts in the jail what [`mount_in_jail`] mounted; a file that the VMM has open stays open. Blocking, idempotent.
///
/// # Errors
/// If the VMM does not exist.
pub(super) fn unmount_in_jail(vmm: ProcessId, at: &Path) -> io::Result<()> {
    change(vmm, None, at)
}

fn change(vmm: ProcessId, mount: Option<OwnedFd>, at: &Path) -> io::Result<()> {
    let failed = |why: String| io::Error::other(format!("change {} of a jail: {why}", at.display()));
    let namespace = File::open(format!("/proc/{}/ns/mnt", vmm.pid))?;
    // The descriptor belongs to this VMM, or to one that has ended: no later process has its namespace.
    if !vmm.is_alive()? {
        return Err(io::ErrorKind::NotFound.into());
    }
    let place = c(at)?;
    let mut command = Command::new("/bin/true");
    command.env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // SAFETY: setns, umount2 and move_mount take no memory and touch only the child.
    #[allow(unsafe_code, reason = "pre_exec has no safe form")]
    unsafe {
        command.pre_exec(move || enter_and_change(&namespace, mount.as_ref(), &place));
    }
    let ended = command.status().map_err(|e| failed(e.to_string()))?;
    if ended.success() { Ok(()) } else { Err(failed(ended.to_string())) }
}

/// Enters the namespace and changes the mount at `at`. Neither call follows a symbolic link, which the VMM could have made.
fn enter_and_change(namespace: &File, mount: Option<&OwnedFd>, at: &CString) -> io::Result<()> {
    rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))?;
    match rustix::mount::unmount(at.as_c_str(), UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        // Nothing was mounted there.
        Ok(()) | Err(Errno::INVAL) => {}
        Err(error) => return Err(error.into()),
    }
    if let Some(mount) = mount {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(mount, c"", rustix::fs::CWD, at.as_c_str(), flags)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::time::Duration;

    use coracle_types::InstanceId;
    use tokio::time::timeout;

    use super::super::landlock;
    use super::*;
    use crate::launch::{Launch, prepare_jail};
    use crate::{Accelerator, Disk, Jail, OwnedFile, Slots, VmmConfig, slot_in_jail};

    /// Accesses of a VMM to its files: the script writes its disk, tries to write an image that others use, and waits for a
    /// disk that is attached while it runs. A disk that is attached again is absent for a moment: only its second absence
    /// counts.
    const SCRIPT: &str = "
        echo written > slot1
        cat slot0 > /vmm/out
        echo no >> slot0 || echo refused >> /vmm/out
        chmod 0777 slot0 || echo kept >> /vmm/out
        until late=$(cat slot2) && test -n \"$late\"; do sleep 0.01; done
        echo $late >> /vmm/out
        while test -s slot2 || { sleep 0.3; test -s slot2; }; do sleep 0.01; done
        ls -ld slot1 | cut -d ' ' -f 3 >> /vmm/out
    ";

    fn vmm_config(dir: &Path, disks: Vec<Disk>) -> VmmConfig {
        let id = InstanceId::new("files", 7);
        VmmConfig {
            uid: Some(Jail::uid_of(&id)),
            id,
            vcpus: 1.try_into().unwrap(),
            memory: 128.try_into().unwrap(),
            kernel: "/nowhere".into(),
            initrd: "/nowhere".into(),
            disks,
            slots: Slots { read_only: 1, writable: 2 },
            machine_type: Default::default(),
            nic: None,
            display: None,
            state_dir: dir.to_owned(),
            run_dir: dir.to_owned(),
            accelerator: Accelerator::Tcg,
            driver: String::new(),
        }
    }

    #[tokio::test]
    async fn host_files_in_a_jail_keep_owner_and_mode() {
        assert!(Jail::is_possible(), "this test runs as root of the host");
        let dir = tempfile::tempdir().unwrap();
        let host = |name: &str| dir.path().join(name);
        for (name, text) in [("image", "shared\n"), ("disk", ""), ("out", ""), ("late", "attached\n")] {
            fs::write(host(name), text).unwrap();
            fs::set_permissions(host(name), fs::Permissions::from_mode(0o600)).unwrap();
        }
        let disks = vec![Disk::raw(0, host("image"), true), Disk::raw(1, host("disk"), false)];
        let vmm_config = vmm_config(dir.path(), disks.clone());
        let out = OwnedFile { from: host("out"), at: "/vmm/out".into(), is_writable: true };
        let shape = vmm_config.clone();
        let jail = prepare_jail(&vmm_config, move |jail| {
            jail.limits = None;
            jail.owned.push(out);
            let shape = VmmConfig { kernel: "/bin/true".into(), initrd: "/bin/true".into(), ..shape };
            jail.add_files(&shape, Path::new("/bin/sh"), 0, &disks);
            Ok(())
        });
        let jail = jail.await.unwrap();
        let args = vec!["-c".to_owned(), SCRIPT.to_owned()];
        let (program, working_dir) = (Path::new("/bin/sh"), Path::new("/"));
        let launch = Launch {
            vmm_config: &vmm_config,
            program,
            args,
            working_dir,
            serial: None,
            has_huge_pages: true,
            inherited: vec![],
            jail,
        };
        let vmm = launch.run().unwrap();
        let uid = vmm_config.uid.unwrap();
        for _ in 0..2 {
            mount_in_jail(vmm, uid, &host("late"), &slot_in_jail(2), false).unwrap();
        }
        let attached = async {
            while fs::read_to_string(host("out")).unwrap().lines().last() != Some("attached") {
                assert!(vmm.is_alive().unwrap());
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(20), attached).await.expect("it reads the disk that came late");
        for _ in 0..2 {
            unmount_in_jail(vmm, &slot_in_jail(2)).unwrap();
        }
        timeout(Duration::from_secs(20), vmm.exited()).await.expect("its script ends").unwrap();
        let said = fs::read_to_string(host("out")).unwrap();
        assert_eq!(said, format!("shared\nrefused\nkept\nattached\n{uid}\n"));
        assert_eq!(fs::read_to_string(host("disk")).unwrap(), "written\n");
        assert_eq!(fs::read_to_string(host("image")).unwrap(), "shared\n");
        for name in ["image", "disk", "out", "late"] {
            let found = fs::metadata(host(name)).unwrap();
            assert_eq!((found.uid(), found.mode() & 0o7777, found.nlink()), (0, 0o600, 1), "{name}");
        }
        assert!(mount_in_jail(vmm, uid, &host("late"), &slot_in_jail(2), false).is_err(), "it is gone");
    }

    #[tokio::test]
    async fn vmm_without_sockets_connects_to_nothing_of_the_host() {
        assert!(Jail::is_possible(), "this test runs as root of the host");
        if landlock::ruleset().unwrap().is_none() {
            return; // Linux before 6.7
        }
        let dir = tempfile::tempdir().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        for (has_no_sockets, want) in [(false, "connected\n"), (true, "refused\n")] {
            let out = dir.path().join("out");
            fs::write(&out, "").unwrap();
            let vmm_config = vmm_config(dir.path(), vec![]);
            let file = OwnedFile { from: out.clone(), at: "/vmm/out".into(), is_writable: true };
            let jail = prepare_jail(&vmm_config, move |jail| {
                (jail.limits, jail.own_network, jail.has_no_sockets) = (None, false, has_no_sockets);
                jail.owned.push(file);
                Ok(())
            });
            let jail = jail.await.unwrap();
            let line = format!(
                "(exec 3<>/dev/tcp/127.0.0.1/{port}) && echo connected > /vmm/out || echo refused > /vmm/out"
            );
            let (program, working_dir) = (Path::new("/bin/bash"), Path::new("/"));
            let args = vec!["-c".to_owned(), line];
            let launch = Launch {
                vmm_config: &vmm_config,
                program,
                args,
                working_dir,
                serial: None,
                has_huge_pages: true,
                inherited: vec![],
                jail,
            };
            // The process may have ended before the search for it.
            if let Ok(vmm) = launch.run() {
                timeout(Duration::from_secs(20), vmm.exited()).await.expect("its script ends").unwrap();
            }
            assert_eq!(fs::read_to_string(&out).unwrap(), want);
        }
    }
}
