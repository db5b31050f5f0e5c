//! Restarts of the daemon: mounts, open files and cached names of the guest stay valid.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;

use rustix::io::Errno;

use crate::mount::{MountOptions, run_on_mount};
use crate::{errno, work};

#[test]
fn open_files_and_directories_survive_a_restart() {
    run_on_mount(MountOptions::default(), |m| {
        fs::create_dir_all(m.guest.join("dir/sub")).unwrap();
        let mut log = File::options().append(true).create(true).open(m.guest.join("dir/log")).unwrap();
        let both = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(m.guest.join("dir/sub/both"))
            .unwrap();
        log.write_all(b"one\n").unwrap();
        both.write_all_at(b"0123456789", 0).unwrap();
        for n in 0..2000 {
            fs::write(m.host.join(format!("dir/sub/n{n}")), "").unwrap();
        }
        let mut listing = fs::read_dir(m.guest.join("dir/sub")).unwrap();
        let mut names: Vec<_> = listing.by_ref().take(10).map(|entry| entry.unwrap().file_name()).collect();
        let map_reader = File::open(m.guest.join("dir/sub/both")).unwrap();
        m.restart();
        log.write_all(b"two\n").unwrap();
        both.write_all_at(b"abc", 3).unwrap();
        let mut read = [0; 10];
        both.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(&read, b"012abc6789");
        map_reader.read_exact_at(&mut read[..2], 4).unwrap();
        assert_eq!(&read[..2], b"bc");
        names.extend(listing.map(|entry| entry.unwrap().file_name()));
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 2001, "a listing that began before ends after");
        // Directory and file are renamed, so that only the table knows the new path.
        fs::rename(m.guest.join("dir/sub/both"), m.guest.join("dir/moved")).unwrap();
        fs::rename(m.guest.join("dir"), m.guest.join("elsewhere")).unwrap();
        m.restart();
        log.write_all(b"three\n").unwrap();
        both.write_all_at(b"XYZ", 7).unwrap();
        both.sync_all().unwrap();
        assert_eq!(fs::read_to_string(m.host.join("elsewhere/log")).unwrap(), "one\ntwo\nthree\n");
        assert_eq!(fs::read_to_string(m.host.join("elsewhere/moved")).unwrap(), "012abc6XYZ");
        assert_eq!(both.metadata().unwrap().len(), 10);
        drop((log, both));
        m.restart();
        fs::remove_dir_all(m.guest.join("elsewhere")).unwrap();
        assert_eq!(fs::read_dir(&m.host).unwrap().count(), 0);
    });
}

#[test]
fn handle_of_removed_name_survives_by_hard_link() {
    run_on_mount(MountOptions::default(), |m| {
        fs::write(m.guest.join("first"), "content").unwrap();
        fs::hard_link(m.guest.join("first"), m.guest.join("second")).unwrap();
        let mut file = File::open(m.guest.join("first")).unwrap();
        fs::remove_file(m.guest.join("first")).unwrap();
        m.restart();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "content");
    });
}

#[test]
fn handle_of_unlinked_file_is_stale_after_restart() {
    run_on_mount(MountOptions::default(), |m| {
        let file =
            File::options().read(true).write(true).create_new(true).open(m.guest.join("gone")).unwrap();
        file.write_all_at(b"x", 0).unwrap();
        fs::remove_file(m.guest.join("gone")).unwrap();
        // Another file gets the name, and perhaps the same inode number: the handle must not refer to it.
        m.restart_after(|_| fs::write(m.host.join("gone"), "another").unwrap());
        assert_eq!(errno(file.write_at(b"y", 0)), Errno::STALE);
        assert_eq!(fs::read_to_string(m.guest.join("gone")).unwrap(), "another");
    });
}

#[test]
fn torn_table_is_read_to_the_last_whole_line() {
    run_on_mount(MountOptions::default(), |m| {
        fs::create_dir(m.guest.join("dir")).unwrap();
        let file = File::create_new(m.guest.join("dir/file")).unwrap();
        for torn in ["looked 2", "named 3 2 fi", "n"] {
            m.restart_after(|table| {
                File::options().append(true).open(table).unwrap().write_all(torn.as_bytes()).unwrap()
            });
            (&file).write_all(b"+").unwrap();
        }
        assert_eq!(fs::read_to_string(m.host.join("dir/file")).unwrap(), "+++");
    });
}

/// Tests each interval between two restarts of the daemon, so that every reply is lost in one of the runs.
#[test]
fn daemon_restarts_with_lost_replies_are_transparent() {
    for every in [2, 3, 7] {
        run_on_mount(MountOptions { dies_every: Some(every), ..MountOptions::default() }, |m| {
            work::files(m);
            work::attributes(m);
            assert!(m.messages() > 100);
        });
    }
    run_on_mount(
        MountOptions { dies_every: Some(11), ..MountOptions::default() },
        work::check_concurrent_writers,
    );
    run_on_mount(MountOptions { dies_every: Some(9), ..MountOptions::default() }, |m| {
        work::check_big_file(m, 2 << 20)
    });
    run_on_mount(MountOptions { dies_every: Some(31), ..MountOptions::default() }, |m| work::listing(m, 300));
    run_on_mount(MountOptions { dies_every: Some(5), ..MountOptions::default() }, work::check_mapped_file);
}
