//! Every refusal, each with its errno.

use std::os::fd::OwnedFd;

use rustix::fs::makedev;
use rustix::process::geteuid;

use super::*;
use crate::handles::{HANDLES_MAX, Handles, OpenMode};
use crate::wire::{
    AccessIn, DATA_MAX, FallocateIn, GetxattrIn, InitIn, InitOut, LinkIn, LseekIn, MkdirIn, MknodIn, ReadIn,
    Rename2In, SetattrIn, SetxattrIn, WriteIn, set,
};

const NUL: &[u8] = b"\0";

#[test]
fn names_are_single_components() {
    let mut world = World::new(false);
    let long = "n".repeat(256);
    let mkdir = MkdirIn { mode: 0o755, umask: 0 };
    for (name, want) in [
        ("", Errno::INVAL),
        (".", Errno::INVAL),
        ("..", Errno::INVAL),
        ("../outside", Errno::INVAL),
        ("dir/below", Errno::INVAL),
        ("/", Errno::INVAL),
        (&long, Errno::NAMETOOLONG),
    ] {
        let name = name.as_bytes();
        let target = LinkIn { node: world.id("file") };
        for (op, arguments) in [
            (Op::Lookup, [b"".as_slice(), name, NUL, b""]),
            (Op::Mkdir, [mkdir.as_bytes(), name, NUL, b""]),
            (Op::Mknod, [MknodIn { mode: 0o100_644, ..MknodIn::default() }.as_bytes(), name, NUL, b""]),
            (Op::Create, [[0; 16].as_slice(), name, NUL, b""]),
            (Op::Symlink, [b"", name, NUL, b"target\0"]),
            (Op::Link, [target.as_bytes(), name, NUL, b""]),
            (Op::Unlink, [b"", name, NUL, b""]),
            (Op::Rmdir, [b"", name, NUL, b""]),
            (Op::Rename, [ROOT.as_bytes(), name, NUL, b"new\0"]),
            (Op::Rename, [ROOT.as_bytes(), b"file\0", name, NUL]),
        ] {
            assert_eq!(world.ask(op, ROOT, &arguments), Err(want), "{op:?} {name:?}");
        }
    }
    assert_eq!(world.ask(Op::Lookup, ROOT, &[b"file"]), Err(Errno::INVAL), "without an end");
    assert_eq!(world.ask(Op::Lookup, ROOT, &[b"file\0more"]), Err(Errno::INVAL), "with more after it");
    assert_eq!(world.lookup(ROOT, "absent").map(|_| ()), Err(Errno::NOENT));
    assert_eq!(world.lookup(99, "file").map(|_| ()), Err(Errno::STALE));
    let file = world.id("file");
    assert_eq!(world.lookup(file, "below").map(|_| ()), Err(Errno::NOTDIR));
    let link = world.id("out");
    assert_eq!(world.lookup(link, "secret").map(|_| ()), Err(Errno::NOTDIR), "a link is not a directory");
}

#[test]
fn links_and_special_files_are_not_opened() {
    let mut world = World::new(false);
    let directory = [0; 8];
    for (name, open, opendir) in [
        ("file", None, Some(Errno::NOTDIR)),
        ("dir", Some(Errno::ISDIR), None),
        ("link", Some(Errno::LOOP), Some(Errno::LOOP)),
        ("out", Some(Errno::LOOP), Some(Errno::LOOP)),
        ("fifo", Some(Errno::PERM), Some(Errno::PERM)),
        ("socket", Some(Errno::PERM), Some(Errno::PERM)),
    ] {
        let id = world.id(name);
        assert_eq!(world.open(id, 0).err(), open, "{name}");
        assert_eq!(world.ask(Op::Opendir, id, &[&directory]).err(), opendir, "{name}");
    }
    let file = world.id("file");
    assert_eq!(world.open(file, 3), Err(Errno::INVAL), "no access mode");
    for name in ["link", "fifo"] {
        let create = world.ask(Op::Create, ROOT, &[&[2, 0, 0, 0], &[0; 12], name.as_bytes(), NUL]);
        assert!(matches!(create, Err(Errno::LOOP | Errno::PERM)), "{name} {create:?}");
    }
}

