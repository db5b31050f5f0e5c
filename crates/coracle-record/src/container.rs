//! The record of a container, `vms/<id>/containers/<cid>.json`, and of the sandbox that it belongs to.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use coracle_types::{IdMapping, UnixMillis};
use serde::{Deserialize, Serialize};

use crate::{Exit, Workload};

/// Maximum length of a container id, bytes.
const ID_MAX: usize = 64;

/// Maximum length of a termination message, bytes (Kubernetes API reference, Container, terminationMessagePath).
pub const TERMINATION_MESSAGE_MAX: usize = 4096;

/// Pod sandbox settings of a VM that starts without containers. Only an explicit stop ends the VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Sandbox {
    /// Name servers; empty: those of the node.
    pub nameservers: Vec<String>,
    /// Search domains of the resolver.
    pub search_domains: Vec<String>,
    /// Options of the resolver, resolv.conf(5).
    pub resolver_options: Vec<String>,
    /// Kernel parameters of the guest, by sysctl(8) name.
    pub sysctls: BTreeMap<String, String>,
    /// Content of /etc/hosts; `None`: the default of all guests.
    pub hosts: Option<HostsFile>,
}

/// Content of /etc/hosts, apart from the VM's addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HostsFile {
    /// Lines before the VM's own entries, each with its line feed.
    pub before: String,
    /// Host names for each address of the VM, in order.
    pub names: Vec<String>,
    /// Lines after the VM's own entries, each with its line feed.
    pub after: String,
}

impl HostsFile {
    /// Returns the complete file, hosts(5). Pure.
    #[must_use]
    pub fn text(&self, addresses: &[IpAddr]) -> String {
        let names = self.names.join("\t");
        let own: String = addresses.iter().map(|address| format!("{address}\t{names}\n")).collect();
        [&self.before, own.as_str(), &self.after].concat()
    }
}

/// Image that is attached to a device slot of the VM. All containers of one image share the slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AttachedImage {
    /// Manifest digest of the image.
    pub digest: String,
    /// Root file system of the image.
    pub rootfs: PathBuf,
    /// Device slot.
    pub slot: usize,
}

/// Id of a container in its VM: 1 to 64 of `a-z`, `0-9` and `-`. Safe as a file name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContainerId(String);

/// Error for a text that is not a container id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid container id {0:?}: not 1 to {ID_MAX} of a-z, 0-9 and -")]
pub struct InvalidContainerId(String);

impl ContainerId {
    /// Returns the id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ContainerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ContainerId {
    type Err = InvalidContainerId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        match (1..=ID_MAX).contains(&text.len()) && text.bytes().all(plain) && !text.starts_with('-') {
            true => Ok(Self(text.to_owned())),
            false => Err(InvalidContainerId(text.to_owned())),
        }
    }
}

impl TryFrom<String> for ContainerId {
    type Error = InvalidContainerId;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<ContainerId> for String {
    fn from(id: ContainerId) -> Self {
        id.0
    }
}

/// Lifecycle state of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ContainerState {
    /// The root is mounted; no process runs.
    #[default]
    Created,
    /// The process runs.
    Running,
    /// The process has ended.
    Exited,
}

/// Containers of a VM by id. Each record is allocated separately: a map node has room for eleven values, and most VMs have one
/// container.
pub type ContainerRecords = BTreeMap<ContainerId, Arc<ContainerRecord>>;

/// Persistent state of a container.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecord {
    /// Id within the VM.
    pub id: ContainerId,
    /// Spec that the container was created from.
    pub spec: ContainerSpec,
    /// Manifest digest that the image reference resolved to at creation.
    pub image_digest: String,
    /// Lifecycle state.
    pub state: ContainerState,
    /// Creation time.
    pub created_at: UnixMillis,
    /// Start time of the process.
    #[serde(default)]
    pub started_at: Option<UnixMillis>,
    /// End time of the process.
    #[serde(default)]
    pub finished_at: Option<UnixMillis>,
    /// Exit status of the process.
    #[serde(default)]
    pub exit: Option<Exit>,
    /// Whether the kernel's OOM killer killed a process of the container.
    #[serde(default)]
    pub oom_killed: bool,
    /// Content of the termination message file: at most [`TERMINATION_MESSAGE_MAX`] bytes, with invalid UTF-8 replaced.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub termination_message: String,
    /// User and groups of the process, resolved with the image's user database; `None`: not known.
    #[serde(default)]
    pub user: Option<ProcessUser>,
}

