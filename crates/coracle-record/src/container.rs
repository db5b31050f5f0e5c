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

/// Longest id, bytes.
const ID_MAX: usize = 64;

/// Longest termination message, bytes (Kubernetes API reference, Container, terminationMessagePath).
pub const TERMINATION_MESSAGE_MAX: usize = 4096;

/// A VM whose containers come later, and which only an explicit stop ends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Sandbox {
    /// Name servers; none: those of the node.
    pub nameservers: Vec<String>,
    /// Search domains of the resolver.
    pub search_domains: Vec<String>,
    /// Options of the resolver, resolv.conf(5).
    pub resolver_options: Vec<String>,
    /// Settings of the guest's kernel, by name as of sysctl(8).
    pub sysctls: BTreeMap<String, String>,
    /// Content of /etc/hosts; `None`: what every guest has.
    pub hosts: Option<HostsFile>,
}

/// Content of /etc/hosts, as far as it does not depend on the VM's addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HostsFile {
    /// Lines before those of the VM, each with its line feed.
    pub before: String,
    /// Names of each address of the VM, in order.
    pub names: Vec<String>,
    /// Lines after those of the VM, each with its line feed.
    pub after: String,
}

impl HostsFile {
    /// The whole content, hosts(5). Pure.
    #[must_use]
    pub fn text(&self, addresses: &[IpAddr]) -> String {
        let names = self.names.join("\t");
        let own: String = addresses.iter().map(|address| format!("{address}\t{names}\n")).collect();
        [&self.before, own.as_str(), &self.after].concat()
    }
}

/// An image of containers in a slot of their VM. All containers of one image share it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AttachedImage {
    /// Digest of its manifest.
    pub digest: String,
    /// Its root file system.
    pub rootfs: PathBuf,
    /// The slot.
    pub slot: usize,
}

/// Id of a container in its VM: 1 to 64 of `a-z`, `0-9` and `-`. Safe as a file name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContainerId(String);

/// A text that is not the id of a container.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid container id {0:?}: not 1 to {ID_MAX} of a-z, 0-9 and -")]
pub struct InvalidContainerId(String);

impl ContainerId {
    /// As text.
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

/// How far a container has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ContainerState {
    /// Its root is mounted; nothing runs.
    #[default]
    Created,
    /// Its process runs.
    Running,
    /// Its process has ended.
    Exited,
}

/// The containers of a VM. Each record has an allocation of its own: a node of a map has room for eleven values, and most VMs
/// have one container.
pub type ContainerRecords = BTreeMap<ContainerId, Arc<ContainerRecord>>;

/// Everything that is known about a container.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRecord {
    /// Its id in the VM.
    pub id: ContainerId,
    /// What it is made from.
    pub spec: ContainerSpec,
    /// Manifest digest that the image stood for at creation.
    pub image_digest: String,
    /// How far it has come.
    pub state: ContainerState,
    /// When it was made.
    pub created_at: UnixMillis,
    /// When its process began.
    #[serde(default)]
    pub started_at: Option<UnixMillis>,
    /// When its process ended.
    #[serde(default)]
    pub finished_at: Option<UnixMillis>,
    /// How its process ended.
    #[serde(default)]
    pub exit: Option<Exit>,
    /// The kernel killed a process of it for want of memory.
    #[serde(default)]
    pub oom_killed: bool,
    /// What it left in its file for that: of at most [`TERMINATION_MESSAGE_MAX`] bytes, those that are no UTF-8 replaced.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub termination_message: String,
    /// Who its process runs as, as its image says; `None`: that is not known.
    #[serde(default)]
    pub user: Option<ProcessUser>,
}

/// What a caller wants of a container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerSpec {
    /// Image reference as written by the caller.
    pub image: String,
    /// What runs.
    pub process: Workload,
    /// Its standard streams are a terminal.
    pub tty: bool,
    /// Its standard input stays open.
    pub stdin: bool,
    /// The end of the first attachment's input is the end of its standard input.
    pub stdin_once: bool,
    /// Which groups its process has beside the user's own.
    pub groups_policy: GroupsPolicy,
    /// Groups beside those of the policy.
    pub groups: Vec<u32>,
    /// It cannot write to its root.
    pub read_only_root: bool,
    /// Mounts, in order.
    pub mounts: Vec<ContainerMount>,
    /// What it may do.
    pub security: Security,
    /// Limits.
    pub resources: Resources,
    /// Whose processes it sees.
    pub pid_namespace: PidNamespace,
    /// Signal that asks it to end; 0: SIGTERM.
    pub stop_signal: i32,
    /// Which of several in a row it is, from 0.
    pub attempt: u32,
    /// Absolute path of the file whose end is the termination message; empty: it has none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub termination_message_path: String,
    /// The log, in CRI format; `None`: `containers/<id>.log` of the VM.
    pub log_path: Option<PathBuf>,
    /// Opaque to the node, returned unchanged.
    pub metadata: BTreeMap<String, String>,
}

