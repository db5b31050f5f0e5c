//! See [`crate::fuzz`].

use std::io::{self, Write};

use super::{
    artifact::{self, Disk},
    cocoon::{self, CocoonVersion},
    foreign, frame,
};
use crate::fuzz::UNPACKED_MAX;

/// A manifest of a disk or a snapshot, and behind a byte of 255 its configuration.
pub fn disk(bytes: &[u8]) {
    let mut parts = bytes.splitn(2, |b| *b == 0xff);
    let (manifest, config) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let _either = Disk::config_of(manifest);
    if let Ok(disk) = Disk::read(manifest, config) {
        let sorted = disk.windows.windows(2).all(|w| w[0].part.end <= w[1].part.start);
        let inside = disk.windows.iter().all(|w| w.part.start < w.part.end && w.part.end <= disk.bytes);
        assert!(sorted && inside, "windows overlap or lead out");
        let (config, manifest) = disk.write("disk.raw");
        assert_eq!(Disk::read(&manifest, &config).ok(), Some(disk), "what is written is read");
    }
    let (Ok(manifest), Ok(config)) =
        (artifact::parse(manifest, "manifest"), artifact::parse(config, "configuration"))
    else {
        return;
    };
    let _either = foreign::found(&manifest);
    cocoon::fuzz::remote(&manifest, &config);
}

/// A window: whether it is in frames of zstd or in blocks of LZ4 (one byte), its raw length (three bytes), its bytes.
pub fn window(bytes: &[u8]) {
    let [kind, a, b, c, packed @ ..] = bytes else { return };
    let length = u64::from(u32::from_le_bytes([*a, *b, *c, 0])) % UNPACKED_MAX;
    let Ok(file) = tempfile::tempfile() else { return };
    match kind % 2 {
        0 => {
            // Somewhere in the middle: neither what is before it nor what is behind it is touched.
            let part = 4096..4096 + length;
            let unpacked = frame::unpack(packed, &file, &part);
            let end = file.metadata().map_or(0, |m| m.len());
            assert!(end <= part.end, "it was written behind its end");
            if unpacked.is_ok() {
                assert!(length == 0 || end == part.end);
            }
        }
        _ => drop(foreign::unpack_lz4(packed, Bounded(UNPACKED_MAX))),
    }
}

/// An archive of the original runtime's.
pub fn archive(bytes: &[u8]) {
    let [version, archive @ ..] = bytes else { return };
    let version = if version % 2 == 0 { CocoonVersion::V1 } else { CocoonVersion::V2 };
    cocoon::fuzz::archive(archive, version);
}

/// Takes so many bytes.
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
