//! Root file systems built from layers, checked by fsck.erofs and, where possible, by the kernel.

use std::os::unix::fs::MetadataExt;

use coracle_image::Rootfs;
use coracle_types::RootfsLayout;

use crate::common::{
    Bench, Layer, Mounted, Parts, Stored, Tree, describe, extract, has_programs, names, read_tree, run,
};

/// Builds the layers, checks the image with fsck.erofs, and returns the extracted tree.
async fn tree_of(layers: Vec<Vec<u8>>) -> Option<Tree> {
    if !has_programs(&["fsck.erofs"]) {
        return None;
    }
    let bench = Bench::new();
    let rootfs = bench.rootfs(layers).await.unwrap();
    let tree = read_tree(&extract(&rootfs).path().join("root"));
    let Some(mounted) = Mounted::new(&rootfs) else { return Some(tree) };
    let seen = read_tree(mounted.path());
    assert_eq!(without_set_id(&seen), without_set_id(&tree), "the kernel sees what fsck sees");
    Some(seen)
}

/// Masks setuid and setgid: fsck.erofs 1.5 sets the mode before the owner, and setting the owner clears both bits of extracted
/// files.
fn without_set_id(tree: &Tree) -> Tree {
    let masked = |what: &String| what.replace(" 4755 ", " 755 ").replace(" 2755 ", " 755 ");
    tree.iter().map(|(path, what)| (path.clone(), masked(what))).collect()
}

#[tokio::test]
async fn rootfs_has_every_file_type_and_attribute() {
    let big: Vec<u8> =
        (0..3_000_000u32).flat_map(|n| if n % 70_000 < 20_000 { [0] } else { [(n % 251) as u8] }).collect();
    let layer = Layer::new()
        .dir(".", 0o711)
        .dir("etc", 0o750)
        .file_as("etc/small", b"hello", 0o640, 7, 8)
        .file_as("bin/su", b"#!", 0o4755, 0, 0)
        .file_as("bin/wall", b"#!", 0o2755, 0, 5)
        .dir("tmp", 0o1777)
        .file("big", &big)
        .file("zeros", vec![0; 100_000])
        .file("empty", b"")
        .file("edge2048", vec![1; 2048])
        .file("edge2049", vec![2; 2049])
        .file("edge4096", vec![3; 4096])
        .symlink("lib", "usr/lib")
        .symlink("away", "../../../../etc/passwd")
        .device(b'3', "dev/null", 1, 3)
        .device(b'4', "dev/sda", 8, 1_000_000)
        .device(b'3', "dev/max", 4095, 1_048_575)
        .raw(b"run/pipe", Layer::header(b'6', 0, 0o600), b"")
        .file_as("far", b"x", 0o600, 1_000_000, u64::from(u32::MAX - 1));
    let tar = layer.tar();
    let Some(tree) = tree_of(vec![tar.clone()]).await else { return };
    for (path, want) in [
        ("", "dir 711 0:0".to_owned()),
        ("etc", "dir 750 0:0".to_owned()),
        ("etc/small", describe("hello", 0o640, "7:8")),
        ("bin", "dir 755 0:0".to_owned()),
        ("tmp", "dir 1777 0:0".to_owned()),
        ("big", describe(&big, 0o644, "0:0")),
        ("zeros", describe(vec![0; 100_000], 0o644, "0:0")),
        ("empty", describe("", 0o644, "0:0")),
        ("edge2048", describe([1; 2048], 0o644, "0:0")),
        ("edge2049", describe([2; 2049], 0o644, "0:0")),
        ("edge4096", describe([3; 4096], 0o644, "0:0")),
        ("lib", "-> usr/lib 777 0:0".to_owned()),
        ("away", "-> ../../../../etc/passwd 777 0:0".to_owned()),
        ("dev/null", "char 1:3 640 0:0".to_owned()),
        ("dev/sda", "block 8:1000000 640 0:0".to_owned()),
        ("dev/max", "char 4095:1048575 640 0:0".to_owned()),
        ("run/pipe", "fifo 600 0:0".to_owned()),
        ("far", describe("x", 0o600, "1000000:4294967294")),
    ] {
        assert_eq!(tree.get(path), Some(&want), "{path}");
    }
    assert_eq!(tree.len(), 22, "{}", names(&tree));
    let bench = Bench::new();
    let rootfs = bench.rootfs(vec![tar]).await.unwrap();
    for (path, want) in [("/bin/su", 0o104_755), ("/bin/wall", 0o102_755)] {
        assert_eq!(raw_mode(&rootfs, path), want, "{path}");
    }
}

