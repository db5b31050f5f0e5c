//! The grammar of the command line. Help texts are written for the person who types.

mod agentpool;
mod cocoon;
mod daemons;
mod format;
mod image;
mod market;
mod registry;
mod snapshot;
mod template;
mod volume;

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

pub use agentpool::{AgentForgeArgs, AgentPoolArgs, AgentPoolCommand, IsoVerify, PoolArgs, PoolFlags};
pub use cocoon::{CocoonFlags, CocoonOperatorArgs, CocoonWebhookArgs};
pub use daemons::{
    AcceleratorChoice, DownArgs, Group, NetworkMode, NodeAddress, NodeArgs, OperatorArgs, Part, ReachChoice,
    RegistryFlags, RoutesArgs, UpArgs,
};
pub use format::Format;
pub use image::{ImageArgs, ImageBuildArgs, ImageCommand};
pub use market::{
    AdviseArgs, AmendArgs, At, BidCommand, BidFlags, BidsArgs, CancelArgs, ChargesArgs, CrdArgs, CrdCommand,
    EMBEDDED, ExplainIdArgs, HistoryArgs, MarketArgs, MarketCommand, MarketServeArgs, OneMarketArgs,
    OptionalMarketArgs, PlaceArgs, PlainArgs, PriceArgs, SimulateArgs, TokenArgs, TokenCommand,
    TokenListArgs, TokenMintArgs, TokenRevokeArgs, TokenScope,
};
pub use registry::{
    ImagePushArgs, RegistryArgs, RegistryCommand, RegistryPullArgs, RegistryPushArgs, RegistryServeArgs,
    RegistryServer, WrittenAs,
};
pub use snapshot::{CommitArgs, ForkArgs, RestoreArgs, SnapshotArgs, SnapshotCommand};
pub use template::{TemplateArgs, TemplateCommand};
pub use volume::{VolumeArgs, VolumeCommand, VolumeFlag};

/// Virtual machines for Kubernetes, on one command line.
#[derive(Parser, Debug)]
#[command(name = "coracle", version, arg_required_else_help = true, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Flags that every command accepts.
#[derive(Args, Debug, Clone)]
pub struct Global {
    /// State directory of the node [default: /var/lib/coracle, or $XDG_DATA_HOME/coracle without root]
    #[arg(long, global = true, env = "CORACLE_STATE", value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Socket of the node [default: host.sock of the state directory]
    #[arg(long, global = true, env = "CORACLE_HOST", value_name = "SOCKET")]
    pub host: Option<PathBuf>,
    /// Namespace of the cluster
    #[arg(short, long, global = true, value_name = "NAME", help_heading = CLUSTER)]
    pub namespace: Option<String>,
    /// All namespaces of the cluster
    #[arg(short = 'A', long, global = true, help_heading = CLUSTER)]
    pub all_namespaces: bool,
    /// Use the cluster of this kubeconfig context
    #[arg(long, global = true, value_name = "NAME", help_heading = CLUSTER)]
    pub context: Option<String>,
    /// Use the cluster of this kubeconfig file
    #[arg(long, global = true, value_name = "FILE", help_heading = CLUSTER)]
    pub kubeconfig: Option<PathBuf>,
}

/// Help heading of the flags that select a cluster instead of the local node.
const CLUSTER: &str = "Cluster instead of the local node";

impl Global {
    /// Returns whether the flags select a cluster instead of the local node.
    pub fn is_remote(&self) -> bool {
        self.namespace.is_some() || self.all_namespaces || self.context.is_some() || self.kubeconfig.is_some()
    }

    /// Returns the state directory as an absolute path, so that it names the same node from any working directory.
    pub fn state(&self) -> PathBuf {
        let dir = self.state.clone().unwrap_or_else(default_state);
        std::path::absolute(&dir).unwrap_or(dir)
    }

    /// Returns the socket of the node.
    pub fn socket(&self) -> PathBuf {
        self.host.clone().unwrap_or_else(|| coracle_host::run_dir_of(&self.state()).join("host.sock"))
    }
}

