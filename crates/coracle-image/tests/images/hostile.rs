//! Hostile images are refused with the right kind and leave no files.

use coracle_image::{ImageError, Limits};
use coracle_oci::{Digest, OciError};

use crate::common::{Bench, Layer, Parts, Stored, options};

fn tiny() -> Limits {
    Limits {
        unpacked_bytes: 1 << 20,
        entries: 50,
        depth: 20,
        xattr_bytes: 1000,
        header_bytes: 8192,
        metadata_bytes: 40_000,
        ..Limits::default()
    }
}

/// File whose size in the header is larger than any disk.
fn huge_file() -> Vec<u8> {
    let mut header = Layer::header(b'0', 0, 0o644);
    header.as_mut_bytes()[0] = b'f';
    header.as_mut_bytes()[124..136]
        .copy_from_slice(&[0x80, 0, 0, 0, 0x7f, 255, 255, 255, 255, 255, 255, 255]);
    header.set_cksum();
    header.as_bytes().to_vec()
}

#[tokio::test]
async fn invalid_archive_leaves_no_file() {
    let many = (0..60).fold(Layer::new(), |layer, n| layer.file(&n.to_string(), ""));
    let paths = (0..40).fold(Layer::new(), |layer, n| layer.file(&(format!("{n}/").repeat(18) + "f"), ""));
    let attributes = (0..45).fold(Layer::new(), |layer, n| {
        layer.pax(&[("SCHILY.xattr.user.a", &[b'x'; 900])]).file(&n.to_string(), "")
    });
    let deep = "d/".repeat(30) + "f";
    let long_name = "n".repeat(256);
    let long_path = "ab/".repeat(2000) + "f";
    let cut = Layer::new().file("f", vec![1; 3000]).tar()[..2000].to_vec();
    let mut flipped = Layer::new().file("f", "x").tar();
    flipped[3] ^= 0x55;
    let sparse = Layer::new().raw(b"f", Layer::header(b'S', 0, 0o644), b"");
    let odd = Layer::new().raw(b"f", Layer::header(b'Q', 0, 0o644), b"");
    let mut negative = Layer::header(b'0', 0, 0o644);
    negative.as_mut_bytes()[108..116].copy_from_slice(&[0xff; 8]);
    let mut owner = Layer::header(b'0', 0, 0o644);
    owner.as_mut_bytes()[108..116].copy_from_slice(&[0x80, 0, 0, 1, 0, 0, 0, 0]);
    let rows: Vec<(&str, Vec<Vec<u8>>, &str, &str)> = vec![
        ("parent escape", vec![Layer::new().file("../evil", "x").tar()], "008", "leads out"),
        ("escape in the middle", vec![Layer::new().file("a/../../evil", "x").tar()], "008", "leads out"),
        ("absolute escape", vec![Layer::new().file("/../evil", "x").tar()], "008", "leads out"),
        (
            "escaping hard link",
            vec![Layer::new().hard_link("l", "../../etc/shadow").tar()],
            "008",
            "leads out",
        ),
        ("hard link to nothing", vec![Layer::new().hard_link("l", "nowhere").tar()], "008", "does not exist"),
        (
            "hard link to a directory",
            vec![Layer::new().dir("d", 0o755).hard_link("l", "d").tar()],
            "008",
            "is a directory",
        ),
        ("hard link to itself", vec![Layer::new().hard_link("l", "l").tar()], "008", "link itself"),
        (
            "hard links in a circle",
            vec![Layer::new().hard_link("a", "b").hard_link("b", "a").tar()],
            "008",
            "link itself",
        ),
        (
            "hard link to what a layer between removed",
            vec![
                Layer::new().file("f", "x").tar(),
                Layer::new().whiteout(".wh.f").tar(),
                Layer::new().hard_link("l", "f").tar(),
            ],
            "008",
            "does not exist",
        ),
        (
            "through a link",
            vec![Layer::new().symlink("d", "/etc").file("d/passwd", "x").tar()],
            "008",
            "not a directory",
        ),
        (
            "directory swapped for a link",
            vec![Layer::new().dir("d", 0o755).symlink("d", "/etc").file("d/passwd", "x").tar()],
            "008",
            "not a directory",
        ),
        (
            "through a file",
            vec![Layer::new().file("f", "x").file("f/g", "x").tar()],
            "008",
            "not a directory",
        ),
        ("root is a link", vec![Layer::new().symlink("./", "/etc").tar()], "008", "root"),
        ("below a whiteout", vec![Layer::new().file(".wh.a/b", "x").tar()], "008", "whiteout"),
        ("whiteout of dots", vec![Layer::new().file("a/.wh...", "").tar()], "008", "whiteout of nothing"),
        ("long name", vec![Layer::new().file(&long_name, "x").tar()], "008", "255"),
        ("long path", vec![Layer::new().file(&long_path, "x").tar()], "008", "too long"),
        ("deep", vec![Layer::new().file(&deep, "x").tar()], "008", "deeply"),
        (
            "zero byte in a name",
            vec![Layer::new().pax(&[("path", b"a\0b")]).file("x", "").tar()],
            "008",
            "zero byte",
        ),
        ("too many entries", vec![many.tar()], "008", "too many files"),
        ("directories that no entry counts", vec![paths.tar()], "008", "too much memory"),
        ("attributes of many files", vec![attributes.tar()], "008", "too much memory"),
        ("bomb", vec![Layer::new().file("zeros", vec![0; 2 << 20]).tar()], "008", "at most"),
        (
            "bomb of many",
            vec![Layer::new().file("a", vec![0; 700 << 10]).file("b", vec![0; 700 << 10]).tar()],
            "008",
            "too many bytes",
        ),
        (
            "bomb of layers",
            vec![
                Layer::new().file("a", vec![0; 700 << 10]).tar(),
                Layer::new().file("b", vec![0; 700 << 10]).tar(),
            ],
            "008",
            "too many bytes",
        ),
        ("size beyond all", vec![huge_file()], "008", "at most"),
        (
            "attributes",
            vec![Layer::new().pax(&[("SCHILY.xattr.user.x", &[b'v'; 2000])]).file("f", "").tar()],
            "008",
            "extended attributes",
        ),
        (
            "extended header",
            vec![Layer::new().pax(&[("SCHILY.xattr.user.x", &[b'v'; 9000])]).file("f", "").tar()],
            "008",
            "extended tar header",
        ),
        (
            "malformed records",
            vec![Layer::new().raw(b"x", Layer::header(b'x', 9, 0), b"99 nonsen").file("f", "").tar()],
            "008",
            "PAX record",
        ),
        ("device out of range", vec![Layer::new().device(b'3', "n", 4096, 0).tar()], "008", "out of range"),
        ("minor out of range", vec![Layer::new().device(b'4', "n", 0, 1 << 20).tar()], "008", "out of range"),
        ("negative owner", vec![Layer::new().raw(b"f", negative, b"").tar()], "008", "out of range"),
        ("owner out of range", vec![Layer::new().raw(b"f", owner, b"").tar()], "008", "out of range"),
        ("empty link", vec![Layer::new().symlink("l", "").tar()], "008", "invalid target"),
        ("truncated", vec![cut], "008", "ends"),
        ("bad checksum", vec![flipped], "008", "checksum"),
        ("no archive", vec![vec![b'x'; 5000]], "008", "tar header"),
        ("sparse", vec![sparse.tar()], "009", "\"f\" is sparse"),
        (
            "PAX sparse",
            vec![
                Layer::new()
                    .pax(&[("GNU.sparse.major", b"1"), ("GNU.sparse.name", b"var/disk")])
                    .file("GNUSparseFile.0/disk", "")
                    .tar(),
            ],
            "009",
            "\"var/disk\" is sparse",
        ),
        (
            "link to nothing of aufs",
            vec![Layer::new().hard_link("l", ".wh..wh.plnk/1").tar()],
            "008",
            "does not exist",
        ),
        ("unknown kind", vec![odd.tar()], "009", "kind 'Q'"),
    ];
    for (why, layers, code, words) in rows {
        let bench = Bench::with(coracle_image::StoreOptions {
            limits: Limits { unpacked_bytes: 64 << 20, ..tiny() },
            ..options()
        });
        let path = bench.path();
        let parts = Parts::new(layers.iter().map(|l| Stored::gzip(l)).collect());
        let image = bench.import(&parts).await.unwrap();
        let Bench { dir, store } = bench;
        drop(store);
        // The limits under test are set after the import, because an import reads the layers too.
        let store =
            coracle_image::Store::open(&path, coracle_image::StoreOptions { limits: tiny(), ..options() })
                .unwrap();
        let bench = Bench { dir, store };
        let before = bench.listing();
        let error = bench.store.rootfs(&image).await.expect_err(why);
        assert_eq!(error.code(), format!("COR-IMG-{code}"), "{why}: {error}");
        assert!(error.to_string().contains(words), "{why}: {error}");
        assert_eq!(bench.listing(), before, "{why}: nothing is left");
    }
}

