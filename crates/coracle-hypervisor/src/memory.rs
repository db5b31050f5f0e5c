//! Memory files (memfd_create(2)): guest RAM that a VMM maps, and device state that it reads.
//!
//! A [`MemoryFile`] is written while a template is taken. Sealing turns it into a [`SealedFile`], which no process can change
//! any more, not even a VMM that a guest has taken over (fcntl(2), "File sealing").

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags};

/// Length of a piece that is copied at once.
const CHUNK: usize = 1 << 20;
/// Time limit for the release of an ended VMM's pages.
const SEAL_WAIT: Duration = Duration::from_secs(2);
const SEAL_POLL: Duration = Duration::from_millis(2);

/// Writable memory file.
#[derive(Debug)]
pub struct MemoryFile(File);

impl MemoryFile {
    /// Creates a sparse file of this length; holes take no memory.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn new(name: &str, bytes: u64) -> io::Result<Self> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let file = File::from(fd);
        file.set_len(bytes)?;
        Ok(Self(file))
    }

    /// Seals the file. The pages of a process that has just ended may be held for a moment; this function waits for them.
    /// Blocking.
    ///
    /// # Errors
    /// `ResourceBusy` while a process keeps a writable mapping; the file is then lost.
    pub fn seal(self) -> io::Result<SealedFile> {
        let all = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        let since = Instant::now();
        loop {
            match rustix::fs::fcntl_add_seals(&self.0, all) {
                Ok(()) => return Ok(SealedFile(self.0)),
                Err(rustix::io::Errno::BUSY) if since.elapsed() < SEAL_WAIT => std::thread::sleep(SEAL_POLL),
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Returns the descriptor number, which a child that inherits the file uses.
    #[must_use]
    pub fn number(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Returns the underlying file.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.0
    }
}

impl AsFd for MemoryFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Memory file that is sealed against writing (memfd_create(2), `F_SEAL_WRITE`).
#[derive(Debug)]
pub struct SealedFile(File);

impl SealedFile {
    /// Returns the length in bytes, holes included.
    ///
    /// # Errors
    /// When the kernel does not report the length.
    pub fn length(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    /// Returns the memory that the file takes, bytes.
    ///
    /// # Errors
    /// Same as [`SealedFile::length`].
    pub fn resident(&self) -> io::Result<u64> {
        use std::os::unix::fs::MetadataExt;
        Ok(self.0.metadata()?.blocks() * 512)
    }

    /// Opens the same memory again, with an offset of its own.
    ///
    /// # Errors
    /// Without `/proc`.
    pub fn reopen(&self) -> io::Result<File> {
        File::open(self.path())
    }

    /// Returns the path by which this process finds the file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }

    /// Returns the descriptor number, which a child that inherits the file uses.
    #[must_use]
    pub fn number(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Writes the data without its holes to `target`, and syncs it. Calls `seen` with the offset and the bytes of each piece.
    /// Blocking.
    ///
    /// # Errors
    /// For example when the disk is full.
    pub fn store(&self, target: &Path, mut seen: impl FnMut(u64, &[u8])) -> io::Result<()> {
        let mut out = File::options().write(true).create(true).truncate(true).open(target)?;
        out.set_len(self.length()?)?;
        let source = self.reopen()?;
        visit_pieces(&source, self.length()?, |offset, piece| {
            out.seek(SeekFrom::Start(offset))?;
            out.write_all(piece)?;
            seen(offset, piece);
            Ok(())
        })?;
        out.sync_all()
    }

    /// Reads a file that [`SealedFile::store`] has written into memory, without its holes, and seals it. Calls `seen` like
    /// [`SealedFile::store`]. Blocking.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn load(name: &str, source: &Path, mut seen: impl FnMut(u64, &[u8])) -> io::Result<Self> {
        let source = File::open(source)?;
        let bytes = source.metadata()?.len();
        let memory = MemoryFile::new(name, bytes)?;
        visit_pieces(&source, bytes, |offset, piece| {
            memory.0.write_all_at(piece, offset)?;
            seen(offset, piece);
            Ok(())
        })?;
        memory.seal()
    }
}

impl AsFd for SealedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<SealedFile> for OwnedFd {
    fn from(file: SealedFile) -> Self {
        file.0.into()
    }
}

/// Visits every piece of data of a file in order and skips holes (lseek(2), `SEEK_DATA`). Zero pieces are skipped, too, so that
/// a file system without holes gives the same result.
pub(crate) fn visit_pieces(
    mut source: &File,
    length: u64,
    mut piece: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while at < length {
        at = match rustix::fs::seek(source, rustix::fs::SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => return Ok(()), // only a hole is left
            Err(e) => return Err(e.into()),
        };
        let end = rustix::fs::seek(source, rustix::fs::SeekFrom::Hole(at))?;
        source.seek(SeekFrom::Start(at))?;
        while at < end {
            let want = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            let Some(room) = buffer.get_mut(..want) else { break };
            let got = source.read(room)?;
            if got == 0 {
                return Ok(());
            }
            let data = room.get(..got).unwrap_or_default();
            if data.iter().any(|byte| *byte != 0) {
                piece(at, data)?;
            }
            at += got as u64;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_memory_file_cannot_be_written() {
        let memory = MemoryFile::new("test", 8192).unwrap();
        memory.0.write_all_at(b"template state", 4096).unwrap();
        let sealed = memory.seal().unwrap();
        let writer = File::options().write(true).open(sealed.path()).unwrap();
        assert_eq!(writer.write_at(b"x", 0).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert!(writer.set_len(0).is_err());
    }

    #[test]
    fn sealed_memory_round_trip_through_disk_keeps_holes() {
        let dir = tempfile::tempdir().unwrap();
        let memory = MemoryFile::new("test", 64 << 20).unwrap();
        memory.0.write_all_at(&[7; 5000], 3 << 20).unwrap();
        memory.0.write_all_at(b"end", (64 << 20) - 3).unwrap();
        let sealed = memory.seal().unwrap();
        let (mut stored, mut loaded) = (Vec::new(), Vec::new());
        sealed.store(&dir.path().join("ram"), |at, piece| stored.push((at, piece.to_vec()))).unwrap();
        let back =
            SealedFile::load("back", &dir.path().join("ram"), |at, piece| loaded.push((at, piece.to_vec())));
        let back = back.unwrap();
        assert_eq!(back.length().unwrap(), 64 << 20);
        assert!(back.resident().unwrap() < 1 << 20, "holes take no memory");
        let read = |file: &SealedFile| {
            let mut bytes = vec![0; 5000];
            file.0.read_exact_at(&mut bytes, 3 << 20).unwrap();
            bytes
        };
        assert_eq!(read(&sealed), read(&back));
        assert_eq!(stored.len(), loaded.len());
    }
}