fn default_state() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return "/var/lib/coracle".into();
    }
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".local/share");
    std::env::var_os("XDG_DATA_HOME").map_or_else(home, PathBuf::from).join("coracle")
}

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Start a local system: control plane, node and operator
    Up(Box<UpArgs>),
    /// Stop the local system and remove its processes and networks
    Down(DownArgs),
    /// Check what this machine supports, or what a cluster lacks, and why
    Doctor(DoctorArgs),
    /// Remove Coracle from a cluster completely
    Uninstall(UninstallArgs),
    /// Run an image as a VM
    Run(Box<RunArgs>),
    /// List VMs
    Ps(PsArgs),
    /// Run a command in a VM
    Exec(ExecArgs),
    /// Print the output of a VM's workload
    Logs(LogsArgs),
    /// Copy files between this machine and a VM
    Cp(CpArgs),
    /// Attach to a VM's serial console; ~. leaves
    Console(ConsoleArgs),
    /// Forward local TCP ports into a VM
    PortForward(PortForwardArgs),
    /// Serve a VM's display and keyboard to VNC viewers
    Vnc(VncArgs),
    /// Start stopped VMs
    Start(StartArgs),
    /// Power VMs off
    Stop(StopArgs),
    /// Pause the vCPUs of VMs
    Pause(StartArgs),
    /// Resume paused VMs, and wake hibernated ones
    Resume(StartArgs),
    /// Save the memory of VMs to disk and end them; resume continues
    Hibernate(StartArgs),
    /// Save, list and transfer snapshots of VMs: memory and disk
    Snapshot(SnapshotArgs),
    /// Create a VM that continues from a snapshot
    Restore(RestoreArgs),
    /// Create VMs that continue from the present state of a VM
    Fork(ForkArgs),
    /// Create an image from what the workload of a running VM sees, or from the disk of a stopped disk image VM
    Commit(CommitArgs),
    /// Remove VMs
    Rm(RmArgs),
    /// Wait until VMs are off (and print their exit codes), run, or are gone
    Wait(WaitArgs),
    /// Show all details of VMs
    Inspect(InspectArgs),
    /// Explain the state of a VM, and what to do about it
    Explain(ExplainArgs),
    /// List events of VMs
    Events(EventsArgs),
    /// Manage images of the node
    Image(ImageArgs),
    /// Manage templates, the saved states that VMs are cloned from
    Template(TemplateArgs),
    /// Attach disks and host directories to VMs
    Volume(VolumeArgs),
    /// Show pools of vSphere VMs for a HyperShift NodePool
    #[command(name = "agentpool")]
    AgentPool(AgentPoolArgs),
    /// Serve or use the market of nodes: prices, bids, allocations
    Market(MarketArgs),
    /// Print custom resource definitions
    Crd(CrdArgs),
    /// Run the node daemon
    Node(Box<NodeArgs>),
    /// Maintain routes to the Pods of other nodes, on a node without VMs
    Routes(RoutesArgs),
    /// Run the controllers and webhooks
    Operator(Box<OperatorArgs>),
    /// Run the controllers of pools with the flags of the original agent-forge-operator
    #[command(name = agentpool::AGENT_FORGE, hide = true)]
    AgentForge(Box<AgentForgeArgs>),
    /// Run the controllers of CocoonSets with the flags of the original cocoon-operator
    #[command(name = cocoon::OPERATOR, hide = true)]
    CocoonOperator(Box<CocoonOperatorArgs>),
    /// Run the webhook for pods that run as VMs with the variables of the original cocoon-webhook
    #[command(name = cocoon::WEBHOOK, hide = true)]
    CocoonWebhook(Box<CocoonWebhookArgs>),
    /// Serve or use a registry for images, disks and snapshots
    Registry(RegistryArgs),
    /// Print a shell completion script
    Completion {
        /// Shell to complete for
        shell: clap_complete::Shell,
    },
    /// Print generated files and references, as JSON
    #[command(hide = true)]
    Reference {
        /// Manual pages instead: pairs of file name and text
        #[arg(long)]
        manual: bool,
    },
    /// Push an image of an OCI layout to a registry, without a node
    #[command(hide = true)]
    PushLayout(PushLayoutArgs),
    /// Prove that KVM runs guest code
    #[command(hide = true)]
    KvmProbe {
        /// KVM device
        device: PathBuf,
    },
}

