//! What bytes from elsewhere meet first, for the fuzz targets: no promise, and nothing for anybody else. Each takes any
//! bytes, keeps nothing, and panics where a rule is broken.

use std::{io, sync::Arc};

pub use crate::disk::fuzz::{archive, disk, window};
use crate::{
    Digest, Limits, NoProgress, Platform,
    manifest::{self, Config, Document, Packing},
    rootfs::{self, Budget, LayerFile, Unpacked},
};

/// Bytes that an input may unpack to: enough for every path, soon done.
pub(crate) const UNPACKED_MAX: u64 = 16 << 20;

/// A manifest, an index or a configuration.
pub fn manifest(bytes: &[u8]) {
    let limits = Limits::default();
    match manifest::parse(bytes, None, &limits) {
        Ok(Document::Manifest(manifest)) => assert!(manifest.layers.len() <= limits.layers),
        Ok(Document::Index(entries)) => drop(manifest::select(&entries, &Platform::host(), "x").map(|_| ())),
        Err(_) => {}
    }
    if let Ok(config) = Config::parse(bytes, &limits) {
        let _either = config.check(1, &Platform::host(), "x");
    }
}

/// Two layers as a root file system: how they are packed (one byte), the length of the lower one (two bytes), both.
pub fn layers(bytes: &[u8]) {
    let [packing, low, high, rest @ ..] = bytes else { return };
    let packing = match packing % 3 {
        0 => Packing::Plain,
        1 => Packing::Gzip,
        _ => Packing::Zstd,
    };
    let length = usize::from(u16::from_le_bytes([*low, *high])).min(rest.len());
    let (lower, upper) = rest.split_at(length);
    let Ok(dir) = tempfile::tempdir() else { return };
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).ok()?;
        let (digest, size_bytes) = (Digest::of(bytes), bytes.len() as u64);
        Some(LayerFile { path, packing, digest, diff_id: unpacked(bytes, packing)?, size_bytes })
    };
    let (Some(lower), Some(upper)) = (file("lower", lower), file("upper", upper)) else { return };
    let limits = Limits { unpacked_bytes: UNPACKED_MAX, ..Limits::default() };
    let chain_id = Digest::of(b"chain");
    let job = rootfs::Job { layers: vec![lower, upper], chain_id, limits, progress: Arc::new(NoProgress) };
    let build = || tempfile::tempfile_in(dir.path()).ok().and_then(|file| rootfs::build(&job, file).ok());
    let length = |file: &std::fs::File| file.metadata().map_or(0, |m| m.len());
    if let Some(made) = build() {
        assert_eq!(
            build().map(|again| length(&again)),
            Some(length(&made)),
            "the same layers, the same bytes"
        );
    }
}

/// The digest that an honest configuration would name.
fn unpacked(bytes: &[u8], packing: Packing) -> Option<Digest> {
    let mut budget = Budget { unpacked_bytes: UNPACKED_MAX, entries: 0 };
    let mut stream = Unpacked::new(bytes, packing, &mut budget, None).ok()?;
    io::copy(&mut stream, &mut io::sink()).ok()?;
    Some(stream.digest())
}
