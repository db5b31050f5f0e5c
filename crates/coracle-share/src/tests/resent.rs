//! A request whose reply was lost with the daemon is sent again to the next one.

use super::*;
use crate::wire::{CreateIn, MkdirIn, SetxattrIn, WriteIn};

/// Sends a request, restarts the daemon, sends the request again with the same number, and returns both answers.
fn ask_twice(world: &mut World, op: Op, node: u64, arguments: &[&[u8]]) -> [Result<usize, Errno>; 2] {
    let first = world.ask(op, node, arguments).map(|body| body.len());
    world.restart();
    [first, world.resend(op, node, arguments).map(|body| body.len())]
}

#[test]
fn resent_request_is_applied_once() {
    let mut world = World::new(false);
    let mkdir = MkdirIn { mode: 0o755, umask: 0 };
    let file = world.id("file");
    let exclusive = CreateIn { flags: 0o300, mode: 0o600, ..CreateIn::default() }; // O_CREAT | O_EXCL
    for (op, arguments) in [
        (Op::Mkdir, vec![mkdir.as_bytes(), b"new\0"]),
        (Op::Rmdir, vec![b"new\0".as_slice()]),
        (Op::Symlink, vec![b"symbolic\0", b"target\0"]),
        (Op::Create, vec![exclusive.as_bytes(), b"created\0"]),
        (Op::Link, vec![file.as_bytes(), b"linked\0"]),
        (Op::Rename, vec![ROOT.as_bytes(), b"created\0", b"moved\0"]),
        (Op::Rename2, vec![&[1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0], b"moved\0", b"linked\0"]),
        (Op::Unlink, vec![b"moved\0"]),
    ] {
        let [first, again] = ask_twice(&mut world, op, ROOT, &arguments);
        assert!(first.is_ok(), "{op:?} {first:?}");
        assert_eq!(first, again, "{op:?}");
    }
    assert!(
        !world.root("moved").exists() && world.root("linked").exists(),
        "exchanged once, then removed once"
    );

    let create = SetxattrIn { size: 1, flags: 1 };
    for (op, arguments) in [
        (Op::Setxattr, vec![create.as_bytes(), b"user.x\0", b"1"]),
        (Op::Removexattr, vec![b"user.x\0".as_slice()]),
    ] {
        assert_eq!(ask_twice(&mut world, op, file, &arguments), [Ok(0), Ok(0)], "{op:?}");
    }

    let fh = world.open(file, 0o2001).unwrap();
    let append = WriteIn { fh, size: 1, flags: 0o2001, ..WriteIn::default() };
    for _ in 0..2 {
        assert_eq!(ask_twice(&mut world, Op::Write, file, &[append.as_bytes(), b"+"]), [Ok(8), Ok(8)]);
    }
    assert_eq!(fs::read_to_string(world.root("file")).unwrap(), "content++");
}

#[test]
fn resent_refused_request_is_tried_again() {
    let mut world = World::new(false);
    assert_eq!(world.ask(Op::Rmdir, ROOT, &[b"dir\0"]), Err(Errno::NOTEMPTY));
    fs::remove_file(world.root("dir/below")).unwrap();
    assert_eq!(world.resend(Op::Rmdir, ROOT, &[b"dir\0"]), Ok(vec![]));
}
