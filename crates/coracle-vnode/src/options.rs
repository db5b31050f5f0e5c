//! Options of a virtual node.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use coracle_certificate::CertificateSource;
use coracle_types::MemoryMib;
use k8s_openapi::api::core::v1::Taint;

use crate::pressure::PressureThresholds;

/// API port of a kubelet.
pub const KUBELET_PORT: u16 = 10250;
/// Key, value and effect of the taint that repels pods without a toleration for virtual nodes.
const PROVIDER_TAINT: (&str, &str, &str) = ("virtual-kubelet.io/provider", "cocoon", "NoSchedule");
/// Taint effects of the API.
const EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];

/// Options of a virtual node.
#[derive(Clone, Debug)]
pub struct VirtualNodeOptions {
    /// Name of the Node object.
    pub name: String,
    /// Address that the HTTPS API listens on.
    pub listen: SocketAddr,
    /// Address at which the API server and pods reach the node; `None`: that of `listen`, else that of the interface with the
    /// default route.
    pub address: Option<IpAddr>,
    /// Host name of the node; `None`: the name of the Node object.
    pub hostname: Option<String>,
    /// Labels, in addition to those that every node has.
    pub labels: BTreeMap<String, String>,
    /// Taints that are set at registration. Others may change them afterwards.
    pub taints: Vec<NodeTaint>,
    /// Most pods at the same time.
    pub pods_max: u32,
    /// Available memory and disk space below which the node reports pressure.
    pub pressure: PressureThresholds,
    /// Id of the machine at its cloud provider (`spec.providerID`).
    pub provider_id: Option<String>,
    /// Number of CPUs that the node reports; `None`: that of the machine.
    pub cpus: Option<u32>,
    /// Memory that the node reports; `None`: the memory that VMs of the machine may use.
    pub memory: Option<MemoryMib>,
    /// Domain of the cluster.
    pub cluster_domain: String,
    /// Name servers of the cluster; none: pods use those of the node. The Service `kube-dns` is not looked up.
    pub cluster_dns: Vec<IpAddr>,
    /// Memory of a VM whose pod requests none, and the least memory if a container has no memory limit.
    pub default_memory: MemoryMib,
    /// Memory of a guest's kernel and agent, in addition to that of the containers.
    pub guest_overhead_mib: u32,
    /// Directory for files of pods; `None`: `pods` in the state directory of the host core.
    pub pods_dir: Option<PathBuf>,
    /// Directory for files of pods that must not reach a disk; `None`: `pods` in the run directory of the host core.
    pub pods_memory_dir: Option<PathBuf>,
    /// Serving certificate of the node's API.
    pub certificate: CertificateSource,
    /// Authorities of client certificates, PEM; `None`: those that the cluster publishes. If there are none, clients need
    /// tokens.
    pub client_ca: Option<PathBuf>,
    /// Requests without credentials get the user `system:anonymous`; else they are refused.
    pub anonymous: bool,
    /// Behaviour when the node starts and its pods cannot be read.
    pub start: StartPolicy,
    /// Intervals of the node's periodic work.
    pub intervals: Intervals,
    /// Namespace of the ConfigMap with the keys of signed images; `None`: no signature is required.
    pub image_policy: Option<String>,
    /// Options for pods whose container is a VM.
    pub vms: VmPodOptions,
}

/// Start policy of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StartPolicy {
    /// Register at once, and become ready when the pods are known. Failed reads are retried without limit.
    #[default]
    Retry,
    /// Register only when the pods are known. If they cannot be read, exit with an error without registering.
    ExitUnlessReconciled,
}

/// Options for pods whose container is a VM.
#[derive(Clone, Debug, Default)]
pub struct VmPodOptions {
    /// Registry for saved states; `None`: states are saved only on this node.
    pub registry: Option<coracle_vm_pod::saved::Registry>,
    /// Policy for VMs whose pods were removed while this node was down.
    pub orphans: coracle_vm_pod::orphans::OrphanPolicy,
    /// File with the leases of a DHCP server of this node, if the node itself assigns no addresses to VMs.
    pub leases: Option<PathBuf>,
    /// Exported snapshots that pods may name by their directory.
    pub exported: coracle_vm_pod::exported::ExportedSnapshots,
    /// Password of root in guests whose agent is not connected; `None`: such guests cannot be accessed.
    pub ssh: Option<coracle_vm_pod::ssh::Password>,
    /// Metrics of these pods.
    pub metrics: coracle_vm_pod::metrics::Metrics,
}

