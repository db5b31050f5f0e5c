//! Translates a container of a pod's spec into a container of the host core. Pure.

use std::collections::BTreeMap;

use coracle_host::{ContainerMountSource, ContainerSpec, GroupsPolicy, PidNamespace, Security, Workload};
use coracle_oci::Credentials;
use coracle_record::ContainerId;
use coracle_types::MemoryMib;
use k8s_openapi::api::core::v1::{Capabilities, Container, Pod, PodSecurityContext, SecurityContext};
use sha2::{Digest, Sha256};

use crate::declared::DeclaredContainer;
use crate::env::{ConfigError, FieldContext, Note, environment, expand};
use crate::objects::Objects;
use crate::pull_secrets::pull_credentials;
use crate::resources::{limits, oom_score_adj};
use crate::volume::container_mounts;

/// Keys of a container's metadata: those of the kubelet (cri-api, container labels and annotations), and one of Coracle.
pub mod key {
    /// Name of the container in the spec.
    pub const NAME: &str = "io.kubernetes.container.name";
    /// Name of the pod.
    pub const POD_NAME: &str = "io.kubernetes.pod.name";
    /// Namespace of the pod.
    pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
    /// Uid of the pod.
    pub const POD_UID: &str = "io.kubernetes.pod.uid";
    /// Source of the termination message: the container's `terminationMessagePolicy`.
    pub const MESSAGE_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";
    /// Quick restarts in a row that led to this attempt.
    pub const STREAK: &str = "coracle.dev/restart-streak";
}

/// Names of capabilities, by number (linux/capability.h).
pub const CAPABILITIES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];
/// Capabilities that the OCI runtimes grant to a container by default.
const DEFAULT_CAPABILITIES: [&str; 14] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "NET_RAW",
    "SYS_CHROOT",
    "MKNOD",
    "AUDIT_WRITE",
    "SETFCAP",
];
/// Paths that the OCI runtimes hide from containers, and those that they make read-only.
const MASKED: [&str; 10] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
];
const READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Container to be created.
#[derive(Clone, Debug, PartialEq)]
pub struct NewContainer {
    /// Spec, before the fields that depend on the image are set.
    pub spec: ContainerSpec,
    /// The arguments are appended to the entrypoint of the image: the spec has `args` and no `command`.
    pub args_only: bool,
    /// The container must not run as root (`runAsNonRoot`).
    pub non_root: bool,
    /// Credentials of the pod for pulling the images that the container mounts, by reference.
    pub credentials: BTreeMap<String, Vec<Credentials>>,
}

/// Attempt of a container: one start of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// Number of the attempt, from 0.
    pub number: u32,
    /// Number of quick restarts in a row that led to this attempt.
    pub streak: u32,
    /// Container whose processes this one sees.
    pub target: Option<ContainerId>,
}

/// Returns the id of an attempt of a container, unique among all pods. The id is deterministic, so that a container is found
/// again after the reply to its creation was lost.
#[must_use]
pub fn container_id(pod_uid: &str, name: &str, attempt: u32) -> ContainerId {
    let mut hash = Sha256::new();
    for part in [pod_uid.as_bytes(), name.as_bytes(), &attempt.to_be_bytes()] {
        hash.update(part.len().to_be_bytes());
        hash.update(part);
    }
    hex::encode(hash.finalize()).parse().expect("64 hex digits are an id of a container")
}