/// Mode of a file, read from the inode that dump.erofs finds. The output of dump.erofs has the permission bits only.
fn raw_mode(rootfs: &Rootfs, path: &str) -> u16 {
    let shown = run("dump.erofs", &[&format!("--path={path}"), rootfs.path.to_str().unwrap()]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    let nid: usize = shown.split("NID: ").nth(1).unwrap().split_whitespace().next().unwrap().parse().unwrap();
    let bytes = std::fs::read(&rootfs.path).unwrap();
    let meta_block = u32::from_le_bytes(bytes[1064..1068].try_into().unwrap());
    let at = meta_block as usize * 4096 + nid * 32 + 4;
    u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap())
}

#[tokio::test]
async fn upper_layer_hides_lower_layers() {
    let base = || {
        Layer::new()
            .dir("a", 0o700)
            .file("a/x", "base")
            .file("a/y", "base")
            .file("a/sub/z", "base")
            .file("b", "base")
            .dir("c", 0o755)
            .file("c/1", "base")
    };
    for (why, upper, want) in [
        ("nothing", Layer::new(), "a a/sub a/sub/z a/x a/y b c c/1"),
        ("a file over a file", Layer::new().file("b", "new"), "a a/sub a/sub/z a/x a/y b c c/1"),
        ("whiteout of a file", Layer::new().whiteout("a/.wh.x"), "a a/sub a/sub/z a/y b c c/1"),
        ("whiteout of a directory", Layer::new().whiteout(".wh.a"), "b c c/1"),
        ("whiteout of nothing", Layer::new().whiteout(".wh.q"), "a a/sub a/sub/z a/x a/y b c c/1"),
        (
            "whiteout, then the same name again",
            Layer::new().whiteout(".wh.a").file("a/n", "new"),
            "a a/n b c c/1",
        ),
        (
            "the same name, then its whiteout",
            Layer::new().file("a/n", "new").whiteout(".wh.a"),
            "a a/n b c c/1",
        ),
        (
            "opaque",
            Layer::new().dir("a", 0o755).whiteout("a/.wh..wh..opq").file("a/n", "new"),
            "a a/n b c c/1",
        ),
        ("opaque, said last", Layer::new().file("a/n", "new").whiteout("a/.wh..wh..opq"), "a a/n b c c/1"),
        ("opaque root", Layer::new().whiteout(".wh..wh..opq").file("n", "new"), "n"),
        ("a file over a directory", Layer::new().file("a", "new"), "a b c c/1"),
        ("a link over a directory", Layer::new().symlink("a", "c"), "a b c c/1"),
        (
            "a directory over a file",
            Layer::new().dir("b", 0o755).file("b/n", "new"),
            "a a/sub a/sub/z a/x a/y b b/n c c/1",
        ),
        ("members alone over a file", Layer::new().file("b/n", "new"), "a a/sub a/sub/z a/x a/y b b/n c c/1"),
        (
            "aufs' own files",
            Layer::new().dir(".wh..wh.plnk", 0o700).file(".wh..wh.plnk/9.7", "").file("a/.wh..wh.aufs/x", ""),
            "a a/sub a/sub/z a/x a/y b c c/1",
        ),
        (
            "a link into aufs' own files",
            Layer::new().file(".wh..wh.plnk/9.7", "linked").hard_link("n", ".wh..wh.plnk/9.7"),
            "a a/sub a/sub/z a/x a/y b c c/1 n",
        ),
    ] {
        let bench = Bench::new();
        let built = bench.rootfs(vec![base().tar(), upper.tar()]).await;
        if !has_programs(&["fsck.erofs"]) {
            return;
        }
        let tree = read_tree(&extract(&built.unwrap()).path().join("root"));
        assert_eq!(names(&tree), want, "{why}");
    }
}

