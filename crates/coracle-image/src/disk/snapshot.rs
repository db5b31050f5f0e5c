//! Snapshots in registries: files in windows, as disks are, and what must be alike where they are restored.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use serde_json::{Value, json};

use super::{
    DiskOptions, DiskProgress, DiskReport,
    artifact::{self, CONFIG_MAX, Disk, MANIFEST, TITLE},
    pull,
    push::{self, Moved},
};
use crate::{
    Descriptor, Digest, ImageError, Reference,
    registry::{Operation, Session, fetch_small_of},
};

const ARTIFACT: &str = "application/vnd.coracle.snapshot.v1+json";
const CONFIG: &str = "application/vnd.coracle.snapshot.config.v1+json";
/// Most files of a snapshot.
const FILES_MAX: usize = 64;

/// A file of a snapshot on this host.
#[derive(Clone, Debug)]
pub struct SnapshotFile {
    /// Its name in the snapshot.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
}

/// The image that a snapshot was made from.
#[derive(Clone, Debug)]
pub struct SnapshotBase {
    /// Its name.
    pub name: String,
    /// Its digest.
    pub digest: String,
    /// Its manifest, where it has one: the snapshot is listed among those who refer to it.
    pub manifest: Option<Descriptor>,
}

/// A snapshot in a registry, before its files are fetched.
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

/// Pushes a snapshot: `files` in windows, `about` as whoever restores it wants to read it first. Windows that the tag had
/// before are not moved again. Idempotent.
///
/// # Errors
/// [`ImageError::Io`] for the files; those of the registry.
pub async fn push_snapshot(
    files: &[SnapshotFile],
    about: &Value,
    base: &SnapshotBase,
    reference: &Reference,
    options: &DiskOptions,
    progress: DiskProgress,
) -> Result<DiskReport, ImageError> {
    let session = Arc::new(pull::open(reference, options, Operation::Push).await?);
    let known = Arc::new(push::before(&session, reference).await);
    let mut all = Moved { disks: vec![], moved: vec![] };
    let lengths = lengths(files)?;
    for (n, file) in files.iter().enumerate() {
        let heard = behind(&progress, &lengths, n);
        let (disk, moved) = push::file_from(&session, &file.path, &known, options, &heard).await?;
        all.disks.push(disk);
        all.moved.extend(moved);
    }
    let (config, manifest) = write(files, &all.disks, about, base);
    let empty = all.disks.iter().all(|d| d.windows.is_empty());
    let size = manifest.len() as u64;
    let sealed = push::seal(&session, reference, config, manifest, empty).await?;
    if let Some(base) = base.manifest.as_ref().filter(|_| !sealed.is_listed) {
        let own = Descriptor { media_type: MANIFEST.to_owned(), digest: sealed.digest, size };
        session.list_referrer(&base.digest, &own, ARTIFACT).await?;
    }
    Ok(all.report(sealed.digest))
}

fn lengths(files: &[SnapshotFile]) -> Result<Vec<u64>, ImageError> {
    let length = |file: &SnapshotFile| {
        let found = std::fs::metadata(&file.path);
        found.map(|m| m.len()).map_err(|e| ImageError::io("look at", &file.path, e))
    };
    files.iter().map(length).collect()
}

/// Progress of one file, told as that of all.
fn behind(progress: &DiskProgress, lengths: &[u64], n: usize) -> DiskProgress {
    let (progress, total) = (Arc::clone(progress), lengths.iter().sum::<u64>());
    let before: u64 = lengths.iter().take(n).sum();
    let own = lengths.get(n).copied().unwrap_or(0);
    Arc::new(move |done, of| {
        // A file's windows are less than its length where it has holes.
        let done = if of == 0 { own } else { own.saturating_sub(of) + done };
        progress((before + done).min(total), total);
    })
}

/// Looks a snapshot up, so that a caller can refuse it before anything of it is moved.
///
/// # Errors
/// [`ImageError::Unsupported`] for what is no snapshot of ours; [`ImageError::Hostile`]; those of the registry.
pub async fn find_snapshot(
    reference: &Reference,
    options: &DiskOptions,
) -> Result<RemoteSnapshot, ImageError> {
    let session = Arc::new(pull::open(reference, options, Operation::Pull).await?);
    let bytes = session.manifest(&reference.api_name(), pull::MANIFEST_MAX).await?.bytes;
    let manifest = artifact::parse(&bytes, "manifest")?;
    if manifest["artifactType"] != ARTIFACT || manifest["config"]["mediaType"] != CONFIG {
        return Err(ImageError::unsupported("what is no snapshot of ours"));
    }
    let size = artifact::number(&manifest["config"]["size"]).filter(|n| *n <= CONFIG_MAX);
    let size = size.ok_or_else(|| artifact::wrong("the configuration's size"))?;
    let config = fetch_small_of(&session, &artifact::digest(&manifest["config"]["digest"])?, size).await?;
    let (about, files) = read(&manifest, &artifact::parse(&config, "configuration")?)?;
    Ok(RemoteSnapshot { session, digest: Digest::of(&bytes), about, files, options: options.clone() })
}

impl RemoteSnapshot {
    /// What its maker said of it.
    #[must_use]
    pub fn about(&self) -> &Value {
        &self.about
    }

    /// Bytes of one of its files, with its holes.
    #[must_use]
    pub fn bytes_of(&self, name: &str) -> Option<u64> {
        self.files.iter().find(|(known, _)| known == name).map(|(_, disk)| disk.bytes)
    }