/// Translates a container of a pod's spec into a container of the host core. Returns notes for events as well.
///
/// # Errors
/// [`ConfigError`] for objects that do not exist, and for invalid values.
pub fn container_spec(
    one: &DeclaredContainer<'_>,
    attempt: &Attempt,
    context: &FieldContext<'_>,
    objects: &Objects,
    vm_memory: MemoryMib,
) -> Result<(NewContainer, Vec<Note>), ConfigError> {
    let (pod, container) = (context.pod, one.container.as_ref());
    let environment = environment(container, context, objects)?;
    let variable = |name: &str| environment.variables.get(name).map(String::as_str);
    let words = |list: &Option<Vec<String>>| -> Vec<String> {
        list.iter().flatten().map(|word| expand(word, variable)).collect()
    };
    let (command, args) = (words(&container.command), words(&container.args));
    let mounts =
        container_mounts(pod, container, variable).map_err(|error| ConfigError::new(error.to_string()))?;
    let own = container.security_context.clone().unwrap_or_default();
    let of_pod = pod.spec.as_ref().and_then(|spec| spec.security_context.clone()).unwrap_or_default();
    let (groups_policy, groups) = groups(&of_pod)?;
    let spec = ContainerSpec {
        image: container.image.clone().unwrap_or_default(),
        process: Workload {
            env: environment.variables.iter().map(|(name, value)| format!("{name}={value}")).collect(),
            user: user(&own, &of_pod)?,
            cwd: container.working_dir.clone().unwrap_or_default(),
            argv: [command.as_slice(), &args].concat(),
        },
        tty: container.tty == Some(true),
        stdin: container.stdin == Some(true),
        stdin_once: container.stdin_once == Some(true),
        groups_policy,
        groups,
        read_only_root: own.read_only_root_filesystem == Some(true),
        mounts,
        security: security(&own, oom_score_adj(pod, container, vm_memory))?,
        resources: limits(container),
        pid_namespace: pid_namespace(pod, attempt),
        stop_signal: stop_signal(container)?,
        attempt: attempt.number,
        termination_message_path: termination_message_path(container).to_owned(),
        log_path: None,
        metadata: metadata(pod, container, attempt),
    };
    let args_only = command.is_empty() && !args.is_empty();
    let non_root = requires_non_root(&own, &of_pod);
    let mounted = spec.mounts.iter().filter_map(|mount| match &mount.source {
        ContainerMountSource::Image { digest, .. } => {
            Some((digest.clone(), pull_credentials(pod, objects, digest).0))
        }
        _ => None,
    });
    let credentials = mounted.collect();
    Ok((NewContainer { spec, args_only, non_root, credentials }, environment.notes))
}

impl NewContainer {
    /// Returns the spec with the fields that depend on the image: its entrypoint before the arguments, and the user check.
    ///
    /// # Errors
    /// A sentence, when the container must not run as root and its image runs as root or names its user other than by number.
    pub fn of_image(&self, entrypoint: &[String], image_user: &str) -> Result<ContainerSpec, String> {
        let mut spec = self.spec.clone();
        if self.args_only {
            spec.process.argv = [entrypoint, &self.spec.process.argv].concat();
        }
        let user = if spec.process.user.is_empty() { image_user } else { &spec.process.user };
        let uid = user.split(':').next().unwrap_or_default();
        match (self.non_root, uid.parse::<u32>()) {
            (false, _) | (true, Ok(1..)) => Ok(spec),
            (true, Ok(0)) => {
                Err("the container must not run as root (runAsNonRoot), and its image does".to_owned())
            }
            (true, Err(_)) if matches!(uid, "" | "root") => {
                Err("the container must not run as root (runAsNonRoot), and its image does".to_owned())
            }
            (true, Err(_)) => Err(format!(
                "the container must not run as root (runAsNonRoot), and its image names user {uid:?}: set runAsUser"
            )),
        }
    }
}

fn termination_message_path(container: &Container) -> &str {
    let path = container.termination_message_path.as_deref().filter(|path| !path.is_empty());
    path.unwrap_or("/dev/termination-log")
}

fn requires_non_root(own: &SecurityContext, of_pod: &PodSecurityContext) -> bool {
    own.run_as_non_root.or(of_pod.run_as_non_root) == Some(true)
}

