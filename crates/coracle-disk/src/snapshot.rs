//! Snapshots in registries: files in chunks, and properties that a restoring node must match.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use serde_json::{Value, json};

use super::{
    DiskOptions, DiskProgress, DiskReport,
    artifact::{self, CONFIG_MAX, Disk, MANIFEST, TITLE},
    chunk, pull,
    push::{self, Transferred},
};
use coracle_image::ImageError;
use coracle_oci::{Descriptor, Digest, Operation, Reference, Session, fetch_bytes};

const ARTIFACT: &str = "application/vnd.coracle.snapshot.v1+json";
const CONFIG: &str = "application/vnd.coracle.snapshot.config.v1+json";
/// Limit of files in a snapshot.
const FILES_MAX: usize = 64;

/// File of a snapshot on this host.
#[derive(Clone, Debug)]
pub struct SnapshotFile {
    /// Name in the snapshot.
    pub name: String,
    /// Path on this host.
    pub path: PathBuf,
}

/// Image of the VM that a snapshot was taken of.
#[derive(Clone, Debug)]
pub struct SnapshotBase {
    /// Reference of the image.
    pub name: String,
    /// Digest of the image.
    pub digest: String,
    /// Manifest of the image, if it has one: the snapshot is then listed as its referrer.
    pub manifest: Option<Descriptor>,
}

/// Snapshot in a registry, before its files are fetched.
pub struct RemoteSnapshot {
    session: Arc<Session>,
    digest: Digest,
    about: Value,
    files: Vec<(String, Disk)>,
    options: DiskOptions,
}

impl std::fmt::Debug for RemoteSnapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RemoteSnapshot({})", self.digest)
    }
}

/// Pushes a snapshot: `files` in chunks, and `about` for the node that restores it. Chunks that the previous manifest of the
/// tag has are not transferred again. Idempotent.
///
/// # Errors
/// `OciError::Io` for the files; those of the registry.
pub async fn push_snapshot(
    files: &[SnapshotFile],
    about: &Value,
    base: &SnapshotBase,
    reference: &Reference,
    options: &DiskOptions,
    progress: DiskProgress,
) -> Result<DiskReport, ImageError> {
    let session = Arc::new(pull::open(reference, options, Operation::Push).await?);
    let known = Arc::new(push::known_chunks(&session, reference).await);
    let mut all = Transferred { disks: vec![], moved: vec![] };
    let lengths = lengths(files)?;
    for (n, file) in files.iter().enumerate() {
        let own_progress = file_progress(&progress, &lengths, n);
        let (disk, moved) = push::push_file(&session, &file.path, &known, options, &own_progress).await?;
        all.disks.push(disk);
        all.moved.extend(moved);
    }
    let (config, manifest) = write(files, &all.disks, about, base);
    let empty = all.disks.iter().all(|d| d.chunks.is_empty());
    let size_bytes = manifest.len() as u64;
    let sealed = push::push_manifest(&session, reference, config, manifest, empty).await?;
    if let Some(base) = base.manifest.as_ref().filter(|_| !sealed.is_listed) {
        let own = Descriptor { media_type: MANIFEST.to_owned(), digest: sealed.digest, size_bytes };
        session.list_referrer(&base.digest, &own, ARTIFACT).await?;
    }
    Ok(all.report(sealed.digest))
}

fn lengths(files: &[SnapshotFile]) -> Result<Vec<u64>, ImageError> {
    let length = |file: &SnapshotFile| {
        let found = std::fs::metadata(&file.path);
        found.map(|m| m.len()).map_err(|e| ImageError::io("stat", &file.path, e))
    };
    files.iter().map(length).collect()
}

/// Converts the progress of file `n` into progress over all files.
fn file_progress(progress: &DiskProgress, lengths: &[u64], n: usize) -> DiskProgress {
    let (progress, total) = (Arc::clone(progress), lengths.iter().sum::<u64>());
    let before: u64 = lengths.iter().take(n).sum();
    let own = lengths.get(n).copied().unwrap_or(0);
    Arc::new(move |done, of| {
        // The chunks of a sparse file have fewer bytes than the file.
        let done = if of == 0 { own } else { own.saturating_sub(of) + done };
        progress((before + done).min(total), total);
    })
}