impl Command {
    /// Returns the worker threads of a daemon's runtime; `None` for a command that is not a daemon.
    pub fn daemon(&self) -> Option<WorkerThreads> {
        match self {
            Self::Node(args) => Some(args.threads),
            Self::Operator(args) => Some(args.threads),
            Self::Routes(_)
            | Self::AgentForge(_)
            | Self::CocoonOperator(_)
            | Self::CocoonWebhook(_)
            | Self::Up(_) => Some(WorkerThreads::default()),
            Self::Registry(args) => match &args.command {
                RegistryCommand::Serve(args) => Some(args.threads),
                _ => None,
            },
            Self::Market(args) => match &args.command {
                MarketCommand::Serve(args) => Some(args.threads),
                _ => None,
            },
            _ => None,
        }
    }
}

/// Number of threads that serve a daemon's requests.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct WorkerThreads {
    /// Threads that serve requests [default: one per processor]
    #[arg(long = "worker-threads", env = "CORACLE_WORKER_THREADS", value_name = "COUNT")]
    pub count: Option<NonZeroUsize>,
}

#[derive(Args, Debug)]
pub struct DoctorArgs {
    /// Check the cluster and its installation instead; -n names the namespace of the operator
    #[arg(long)]
    pub cluster: bool,
    /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
    #[arg(short, long, default_value = "table", value_name = "FORMAT", hide_possible_values = true)]
    pub output: Format,
}

#[derive(Args, Debug)]
pub struct PushLayoutArgs {
    /// Directory of the OCI layout, which has one image
    pub layout: PathBuf,
    /// Reference to push to; credentials are docker's
    pub reference: String,
    #[command(flatten)]
    pub registries: RegistryFlags,
}

#[derive(Args, Debug)]
pub struct UninstallArgs {
    /// Remove the installation of the cluster; -n names the namespace of the operator
    #[arg(long, required = true)]
    pub cluster: bool,
    /// Also delete the custom resources of users, which ends their VMs
    #[arg(long)]
    pub delete_objects: bool,
    /// Remove the finalizers of objects when no operator runs; their VMs stay on their nodes
    #[arg(long)]
    pub abandon: bool,
    /// Stop before operators and nodes: Helm removes them and the rest
    #[arg(long)]
    pub keep_workloads: bool,
    /// Time limit of the removal
    #[arg(long, value_name = "DURATION", default_value = "10m")]
    pub timeout: jiff::SignedDuration,
}

#[derive(Args, Debug)]
pub struct RunArgs {
    /// Image reference, oci:DIR[:TAG] or docker-archive:FILE
    pub image: String,
    /// Arguments for the image's entrypoint
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub args: Vec<String>,
    /// Name of the VM [default: made from the image's name]
    #[arg(long)]
    pub name: Option<String>,
    /// Return when the workload runs instead of showing its output
    #[arg(short, long)]
    pub detach: bool,
    /// Remove the VM when it is off
    #[arg(long)]
    pub rm: bool,
    /// Push the resulting file system as this image, if the command exits with 0
    #[arg(long, value_name = "REFERENCE")]
    pub commit: Option<String>,
    /// Number of CPUs
    #[arg(long, default_value_t = 1)]
    pub cpus: u32,
    /// Memory in MiB [default: 256, for a disk image 1024]
    #[arg(short, long, value_name = "MIB")]
    pub memory: Option<u64>,
    /// Size of the writable disk in MiB; the disk of a disk image grows to it
    #[arg(long, value_name = "MIB")]
    pub disk: Option<u64>,
    /// Attach a directory or a disk image of the node, or a disk that the node keeps by that name; options are ro and size=MIB,
    /// which creates such a disk
    #[arg(short, long, value_name = "SOURCE[:TARGET[:OPTION,...]]")]
    pub volume: Vec<VolumeFlag>,
    /// Set an environment variable
    #[arg(short, long, value_name = "NAME=VALUE")]
    pub env: Vec<String>,
    /// Run as this user
    #[arg(short, long, default_value = "")]
    pub user: String,
    /// Working directory
    #[arg(short, long, default_value = "")]
    pub workdir: String,
    /// Replace the image's entrypoint
    #[arg(long)]
    pub entrypoint: Option<String>,
    /// Host name of the guest
    #[arg(long, default_value = "")]
    pub hostname: String,
    /// Publish a guest port on the host
    #[arg(short, long, value_name = "[ADDR:]HOST:GUEST[/udp]")]
    pub publish: Vec<String>,
    /// Destinations that the guest may reach besides those outside of the node
    #[arg(long, value_enum, value_delimiter = ',')]
    pub reach: Vec<ReachChoice>,
    /// Join this CNI network [default: the first one of the node]
    #[arg(long, default_value = "", hide_default_value = true, value_name = "NAME")]
    pub network: String,
    /// Use this address
    #[arg(long, default_value = "")]
    pub ip: String,
    /// Use this kernel
    #[arg(long, default_value = "")]
    pub kernel: String,
    /// Always cold boot, even if a template could be cloned
    #[arg(long)]
    pub cold: bool,
    /// Run with this driver: qemu, firecracker or cloud-hypervisor
    #[arg(long, default_value = "", value_name = "NAME")]
    pub driver: String,
    /// Firmware of a disk image: auto, bios or uefi
    #[arg(long, default_value = "", value_name = "KIND")]
    pub firmware: String,
    /// File with cloud-init user data for a disk image (- is standard input)
    #[arg(long, value_name = "FILE")]
    pub user_data: Option<PathBuf>,
    /// Give a disk image VM a display, for coracle vnc
    #[arg(long, default_value = "", hide_default_value = true, value_name = "WIDTHxHEIGHT")]
    pub display: String,
    /// Do not wait for the guest agent: the disk image has none, or not yet
    #[arg(long)]
    pub no_agent: bool,
    /// When to pull the image
    #[arg(long, value_enum, default_value_t)]
    pub pull: Pull,
    /// How to show progress
    #[arg(long, value_enum, default_value_t)]
    pub progress: ProgressMode,
}

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pull {
    /// When the node does not have the image
    #[default]
    Missing,
    /// Always
    Always,
    /// Never
    Never,
}

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProgressMode {
    /// Bars on a terminal, lines elsewhere
    #[default]
    Auto,
    /// Lines
    Plain,
    /// Nothing
    None,
}