/// Container requested by a caller.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerSpec {
    /// Image reference as written by the caller.
    pub image: String,
    /// Process to run.
    pub process: Workload,
    /// The standard streams are a terminal.
    pub tty: bool,
    /// Standard input stays open.
    pub stdin: bool,
    /// Standard input is closed when the input of the first attachment ends.
    pub stdin_once: bool,
    /// Groups of the process, beside `groups`.
    pub groups_policy: GroupsPolicy,
    /// Supplementary groups beside those of the policy.
    pub groups: Vec<u32>,
    /// The root file system is read-only.
    pub read_only_root: bool,
    /// Mounts, in order.
    pub mounts: Vec<ContainerMount>,
    /// Privileges and restrictions.
    pub security: Security,
    /// Resource limits.
    pub resources: Resources,
    /// Processes that the container sees.
    pub pid_namespace: PidNamespace,
    /// Stop signal; 0: SIGTERM.
    pub stop_signal: i32,
    /// Number of the attempt, counted from 0.
    pub attempt: u32,
    /// Absolute path of the file whose end becomes the termination message; empty: none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub termination_message_path: String,
    /// Path of the log, in CRI format; `None`: `containers/<id>.log` of the VM.
    pub log_path: Option<PathBuf>,
    /// Opaque metadata of the caller, returned unchanged.
    pub metadata: BTreeMap<String, String>,
}

/// A mount of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerMount {
    /// Absolute path in the container.
    pub target: String,
    /// Whether the mount is read-only.
    #[serde(default)]
    pub read_only: bool,
    /// Source of the mount.
    pub source: ContainerMountSource,
}

/// Source of a container's mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ContainerMountSource {
    /// Volume of the VM, or a directory or file in it.
    Volume {
        /// Name of the volume.
        name: String,
        /// Path in the volume; empty: its root.
        #[serde(default)]
        sub_path: String,
    },
    /// File system in memory.
    Tmpfs {
        /// Size limit; 0: half of the guest's memory.
        #[serde(default)]
        size_bytes: u64,
        /// Mode of the root directory; 0: 01777.
        #[serde(default)]
        mode: u32,
    },
    /// Another image, or a directory or file in it. Always read-only.
    Image {
        /// Manifest digest of the image.
        digest: String,
        /// Path in the image; empty: its root.
        #[serde(default)]
        sub_path: String,
    },
}

/// Policy for the groups of a process beside those that a caller names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum GroupsPolicy {
    /// Groups that /etc/group of the image lists for the user; none if the user names a group.
    #[default]
    OfUser,
    /// The user's own group and the groups that /etc/group of the image lists for the user.
    Merge,
    /// Only the user's own group.
    Strict,
}

/// User and groups of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessUser {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary group ids.
    #[serde(default)]
    pub groups: Vec<u32>,
}

/// Privileges and restrictions of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Security {
    /// Capability mask: bit n stands for capability n; `None`: the default set of the OCI runtimes.
    pub capabilities: Option<u64>,
    /// Sets `no_new_privs`: execve(2) grants no further privileges.
    pub no_new_privileges: bool,
    /// Paths that are masked as empty.
    pub masked_paths: Vec<String>,
    /// Paths that are read-only.
    pub read_only_paths: Vec<String>,
    /// Resource limits by number, with soft and hard limit; `u64::MAX`: unlimited.
    pub rlimits: Vec<(u32, u64, u64)>,
    /// OOM score adjustment, -1000 to 1000.
    pub oom_score_adj: i32,
    /// Seccomp filter, classic BPF over `struct seccomp_data`; empty: no filter.
    pub seccomp: Vec<u8>,
    /// Privileged: all devices, writable /sys and cgroups.
    pub privileged: bool,
    /// Mapping of the container's user namespace to ids of the guest; `None`: the container uses the ids of the guest.
    pub user_namespace: Option<IdMapping>,
}

/// Resource limits of a container. `None`: unchanged; 0: no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Resources {
    /// CPU time per 100 ms, microseconds.
    pub cpu_quota_us: Option<u64>,
    /// CPU weight, 1 to 10000.
    pub cpu_weight: Option<u64>,
    /// Memory limit, bytes.
    pub memory_max_bytes: Option<u64>,
    /// Maximum number of processes and threads.
    pub pids_max: Option<u64>,
    /// Further files of the cgroup (cgroup v2) and the values to write to them.
    pub unified: BTreeMap<String, String>,
}