#[test]
fn devices_are_neither_made_nor_touched() {
    let mut world = World::new(false);
    for (mode, want) in [
        (0o020_666, Errno::PERM),
        (0o060_666, Errno::PERM),
        (0o040_755, Errno::INVAL),
        (0o120_777, Errno::INVAL),
    ] {
        let asked = MknodIn { mode, rdev: 0x103, ..MknodIn::default() };
        assert_eq!(world.ask(Op::Mknod, ROOT, &[asked.as_bytes(), b"new\0"]), Err(want), "{mode:o}");
    }
    if !geteuid().is_root() {
        return coracle_testkit::tools::skip("only root makes devices");
    }
    mknodat(CWD, world.root("null"), FileType::CharacterDevice, Mode::RWXU, makedev(1, 3)).unwrap();
    let id = world.id("null");
    assert_eq!(world.open(id, 0), Err(Errno::PERM));
    let chmod = SetattrIn { valid: set::MODE, mode: 0o666, ..SetattrIn::default() };
    assert_eq!(world.ask(Op::Setattr, id, &[chmod.as_bytes()]), Err(Errno::PERM));
    assert_eq!(world.ask(Op::Link, ROOT, &[LinkIn { node: id }.as_bytes(), b"new\0"]), Err(Errno::PERM));
}

#[test]
fn arguments_are_bounded() {
    let mut world = World::new(false);
    let file = world.id("file");
    let fh = world.open(file, 2).unwrap();
    let most = u32::try_from(DATA_MAX).unwrap();
    let read = |fh, size| ReadIn { fh, size, ..ReadIn::default() };
    let write = |fh, size| WriteIn { fh, size, ..WriteIn::default() };
    let setattr = |valid| SetattrIn { valid, uid: u32::MAX, mtime_nsec: 1 << 30, ..SetattrIn::default() };
    let rename = |flags| Rename2In { new_dir: ROOT, flags, pad: 0 };
    let fallocate = |mode| FallocateIn { fh, mode, length: 1, ..FallocateIn::default() };
    let seek = |whence| LseekIn { fh, whence, ..LseekIn::default() };
    let target = vec![b'x'; 4096];
    let data = vec![0; DATA_MAX + 1];
    let xattr = |size| SetxattrIn { size, flags: 0 };
    let get = GetxattrIn { size: 10, pad: 0 };
    for (why, op, arguments, want) in [
        ("read too much", Op::Read, vec![read(fh, most + 1).as_bytes()], Errno::INVAL),
        ("no such handle", Op::Read, vec![read(fh + 64, 1).as_bytes()], Errno::BADF),
        ("a number that no daemon gave", Op::Read, vec![read(0, 1).as_bytes()], Errno::BADF),
        ("a later daemon's handle", Op::Read, vec![read(fh + (1 << 41), 1).as_bytes()], Errno::BADF),
        ("directory's listing of a file", Op::Readdir, vec![read(fh, 100).as_bytes()], Errno::NOTDIR),
        ("write more than there is", Op::Write, vec![write(fh, 9).as_bytes(), b"12345678"], Errno::INVAL),
        ("write less than there is", Op::Write, vec![write(fh, 7).as_bytes(), b"12345678"], Errno::INVAL),
        ("write too much", Op::Write, vec![write(fh, most + 1).as_bytes(), &data], Errno::INVAL),
        ("half a structure", Op::Write, vec![&[0; 39]], Errno::INVAL),
        ("leave the owner to the kernel", Op::Setattr, vec![setattr(set::UID).as_bytes()], Errno::INVAL),
        ("over a second", Op::Setattr, vec![setattr(set::MTIME).as_bytes()], Errno::INVAL),
        (
            "a file of no size",
            Op::Setattr,
            vec![SetattrIn { size: u64::MAX, ..setattr(set::SIZE) }.as_bytes()],
            Errno::INVAL,
        ),
        (
            "attribute of another family",
            Op::Setxattr,
            vec![xattr(1).as_bytes(), b"trusted.x\0", b"1"],
            Errno::OPNOTSUPP,
        ),
        (
            "capabilities",
            Op::Setxattr,
            vec![xattr(1).as_bytes(), b"security.capability\0", b"1"],
            Errno::OPNOTSUPP,
        ),
        ("access lists", Op::Getxattr, vec![get.as_bytes(), b"system.posix_acl_access\0"], Errno::OPNOTSUPP),
        ("no name", Op::Removexattr, vec![b"user.\0"], Errno::OPNOTSUPP),
        ("shorter than said", Op::Setxattr, vec![xattr(2).as_bytes(), b"user.x\0", b"1"], Errno::INVAL),
        ("too long", Op::Setxattr, vec![xattr(most).as_bytes(), b"user.x\0", &data[1..]], Errno::TOOBIG),
        ("collapse", Op::Fallocate, vec![fallocate(8).as_bytes()], Errno::OPNOTSUPP),
        ("seek to a place", Op::Lseek, vec![seek(0).as_bytes()], Errno::INVAL),
        ("not a link", Op::Readlink, vec![], Errno::INVAL),
        ("controls of devices", Op::Ioctl, vec![&[0; 32]], Errno::NOTTY),
    ] {
        assert_eq!(world.ask(op, file, &arguments), Err(want), "{why}");
    }
    for (why, op, arguments, want) in [
        ("whiteout", Op::Rename2, vec![rename(4).as_bytes(), b"file\0", b"new\0"], Errno::INVAL),
        ("link to nothing", Op::Symlink, vec![b"new\0".as_slice(), b"\0"], Errno::NOENT),
        ("link too long", Op::Symlink, vec![b"new\0", &target, NUL], Errno::NAMETOOLONG),
    ] {
        assert_eq!(world.ask(op, ROOT, &arguments), Err(want), "{why}");
    }
    let other = world.id("dir/below");
    assert_eq!(
        world.ask(Op::Read, other, &[read(fh, 1).as_bytes()]),
        Err(Errno::BADF),
        "another file's handle"
    );
}