/// Fetches manifest and configuration of a snapshot, so that the caller can check them before the files are transferred.
///
/// # Errors
/// `OciError::Unsupported` when the artifact is not a snapshot; `OciError::Hostile`; those of the registry.
pub async fn find_snapshot(
    reference: &Reference,
    options: &DiskOptions,
) -> Result<RemoteSnapshot, ImageError> {
    let session = Arc::new(pull::open(reference, options, Operation::Pull).await?);
    let bytes = session.manifest(&reference.api_name(), pull::MANIFEST_MAX).await?.bytes;
    let manifest = artifact::parse(&bytes, "manifest")?;
    if manifest["artifactType"] != ARTIFACT || manifest["config"]["mediaType"] != CONFIG {
        return Err(ImageError::unsupported("the artifact is not a snapshot of Coracle"));
    }
    let size_bytes = artifact::number(&manifest["config"]["size"]).filter(|n| *n <= CONFIG_MAX);
    let size_bytes = size_bytes.ok_or_else(|| artifact::invalid("size of the configuration"))?;
    let config = fetch_bytes(&session, &artifact::digest(&manifest["config"]["digest"])?, size_bytes).await?;
    let (about, files) = read(&manifest, &artifact::parse(&config, "configuration")?)?;
    Ok(RemoteSnapshot { session, digest: Digest::of(&bytes), about, files, options: options.clone() })
}

/// Removes the tag of a snapshot, like [`Session::delete_tag`]. The registry collects the chunks later. Idempotent.
///
/// # Errors
/// Errors of the registry.
pub async fn delete_snapshot(reference: &Reference, options: &DiskOptions) -> Result<(), ImageError> {
    Ok(pull::open(reference, options, Operation::Push).await?.delete_tag().await?)
}

impl RemoteSnapshot {
    /// Properties that were passed to [`push_snapshot`].
    #[must_use]
    pub fn about(&self) -> &Value {
        &self.about
    }

    /// Length of a file, including holes.
    #[must_use]
    pub fn bytes_of(&self, name: &str) -> Option<u64> {
        self.files.iter().find(|(known, _)| known == name).map(|(_, disk)| disk.bytes)
    }

    /// Fetches the files `names` into the directory `dir`. When this returns, each file is verified, complete, sparse and
    /// synced. Valid chunks of an earlier call are kept, and other files in the directory are not touched.
    ///
    /// # Errors
    /// `OciError::Unsupported` when the snapshot lacks one of the files; otherwise like [`crate::pull_disk`].
    pub async fn fetch(
        &self,
        names: &[&str],
        dir: &Path,
        progress: DiskProgress,
    ) -> Result<DiskReport, ImageError> {
        let missing =
            |name: &str| ImageError::unsupported(format!("file \"{name}\" not found in the snapshot"));
        let find =
            |name: &&str| self.files.iter().find(|(known, _)| known == name).ok_or_else(|| missing(name));
        let wanted = names.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        let lengths: Vec<u64> = wanted.iter().map(|(_, disk)| disk.bytes).collect();
        let mut all = Transferred { disks: vec![], moved: vec![] };
        for (n, (name, disk)) in wanted.into_iter().enumerate() {
            let own_progress = file_progress(&progress, &lengths, n);
            let path = dir.join(name);
            pull::make_partial(&path).map_err(|e| ImageError::io("resume", &path, e))?;
            let moved = pull::pull_file(&self.session, disk, &path, &self.options, &own_progress).await?;
            all.disks.push(disk.clone());
            all.moved.extend(moved);
        }
        Ok(all.report(self.digest))
    }
}

/// Writes configuration and manifest. Pure.
fn write(files: &[SnapshotFile], disks: &[Disk], about: &Value, base: &SnapshotBase) -> (Vec<u8>, Vec<u8>) {
    let both = || files.iter().zip(disks);
    let listed: Vec<Value> = both()
        .map(|(file, disk)| json!({"name": file.name, "bytes": disk.bytes, "windowBytes": disk.chunk_bytes}))
        .collect();
    let config = json!({"schemaVersion": 1, "files": listed, "snapshot": about}).to_string().into_bytes();
    let mut layers = Vec::new();
    for (file, disk) in both() {
        for chunk in &disk.chunks {
            let mut layer = artifact::layer(chunk);
            layer["annotations"][TITLE] = file.name.clone().into();
            layers.push(layer);
        }
    }
    if layers.is_empty() {
        layers.push(artifact::empty_layer());
    }
    let mut manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": ARTIFACT,
        "config": {"mediaType": CONFIG, "digest": Digest::of(&config).to_string(), "size": config.len()},
        "layers": layers,
        "annotations": {
            "org.opencontainers.image.base.name": base.name,
            "org.opencontainers.image.base.digest": base.digest,
        },
    });
    if let Some(base) = &base.manifest {
        manifest["subject"] = json!(base);
    }
    (config, manifest.to_string().into_bytes())
}

