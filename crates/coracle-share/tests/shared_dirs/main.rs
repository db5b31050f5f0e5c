//! Shared directories through the FUSE client of a real kernel: file operations of programs, concurrent changes by the host,
//! and restarts of the daemon in between.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod mount;
mod ownership;
mod restart;
mod work;

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::time::Duration;

use coracle_testkit::eventually_blocking;
use mount::{MountOptions, run_on_mount};
use rustix::io::Errno;

/// Time limit for the guest to see a change of the host; the guest caches for a second.
const SEEN: Duration = Duration::from_secs(20);

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> Errno {
    Errno::from_io_error(&result.unwrap_err()).unwrap()
}

#[test]
fn file_operations_reach_the_host() {
    run_on_mount(MountOptions::default(), work::files);
}

#[test]
fn large_file_round_trips() {
    run_on_mount(MountOptions::default(), |m| work::check_big_file(m, 8 << 20));
}

#[test]
fn shared_mapping_is_written_back() {
    run_on_mount(MountOptions::default(), work::check_mapped_file);
}

#[test]
fn directory_of_5000_entries_is_listed() {
    run_on_mount(MountOptions::default(), |m| work::listing(m, 5000));
}

#[test]
fn attributes_reach_the_host() {
    run_on_mount(MountOptions::default(), work::attributes);
}

#[test]
fn concurrent_appends_and_renames_lose_nothing() {
    run_on_mount(MountOptions::default(), work::check_concurrent_writers);
}

#[test]
fn removed_file_stays_usable_while_open() {
    run_on_mount(MountOptions::default(), |m| {
        let path = m.guest.join("gone");
        let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        file.write_all(b"before ").unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(errno(File::open(&path)), Errno::NOENT);
        file.write_all(b"after").unwrap();
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!((text.as_str(), file.metadata().unwrap().nlink()), ("before after", 0));
        file.set_len(3).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 3);
        assert_eq!(fs::read_dir(&m.host).unwrap().count(), 0);
    });
}

#[test]
fn host_changes_become_visible_in_the_guest() {
    run_on_mount(MountOptions::default(), |m| {
        let seen = |what: &str, look: &dyn Fn() -> bool| {
            eventually_blocking(SEEN, what, || look().then_some(())).unwrap();
        };
        fs::write(m.host.join("file"), "one").unwrap();
        assert_eq!(
            fs::read_to_string(m.guest.join("file")).unwrap(),
            "one",
            "what was never looked at is seen at once"
        );
        fs::write(m.host.join("file"), "longer than before").unwrap();
        seen("a new content", &|| fs::read_to_string(m.guest.join("file")).unwrap() == "longer than before");
        let held = File::open(m.guest.join("file")).unwrap();
        fs::write(m.host.join("other"), "another inode").unwrap();
        fs::rename(m.host.join("other"), m.host.join("file")).unwrap();
        seen("a file put in its place", &|| {
            fs::read_to_string(m.guest.join("file")).unwrap_or_default() == "another inode"
        });
        let mut old = String::new();
        (&held).read_to_string(&mut old).unwrap();
        assert_eq!(old, "longer than before", "who has the old one open keeps it");
        fs::remove_file(m.host.join("file")).unwrap();
        fs::create_dir(m.host.join("file")).unwrap();
        fs::write(m.host.join("file/below"), "deep").unwrap();
        seen("a directory in its place", &|| {
            fs::read_to_string(m.guest.join("file/below")).unwrap_or_default() == "deep"
        });
        fs::rename(m.host.join("file"), m.host.join("moved")).unwrap();
        assert_eq!(fs::read_to_string(m.guest.join("moved/below")).unwrap(), "deep");
        seen("a directory that moved away", &|| !m.guest.join("file").exists());
        fs::remove_dir_all(m.host.join("moved")).unwrap();
        seen("an empty directory", &|| fs::read_dir(&m.guest).unwrap().count() == 0);
    });
}

