//! Data of pods and containers that only the kubelet knows, kept in the records of the host core. Pure.
//!
//! The server is stateless: after a restart, it reads the messages from which a pod was created from the metadata of its VM and
//! its containers.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use coracle_host::{ContainerRecord, Record};
use coracle_proto::cri::{ContainerConfig, LinuxContainerResources, PodSandboxConfig};
use prost::Message;

const SANDBOX: &str = "cri-sandbox";
const HANDLER: &str = "cri-handler";
const CONTAINER: &str = "cri-container";
const RESOURCES: &str = "cri-resources";
const IMAGE_ID: &str = "cri-image-id";
const IMAGE_REF: &str = "cri-image-ref";
/// Key that marks the sandbox of a disk pod.
const DISK: &str = "cri-disk";
/// Key for the sandbox of a VM that is the container of a disk pod.
const POD: &str = "cri-pod";

/// Configuration from which a sandbox was created.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SandboxFacts {
    pub(crate) config: PodSandboxConfig,
    pub(crate) handler: String,
    /// The container of the pod is a VM of its own, which boots a disk image.
    pub(crate) disk: bool,
}

/// Configuration from which a container was created.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ContainerFacts {
    /// Configuration without command, arguments and environment, which are in the record.
    pub(crate) config: ContainerConfig,
    /// Id of the image: `sha256:…` of its configuration.
    pub(crate) image_id: String,
    /// Reference of the image with a digest, or its id.
    pub(crate) image_ref: String,
}

impl SandboxFacts {
    pub(crate) fn to_metadata(&self) -> BTreeMap<String, String> {
        let disk = self.disk.then(|| (DISK, String::new()));
        let facts = [(SANDBOX, encode(&self.config)), (HANDLER, self.handler.clone())];
        facts.into_iter().chain(disk).map(|(key, value)| (key.to_owned(), value)).collect()
    }

    /// Decodes the facts of a VM that is a kubelet's sandbox.
    pub(crate) fn of(record: &Record) -> Option<Self> {
        let config = decode(record.metadata.get(SANDBOX)?)?;
        let handler = record.metadata.get(HANDLER).cloned().unwrap_or_default();
        Some(Self { config, handler, disk: record.metadata.contains_key(DISK) })
    }
}

impl ContainerFacts {
    pub(crate) fn to_metadata(&self) -> BTreeMap<String, String> {
        let config = ContainerConfig { command: vec![], args: vec![], envs: vec![], ..self.config.clone() };
        [(CONTAINER, encode(&config)), (IMAGE_ID, self.image_id.clone()), (IMAGE_REF, self.image_ref.clone())]
            .map(|(key, value)| (key.to_owned(), value))
            .into()
    }

    /// Decodes the facts of a kubelet's container, with its current resources.
    pub(crate) fn of(record: &ContainerRecord) -> Option<Self> {
        Self::of_metadata(&record.spec.metadata)
    }

    /// Like [`ContainerFacts::of`], from the metadata only.
    pub(crate) fn of_metadata(metadata: &BTreeMap<String, String>) -> Option<Self> {
        let mut config: ContainerConfig = decode(metadata.get(CONTAINER)?)?;
        if let Some(resources) = metadata.get(RESOURCES).and_then(|text| decode(text)) {
            config.linux.get_or_insert_default().resources = Some(resources);
        }
        let text = |key: &str| metadata.get(key).cloned().unwrap_or_default();
        Some(Self { config, image_id: text(IMAGE_ID), image_ref: text(IMAGE_REF) })
    }
}

/// Returns the metadata of a VM that is the container of the disk pod with this sandbox.
pub(crate) fn pod_to_metadata(sandbox: &str) -> BTreeMap<String, String> {
    [(POD.to_owned(), sandbox.to_owned())].into()
}

/// Returns the sandbox of a VM that is the container of a disk pod.
pub(crate) fn pod_of(record: &Record) -> Option<&str> {
    record.metadata.get(POD).map(String::as_str)
}

/// Returns the metadata of a container whose resources were changed.
pub(crate) fn resources_to_metadata(resources: &LinuxContainerResources) -> BTreeMap<String, String> {
    [(RESOURCES.to_owned(), encode(resources))].into()
}

fn encode(message: &impl Message) -> String {
    STANDARD.encode(message.encode_to_vec())
}

fn decode<T: Message + Default>(text: &str) -> Option<T> {
    T::decode(STANDARD.decode(text).ok()?.as_slice()).ok()
}

#[cfg(test)]
mod tests {
    use coracle_host::ContainerSpec;
    use coracle_proto::cri::{ContainerMetadata, KeyValue, LinuxContainerConfig};
    use coracle_types::UnixMillis;

    use super::*;

    fn record(metadata: BTreeMap<String, String>) -> ContainerRecord {
        let spec = ContainerSpec { metadata, ..ContainerSpec::default() };
        ContainerRecord::new("c".parse().unwrap(), spec, String::new(), UnixMillis(1))
    }

    #[test]
    fn container_facts_survive_a_round_trip() {
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata { name: "web".into(), attempt: 2 }),
            labels: [("a/b".to_owned(), "ü".to_owned())].into(),
            envs: vec![KeyValue { key: "TOKEN".into(), value: b"secret".to_vec() }],
            linux: Some(LinuxContainerConfig::default()),
            ..ContainerConfig::default()
        };
        let facts = ContainerFacts { config, image_id: "sha256:1".into(), image_ref: "a@sha256:2".into() };
        let mut metadata = facts.to_metadata();
        let read = ContainerFacts::of(&record(metadata.clone())).unwrap();
        assert_eq!(read.config.labels, facts.config.labels);
        assert_eq!((read.image_id, read.image_ref), (facts.image_id, facts.image_ref));
        assert!(read.config.envs.is_empty(), "secrets are kept once");

        let resources = LinuxContainerResources { cpu_quota: 7, ..LinuxContainerResources::default() };
        metadata.extend(resources_to_metadata(&resources));
        let read = ContainerFacts::of(&record(metadata)).unwrap();
        assert_eq!(read.config.linux.unwrap().resources, Some(resources));
    }

    #[test]
    fn foreign_record_has_no_container_facts() {
        assert_eq!(ContainerFacts::of(&record(BTreeMap::new())), None);
        assert_eq!(ContainerFacts::of(&record([(CONTAINER.to_owned(), "?".to_owned())].into())), None);
    }
}