#[derive(Args, Debug)]
pub struct PsArgs {
    /// Also VMs that do not run
    #[arg(short, long)]
    pub all: bool,
    /// Names only
    #[arg(short, long)]
    pub quiet: bool,
    /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
    #[arg(short, long, default_value = "table", value_name = "FORMAT", hide_possible_values = true)]
    pub output: Format,
}

#[derive(Args, Debug)]
pub struct ExecArgs {
    /// Keep stdin open
    #[arg(short, long)]
    pub interactive: bool,
    /// Give the command a terminal
    #[arg(short, long)]
    pub tty: bool,
    /// Set an environment variable
    #[arg(short, long, value_name = "NAME=VALUE")]
    pub env: Vec<String>,
    /// Run as this user
    #[arg(short, long, default_value = "")]
    pub user: String,
    /// Working directory
    #[arg(short, long, default_value = "")]
    pub workdir: String,
    /// Name or id
    pub vm: String,
    /// Command and arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    pub command: Vec<String>,
}

#[derive(Args, Debug)]
pub struct LogsArgs {
    /// Follow the output
    #[arg(short, long)]
    pub follow: bool,
    /// Only the last lines
    #[arg(long, value_name = "LINES")]
    pub tail: Option<u32>,
    /// Only output younger than this, like 10m
    #[arg(long, value_name = "DURATION")]
    pub since: Option<jiff::SignedDuration>,
    /// Put the time before each line
    #[arg(short, long)]
    pub timestamps: bool,
    /// Name, id or unique prefix
    pub vm: String,
}

#[derive(Args, Debug)]
pub struct CpArgs {
    /// PATH or VM:PATH
    pub from: String,
    /// PATH or VM:PATH
    pub to: String,
}

#[derive(Args, Debug)]
pub struct ConsoleArgs {
    /// Print the history and return
    #[arg(long)]
    pub no_follow: bool,
    /// Name or id
    pub vm: String,
}

#[derive(Args, Debug)]
pub struct PortForwardArgs {
    /// Listen on this address
    #[arg(long, default_value = "127.0.0.1")]
    pub address: std::net::IpAddr,
    /// Name or id
    pub vm: String,
    /// [LOCAL:]GUEST
    #[arg(required = true)]
    pub ports: Vec<String>,
}

