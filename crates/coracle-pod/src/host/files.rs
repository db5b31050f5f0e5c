//! Directories of a pod on its node.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use coracle_record::{ContainerId, ContainerRecord};
use jiff::Timestamp;

use crate::container_spec::{key, termination_file};
use crate::runtime::RuntimeError;
use crate::volume::Area;
use crate::volume::{VolumeContent, beneath, writer};

/// Longest termination message, and what of a log stands for one (API reference of Container, terminationMessagePolicy).
const MESSAGE_MAX: u64 = 4096;
const LOG_BYTES_MAX: usize = 2048;
const LOG_LINES_MAX: usize = 80;
/// Most of a log's end that is read: 80 lines with the times and tags before them.
const LOG_READ_MAX: u64 = 32 << 10;

/// Where the files of a pod are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodDirs {
    /// On the node's disk.
    pub disk: PathBuf,
    /// In the node's memory (tmpfs): secrets never reach a disk.
    pub memory: PathBuf,
}

impl PodDirs {
    /// Those of a pod below the directories of all pods.
    #[must_use]
    pub fn of(disk: &Path, memory: &Path, uid: &str) -> Self {
        Self { disk: disk.join(uid), memory: memory.join(uid) }
    }

    /// A directory that the VM gets as a volume.
    #[must_use]
    pub fn area(&self, area: Area) -> PathBuf {
        let root = match area {
            Area::Data => &self.disk,
            Area::Config | Area::Memory => &self.memory,
        };
        root.join(area.name())
    }

    async fn blocking(
        &self,
        what: &'static str,
        work: impl FnOnce(&Self) -> io::Result<()> + Send + 'static,
    ) -> Result<(), RuntimeError> {
        let own = self.clone();
        let done = coracle_files::blocking(move || work(&own)).await;
        done.map_err(|error| RuntimeError::other(format!("cannot {what}: {error}")))
    }

    /// Makes all of them. Others than the daemon cannot look into them. Idempotent.
    pub(super) async fn make(&self) -> Result<(), RuntimeError> {
        self.blocking("make the directories of the pod", Self::make_now).await
    }

    fn make_now(&self) -> io::Result<()> {
        for root in [&self.disk, &self.memory] {
            std::fs::create_dir_all(root)?;
            std::fs::set_permissions(root, std::fs::Permissions::from_mode(0o700))?;
        }
        [Area::Config, Area::Data, Area::Memory]
            .into_iter()
            .try_for_each(|area| std::fs::create_dir_all(self.area(area)))
    }

    /// Brings a volume into its desired state. Idempotent.
    pub(super) async fn write(&self, content: VolumeContent, now: Timestamp) -> Result<(), RuntimeError> {
        let write = move |own: &Self| {
            own.make_now()?;
            writer::write(&own.area(content.area), &content, now)
        };
        self.blocking("write a volume", write).await
    }

    /// Makes empty files that every user of a container can write.
    pub(super) async fn make_files(&self, files: Vec<String>) -> Result<(), RuntimeError> {
        let make = move |own: &Self| {
            let data = own.area(Area::Data);
            files.iter().try_for_each(|path| beneath::write_in_place(&data, path, b"", 0o666))
        };
        self.blocking("make files of a container", make).await
    }

    pub(super) async fn remove_message(&self, id: ContainerId) -> Result<(), RuntimeError> {
        let remove = move |own: &Self| beneath::remove(&own.area(Area::Data), &termination_file(&id));
        self.blocking("remove files of a container", remove).await
    }

    /// Removes all of them. Idempotent.
    pub(super) async fn remove(&self) -> Result<(), RuntimeError> {
        let remove = |own: &Self| {
            coracle_files::remove_tree(&own.memory)?;
            coracle_files::remove_tree(&own.disk)
        };
        self.blocking("remove the directories of the pod", remove).await
    }
}

/// What a container left as its message: its file, or the end of its log where its policy says so and it failed. Bounded and
/// lossy: guests are hostile. Blocking.
pub(super) fn termination_message(dirs: &PodDirs, record: &ContainerRecord, log: &Path) -> String {
    let read = beneath::read_at_most(&dirs.area(Area::Data), &termination_file(&record.id), MESSAGE_MAX);
    let message = read.unwrap_or_else(|error| {
        tracing::warn!(container = %record.id, %error, "read termination message failed");
        vec![]
    });
    let policy = record.spec.metadata.get(key::MESSAGE_POLICY).map(String::as_str);
    let has_failed = record.exit.as_ref().is_some_and(|exit| exit.code != 0);
    if message.is_empty() && has_failed && policy == Some("FallbackToLogsOnError") {
        return log_end(log).unwrap_or_default();
    }
    String::from_utf8_lossy(&message).into_owned()
}

/// The last lines of a log in CRI format, without times and tags.
fn log_end(log: &Path) -> io::Result<String> {
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

    #[tokio::test]
    async fn message_comes_from_the_file_or_the_log() {
        let root = tempfile::tempdir().unwrap();
        let dirs = PodDirs::of(&root.path().join("disk"), &root.path().join("memory"), "u");
        dirs.make().await.unwrap();
        let log = root.path().join("log");
        std::fs::write(&log, "2026-01-01T00:00:00.000000000Z stdout F one\n2026-01-01T00:00:00.000000000Z stderr F two words\n")
            .unwrap();
        let of = |policy, code| termination_message(&dirs, &record(policy, code), &log);
        assert_eq!(of("File", 1), "");
        assert_eq!(of("FallbackToLogsOnError", 0), "");
        assert_eq!(of("FallbackToLogsOnError", 1), "one\ntwo words");
        dirs.make_files(vec!["termination/c".into()]).await.unwrap();
        std::fs::write(dirs.area(Area::Data).join("termination/c"), "x".repeat(5000)).unwrap();
        assert_eq!(of("FallbackToLogsOnError", 1).len(), 4096);
        dirs.remove_message("c".parse().unwrap()).await.unwrap();
        dirs.remove().await.unwrap();
        dirs.remove().await.unwrap();
        assert_eq!(of("File", 1), "");
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
    }
}
