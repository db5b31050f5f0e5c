//! Pushes disks in the formats of other tools: containerDisk of KubeVirt, cloud image of epoch.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt,
    path::Path,
    sync::Arc,
};

use serde_json::{Value, json};

use crate::{
    DiskOptions, DiskProgress, DiskReport,
    artifact::{EMPTY_BLOB, MANIFEST, TITLE},
    blocking,
    file::is_qcow2,
    pull, push,
};
use coracle_image::{Compression, ImageError};
use coracle_oci::{
    Digest, Hasher, HashingWriter, Offered, Operation, Payload, Reference, SentBytes, Session,
    media_types::OCI_CONFIG,
};

/// User and group id of QEMU in KubeVirt.
const QEMU: u64 = 107;
/// Size of a layer of a cloud image, bytes.
const PART_BYTES: u64 = 1 << 30;
const CLOUD_IMAGE: &str = "application/vnd.cocoonstack.os-image.v1+json";
const CLOUD_DISK: &str = "application/vnd.cocoonstack.disk.";
const EMPTY: &str = "application/vnd.oci.empty.v1+json";

/// Disk file to push.
pub(super) struct Source<'a> {
    path: &'a Path,
    title: String,
    pub(super) bytes: u64,
    pub(super) qcow2: bool,
}

impl<'a> Source<'a> {
    pub(super) fn open(path: &'a Path) -> Result<Self, ImageError> {
        let fail = |e| ImageError::io("read", path, e);
        let file = File::open(path).map_err(fail)?;
        let bytes = file.metadata().map_err(fail)?.len();
        let qcow2 = is_qcow2(&file).map_err(fail)?;
        let title = path.file_name().map_or_else(|| "disk.raw".into(), |n| n.to_string_lossy().into_owned());
        Ok(Self { path, title, bytes, qcow2 })
    }
}

/// Pushes a raw or qcow2 disk as a container image with the disk below `/disk/`.
///
/// # Errors
/// `OciError::Io` for the file; those of the registry.
pub(in super::super) async fn push_container_disk(
    path: &Path,
    reference: &Reference,
    options: &DiskOptions,
    progress: DiskProgress,
) -> Result<DiskReport, ImageError> {
    let source = Source::open(path)?;
    let session = pull::open(reference, options, Operation::Push).await?;
    let (from, title, bytes) = (path.to_owned(), source.title.clone(), source.bytes);
    let packed = blocking(move || pack(&from, &title, bytes))
        .await
        .map_err(|e| ImageError::io("compress", path, e))?;
    let payload = Payload::File { path: packed.file.to_path_buf(), start: 0, bytes: packed.bytes };
    let total = packed.bytes;
    let sent: SentBytes = Arc::new(move |done| progress(done, total));
    let moved = session.offer_blob(&packed.digest, &payload, None, &sent).await? == Offered::Uploaded;
    let architecture = coracle_oci::Platform::host().architecture;
    let config = json!({
        "architecture": architecture, "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [packed.diff_id.to_string()]},
    });
    let config = config.to_string().into_bytes();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": OCI_CONFIG, "digest": Digest::of(&config).to_string(), "size": config.len()},
        "layers": [{
            "mediaType": Compression::Gzip.oci_media_type(), "digest": packed.digest.to_string(), "size": packed.bytes,
        }],
    });
    let digest = push::push_manifest(&session, reference, config, manifest.to_string().into_bytes(), false)
        .await?
        .digest;
    let moved_bytes = if moved { packed.bytes } else { 0 };
    Ok(DiskReport {
        digest,
        disk_bytes: source.bytes,
        chunks: 1,
        moved: moved.into(),
        moved_bytes,
        parts: vec![],
    })
}

struct Packed {
    file: tempfile::TempPath,
    digest: Digest,
    diff_id: Digest,
    bytes: u64,
}

