//! Annotations of pods: the specification of a VM, and the state that its node reports.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;

use super::{Backend, ConnType, LifecycleState, Mode, Os, SnapshotPolicy, keys};

/// Specification of a VM in the annotations of its pod. Empty texts and `None` are absent annotations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmSpecAnnotations {
    /// Name of the VM, and repository of its snapshots. Empty: the annotation is missing, and the VM cannot be created.
    pub vm_name: String,
    /// Creation of the VM: clone, run or static.
    pub mode: Mode,
    /// Snapshot, image or URL that the VM is created from.
    pub image: String,
    /// Size of the root disk, as a quantity.
    pub storage: String,
    /// True when the node owns the lifecycle of the VM.
    pub managed: bool,
    /// Operating system of the guest.
    pub os: Os,
    /// VMs that are saved at deletion.
    pub snapshot_policy: SnapshotPolicy,
    /// Name of the CNI network.
    pub network: String,
    /// VM on the node that this VM is forked from.
    pub fork_from: String,
    /// True when the VM should be hibernated.
    pub hibernate: bool,
    /// True to pull the image even when the node has it.
    pub force_pull: bool,
    /// Requested protocol by which users reach the guest.
    pub conn_type: Option<ConnType>,
    /// Hypervisor.
    pub backend: Backend,
    /// True to buffer writes of disks.
    pub no_direct_io: bool,
    /// TCP port that accepts connections when the VM is ready. `None`: an ICMP echo.
    pub probe_port: Option<u16>,
    /// Directory on the node of an exported snapshot.
    pub clone_from_dir: String,
    /// True when a new pod restores the tag `hibernate` instead of its image.
    pub restore_from_hibernate: bool,
    /// True when the node keeps its snapshot after the pod is deleted.
    pub keep_snapshot_on_delete: bool,
    /// Generation of the set for which the pod was last written.
    pub generation: Option<i64>,
}

impl VmSpecAnnotations {
    /// Parses the annotations of `pod`. Values that cannot be parsed count as absent; [`invalid_annotations`] lists them.
    #[must_use]
    pub fn from_pod(pod: &Pod) -> Self {
        pod.metadata.annotations.as_ref().map_or_else(Self::default, Self::parse)
    }

    /// Like [`Self::from_pod`], for the annotations alone.
    #[must_use]
    pub fn parse(all: &BTreeMap<String, String>) -> Self {
        let text = |key: &str| all.get(key).map(|value| value.trim().to_owned()).unwrap_or_default();
        let flag = |key: &str| all.get(key).is_some_and(|value| value == "true");
        Self {
            vm_name: text(keys::VM_NAME),
            mode: Mode::parse(&text(keys::MODE)).unwrap_or_default(),
            image: text(keys::IMAGE),
            storage: text(keys::STORAGE),
            managed: flag(keys::MANAGED),
            os: Os::parse(&text(keys::OS)).unwrap_or_default(),
            snapshot_policy: SnapshotPolicy::parse(&text(keys::SNAPSHOT_POLICY)).unwrap_or_default(),
            network: text(keys::NETWORK),
            fork_from: text(keys::FORK_FROM),
            hibernate: flag(keys::HIBERNATE),
            force_pull: flag(keys::FORCE_PULL),
            conn_type: ConnType::parse(&text(keys::CONN_TYPE)),
            backend: Backend::parse(&text(keys::BACKEND)).unwrap_or_default(),
            no_direct_io: flag(keys::NO_DIRECT_IO),
            probe_port: port(&text(keys::PROBE_PORT)),
            clone_from_dir: text(keys::CLONE_FROM_DIR),
            restore_from_hibernate: flag(keys::RESTORE_FROM_HIBERNATE),
            keep_snapshot_on_delete: flag(keys::KEEP_SNAPSHOT_ON_DELETE),
            generation: text(keys::GENERATION).parse().ok(),
        }
    }

    /// Returns the annotations of this specification. Empty values are left out.
    #[must_use]
    pub fn annotations(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        let mut put = |key: &str, value: &str| {
            if !value.is_empty() {
                all.insert(key.to_owned(), value.to_owned());
            }
        };
        let flag = |on: bool| if on { "true" } else { "" };
        put(keys::VM_NAME, &self.vm_name);
        put(keys::MODE, self.mode.as_str());
        put(keys::IMAGE, &self.image);
        put(keys::STORAGE, &self.storage);
        put(keys::MANAGED, flag(self.managed));
        put(keys::OS, self.os.as_str());
        put(keys::SNAPSHOT_POLICY, self.snapshot_policy.as_str());
        put(keys::NETWORK, &self.network);
        put(keys::FORK_FROM, &self.fork_from);
        put(keys::HIBERNATE, flag(self.hibernate));
        put(keys::FORCE_PULL, flag(self.force_pull));
        put(keys::CONN_TYPE, self.conn_type.map_or("", ConnType::as_str));
        put(keys::BACKEND, self.backend.as_str());
        put(keys::NO_DIRECT_IO, flag(self.no_direct_io));
        put(keys::PROBE_PORT, &number(self.probe_port));
        put(keys::CLONE_FROM_DIR, &self.clone_from_dir);
        put(keys::RESTORE_FROM_HIBERNATE, flag(self.restore_from_hibernate));
        put(keys::KEEP_SNAPSHOT_ON_DELETE, flag(self.keep_snapshot_on_delete));
        put(keys::GENERATION, &number(self.generation));
        all
    }
}

