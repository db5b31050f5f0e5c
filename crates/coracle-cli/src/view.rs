//! A VM as commands show it: one shape, whether its data come from a node or from an object of the cluster.

use std::collections::BTreeMap;

use coracle_api::keys::node as keys;
use coracle_api::{MikromVM, condition};
use coracle_proto::host as pb;
use k8s_openapi::api::coordination::v1::Lease;
use kube::ResourceExt;
use serde::Serialize;

use crate::error::Failure;
use crate::output::{self, Columns};

/// VM with the desired state in `spec` and the observed state in `status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Vm {
    pub(crate) api_version: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) metadata: Metadata,
    pub(crate) spec: Spec,
    pub(crate) status: Status,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Metadata {
    pub(crate) name: String,
    /// Empty for a VM that does not belong to a cluster.
    pub(crate) namespace: String,
    pub(crate) id: String,
    pub(crate) uid: String,
    pub(crate) created_at: Option<String>,
    pub(crate) annotations: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Spec {
    pub(crate) image: String,
    pub(crate) cpus: u32,
    #[serde(rename = "memoryMiB")]
    pub(crate) memory_mib: u64,
    pub(crate) command: Vec<String>,
    pub(crate) ports: Vec<Port>,
    pub(crate) volumes: Vec<Volume>,
}

/// Disk or host directory in a guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Volume {
    pub(crate) name: String,
    pub(crate) kind: &'static str,
    pub(crate) source: String,
    pub(crate) target: String,
    pub(crate) read_only: bool,
}

impl Volume {
    /// Converts a volume that the node of this machine reports.
    pub(crate) fn of_node(volume: &pb::Volume) -> Self {
        Self {
            name: volume.name.clone(),
            kind: match volume.kind() {
                pb::volume::Kind::Unspecified => "Unknown",
                pb::volume::Kind::Disk => "Disk",
                pb::volume::Kind::Block => "Block",
                pb::volume::Kind::SharedDir => "SharedDir",
            },
            source: volume.source.clone(),
            target: volume.target.clone(),
            read_only: volume.read_only,
        }
    }