/// A mount of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerMount {
    /// Absolute path in the container.
    pub target: String,
    /// It cannot be written.
    #[serde(default)]
    pub read_only: bool,
    /// What is mounted.
    pub source: ContainerMountSource,
}

/// What a container mounts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ContainerMountSource {
    /// A volume of the VM, or a directory or file in it.
    Volume {
        /// Name of the volume.
        name: String,
        /// Path in it; empty: all of it.
        #[serde(default)]
        sub_path: String,
    },
    /// Memory.
    Tmpfs {
        /// 0: half of the guest's.
        #[serde(default)]
        size_bytes: u64,
        /// Mode of its root; 0: 01777.
        #[serde(default)]
        mode: u32,
    },
    /// Another image, or a directory or file in it. Always read-only.
    Image {
        /// Digest of its manifest.
        digest: String,
        /// Path in it; empty: all of it.
        #[serde(default)]
        sub_path: String,
    },
}

/// Groups of a process beside those that a caller names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum GroupsPolicy {
    /// Those that /etc/group of the image has for the user; none where the user names a group.
    #[default]
    OfUser,
    /// The user's own group and those that /etc/group of the image has for the user.
    Merge,
    /// The user's own group.
    Strict,
}

/// Who a process runs as.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessUser {
    /// User.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// All other groups.
    #[serde(default)]
    pub groups: Vec<u32>,
}

/// What a container may do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Security {
    /// Bit n stands for capability n; `None`: the default set of the OCI runtimes.
    pub capabilities: Option<u64>,
    /// No program gives it more.
    pub no_new_privileges: bool,
    /// Paths that are shown empty.
    pub masked_paths: Vec<String>,
    /// Paths that cannot be written.
    pub read_only_paths: Vec<String>,
    /// By number, soft and hard limit; `u64::MAX`: none.
    pub rlimits: Vec<(u32, u64, u64)>,
    /// -1000 to 1000.
    pub oom_score_adj: i32,
    /// Classic BPF over `struct seccomp_data`; empty: no filter.
    pub seccomp: Vec<u8>,
    /// All devices, /sys and cgroups writable.
    pub privileged: bool,
    /// Its users and groups are in a user namespace, and these ids of the guest; `None`: they are the guest's.
    pub user_namespace: Option<IdMapping>,
}

/// Limits of a container. `None`: as it is; 0: no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Resources {
    /// Microseconds of CPU time in each 100 ms.
    pub cpu_quota_us: Option<u64>,
    /// 1 to 10000.
    pub cpu_weight: Option<u64>,
    /// Memory.
    pub memory_max_bytes: Option<u64>,
    /// Processes and threads.
    pub pids_max: Option<u64>,
    /// Further files of its cgroup (cgroup v2) and what is written to them.
    pub unified: BTreeMap<String, String>,
}

/// Whose processes a container sees.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PidNamespace {
    /// Its own.
    #[default]
    Container,
    /// Those of all containers of the VM.
    Pod,
    /// Those of another container.
    Target(ContainerId),
}

impl ContainerRecord {
    /// A container that was just made.
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

    /// Manifest digests of its image and of those that it mounts.
    pub fn images(&self) -> impl Iterator<Item = &str> {
        let mounted = self.spec.mounts.iter().filter_map(|mount| match &mount.source {
            ContainerMountSource::Image { digest, .. } => Some(digest.as_str()),
            ContainerMountSource::Volume { .. } | ContainerMountSource::Tmpfs { .. } => None,
        });
        std::iter::once(self.image_digest.as_str()).chain(mounted)
    }

    /// Its process has ended without a report of the guest: with the VM, or while the node had no session with it.
    pub fn lose(&mut self, why: &str, now: UnixMillis) {
        if self.state != ContainerState::Exited {
            (self.state, self.finished_at) = (ContainerState::Exited, Some(now));
            self.exit = Some(Exit { code: 255, signal: 0, error: why.to_owned() });
        }
    }

    /// Reads one. Blocking.
    ///
    /// # Errors
    /// When the file is missing or invalid.
    pub fn load(path: &Path) -> io::Result<Self> {
        serde_json::from_slice(&std::fs::read(path)?).map_err(io::Error::from)
    }

    /// Writes it so that a crash leaves the old or the new one. Blocking.
    ///
    /// # Errors
    /// As of the file system.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        coracle_files::write_atomic(path, &serde_json::to_vec_pretty(self)?)
    }

    /// All of a directory, by id. One that cannot be read is reported and left alone. Blocking.
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