#[test]
fn read_only_shared_dir_refuses_changes() {
    run_on_mount(MountOptions { read_only: true, ..MountOptions::default() }, |m| {
        fs::write(m.host.join("file"), "as it is").unwrap();
        fs::create_dir(m.host.join("folder")).unwrap();
        let file = m.guest.join("file");
        let new = m.guest.join("new");
        let open = |write: &mut fs::OpenOptions| write.open(&file).map(drop);
        for (what, result) in [
            ("write", open(File::options().write(true))),
            ("append", open(File::options().append(true))),
            ("truncate", open(File::options().write(true).truncate(true))),
            ("create", File::create(&new).map(drop)),
            ("mkdir", fs::create_dir(&new)),
            ("symlink", symlink("x", &new)),
            ("link", fs::hard_link(&file, &new)),
            ("rename", fs::rename(&file, &new)),
            ("unlink", fs::remove_file(&file)),
            ("rmdir", fs::remove_dir(m.guest.join("folder"))),
            ("chmod", fs::set_permissions(&file, fs::Permissions::from_mode(0o777))),
            ("chown", std::os::unix::fs::chown(&file, Some(1), Some(1))),
            (
                "times",
                rustix::fs::utimensat(rustix::fs::CWD, &file, &work::LONG_AGO, rustix::fs::AtFlags::empty())
                    .map_err(Into::into),
            ),
            (
                "xattr",
                rustix::fs::setxattr(&file, "user.x", b"1", rustix::fs::XattrFlags::empty())
                    .map_err(Into::into),
            ),
        ] {
            assert_eq!(errno(result), Errno::ROFS, "{what}");
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "as it is");
        assert_eq!(fs::read_dir(&m.guest).unwrap().count(), 2);
        assert_eq!(fs::read_to_string(m.host.join("file")).unwrap(), "as it is");
    });
}

/// An overlay gives a file another inode when it is first changed: names and handles still refer to the same file.
#[test]
fn files_that_an_overlay_copies_up_stay_the_same() {
    for dies_every in [None, Some(4)] {
        run_on_mount(MountOptions { overlay: Some("file"), dies_every, ..MountOptions::default() }, |m| {
            let path = m.guest.join("file");
            let reader = File::open(&path).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "lower");
            fs::hard_link(&path, m.guest.join("link")).unwrap();
            File::options().append(true).open(&path).unwrap().write_all(b" and upper").unwrap();
            fs::set_permissions(m.guest.join("link"), fs::Permissions::from_mode(0o640)).unwrap();
            fs::rename(&path, m.guest.join("moved")).unwrap();
            for of in [m.guest.join("moved"), m.guest.join("link"), m.host.join("moved")] {
                assert_eq!(fs::read_to_string(&of).unwrap(), "lower and upper");
                assert_eq!(fs::metadata(&of).unwrap().mode() & 0o777, 0o640);
            }
            assert_eq!(reader.metadata().unwrap().len(), 15);
            assert_eq!(fs::read_to_string(m.host.with_file_name("lower").join("file")).unwrap(), "lower");
            fs::remove_file(m.guest.join("moved")).unwrap();
            assert_eq!(fs::read_dir(&m.guest).unwrap().count(), 1);
        });
    }
}

#[test]
fn links_to_outside_are_not_followed_on_the_host() {
    run_on_mount(MountOptions::default(), |m| {
        let outside = m.host.parent().unwrap().join("outside");
        symlink(outside.join("secret"), m.host.join("absolute")).unwrap();
        symlink("../outside/secret", m.host.join("relative")).unwrap();
        symlink("../outside", m.host.join("folder")).unwrap();
        for (link, below, target) in [
            ("absolute", "absolute", outside.join("secret")),
            ("relative", "relative", "../outside/secret".into()),
            ("folder", "folder/secret", "../outside".into()),
        ] {
            assert_eq!(fs::read_link(m.guest.join(link)).unwrap(), target);
            assert_eq!(
                errno(fs::read(m.guest.join(below))),
                Errno::NOENT,
                "{below} was followed on the host"
            );
        }
        // A directory that the guest knows is replaced by a link on the host.
        fs::create_dir(m.host.join("turns")).unwrap();
        fs::write(m.host.join("turns/secret"), "inside").unwrap();
        let _held = File::open(m.guest.join("turns")).unwrap();
        assert_eq!(fs::read_to_string(m.guest.join("turns/secret")).unwrap(), "inside");
        fs::remove_dir_all(m.host.join("turns")).unwrap();
        symlink("../outside", m.host.join("turns")).unwrap();
        for name in ["secret", "new"] {
            // Refused, or the guest follows the link to an `outside` of its own.
            let _ = fs::write(m.guest.join("turns").join(name), "by the guest");
        }
        // The first thread of the process is still in the mount namespace of the host.
        let outside = std::path::Path::new("/proc/self/root").join(outside.strip_prefix("/").unwrap());
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
        assert_eq!(fs::read_to_string(outside.join("secret")).unwrap(), "not for guests");
    });
}