fn metadata(pod: &Pod, container: &Container, attempt: &Attempt) -> BTreeMap<String, String> {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let pairs = [
        (key::NAME, container.name.clone()),
        (key::POD_NAME, text(&pod.metadata.name)),
        (key::POD_NAMESPACE, text(&pod.metadata.namespace)),
        (key::POD_UID, text(&pod.metadata.uid)),
        (key::MESSAGE_POLICY, text(&container.termination_message_policy)),
        (key::STREAK, attempt.streak.to_string()),
    ];
    pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Returns `uid:gid` in the form of image configurations. A group without a user gets uid 0, as images without a user run as
/// root.
fn user(own: &SecurityContext, of_pod: &PodSecurityContext) -> Result<String, ConfigError> {
    let user = own.run_as_user.or(of_pod.run_as_user);
    let group = own.run_as_group.or(of_pod.run_as_group);
    match (user, group) {
        (Some(0), _) if requires_non_root(own, of_pod) => {
            Err(ConfigError::new("invalid runAsUser 0: the container must not run as root (runAsNonRoot)"))
        }
        (Some(user), None) => Ok(user.to_string()),
        (Some(user), Some(group)) => Ok(format!("{user}:{group}")),
        (None, Some(group)) => Ok(format!("0:{group}")),
        (None, None) => Ok(String::new()),
    }
}

fn groups(of_pod: &PodSecurityContext) -> Result<(GroupsPolicy, Vec<u32>), ConfigError> {
    let policy = match of_pod.supplemental_groups_policy.as_deref() {
        Some("Strict") => GroupsPolicy::Strict,
        _ => GroupsPolicy::Merge,
    };
    let listed = of_pod.supplemental_groups.iter().flatten().chain(&of_pod.fs_group);
    let groups = listed.map(|group| u32::try_from(*group).map_err(|_| *group)).collect::<Result<_, _>>();
    let groups = groups.map_err(|bad| ConfigError::new(format!("invalid group {bad}: not a group id")))?;
    Ok((policy, groups))
}

fn security(own: &SecurityContext, oom_score_adj: i32) -> Result<Security, ConfigError> {
    let privileged = own.privileged == Some(true);
    let masks = !privileged && own.proc_mount.as_deref() != Some("Unmasked");
    let paths = |list: &[&str]| -> Vec<String> {
        if masks { list.iter().map(|path| (*path).to_owned()).collect() } else { vec![] }
    };
    Ok(Security {
        capabilities: match (&own.capabilities, privileged) {
            (_, true) => Some(all_capabilities()),
            (Some(wanted), false) => Some(capabilities(wanted)?),
            (None, false) => None,
        },
        no_new_privileges: own.allow_privilege_escalation == Some(false),
        masked_paths: paths(&MASKED),
        read_only_paths: paths(&READ_ONLY),
        rlimits: vec![],
        oom_score_adj,
        seccomp: vec![],
        privileged,
        user_namespace: None,
    })
}

fn all_capabilities() -> u64 {
    (1 << CAPABILITIES.len()) - 1
}

fn capability(name: &str) -> Result<u64, ConfigError> {
    let upper = name.to_uppercase();
    let short = upper.strip_prefix("CAP_").unwrap_or(&upper);
    let number = CAPABILITIES.iter().position(|known| *known == short);
    number.map(|number| 1 << number).ok_or_else(|| ConfigError::new(format!("invalid capability {name:?}")))
}

/// Returns the default capabilities, without the dropped ones and with the added ones; `ALL` stands for every capability.
fn capabilities(wanted: &Capabilities) -> Result<u64, ConfigError> {
    let mut set = 0;
    for name in DEFAULT_CAPABILITIES {
        set |= capability(name)?;
    }
    let is_all = |name: &String| name.eq_ignore_ascii_case("ALL");
    for name in wanted.drop.iter().flatten() {
        set = if is_all(name) { 0 } else { set & !capability(name)? };
    }
    let mut dropped = 0;
    for name in wanted.drop.iter().flatten().filter(|name| !is_all(name)) {
        dropped |= capability(name)?;
    }
    for name in wanted.add.iter().flatten() {
        set = if is_all(name) { all_capabilities() & !dropped } else { set | capability(name)? };
    }
    Ok(set)
}

fn pid_namespace(pod: &Pod, attempt: &Attempt) -> PidNamespace {
    match &attempt.target {
        _ if pod.spec.as_ref().is_some_and(|spec| spec.share_process_namespace == Some(true)) => {
            PidNamespace::Pod
        }
        Some(target) => PidNamespace::Target(target.clone()),
        None => PidNamespace::Container,
    }
}

/// Returns the number of a signal of the API, as `SIGTERM` or `SIGRTMIN+3` (signal(7), on x86 and ARM).
fn stop_signal(container: &Container) -> Result<i32, ConfigError> {
    const NAMES: [&str; 31] = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
        "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ",
        "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
    ];
    const RTMIN: i32 = 34;
    const RTMAX: i32 = 64;
    let name = container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.stop_signal.as_deref());
    let Some(name) = name.filter(|name| !name.is_empty()) else { return Ok(0) };
    let invalid = || ConfigError::new(format!("invalid stop signal {name:?}"));
    let short = name.strip_prefix("SIG").ok_or_else(invalid)?;
    if let Some(number) = NAMES.iter().position(|known| *known == short) {
        return i32::try_from(number + 1).map_err(|_| invalid());
    }
    let offset = |text: &str| if text.is_empty() { Some(0) } else { text.get(1..)?.parse::<i32>().ok() };
    let number = match (short.strip_prefix("RTMIN"), short.strip_prefix("RTMAX")) {
        (Some(rest), _) => offset(rest).map(|plus| RTMIN + plus),
        (None, Some(rest)) => offset(rest).map(|minus| RTMAX - minus),
        (None, None) => None,
    };
    number.filter(|number| (RTMIN..=RTMAX).contains(number)).ok_or_else(invalid)
}
