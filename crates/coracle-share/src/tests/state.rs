//! The table of node ids: what it forgets, what it keeps over a restart, and how much it holds.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::nodes::{Change, FileName, Ident, NODES_MAX, Nodes};
use crate::table::Table;
use crate::wire::ForgetIn;

fn ident(inode: u64) -> Ident {
    Ident { device: 1, inode, born: inode }
}

fn look_up(nodes: &mut Nodes, parent: u64, name: &str, inode: u64, directory: bool) -> u64 {
    let (id, changes) = nodes.look_up(parent, name.as_bytes(), ident(inode), directory).unwrap();
    changes.iter().for_each(|change| nodes.apply(change));
    id
}

fn paths(nodes: &Nodes, id: u64) -> Vec<String> {
    let place = nodes.place(id).map_or(Vec::new(), |place| place.paths);
    place.into_iter().map(|path| String::from_utf8(path).unwrap()).collect()
}

fn sorted(nodes: &Nodes) -> Vec<String> {
    let mut all: Vec<String> = nodes.snapshot().iter().map(|change| format!("{change:?}")).collect();
    all.sort();
    all
}

#[test]
fn node_names_follow_links_and_renames() {
    let mut nodes = Nodes::default();
    let dir = look_up(&mut nodes, ROOT, "dir", 10, true);
    let file = look_up(&mut nodes, dir, "file", 11, false);
    assert_eq!((dir, file, look_up(&mut nodes, dir, "file", 11, false)), (2, 3, 3), "one id an inode");
    look_up(&mut nodes, ROOT, "link", 11, false);
    assert_eq!(paths(&nodes, file), ["link", "dir/file"], "the latest first");
    let apply =
        |nodes: &mut Nodes, changes: Vec<Change>| changes.iter().for_each(|change| nodes.apply(change));
    let changes = nodes.rename_changes((ROOT, b"dir"), (ROOT, b"moved"), false);
    apply(&mut nodes, changes);
    assert_eq!(paths(&nodes, file), ["link", "moved/file"]);
    let other = look_up(&mut nodes, ROOT, "other", 12, false);
    let changes = nodes.rename_changes((ROOT, b"other"), (dir, b"file"), true);
    apply(&mut nodes, changes);
    assert_eq!(
        (paths(&nodes, file), paths(&nodes, other)),
        (vec!["other".into(), "link".into()], vec!["moved/file".into()])
    );
    let changes = nodes.rename_changes((dir, b"file"), (ROOT, b"link"), false);
    apply(&mut nodes, changes);
    assert_eq!(
        (paths(&nodes, file), paths(&nodes, other)),
        (vec!["other".to_owned()], vec!["link".to_owned()])
    );
    assert_eq!(nodes.rename_changes((ROOT, b"link"), (ROOT, b"link"), false), []);
    // The host has replaced the inode of the name.
    let newer = look_up(&mut nodes, ROOT, "other", 13, false);
    assert_eq!((newer, paths(&nodes, file)), (5, vec![]));
    // A directory has only one name.
    look_up(&mut nodes, ROOT, "again", 10, true);
    assert_eq!(paths(&nodes, dir), ["again"]);
}

#[test]
fn node_is_kept_while_referenced_or_a_parent() {
    let mut nodes = Nodes::default();
    let dir = look_up(&mut nodes, ROOT, "dir", 10, true);
    let file = look_up(&mut nodes, dir, "file", 11, false);
    look_up(&mut nodes, dir, "file", 11, false);
    for (id, count, left) in [(dir, 1, 2), (file, 1, 2), (99, 1, 2), (file, 1, 0)] {
        nodes.apply(&Change::Forgotten { id, count });
        assert_eq!(nodes.count(), left);
    }
    assert_eq!(look_up(&mut nodes, ROOT, "dir", 10, true), 4, "an id is never given twice");
    nodes.apply(&Change::Forgotten { id: 4, count: u64::MAX });
    assert_eq!(nodes.count(), 0);
}

#[test]
fn names_and_ids_are_bounded() {
    let mut nodes = Nodes::default();
    for n in 0..100 {
        look_up(&mut nodes, ROOT, &format!("link{n}"), 1, false);
    }
    assert_eq!(paths(&nodes, 2).len(), 16);
    assert_eq!(paths(&nodes, 2)[0], "link99");
    for n in 2..=NODES_MAX as u64 {
        look_up(&mut nodes, ROOT, &format!("n{n}"), n, false);
    }
    assert_eq!(nodes.look_up(ROOT, b"more", ident(u64::MAX), false), None);
    look_up(&mut nodes, ROOT, "crowded", 5, false);
    assert_eq!(paths(&nodes, 6), ["crowded"], "a second name is too many");
    let depth = {
        let mut nodes = Nodes::default();
        let deep = (0..3000).fold(ROOT, |parent, n| look_up(&mut nodes, parent, "d", 10 + n, true));
        paths(&nodes, deep)
    };
    assert_eq!(depth, Vec::<String>::new());
}

