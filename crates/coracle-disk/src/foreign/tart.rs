//! Pushes disks in the format of tart: parts of 512 MiB in Apple's framing of LZ4, several concurrently.
//!
//! ```text
//! config.v1 ─ disk.v2, disk.v2, … in disk order ─ nvram.v1        image config: architecture, label "raw"
//! ```
//! tart cannot use EFI variables of other VMMs: the NVRAM part is that of erased flash.

use std::{
    fs::File,
    io::{self, BufWriter, Read, Seek, SeekFrom, Write},
    path::Path,
    sync::Arc,
    sync::atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};

use super::{lz4, write::Source};
use crate::{DiskOptions, DiskProgress, DiskReport, artifact::MANIFEST, blocking, pull, push};
use coracle_image::ImageError;
use coracle_oci::{
    Digest, Hasher, HashingWriter, Offered, Operation, Payload, Reference, SentBytes, Session,
    media_types::OCI_CONFIG,
};

/// Raw size of a part, bytes. The last part may be shorter.
const PART_BYTES: u64 = 512 << 20;
/// Limit of concurrent parts, as in tart.
const PARTS_AT_ONCE: usize = 4;
const LABEL: &str = "org.cirruslabs.tart.disk.format";
/// Erased flash: no EFI variables.
const NVRAM: &[u8] = &[0xff; 64 << 10];
/// CPUs and memory of a VM of the image, unless the user sets others.
const CPUS: u32 = 4;
const MEMORY_BYTES: u64 = 4 << 30;

/// Disk format that the labels of an image state.
pub(super) fn disk_format(config: &str) -> Option<String> {
    let config: Value = serde_json::from_str(config).ok()?;
    Some(config["config"]["Labels"][LABEL].as_str()?.to_owned())
}

/// Pushes a raw disk as an image of tart for a Linux system.
///
/// # Errors
/// `OciError::Unsupported` for a qcow2 disk; `OciError::Io` for the file; those of the registry.
pub(in super::super) async fn push_tart(
    path: &Path,
    reference: &Reference,
    options: &DiskOptions,
    progress: DiskProgress,
) -> Result<DiskReport, ImageError> {
    let Source { bytes: disk_bytes, qcow2, .. } = Source::open(path)?;
    if qcow2 {
        return Err(ImageError::unsupported(format!(
            "{}: tart has raw disks; convert it: qemu-img convert -O raw",
            path.display()
        )));
    }
    let session = Arc::new(pull::open(reference, options, Operation::Push).await?);
    let done = Arc::new(AtomicU64::new(0));
    let parts = (0..disk_bytes.div_ceil(PART_BYTES)).map(|n| {
        let start = n * PART_BYTES;
        let bytes = PART_BYTES.min(disk_bytes - start);
        let (session, progress, done) = (Arc::clone(&session), Arc::clone(&progress), Arc::clone(&done));
        async move {
            let part = part(&session, path, options, start, bytes).await?;
            progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes, disk_bytes);
            Ok::<_, ImageError>(part)
        }
    });
    let at_once = options.concurrency.unwrap_or(PARTS_AT_ONCE).max(1);
    let parts: Vec<(Value, Option<u64>)> = stream::iter(parts).buffered(at_once).try_collect().await?;

    let architecture = coracle_oci::Platform::host().architecture;
    let settings = settings(&architecture).to_string();
    let config = image_config(&architecture).to_string().into_bytes();
    let mut layers = vec![push_small_blob(&session, "config.v1", Bytes::from(settings)).await?];
    let moved: Vec<u64> = parts.iter().filter_map(|(_, moved)| *moved).collect();
    layers.extend(parts.into_iter().map(|(layer, _)| layer));
    layers.push(push_small_blob(&session, "nvram.v1", Bytes::from_static(NVRAM)).await?);
    let chunks = layers.len() - 2;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": OCI_CONFIG, "digest": Digest::of(&config).to_string(), "size": config.len()},
        "layers": layers,
        "annotations": {"org.cirruslabs.tart.uncompressed-disk-size": disk_bytes.to_string()},
    });
    let manifest = manifest.to_string().into_bytes();
    let digest = push::push_manifest(&session, reference, config, manifest, false).await?.digest;
    let moved_bytes = moved.iter().sum();
    Ok(DiskReport { digest, disk_bytes, chunks, moved: moved.len(), moved_bytes, parts: vec![] })
}

