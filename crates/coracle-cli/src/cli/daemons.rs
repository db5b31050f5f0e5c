//! Flags of the daemons and of the local system.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{BidFlags, CocoonFlags, PoolFlags, WorkerThreads};

/// Configuration of access to registries.
#[derive(Args, Clone, Debug, Default)]
pub struct RegistryFlags {
    /// Directory with mirrors and certificates of registries, as HOST/hosts.toml [default: /etc/coracle/certs.d, if there]
    #[arg(long, env = "CORACLE_REGISTRY_CONFIG", value_name = "DIR")]
    pub registry_config: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub struct UpArgs {
    /// Return once everything is Ready
    #[arg(long)]
    pub detach: bool,
    /// Use this cluster instead of a local control plane
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Do not import the demo image
    #[arg(long)]
    pub no_demo: bool,
    /// Further parts of the local control plane
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART,…")]
    pub with: Vec<Part>,
    /// Name by which the cluster of --kubeconfig reaches this machine; without it no admission webhook is installed
    #[arg(long, value_name = "HOST", requires = "kubeconfig")]
    pub webhook_url_host: Option<String>,
    /// Directory with etcd, kube-apiserver and kubectl
    #[arg(long, env = "CORACLE_TOOLS", value_name = "DIR")]
    pub tools: Option<PathBuf>,
    #[command(flatten)]
    pub registries: RegistryFlags,
    /// Deny VMs of the cluster registries at private addresses, except those of --registry-config
    #[arg(long, env = "CORACLE_NODE_REGISTRY_DENY_PRIVATE")]
    pub registry_deny_private: bool,
    /// Run as the background process of a detached start
    #[arg(long, hide = true)]
    pub supervise: bool,
}

/// Optional part of a local control plane.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Assigns Pods to nodes; without a kubelet, a virtual node of this machine runs them
    Scheduler,
    /// Runs Kubernetes' own controllers, which also make ServiceAccounts
    ControllerManager,
    /// Runs Pods as VMs of this machine
    Kubelet,
}

impl Part {
    /// Returns the value as typed on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Scheduler => "scheduler",
            Self::ControllerManager => "controller-manager",
            Self::Kubelet => "kubelet",
        }
    }
}

#[derive(Args, Debug)]
pub struct DownArgs {
    /// Also remove the state directory: VMs, images and the cluster's data
    #[arg(long)]
    pub purge: bool,
}