/// State of a pod's VM that its node reports. Empty texts and `None` are absent annotations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmRuntimeAnnotations {
    /// Id of the VM on the node; empty while the VM does not exist.
    pub id: String,
    /// IPv4 address of the guest.
    pub ip: String,
    /// VNC port.
    pub vnc_port: Option<u16>,
    /// Script in base64 that the guest's owner should run after a clone.
    pub post_clone_hint: String,
    /// State of the VM.
    pub lifecycle_state: Option<LifecycleState>,
    /// Generation of the set when the VM reached that state.
    pub lifecycle_observed_generation: Option<i64>,
    /// Message about that state.
    pub lifecycle_state_message: String,
}

impl VmRuntimeAnnotations {
    /// Parses the annotations of `pod`.
    #[must_use]
    pub fn from_pod(pod: &Pod) -> Self {
        pod.metadata.annotations.as_ref().map_or_else(Self::default, Self::parse)
    }

    /// Like [`Self::from_pod`], for the annotations alone.
    #[must_use]
    pub fn parse(all: &BTreeMap<String, String>) -> Self {
        let text = |key: &str| all.get(key).map(|value| value.trim().to_owned()).unwrap_or_default();
        Self {
            id: text(keys::VM_ID),
            ip: text(keys::VM_IP),
            vnc_port: port(&text(keys::VNC_PORT)),
            post_clone_hint: text(keys::POST_CLONE_HINT),
            lifecycle_state: LifecycleState::parse(&text(keys::LIFECYCLE_STATE)),
            lifecycle_observed_generation: text(keys::LIFECYCLE_OBSERVED_GENERATION).parse().ok(),
            lifecycle_state_message: text(keys::LIFECYCLE_STATE_MESSAGE),
        }
    }

    /// Returns the annotations of this report. Empty values are left out.
    #[must_use]
    pub fn annotations(&self) -> BTreeMap<String, String> {
        self.patch().into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
    }

    /// Returns every key with its value. `None`, which is `null` in a merge patch, removes the key.
    #[must_use]
    pub fn patch(&self) -> BTreeMap<String, Option<String>> {
        [
            (keys::VM_ID, self.id.clone()),
            (keys::VM_IP, self.ip.clone()),
            (keys::VNC_PORT, number(self.vnc_port)),
            (keys::POST_CLONE_HINT, self.post_clone_hint.clone()),
            (keys::LIFECYCLE_STATE, self.lifecycle_state.map_or("", LifecycleState::as_str).to_owned()),
            (keys::LIFECYCLE_OBSERVED_GENERATION, number(self.lifecycle_observed_generation)),
            (keys::LIFECYCLE_STATE_MESSAGE, self.lifecycle_state_message.clone()),
        ]
        .into_iter()
        .map(|(key, value)| (key.to_owned(), (!value.is_empty()).then_some(value)))
        .collect()
    }
}

/// Annotation whose value is not valid for its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidAnnotation {
    /// Key of the annotation.
    pub key: &'static str,
    /// Value of the annotation.
    pub value: String,
    /// Expected value.
    pub reason: &'static str,
}

impl std::fmt::Display for InvalidAnnotation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "invalid {} {:?}: {}", self.key, self.value, self.reason)
    }
}

/// Key, predicate for its values, and description of the expected values.
type Check = (&'static str, fn(&str) -> bool, &'static str);

