//! A foreign disk into a file: its blobs several at once, its pieces one behind the other.

use std::{
    fs::File,
    io::{self, Read, Seek, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use futures_util::{StreamExt, TryStreamExt, stream};

use super::plan::{Found, Layers, Pack, Piece, Pieces};
use crate::{
    Digest, ImageError, Limits,
    digest::Hasher,
    disk::{DiskProgress, artifact::DISK_MAX, blocking, pull::name},
    manifest::Packing,
    registry::{Session, fetch_file},
    rootfs::{Budget, Unpacked, path::components},
    tarball::{self, Kind},
};

/// What is all zero in so many bytes stays a hole.
const HOLE: usize = 64 << 10;

/// What came of a foreign disk.
pub(in super::super) struct Taken {
    pub(in super::super) disk_bytes: u64,
    pub(in super::super) blobs: usize,
    pub(in super::super) blob_bytes: u64,
}

/// Brings a foreign disk into the file `path`, which is there, whole, synced and sparse, when this returns. Nothing is
/// left of a try that failed.
///
/// # Errors
/// [`ImageError::Unsupported`] for what has no disk; as [`crate::pull_disk`].
pub(in super::super) async fn pull(
    session: &Arc<Session>,
    found: &Found,
    path: &Path,
    concurrency: usize,
    progress: &DiskProgress,
) -> Result<Taken, ImageError> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let failed = |e| ImageError::io("make a file in", folder, e);
    let part = tempfile::Builder::new().prefix(".coracle-").tempfile_in(folder).map_err(failed)?;
    let target = part.reopen().map_err(failed)?;
    let job = Job { session, folder, progress };
    let taken = match found {
        Found::Pieces(Pieces(pieces)) => job.pieces(pieces, target, concurrency).await?,
        Found::Container(Layers(layers)) => job.container(layers, target).await?,
        Found::Other => return Err(ImageError::unsupported("what is no disk")),
    };
    let (file, partial, to) = (part.reopen().map_err(failed)?, part.into_temp_path(), path.to_owned());
    let named = blocking(move || {
        name(&file, &partial, &to)?;
        // It has another name now.
        partial.keep().map(drop).map_err(|e| e.error)
    });
    named.await.map_err(|e| ImageError::io("name", path, e))?;
    Ok(taken)
}

struct Job<'a> {
    session: &'a Arc<Session>,
    folder: &'a Path,
    progress: &'a DiskProgress,
}

impl Job<'_> {
    /// A verified blob, in a file that has no name.
    async fn fetch(&self, blob: &Digest, bytes: u64) -> Result<File, ImageError> {
        let failed = |e| ImageError::io("make a file in", self.folder, e);
        let file = tempfile::tempfile_in(self.folder).map_err(failed)?;
        let to = tokio::fs::File::from_std(file.try_clone().map_err(failed)?);
        fetch_file(self.session, blob, bytes, to).await?;
        let mut file = file;
        file.rewind().map_err(failed)?;
        Ok(file)
    }

    async fn pieces(&self, pieces: &[Piece], target: File, concurrency: usize) -> Result<Taken, ImageError> {
        let total: u64 = pieces.iter().map(|p| p.blob_bytes).sum();
        let fetched = stream::iter(pieces)
            .map(async |piece| self.fetch(&piece.blob, piece.blob_bytes).await.map(|file| (piece, file)))
            .buffered(concurrency.max(1));
        let mut fetched = std::pin::pin!(fetched);
        let (mut sparse, mut done) = (Sparse::new(target), 0);
        while let Some((piece, file)) = fetched.try_next().await? {
            let own = piece.clone();
            let placed = blocking(move || Ok(place(&own, file, sparse))).await;
            sparse = placed.map_err(|e| ImageError::io("write", self.folder, e))??;
            done += piece.blob_bytes;
            (self.progress)(done, total);
        }
        Ok(Taken { disk_bytes: self.end(sparse)?, blobs: pieces.len(), blob_bytes: total })
    }

    async fn container(&self, layers: &[(String, Digest, u64)], target: File) -> Result<Taken, ImageError> {
        let mut sparse = Sparse::new(target);
        for (kind, blob, bytes) in layers.iter().rev() {
            let packing = Packing::of_media_type(kind)?;
            let file = self.fetch(blob, *bytes).await?;
            (self.progress)(*bytes, *bytes);
            let looked = blocking(move || Ok(disk_in(file, packing, sparse))).await;
            let (found, back) = looked.map_err(|e| ImageError::io("read a layer in", self.folder, e))??;
            if found {
                return Ok(Taken { disk_bytes: self.end(back)?, blobs: 1, blob_bytes: *bytes });
            }
            sparse = back;
        }
        Err(ImageError::unsupported("a container image without a file below /disk/"))
    }

    fn end(&self, sparse: Sparse) -> Result<u64, ImageError> {
        sparse.end().map_err(|e| ImageError::io("write a disk in", self.folder, e))
    }
}