/// Parses properties and files. Pure.
fn read(manifest: &Value, config: &Value) -> Result<(Value, Vec<(String, Disk)>), ImageError> {
    if config["schemaVersion"] != 1 {
        return Err(ImageError::unsupported("snapshot of a newer version"));
    }
    let listed = config["files"].as_array().filter(|all| all.len() <= FILES_MAX);
    let mut files: Vec<(String, Disk)> = Vec::new();
    for file in listed.ok_or_else(|| artifact::invalid("list of files"))? {
        let name = file["name"].as_str().filter(|n| is_name(n) && files.iter().all(|(known, _)| known != n));
        let name = name.ok_or_else(|| artifact::invalid("name of a file"))?;
        let number = |key: &str, max: u64| artifact::number(&file[key]).filter(|n| *n <= max);
        let bytes = number("bytes", artifact::DISK_MAX).ok_or_else(|| artifact::invalid("size of a file"))?;
        let chunk_bytes = artifact::number(&file["windowBytes"]).filter(|n| chunk::is_read(bytes, *n));
        let chunk_bytes = chunk_bytes.ok_or_else(|| artifact::invalid("size of chunks"))?;
        let chunks = artifact::chunks_of(manifest, |layer| layer["annotations"][TITLE] == name)?;
        files.push((name.to_owned(), Disk { bytes, chunk_bytes, chunks }.sort_and_check()?));
    }
    Ok((config["snapshot"].clone(), files))
}

/// True for a plain file name.
fn is_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    !name.is_empty() && name.len() <= 100 && !name.starts_with('.') && name.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::super::artifact::Chunk;
    use super::*;

    fn example() -> (Value, Value) {
        let chunk = |raw: u8| Chunk {
            part: 0..100,
            raw: Digest::of(&[raw]),
            blob: Digest::of(&[raw, 0]),
            blob_bytes: 50,
        };
        let file = |name: &str| SnapshotFile { name: name.into(), path: PathBuf::new() };
        let disk = |raw| Disk { bytes: 1000, chunk_bytes: 1 << 20, chunks: vec![chunk(raw)] };
        let about = json!({"machine": {"driver": "qemu"}});
        let digest = Digest::of(b"app");
        let manifest = Some(Descriptor { media_type: MANIFEST.to_owned(), digest, size_bytes: 3 });
        let base = SnapshotBase { name: "app:1".to_owned(), digest: digest.to_string(), manifest };
        let (config, manifest) =
            write(&[file("memory"), file("disk.ext4")], &[disk(1), disk(2)], &about, &base);
        (serde_json::from_slice(&manifest).unwrap(), serde_json::from_slice(&config).unwrap())
    }

    #[test]
    fn snapshot_manifest_round_trip() {
        let (manifest, config) = example();
        let (about, files) = read(&manifest, &config).unwrap();
        assert_eq!(about["machine"]["driver"], "qemu");
        let names: Vec<_> = files.iter().map(|(name, disk)| (name.as_str(), disk.chunks[0].raw)).collect();
        assert_eq!(names, [("memory", Digest::of(&[1])), ("disk.ext4", Digest::of(&[2]))]);
        assert_eq!(manifest["annotations"]["org.opencontainers.image.base.name"], "app:1");
        let base = json!({"mediaType": MANIFEST, "digest": Digest::of(b"app").to_string(), "size": 3});
        assert_eq!(manifest["subject"], base);
    }

    #[test]
    fn invalid_configuration_table() {
        let (manifest, good) = example();
        type Change = fn(&mut Value);
        let changes: [(&str, Change); 9] = [
            ("chunks of a byte", |c| c["files"][0]["windowBytes"] = 1.into()),
            ("more chunks than are read", |c| c["files"][0]["bytes"] = (5u64 << 30).into()),
            ("a path", |c| c["files"][0]["name"] = "../../etc/cron.d/x".into()),
            ("a hidden name", |c| c["files"][0]["name"] = ".part".into()),
            ("no name", |c| c["files"][0]["name"] = "".into()),
            ("the same name twice", |c| c["files"][0]["name"] = "disk.ext4".into()),
            ("a chunk file_progress the end", |c| c["files"][0]["bytes"] = 50.into()),
            ("an endless file", |c| c["files"][0]["bytes"] = u64::MAX.into()),
            ("too many files", |c| c["files"] = json!(vec![c["files"][0].clone(); 65])),
        ];
        for (why, change) in changes {
            let mut config = good.clone();
            change(&mut config);
            assert!(read(&manifest, &config).is_err(), "{why}");
        }
    }
}