/// Returns the annotations of [`VmSpecAnnotations`] that count as absent because their values cannot be parsed, and a VM name
/// that is not valid.
#[must_use]
pub fn invalid_annotations(all: &BTreeMap<String, String>) -> Vec<InvalidAnnotation> {
    let checks: [Check; 9] = [
        (keys::VM_NAME, super::is_valid_vm_name, "must match [a-zA-Z0-9][a-zA-Z0-9._-]{0,62}"),
        (keys::MODE, |value| Mode::parse(value).is_some(), "must be clone, run or static"),
        (keys::OS, |value| Os::parse(value).is_some(), "must be linux, windows, android or macos"),
        (
            keys::SNAPSHOT_POLICY,
            |value| SnapshotPolicy::parse(value).is_some(),
            "must be always, main-only or never",
        ),
        (keys::CONN_TYPE, |value| ConnType::parse(value).is_some(), "must be ssh, rdp, vnc or adb"),
        (keys::BACKEND, |value| Backend::parse(value).is_some(), "must be cloud-hypervisor or firecracker"),
        (
            keys::PROBE_PORT,
            |value| value == "0" || port(value).is_some(),
            "must be a port between 1 and 65535, or 0",
        ),
        (keys::CLONE_FROM_DIR, |value| value.starts_with('/'), "must be an absolute path"),
        (keys::GENERATION, |value| value.parse::<i64>().is_ok(), "must be a whole number"),
    ];
    let check = |(key, is_valid, reason): &Check| {
        let value = all.get(*key)?.trim();
        (!value.is_empty() && !is_valid(value)).then(|| InvalidAnnotation {
            key,
            value: value.to_owned(),
            reason,
        })
    };
    checks.iter().filter_map(check).collect()
}

fn port(text: &str) -> Option<u16> {
    text.parse().ok().filter(|port| *port > 0)
}

fn number<N: ToString>(value: Option<N>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spec_annotations_round_trip() {
        let full = VmSpecAnnotations {
            vm_name: "vk-prod-demo-0".into(),
            mode: Mode::Run,
            image: "registry.example/vm:1".into(),
            storage: "20Gi".into(),
            managed: true,
            os: Os::Windows,
            snapshot_policy: SnapshotPolicy::MainOnly,
            network: "lan".into(),
            fork_from: "vk-prod-demo-1".into(),
            hibernate: true,
            force_pull: true,
            conn_type: Some(ConnType::Rdp),
            backend: Backend::Firecracker,
            no_direct_io: true,
            probe_port: Some(22),
            clone_from_dir: "/srv/snapshot".into(),
            restore_from_hibernate: true,
            keep_snapshot_on_delete: true,
            generation: Some(7),
        };
        assert_eq!(full.annotations().len(), 19);
        assert_eq!(VmSpecAnnotations::parse(&full.annotations()), full);
        let small = VmSpecAnnotations { vm_name: "a".into(), ..VmSpecAnnotations::default() };
        let want = [keys::MODE, keys::OS, keys::SNAPSHOT_POLICY, keys::BACKEND, keys::VM_NAME];
        assert_eq!(small.annotations().keys().collect::<Vec<_>>(), want);
        assert_eq!(VmSpecAnnotations::parse(&small.annotations()), small);
    }

    #[test]
    fn hibernate_annotation_is_set_only_by_exact_true() {
        for (text, want) in [("true", true), ("True", false), ("1", false), ("", false), (" true", false)] {
            let all = BTreeMap::from([(keys::HIBERNATE.to_owned(), text.to_owned())]);
            assert_eq!(VmSpecAnnotations::parse(&all).hibernate, want, "{text:?}");
        }
    }

    #[test]
    fn runtime_annotations_are_removed_by_their_patch() {
        let running = VmRuntimeAnnotations {
            id: "vm-1".into(),
            ip: "10.0.0.2".into(),
            vnc_port: Some(5900),
            lifecycle_state: Some(LifecycleState::Ready),
            lifecycle_observed_generation: Some(3),
            ..VmRuntimeAnnotations::default()
        };
        assert_eq!(VmRuntimeAnnotations::parse(&running.annotations()), running);
        let hibernated = VmRuntimeAnnotations {
            lifecycle_state: Some(LifecycleState::Hibernated),
            ..VmRuntimeAnnotations::default()
        };
        let patch = hibernated.patch();
        assert_eq!((patch[keys::VM_ID].as_deref(), patch[keys::VM_IP].as_deref()), (None, None));
        assert_eq!(patch[keys::LIFECYCLE_STATE].as_deref(), Some("hibernated"));
    }

    #[test]
    fn unreadable_values_count_as_absent_and_are_listed() {
        let all: BTreeMap<String, String> = [
            (keys::VM_NAME, "a b"),
            (keys::MODE, "cloen"),
            (keys::PROBE_PORT, "70000"),
            (keys::BACKEND, "Firecracker"),
            (keys::GENERATION, "x"),
            ("unknown", "value"),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into();
        let read = VmSpecAnnotations::parse(&all);
        assert_eq!((read.mode, read.probe_port, read.generation), (Mode::Clone, None, None));
        assert_eq!(read.backend, Backend::Firecracker);
        let listed: Vec<_> = invalid_annotations(&all).iter().map(|bad| bad.key).collect();
        assert_eq!(listed, [keys::VM_NAME, keys::MODE, keys::PROBE_PORT, keys::GENERATION]);
    }
}