#[tokio::test]
async fn bad_hard_link_under_a_hidden_name_is_ignored() {
    let base = || Layer::new().dir("d", 0o755).file("b", "base");
    for (why, bad) in [
        ("missing target", base().hard_link("f", "nowhere")),
        ("directory", base().hard_link("f", "d")),
        ("out of the image", base().hard_link("f", "../../etc/shadow")),
        ("itself", base().hard_link("f", "f")),
    ] {
        let (bench, bad) = (Bench::new(), bad.tar());
        let shown = bench.rootfs(vec![bad.clone()]).await.expect_err(why);
        assert_eq!(shown.code(), "COR-IMG-008", "{why}: {shown}");
        let linked = vec![bad.clone(), Layer::new().hard_link("to", "f").whiteout(".wh.q").tar()];
        let linked = bench.rootfs(linked).await.expect_err(why);
        assert_eq!(linked.code(), "COR-IMG-008", "{why}: {linked}");
        let hidden = vec![bad, Layer::new().file("f", "upper").tar()];
        let Some(tree) = tree_of(hidden).await else { return };
        assert_eq!(names(&tree), "b d f", "{why}");
        assert_eq!(tree["f"], describe("upper", 0o644, "0:0"), "{why}");
    }
}

#[tokio::test]
async fn aufs_link_target_has_its_content() {
    let layer = Layer::new().file(".wh..wh.plnk/9.7", "linked").hard_link("n", "/.wh..wh.plnk/9.7");
    let Some(tree) = tree_of(vec![layer.tar()]).await else { return };
    assert_eq!((names(&tree).as_str(), &tree["n"]), ("n", &describe("linked", 0o644, "0:0")));
}

#[tokio::test]
async fn three_layers_and_attributes_of_hidden_parents() {
    let low = Layer::new().dir("a", 0o700).file("a/low", "1").file("b/low", "1");
    let middle = Layer::new().file("a", "a file now").whiteout(".wh.b");
    let top = Layer::new().file("a/top", "3").file("b/top", "3");
    let Some(tree) = tree_of(vec![low.tar(), middle.tar(), top.tar()]).await else { return };
    assert_eq!(names(&tree), "a a/top b b/top", "what the middle hid stays hidden");
    assert_eq!(tree["a"], "dir 755 0:0", "and so do its attributes");
    let low = Layer::new().dir("a", 0o700);
    let top = Layer::new().file("a/top", "3");
    let tree = tree_of(vec![low.tar(), top.tar()]).await.unwrap();
    assert_eq!(tree["a"], "dir 700 0:0", "a directory that the top only passes through keeps its attributes");
}

#[tokio::test]
async fn hard_links_share_an_inode_across_layers() {
    if !has_programs(&["fsck.erofs"]) {
        return;
    }
    let payload = "p".repeat(9000);
    let low = Layer::new()
        .file("orig", &payload)
        .file("hidden", "small")
        .file("deep/first", &payload)
        .hard_link("deep/second", "deep/first");
    let top = Layer::new()
        .hard_link("early", "late")
        .file("late", "late content")
        .hard_link("to-lower", "./orig")
        .whiteout("deep/.wh.first")
        .file("hidden", "new")
        .hard_link("abs", "/late");
    let bench = Bench::new();
    let rootfs = bench.rootfs(vec![low.tar(), top.tar()]).await.unwrap();
    let tree = read_tree(&extract(&rootfs).path().join("root"));
    assert_eq!(names(&tree), "abs deep deep/second early hidden late orig to-lower");
    assert_eq!(tree["to-lower"], describe(&payload, 0o644, "0:0"));
    assert_eq!(tree["deep/second"], describe(&payload, 0o644, "0:0"), "its only other name is hidden");
    assert_eq!(tree["early"], describe("late content", 0o644, "0:0"));
    let Some(mounted) = Mounted::new(&rootfs) else { return };
    let stat = |name: &str| std::fs::metadata(mounted.path().join(name)).unwrap();
    assert_eq!((stat("late").ino(), stat("late").nlink()), (stat("early").ino(), 3));
    assert_eq!((stat("orig").ino(), stat("orig").nlink()), (stat("to-lower").ino(), 2));
    assert_eq!(stat("deep/second").nlink(), 1);
    assert_eq!(std::fs::metadata(mounted.path()).unwrap().nlink(), 3);
}

