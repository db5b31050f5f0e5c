//! Pulls a disk in the format of another tool: blobs concurrently, parts in order.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt, TryStreamExt, stream};

use super::plan::{ContainerLayers, ForeignDisk, Part, PartCompression, Parts};
use super::tart;
use crate::sparse;
use crate::{
    DiskOptions, DiskPart, DiskProgress, LocalParts,
    artifact::DISK_MAX,
    blocking, pull,
    spool::{Spool, is_resumable},
};
use coracle_image::{
    Budget, Compression, DecompressReader, ImageError, Limits, space,
    tarball::{self, Kind, path::components},
};
use coracle_oci::{BlobFile, Digest, Hasher, OciError, Session, fetch_file};

/// Size of the blocks that become holes when they are zero, bytes.
const HOLE: usize = 64 << 10;
/// Limit of blobs that are fetched concurrently.
const BLOBS_AT_ONCE: usize = 4;
/// Largest configuration of an image, bytes.
const LABELS_MAX: u64 = 4 << 20;

/// Result of a pull.
pub(in super::super) struct PulledDisk {
    pub(in super::super) disk_bytes: u64,
    /// Number of parts.
    pub(in super::super) parts: usize,
    /// Number of fetched blobs, and their bytes.
    pub(in super::super) blobs: usize,
    pub(in super::super) blob_bytes: u64,
    /// Parts with known digests.
    pub(in super::super) digests: Vec<DiskPart>,
}

/// Pulls a disk into the file `path`, which is complete, sparse and synced when this returns. Parts are written to
/// `path.partial`, and blobs are spooled in the directory `path.parts`. Both stay after an interruption, and valid content is
/// not fetched again. A permanent failure deletes both.
///
/// # Errors
/// `OciError::Unsupported` for an artifact without a disk; otherwise like [`crate::pull_disk`].
pub(in super::super) async fn pull(
    session: &Arc<Session>,
    found: &ForeignDisk,
    path: &Path,
    options: &DiskOptions,
    progress: &DiskProgress,
) -> Result<PulledDisk, ImageError> {
    let folder = pull::parent_dir(path);
    let concurrency = options.concurrency.unwrap_or(BLOBS_AT_ONCE);
    let job = Job { session, folder, progress, local: &options.local };
    match found {
        ForeignDisk::Parts(Parts { parts, labels }) => {
            if let Some((blob, bytes)) = labels {
                job.check_labels(blob, *bytes).await?;
            }
            job.parts(parts, path, concurrency).await
        }
        ForeignDisk::Container(ContainerLayers(layers)) => {
            let failed = |e| ImageError::io("create a file in", folder, e);
            let part = tempfile::Builder::new().prefix(".coracle-").tempfile_in(folder).map_err(failed)?;
            let taken = job.container(layers, part.reopen().map_err(failed)?).await?;
            let (file, partial, to) =
                (part.reopen().map_err(failed)?, part.into_temp_path(), path.to_owned());
            let named = blocking(move || {
                pull::publish(&file, &partial, &to)?;
                // The file was renamed, so it must not be deleted.
                partial.keep().map(drop).map_err(|e| e.error)
            });
            named.await.map_err(|e| ImageError::io("rename to", path, e))?;
            Ok(taken)
        }
        ForeignDisk::Other => Err(ImageError::unsupported("the artifact is not a disk")),
    }
}

struct Job<'a> {
    session: &'a Arc<Session>,
    folder: &'a Path,
    progress: &'a DiskProgress,
    local: &'a Arc<LocalParts>,
}