#[derive(Args, Debug)]
pub struct VncArgs {
    /// Listen on this address
    #[arg(long, default_value = "127.0.0.1")]
    pub address: std::net::IpAddr,
    /// Listen on this port [default: a free one]
    #[arg(short, long, default_value_t = 0, hide_default_value = true)]
    pub port: u16,
    /// Name or id
    pub vm: String,
}

#[derive(Args, Debug)]
pub struct StartArgs {
    /// Give up waiting after this time, like 30s
    #[arg(long, value_name = "DURATION")]
    pub timeout: Option<jiff::SignedDuration>,
    /// Names or ids
    #[arg(required = true)]
    pub vms: Vec<String>,
}

#[derive(Args, Debug)]
pub struct WaitArgs {
    /// State to wait for
    #[arg(long = "for", value_enum, default_value_t, value_name = "STATE")]
    pub until: Until,
    /// Give up after this time, like 30s [default: never]
    #[arg(long, value_name = "DURATION")]
    pub timeout: Option<jiff::SignedDuration>,
    /// Names or ids
    #[arg(required = true)]
    pub vms: Vec<String>,
}

/// State that `coracle wait` waits for.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Until {
    /// The workload has ended
    #[default]
    Off,
    /// The workload runs
    Running,
    /// The VM does not exist any more
    Gone,
}

#[derive(Args, Debug)]
pub struct ExplainArgs {
    /// Name, id or unique prefix
    pub vm: String,
}

#[derive(Args, Debug)]
pub struct EventsArgs {
    /// Also print new events as they happen
    #[arg(short, long)]
    pub watch: bool,
    /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
    #[arg(short, long, default_value = "table", value_name = "FORMAT", hide_possible_values = true)]
    pub output: Format,
    /// Only of this VM: name, id or unique prefix
    pub vm: Option<String>,
}

#[derive(Args, Debug)]
pub struct StopArgs {
    /// Time for the guest to shut down, like 30s; 0s kills at once
    #[arg(short, long, default_value = "30s")]
    pub timeout: jiff::SignedDuration,
    /// Names or ids
    #[arg(required = true)]
    pub vms: Vec<String>,
}

#[derive(Args, Debug)]
pub struct RmArgs {
    /// Also remove VMs that run
    #[arg(short, long)]
    pub force: bool,
    /// Give up waiting after this time, like 30s
    #[arg(long, value_name = "DURATION")]
    pub timeout: Option<jiff::SignedDuration>,
    /// Names or ids
    #[arg(required = true)]
    pub vms: Vec<String>,
}

#[derive(Args, Debug)]
pub struct InspectArgs {
    /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
    #[arg(short, long, default_value = "json", value_name = "FORMAT", hide_possible_values = true)]
    pub output: Format,
    /// Names, ids or unique prefixes
    #[arg(required = true)]
    pub vms: Vec<String>,
}

/// Under the name of a tool that the binary replaces, accepts the flags of that tool.
pub fn drop_in(args: &mut Vec<OsString>) {
    let name = args
        .first()
        .and_then(|arg| std::path::Path::new(arg).file_name())
        .map(|name| name.to_string_lossy().into_owned());
    match name.as_deref() {
        Some("firecracker-agent") => {
            args.splice(1..1, ["node", "--legacy"].map(OsString::from));
        }
        Some("vk-cocoon") => {
            args.splice(1..1, ["node", "--vk-cocoon"].map(OsString::from));
        }
        Some(agentpool::AGENT_FORGE) => {
            let flags = agentpool::go_flags(args.split_off(1));
            args.push(agentpool::AGENT_FORGE.into());
            args.extend(flags);
        }
        Some(name @ (cocoon::OPERATOR | cocoon::WEBHOOK)) => {
            let flags = agentpool::go_flags(args.split_off(1));
            args.push(name.into());
            args.extend(flags);
        }
        Some("epoch") => registry::epoch(args),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_grammar_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn firecracker_agent_name_selects_legacy_node_flags() {
        let mut args = ["/usr/bin/firecracker-agent", "--config", "/etc/a.yaml"].map(OsString::from).to_vec();
        drop_in(&mut args);
        let cli = Cli::try_parse_from(args).unwrap();
        let Command::Node(node) = cli.command else { panic!("the node daemon") };
        assert!(node.legacy);
        assert_eq!(node.config, Some("/etc/a.yaml".into()));
    }
}