#[tokio::test]
async fn attributes_and_times_reach_the_kernel() {
    let capability = b"\x01\x00\x00\x02\x00\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00";
    let large = vec![b'v'; 6000];
    let layer = Layer::new()
        .pax(&[
            ("SCHILY.xattr.security.capability", capability),
            ("SCHILY.xattr.user.a\u{e9}", b"1\n2"),
            ("mtime", b"1700000000.123456789"),
        ])
        .file_as("ping", "#!", 0o755, 0, 0)
        .pax(&[
            ("SCHILY.xattr.user.large", &large),
            ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
            ("SCHILY.xattr.user.none", b""),
        ])
        .dir("d", 0o755)
        .pax(&[("mtime", b"-5.25")])
        .file("old", "before 1970");
    let bench = Bench::new();
    let rootfs = bench.rootfs(vec![layer.tar()]).await.unwrap();
    if has_programs(&["fsck.erofs"]) {
        extract(&rootfs);
    }
    let Some(mounted) = Mounted::new(&rootfs) else { return };
    assert_eq!(mounted.xattr("ping", "security.capability").as_deref(), Some(&capability[..]));
    assert_eq!(mounted.xattr("ping", "user.a\u{e9}").as_deref(), Some(&b"1\n2"[..]));
    assert_eq!(mounted.xattr("d", "user.large"), Some(large));
    assert_eq!(mounted.xattr("d", "user.none"), Some(vec![]));
    assert_eq!(mounted.xattr("d", "trusted.overlay.opaque"), None);
    let time = |name: &str| {
        std::fs::metadata(mounted.path().join(name)).map(|m| (m.mtime(), m.mtime_nsec())).unwrap()
    };
    assert_eq!(time("ping"), (1_700_000_000, 123_456_789));
    assert_eq!(time("old"), (-6, 750_000_000));
}

#[tokio::test]
async fn rootfs_with_ten_thousand_files_in_a_directory() {
    let mut layer = Layer::new();
    for n in (0..10_000).rev() {
        let width = 5 + n % 90;
        layer = layer.file(&format!("many/{n:0>width$}"), n.to_string());
    }
    let Some(tree) =
        tree_of(vec![layer.file("many/.first", "").file("many/!", "").file("many/-", "").tar()]).await
    else {
        return;
    };
    assert_eq!(tree.len(), 10_003 + 2);
    assert_eq!(tree[&format!("many/{:0>47}", 42)], describe("42", 0o644, "0:0"));
}

#[tokio::test]
async fn last_duplicate_member_wins() {
    let layer = Layer::new()
        .file("f", "first, and a bit longer")
        .file("f", "second")
        .file("d/x", "x")
        .symlink("d", "elsewhere")
        .file("t", "file")
        .dir("t", 0o755)
        .file("t/in", "in")
        .dir("m", 0o700)
        .dir("m", 0o755);
    let Some(tree) = tree_of(vec![layer.tar()]).await else { return };
    assert_eq!(names(&tree), "d f m t t/in");
    assert_eq!(tree["f"], describe("second", 0o644, "0:0"));
    assert_eq!(tree["d"], "-> elsewhere 777 0:0");
    assert_eq!(tree["m"], "dir 755 0:0");
}

#[tokio::test]
async fn rootfs_build_is_reproducible() {
    let tar = Layer::new().file("a", vec![7; 5000]).file("b", "x").dir("c", 0o755).tar();
    let upper = Layer::new().file("d", "y").whiteout(".wh.b").tar();
    let mut seen = Vec::new();
    for pack in [Stored::gzip, Stored::plain, Stored::zstd] {
        let bench = Bench::new();
        let image = bench.import(&Parts::new(vec![pack(&tar), pack(&upper)])).await.unwrap();
        let Rootfs { path, bytes } = bench.store.rootfs(&image).await.unwrap();
        let content = std::fs::read(&path).unwrap();
        assert_eq!(content.len() as u64, bytes);
        assert!(path.ends_with(format!("rootfs/{}.erofs2", image.chain_id.hex())));
        seen.push(content);
    }
    assert!(seen.windows(2).all(|w| w[0] == w[1]), "however the layers are packed");
}