#[derive(Args, Debug)]
pub struct NodeArgs {
    #[command(flatten)]
    pub threads: WorkerThreads,
    /// Name of the node [default: the host's name]
    #[arg(long, env = "CORACLE_NODE_NAME")]
    pub node_name: Option<String>,
    /// Address of the FirecrackerAgent service
    #[arg(long, env = "CORACLE_NODE_AGENT_LISTEN", value_name = "ADDR")]
    pub agent_listen: Option<SocketAddr>,
    /// Serve FirecrackerAgent without TLS, for old clients
    #[arg(long, env = "CORACLE_NODE_AGENT_PLAINTEXT")]
    pub agent_plaintext: bool,
    /// Report failures inside replies, as the first generation of agents did
    #[arg(long, env = "CORACLE_NODE_AGENT_INBAND_ERRORS")]
    pub agent_inband_errors: bool,
    /// Address of the host service, for callers with a certificate
    #[arg(long, env = "CORACLE_NODE_HOST_LISTEN", value_name = "ADDR")]
    pub host_listen: Option<SocketAddr>,
    /// Socket of the CRI v1 server for a kubelet
    #[arg(long, env = "CORACLE_NODE_CRI_LISTEN", value_name = "SOCKET")]
    pub cri_listen: Option<PathBuf>,
    /// Runtime handlers that Pods may name, besides the default one
    #[arg(
        long,
        env = "CORACLE_NODE_CRI_HANDLERS",
        value_name = "NAME,…",
        value_delimiter = ',',
        default_value = "coracle"
    )]
    pub cri_handlers: Vec<String>,
    /// Namespace of the ConfigMap coracle-image-policy, whose keys must have signed the images that the kubelet's pods use
    /// [default: none: signatures are not looked for]
    #[arg(long, env = "CORACLE_NODE_CRI_IMAGE_POLICY", value_name = "NAMESPACE", requires = "cri_listen")]
    pub cri_image_policy: Option<String>,
    /// Register a virtual Node of this name, whose Pods are VMs of this machine
    #[arg(long, env = "CORACLE_NODE_VIRTUAL_NODE", value_name = "NAME")]
    pub virtual_node: Option<String>,
    /// Address of the kubelet API of the virtual node
    #[arg(
        long,
        env = "CORACLE_NODE_VIRTUAL_NODE_LISTEN",
        value_name = "ADDR",
        default_value = "0.0.0.0:10250",
        requires = "virtual_node"
    )]
    pub virtual_node_listen: SocketAddr,
    /// Address at which the cluster reaches the virtual node; bridge: the node's address on the bridge of its guests, and the
    /// only one that it listens at [default: that of the interface with the default route]
    #[arg(
        long,
        env = "CORACLE_NODE_VIRTUAL_NODE_ADDRESS",
        value_name = "IP|bridge",
        requires = "virtual_node"
    )]
    pub virtual_node_address: Option<NodeAddress>,
    /// Taints of the virtual node at registration; none: no taint
    #[arg(
        long,
        env = "CORACLE_NODE_VIRTUAL_NODE_TAINT",
        value_name = "KEY=VALUE:EFFECT,…",
        value_delimiter = ',',
        default_value = "virtual-kubelet.io/provider=cocoon:NoSchedule",
        requires = "virtual_node"
    )]
    pub virtual_node_taint: Vec<String>,
    /// Name servers of the cluster, for Pods of the virtual node
    #[arg(
        long,
        env = "CORACLE_NODE_VIRTUAL_NODE_DNS",
        value_name = "IP,…",
        value_delimiter = ',',
        requires = "virtual_node"
    )]
    pub virtual_node_dns: Vec<IpAddr>,
    /// Available memory and disk space below which the virtual node reports pressure, in the format of a kubelet's
    /// --eviction-hard; none: never
    #[arg(
        long,
        env = "CORACLE_NODE_VIRTUAL_NODE_EVICTION_HARD",
        value_name = "SIGNAL<AMOUNT,…",
        default_value = "memory.available<100Mi,nodefs.available<5%",
        requires = VIRTUAL_NODE
    )]
    pub virtual_node_eviction_hard: String,
    /// Namespace of the ConfigMap coracle-image-policy, whose keys must have signed the images of pods [default: none:
    /// signatures are not looked for]
    #[arg(long, env = "CORACLE_NODE_VIRTUAL_NODE_IMAGE_POLICY", value_name = "NAMESPACE", requires = VIRTUAL_NODE)]
    pub virtual_node_image_policy: Option<String>,
    /// Directories that may contain exported snapshots (DIR/snapshot.tar.zst), which Pods name by the annotation
    /// vm.cocoonstack.io/clone-from-dir [default: none]
    #[arg(
        long,
        env = "CORACLE_NODE_VIRTUAL_NODE_CLONE_DIR",
        value_name = "DIR,…",
        value_delimiter = ',',
        requires = VIRTUAL_NODE
    )]
    pub virtual_node_clone_dir: Vec<PathBuf>,
    /// Pool of the virtual node, by which CocoonSets select it
    #[arg(long, env = "CORACLE_NODE_VIRTUAL_NODE_POOL", value_name = "NAME", default_value = "default", requires = VIRTUAL_NODE)]
    pub virtual_node_pool: String,
    /// Registry for saved states of the virtual node's VMs [default: none: they stay on this machine]
    #[arg(long, env = "CORACLE_NODE_VIRTUAL_NODE_REGISTRY", value_name = "URL", requires = VIRTUAL_NODE)]
    pub virtual_node_registry: Option<String>,
    /// Token of that registry
    #[arg(long, env = "CORACLE_NODE_VIRTUAL_NODE_REGISTRY_TOKEN", hide_env_values = true, value_name = "TOKEN", requires = SAVED_STATES)]
    pub virtual_node_registry_token: Option<String>,
    /// What to do with VMs whose Pods were deleted while the node daemon was down: alert, destroy or keep
    #[arg(long, env = "CORACLE_NODE_VIRTUAL_NODE_ORPHANS", value_name = "POLICY", default_value = "alert", requires = VIRTUAL_NODE)]
    pub virtual_node_orphans: String,
    /// Certificate of the node [default: signed by the operator of the cluster, if there is a cluster]
    #[arg(long, env = "CORACLE_NODE_TLS_CERT", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Key of the certificate
    #[arg(long, env = "CORACLE_NODE_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Authority of the client certificates that callers must show
    #[arg(long, env = "CORACLE_NODE_TLS_CLIENT_CA", value_name = "FILE")]
    pub tls_client_ca: Option<PathBuf>,
    /// Address of metrics and health
    #[arg(long, env = "CORACLE_NODE_ADMIN_LISTEN", value_name = "ADDR")]
    pub admin_listen: Option<SocketAddr>,
    /// Announce the node to this cluster
    #[arg(long, env = "CORACLE_NODE_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Announce the node to the cluster that this Pod runs in
    #[arg(long, env = "CORACLE_NODE_IN_CLUSTER", conflicts_with = "kubeconfig")]
    pub in_cluster: bool,
    /// Address at which the cluster reaches the agent service [default: the listen address]
    #[arg(long, env = "CORACLE_NODE_ADVERTISE", value_name = "HOST:PORT")]
    pub advertise: Option<String>,
    /// Network of guests: bridge and cni need root [default: bridge for root, else user]
    #[arg(long, env = "CORACLE_NODE_NETWORK", value_enum)]
    pub network: Option<NetworkMode>,
    /// Directory with the networks of --network cni, one conflist file each; the first one is that of VMs that name none
    #[arg(long, env = "CORACLE_NODE_CNI_CONF_DIR", value_name = "DIR", default_value = "/etc/cni/net.d")]
    pub cni_conf_dir: PathBuf,
    /// Directory with the CNI plugins
    #[arg(long, env = "CORACLE_NODE_CNI_BIN_DIR", value_name = "DIR", default_value = "/opt/cni/bin")]
    pub cni_bin_dir: PathBuf,
    /// Destinations that new guests of the bridge may reach besides those outside of the node
    #[arg(long, env = "CORACLE_NODE_GUEST_REACH", value_enum, value_delimiter = ',')]
    pub guest_reach: Vec<ReachChoice>,
    /// Subnet of guests [default: the pod CIDR of the node, else a /24 of --subnet-range that no other node has]
    #[arg(long, env = "CORACLE_NODE_SUBNET")]
    pub subnet: Option<coracle_net::Subnet>,
    /// Range that subnets of guests are taken from
    #[arg(long, env = "CORACLE_NODE_SUBNET_RANGE", value_name = "SUBNET", default_value = "10.100.0.0/16")]
    pub subnet_range: coracle_net::Subnet,
    /// Networks of the cluster's Pods: guests reach Pods there by their own addresses, without masquerading. With a cluster
    /// (--kubeconfig, --in-cluster) this host gets a route to the Pods of each other node on its link
    #[arg(long, env = "CORACLE_NODE_POD_NETWORK", value_name = "SUBNET", value_delimiter = ',')]
    pub pod_network: Vec<coracle_net::Subnet>,
    /// Directory with the guest's files of this version of Coracle: vmlinuz, initrd, and vmlinux for Firecracker and emulated guests
    #[arg(long, env = "CORACLE_NODE_BOOT", value_name = "DIR")]
    pub boot: Option<PathBuf>,
    /// Cold boot every VM instead of cloning templates
    #[arg(long, env = "CORACLE_NODE_NO_TEMPLATES")]
    pub no_templates: bool,
    /// Number of templates to keep; the oldest are removed first
    #[arg(long, env = "CORACLE_NODE_TEMPLATES_MAX", value_name = "COUNT", default_value_t = 8)]
    pub templates_max: usize,
    /// Memory of all templates together, in MiB; the oldest are removed first
    #[arg(long, env = "CORACLE_NODE_TEMPLATES_MAX_MIB", value_name = "MIB", default_value_t = 4096)]
    pub templates_max_mib: u64,
    /// Replace a template that is older than this, like 24h
    #[arg(long, env = "CORACLE_NODE_TEMPLATES_MAX_AGE", value_name = "DURATION", default_value = "168h")]
    pub templates_max_age: jiff::SignedDuration,
    /// Warm pool: number of size classes, the most recently started ones, that get paused clones; 0 disables it
    #[arg(
        long,
        alias = "standbys",
        env = "CORACLE_NODE_WARM_POOL",
        value_name = "COUNT",
        default_value_t = 2
    )]
    pub warm_pool: usize,
    /// Fewest pooled clones of a size class, more after a burst of starts [default: one per GiB of the host's memory, at most
    /// 20]
    #[arg(long, env = "CORACLE_NODE_WARM_POOL_MIN", value_name = "COUNT")]
    pub warm_pool_min: Option<usize>,
    /// Most pooled clones of all size classes together; fewer while less than a quarter of the host's memory, or 4 GiB, is
    /// available
    #[arg(long, env = "CORACLE_NODE_WARM_POOL_MAX", value_name = "COUNT", default_value_t = 32)]
    pub warm_pool_max: usize,
    /// End a pooled clone when no VM of its shape was started for this long
    #[arg(
        long,
        alias = "standby-max-idle",
        env = "CORACLE_NODE_WARM_POOL_MAX_IDLE",
        value_name = "DURATION",
        default_value = "10m"
    )]
    pub warm_pool_max_idle: jiff::SignedDuration,
    /// Directory from which callers may name kernels
    #[arg(long, env = "CORACLE_NODE_KERNEL_DIR", value_name = "DIR")]
    pub kernel_dir: Vec<PathBuf>,
    /// Directory from which callers may name volumes and image files; / allows any. Local callers may also name their own files
    #[arg(long, env = "CORACLE_NODE_VOLUME_DIR", value_name = "DIR")]
    pub volume_dir: Vec<PathBuf>,
    /// Directory for disks of a class that VMs may ask for; only this node uses it
    #[arg(long, env = "CORACLE_NODE_DISK_CLASS", value_name = "NAME=DIR", value_parser = disk_class)]
    pub disk_class: Vec<(String, PathBuf)>,
    #[command(flatten)]
    pub registries: RegistryFlags,
    /// Deny VMs of the cluster registries at private addresses, except those of --registry-config
    #[arg(long, env = "CORACLE_NODE_REGISTRY_DENY_PRIVATE")]
    pub registry_deny_private: bool,
    /// QEMU's system emulator
    #[arg(long, env = "CORACLE_NODE_QEMU", default_value = "qemu-system-x86_64")]
    pub qemu: PathBuf,
    /// Firecracker program, for VMs that ask for it
    #[arg(long, env = "CORACLE_FIRECRACKER_BIN", default_value = "firecracker", value_name = "PROGRAM")]
    pub firecracker: PathBuf,
    /// Cloud Hypervisor program, for VMs that ask for it
    #[arg(
        long,
        env = "CORACLE_CLOUD_HYPERVISOR_BIN",
        default_value = "cloud-hypervisor",
        value_name = "PROGRAM"
    )]
    pub cloud_hypervisor: PathBuf,
    /// Accelerator to use
    #[arg(long, env = "CORACLE_NODE_ACCELERATOR", value_enum, default_value_t)]
    pub accelerator: AcceleratorChoice,
    /// Share of the host's memory that VMs may declare in total
    #[arg(long, env = "CORACLE_NODE_MEMORY_OVERCOMMIT", default_value_t = 1.0)]
    pub memory_overcommit: f64,
    /// Log level or filter
    #[arg(long, env = "CORACLE_NODE_LOG", default_value = "info")]
    pub log: String,
    /// Configuration file of the original firecracker-agent
    #[arg(long, hide = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Started under the name of the original agent
    #[arg(long, hide = true)]
    pub legacy: bool,
    /// Started under the name of the original provider of virtual nodes
    #[arg(long, hide = true)]
    pub vk_cocoon: bool,
}

