//! Full file systems: reported clearly, without partial files, and the store stays usable.

use std::process::Command;

use coracle_image::{ImageError, Store, StoreOptions};
use coracle_oci::OciError;
use coracle_testkit::registry::DebianRegistry;

use crate::common::{Bench, Layer, Parts, Stored, noise, options, progress, push};

/// Small file system, mounted where this host permits it.
struct Small(tempfile::TempDir);

impl Small {
    fn new() -> Option<Self> {
        Self::of("size=8m")
    }

    fn of(size: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", size, "tmpfs"]).arg(dir.path()).status();
        if mounted.is_ok_and(|s| s.success()) {
            return Some(Self(dir));
        }
        assert!(std::env::var_os("CI").is_none_or(|v| v != "true"), "CI cannot mount a tmpfs");
        eprintln!("skipped: cannot mount a tmpfs here");
        None
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

fn image_of(bytes: u32) -> Parts {
    Parts::new(vec![Stored::plain(&Layer::new().file("noise", noise(bytes, 2_654_435_761)).tar())])
}

#[tokio::test]
async fn full_file_system_is_reported_and_recovered() {
    let Some(small) = Small::new() else { return };
    let store = Store::open(small.0.path().join("images"), options()).unwrap();
    let bench = Bench { dir: tempfile::tempdir().unwrap(), store: store.clone() };
    let files = || walk(small.0.path());
    let before = files();
    let import = bench.import(&image_of(9 << 20)).await.unwrap_err();
    assert!(matches!(import, ImageError::Oci(OciError::StorageFull { .. })), "{import}");
    assert_eq!(files(), before);

    let image = bench.import(&image_of(5 << 20)).await.unwrap();
    let before = files();
    let rootfs = store.rootfs(&image).await.unwrap_err();
    assert!(matches!(rootfs, ImageError::Oci(OciError::StorageFull { .. })), "{rootfs}");
    assert_eq!(files(), before);

    assert_eq!(store.list().await.unwrap(), [image]);
    let little = bench.import(&image_of(1 << 10)).await.unwrap();
    store.rootfs(&little).await.unwrap();
}

/// Layer that compresses to a thousandth of its size.
fn compressible_image(bytes: usize) -> Parts {
    Parts::new(vec![Stored::gzip(&Layer::new().file("sevens", vec![7; bytes]).tar())])
}

#[tokio::test]
async fn rootfs_into_the_reserve_is_refused() {
    const RESERVE: u64 = 48 << 20;
    let Some(small) = Small::of("size=128m") else { return };
    let options = StoreOptions { reserve_bytes: Some(RESERVE), ..options() };
    let store = Store::open(small.0.path().join("images"), options).unwrap();
    let bench = Bench { dir: tempfile::tempdir().unwrap(), store: store.clone() };
    // The image fits on the disk, but not together with the reserve.
    let image = bench.import(&compressible_image(96 << 20)).await.unwrap();
    let before = walk(small.0.path());
    let error = store.rootfs(&image).await.unwrap_err();
    assert!(matches!(error, ImageError::Oci(OciError::StorageFull { source: None, .. })), "{error}");
    let said = error.to_string();
    assert!(said.contains("bytes are free") && said.contains(&format!("{RESERVE} must stay free")), "{said}");
    assert_eq!(walk(small.0.path()), before, "nothing is left");
    let image = bench.import(&compressible_image(32 << 20)).await.unwrap();
    store.rootfs(&image).await.unwrap();
}

#[tokio::test]
async fn pull_without_space_is_refused() {
    let programs = ["docker-registry", "skopeo"];
    let (Some(small), true) = (Small::new(), crate::common::has_programs(&programs)) else { return };
    let registry = DebianRegistry::start().unwrap();
    let large = push(&registry, &image_of(7 << 20), "large:1", None);
    let little = push(&registry, &image_of(1 << 20), "little:1", None);
    let store = Store::open(small.0.path().join("images"), options()).unwrap();
    // Enough free space for the layer, until another writer takes it.
    let pull = async |reference| {
        let options = coracle_image::PullOptions {
            credentials: coracle_oci::Credentials::Anonymous,
            ..Default::default()
        };
        store.pull(reference, &options, progress()).await
    };
    let before = walk(small.0.path());
    let ballast = small.0.path().join("ballast");
    std::fs::write(&ballast, vec![1; 2 << 20]).unwrap();
    let error = pull(&large).await.unwrap_err();
    assert!(
        matches!(error, ImageError::Oci(OciError::StorageFull { source: None, .. })),
        "seen beforehand: {error}"
    );
    std::fs::remove_file(&ballast).unwrap();
    // Tmpfs counts pages, not bytes: metadata of the partial file alone can exceed a quota that is filled while the file
    // downloads.
    let filler = Filler { path: ballast.clone() };
    let options =
        coracle_image::PullOptions { credentials: coracle_oci::Credentials::Anonymous, ..Default::default() };
    let error = store.pull(&large, &options, std::sync::Arc::new(filler)).await.unwrap_err();
    assert!(
        matches!(error, ImageError::Oci(OciError::StorageFull { source: Some(_), .. })),
        "met while writing: {error}"
    );
    std::fs::remove_file(&ballast).unwrap();
    assert_eq!(walk(small.0.path()), before, "nothing half-made");
    let image = pull(&little).await.unwrap();
    store.rootfs(&image).await.unwrap();
}

/// Fills the file system once the first bytes have arrived.
struct Filler {
    path: std::path::PathBuf,
}

impl coracle_oci::Progress for Filler {
    fn event(&self, event: coracle_oci::ProgressEvent) {
        if event.step == coracle_oci::Step::Download
            && event.done_bytes < event.total_bytes
            && !self.path.exists()
        {
            std::fs::write(&self.path, vec![1; 3 << 20]).unwrap();
        }
    }
}

fn walk(dir: &std::path::Path) -> Vec<(std::path::PathBuf, u64)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => found.extend(walk(&entry.path())),
            false => found.push((entry.path(), entry.metadata().unwrap().len())),
        }
    }
    found.sort();
    found
}
