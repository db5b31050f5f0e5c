//! Random messages of a guest: no panic, no access outside of the directory, no device and no set-id program in it.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::*;

/// Maximum length and offset that a test allocates on disk.
const ALLOCATED_MAX: u64 = 1 << 20;
const PAYLOAD: &[u8] = b"bytes";
const WORDS: &[u32] = &[
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    16,
    64,
    0o1101,
    0o2002,
    0o100_644,
    0o106_755,
    0o020_666,
    0o040_777,
    4096,
    131_072,
    131_073,
    u32::MAX,
];
const TEXTS: &[&[u8]] = &[
    b"file",
    b"dir",
    b"below",
    b"link",
    b"out",
    b"fifo",
    b"socket",
    b"secret",
    b"new",
    b"other",
    b"",
    b".",
    b"..",
    b"../outside/secret",
    b"out/secret",
    b"dir/../../outside",
    b"/",
    b"\xff\x80",
    &[b'n'; 255],
    &[b'n'; 256],
];
const FAR: &[u64] = &[4096, 1 << 20, 1 << 62, i64::MAX.cast_unsigned(), u64::MAX];
const ATTRIBUTES: &[&[u8]] = &[b"user.x", b"user.y", b"user.", b"trusted.x", b"security.capability", b""];

/// Arguments of an operation: words of 4 and 8 bytes (`d`, `q`), names (`s`), attribute names (`x`), bytes (`b`) and their
/// length (`z`).
fn shape(op: Op) -> &'static str {
    match op {
        Op::Lookup | Op::Unlink | Op::Rmdir => "s",
        Op::Getattr => "ddq",
        Op::Setattr => "ddqqqqqqdddddddd",
        Op::Readlink | Op::Statfs | Op::Destroy | Op::Ioctl | Op::NotifyReply => "",
        Op::Symlink => "ss",
        Op::Mknod | Op::Create => "dddds",
        Op::Mkdir => "dds",
        Op::Rename => "qss",
        Op::Rename2 => "qddss",
        Op::Link => "qs",
        Op::Open | Op::Opendir | Op::Access | Op::Listxattr => "dd",
        Op::Read | Op::Readdir | Op::Readdirplus => "qqddqdd",
        Op::Write => "qqzdqddb",
        Op::Release | Op::Releasedir | Op::Flush => "qddq",
        Op::Fsync | Op::Fsyncdir => "qdd",
        Op::Setxattr => "zdxb",
        Op::Getxattr => "ddx",
        Op::Removexattr => "x",
        Op::Init => "dddd",
        Op::Forget | Op::Interrupt => "q",
        Op::BatchForget => "ddqqqq",
        Op::Fallocate => "qqqdd",
        Op::Lseek => "qqdd",
        Op::CopyFileRange => "qqqqqqq",
    }
}

/// Small numbers are ids and offsets; large ones are handle numbers of the first daemons.
fn long_word() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0_u64..16,
        4 => (1_u64..3, 0_u64..6, select(&[0_u64, 1, 2, 4][..])).prop_map(|(daemon, n, how)| daemon << 40 | n << 3 | how),
        1 => select(FAR),
    ]
}

fn arguments(op: Op) -> impl Strategy<Value = Vec<u8>> {
    let parts: Vec<BoxedStrategy<Vec<u8>>> = shape(op)
        .chars()
        .map(|part| match part {
            'd' => select(WORDS).prop_map(|word| word.to_ne_bytes().to_vec()).boxed(),
            'q' => long_word().prop_map(|word| word.to_ne_bytes().to_vec()).boxed(),
            's' => select(TEXTS).prop_map(|text| [text, b"\0"].concat()).boxed(),
            'x' => select(ATTRIBUTES).prop_map(|text| [text, b"\0"].concat()).boxed(),
            'z' => Just(u32::try_from(PAYLOAD.len()).unwrap().to_ne_bytes().to_vec()).boxed(),
            _ => Just(PAYLOAD.to_vec()).boxed(),
        })
        .collect();
    parts.prop_map(|parts| parts.concat())
}

