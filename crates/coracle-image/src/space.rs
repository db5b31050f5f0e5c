//! Free space of a file system, checked before a transfer and while files of unknown size are written.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use coracle_oci::OciError;

use crate::ImageError;

/// Bytes written between two checks of the file system.
const STEP: u64 = 16 << 20;
/// Default reserve: one twentieth of the file system, at most 1 GiB.
const RESERVE_SHARE: u64 = 20;
const RESERVE_MAX: u64 = 1 << 30;

/// Fails when the file system of `dir` has less than `missing_bytes` free, so that the disk of a host with running VMs does not
/// fill up. `operation` is for the message.
///
/// # Errors
/// [`OciError::StorageFull`] with both numbers.
pub fn check(dir: &Path, missing_bytes: u64, operation: &str) -> Result<(), ImageError> {
    let stat = rustix::fs::statvfs(dir).map_err(|e| ImageError::io("check free space of", dir, e.into()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if missing_bytes <= free {
        return Ok(());
    }
    let operation = format!("{operation}, which needs {missing_bytes} bytes where {free} are free");
    Err(OciError::StorageFull { operation, source: None }.into())
}

/// Keeps a reserve of free space on the file system of a file that is being written.
#[derive(Debug)]
pub(crate) struct Guard {
    file: File,
    /// Bytes to keep free. `None`: the default for the size of the file system.
    reserve_bytes: Option<u64>,
    /// Bytes that may be written before the next check of the file system.
    granted: u64,
}

impl Guard {
    pub(crate) fn new(file: &File, reserve_bytes: Option<u64>) -> io::Result<Self> {
        Ok(Self { file: file.try_clone()?, reserve_bytes, granted: 0 })
    }

    /// Reserves `bytes` before they are written.
    ///
    /// # Errors
    /// [`Shortage`] of kind `StorageFull` when the write would use the reserve.
    pub(crate) fn take(&mut self, bytes: u64) -> io::Result<()> {
        if self.granted < bytes {
            let stat = rustix::fs::fstatvfs(&self.file)?;
            let in_bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
            let (free, total) = (in_bytes(stat.f_bavail), in_bytes(stat.f_blocks));
            let reserve = self.reserve_bytes.unwrap_or((total / RESERVE_SHARE).min(RESERVE_MAX));
            let usable = free.saturating_sub(reserve);
            if usable < bytes {
                return Err(io::Error::new(io::ErrorKind::StorageFull, Shortage { free, reserve }));
            }
            self.granted = usable.min(STEP).max(bytes);
        }
        self.granted -= bytes;
        Ok(())
    }
}

/// Writer that takes space from its [`Guard`] before each write.
pub(crate) struct Guarded<W> {
    pub(crate) to: W,
    pub(crate) guard: Guard,
}

impl<W: Write> Write for Guarded<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.guard.take(bytes.len() as u64)?;
        self.to.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Error of a write that would use the reserve.
#[derive(Debug)]
pub(crate) struct Shortage {
    free: u64,
    reserve: u64,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes are free and {} must stay free", self.free, self.reserve)
    }
}

impl std::error::Error for Shortage {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_without_enough_space_names_both_numbers() {
        let dir = tempfile::tempdir().unwrap();
        check(dir.path(), 0, "pull").unwrap();
        let refused = check(dir.path(), u64::MAX, "pull x").unwrap_err();
        assert!(matches!(refused, ImageError::Oci(OciError::StorageFull { .. })));
        assert!(
            refused.to_string().contains("pull x, which needs 18446744073709551615 bytes where"),
            "{refused}"
        );
    }

    #[test]
    fn write_into_the_reserve_names_both_numbers() {
        let file = tempfile::tempfile().unwrap();
        let guard = Guard::new(&file, Some(u64::MAX)).unwrap();
        let error = Guarded { to: &file, guard }.write_all(b"x").unwrap_err();
        assert_eq!(file.metadata().unwrap().len(), 0);
        let error = ImageError::io("write", "a layer", error);
        assert!(matches!(error, ImageError::Oci(OciError::StorageFull { source: None, .. })), "{error:?}");
        let said = error.to_string();
        assert!(said.contains("bytes are free and 18446744073709551615 must stay free"), "{said}");
        let guard = Guard::new(&file, Some(0)).unwrap();
        Guarded { to: &file, guard }.write_all(b"x").unwrap();
    }
}