#[tokio::test]
async fn existing_rootfs_is_used_unless_damaged() {
    let bench = Bench::new();
    let image =
        bench.import(&Parts::new(vec![Stored::gzip(&Layer::new().file("a", "x").tar())])).await.unwrap();
    let (one, two) = tokio::join!(bench.store.rootfs(&image), bench.store.rootfs(&image));
    let rootfs = one.unwrap();
    assert_eq!(rootfs, two.unwrap());
    let before = std::fs::metadata(&rootfs.path).unwrap();
    assert_eq!(before.mode() & 0o777, 0o444);
    bench.store.rootfs(&image).await.unwrap();
    assert_eq!(std::fs::metadata(&rootfs.path).unwrap().ino(), before.ino(), "not built again");
    std::fs::write(&rootfs.path, b"junk").unwrap();
    assert_eq!(bench.store.rootfs(&image).await.unwrap().bytes, before.size());
}

/// Inode number and size of the root directory, which the guest agent expects where it comes first.
#[tokio::test]
async fn small_root_directory_is_placed_first() {
    let bench = Bench::new();
    let few = Layer::new().file("a", vec![7; 5000]).dir("b", 0o755).file("b/c", "x");
    let many = (0..200).fold(Layer::new(), |layer, n| layer.file(&format!("entry-{n}"), "x"));
    for (layer, extension) in [(few, "erofs2"), (many, "erofs")] {
        let image = bench.import(&Parts::new(vec![Stored::gzip(&layer.tar())])).await.unwrap();
        let rootfs = bench.store.rootfs(&image).await.unwrap();
        assert_eq!(rootfs.path.extension().unwrap(), extension);
        let Some(mounted) = Mounted::new(&rootfs) else { continue };
        let root = std::fs::metadata(mounted.path()).unwrap();
        assert_eq!((root.ino(), root.size()) == (64, 1984), extension == "erofs2");
    }
}

/// A saved guest needs the layout that it has mounted; other callers take what there is.
#[tokio::test]
async fn requested_rootfs_layout_is_returned() {
    let bench = Bench::new();
    let layer = Layer::new().file("a", "x").tar();
    let image = bench.import(&Parts::new(vec![Stored::gzip(&layer)])).await.unwrap();
    let last = bench.store.rootfs_in(&image, RootfsLayout::RootLast).await.unwrap();
    assert_eq!(RootfsLayout::of(&last.path), RootfsLayout::RootLast);
    assert_eq!(bench.store.rootfs(&image).await.unwrap(), last, "that of an earlier version is used");
    let first = bench.store.rootfs_in(&image, RootfsLayout::RootFirst).await.unwrap();
    assert_eq!(RootfsLayout::of(&first.path), RootfsLayout::RootFirst);
    assert_eq!(bench.store.rootfs(&image).await.unwrap(), first);
    assert_eq!(bench.store.rootfs_in(&image, RootfsLayout::RootLast).await.unwrap(), last, "both stay");
}

#[tokio::test]
async fn image_without_layers_is_an_empty_directory() {
    let Some(tree) = tree_of(vec![]).await else { return };
    assert_eq!(tree.len(), 1);
}

#[tokio::test]
async fn rootfs_holes_take_no_space() {
    let bench = Bench::new();
    let rootfs = bench.rootfs(vec![Layer::new().file("zeros", vec![0; 20 << 20]).tar()]).await.unwrap();
    let meta = std::fs::metadata(&rootfs.path).unwrap();
    assert!(
        meta.len() > 20 << 20 && meta.blocks() * 512 < 1 << 20,
        "{} bytes in {} sectors",
        meta.len(),
        meta.blocks()
    );
}