#[tokio::test]
async fn damaged_layer_is_refused() {
    let tar = Layer::new().file("f", vec![9; 100_000]).tar();
    let good = Stored::gzip(&tar);
    let half = good.bytes.len() / 2;
    for (why, layer, code) in [
        ("gzip cut", Stored { bytes: good.bytes[..half].to_vec(), ..good.clone() }, "008"),
        ("not gzip", Stored { bytes: tar.clone(), ..good.clone() }, "008"),
        ("another content", Stored { diff_id: Digest::of(b"else"), ..good.clone() }, "007"),
        ("zstd that is gzip", Stored { media_type: Stored::zstd(&tar).media_type, ..good.clone() }, "008"),
    ] {
        let bench = Bench::new();
        let before = bench.listing();
        let error = bench.import(&Parts::new(vec![layer])).await.expect_err(why);
        assert_eq!(error.code(), format!("COR-IMG-{code}"), "{why}: {error}");
        assert_eq!(bench.listing(), before, "{why}: nothing is left");
    }
}

#[tokio::test]
async fn inconsistent_layout_is_refused() {
    let tar = Layer::new().file("f", "x").tar();
    let parts = || Parts::new(vec![Stored::gzip(&tar)]);
    type Spoil = fn(&mut serde_json::Value);
    let rows: [(&str, Spoil, &str); 6] = [
        ("layer larger than announced", |m| m["layers"][0]["size"] = 5.into(), "7"),
        ("layer smaller than announced", |m| m["layers"][0]["size"] = 5000.into(), "8"),
        (
            "foreign layer",
            |m| {
                m["layers"][0]["mediaType"] =
                    "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip".into()
            },
            "9",
        ),
        ("unknown layer", |m| m["layers"][0]["mediaType"] = "text/plain".into(), "9"),
        ("no layers", |m| m["layers"] = serde_json::json!([]), "8"),
        ("artifact", |m| m["config"]["mediaType"] = "application/vnd.oci.empty.v1+json".into(), "9"),
    ];
    for (why, spoil, code) in rows {
        let mut parts = parts();
        let mut manifest = serde_json::from_slice(&parts.manifest).unwrap();
        spoil(&mut manifest);
        parts.manifest = manifest.to_string().into_bytes();
        let bench = Bench::new();
        let before = bench.listing();
        let error = bench.import(&parts).await.expect_err(why);
        assert!(error.code().ends_with(code), "{why}: {} {error}", error.code());
        assert_eq!(bench.listing(), before, "{why}: nothing is left");
    }
}

#[tokio::test]
async fn wrong_architecture_is_named() {
    let bench = Bench::new();
    let parts = Parts::for_architecture(vec![Stored::gzip(&Layer::new().tar())], "arm64");
    let error = bench.import(&parts).await.unwrap_err();
    assert!(matches!(error, ImageError::Oci(OciError::WrongArchitecture { .. })));
    assert!(error.to_string().ends_with("is for linux/arm64, this host needs linux/amd64"), "{error}");
}
