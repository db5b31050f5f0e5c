//! Commits: the upper directory of a VM's overlay becomes a layer. The committed root file system equals what the VM saw.

use coracle_image::{Image, ImageError, Limits, RootKind, StoreOptions, VmRoot};
use coracle_oci::Reference;

use crate::common::{
    Bench, Layer, Mounted, Parts, Stored, Tree, describe, extract, has_programs, names, options, read_tree,
};

const CAPABILITY: &[u8] = b"\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00";

fn base() -> Layer {
    Layer::new()
        .dir("bin", 0o755)
        .file_as("bin/ping", "ping", 0o755, 0, 0)
        .file("bin/date", "date")
        .dir("d", 0o755)
        .file("d/old", "old")
        .dir("gone", 0o755)
        .file("gone/x", "x")
        .file("proc/of-the-image", "kept")
        .file("etc/config", "11111")
        .file("etc/hosts", "of the image")
}

async fn commit(bench: &Bench, upper: Layer) -> Result<Image, ImageError> {
    let image = bench.import(&Parts::new(vec![Stored::gzip(&base().tar())])).await.unwrap();
    let tar = std::io::Cursor::new(upper.tar());
    let root = VmRoot { tar, kind: RootKind::Changes, mounts: vec!["/data/volume".into()] };
    let name: Reference = "registry.example/made:1".parse().unwrap();
    bench.store.commit(&image.digest, root, &name, 1_700_000_000_000).await
}

/// Tree of the committed image's root file system.
async fn tree_of(upper: Layer) -> Option<Tree> {
    let bench = Bench::new();
    let rootfs = bench.store.rootfs(&commit(&bench, upper).await.unwrap()).await.unwrap();
    has_programs(&["fsck.erofs"]).then(|| read_tree(&extract(&rootfs).path().join("root")))
}

#[tokio::test]
async fn commit_of_upper_directory_is_the_difference() {
    let upper = Layer::new()
        .dir(".", 0o700)
        .dir("./etc", 0o755)
        .file("./etc/config", "22222")
        .file("./etc/hosts", "of the machine")
        .dir("./bin", 0o755)
        .device(b'3', "./bin/date", 0, 0)
        .device(b'3', "./gone", 0, 0)
        .pax(&[
            ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
            ("SCHILY.xattr.trusted.overlay.origin", b"\0\xfb"),
        ])
        .dir("./d", 0o700)
        .file("./d/new", "new")
        .hard_link("./d/link", "./d/new")
        .file("./proc/below-a-mount", "x")
        .file("./data/volume", "x")
        .file("./data/volume2", "x");
    let Some(tree) = tree_of(upper).await else { return };
    let want =
        "bin bin/ping d d/link d/new data data/volume2 etc etc/config etc/hosts proc proc/of-the-image";
    assert_eq!(names(&tree), want);
    assert_eq!(tree["etc/config"], describe("22222", 0o644, "0:0"), "same size, same second");
    assert_eq!(tree["etc/hosts"], describe("of the image", 0o644, "0:0"), "the agent writes this one");
    assert_eq!(tree["d/link"], describe("new", 0o644, "0:0"));
    assert_eq!(tree["d"], "dir 700 0:0");
    assert_eq!(tree[""], "dir 755 0:0", "the agent made the upper directory itself");
}