/// Intervals of the node's periodic work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intervals {
    /// Lease duration: time after the last renewal for which the node counts as alive. Whole seconds.
    pub lease: Duration,
    /// Interval between renewals of the Lease.
    pub renew: Duration,
    /// Interval between observations of the node's resources.
    pub observe: Duration,
    /// Time after which the status is reported even if it has not changed.
    pub report: Duration,
    /// Interval between searches for VMs without a pod.
    pub sweep: Duration,
}

impl Default for Intervals {
    /// Intervals of a kubelet (`kubelet` reference, nodeStatusUpdateFrequency and nodeStatusReportFrequency).
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(40),
            renew: Duration::from_secs(10),
            observe: Duration::from_secs(10),
            report: Duration::from_secs(300),
            sweep: Duration::from_secs(60),
        }
    }
}

impl VirtualNodeOptions {
    /// Returns the options of a kubelet, with the taint of virtual nodes and a certificate signed by the cluster.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            listen: SocketAddr::from((Ipv4Addr::UNSPECIFIED, KUBELET_PORT)),
            address: None,
            hostname: None,
            labels: BTreeMap::new(),
            taints: vec![NodeTaint::provider()],
            pods_max: 110,
            pressure: PressureThresholds::default(),
            provider_id: None,
            cpus: None,
            memory: None,
            cluster_domain: "cluster.local".to_owned(),
            cluster_dns: vec![],
            default_memory: MemoryMib::try_from(512).unwrap_or(MemoryMib::MIN),
            guest_overhead_mib: 64,
            pods_dir: None,
            pods_memory_dir: None,
            certificate: CertificateSource::Cluster,
            client_ca: None,
            anonymous: false,
            start: StartPolicy::default(),
            intervals: Intervals::default(),
            image_policy: None,
            vms: VmPodOptions::default(),
        }
    }
}

/// Taint, as `key=value:effect` or `key:effect`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeTaint {
    /// Key of the taint.
    pub key: String,
    /// Value of the taint; may be empty.
    pub value: String,
    /// Effect: `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
}

/// Invalid taint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid taint {0:?}: not key=value:effect with the effect NoSchedule, PreferNoSchedule or NoExecute"
)]
pub struct InvalidTaint(String);

impl NodeTaint {
    /// Returns the taint of virtual nodes, `virtual-kubelet.io/provider=cocoon:NoSchedule`.
    #[must_use]
    pub fn provider() -> Self {
        let (key, value, effect) = PROVIDER_TAINT;
        Self { key: key.to_owned(), value: value.to_owned(), effect: effect.to_owned() }
    }

    pub(crate) fn to_api(&self) -> Taint {
        let value = Some(self.value.clone()).filter(|value| !value.is_empty());
        Taint { key: self.key.clone(), value, effect: self.effect.clone(), ..Taint::default() }
    }
}

impl FromStr for NodeTaint {
    type Err = InvalidTaint;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.rsplit_once(':').filter(|(_, effect)| EFFECTS.contains(effect));
        let (name, effect) = parts.ok_or_else(|| InvalidTaint(text.to_owned()))?;
        let (key, value) = name.split_once('=').unwrap_or((name, ""));
        if key.is_empty() {
            return Err(InvalidTaint(text.to_owned()));
        }
        Ok(Self { key: key.to_owned(), value: value.to_owned(), effect: effect.to_owned() })
    }
}

impl fmt::Display for NodeTaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let equals = if self.value.is_empty() { "" } else { "=" };
        write!(f, "{}{equals}{}:{}", self.key, self.value, self.effect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taint_round_trips_through_its_text() {
        for text in ["virtual-kubelet.io/provider=cocoon:NoSchedule", "a:NoExecute", "a=b=c:PreferNoSchedule"]
        {
            assert_eq!(text.parse::<NodeTaint>().unwrap().to_string(), text);
        }
        assert_eq!("virtual-kubelet.io/provider=cocoon:NoSchedule".parse(), Ok(NodeTaint::provider()));
        for text in ["", "a", "a=b", "a=b:never", ":NoSchedule", "=b:NoSchedule"] {
            assert!(text.parse::<NodeTaint>().is_err(), "{text}");
        }
    }
}
