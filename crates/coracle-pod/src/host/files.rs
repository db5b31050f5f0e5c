//! Directories of a pod on its node.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use coracle_record::ContainerRecord;
use jiff::Timestamp;

use crate::container_spec::key;
use crate::runtime::RuntimeError;
use crate::volume::Area;
use crate::volume::{MeasuredVolume, VolumeContent, writer};

/// Limits of the part of a log that serves as the termination message (API reference of Container, terminationMessagePolicy).
const LOG_BYTES_MAX: usize = 2048;
const LOG_LINES_MAX: usize = 80;
/// Most bytes that are read from the end of a log: 80 lines with their timestamps and tags.
const LOG_READ_MAX: u64 = 32 << 10;
/// Unit of `st_blocks` (stat(2)).
const BLOCK_BYTES: u64 = 512;

/// Directories of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodDirs {
    /// Directory on the node's disk.
    pub disk: PathBuf,
    /// Directory in the node's memory (tmpfs): secrets never reach a disk.
    pub memory: PathBuf,
}

impl PodDirs {
    /// Returns the directories of a pod, below those of all pods.
    #[must_use]
    pub fn of(disk: &Path, memory: &Path, uid: &str) -> Self {
        Self { disk: disk.join(uid), memory: memory.join(uid) }
    }

    /// Returns a directory that is attached to the VM as a volume.
    #[must_use]
    pub fn area(&self, area: Area) -> PathBuf {
        let root = match area {
            Area::Data => &self.disk,
            Area::Config => &self.memory,
        };
        root.join(area.name())
    }

    async fn blocking<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Self) -> io::Result<T> + Send + 'static,
    ) -> Result<T, RuntimeError> {
        let own = self.clone();
        let done = coracle_files::blocking(move || work(&own)).await;
        done.map_err(|error| RuntimeError::other(format!("cannot {what}: {error}")))
    }

    /// Creates all directories, which only the daemon's user can read. Idempotent.
    pub(super) async fn make(&self) -> Result<(), RuntimeError> {
        self.blocking("make the directories of the pod", Self::create_directories_blocking).await
    }

    fn create_directories_blocking(&self) -> io::Result<()> {
        for root in [&self.disk, &self.memory] {
            std::fs::create_dir_all(root)?;
            std::fs::set_permissions(root, std::fs::Permissions::from_mode(0o700))?;
        }
        [Area::Config, Area::Data].into_iter().try_for_each(|area| std::fs::create_dir_all(self.area(area)))
    }

    /// Brings a volume into its desired state. Idempotent.
    pub(super) async fn write(&self, content: VolumeContent, now: Timestamp) -> Result<(), RuntimeError> {
        let write = move |own: &Self| {
            own.create_directories_blocking()?;
            writer::write(&own.area(content.area), &content, now)
        };
        self.blocking("write a volume", write).await
    }

    /// Returns the disk usage of volumes in bytes, by name.
    pub(super) async fn measure(
        &self,
        volumes: Vec<MeasuredVolume>,
    ) -> Result<BTreeMap<String, u64>, RuntimeError> {
        let measure = move |own: &Self| {
            let bytes = |volume: MeasuredVolume| {
                let held = disk_usage(&own.area(volume.area).join(&volume.path))?;
                Ok((volume.name, held))
            };
            volumes.into_iter().map(bytes).collect()
        };
        self.blocking("measure volumes", measure).await
    }

    /// Removes all directories. Idempotent.
    pub(super) async fn remove(&self) -> Result<(), RuntimeError> {
        let remove = |own: &Self| {
            coracle_files::remove_tree(&own.memory)?;
            coracle_files::remove_tree(&own.disk)
        };
        self.blocking("remove the directories of the pod", remove).await
    }
}

/// Returns the disk usage of a directory that the guest writes, as du(1) counts it: hard links to one file count once, symbolic
/// links count as themselves. Files that the guest removes meanwhile do not count. Blocking.
fn disk_usage(dir: &Path) -> io::Result<u64> {
    let (mut total, mut seen, mut left) = (0, BTreeSet::new(), vec![dir.to_owned()]);
    while let Some(dir) = left.pop() {
        let entries = match std::fs::read_dir(&dir) {
            Err(error) if is_gone(&error) => continue,
            entries => entries?,
        };
        for entry in entries {
            let metadata = match entry.and_then(|entry| Ok((entry.path(), entry.metadata()?))) {
                Err(error) if is_gone(&error) => continue,
                found => found?,
            };
            let (path, metadata) = metadata;
            if metadata.is_dir() {
                left.push(path);
            }
            if metadata.nlink() == 1 || metadata.is_dir() || seen.insert((metadata.dev(), metadata.ino())) {
                total += metadata.blocks() * BLOCK_BYTES;
            }
        }
    }
    Ok(total)
}