#[tokio::test]
async fn commit_keeps_attributes_except_of_the_overlay() {
    let upper = Layer::new()
        .pax(&[
            ("SCHILY.xattr.security.capability", CAPABILITY),
            ("SCHILY.xattr.user.comment", b"1\n2"),
            ("SCHILY.xattr.trusted.overlay.origin", b"\0\xfb\x21"),
            ("SCHILY.xattr.user.overlay.opaque", b"y"),
        ])
        .file_as("./bin/ping", "ping", 0o755, 0, 0);
    let bench = Bench::new();
    let image = commit(&bench, upper).await.unwrap();
    let layer = std::fs::read(bench.path().join("blobs/sha256").join(image.layers[1].digest.hex())).unwrap();
    let layer = zstd::decode_all(layer.as_slice()).unwrap();
    let has = |text: &[u8]| layer.windows(text.len()).any(|part| part == text);
    assert!(has(b"SCHILY.xattr.security.capability=") && has(b"SCHILY.xattr.user.comment=1\n2\n"));
    assert!(!has(b"trusted.overlay."), "the overlay's own attributes stay where they are");
    assert!(has(b"SCHILY.xattr.user.overlay.opaque=y"), "this one has no meaning to the agent's overlay");
    let Some(mounted) = Mounted::new(&bench.store.rootfs(&image).await.unwrap()) else { return };
    assert_eq!(mounted.xattr("bin/ping", "security.capability").as_deref(), Some(CAPABILITY));
    assert_eq!(mounted.xattr("bin/ping", "user.comment").as_deref(), Some(&b"1\n2"[..]));
}

#[tokio::test]
async fn commit_of_hostile_upper_directory_is_refused() {
    let limits = Limits {
        entries: 50,
        metadata_bytes: 40_000,
        unpacked_bytes: 1 << 20,
        xattr_bytes: 1000,
        ..Limits::default()
    };
    let many = (0..60).fold(Layer::new(), |layer, n| layer.file(&n.to_string(), ""));
    let attributes = (0..45).fold(Layer::new(), |layer, n| {
        layer.pax(&[("SCHILY.xattr.user.a", &[b'x'; 900])]).file(&n.to_string(), "")
    });
    let half = |name| Layer::new().pax(&[(name, b"/other")]).dir("d", 0o755);
    let long = "n".repeat(252);
    for (why, upper, code, words) in [
        ("parent escape", Layer::new().file("../x", "x"), "008", "leads out"),
        ("escaping hard link", Layer::new().hard_link("l", "../../etc/shadow"), "008", "leads out"),
        ("below a whiteout", Layer::new().file(".wh.a/b", "x"), "008", "whiteout"),
        ("too many entries", many, "008", "too many files"),
        ("too much memory", attributes, "008", "too much memory"),
        (
            "too many bytes",
            Layer::new().file("a", vec![0; 700 << 10]).file("b", vec![0; 700 << 10]),
            "008",
            "too large",
        ),
        (
            "large attributes",
            Layer::new().pax(&[("SCHILY.xattr.user.x", &[b'v'; 2000])]).file("f", ""),
            "008",
            "extended attributes",
        ),
        ("redirected directory", half("SCHILY.xattr.trusted.overlay.redirect"), "009", "redirect_dir"),
        ("metadata alone", half("SCHILY.xattr.trusted.overlay.metacopy"), "009", "metacopy"),
        ("whiteout of a long name", Layer::new().device(b'3', &long, 0, 0), "009", "too long"),
    ] {
        let bench = Bench::with(StoreOptions { limits: limits.clone(), ..options() });
        let error = commit(&bench, upper).await.expect_err(why);
        assert_eq!(error.code(), format!("COR-IMG-{code}"), "{why}: {error}");
        assert!(error.to_string().contains(words), "{why}: {error}");
        let named = bench.store.get(&"registry.example/made:1".parse().unwrap()).await.unwrap();
        assert!(named.is_none(), "{why}: nothing is named");
    }
}

#[tokio::test]
async fn commit_of_too_many_names_is_refused() {
    let bench = Bench::with(StoreOptions {
        limits: Limits { metadata_bytes: 20_000, ..Limits::default() },
        ..options()
    });
    let image = bench.import(&Parts::new(vec![Stored::gzip(&base().tar())])).await.unwrap();
    let names = (0..60).fold(Layer::new(), |layer, n| layer.file(&format!("{n}{}", "n".repeat(180)), ""));
    let root = VmRoot { tar: std::io::Cursor::new(names.tar()), kind: RootKind::Whole, mounts: vec![] };
    let name: Reference = "registry.example/made:1".parse().unwrap();
    let error = bench.store.commit(&image.digest, root, &name, 0).await.unwrap_err();
    assert!(error.to_string().contains("too much memory"), "{error}");
}
