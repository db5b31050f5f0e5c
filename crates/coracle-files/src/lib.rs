//! File operations that survive a crash at any instant.

mod digests;
mod granted;

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::SeekFrom;
use sha2::{Digest, Sha256};

pub use digests::FileDigests;
pub use granted::{LocalUser, granted};

/// Runs blocking file work outside of the runtime's threads. Not cancel-safe: work that has begun is not cut off.
///
/// # Errors
/// Errors of the work, or [`io::ErrorKind::Other`] when it panicked.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(io::Error::other(e)))
}

/// Replaces a file: temporary file with the extension `tmp`, fsync, rename, fsync of the directory. A reader sees the old bytes
/// or the new ones. The file is readable by its owner only.
///
/// # Errors
/// Errors of the file system; the old file then stays.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    sync_parent(path)
}

/// Returns whether the file system or a quota is full.
#[must_use]
pub fn is_out_of_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Syncs the directory of `path`, so that a rename or removal in it survives a crash.
///
/// # Errors
/// When the directory cannot be opened or synced.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

/// Removes a file. Idempotent.
///
/// # Errors
/// Errors of the file system, except that the file does not exist.
pub fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Removes a directory with its content. Idempotent.
///
/// # Errors
/// Errors of the file system, except that the directory does not exist.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Copies a file with its holes; returns the number of bytes written: 0 on a file system with reflinks, which shares the
/// blocks. Blocking.
///
/// # Errors
/// Errors of the file system.
pub fn copy_sparse(from: &Path, to: &Path) -> io::Result<u64> {
    let source = File::open(from)?;
    let length = source.metadata()?.len();
    let target = File::options().write(true).create(true).truncate(true).mode(0o600).open(to)?;
    if rustix::fs::ioctl_ficlone(&target, &source).is_ok() {
        return Ok(0);
    }
    target.set_len(length)?;
    let mut copied = 0;
    let mut at = 0;
    while at < length {
        let start = match rustix::fs::seek(&source, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break, // only a hole is left
            Err(e) => return Err(e.into()),
        };
        let end = rustix::fs::seek(&source, SeekFrom::Hole(start))?;
        copied += copy_range(&source, &target, start, end)?;
        at = end;
    }
    Ok(copied)
}

fn copy_range(source: &File, target: &File, start: u64, end: u64) -> io::Result<u64> {
    use std::os::unix::fs::FileExt;
    let mut buffer = vec![0; 128 * 1024];
    let mut at = start;
    while at < end {
        let want = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
        let Some(part) = buffer.get_mut(..want) else { break };
        let read = source.read_at(part, at)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        target.write_all_at(&part[..read], at)?;
        at += read as u64;
    }
    Ok(end - start)
}

/// Returns the SHA-256 digest of a file. Blocking.
///
/// # Errors
/// When the file cannot be read.
pub fn sha256(path: &Path) -> io::Result<[u8; 32]> {
    let (mut file, mut hash, mut buffer) = (File::open(path)?, Sha256::new(), vec![0; 1 << 20]);
    loop {
        let read = file.read(&mut buffer)?;
        match buffer.get(..read) {
            Some(part) if read > 0 => hash.update(part),
            _ => return Ok(hash.finalize().into()),
        }
    }
}

/// Returns the number of bytes that a file occupies on disk; 0 when it cannot be read.
#[must_use]
pub fn allocated_bytes(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).map(|m| m.blocks() * 512).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn sparse_copy_is_equal_and_sparse() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("a"), dir.path().join("b"));
        let file = File::create(&from).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(b"start", 0).unwrap();
        file.write_all_at(b"middle", 32 << 20).unwrap();
        let copied = copy_sparse(&from, &to).unwrap();
        assert!(copied < 1 << 20, "copied {copied} bytes of 64 MiB");
        assert_eq!(fs::read(&from).unwrap(), fs::read(&to).unwrap());
        assert!(allocated_bytes(&to) < 1 << 20);
    }

    #[test]
    fn atomic_write_replaces_the_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.json");
        write_atomic(&path, b"a long first version").unwrap();
        write_atomic(&path, b"short").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"short");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary is left");
    }
}