#[test]
fn table_log_cut_at_any_byte_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ids.table");
    let begin = {
        let mut table = Table::open(path.clone()).unwrap();
        let begin = fs::read(&path).unwrap().len();
        for (n, name) in ["plain", "with space", "odd\n\u{fc}%41", "%"].into_iter().enumerate() {
            let (_, changes) = table.nodes().look_up(ROOT, name.as_bytes(), ident(n as u64), false).unwrap();
            table.commit(&changes);
        }
        begin
    };
    let whole = fs::read(&path).unwrap();
    let mut held = Vec::new();
    for len in begin..=whole.len() {
        fs::write(&path, &whole[..len]).unwrap();
        held.push(Table::open(path.clone()).unwrap().nodes().count());
    }
    assert!(held.is_sorted() && held.first() == Some(&0) && held.last() == Some(&4), "{held:?}");
    let table = Table::open(path.clone()).unwrap();
    assert_eq!(table.nodes().named(ROOT, "odd\n\u{fc}%41".as_bytes()), Some(4));
    for (damaged, why) in
        [("coracle-folder 2\n", "another version"), ("coracle-folder 1\nlooked x 1\n", "no number")]
    {
        fs::write(&path, damaged).unwrap();
        assert!(Table::open(path.clone()).is_err(), "{why}");
    }
}

#[test]
fn growing_table_log_is_compacted() {
    let mut world = World::new(false);
    let table = world.dir.path().join("ids.table");
    let mut longest = 0;
    for _ in 0..60_000 {
        let node = world.lookup(ROOT, "file").unwrap().node;
        let _ =
            world.server.answer(&message(Op::Forget as u32, 1, node, &[ForgetIn { count: 1 }.as_bytes()]));
        longest = fs::metadata(&table).unwrap().len().max(longest);
    }
    // The size is measured after each answer, so the maximum is not exact.
    assert!((1020 << 10..3 << 20).contains(&longest), "{longest} bytes");
}

#[test]
fn unwritable_table_keeps_serving_and_recovers() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state/ids.table");
    fs::create_dir(dir.path().join("state")).unwrap();
    let mut table = Table::open(path.clone()).unwrap();
    table.clear();
    fs::remove_dir_all(dir.path().join("state")).unwrap();
    table.clear(); // tries to rewrite the file and fails
    let (id, changes) = table.nodes().look_up(ROOT, b"file", ident(1), false).unwrap();
    table.commit(&changes);
    assert!(table.nodes().contains(id));
    fs::create_dir(dir.path().join("state")).unwrap();
    table.commit(&[Change::LookupAdded { id, count: 1 }]);
    assert!(Table::open(path).unwrap().nodes().contains(id), "it is made good when it can be");
}

#[test]
fn inode_replaced_by_the_host_is_stale() {
    let mut world = World::new(false);
    let (file, below) = (world.id("file"), world.id("dir/below"));
    let getattr = |world: &mut World, id| world.ask(Op::Getattr, id, &[&[0; 16]]).err();
    fs::write(world.root("new"), "another inode").unwrap();
    fs::rename(world.root("new"), world.root("file")).unwrap();
    assert_eq!(getattr(&mut world, file), Some(Errno::STALE));
    fs::rename(world.root("dir"), world.root("away")).unwrap();
    assert_eq!(getattr(&mut world, below), Some(Errno::STALE));
    world.id("away");
    assert_eq!(getattr(&mut world, below), None, "found again by its directory's new name");
    symlink("away", world.root("dir")).unwrap();
    world.restart();
    assert_eq!((getattr(&mut world, below), getattr(&mut world, file)), (None, Some(Errno::STALE)));
}

#[test]
fn single_file_serves_as_root() {
    let mut world = World::new(false);
    let single = SharedDirSpec { root: world.root("file"), ..spec(world.dir.path(), false) };
    world.server =
        SharedDirServer::open(SharedDirSpec { table: world.dir.path().join("single.table"), ..single })
            .unwrap();
    world.open(ROOT, 0).unwrap();
    assert_eq!(world.lookup(ROOT, "file").map(|_| ()), Err(Errno::NOTDIR));
    let none = SharedDirSpec { root: world.root("fifo"), ..spec(world.dir.path(), false) };
    assert!(SharedDirServer::open(none).is_err());
}

fn change() -> impl Strategy<Value = Change> {
    let name = || "[a-c]".prop_map(|name| FileName::from(name.as_bytes()));
    prop_oneof![
        (2_u64..12, 0_u64..8, any::<bool>()).prop_map(|(id, inode, directory)| Change::Node {
            id,
            ident: ident(inode),
            directory
        }),
        (2_u64..12, 1_u64..12, name()).prop_map(|(id, parent, name)| Change::NameAdded { id, parent, name }),
        (1_u64..12, name()).prop_map(|(parent, name)| Change::Unnamed { parent, name }),
        (2_u64..12, 0_u64..3).prop_map(|(id, count)| Change::LookupAdded { id, count }),
        (2_u64..12, 0_u64..3).prop_map(|(id, count)| Change::Forgotten { id, count }),
        (2_u64..12, 0_u64..8).prop_map(|(id, inode)| Change::InodeChanged { id, ident: ident(inode) }),
        (0_u64..20).prop_map(|unique| Change::Done { unique }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// A log defines one state: applying it twice gives the same state, and so does a restart.
    #[test]
    fn snapshot_and_log_restore_the_same_state(changes in vec(change(), 0..80)) {
        let mut nodes = Nodes::default();
        for change in &changes {
            nodes.apply(change);
            (0..14).for_each(|id| drop(nodes.place(id)));
        }
        let mut told = Nodes::default();
        nodes.snapshot().iter().for_each(|change| told.apply(change));
        prop_assert_eq!(sorted(&nodes), sorted(&told));

        let dir = tempfile::tempdir().unwrap();
        let mut table = Table::open(dir.path().join("ids")).unwrap();
        changes.iter().for_each(|change| table.commit(std::slice::from_ref(change)));
        drop(table);
        nodes.prune();
        nodes.apply(&Change::Epoch { count: 2 });
        prop_assert_eq!(sorted(Table::open(dir.path().join("ids")).unwrap().nodes()), sorted(&nodes));
    }
}