/// Valid or almost valid message.
fn request() -> impl Strategy<Value = Vec<u8>> {
    let node = prop_oneof![3 => Just(ROOT), 6 => 2_u64..12, 1 => any::<u64>()];
    let damage = prop_oneof![
        6 => Just(Vec::new()),
        1 => vec((any::<Index>(), any::<u8>()), 1..4),
    ];
    let cut = prop_oneof![9 => Just(None), 1 => any::<Index>().prop_map(Some)];
    let op = select(Op::ALL).prop_flat_map(|op| (Just(op), arguments(op)));
    (op, node, any::<u8>(), damage, cut).prop_map(|((op, mut body), node, unique, damage, cut)| {
        for (at, byte) in damage {
            if !body.is_empty() {
                let at = at.index(body.len());
                body[at] = byte;
            }
        }
        if let Some(cut) = cut {
            body.truncate(cut.index(body.len() + 1));
        }
        if op == Op::Fallocate {
            body.get_mut(8..24).into_iter().flat_map(|words| words.chunks_exact_mut(8)).for_each(|word| {
                let bounded = u64::from_ne_bytes(word.try_into().unwrap()) % ALLOCATED_MAX;
                word.copy_from_slice(&bounded.to_ne_bytes());
            });
        }
        message(op as u32, unique.into(), node, &[&body])
    })
}

/// Files outside of the directory, with all metadata that a change would affect.
fn outside_files(world: &World) -> Vec<(PathBuf, String, u32, i64, i64)> {
    let outside = world.dir.path().join("outside");
    let mut all: Vec<_> = fs::read_dir(&outside).unwrap().map(|entry| entry.unwrap().path()).collect();
    all.push(outside);
    all.sort();
    let told = |path: PathBuf| {
        let of = fs::symlink_metadata(&path).unwrap();
        let content = if of.is_file() { fs::read_to_string(&path).unwrap() } else { String::new() };
        (path, content, of.mode(), of.mtime_nsec(), of.ctime_nsec())
    };
    all.into_iter().map(told).collect()
}

/// Files beneath the root that a guest must not be able to make.
fn forbidden(at: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    // A guest can lock an unprivileged daemon out of its own directory.
    for entry in fs::read_dir(at).into_iter().flatten() {
        let path = entry.unwrap().path();
        let Ok(of) = fs::symlink_metadata(&path) else { continue };
        let device = of.file_type().is_char_device() || of.file_type().is_block_device();
        if of.is_dir() {
            found.extend(forbidden(&path));
        }
        if device || of.is_file() && of.mode() & 0o6000 != 0 {
            found.push(path);
        }
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_guest_requests_stay_inside_the_root(
        requests in vec((request(), prop::bool::weighted(0.05)), 1..60),
        read_only in prop::bool::weighted(0.2),
    ) {
        let mut world = World::new(read_only);
        for name in NAMES {
            world.id(name);
        }
        world.open(2, 0).unwrap();
        let before = outside_files(&world);
        let content = fs::read(world.root("file")).unwrap();
        for (message, dies) in &requests {
            let reply = world.server.answer(message);
            prop_assert!(reply.is_none_or(|reply| (16..=128 * 1024 + 16).contains(&reply.len())));
            if *dies {
                world.restart();
            }
        }
        world.restart();
        prop_assert_eq!(before, outside_files(&world));
        prop_assert_eq!(forbidden(&world.root("")), Vec::<PathBuf>::new());
        prop_assert!(!read_only || fs::read(world.root("file")).unwrap() == content);
    }

    #[test]
    fn arbitrary_bytes_change_nothing_outside_the_root(messages in vec((0_u32..60, any::<u64>(), vec(any::<u8>(), 0..200)), 1..40)) {
        let mut world = World::new(false);
        world.id("dir/below");
        let before = outside_files(&world);
        for (opcode, node, bytes) in &messages {
            let _ = world.server.answer(bytes);
            let _ = world.server.answer(&message(*opcode, *node, *node, &[bytes]));
            let _ = world.server.answer(&message(*opcode, *node, node % 8, &[bytes]));
        }
        prop_assert_eq!(before, outside_files(&world));
    }
}