/// Builds the layer with the disk and its directory. Blocking.
fn pack(path: &Path, title: &str, bytes: u64) -> io::Result<Packed> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::Builder::new().prefix(".coracle-").tempfile_in(folder)?;
    let packed = HashingWriter { to: file.reopen()?, hasher: Hasher::default() };
    let gzip = flate2::write::GzEncoder::new(packed, flate2::Compression::fast());
    let mut archive = tar::Builder::new(HashingWriter { to: gzip, hasher: Hasher::default() });
    let header = |kind, mode, size| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(QEMU);
        header.set_gid(QEMU);
        header.set_size(size);
        header
    };
    archive.append_data(&mut header(tar::EntryType::Directory, 0o555, 0), "disk/", io::empty())?;
    let content = File::open(path)?.take(bytes);
    archive.append_data(
        &mut header(tar::EntryType::Regular, 0o440, bytes),
        format!("disk/{title}"),
        content,
    )?;
    let plain = archive.into_inner()?;
    let diff_id = plain.hasher.finish();
    let packed = plain.to.finish()?;
    let bytes = packed.hasher.bytes();
    Ok(Packed { file: file.into_temp_path(), digest: packed.hasher.finish(), diff_id, bytes })
}

/// Pushes a raw or qcow2 disk as a cloud image of epoch, whole or in parts of 1 GiB.
///
/// # Errors
/// `OciError::Io` for the file; those of the registry.
pub(in super::super) async fn push_cloud_image(
    path: &Path,
    reference: &Reference,
    options: &DiskOptions,
    progress: DiskProgress,
) -> Result<DiskReport, ImageError> {
    let source = Source::open(path)?;
    let session = pull::open(reference, options, Operation::Push).await?;
    let parts = source.bytes.div_ceil(PART_BYTES).max(1);
    let (mut layers, mut moved, mut moved_bytes) = (Vec::new(), 0, 0);
    for n in 0..parts {
        let start = n * PART_BYTES;
        let bytes = PART_BYTES.min(source.bytes - start);
        let (layer, was_moved) = part(&session, &source, (n, parts), start, bytes).await?;
        layers.push(layer);
        moved += usize::from(was_moved);
        moved_bytes += if was_moved { bytes } else { 0 };
        progress(start + bytes, source.bytes);
    }
    let empty = Digest::of(EMPTY_BLOB).to_string();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": CLOUD_IMAGE,
        "config": {"mediaType": EMPTY, "digest": empty, "size": EMPTY_BLOB.len()},
        "layers": layers,
    });
    let config = EMPTY_BLOB.to_vec();
    let digest = push::push_manifest(&session, reference, config, manifest.to_string().into_bytes(), false)
        .await?
        .digest;
    let chunks = usize::try_from(parts).unwrap_or(usize::MAX);
    Ok(DiskReport { digest, disk_bytes: source.bytes, chunks, moved, moved_bytes, parts: vec![] })
}

/// Pushes one part. Returns its descriptor, and whether its bytes were uploaded.
async fn part(
    session: &Session,
    source: &Source<'_>,
    (n, parts): (u64, u64),
    start: u64,
    bytes: u64,
) -> Result<(Value, bool), ImageError> {
    let fail = |e| ImageError::io("read", source.path, e);
    let path = source.path.to_owned();
    let digest = blocking(move || hash(&path, start, bytes)).await.map_err(fail)?;
    let payload = Payload::File { path: source.path.to_owned(), start, bytes };
    let quiet: SentBytes = Arc::new(|_| {});
    let moved = session.offer_blob(&digest, &payload, None, &quiet).await? == Offered::Uploaded;
    let kind = if source.qcow2 { "qcow2" } else { "raw" };
    let (kind, title) = match parts {
        1 => (kind.to_owned(), source.title.clone()),
        _ => (format!("{kind}.part"), format!("{}.part.{n:05}", source.title)),
    };
    let layer = json!({
        "mediaType": format!("{CLOUD_DISK}{kind}"),
        "digest": digest.to_string(),
        "size": bytes,
        "annotations": {TITLE: title},
    });
    Ok((layer, moved))
}

fn hash(path: &Path, start: u64, bytes: u64) -> io::Result<Digest> {
    let (file, mut hasher, mut at) = (File::open(path)?, Hasher::default(), start);
    let mut buffer = vec![0; 1 << 20];
    while at < start + bytes {
        let want = usize::try_from(start + bytes - at).unwrap_or(buffer.len()).min(buffer.len());
        let piece = buffer.get_mut(..want).unwrap_or_default();
        file.read_exact_at(piece, at)?;
        hasher.update(piece);
        at += want as u64;
    }
    Ok(hasher.finish())
}