fn image_config(architecture: &str) -> Value {
    json!({"architecture": architecture, "os": "linux", "config": {"Labels": {LABEL: "raw"}}})
}

/// Settings of a VM of the image. Each clone gets a new MAC address.
fn settings(architecture: &str) -> Value {
    json!({
        "version": 1,
        "os": "linux",
        "arch": architecture,
        "cpuCountMin": 1,
        "cpuCount": CPUS,
        "memorySizeMin": MEMORY_BYTES / 8,
        "memorySize": MEMORY_BYTES,
        "macAddress": "02:00:00:00:00:01",
        "display": {"width": 1024, "height": 768},
        "diskFormat": "raw",
    })
}

/// Pushes a blob that fits into memory, and returns its descriptor.
async fn push_small_blob(session: &Session, kind: &str, blob: Bytes) -> Result<Value, ImageError> {
    let (digest, size) = (Digest::of(&blob), blob.len());
    let quiet: SentBytes = Arc::new(|_| {});
    session.offer_blob(&digest, &Payload::Bytes(blob), None, &quiet).await?;
    let kind = format!("application/vnd.cirruslabs.tart.{kind}");
    Ok(json!({"mediaType": kind, "digest": digest.to_string(), "size": size}))
}

/// Pushes one part. Returns its descriptor, and its compressed size if it was uploaded.
async fn part(
    session: &Session,
    path: &Path,
    options: &DiskOptions,
    start: u64,
    bytes: u64,
) -> Result<(Value, Option<u64>), ImageError> {
    let spool = options.spool.clone().unwrap_or_else(|| pull::parent_dir(path).to_owned());
    let from = path.to_owned();
    let packed = blocking(move || pack(&from, &spool, start, bytes)).await;
    let packed = packed.map_err(|e| ImageError::io("compress", path, e))?;
    let payload = Payload::File { path: packed.file.to_path_buf(), start: 0, bytes: packed.bytes };
    let quiet: SentBytes = Arc::new(|_| {});
    let moved = session.offer_blob(&packed.digest, &payload, None, &quiet).await? == Offered::Uploaded;
    let layer = json!({
        "mediaType": "application/vnd.cirruslabs.tart.disk.v2",
        "digest": packed.digest.to_string(),
        "size": packed.bytes,
        "annotations": {
            "org.cirruslabs.tart.uncompressed-size": bytes.to_string(),
            "org.cirruslabs.tart.uncompressed-content-digest": packed.raw.to_string(),
        },
    });
    Ok((layer, moved.then_some(packed.bytes)))
}

struct Packed {
    file: tempfile::TempPath,
    bytes: u64,
    digest: Digest,
    /// Digest of the raw bytes.
    raw: Digest,
}

/// Compresses a part of the disk into a spooled file. Blocking.
fn pack(path: &Path, spool: &Path, start: u64, bytes: u64) -> io::Result<Packed> {
    let mut disk = File::open(path)?;
    disk.seek(SeekFrom::Start(start))?;
    let file = tempfile::Builder::new().prefix(".coracle-").tempfile_in(spool)?;
    let mut packed = HashingWriter { to: BufWriter::new(file.reopen()?), hasher: Hasher::default() };
    let mut disk = HashingReader { from: disk.take(bytes), hasher: Hasher::default() };
    lz4::pack(&mut disk, &mut packed)?;
    packed.to.flush()?;
    let raw = disk.hasher.finish();
    if disk.from.limit() > 0 {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the disk became shorter"));
    }
    let bytes = packed.hasher.bytes();
    Ok(Packed { file: file.into_temp_path(), bytes, digest: packed.hasher.finish(), raw })
}

/// Reader that hashes what is read through it.
struct HashingReader<R> {
    from: R,
    hasher: Hasher,
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(buffer)?;
        self.hasher.update(buffer.get(..read).unwrap_or_default());
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_names_the_format_of_the_disk() {
        assert_eq!(disk_format(&image_config("arm64").to_string()).as_deref(), Some("raw"));
        for (config, want) in [
            (r#"{"config":{"Labels":{"org.cirruslabs.tart.disk.format":"asif"}}}"#, Some("asif")),
            (r#"{"config":{"Labels":{}}}"#, None),
            (r#"{"config":null}"#, None),
            ("{}", None),
            ("no json", None),
        ] {
            assert_eq!(disk_format(config).as_deref(), want, "{config}");
        }
    }
}
