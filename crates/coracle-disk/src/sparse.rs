//! Holes in disk files.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt};

use coracle_image::sparse::is_zero;
use rustix::fs::FallocateFlags;

/// Zeroes a range of a file without changing its length: punches a hole, or on a file system without holes overwrites blocks
/// that are not zero.
pub(crate) fn clear(file: &File, part: &Range<u64>) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(file, flags, part.start, part.end - part.start) {
        Err(rustix::io::Errno::OPNOTSUPP) => overwrite(file, part),
        cleared => Ok(cleared?),
    }
}

fn overwrite(file: &File, part: &Range<u64>) -> io::Result<()> {
    const STEP: usize = 1 << 20;
    let (mut at, end) = (part.start, part.end.min(file.metadata()?.len()));
    let (mut buffer, zeros) = (vec![0; STEP], vec![0; STEP]);
    while at < end {
        let length = usize::try_from(end - at).unwrap_or(STEP).min(STEP);
        file.read_exact_at(&mut buffer[..length], at)?;
        if !is_zero(&buffer[..length]) {
            file.write_all_at(&zeros[..length], at)?;
        }
        at += length as u64;
    }
    Ok(())
}

/// Mounted file system that cannot punch holes.
#[cfg(test)]
pub(crate) struct WithoutHoles(pub(crate) tempfile::TempDir);

#[cfg(test)]
impl WithoutHoles {
    pub(crate) fn mount() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mounted =
            std::process::Command::new("mount").args(["-t", "ramfs", "ramfs"]).arg(dir.path()).status();
        if mounted.is_ok_and(|status| status.success()) {
            return Some(Self(dir));
        }
        assert!(std::env::var_os("CI").is_none_or(|v| v != "true"), "CI cannot mount a ramfs");
        eprintln!("skipped: cannot mount a ramfs");
        None
    }
}

#[cfg(test)]
impl Drop for WithoutHoles {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}
