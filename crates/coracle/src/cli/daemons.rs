//! Flags of the daemons and of the local system.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{BidFlags, PoolFlags};

#[derive(Args, Debug)]
pub(crate) struct UpArgs {
    /// Return once everything is Ready
    #[arg(long)]
    pub(crate) detach: bool,
    /// Use this cluster instead of a local control plane
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Do not import the demo image
    #[arg(long)]
    pub(crate) no_demo: bool,
    /// Further parts of the local control plane
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART,…")]
    pub(crate) with: Vec<Part>,
    /// Name by which the cluster of --kubeconfig reaches this machine; without it there is no admission webhook
    #[arg(long, value_name = "HOST", requires = "kubeconfig")]
    pub(crate) webhook_url_host: Option<String>,
    /// Folder with etcd, kube-apiserver and kubectl
    #[arg(long, env = "CORACLE_TOOLS", value_name = "DIR")]
    pub(crate) tools: Option<PathBuf>,
    /// Run as the background process of a detached start
    #[arg(long, hide = true)]
    pub(crate) supervise: bool,
}

/// A part of a control plane that not every system needs.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Places Pods on nodes
    Scheduler,
    /// Makes ServiceAccounts, and runs Kubernetes' own controllers
    ControllerManager,
    /// Not offered yet
    Kubelet,
}

impl Part {
    /// As it is typed.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Scheduler => "scheduler",
            Self::ControllerManager => "controller-manager",
            Self::Kubelet => "kubelet",
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct DownArgs {
    /// Also remove the state folder: VMs, images and the cluster's data
    #[arg(long)]
    pub(crate) purge: bool,
}

#[derive(Args, Debug)]
pub(crate) struct NodeArgs {
    /// Name of the node [default: the host's name]
    #[arg(long, env = "CORACLE_NODE_NAME")]
    pub(crate) node_name: Option<String>,
    /// Serve FirecrackerAgent here
    #[arg(long, env = "CORACLE_NODE_AGENT_LISTEN", value_name = "ADDR")]
    pub(crate) agent_listen: Option<SocketAddr>,
    /// Serve it without TLS, for old clients
    #[arg(long, env = "CORACLE_NODE_AGENT_PLAINTEXT")]
    pub(crate) agent_plaintext: bool,
    /// Tell failures inside replies, as the first generation of agents did
    #[arg(long, env = "CORACLE_NODE_AGENT_INBAND_ERRORS")]
    pub(crate) agent_inband_errors: bool,
    /// Serve everything that the node does here, to callers with a certificate
    #[arg(long, env = "CORACLE_NODE_HOST_LISTEN", value_name = "ADDR")]
    pub(crate) host_listen: Option<SocketAddr>,
    /// Certificate of the node
    #[arg(long, env = "CORACLE_NODE_TLS_CERT", value_name = "FILE")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Key of the certificate
    #[arg(long, env = "CORACLE_NODE_TLS_KEY", value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Authority of the certificates that callers must show
    #[arg(long, env = "CORACLE_NODE_TLS_CLIENT_CA", value_name = "FILE")]
    pub(crate) tls_client_ca: Option<PathBuf>,
    /// Serve metrics and health here
    #[arg(long, env = "CORACLE_NODE_ADMIN_LISTEN", value_name = "ADDR")]
    pub(crate) admin_listen: Option<SocketAddr>,
    /// Announce the node to this cluster
    #[arg(long, env = "CORACLE_NODE_KUBECONFIG", value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Announce the node to the cluster that this Pod runs in
    #[arg(long, env = "CORACLE_NODE_IN_CLUSTER", conflicts_with = "kubeconfig")]
    pub(crate) in_cluster: bool,
    /// Address that the cluster reaches the agent at [default: the listen address]
    #[arg(long, env = "CORACLE_NODE_ADVERTISE", value_name = "HOST:PORT")]
    pub(crate) advertise: Option<String>,
    /// Network of guests: bridge needs root [default: bridge for root, else user]
    #[arg(long, env = "CORACLE_NODE_NETWORK", value_enum)]
    pub(crate) network: Option<NetworkMode>,
    /// Subnet of guests [default: the first free /24 of 10.100.0.0/16]
    #[arg(long, env = "CORACLE_NODE_SUBNET")]
    pub(crate) subnet: Option<coracle_net::Subnet>,
    /// Folder with the guest's vmlinuz and initrd
    #[arg(long, env = "CORACLE_NODE_BOOT", value_name = "DIR")]
    pub(crate) boot: Option<PathBuf>,
    /// Boot every VM instead of cloning templates
    #[arg(long, env = "CORACLE_NODE_NO_TEMPLATES")]
    pub(crate) no_templates: bool,
    /// Keep so many templates; the oldest go first
    #[arg(long, env = "CORACLE_NODE_TEMPLATES_MAX", value_name = "COUNT", default_value_t = 8)]
    pub(crate) templates_max: usize,
    /// Take a template anew when it is older, like 24h
    #[arg(long, env = "CORACLE_NODE_TEMPLATES_MAX_AGE", value_name = "DURATION", default_value = "168h")]
    pub(crate) templates_max_age: jiff::SignedDuration,
    /// Keep a clone running, for the next VM, of so many machine shapes: those started last; 0: of none
    #[arg(long, env = "CORACLE_NODE_STANDBYS", value_name = "COUNT", default_value_t = 2)]
    pub(crate) standbys: usize,
    /// End a clone that nobody has taken for so long
    #[arg(long, env = "CORACLE_NODE_STANDBY_MAX_IDLE", value_name = "DURATION", default_value = "10m")]
    pub(crate) standby_max_idle: jiff::SignedDuration,
    /// Folder that kernels named by callers may lie in
    #[arg(long, env = "CORACLE_NODE_KERNEL_DIR", value_name = "DIR")]
    pub(crate) kernel_dir: Vec<PathBuf>,
    /// Folder that disks and folders given to VMs may lie in; / is any
    #[arg(long, env = "CORACLE_NODE_VOLUME_DIR", value_name = "DIR")]
    pub(crate) volume_dir: Vec<PathBuf>,
    /// QEMU's system emulator
    #[arg(long, env = "CORACLE_NODE_QEMU", default_value = "qemu-system-x86_64")]
    pub(crate) qemu: PathBuf,
    /// Firecracker, for VMs that ask for it
    #[arg(long, env = "CORACLE_FIRECRACKER_BIN", default_value = "firecracker", value_name = "PROGRAM")]
    pub(crate) firecracker: PathBuf,
    /// Its jailer; without one it is run bare
    #[arg(long, env = "CORACLE_FIRECRACKER_JAILER", value_name = "PROGRAM")]
    pub(crate) jailer: Option<PathBuf>,
    /// User and group of jailed processes
    #[arg(
        long,
        env = "CORACLE_FIRECRACKER_JAIL_USER",
        value_name = "UID:GID",
        default_value = "64999:64999"
    )]
    pub(crate) jail_user: String,
    /// Cloud Hypervisor, for VMs that ask for it
    #[arg(
        long,
        env = "CORACLE_CLOUD_HYPERVISOR_BIN",
        default_value = "cloud-hypervisor",
        value_name = "PROGRAM"
    )]
    pub(crate) cloud_hypervisor: PathBuf,
    /// Which accelerator to use
    #[arg(long, env = "CORACLE_NODE_ACCELERATOR", value_enum, default_value_t)]
    pub(crate) accelerator: AcceleratorChoice,
    /// Share of the host's memory that VMs may declare
    #[arg(long, env = "CORACLE_NODE_MEMORY_OVERCOMMIT", default_value_t = 1.0)]
    pub(crate) memory_overcommit: f64,
    /// Log level or filter
    #[arg(long, env = "CORACLE_NODE_LOG", default_value = "info")]
    pub(crate) log: String,
    /// Configuration file of the original firecracker-agent
    #[arg(long, hide = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Started under the name of the original agent
    #[arg(long, hide = true)]
    pub(crate) legacy: bool,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NetworkMode {
    /// A bridge of the host, a tap per VM
    Bridge,
    /// Inside each VMM, without privilege
    User,
}

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum AcceleratorChoice {
    /// KVM where it is proven to work, else TCG
    #[default]
    Auto,
    /// QEMU's translator
    Tcg,
}

