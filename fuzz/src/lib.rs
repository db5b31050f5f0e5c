//! Fuzz targets: everything that a guest, a registry, an archive or a client can send meets its first reader here.
//!
//! ```text
//! corpus/<target>/*     inputs that lead to different places; replayed by `cargo test`
//! crashes/<target>/*    inputs that once broke something; replayed too, and kept
//! ```
//! `cargo xtask soak fuzz` mutates each corpus for a minute, led by the coverage of our crates. A target takes any bytes,
//! leaves nothing behind, and panics where a rule is broken: that, a hang and too much memory are what it looks for.

mod folder;

use std::path::PathBuf;

use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;

/// A reader of bytes from elsewhere.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Name of its directory in the corpus.
    pub name: &'static str,
    /// Gives it an input.
    pub run: fn(&[u8]),
}

const fn target(name: &'static str, run: fn(&[u8])) -> Target {
    Target { name, run }
}

/// All targets.
pub const TARGETS: [Target; 12] = [
    target("archive", coracle_disk::fuzz::archive),
    target("disk", coracle_disk::fuzz::disk),
    target("folder", folder::run),
    target("hello", hello),
    target("layers", coracle_image::fuzz::layers),
    target("manifest", coracle_image::fuzz::manifest),
    target("reference", reference),
    target("request", coracle_registry::fuzz::request),
    target("snapshot", snapshot),
    target("spdy", coracle_streaming::fuzz::spdy),
    target("spdy-headers", coracle_streaming::fuzz::header_block),
    target("chunk", coracle_disk::fuzz::chunk),
];

/// Inputs of a target that are kept: its corpus, and what once broke it.
///
/// # Errors
/// When a directory or a file cannot be read; a directory that is not there has nothing in it.
pub fn kept(target: &Target) -> std::io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut found = Vec::new();
    for kind in ["corpus", "crashes"] {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(kind).join(target.name);
        if !folder.exists() {
            continue;
        }
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            let bytes = std::fs::read(&path)?;
            found.push((path, bytes));
        }
    }
    found.sort();
    Ok(found)
}

/// The name of an image. What is read is written as it is read again.
fn reference(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(reference) = text.parse::<coracle_oci::Reference>() {
        let written = reference.to_string();
        assert_eq!(written.parse().ok().as_ref(), Some(&reference), "{written}");
    }
}

/// An archive of a snapshot for another node: packed here when the first byte says so, since no mutation would get
/// through the packing.
fn snapshot(bytes: &[u8]) {
    let [raw, archive @ ..] = bytes else { return };
    let (Ok(state), Ok(packed)) = (tempfile::tempdir(), zstd::encode_all(archive, 1)) else { return };
    let archive = if raw % 2 == 0 { packed.as_slice() } else { archive };
    coracle_snapshot::fuzz::snapshot(state.path(), archive);
    let left = std::fs::read_dir(state.path().join("snapshots")).map_or(0, Iterator::count);
    assert_eq!(left, 0, "something is left of it");
}

/// What a guest says on its channel before anything is agreed on.
fn hello(bytes: &[u8]) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() else { return };
    let said = bytes.to_vec();
    runtime.block_on(async {
        let Ok((host, mut guest)) = UnixStream::pair() else { return };
        let read = async move {
            let mut host = host;
            coracle_guest_client::read_hello(&mut host).await.ok()
        };
        let (session, _) = tokio::join!(read, async {
            // The host closes the stream when it has read enough.
            let _either = guest.write_all(&said).await;
            guest.shutdown().await
        });
        let magic = bytes.windows(8).position(|w| w == b"CORACLE1");
        let complete = magic.is_some_and(|at| bytes.len() >= at + 16);
        assert_eq!(session.is_some(), complete, "a hello is heard where there is one");
    });
}