/// Argument ids that other flags require.
const VIRTUAL_NODE: &str = "virtual_node";
const SAVED_STATES: &str = "virtual_node_registry";

/// Address of a virtual node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeAddress {
    /// Explicit address.
    Ip(IpAddr),
    /// Address of the node on the bridge of its guests.
    Bridge,
}

impl std::str::FromStr for NodeAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "bridge" => Ok(Self::Bridge),
            text => text
                .parse()
                .map(Self::Ip)
                .map_err(|_| format!("invalid address \"{text}\": want an IP or bridge")),
        }
    }
}

/// Destinations that guests of the bridge may reach besides those outside of their node.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReachChoice {
    /// Other guests that have this permission too
    Guests,
    /// Services of the node, and the API server of its cluster
    Node,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkMode {
    /// A bridge on the host, with a tap for each VM
    Bridge,
    /// Networks of CNI plugins, which also decide what guests reach
    Cni,
    /// User-mode network inside each VMM, without privileges; guests reach only forwarded ports
    User,
    /// Like user, but guests reach what this user reaches, including the host's loopback and metadata addresses
    UserOpen,
}

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AcceleratorChoice {
    /// KVM where it is proven to work, else TCG
    #[default]
    Auto,
    /// Translation by QEMU
    Tcg,
}

