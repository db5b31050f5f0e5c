//! Entry points of the fuzz targets; not part of the API. Each accepts any bytes, keeps no files, and panics when an invariant
//! is broken.

use std::io::{self, Write};

use super::{
    artifact::{self, Disk},
    cocoon::{self, CocoonVersion},
    foreign, frame,
};

/// Limit of decompressed bytes per input.
const UNPACKED_MAX: u64 = 16 << 20;

/// Parses a manifest of a disk or a snapshot and, after a byte of 255, its configuration.
pub fn disk(bytes: &[u8]) {
    let mut parts = bytes.splitn(2, |b| *b == 0xff);
    let (manifest, config) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let _either = Disk::config_of(manifest);
    if let Ok(disk) = Disk::read(manifest, config) {
        let sorted = disk.chunks.windows(2).all(|w| w[0].part.end <= w[1].part.start);
        let inside = disk.chunks.iter().all(|w| w.part.start < w.part.end && w.part.end <= disk.bytes);
        assert!(sorted && inside, "chunks overlap or lead out");
        let (config, manifest) = disk.write("disk.raw");
        assert_eq!(Disk::read(&manifest, &config).ok(), Some(disk), "what is written is read");
    }
    let (Ok(manifest), Ok(config)) =
        (artifact::parse(manifest, "manifest"), artifact::parse(config, "configuration"))
    else {
        return;
    };
    let _either = foreign::detect(&manifest);
    cocoon::fuzz::remote(&manifest, &config);
}

/// Decompresses a chunk. Input: encoding (one byte: zstd frames or LZ4 blocks), raw length (three bytes), data.
pub fn chunk(bytes: &[u8]) {
    let [kind, a, b, c, packed @ ..] = bytes else { return };
    let length = u64::from(u32::from_le_bytes([*a, *b, *c, 0])) % UNPACKED_MAX;
    let Ok(file) = tempfile::tempfile() else { return };
    match kind % 2 {
        0 => {
            // The bytes around the range must not change.
            let part = 4096..4096 + length;
            let unpacked = frame::decompress(packed, &file, &part);
            let end = file.metadata().map_or(0, |m| m.len());
            assert!(end <= part.end, "it was written behind its end");
            if unpacked.is_ok() {
                assert!(length == 0 || end == part.end);
            }
        }
        _ => drop(foreign::unpack_lz4(packed, Bounded(UNPACKED_MAX))),
    }
}

/// Parses an archive of cocoon.
pub fn archive(bytes: &[u8]) {
    let [version, archive @ ..] = bytes else { return };
    let version = if version % 2 == 0 { CocoonVersion::V1 } else { CocoonVersion::V2 };
    cocoon::fuzz::archive(archive, version);
}

/// Writer that accepts a limited number of bytes.
struct Bounded(u64);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 = self.0.checked_sub(bytes.len() as u64).ok_or(io::ErrorKind::StorageFull)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