#[derive(Args, Debug)]
pub(crate) struct OperatorArgs {
    /// Cluster to work for [default: the one that this Pod runs in]
    #[arg(long, env = "CORACLE_OPERATOR_KUBECONFIG", value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Which controllers to run
    #[arg(
        long,
        env = "CORACLE_OPERATOR_CONTROLLERS",
        value_enum,
        value_delimiter = ',',
        default_value = "mikromvm"
    )]
    pub(crate) controllers: Vec<Group>,
    /// Authority of the nodes' certificates
    #[arg(long, env = "CORACLE_OPERATOR_AGENT_CA", value_name = "FILE")]
    pub(crate) agent_ca: Option<PathBuf>,
    /// Certificate to show to nodes
    #[arg(long, env = "CORACLE_OPERATOR_AGENT_CERT", value_name = "FILE")]
    pub(crate) agent_cert: Option<PathBuf>,
    /// Key of the certificate
    #[arg(long, env = "CORACLE_OPERATOR_AGENT_KEY", value_name = "FILE")]
    pub(crate) agent_key: Option<PathBuf>,
    /// Dial nodes without TLS, for old agents
    #[arg(long, env = "CORACLE_OPERATOR_AGENT_PLAINTEXT")]
    pub(crate) agent_plaintext: bool,
    /// Serve admission webhooks here, and install them
    #[arg(long, env = "CORACLE_OPERATOR_WEBHOOK_LISTEN", value_name = "ADDR")]
    pub(crate) webhook_listen: Option<SocketAddr>,
    /// Name that the API server reaches the webhooks by [default: the Service of the manifests]
    #[arg(long, env = "CORACLE_OPERATOR_WEBHOOK_URL_HOST", value_name = "HOST")]
    pub(crate) webhook_url_host: Option<String>,
    /// Serve metrics and health here
    #[arg(long, env = "CORACLE_OPERATOR_ADMIN_LISTEN", value_name = "ADDR")]
    pub(crate) admin_listen: Option<SocketAddr>,
    /// How long a node may be silent before its VMs count as lost
    #[arg(long, env = "CORACLE_OPERATOR_NODE_GRACE", default_value = "5m")]
    pub(crate) node_grace: jiff::SignedDuration,
    /// Run without leader election
    #[arg(long, env = "CORACLE_OPERATOR_NO_ELECTION")]
    pub(crate) no_election: bool,
    /// Log level or filter
    #[arg(long, env = "CORACLE_OPERATOR_LOG", default_value = "info")]
    pub(crate) log: String,
    #[command(flatten)]
    pub(crate) pools: PoolFlags,
    #[command(flatten)]
    pub(crate) bids: BidFlags,
}

/// Controllers that run together, under a Lease of their own.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
#[value(rename_all = "lower")]
pub(crate) enum Group {
    /// MikromVMs
    MikromVm,
    /// VsphereAgentPools
    AgentPool,
    /// BidNodes
    BidNode,
}