#[derive(Args, Debug)]
pub struct OperatorArgs {
    #[command(flatten)]
    pub threads: WorkerThreads,
    /// Cluster to work for [default: the one that this Pod runs in]
    #[arg(long, env = "CORACLE_OPERATOR_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Controllers to run
    #[arg(
        long,
        env = "CORACLE_OPERATOR_CONTROLLERS",
        value_enum,
        value_delimiter = ',',
        default_value = "mikromvm"
    )]
    pub controllers: Vec<Group>,
    /// Authority of the node certificates
    #[arg(long, env = "CORACLE_OPERATOR_AGENT_CA", value_name = "FILE")]
    pub agent_ca: Option<PathBuf>,
    /// Client certificate of the operator for nodes
    #[arg(long, env = "CORACLE_OPERATOR_AGENT_CERT", value_name = "FILE")]
    pub agent_cert: Option<PathBuf>,
    /// Key of the certificate
    #[arg(long, env = "CORACLE_OPERATOR_AGENT_KEY", value_name = "FILE")]
    pub agent_key: Option<PathBuf>,
    /// Sign certificates of nodes on request, and write the operator's own to this directory
    #[arg(
        long,
        env = "CORACLE_OPERATOR_NODE_AUTHORITY",
        value_name = "DIR",
        conflicts_with_all = ["agent_ca", "agent_plaintext"]
    )]
    pub node_authority: Option<PathBuf>,
    /// Keep a certificate of that authority in a Secret, for a server of the cluster: SECRET=HOST[,HOST…]
    #[arg(
        long,
        env = "CORACLE_OPERATOR_SERVING_CERTIFICATE",
        value_name = "SECRET=HOST",
        value_delimiter = ' ',
        requires = "node_authority"
    )]
    pub serving_certificate: Vec<coracle_authority::Serving>,
    /// Dial nodes without TLS, for old agents
    #[arg(long, env = "CORACLE_OPERATOR_AGENT_PLAINTEXT")]
    pub agent_plaintext: bool,
    /// Also dial this agent when an object names it: HOST:PORT, HOST or ADDRESS/PREFIX. Agents that nodes announce, and port
    /// 50051 of Nodes, need no such rule
    #[arg(long, env = "CORACLE_OPERATOR_AGENT_ALLOW", value_name = "AGENT", value_delimiter = ',')]
    pub agent_allow: Vec<coracle_microvm::AgentRule>,
    /// Address of the admission webhooks, which are then also installed
    #[arg(long, env = "CORACLE_OPERATOR_WEBHOOK_LISTEN", value_name = "ADDR")]
    pub webhook_listen: Option<SocketAddr>,
    /// Name by which the API server reaches the webhooks [default: the Service of the manifests]
    #[arg(long, env = "CORACLE_OPERATOR_WEBHOOK_URL_HOST", value_name = "HOST")]
    pub webhook_url_host: Option<String>,
    /// Namespace of the webhooks' Service, Secret and reservations
    #[arg(long, env = "CORACLE_OPERATOR_WEBHOOK_NAMESPACE", value_name = "NAME", default_value = coracle_api::keys::SYSTEM_NAMESPACE)]
    pub webhook_namespace: String,
    /// Answer only webhook callers with a certificate of this authority [default: all callers]
    #[arg(long, env = "CORACLE_OPERATOR_WEBHOOK_CLIENT_CA", value_name = "FILE")]
    pub webhook_client_ca: Option<PathBuf>,
    /// Address of metrics and health
    #[arg(long, env = "CORACLE_OPERATOR_ADMIN_LISTEN", value_name = "ADDR")]
    pub admin_listen: Option<SocketAddr>,
    /// Time without contact to a node after which its VMs count as lost
    #[arg(long, env = "CORACLE_OPERATOR_NODE_GRACE", default_value = "5m")]
    pub node_grace: jiff::SignedDuration,
    /// vCPUs that VMs may declare per CPU of a node
    #[arg(long, env = "CORACLE_OPERATOR_CPU_OVERCOMMIT", value_name = "FACTOR", default_value_t = 8.0, value_parser = factor)]
    pub cpu_overcommit: f64,
    /// Run without leader election
    #[arg(long, env = "CORACLE_OPERATOR_NO_ELECTION")]
    pub no_election: bool,
    /// Log level or filter
    #[arg(long, env = "CORACLE_OPERATOR_LOG", default_value = "info")]
    pub log: String,
    #[command(flatten)]
    pub pools: PoolFlags,
    #[command(flatten)]
    pub bids: BidFlags,
    #[command(flatten)]
    pub cocoon: CocoonFlags,
}