    /// Returns the volume as a JSON document.
    pub(crate) fn document(&self, vm: &str) -> serde_json::Value {
        serde_json::json!({
            "apiVersion": output::API_VERSION,
            "kind": "Volume",
            "metadata": {"name": self.name},
            "spec": {"vm": vm, "kind": self.kind, "source": self.source, "target": self.target, "readOnly": self.read_only},
        })
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Port {
    host_address: String,
    host_port: u32,
    guest_port: u32,
    protocol: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Status {
    pub(crate) state: String,
    /// Reason for the state.
    pub(crate) message: String,
    pub(crate) node_name: String,
    pub(crate) image_digest: String,
    pub(crate) ip_address: String,
    pub(crate) mac: String,
    pub(crate) driver: String,
    pub(crate) accelerator: String,
    pub(crate) vmm_pid: u32,
    pub(crate) started_at: Option<String>,
    pub(crate) finished_at: Option<String>,
    pub(crate) exit: Option<Exit>,
    pub(crate) oom_killed: bool,
    /// Digest of the image that the latest run was pushed as.
    pub(crate) committed: String,
    /// Number of starts so far.
    pub(crate) boots: u32,
    pub(crate) boot_ms: u64,
    /// Part of `boot_ms`: configuration of the guest's identity.
    pub(crate) identity_ms: u64,
    /// Part of `boot_ms`: the rest, until the workload had started.
    pub(crate) workload_ms: u64,
    pub(crate) agent_connected: bool,
    pub(crate) disk_bytes: u64,
    /// Key of the template that the latest run was cloned from; empty for a cold boot.
    pub(crate) template: String,
    /// Whether the latest run was a clone from the warm pool.
    pub(crate) pooled: bool,
    /// Size of the saved memory of a hibernated VM on disk.
    pub(crate) saved_bytes: u64,
    pub(crate) conditions: Vec<Condition>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Exit {
    pub(crate) code: i32,
    pub(crate) signal: i32,
    pub(crate) error: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Condition {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) status: String,
    pub(crate) reason: String,
    pub(crate) message: String,
}

/// Converts a time of a message; `None` for never.
pub(crate) fn time(ms: i64) -> Option<String> {
    (ms > 0).then(|| jiff::Timestamp::from_millisecond(ms).ok()).flatten().map(|t| t.to_string())
}

/// Returns the name of a state of a message.
pub(crate) fn state_name(state: pb::VmState) -> &'static str {
    match state {
        pb::VmState::Unspecified => "Unknown",
        pb::VmState::Created => "Created",
        pb::VmState::Starting => "Starting",
        pb::VmState::Running => "Running",
        pb::VmState::Paused => "Paused",
        pb::VmState::Hibernating => "Hibernating",
        pb::VmState::Hibernated => "Hibernated",
        pb::VmState::Stopping => "Stopping",
        pb::VmState::Stopped => "Stopped",
        pb::VmState::Failed => "Failed",
        pb::VmState::Deleting => "Deleting",
    }
}

impl Vm {
    /// Converts a VM that the node of this machine reports.
    pub(crate) fn of_node(vm: &pb::Vm) -> Self {
        let owner = vm.owner.clone().unwrap_or_default();
        let port = |p: &pb::PortMapping| Port {
            host_address: p.host_address.clone(),
            host_port: p.host_port,
            guest_port: p.guest_port,
            protocol: p.protocol.clone(),
        };
        let exit = |e: &pb::ExitStatus| Exit { code: e.code, signal: e.signal, error: e.error.clone() };
        Self {
            api_version: output::API_VERSION,
            kind: "VM",
            metadata: Metadata {
                name: vm.name.clone(),
                namespace: owner.namespace,
                id: vm.id.clone(),
                uid: owner.uid,
                created_at: time(vm.created_at_ms),
                annotations: vm.metadata.clone().into_iter().collect(),
            },
            spec: Spec {
                image: vm.image.clone(),
                cpus: vm.vcpus,
                memory_mib: vm.memory_mib,
                command: vm.command.clone(),
                ports: vm.ports.iter().map(port).collect(),
                volumes: vm.volumes.iter().map(Volume::of_node).collect(),
            },
            status: Status {
                state: state_name(vm.state()).to_owned(),
                message: vm.message.clone(),
                node_name: "local".to_owned(),
                image_digest: vm.image_digest.clone(),
                ip_address: vm.ip_address.clone(),
                mac: vm.mac.clone(),
                driver: vm.driver.clone(),
                accelerator: vm.accelerator.clone(),
                vmm_pid: vm.vmm_pid,
                started_at: time(vm.started_at_ms),
                finished_at: time(vm.finished_at_ms),
                exit: vm.exit.as_ref().map(exit),
                oom_killed: vm.oom_killed,
                committed: vm.committed.clone(),
                boots: vm.boots,
                boot_ms: vm.boot_ms,
                identity_ms: vm.identity_ms,
                workload_ms: vm.workload_ms,
                agent_connected: vm.agent_connected,
                disk_bytes: vm.disk_bytes,
                template: vm.template.clone(),
                pooled: vm.pooled,
                saved_bytes: vm.saved_bytes,
                conditions: vec![],
            },
        }
    }

    /// Converts an object of the cluster. Fields that only a node knows are empty.
    pub(crate) fn of_object(vm: &MikromVM, nodes: &[Lease]) -> Self {
        let status = vm.status.clone().unwrap_or_default();
        let conditions: Vec<Condition> = status
            .conditions
            .iter()
            .map(|c| Condition {
                kind: c.type_.clone(),
                status: c.status.clone(),
                reason: c.reason.clone(),
                message: c.message.clone(),
            })
            .collect();
        let ready = conditions.iter().find(|c| c.kind == condition::READY);
        let node = nodes.iter().find(|lease| {
            !status.node_name.is_empty()
                && (lease.annotations().get(keys::NODE) == Some(&status.node_name)
                    || lease.name_any() == status.node_name)
        });
        let said =
            |key: &str| node.and_then(|lease| lease.annotations().get(key)).cloned().unwrap_or_default();
        let starts = u32::try_from(status.restarts).unwrap_or(0).saturating_add(1);
        let boots = if status.vm_id.is_empty() { 0 } else { starts };
        let created = vm.metadata.creation_timestamp.as_ref().map(|t| t.0.to_string());
        Self {
            api_version: output::API_VERSION,
            kind: "VM",
            metadata: Metadata {
                name: vm.name_any(),
                namespace: vm.namespace().unwrap_or_default(),
                id: status.vm_id,
                uid: vm.uid().unwrap_or_default(),
                created_at: created,
                annotations: vm.annotations().clone(),
            },
            spec: Spec {
                image: vm.spec.image.clone(),
                cpus: u32::try_from(vm.spec.vcpu_count).unwrap_or(0),
                memory_mib: u64::try_from(vm.spec.memory_mib).unwrap_or(0),
                ..Spec::default()
            },
            status: Status {
                state: status.phase.map_or_else(|| "Pending".to_owned(), |p| format!("{p:?}")),
                message: ready.filter(|c| c.status != "True").map_or_else(String::new, |c| c.message.clone()),
                node_name: status.node_name,
                image_digest: status.image_digest,
                ip_address: status.ip_address,
                driver: said(keys::DRIVER),
                accelerator: said(keys::ACCELERATOR),
                boots,
                conditions,
                ..Status::default()
            },
        }
    }

    /// Adds the data of the node to the data of the cluster.
    pub(crate) fn with_node(mut self, vm: &pb::Vm) -> Self {
        let known = Self::of_node(vm);
        self.metadata.id = known.metadata.id;
        self.spec.command = known.spec.command;
        self.spec.ports = known.spec.ports;
        self.spec.volumes = known.spec.volumes;
        let (node_name, conditions, state) =
            (self.status.node_name, self.status.conditions, self.status.state);
        let message =
            if self.status.message.is_empty() { known.status.message.clone() } else { self.status.message };
        self.status = Status { node_name, conditions, state, message, ..known.status };
        self
    }

    /// Returns whether the VM is neither running nor being started.
    pub(crate) fn is_off(&self) -> bool {
        matches!(self.status.state.as_str(), "Stopped" | "Failed" | "Created")
    }

    /// Returns the state, with the exit code of a stopped VM.
    fn state_word(&self) -> String {
        match &self.status.exit {
            Some(exit) if self.status.state == "Stopped" => format!("Stopped ({})", exit.code),
            _ => self.status.state.clone(),
        }
    }

    /// Returns the name of the driver, with its accelerator.
    pub(crate) fn driver_word(&self) -> String {
        let status = &self.status;
        match (status.driver.as_str(), status.accelerator.as_str()) {
            ("", _) => "-".to_owned(),
            (driver, "") => driver.to_owned(),
            (driver, accelerator) => format!("{driver}/{accelerator}"),
        }
    }

    /// Returns the VM as a JSON document.
    pub(crate) fn document(&self) -> Result<serde_json::Value, Failure> {
        serde_json::to_value(self).map_err(|e| Failure::new("COR-CLI-004", e.to_string()))
    }
}

/// Returns the table of `coracle ps`.
pub(crate) fn table(vms: &[Vm], wide: bool, namespaces: bool, now: jiff::Timestamp) -> Columns {
    let mut header = vec!["NAME", "STATE", "DRIVER", "CPU", "MEMORY", "IP", "NODE", "IMAGE", "AGE"];
    if namespaces {
        header.insert(0, "NAMESPACE");
    }
    if wide {
        header.extend(["ID", "BOOTS", "BOOT", "DISK", "DIGEST", "MESSAGE"]);
    }
    let mut columns = Columns::new(&header);
    let dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    for vm in vms {
        let (spec, status) = (&vm.spec, &vm.status);
        let mut row = vec![
            vm.metadata.name.clone(),
            vm.state_word(),
            vm.driver_word(),
            spec.cpus.to_string(),
            format!("{} MiB", spec.memory_mib),
            dash(&status.ip_address),
            dash(&status.node_name),
            dash(&spec.image),
            age(vm.metadata.created_at.as_deref(), now),
        ];
        if namespaces {
            row.insert(0, vm.metadata.namespace.clone());
        }
        if wide {
            let boot = if status.boot_ms == 0 { "-".to_owned() } else { format!("{} ms", status.boot_ms) };
            row.extend([
                dash(&vm.metadata.id),
                status.boots.to_string(),
                boot,
                output::bytes(status.disk_bytes),
                dash(status.image_digest.get(..19).unwrap_or(&status.image_digest)),
                dash(status.message.lines().next().unwrap_or_default()),
            ]);
        }
        columns.row(&row);
    }
    columns
}

/// Returns the age of a time in a document.
pub(crate) fn age(time: Option<&str>, now: jiff::Timestamp) -> String {
    let then: Option<jiff::Timestamp> = time.and_then(|t| t.parse().ok());
    then.map_or_else(|| "-".to_owned(), |then| output::age(now.as_millisecond() - then.as_millisecond()))
}

#[cfg(test)]
pub(crate) mod tests {
    use coracle_api::{MikromVMSpec, MikromVMStatus, Phase};
    use serde_json::{Value, json};

    use super::*;

    /// Returns a VM as a node reports it.
    pub(crate) fn on_node() -> pb::Vm {
        pb::Vm {
            id: "web-0123456789ab".into(),
            name: "web".into(),
            state: pb::VmState::Running.into(),
            image: "localhost/coracle/demo:1".into(),
            image_digest: "sha256:00112233445566778899aabbccddeeff".into(),
            vcpus: 1,
            memory_mib: 256,
            ip_address: "10.100.0.4".into(),
            mac: "02:00:00:00:00:04".into(),
            driver: "qemu".into(),
            accelerator: "tcg".into(),
            vmm_pid: 4711,
            created_at_ms: 1_700_000_000_000,
            started_at_ms: 1_700_000_001_000,
            ports: vec![pb::PortMapping {
                host_address: "127.0.0.1".into(),
                host_port: 8080,
                guest_port: 80,
                protocol: "tcp".into(),
            }],
            boots: 1,
            agent_connected: true,
            boot_ms: 2150,
            disk_bytes: 1 << 20,
            command: vec!["/bin/sh".into(), "-c".into(), "httpd".into()],
            ..pb::Vm::default()
        }
    }

    /// Returns the same VM as an object of a cluster.
    pub(crate) fn in_cluster() -> MikromVM {
        let spec = MikromVMSpec {
            image: "localhost/coracle/demo:1".into(),
            vcpu_count: 1,
            memory_mib: 256,
            ..MikromVMSpec::default()
        };
        let mut vm = MikromVM::new("web", spec);
        vm.metadata.namespace = Some("default".into());
        vm.metadata.uid = Some("6a1f".into());
        let ready = json!({"type": "Ready", "status": "False", "reason": "AgentError",
            "message": "CreateVM at 127.0.0.1:1: image nope:1 is not there", "lastTransitionTime": "2023-11-14T22:13:20Z"});
        vm.status = Some(MikromVMStatus {
            phase: Some(Phase::Failed),
            node_name: "w1".into(),
            agent_address: "127.0.0.1:1".into(),
            conditions: vec![serde_json::from_value(ready).unwrap()],
            ..MikromVMStatus::default()
        });
        vm
    }

    fn keys(value: &Value, at: &str, out: &mut Vec<String>) {
        match value {
            Value::Object(map) if at != ".metadata.annotations" => {
                for (key, value) in map {
                    keys(value, &format!("{at}.{key}"), out);
                }
            }
            _ => out.push(at.to_owned()),
        }
    }

    #[test]
    fn node_and_cluster_documents_have_the_same_shape() {
        let shape = |vm: &Vm| {
            let mut all = vec![];
            keys(&vm.document().unwrap(), "", &mut all);
            all
        };
        let mut node = Vm::of_node(&on_node());
        let object = Vm::of_object(&in_cluster(), &[]);
        node.status.exit = None;
        assert_eq!(shape(&node), shape(&object));
        assert_eq!(shape(&object.clone().with_node(&on_node())), shape(&object));
    }

    #[test]
    fn golden_tables_and_documents() {
        let now = jiff::Timestamp::from_second(1_700_000_180).unwrap();
        let vms = [Vm::of_node(&on_node()), Vm::of_object(&in_cluster(), &[])];
        insta::assert_snapshot!("table", table(&vms, false, false, now).text());
        insta::assert_snapshot!("wide", table(&vms, true, true, now).text());
        insta::assert_json_snapshot!("document_of_a_node", vms[0].document().unwrap());
        insta::assert_json_snapshot!("document_of_an_object", vms[1].document().unwrap());
    }

    #[test]
    fn node_state_completes_the_cluster_object() {
        let both = Vm::of_object(&in_cluster(), &[]).with_node(&on_node());
        assert_eq!((both.status.state.as_str(), both.status.node_name.as_str()), ("Failed", "w1"));
        assert_eq!(both.status.vmm_pid, 4711);
        assert!(both.status.message.contains("nope:1"), "the cluster's word is kept");
    }
}
