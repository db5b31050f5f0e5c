//! File systems that the host has mounted below a directory.

use coracle_testkit::netns;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::*;
use crate::wire::{AccessIn, MkdirIn, SetattrIn, set};

/// Directory whose `dir` is another file system. The server is opened before or after that is mounted (`before`).
fn world_with_submount(read_only: bool, submounts: Submounts, before: bool) -> World {
    let mut world = World::new(false);
    let open = |world: &World| {
        let spec = SharedDirSpec { submounts, ..spec(world.dir.path(), read_only) };
        SharedDirServer::open(spec).unwrap()
    };
    if before {
        world.server = open(&world);
    }
    mount("none", world.root("dir"), "tmpfs", MountFlags::empty(), None).unwrap();
    fs::write(world.root("dir/flag"), "").unwrap();
    if !before {
        world.server = open(&world);
    }
    world
}

fn end(world: World) {
    let dir = world.root("dir");
    drop(world.server);
    unmount(dir, UnmountFlags::empty()).unwrap();
}

#[test]
fn writable_submount_of_a_read_only_directory_is_written() {
    netns::run(|| async {
        let mut world = world_with_submount(true, Submounts { writable: true, private: false }, false);
        let (dir, file, flag) = (world.id("dir"), world.id("file"), world.id("dir/flag"));
        let make = [MkdirIn { mode: 0o755, umask: 0 }.as_bytes(), b"new\0"].concat();
        let mode = SetattrIn { valid: set::MODE, mode: 0o600, ..SetattrIn::default() };
        let access = AccessIn { mask: 2, pad: 0 };
        for (why, op, node, arguments, want) in [
            ("make in the directory", Op::Mkdir, ROOT, &make[..], Err(Errno::ROFS)),
            ("make below", Op::Mkdir, dir, &make, Ok(())),
            ("remove below", Op::Rmdir, dir, b"new\0", Ok(())),
            ("remove the place of the mount", Op::Rmdir, ROOT, b"dir\0", Err(Errno::ROFS)),
            ("change a file of the directory", Op::Setattr, file, mode.as_bytes(), Err(Errno::ROFS)),
            ("change a file below", Op::Setattr, flag, mode.as_bytes(), Ok(())),
            ("access of the directory", Op::Access, ROOT, access.as_bytes(), Err(Errno::ROFS)),
            ("access below", Op::Access, dir, access.as_bytes(), Ok(())),
        ] {
            assert_eq!(world.ask(op, node, &[arguments]).map(drop), want, "{why}");
        }
        assert_eq!(world.open(file, 1), Err(Errno::ROFS));
        world.open(flag, 1).unwrap();
        end(world);
        let mut world = world_with_submount(true, Submounts::default(), false);
        let dir = world.id("dir");
        assert_eq!(
            world.ask(Op::Mkdir, dir, &[&make]).map(drop),
            Err(Errno::ROFS),
            "not unless it is asked for"
        );
        end(world);
    });
}

#[test]
fn private_directory_shows_no_later_mount() {
    netns::run(|| async {
        for (private, before, seen) in
            [(true, true, false), (true, false, true), (false, true, true), (false, false, true)]
        {
            let mut world = world_with_submount(false, Submounts { private, writable: false }, before);
            let dir = world.id("dir");
            let found = world.lookup(dir, "flag").map(drop);
            let want = if seen { Ok(()) } else { Err(Errno::NOENT) };
            assert_eq!(found, want, "private: {private}, opened before: {before}");
            // The host can unmount while the guest uses the directory: the copy is another mount.
            end(world);
        }
    });
}