#[test]
fn malformed_and_unknown_messages_are_refused() {
    let world = World::new(false);
    let getattr = message(Op::Getattr as u32, 8, ROOT, &[&[0; 16]]);
    let answer = |message: &[u8]| world.server.answer(message).map(|reply| result(&reply, 8).map(|_| ()));
    assert_eq!(answer(&getattr), Some(Ok(())));
    assert_eq!(answer(&getattr[..39]), None, "less than a header");
    assert_eq!(answer(&getattr[..50]), Some(Err(Errno::INVAL)), "shorter than it says");
    assert_eq!(answer(&[&getattr[..], &[0]].concat()), Some(Err(Errno::INVAL)), "longer than it says");
    let mut extended = getattr.clone();
    extended[36] = 1;
    assert_eq!(answer(&extended), Some(Err(Errno::INVAL)), "an extension that was not agreed on");
    for unknown in [0, 7, 19, 31, 33, 37, 40, 48, 50, 51, 52, 4096, u32::MAX] {
        assert_eq!(answer(&message(unknown, 8, ROOT, &[])), Some(Err(Errno::NOSYS)), "{unknown}");
    }
    for silent in [Op::Forget, Op::BatchForget, Op::Interrupt, Op::NotifyReply] {
        for arguments in [&[][..], &[0xff; 7], &[0xff; 80]] {
            assert_eq!(answer(&message(silent as u32, 8, ROOT, &[arguments])), None, "{silent:?}");
        }
    }
}

#[test]
fn fuse_version_negotiation_table() {
    let mut world = World::new(false);
    for (major, minor, want) in [
        (6, 40, Err(Errno::PROTO)),
        (7, 30, Err(Errno::PROTO)),
        (7, 31, Ok((7, 31))),
        (7, 38, Ok((7, 38))),
        (7, 45, Ok((7, 38))),
        (8, 0, Ok((7, 38))),
    ] {
        let asked = InitIn { major, minor, max_readahead: u32::MAX, flags: u32::MAX };
        let told =
            world.ask(Op::Init, 0, &[asked.as_bytes(), &[0; 48]]).map(|body| parse_body::<InitOut>(&body));
        assert_eq!(told.map(|out| (out.major, out.minor)), want);
        if let (Ok(out), 7) = (told, major) {
            assert_eq!((out.max_write, out.max_readahead), (128 * 1024, 128 * 1024));
            assert_eq!(out.flags & 1 << 16, 0, "writes are never held back");
        }
    }
}

#[test]
fn read_only_shared_dir_refuses_changing_operations() {
    let mut world = World::new(true);
    let file = world.id("file");
    for op in Op::ALL.iter().filter(|op| op.changes()) {
        assert_eq!(world.ask(*op, file, &[&[0; 88]]), Err(Errno::ROFS), "{op:?}");
    }
    for flags in [1, 2, 0o1000, 0o1001] {
        assert_eq!(world.open(file, flags), Err(Errno::ROFS), "{flags:o}");
    }
    assert_eq!(world.ask(Op::Access, file, &[AccessIn { mask: 2, pad: 0 }.as_bytes()]), Err(Errno::ROFS));
    world.open(file, 0).unwrap();
    // Number that an earlier daemon may have given for writing, before the directory was read-only.
    world.restart();
    let write = ReadIn { fh: 1 << 40 | 1, size: 1, ..ReadIn::default() };
    assert_eq!(world.ask(Op::Read, file, &[write.as_bytes()]), Err(Errno::ROFS));
}

#[test]
fn open_files_beyond_the_limit_are_refused() {
    let handles = Handles::new(1);
    let file = || OwnedFd::from(fs::File::open("/dev/null").unwrap());
    let numbers: Vec<u64> =
        (0..HANDLES_MAX).map(|_| handles.add(7, file(), OpenMode::Read).unwrap()).collect();
    assert_eq!(
        (handles.check_room(), handles.add(7, file(), OpenMode::Read)),
        (Err(Errno::NFILE), Err(Errno::NFILE))
    );
    handles.close(numbers[0]);
    handles.add(7, file(), OpenMode::Read).unwrap();
    handles.clear();
    assert_eq!(handles.check_room(), Ok(()));
}