impl Job<'_> {
    /// Fetches a verified blob into an unnamed file.
    async fn fetch(&self, blob: &Digest, bytes: u64) -> Result<File, ImageError> {
        let failed = |e| ImageError::io("create a file in", self.folder, e);
        let file = tempfile::tempfile_in(self.folder).map_err(failed)?;
        let to = BlobFile { file, path: self.folder.to_owned(), guard: () };
        Ok(fetch_file(self.session, blob, bytes, to, &|_| {}).await?)
    }

    /// Fails if the labels of the image state that its parts are not those of a raw disk.
    async fn check_labels(&self, blob: &Digest, bytes: u64) -> Result<(), ImageError> {
        if bytes > LABELS_MAX {
            return Err(ImageError::hostile(format!("configuration of {bytes} bytes")));
        }
        let mut text = String::new();
        let read = self.fetch(blob, bytes).await?.read_to_string(&mut text);
        read.map_err(|e| ImageError::io("read", self.folder, e))?;
        match tart::disk_format(&text).as_deref() {
            None | Some("raw") => Ok(()),
            Some(other) => Err(ImageError::unsupported(format!(
                "tart image with a disk of format {}; push it again as raw",
                other.chars().filter(|c| !c.is_control()).take(40).collect::<String>()
            ))),
        }
    }

    async fn parts(&self, parts: &[Part], path: &Path, concurrency: usize) -> Result<PulledDisk, ImageError> {
        let (partial, blobs) = (pull::partial_path(path), PathBuf::from(format!("{}.parts", path.display())));
        let wanted: Vec<_> = parts.iter().map(|p| p.blob).collect();
        let spool = Spool::open(&blobs, &wanted).await?;
        let taken = self.assemble(parts, path, &spool, concurrency).await;
        if taken.as_ref().is_err_and(|e| !is_resumable(e)) {
            // The next call cannot verify parts without a digest.
            let _deleted = fs::remove_file(&partial);
        }
        spool.finish(taken)
    }

    /// Writes all parts to the partial file, then renames it.
    async fn assemble(
        &self,
        parts: &[Part],
        path: &Path,
        spool: &Spool,
        concurrency: usize,
    ) -> Result<PulledDisk, ImageError> {
        let partial = pull::partial_path(path);
        let failed = |e| ImageError::io("write", &partial, e);
        let target = pull::open_exclusive(&partial).await.map_err(failed)?;
        self.check_space(parts, &target)?;
        let target = Arc::new(target);
        let total: u64 = parts.iter().map(|p| p.blob_bytes).sum();
        let mut taken = PulledDisk {
            disk_bytes: 0,
            parts: parts.len(),
            blobs: 0,
            blob_bytes: 0,
            digests: digests(parts),
        };
        let (mut sparse, mut done) = (SparseWriter::new(Arc::clone(&target)), 0);
        {
            // Boxed, because the compiler cannot prove that the future of the closure is `Send`.
            let work: Vec<BoxFuture<'_, _>> = parts
                .iter()
                .zip(starts(parts))
                .map(|(part, start)| self.fetch_part(part, start, &target, spool).boxed())
                .collect();
            let mut work = stream::iter(work).buffered(concurrency.max(1));
            while let Some((part, blob)) = work.try_next().await? {
                if let Some(blob) = blob {
                    let own = part.clone();
                    sparse = blocking(move || Ok(write_part(&own, blob, sparse))).await.map_err(failed)??;
                    spool.remove(&part.blob);
                    (taken.blobs, taken.blob_bytes) = (taken.blobs + 1, taken.blob_bytes + part.blob_bytes);
                } else {
                    sparse.at += part.raw_bytes.unwrap_or(0);
                }
                done += part.blob_bytes;
                (self.progress)(done, total);
            }
        }
        taken.disk_bytes = self.end(sparse)?;
        let to = path.to_owned();
        let named = blocking(move || pull::publish(&target, &partial, &to));
        named.await.map_err(|e| ImageError::io("rename to", path, e))?;
        Ok(taken)
    }

    /// Fetches the blob of a part, unless the target already has the bytes.
    async fn fetch_part<'p>(
        &self,
        part: &'p Part,
        start: Option<u64>,
        target: &Arc<File>,
        spool: &Spool,
    ) -> Result<(&'p Part, Option<File>), ImageError> {
        let (file, own) = (Arc::clone(target), part.clone());
        let looked = blocking(move || is_present(&own, start, &file)).await;
        if looked.map_err(|e| ImageError::io("read in", self.folder, e))? {
            return Ok((part, None));
        }
        if let Some((place, raw)) = place(part, start) {
            let (local, to) = (Arc::clone(self.local), Arc::clone(target));
            let copied = blocking(move || local.copy(&raw, &to, &place)).await;
            if copied.map_err(|e| ImageError::io("copy a part to a file in", self.folder, e))? {
                return Ok((part, None));
            }
        }
        Ok((part, Some(spool.fetch(self.session, &part.blob, part.blob_bytes).await?)))
    }

    /// Fails unless the disk fits, as far as its length is known. Blocks that the file already has are not counted.
    fn check_space(&self, parts: &[Part], target: &File) -> Result<(), ImageError> {
        use std::os::unix::fs::MetadataExt;
        let there = target.metadata().map_or(0, |m| m.blocks() * 512);
        let all = parts.iter().map(|p| p.raw_bytes.unwrap_or(p.blob_bytes)).fold(0, u64::saturating_add);
        space::check(self.folder, all.saturating_sub(there), "fetch a disk")
    }

    async fn container(
        &self,
        layers: &[(String, Digest, u64)],
        target: File,
    ) -> Result<PulledDisk, ImageError> {
        let mut sparse = SparseWriter::new(Arc::new(target));
        for (kind, blob, bytes) in layers.iter().rev() {
            let packing = Compression::of_media_type(kind)?;
            let file = self.fetch(blob, *bytes).await?;
            (self.progress)(*bytes, *bytes);
            let looked = blocking(move || Ok(copy_disk(file, packing, sparse))).await;
            let (found, back) = looked.map_err(|e| ImageError::io("read a layer in", self.folder, e))??;
            if found {
                return Ok(PulledDisk {
                    disk_bytes: self.end(back)?,
                    parts: 1,
                    blobs: 1,
                    blob_bytes: *bytes,
                    digests: vec![],
                });
            }
            sparse = back;
        }
        Err(ImageError::unsupported("container image without a file below /disk/"))
    }

    fn end(&self, sparse: SparseWriter) -> Result<u64, ImageError> {
        sparse.end().map_err(|e| ImageError::io("write a disk in", self.folder, e))
    }
}