/// Returns whether the file was removed, or replaced by one of another type.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Returns whether the end of a container's log serves as its termination message. Pure.
pub(super) fn is_message_in_log(record: &ContainerRecord) -> bool {
    let policy = record.spec.metadata.get(key::MESSAGE_POLICY).map(String::as_str);
    let has_failed = record.exit.as_ref().is_some_and(|exit| exit.code != 0);
    record.termination_message.is_empty() && has_failed && policy == Some("FallbackToLogsOnError")
}

/// Returns the last lines of a log in CRI format, without timestamps and tags. Blocking.
pub(super) fn log_end(log: &Path) -> io::Result<String> {
    use std::io::{Read, Seek, SeekFrom};
    let mut file = std::fs::File::open(log)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_READ_MAX)))?;
    let mut bytes = Vec::new();
    file.take(LOG_READ_MAX).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let content = |line: &str| line.splitn(4, ' ').nth(3).map(str::to_owned);
    let lines: Vec<_> = text.lines().filter_map(content).collect();
    let last = lines[lines.len().saturating_sub(LOG_LINES_MAX)..].join("\n");
    let mut start = last.len().saturating_sub(LOG_BYTES_MAX);
    while !last.is_char_boundary(start) {
        start += 1;
    }
    Ok(last[start..].to_owned())
}

#[cfg(test)]
mod tests {
    use coracle_host::{ContainerSpec, Exit};
    use coracle_types::UnixMillis;

    use super::*;

    fn record(policy: &str, code: i32) -> ContainerRecord {
        let metadata = [(key::MESSAGE_POLICY.to_owned(), policy.to_owned())].into();
        let spec = ContainerSpec { metadata, ..ContainerSpec::default() };
        let mut record = ContainerRecord::new("c".parse().unwrap(), spec, String::new(), UnixMillis(0));
        record.exit = Some(Exit { code, ..Exit::default() });
        record
    }

    #[test]
    fn termination_message_falls_back_to_logs_table() {
        for (policy, code, message, want) in [
            ("File", 1, "", false),
            ("FallbackToLogsOnError", 0, "", false),
            ("FallbackToLogsOnError", 1, "", true),
            ("FallbackToLogsOnError", 1, "bye", false),
        ] {
            let record = ContainerRecord { termination_message: message.into(), ..record(policy, code) };
            assert_eq!(is_message_in_log(&record), want, "{policy} {code} {message:?}");
        }
    }

    #[tokio::test]
    async fn pod_directory_removal_is_idempotent() {
        let root = tempfile::tempdir().unwrap();
        let dirs = PodDirs::of(&root.path().join("disk"), &root.path().join("memory"), "u");
        dirs.make().await.unwrap();
        dirs.remove().await.unwrap();
        dirs.remove().await.unwrap();
        assert!(!root.path().join("disk/u").exists() && !root.path().join("memory/u").exists());
    }

    #[test]
    fn volume_is_measured_without_following_links() {
        let root = tempfile::tempdir().unwrap();
        let (volume, outside) = (root.path().join("volume"), root.path().join("outside"));
        std::fs::create_dir_all(volume.join("a/b")).unwrap();
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("large"), vec![1; 1 << 20]).unwrap();
        std::fs::write(volume.join("a/b/file"), vec![1; 100 << 10]).unwrap();
        std::fs::hard_link(volume.join("a/b/file"), volume.join("again")).unwrap();
        std::os::unix::fs::symlink(&outside, volume.join("link")).unwrap();
        std::fs::File::create(volume.join("sparse")).unwrap().set_len(1 << 30).unwrap();
        let held = disk_usage(&volume).unwrap();
        assert!((100 << 10..200 << 10).contains(&held), "{held}");
        assert_eq!(disk_usage(&root.path().join("absent")).unwrap(), 0);
    }

    #[test]
    fn end_of_a_log_is_bounded() {
        let root = tempfile::tempdir().unwrap();
        let log = root.path().join("log");
        let lines: String = (0..200).map(|n| format!("t stdout F line {n}\n")).collect();
        std::fs::write(&log, lines).unwrap();
        let end = log_end(&log).unwrap();
        assert!(end.starts_with("line 120\n") && end.ends_with("line 199"), "{end}");
        std::fs::write(&log, format!("t stdout F {}\n", "ü".repeat(3000))).unwrap();
        assert!(log_end(&log).unwrap().len() <= LOG_BYTES_MAX);
        let line = |stream, words| format!("2026-01-01T00:00:00.000000000Z {stream} F {words}\n");
        std::fs::write(&log, [line("stdout", "one"), line("stderr", "two words")].concat()).unwrap();
        assert_eq!(log_end(&log).unwrap(), "one\ntwo words");
    }
}
