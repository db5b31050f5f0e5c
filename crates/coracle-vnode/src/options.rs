//! Settings of a virtual node.

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

/// Port of a kubelet.
pub const KUBELET_PORT: u16 = 10250;
/// Key, value and effect of the taint that keeps pods away that do not ask for a virtual node.
const PROVIDER_TAINT: (&str, &str, &str) = ("virtual-kubelet.io/provider", "cocoon", "NoSchedule");
/// Effects that the API knows.
const EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];

/// What a virtual node is, and how it behaves.
#[derive(Clone, Debug)]
pub struct VirtualNodeOptions {
    /// Name of the Node object.
    pub name: String,
    /// Where its HTTPS API listens.
    pub listen: SocketAddr,
    /// Address at which the API server and pods reach the node; `None`: the one that `listen` has, else that of the
    /// interface with the default route.
    pub address: Option<IpAddr>,
    /// Host name of the node; `None`: its name.
    pub hostname: Option<String>,
    /// Labels beside those that every node has.
    pub labels: BTreeMap<String, String>,
    /// Taints that it gets when it registers. Others may change them afterwards.
    pub taints: Vec<NodeTaint>,
    /// Most pods at a time.
    pub pods_max: u32,
    /// Available memory and disk space below which the node reports pressure.
    pub pressure: PressureThresholds,
    /// Id of the machine at its cloud (`spec.providerID`).
    pub provider_id: Option<String>,
    /// CPUs that the node says it has; `None`: those of the machine.
    pub cpus: Option<u32>,
    /// Memory that the node says it has; `None`: what VMs of the machine may have.
    pub memory: Option<MemoryMib>,
    /// Domain of the cluster.
    pub cluster_domain: String,
    /// Name servers of the cluster; none: the API server's Service `kube-dns` is not looked up, pods use the node's.
    pub cluster_dns: Vec<IpAddr>,
    /// Memory of a pod that asks for none.
    pub default_memory: MemoryMib,
    /// Memory of a guest's kernel and agent, beside that of the containers.
    pub guest_overhead_mib: u32,
    /// Where the files of pods are; `None`: `pods` in the state directory of the host core.
    pub pods_dir: Option<PathBuf>,
    /// Where files of pods are that must not reach a disk; `None`: `pods` in the run directory of the host core.
    pub pods_memory_dir: Option<PathBuf>,
    /// The certificate that its API shows.
    pub certificate: CertificateSource,
    /// Authorities of client certificates, PEM; `None`: what the cluster publishes, and without it clients need tokens.
    pub client_ca: Option<PathBuf>,
    /// Requests without credentials are of `system:anonymous`; else they are refused.
    pub anonymous: bool,
    /// What happens when the node starts and its pods cannot be read.
    pub start: StartPolicy,
    /// Time between two events of the node's own life.
    pub intervals: Intervals,
    /// Namespace of the ConfigMap that names the keys of signed images; `None`: no signature is asked for.
    pub image_policy: Option<String>,
    /// Pods whose container is a VM.
    pub vms: VmPodOptions,
}

/// How a node starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StartPolicy {
    /// The node registers at once and is ready when its pods are known. Reads are tried again for as long as they fail.
    #[default]
    Retry,
    /// The node registers when its pods are known. When they cannot be read, it ends with an error and does not register.
    ExitUnlessReconciled,
}

/// Settings for pods whose container is a VM.
#[derive(Clone, Debug, Default)]
pub struct VmPodOptions {
    /// Where their states are saved; `None`: on this node alone.
    pub registry: Option<coracle_vm_pod::saved::Registry>,
    /// What happens to a VM whose pod went away while this node was not there.
    pub orphans: coracle_vm_pod::orphans::OrphanPolicy,
    /// Leases of a DHCP server of this node, where the node itself gives VMs no addresses.
    pub leases: Option<PathBuf>,
    /// Snapshots that pods may name by their directory.
    pub exported: coracle_vm_pod::exported::ExportedSnapshots,
    /// Password of the user root in guests whose agent does not answer; `None`: they are not reached.
    pub ssh: Option<coracle_vm_pod::ssh::Password>,
    /// What is counted of them.
    pub metrics: coracle_vm_pod::metrics::Metrics,
}

/// Times between events of the node's own life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intervals {
    /// How long the node counts as alive after its last renewal. Whole seconds.
    pub lease: Duration,
    /// Between two renewals of its Lease.
    pub renew: Duration,
    /// Between two looks at what the node is.
    pub observe: Duration,
    /// The status is written after this time, even when it has not changed.
    pub report: Duration,
    /// Between two searches for VMs without a pod.
    pub sweep: Duration,
}

impl Default for Intervals {
    /// Those of a kubelet (`kubelet` reference, nodeStatusUpdateFrequency and nodeStatusReportFrequency).
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
    /// A node with the settings of a kubelet, the taint of virtual nodes, and a certificate of the cluster.
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

/// A taint, as `key=value:effect` or `key:effect`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeTaint {
    /// Its key.
    pub key: String,
    /// Its value; may be empty.
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
}

/// A text that is not a taint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid taint {0:?}: not key=value:effect with the effect NoSchedule, PreferNoSchedule or NoExecute"
)]
pub struct InvalidTaint(String);

impl NodeTaint {
    /// The taint of virtual nodes, `virtual-kubelet.io/provider=cocoon:NoSchedule`.
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