/// Offset of each part. `None` after a part of unknown length.
fn starts(parts: &[Part]) -> impl Iterator<Item = Option<u64>> {
    parts.iter().scan(Some(0u64), |at, part| {
        let start = *at;
        *at = start.zip(part.raw_bytes).and_then(|(at, bytes)| at.checked_add(bytes));
        Some(start)
    })
}

/// Range of a part in the disk, and the digest of its raw bytes. `None` unless both are known before the part is fetched.
fn place(part: &Part, start: Option<u64>) -> Option<(Range<u64>, Digest)> {
    // The blob of an uncompressed part has the digest of its raw bytes.
    let raw = part.raw.or((part.pack == PartCompression::Plain).then_some(part.blob))?;
    let (start, bytes) = (start?, part.raw_bytes.filter(|bytes| *bytes > 0)?);
    Some((start..start.checked_add(bytes)?, raw))
}

fn digests(parts: &[Part]) -> Vec<DiskPart> {
    let places = parts.iter().zip(starts(parts)).filter_map(|(part, start)| place(part, start));
    places.map(|(part, raw)| DiskPart { start: part.start, bytes: part.end - part.start, raw }).collect()
}

/// True when the target already has the bytes of a part. Blocking.
fn is_present(part: &Part, start: Option<u64>, file: &File) -> io::Result<bool> {
    let Some((Range { start, end }, raw)) = place(part, start) else { return Ok(false) };
    if end > file.metadata()?.len() {
        return Ok(false);
    }
    let (mut hasher, mut at) = (raw.hasher(), start);
    let mut buffer = vec![0; 1 << 20];
    while at < end {
        let want = usize::try_from(end - at).unwrap_or(buffer.len()).min(buffer.len());
        let part = buffer.get_mut(..want).unwrap_or_default();
        file.read_exact_at(part, at)?;
        hasher.update(part);
        at += want as u64;
    }
    Ok(hasher.finish() == raw)
}

/// Appends a part. Blocking.
fn write_part(part: &Part, file: File, mut sparse: SparseWriter) -> Result<SparseWriter, ImageError> {
    let began = sparse.at;
    sparse.clear(part.raw_bytes).map_err(|e| ImageError::io("write", PathBuf::from("a disk"), e))?;
    sparse.hasher = part.raw.map_or_else(Hasher::default, |raw| raw.hasher());
    sparse.limit = part.raw_bytes.map_or(DISK_MAX, |bytes| began.saturating_add(bytes)).min(DISK_MAX);
    let copied = match part.pack {
        PartCompression::Plain => io::copy(&mut io::BufReader::new(file), &mut sparse).map(drop),
        PartCompression::Zstd => zstd::Decoder::new(file).and_then(|mut d| {
            // Limits the window, because frames may ask for any size.
            d.window_log_max(27)?;
            io::copy(&mut d, &mut sparse).map(drop)
        }),
        PartCompression::Gzip => {
            io::copy(&mut flate2::bufread::MultiGzDecoder::new(io::BufReader::new(file)), &mut sparse)
                .map(drop)
        }
        PartCompression::Lz4 => super::unpack_lz4(io::BufReader::new(file), &mut sparse),
    };
    copied.and_then(|()| sparse.flush()).map_err(|e| match e.raw_os_error() {
        None => ImageError::hostile(format!("blob {}: {e}", part.blob)),
        Some(_) => ImageError::io("write", PathBuf::from("a disk"), e),
    })?;
    if part.raw_bytes.is_some_and(|bytes| sparse.at - began != bytes) {
        return Err(ImageError::hostile(format!("the length of blob {} differs from its part", part.blob)));
    }
    let actual = std::mem::take(&mut sparse.hasher).finish();
    match part.raw.filter(|raw| *raw != actual) {
        None => Ok(sparse),
        Some(expected) => {
            let what = format!("raw bytes of blob {}", part.blob);
            Err(OciError::digest_mismatch(what, expected, actual).into())
        }
    }
}