/// Writes a piece behind what is there. Blocking.
fn place(piece: &Piece, file: File, mut sparse: Sparse) -> Result<Sparse, ImageError> {
    let began = sparse.at;
    sparse.hasher = Hasher::default();
    sparse.limit = piece.raw_bytes.map_or(DISK_MAX, |bytes| began.saturating_add(bytes)).min(DISK_MAX);
    let copied = match piece.pack {
        Pack::Plain => io::copy(&mut io::BufReader::new(file), &mut sparse).map(drop),
        Pack::Zstd => zstd::Decoder::new(file).and_then(|mut d| {
            // Hostile frames may ask for any window.
            d.window_log_max(27)?;
            io::copy(&mut d, &mut sparse).map(drop)
        }),
        Pack::Lz4 => super::lz4::unpack(io::BufReader::new(file), &mut sparse),
    };
    copied.and_then(|()| sparse.flush()).map_err(|e| match e.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
            ImageError::hostile(format!("blob {}: {e}", piece.blob))
        }
        _ => ImageError::io("write", PathBuf::from("a disk"), e),
    })?;
    if piece.raw_bytes.is_some_and(|bytes| sparse.at - began != bytes) {
        return Err(ImageError::hostile(format!("blob {} has another length than its piece", piece.blob)));
    }
    let actual = std::mem::take(&mut sparse.hasher).finish();
    match piece.raw.filter(|raw| *raw != actual) {
        None => Ok(sparse),
        Some(expected) => {
            let what = format!("raw bytes of blob {}", piece.blob);
            Err(ImageError::DigestMismatch { what, expected, actual })
        }
    }
}

/// Copies the file below `/disk/` of a layer. `false`: it has none. Blocking.
fn disk_in(file: File, packing: Packing, mut sparse: Sparse) -> Result<(bool, Sparse), ImageError> {
    let limits = Limits { unpacked_bytes: DISK_MAX, ..Limits::default() };
    let mut budget = Budget { unpacked_bytes: limits.unpacked_bytes, entries: limits.entries };
    let fail = |e| ImageError::io("read a layer of", "a container disk", e);
    let mut stream = Unpacked::new(file, packing, &mut budget, None).map_err(fail)?;
    let mut archive = tarball::Reader::new(&mut stream, &limits);
    while let Some(member) = archive.next_member()? {
        archive.input_mut().count_entry()?;
        let is_disk = matches!(components(&member.path, &limits)?.as_slice(), [b"disk", _]);
        if is_disk && member.kind == Kind::File && member.size_bytes > 0 {
            let copied = io::copy(&mut archive.by_ref().take(member.size_bytes), &mut sparse);
            let copied = copied.and_then(|n| sparse.flush().map(|()| n)).map_err(tarball::read_error)?;
            return match copied == member.size_bytes {
                true => Ok((true, sparse)),
                false => Err(ImageError::hostile("a container disk that is cut off")),
            };
        }
    }
    Ok((false, sparse))
}

/// A file that is written from its beginning and keeps what is zero as holes.
struct Sparse {
    file: File,
    at: u64,
    /// Nothing is written behind it.
    limit: u64,
    hasher: Hasher,
    block: Vec<u8>,
}

impl Sparse {
    fn new(file: File) -> Self {
        Self { file, at: 0, limit: DISK_MAX, hasher: Hasher::default(), block: Vec::with_capacity(HOLE) }
    }

    /// Its length, when all is written.
    fn end(mut self) -> io::Result<u64> {
        self.flush()?;
        self.file.set_len(self.at)?;
        Ok(self.at)
    }
}

impl Write for Sparse {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(HOLE - self.block.len());
        let bytes = bytes.get(..taken).unwrap_or_default();
        if self.at + self.block.len() as u64 + bytes.len() as u64 > self.limit {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is longer than it says"));
        }
        self.hasher.update(bytes);
        self.block.extend_from_slice(bytes);
        if self.block.len() == HOLE {
            self.flush()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.block.iter().any(|b| *b != 0) {
            self.file.write_all_at(&self.block, self.at)?;
        }
        self.at += self.block.len() as u64;
        self.block.clear();
        Ok(())
    }
}
