//! Archives with changed bytes are accepted or refused, without a panic and without a file outside the store.

use std::{collections::BTreeSet, path::Path};

use coracle_image::{Limits, Source, StoreOptions};
use coracle_testkit::spoil::spoil;
use proptest::prelude::*;

use crate::common::{Bench, Layer, Parts, Stored, options, progress};

/// Limit of the stores under test: decompressed bytes of all layers.
const UNPACKED_MAX: u64 = 1 << 20;

/// Random arguments of [`spoil`].
fn draws() -> impl Strategy<Value = Vec<(u8, usize, u64)>> {
    prop::collection::vec(any::<(u8, usize, u64)>(), 1..4)
}

fn bench() -> Bench {
    let limits = Limits { unpacked_bytes: UNPACKED_MAX, entries: 200, ..Limits::default() };
    Bench::with(StoreOptions { limits, ..options() })
}

/// Every path below a directory.
fn paths_below(dir: &Path) -> BTreeSet<std::path::PathBuf> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            found.extend(paths_below(&entry.path()));
        }
        found.insert(entry.path());
    }
    found
}

fn bytes_below(dir: &Path) -> u64 {
    paths_below(dir)
        .iter()
        .map(|path| std::fs::symlink_metadata(path).unwrap())
        .filter(|m| m.is_file())
        .map(|m| m.len())
        .sum()
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

/// Layer with one member of each kind.
fn layer() -> Vec<u8> {
    Layer::new()
        .dir("d", 0o755)
        .file("d/f", vec![3; 2000])
        .symlink("s", "d/f")
        .hard_link("h", "d/f")
        .pax(&[("path", b"long/of/pax"), ("SCHILY.xattr.user.a", b"1")])
        .file("long", "x")
        .file(&"n/".repeat(80), "")
        .whiteout("d/.wh.g")
        .tar()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_layer_stays_within_the_store(draws in draws(), compressed in any::<bool>()) {
        let mut tar = layer();
        spoil(&mut tar, &draws);
        let stored = if compressed { Stored::gzip(&tar) } else { Stored::plain(&tar) };
        let bench = bench();
        block_on(async {
            // The digests are right, as in an image that an attacker built.
            if let Ok(image) = bench.import(&Parts::new(vec![stored])).await
                && let Ok(rootfs) = bench.store.rootfs(&image).await
            {
                let stored = std::fs::metadata(rootfs.path).unwrap().len();
                assert!(stored <= UNPACKED_MAX + (1 << 20), "{stored} bytes");
            }
        });
        assert_nothing_outside(&bench);
    }

    #[test]
    fn damaged_docker_archive_import_leaves_no_leftovers(draws in draws()) {
        let good = Parts::new(vec![Stored::plain(&layer())]);
        let config = format!("{}.json", "c".repeat(64));
        let manifest = format!(r#"[{{"Config":"{config}","RepoTags":["a:1"],"Layers":["l/layer.tar"]}}]"#);
        let mut tar = Layer::new()
            .file("l/layer.tar", &good.layers[0].bytes)
            .file(&config, &good.config)
            .file("manifest.json", manifest)
            .tar();
        spoil(&mut tar, &draws);
        let bench = bench();
        let file = bench.dir.path().join("a.tar");
        std::fs::write(&file, &tar).unwrap();
        let before = bench.listing();
        let taken = block_on(bench.store.import(&Source::DockerArchive(file), None, progress()));
        if taken.is_err() {
            assert_eq!(bench.listing(), before, "nothing is left");
        }
        let stored = bytes_below(bench.dir.path());
        assert!(stored <= 3 * tar.len() as u64 + (64 << 10), "{stored} bytes of {}", tar.len());
        assert_nothing_outside(&bench);
    }
}

/// Asserts that no file has the name that leads out, neither beside the store nor above it.
fn assert_nothing_outside(bench: &Bench) {
    let outside = |path: &Path| path.file_name().is_some_and(|name| name == "outside");
    assert!(!paths_below(bench.dir.path()).iter().any(|path| outside(path)));
    assert!(!bench.dir.path().parent().unwrap().join("outside").exists());
    assert!(!Path::new("/outside").exists());
}
