//! What only a kubelet knows of its pods and containers, kept in the records of the host core. Pure.
//!
//! The server has no state of its own: after a restart it reads the messages that a pod was made from out of the
//! metadata of its VM and its containers.

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
/// Its container is a disk.
const DISK: &str = "cri-disk";
/// Sandbox of a VM that is the container of a disk pod.
const POD: &str = "cri-pod";

/// What a sandbox was made from.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SandboxFacts {
    pub(crate) config: PodSandboxConfig,
    pub(crate) handler: String,
    /// Its container is a VM of its own, which boots a disk image.
    pub(crate) disk: bool,
}

/// What a container was made from.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ContainerFacts {
    /// Without command, arguments and environment, which the record has.
    pub(crate) config: ContainerConfig,
    /// `sha256:…` of the image's configuration.
    pub(crate) image_id: String,
    /// Digested reference of the image, or its id.
    pub(crate) image_ref: String,
}

impl SandboxFacts {
    pub(crate) fn to_metadata(&self) -> BTreeMap<String, String> {
        let disk = self.disk.then(|| (DISK, String::new()));
        let facts = [(SANDBOX, encode(&self.config)), (HANDLER, self.handler.clone())];
        facts.into_iter().chain(disk).map(|(key, value)| (key.to_owned(), value)).collect()
    }

    /// Of a VM that is a sandbox of a kubelet.
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

    /// Of a container that a kubelet asked for, with the resources that it has now.
    pub(crate) fn of(record: &ContainerRecord) -> Option<Self> {
        Self::of_metadata(&record.spec.metadata)
    }

    /// As [`ContainerFacts::of`], from the metadata alone.
    pub(crate) fn of_metadata(metadata: &BTreeMap<String, String>) -> Option<Self> {
        let mut config: ContainerConfig = decode(metadata.get(CONTAINER)?)?;
        if let Some(resources) = metadata.get(RESOURCES).and_then(|text| decode(text)) {
            config.linux.get_or_insert_default().resources = Some(resources);
        }
        let text = |key: &str| metadata.get(key).cloned().unwrap_or_default();
        Some(Self { config, image_id: text(IMAGE_ID), image_ref: text(IMAGE_REF) })
    }
}

/// Metadata of a VM that is the container of the disk pod with this sandbox.
pub(crate) fn pod_to_metadata(sandbox: &str) -> BTreeMap<String, String> {
    [(POD.to_owned(), sandbox.to_owned())].into()
}

/// Sandbox of a VM that is the container of a disk pod.
pub(crate) fn pod_of(record: &Record) -> Option<&str> {
    record.metadata.get(POD).map(String::as_str)
}

/// Metadata of a container whose resources were changed.
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
    fn records_of_others_have_no_facts() {
        assert_eq!(ContainerFacts::of(&record(BTreeMap::new())), None);
        assert_eq!(ContainerFacts::of(&record([(CONTAINER.to_owned(), "?".to_owned())].into())), None);
    }
}