/// Processes that a container sees.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PidNamespace {
    /// A PID namespace of its own.
    #[default]
    Container,
    /// The PID namespace that all containers of the VM share.
    Pod,
    /// The PID namespace of another container.
    Target(ContainerId),
}

impl ContainerRecord {
    /// Returns the record of a container that was just created.
    #[must_use]
    pub fn new(id: ContainerId, spec: ContainerSpec, image_digest: String, created_at: UnixMillis) -> Self {
        Self {
            id,
            spec,
            image_digest,
            state: ContainerState::Created,
            created_at,
            started_at: None,
            finished_at: None,
            exit: None,
            oom_killed: false,
            termination_message: String::new(),
            user: None,
        }
    }

    /// Returns the manifest digests of the container's image and of the images that it mounts.
    pub fn images(&self) -> impl Iterator<Item = &str> {
        let mounted = self.spec.mounts.iter().filter_map(|mount| match &mount.source {
            ContainerMountSource::Image { digest, .. } => Some(digest.as_str()),
            ContainerMountSource::Volume { .. } | ContainerMountSource::Tmpfs { .. } => None,
        });
        std::iter::once(self.image_digest.as_str()).chain(mounted)
    }

    /// Marks the container as exited without a report of the guest: its process ended with the VM, or while the node had no
    /// session with the guest.
    pub fn lose(&mut self, why: &str, now: UnixMillis) {
        if self.state != ContainerState::Exited {
            (self.state, self.finished_at) = (ContainerState::Exited, Some(now));
            self.exit = Some(Exit { code: 255, signal: 0, error: why.to_owned() });
        }
    }

    /// Reads a record. Blocking.
    ///
    /// # Errors
    /// When the file is missing or invalid.
    pub fn load(path: &Path) -> io::Result<Self> {
        serde_json::from_slice(&std::fs::read(path)?).map_err(io::Error::from)
    }

    /// Writes the record atomically: a crash leaves the old or the new one. Blocking.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        coracle_files::write_atomic(path, &serde_json::to_vec_pretty(self)?)
    }

    /// Reads all records of a directory, by id. An unreadable record is reported and left alone. Blocking.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn load_all(dir: &Path) -> io::Result<ContainerRecords> {
        let mut all = BTreeMap::new();
        let entries = match std::fs::read_dir(dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(all),
            entries => entries?,
        };
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            match Self::load(&path) {
                Ok(record) => drop(all.insert(record.id.clone(), Arc::new(record))),
                Err(error) => tracing::error!(path = %path.display(), %error, "read container record failed"),
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_file_names() {
        for good in ["a", "web-1", "0"] {
            assert_eq!(good.parse::<ContainerId>().unwrap().as_str(), good);
        }
        let long = "a".repeat(65);
        for bad in ["", "-a", "Web", "a/b", "..", "a.json", long.as_str()] {
            assert!(bad.parse::<ContainerId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn records_survive_a_round_trip() {
        let dir = tempfile::tempdir().unwrap();
        let id: ContainerId = "web".parse().unwrap();
        let mount = ContainerMountSource::Volume { name: "data".into(), sub_path: String::new() };
        let spec = ContainerSpec {
            mounts: vec![ContainerMount { target: "/data".into(), read_only: true, source: mount }],
            pid_namespace: PidNamespace::Target(id.clone()),
            ..ContainerSpec::default()
        };
        let mut record = ContainerRecord::new(id.clone(), spec, "sha256:0".into(), UnixMillis(1));
        record.lose("the VM ended", UnixMillis(2));
        record.save(&dir.path().join("web.json")).unwrap();
        std::fs::write(dir.path().join("torn.json"), "{").unwrap();
        std::fs::write(dir.path().join("web.log"), "").unwrap();
        let all = ContainerRecord::load_all(dir.path()).unwrap();
        assert_eq!(all, [(id, Arc::new(record))].into());
        assert!(ContainerRecord::load_all(&dir.path().join("absent")).unwrap().is_empty());
    }

    #[test]
    fn loss_keeps_an_earlier_exit() {
        let id: ContainerId = "web".parse().unwrap();
        let mut record = ContainerRecord::new(id, ContainerSpec::default(), String::new(), UnixMillis(1));
        record.state = ContainerState::Exited;
        record.exit = Some(Exit { code: 3, ..Exit::default() });
        record.lose("the VM ended", UnixMillis(2));
        assert_eq!(record.exit.unwrap().code, 3);
    }
}
