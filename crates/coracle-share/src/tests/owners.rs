//! Owners of files for a container in a user namespace.

use std::os::unix::fs::{MetadataExt as _, chown};

use coracle_types::IdMapping;
use rustix::process::geteuid;
use zerocopy::IntoBytes as _;

use super::super::wire::{AttrOut, MkdirIn, SetattrIn, set};
use super::*;

/// First guest id: host ids 0 to 999 are mapped from here on.
const FIRST: u32 = 100_000;

fn map_owners(world: &mut World) {
    let ids = Some(IdMapping::new(FIRST, 1000).unwrap());
    world.server = SharedDirServer::open(SharedDirSpec { ids, ..spec(world.dir.path(), false) }).unwrap();
}

#[test]
fn owners_are_ids_of_the_namespace() {
    if !geteuid().is_root() {
        return coracle_testkit::tools::skip("only root gives files away");
    }
    let mut world = World::new(false);
    map_owners(&mut world);
    for (on_host, in_guest) in [(0, FIRST), (7, FIRST + 7), (999, FIRST + 999), (1000, 65_534)] {
        chown(world.root("file"), Some(on_host), Some(on_host)).unwrap();
        let attr = world.lookup(ROOT, "file").unwrap().attr;
        assert_eq!((attr.uid, attr.gid), (in_guest, in_guest), "{on_host}");
    }
    let file = world.id("file");
    for (why, uid, want) in [
        ("one of the namespace", FIRST + 3, Ok(FIRST + 3)),
        ("the guest's root", 0, Err(Errno::OVERFLOW)),
        ("past the end", FIRST + 1000, Err(Errno::OVERFLOW)),
        ("what means none", u32::MAX, Err(Errno::OVERFLOW)),
    ] {
        let chown = SetattrIn { valid: set::UID, uid, ..SetattrIn::default() };
        let answered = world.ask(Op::Setattr, file, &[chown.as_bytes()]);
        assert_eq!(answered.map(|body| parse_body::<AttrOut>(&body).attr.uid), want, "{why}");
    }
    assert_eq!(world.root("file").metadata().unwrap().uid(), 3, "refused ones change nothing");
}

#[test]
fn directory_made_in_a_container_has_the_mapped_owner() {
    if !geteuid().is_root() {
        return coracle_testkit::tools::skip("only root gives files away");
    }
    let mut world = World::new(false);
    map_owners(&mut world);
    for (why, name, maker, want) in [
        ("a user of the namespace", "by-user", FIRST + 5, 5),
        ("its root", "by-root", FIRST, 0),
        ("the guest's root, which makes places for mounts", "by-agent", 0, 0),
    ] {
        let asked = MkdirIn { mode: 0o755, umask: 0 };
        let body = [asked.as_bytes(), name.as_bytes(), b"\0"].concat();
        let len = u32::try_from(size_of::<InHeader>() + body.len()).unwrap();
        let (opcode, unique) = (Op::Mkdir as u32, 1000 + u64::from(maker));
        let header =
            InHeader { len, opcode, unique, node: ROOT, uid: maker, gid: maker, ..InHeader::default() };
        let answered = world.server.answer(&[header.as_bytes(), &body].concat()).unwrap();
        let made: EntryOut = parse_body(&result(&answered, unique).unwrap());
        let found = world.root(name).metadata().unwrap();
        assert_eq!((found.uid(), found.gid(), made.attr.uid), (want, want, FIRST + want), "{why}");
    }
}