    /// Fetches the files `names` into the folder `dir`, each verified, sparse, whole and synced when this returns; what
    /// is there of an earlier try is used. Its other files are left where they are.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`] when it lacks one of them; as [`crate::pull_disk`].
    pub async fn fetch(
        &self,
        names: &[&str],
        dir: &Path,
        progress: DiskProgress,
    ) -> Result<DiskReport, ImageError> {
        let missing = |name: &str| ImageError::unsupported(format!("a snapshot without the file {name}"));
        let find =
            |name: &&str| self.files.iter().find(|(known, _)| known == name).ok_or_else(|| missing(name));
        let wanted = names.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        let lengths: Vec<u64> = wanted.iter().map(|(_, disk)| disk.bytes).collect();
        let mut all = Moved { disks: vec![], moved: vec![] };
        for (n, (name, disk)) in wanted.into_iter().enumerate() {
            let heard = behind(&progress, &lengths, n);
            let (at_once, path) = (self.options.at_once(disk.window_bytes), dir.join(name));
            pull::reopen(&path).map_err(|e| ImageError::io("go on with", &path, e))?;
            let moved = pull::file_into(&self.session, disk, &path, at_once, &heard).await?;
            all.disks.push(disk.clone());
            all.moved.extend(moved);
        }
        Ok(all.report(self.digest))
    }
}

/// Bytes of configuration and manifest. Pure.
fn write(files: &[SnapshotFile], disks: &[Disk], about: &Value, base: &SnapshotBase) -> (Vec<u8>, Vec<u8>) {
    let both = || files.iter().zip(disks);
    let listed: Vec<Value> = both()
        .map(|(file, disk)| json!({"name": file.name, "bytes": disk.bytes, "windowBytes": disk.window_bytes}))
        .collect();
    let config = json!({"schemaVersion": 1, "files": listed, "snapshot": about}).to_string().into_bytes();
    let mut layers = Vec::new();
    for (file, disk) in both() {
        for window in &disk.windows {
            let mut layer = artifact::layer(window);
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

/// What is said of a snapshot, and its files. Pure.
fn read(manifest: &Value, config: &Value) -> Result<(Value, Vec<(String, Disk)>), ImageError> {
    if config["schemaVersion"] != 1 {
        return Err(ImageError::unsupported("a snapshot of a newer version"));
    }
    let listed = config["files"].as_array().filter(|all| all.len() <= FILES_MAX);
    let mut files: Vec<(String, Disk)> = Vec::new();
    for file in listed.ok_or_else(|| artifact::wrong("the list of files"))? {
        let name = file["name"].as_str().filter(|n| is_name(n) && files.iter().all(|(known, _)| known != n));
        let name = name.ok_or_else(|| artifact::wrong("a file's name"))?;
        let number = |key: &str, max: u64| artifact::number(&file[key]).filter(|n| *n <= max);
        let bytes = number("bytes", artifact::DISK_MAX).ok_or_else(|| artifact::wrong("a file's size"))?;
        let window_bytes = number("windowBytes", artifact::WINDOW_MAX).filter(|n| *n > 0);
        let window_bytes = window_bytes.ok_or_else(|| artifact::wrong("the window's size"))?;
        let windows = artifact::windows_of(manifest, |layer| layer["annotations"][TITLE] == name)?;
        files.push((name.to_owned(), Disk { bytes, window_bytes, windows }.checked()?));
    }
    Ok((config["snapshot"].clone(), files))
}

/// A plain name: it becomes a file's.
fn is_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    !name.is_empty() && name.len() <= 100 && !name.starts_with('.') && name.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::super::artifact::Window;
    use super::*;

    fn example() -> (Value, Value) {
        let window = |raw: u8| Window {
            part: 0..100,
            raw: Digest::of(&[raw]),
            blob: Digest::of(&[raw, 0]),
            blob_bytes: 50,
        };
        let file = |name: &str| SnapshotFile { name: name.into(), path: PathBuf::new() };
        let disk = |raw| Disk { bytes: 1000, window_bytes: 100, windows: vec![window(raw)] };
        let about = json!({"machine": {"driver": "qemu"}});
        let digest = Digest::of(b"app");
        let manifest = Some(Descriptor { media_type: MANIFEST.to_owned(), digest, size: 3 });
        let base = SnapshotBase { name: "app:1".to_owned(), digest: digest.to_string(), manifest };
        let (config, manifest) =
            write(&[file("memory"), file("disk.ext4")], &[disk(1), disk(2)], &about, &base);
        (serde_json::from_slice(&manifest).unwrap(), serde_json::from_slice(&config).unwrap())
    }

    #[test]
    fn what_is_written_is_read() {
        let (manifest, config) = example();
        let (about, files) = read(&manifest, &config).unwrap();
        assert_eq!(about["machine"]["driver"], "qemu");
        let names: Vec<_> = files.iter().map(|(name, disk)| (name.as_str(), disk.windows[0].raw)).collect();
        assert_eq!(names, [("memory", Digest::of(&[1])), ("disk.ext4", Digest::of(&[2]))]);
        assert_eq!(manifest["annotations"]["org.opencontainers.image.base.name"], "app:1");
        let base = json!({"mediaType": MANIFEST, "digest": Digest::of(b"app").to_string(), "size": 3});
        assert_eq!(manifest["subject"], base);
    }

    #[test]
    fn hostile_configurations_are_refused() {
        let (manifest, good) = example();
        type Change = fn(&mut Value);
        let changes: [(&str, Change); 7] = [
            ("a path", |c| c["files"][0]["name"] = "../../etc/cron.d/x".into()),
            ("a hidden name", |c| c["files"][0]["name"] = ".part".into()),
            ("no name", |c| c["files"][0]["name"] = "".into()),
            ("the same name twice", |c| c["files"][0]["name"] = "disk.ext4".into()),
            ("a window behind the end", |c| c["files"][0]["bytes"] = 50.into()),
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
