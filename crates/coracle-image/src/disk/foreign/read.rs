//! A foreign disk into a file: its blobs several at once, its pieces one behind the other.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt, TryStreamExt, stream};

use super::plan::{Found, Layers, Pack, Piece, Pieces};
use crate::{
    Digest, ImageError, Limits,
    digest::Hasher,
    disk::{
        DiskProgress,
        artifact::DISK_MAX,
        blocking, pull,
        spool::{Spool, is_worth_a_try},
    },
    manifest::Packing,
    registry::{Session, fetch_file},
    rootfs::{Budget, Unpacked, path::components},
    space,
    tarball::{self, Kind},
};

/// What is all zero in so many bytes stays a hole.
const HOLE: usize = 64 << 10;

/// What came of a foreign disk.
pub(in super::super) struct Taken {
    pub(in super::super) disk_bytes: u64,
    /// Pieces that it has.
    pub(in super::super) pieces: usize,
    /// Blobs that were moved, and their bytes.
    pub(in super::super) blobs: usize,
    pub(in super::super) blob_bytes: u64,
}

/// Brings a foreign disk into the file `path`, which is there, whole, synced and sparse, when this returns. Pieces grow in
/// `path.partial`, and their blobs come into the folder `path.parts`: of a try that was cut off both stay, and what is
/// right in there is not fetched again. Nothing is left of one that can come to nothing.
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
    let folder = pull::folder(path);
    let job = Job { session, folder, progress };
    match found {
        Found::Pieces(Pieces(pieces)) => job.pieces(pieces, path, concurrency).await,
        Found::Container(Layers(layers)) => {
            let failed = |e| ImageError::io("make a file in", folder, e);
            let part = tempfile::Builder::new().prefix(".coracle-").tempfile_in(folder).map_err(failed)?;
            let taken = job.container(layers, part.reopen().map_err(failed)?).await?;
            let (file, partial, to) =
                (part.reopen().map_err(failed)?, part.into_temp_path(), path.to_owned());
            let named = blocking(move || {
                pull::name(&file, &partial, &to)?;
                // It has another name now.
                partial.keep().map(drop).map_err(|e| e.error)
            });
            named.await.map_err(|e| ImageError::io("name", path, e))?;
            Ok(taken)
        }
        Found::Other => Err(ImageError::unsupported("what is no disk")),
    }
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
        fetch_file(self.session, blob, bytes, tempfile::tempfile_in(self.folder).map_err(failed)?).await
    }

    async fn pieces(&self, pieces: &[Piece], path: &Path, concurrency: usize) -> Result<Taken, ImageError> {
        let (partial, blobs) = (pull::partial(path), PathBuf::from(format!("{}.parts", path.display())));
        let wanted: Vec<_> = pieces.iter().map(|p| p.blob).collect();
        let spool = Spool::open(&blobs, &wanted).await?;
        let taken = self.assemble(pieces, path, &spool, concurrency).await;
        if taken.as_ref().is_err_and(|e| !is_worth_a_try(e)) {
            // The next try may not have the same to begin with.
            let _nothing_of_it_was_shown = fs::remove_file(&partial);
        }
        spool.end(taken)
    }

    /// All pieces into the partial file, which gets its name then.
    async fn assemble(
        &self,
        pieces: &[Piece],
        path: &Path,
        spool: &Spool,
        concurrency: usize,
    ) -> Result<Taken, ImageError> {
        let partial = pull::partial(path);
        let failed = |e| ImageError::io("write", &partial, e);
        let target = pull::alone(&partial).await.map_err(failed)?;
        self.check_space(pieces, &target)?;
        let target = Arc::new(target);
        let total: u64 = pieces.iter().map(|p| p.blob_bytes).sum();
        let mut taken = Taken { disk_bytes: 0, pieces: pieces.len(), blobs: 0, blob_bytes: 0 };
        let (mut sparse, mut done) = (Sparse::new(Arc::clone(&target)), 0);
        {
            // Boxed: through a closure the compiler cannot see that this may change threads.
            let work: Vec<BoxFuture<'_, _>> = pieces
                .iter()
                .zip(starts(pieces))
                .map(|(piece, start)| self.blob_of(piece, start, &target, spool).boxed())
                .collect();
            let mut work = stream::iter(work).buffered(concurrency.max(1));
            while let Some((piece, blob)) = work.try_next().await? {
                if let Some(blob) = blob {
                    let own = piece.clone();
                    sparse = blocking(move || Ok(place(&own, blob, sparse))).await.map_err(failed)??;
                    spool.done(&piece.blob);
                    (taken.blobs, taken.blob_bytes) = (taken.blobs + 1, taken.blob_bytes + piece.blob_bytes);
                } else {
                    sparse.at += piece.raw_bytes.unwrap_or(0);
                }
                done += piece.blob_bytes;
                (self.progress)(done, total);
            }
        }
        taken.disk_bytes = self.end(sparse)?;
        let to = path.to_owned();
        let named = blocking(move || pull::name(&target, &partial, &to));
        named.await.map_err(|e| ImageError::io("name", path, e))?;
        Ok(taken)
    }

    /// A piece with its blob, unless its bytes are in the target already.
    async fn blob_of<'p>(
        &self,
        piece: &'p Piece,
        start: Option<u64>,
        target: &Arc<File>,
        spool: &Spool,
    ) -> Result<(&'p Piece, Option<File>), ImageError> {
        let (file, own) = (Arc::clone(target), piece.clone());
        let looked = blocking(move || is_there(&own, start, &file)).await;
        if looked.map_err(|e| ImageError::io("read in", self.folder, e))? {
            return Ok((piece, None));
        }
        Ok((piece, Some(spool.fetch(self.session, &piece.blob, piece.blob_bytes).await?)))
    }

    /// The disk fits, besides what is there of it, as far as its length is known.
    fn check_space(&self, pieces: &[Piece], target: &File) -> Result<(), ImageError> {
        use std::os::unix::fs::MetadataExt;
        let there = target.metadata().map_or(0, |m| m.blocks() * 512);
        let all = pieces.iter().map(|p| p.raw_bytes.unwrap_or(p.blob_bytes)).fold(0, u64::saturating_add);
        space::check(self.folder, all.saturating_sub(there), "fetch a disk")
    }

    async fn container(&self, layers: &[(String, Digest, u64)], target: File) -> Result<Taken, ImageError> {
        let mut sparse = Sparse::new(Arc::new(target));
        for (kind, blob, bytes) in layers.iter().rev() {
            let packing = Packing::of_media_type(kind)?;
            let file = self.fetch(blob, *bytes).await?;
            (self.progress)(*bytes, *bytes);
            let looked = blocking(move || Ok(disk_in(file, packing, sparse))).await;
            let (found, back) = looked.map_err(|e| ImageError::io("read a layer in", self.folder, e))??;
            if found {
                return Ok(Taken { disk_bytes: self.end(back)?, pieces: 1, blobs: 1, blob_bytes: *bytes });
            }
            sparse = back;
        }
        Err(ImageError::unsupported("a container image without a file below /disk/"))
    }

    fn end(&self, sparse: Sparse) -> Result<u64, ImageError> {
        sparse.end().map_err(|e| ImageError::io("write a disk in", self.folder, e))
    }
}