/// Copies the file below `/disk/` from a layer. Returns false if the layer has none. Blocking.
fn copy_disk(
    file: File,
    packing: Compression,
    mut sparse: SparseWriter,
) -> Result<(bool, SparseWriter), ImageError> {
    let limits = Limits { unpacked_bytes: DISK_MAX, ..Limits::default() };
    let mut budget = Budget::of(&limits);
    let fail = |e| ImageError::io("read a layer of", "a container disk", e);
    let mut stream = DecompressReader::new(file, packing, &mut budget, None).map_err(fail)?;
    let mut archive = tarball::Reader::new(&mut stream, &limits);
    while let Some(member) = archive.next_member()? {
        archive.input_mut().count_entry()?;
        let is_disk = matches!(components(&member.path, &limits)?.as_slice(), [b"disk", _]);
        if is_disk && member.kind == Kind::File && member.size_bytes > 0 {
            let copied = io::copy(&mut archive.by_ref().take(member.size_bytes), &mut sparse);
            let copied = copied.and_then(|n| sparse.flush().map(|()| n)).map_err(tarball::read_error)?;
            return match copied == member.size_bytes {
                true => Ok((true, sparse)),
                false => Err(ImageError::hostile("truncated container disk")),
            };
        }
    }
    Ok((false, sparse))
}

/// Sequential writer that turns zeros into holes.
struct SparseWriter {
    file: Arc<File>,
    at: u64,
    /// End of the writable range.
    limit: u64,
    hasher: Hasher,
    block: Vec<u8>,
}

impl SparseWriter {
    fn new(file: Arc<File>) -> Self {
        Self { file, at: 0, limit: DISK_MAX, hasher: Hasher::default(), block: Vec::with_capacity(HOLE) }
    }

    /// Clears the range of a part: old content must not show through its holes. For a part of unknown length, clears everything
    /// to the end of the file.
    fn clear(&self, bytes: Option<u64>) -> io::Result<()> {
        let length = self.file.metadata()?.len();
        match bytes {
            _ if length <= self.at => Ok(()),
            None => self.file.set_len(self.at),
            Some(0) => Ok(()),
            Some(bytes) => sparse::clear(&self.file, &(self.at..self.at.saturating_add(bytes))),
        }
    }

    /// Sets the length of the file and returns it.
    fn end(mut self) -> io::Result<u64> {
        self.flush()?;
        self.file.set_len(self.at)?;
        Ok(self.at)
    }
}

impl Write for SparseWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(HOLE - self.block.len());
        let bytes = bytes.get(..taken).unwrap_or_default();
        if self.at + self.block.len() as u64 + bytes.len() as u64 > self.limit {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is longer than announced"));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sparse::WithoutHoles;

    #[test]
    fn piece_without_hole_punching_is_cleared() {
        let Some(place) = WithoutHoles::mount() else { return };
        let path = place.0.path().join("disk");
        fs::write(&path, [7; 10_000]).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let mut sparse = SparseWriter::new(Arc::new(file));
        sparse.at = 1000;
        sparse.clear(Some(5000)).unwrap();
        sparse.at = 9000;
        sparse.clear(Some(5000)).unwrap();
        let bytes = fs::read(&path).unwrap();
        let zero = |range: std::ops::Range<usize>| bytes[range].iter().all(|b| *b == 0);
        assert!(zero(1000..6000) && zero(9000..10_000) && bytes.len() == 10_000);
        assert_eq!(bytes.iter().filter(|b| **b == 7).count(), 4000, "nothing beside it");
    }
}
