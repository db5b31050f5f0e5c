//! Entry points of the fuzz targets; not part of the API. Each accepts any bytes, keeps no files, and panics when an invariant
//! is broken.

use std::{io, sync::Arc};

use crate::{
    Budget, Compression, DecompressReader, Limits,
    manifest::{self, Config, Document},
    rootfs::{self, LayerFile},
};
use coracle_oci::{Digest, NoProgress, Platform};
use coracle_types::RootfsLayout;

/// Limit of decompressed bytes per input: enough for every code path.
pub(crate) const UNPACKED_MAX: u64 = 16 << 20;

/// Parses a manifest, an index or a configuration.
pub fn manifest(bytes: &[u8]) {
    let limits = Limits::default();
    match manifest::parse(bytes, None, &limits) {
        Ok(Document::Manifest(manifest)) => assert!(manifest.layers.len() <= limits.layers),
        Ok(Document::Index(entries)) => {
            drop(coracle_oci::select(&entries, &Platform::host(), "x").map(|_| ()))
        }
        Err(_) => {}
    }
    if let Ok(config) = Config::parse(bytes, &limits) {
        let _either = config.check(1, &Platform::host(), "x");
    }
}

/// Builds a root file system from two layers. Input: compression (one byte), length of the lower layer (two bytes), both
/// layers.
pub fn layers(bytes: &[u8]) {
    let [compression, low, high, rest @ ..] = bytes else { return };
    let compression = match compression % 3 {
        0 => Compression::None,
        1 => Compression::Gzip,
        _ => Compression::Zstd,
    };
    let length = usize::from(u16::from_le_bytes([*low, *high])).min(rest.len());
    let (lower, upper) = rest.split_at(length);
    let Ok(dir) = tempfile::tempdir() else { return };
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).ok()?;
        let (digest, size_bytes) = (Digest::of(bytes), bytes.len() as u64);
        Some(LayerFile {
            path,
            compression,
            digest,
            diff_id: unpacked_diff_id(bytes, compression)?,
            size_bytes,
        })
    };
    let (Some(lower), Some(upper)) = (file("lower", lower), file("upper", upper)) else { return };
    let limits = Limits { unpacked_bytes: UNPACKED_MAX, ..Limits::default() };
    let chain_id = Digest::of(b"chain");
    let job = rootfs::Job {
        layers: vec![lower, upper],
        chain_id,
        layout: RootfsLayout::RootFirst,
        limits,
        reserve_bytes: None,
        progress: Arc::new(NoProgress),
    };
    let build = || {
        let file = tempfile::tempfile_in(dir.path()).ok()?;
        let written = file.try_clone().ok()?;
        rootfs::build(&job, written).ok().map(|_| file)
    };
    let length = |file: &std::fs::File| file.metadata().map_or(0, |m| m.len());
    if let Some(made) = build() {
        assert_eq!(
            build().map(|again| length(&again)),
            Some(length(&made)),
            "the same layers, the same bytes"
        );
    }
}

/// Diff id of a layer; `None` if it cannot be decompressed.
fn unpacked_diff_id(bytes: &[u8], compression: Compression) -> Option<Digest> {
    let mut budget = Budget { unpacked_bytes: UNPACKED_MAX, entries: 0, metadata_bytes: 0 };
    let mut stream = DecompressReader::new(bytes, compression, &mut budget, None).ok()?;
    io::copy(&mut stream, &mut io::sink()).ok()?;
    Some(stream.digest())
}