/// Where each piece begins, as far as the lengths of those before are known.
fn starts(pieces: &[Piece]) -> impl Iterator<Item = Option<u64>> {
    pieces.iter().scan(Some(0u64), |at, piece| {
        let start = *at;
        *at = start.zip(piece.raw_bytes).and_then(|(at, bytes)| at.checked_add(bytes));
        Some(start)
    })
}

/// Was a piece brought here by an earlier try? Blocking.
fn is_there(piece: &Piece, start: Option<u64>, file: &File) -> io::Result<bool> {
    // What is not packed is called by the digest of its raw bytes.
    let raw = piece.raw.or((piece.pack == Pack::Plain).then_some(piece.blob));
    let (Some(start), Some(bytes), Some(raw)) = (start, piece.raw_bytes, raw) else { return Ok(false) };
    if bytes == 0 || start.saturating_add(bytes) > file.metadata()?.len() {
        return Ok(false);
    }
    let (mut hasher, mut at, end) = (Hasher::default(), start, start + bytes);
    let mut buffer = vec![0; 1 << 20];
    while at < end {
        let want = usize::try_from(end - at).unwrap_or(buffer.len()).min(buffer.len());
        let piece = buffer.get_mut(..want).unwrap_or_default();
        file.read_exact_at(piece, at)?;
        hasher.update(piece);
        at += want as u64;
    }
    Ok(hasher.finish() == raw)
}

/// Writes a piece behind what is there. Blocking.
fn place(piece: &Piece, file: File, mut sparse: Sparse) -> Result<Sparse, ImageError> {
    let began = sparse.at;
    sparse.clear(piece.raw_bytes).map_err(|e| ImageError::io("write", PathBuf::from("a disk"), e))?;
    sparse.hasher = Hasher::default();
    sparse.limit = piece.raw_bytes.map_or(DISK_MAX, |bytes| began.saturating_add(bytes)).min(DISK_MAX);
    let copied = match piece.pack {
        Pack::Plain => io::copy(&mut io::BufReader::new(file), &mut sparse).map(drop),
        Pack::Zstd => zstd::Decoder::new(file).and_then(|mut d| {
            // Hostile frames may ask for any window.
            d.window_log_max(27)?;
            io::copy(&mut d, &mut sparse).map(drop)
        }),
        Pack::Gzip => {
            io::copy(&mut flate2::bufread::MultiGzDecoder::new(io::BufReader::new(file)), &mut sparse)
                .map(drop)
        }
        Pack::Lz4 => super::unpack_lz4(io::BufReader::new(file), &mut sparse),
    };
    copied.and_then(|()| sparse.flush()).map_err(|e| match e.raw_os_error() {
        None => ImageError::hostile(format!("blob {}: {e}", piece.blob)),
        Some(_) => ImageError::io("write", PathBuf::from("a disk"), e),
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
    file: Arc<File>,
    at: u64,
    /// Nothing is written behind it.
    limit: u64,
    hasher: Hasher,
    block: Vec<u8>,
}

impl Sparse {
    fn new(file: Arc<File>) -> Self {
        Self { file, at: 0, limit: DISK_MAX, hasher: Hasher::default(), block: Vec::with_capacity(HOLE) }
    }

    /// Makes room for a piece: what is there of an earlier try must not show through its holes. Of one whose length is
    /// not known nothing behind can be right either.
    fn clear(&self, bytes: Option<u64>) -> io::Result<()> {
        let length = self.file.metadata()?.len();
        match bytes {
            _ if length <= self.at => Ok(()),
            None => self.file.set_len(self.at),
            Some(0) => Ok(()),
            Some(bytes) => {
                let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
                Ok(rustix::fs::fallocate(&self.file, flags, self.at, bytes)?)
            }
        }
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