/// Controllers that run together, under a Lease of their own.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
#[value(rename_all = "lower")]
pub enum Group {
    /// MikromVMs
    MikromVm,
    /// VsphereAgentPools
    AgentPool,
    /// BidNodes
    BidNode,
    /// CocoonSets and CocoonHibernations
    CocoonSet,
}

/// Parses a number above 0.
fn factor(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if factor.is_finite() && factor > 0.0 => Ok(factor),
        _ => Err("invalid factor: a number above 0".to_owned()),
    }
}

/// Parses `NAME=DIR`.
fn disk_class(text: &str) -> Result<(String, PathBuf), String> {
    let is_name = |name: &str| {
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        (1..=63).contains(&name.len()) && !name.starts_with('-') && name.bytes().all(plain)
    };
    match text.split_once('=') {
        Some((name, dir)) if is_name(name) && dir.starts_with('/') => Ok((name.to_owned(), dir.into())),
        _ => {
            Err("invalid disk class: NAME=DIR, with a name of a-z, 0-9 and -, and an absolute path"
                .to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_above_zero() {
        assert_eq!(factor("1.5"), Ok(1.5));
        for bad in ["0", "-1", "NaN", "inf", "much"] {
            assert!(factor(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn disk_classes_have_a_name_and_an_absolute_directory() {
        assert_eq!(disk_class("fast=/nvme"), Ok(("fast".to_owned(), PathBuf::from("/nvme"))));
        for bad in ["fast", "=/nvme", "Fast=/nvme", "fast=nvme", "-f=/nvme", "fast="] {
            assert!(disk_class(bad).unwrap_err().contains("NAME=DIR"), "{bad}");
        }
    }
}

#[derive(Args, Debug)]
pub struct RoutesArgs {
    /// Networks of the cluster's Pods
    #[arg(long, env = "CORACLE_POD_NETWORK", value_name = "SUBNET", value_delimiter = ',', required = true)]
    pub pod_network: Vec<coracle_net::Subnet>,
    /// Kubeconfig of the cluster
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Use the cluster that this Pod runs in
    #[arg(long, conflicts_with = "kubeconfig")]
    pub in_cluster: bool,
    /// Name of the Node of this host [default: the host name]
    #[arg(long, env = "CORACLE_NODE_NAME", value_name = "NAME")]
    pub node_name: Option<String>,
    /// Log level or filter
    #[arg(long, env = "CORACLE_LOG", default_value = "info", value_name = "FILTER")]
    pub log: String,
}
