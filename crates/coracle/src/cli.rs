//! The grammar of the command line. Help texts are written for the person who types.

mod agentpool;
mod daemons;
mod format;
mod market;
mod registry;
mod snapshot;
mod template;
mod volume;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

pub(crate) use agentpool::{AgentForgeArgs, AgentPoolArgs, AgentPoolCommand, IsoVerify, PoolArgs, PoolFlags};
pub(crate) use daemons::{
    AcceleratorChoice, DownArgs, Group, NetworkMode, NodeArgs, OperatorArgs, Part, UpArgs,
};
pub(crate) use format::Format;
pub(crate) use market::{
    AdviseArgs, AmendArgs, At, BidCommand, BidFlags, BidsArgs, CancelArgs, ChargesArgs, CrdArgs, CrdCommand,
    EMBEDDED, ExplainIdArgs, HistoryArgs, MarketArgs, MarketCommand, MarketServeArgs, OneMarketArgs,
    OptionalMarketArgs, PlaceArgs, PlainArgs, PriceArgs, SimulateArgs,
};
pub(crate) use registry::{
    ImagePushArgs, RegistryArgs, RegistryCommand, RegistryPullArgs, RegistryPushArgs, RegistryServeArgs,
    RegistryServer, WrittenAs,
};
pub(crate) use snapshot::{CommitArgs, ForkArgs, RestoreArgs, SnapshotArgs, SnapshotCommand};
pub(crate) use template::{TemplateArgs, TemplateCommand};
pub(crate) use volume::{VolumeArgs, VolumeCommand, VolumeFlag};

/// Virtual machines for Kubernetes, on one command line.
#[derive(Parser, Debug)]
#[command(name = "coracle", version, arg_required_else_help = true, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What every command understands.
#[derive(Args, Debug, Clone)]
pub(crate) struct Global {
    /// State folder of the node [default: /var/lib/coracle, or $XDG_DATA_HOME/coracle without root]
    #[arg(long, global = true, env = "CORACLE_STATE", value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// Socket of the node [default: host.sock of the state folder]
    #[arg(long, global = true, env = "CORACLE_HOST", value_name = "SOCKET")]
    pub(crate) host: Option<PathBuf>,
    /// Work in this namespace of the cluster
    #[arg(short, long, global = true, value_name = "NAME", help_heading = CLUSTER)]
    pub(crate) namespace: Option<String>,
    /// Work in all namespaces of the cluster
    #[arg(short = 'A', long, global = true, help_heading = CLUSTER)]
    pub(crate) all_namespaces: bool,
    /// Work through the cluster of this context
    #[arg(long, global = true, value_name = "NAME", help_heading = CLUSTER)]
    pub(crate) context: Option<String>,
    /// Work through the cluster of this file
    #[arg(long, global = true, value_name = "FILE", help_heading = CLUSTER)]
    pub(crate) kubeconfig: Option<PathBuf>,
}

/// Any of these flags means the cluster instead of the local node.
const CLUSTER: &str = "Cluster instead of the local node";

impl Global {
    /// Is the cluster meant, and not the node of this machine?
    pub(crate) fn is_remote(&self) -> bool {
        self.namespace.is_some() || self.all_namespaces || self.context.is_some() || self.kubeconfig.is_some()
    }

    /// The state folder, made absolute so that it names one node wherever we are.
    pub(crate) fn state(&self) -> PathBuf {
        let dir = self.state.clone().unwrap_or_else(default_state);
        std::path::absolute(&dir).unwrap_or(dir)
    }

    /// The socket to speak to.
    pub(crate) fn socket(&self) -> PathBuf {
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
pub(crate) enum Command {
    /// Start a local system: control plane, node and operator
    Up(Box<UpArgs>),
    /// Stop the local system and remove its processes and networks
    Down(DownArgs),
    /// Say what this machine can do, and why not
    Doctor(DoctorArgs),
    /// Run an image as a VM
    Run(Box<RunArgs>),
    /// List VMs
    Ps(PsArgs),
    /// Run a command in a VM
    Exec(ExecArgs),
    /// Print what a VM's workload printed
    Logs(LogsArgs),
    /// Copy files between here and a VM
    Cp(CpArgs),
    /// Look at a VM's serial console; ~. leaves
    Console(ConsoleArgs),
    /// Forward local TCP ports into a VM
    PortForward(PortForwardArgs),
    /// Start stopped VMs
    Start(StartArgs),
    /// Power VMs off
    Stop(StopArgs),
    /// Hold the CPUs of VMs
    Pause(StartArgs),
    /// Let paused VMs go on, and wake hibernated ones
    Resume(StartArgs),
    /// Save the memory of VMs to disk and end them; resume continues
    Hibernate(StartArgs),
    /// Copies of VMs, memory included
    Snapshot(SnapshotArgs),
    /// Make a VM that goes on where a snapshot was taken
    Restore(RestoreArgs),
    /// Make copies of a VM that go on where it is now
    Fork(ForkArgs),
    /// Make an image of what a running VM's workload sees
    Commit(CommitArgs),
    /// Remove VMs
    Rm(RmArgs),
    /// Wait until VMs are off (and print their exit codes), run, or are gone
    Wait(WaitArgs),
    /// Show everything about VMs
    Inspect(InspectArgs),
    /// Say how a VM came to be as it is, and what to do
    Explain(ExplainArgs),
    /// What happened to VMs
    Events(EventsArgs),
    /// Images on the node
    Image(ImageArgs),
    /// Saved machines that VMs start from
    Template(TemplateArgs),
    /// Disks and folders of the node in VMs
    Volume(VolumeArgs),
    /// Pools of vSphere VMs for a HyperShift NodePool
    #[command(name = "agentpool")]
    AgentPool(AgentPoolArgs),
    /// The market of nodes: prices, bids, units
    Market(MarketArgs),
    /// Custom resource definitions
    Crd(CrdArgs),
    /// Run the node daemon
    Node(Box<NodeArgs>),
    /// Run the controllers and webhooks
    Operator(Box<OperatorArgs>),
    /// Run the controllers of pools with the flags of the original agent-forge-operator
    #[command(name = agentpool::AGENT_FORGE, hide = true)]
    AgentForge(Box<AgentForgeArgs>),
    /// A registry for images, disks and snapshots
    Registry(RegistryArgs),
    /// Print a shell completion script
    Completion {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Print generated files and references, as JSON
    #[command(hide = true)]
    Reference,
    /// Prove that KVM runs guest code
    #[command(hide = true)]
    KvmProbe {
        /// The device
        device: PathBuf,
    },
}

impl Command {
    pub(crate) fn is_daemon(&self) -> bool {
        match self {
            Self::Registry(args) => matches!(args.command, RegistryCommand::Serve(_)),
            Self::Market(args) => matches!(args.command, MarketCommand::Serve(_)),
            _ => matches!(self, Self::Node(_) | Self::Operator(_) | Self::AgentForge(_) | Self::Up(_)),
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
    #[arg(short, long, default_value = "table", value_name = "FORMAT", hide_possible_values = true)]
    pub(crate) output: Format,
}

#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    /// Image reference, oci:DIR[:TAG] or docker-archive:FILE
    pub(crate) image: String,
    /// Arguments for the image's entrypoint
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) args: Vec<String>,
    /// Name of the VM [default: made from the image's name]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Return when the workload runs instead of showing its output
    #[arg(short, long)]
    pub(crate) detach: bool,
    /// Remove the VM when it is off
    #[arg(long)]
    pub(crate) rm: bool,
    /// Push what the command leaves as this image, if it exits with 0
    #[arg(long, value_name = "REFERENCE")]
    pub(crate) commit: Option<String>,
    /// Number of CPUs
    #[arg(long, default_value_t = 1)]
    pub(crate) cpus: u32,
    /// Memory in MiB [default: 256, for a disk image 1024]
    #[arg(short, long, value_name = "MIB")]
    pub(crate) memory: Option<u64>,
    /// Size of the writable disk in MiB; the disk of a disk image grows to it
    #[arg(long, value_name = "MIB")]
    pub(crate) disk: Option<u64>,
    /// Give it a folder or a disk image of the node, or a disk that the node keeps by that name; options
    /// are ro and size=MIB, which makes such a disk
    #[arg(short, long, value_name = "SOURCE[:TARGET[:OPTION,...]]")]
    pub(crate) volume: Vec<VolumeFlag>,
    /// Set an environment variable
    #[arg(short, long, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
    /// Run as this user
    #[arg(short, long, default_value = "")]
    pub(crate) user: String,
    /// Working directory
    #[arg(short, long, default_value = "")]
    pub(crate) workdir: String,
    /// Replace the image's entrypoint
    #[arg(long)]
    pub(crate) entrypoint: Option<String>,
    /// Host name of the guest
    #[arg(long, default_value = "")]
    pub(crate) hostname: String,
    /// Publish a guest port on the host (networks inside the VMM only)
    #[arg(short, long, value_name = "[ADDR:]HOST:GUEST")]
    pub(crate) publish: Vec<String>,
    /// Use this address
    #[arg(long, default_value = "")]
    pub(crate) ip: String,
    /// Use this kernel
    #[arg(long, default_value = "")]
    pub(crate) kernel: String,
    /// Boot it every time, even where a template could be cloned
    #[arg(long)]
    pub(crate) cold: bool,
    /// Run it with this driver: qemu, firecracker or cloud-hypervisor
    #[arg(long, default_value = "", value_name = "NAME")]
    pub(crate) driver: String,
    /// What starts a disk image: auto, bios or uefi
    #[arg(long, default_value = "", value_name = "KIND")]
    pub(crate) firmware: String,
    /// File with what cloud-init shall do in a disk image (- is standard input)
    #[arg(long, value_name = "FILE")]
    pub(crate) user_data: Option<PathBuf>,
    /// When to ask the registry
    #[arg(long, value_enum, default_value_t)]
    pub(crate) pull: Pull,
    /// How to show progress
    #[arg(long, value_enum, default_value_t)]
    pub(crate) progress: ProgressMode,
}

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Pull {
    /// When the image is not here
    #[default]
    Missing,
    /// Always
    Always,
    /// Never
    Never,
}

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ProgressMode {
    /// Bars on a terminal, lines elsewhere
    #[default]
    Auto,
    /// Lines
    Plain,
    /// Nothing
    None,
}

#[derive(Args, Debug)]
pub(crate) struct PsArgs {
    /// Also VMs that do not run
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Names only
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
    #[arg(short, long, default_value = "table", value_name = "FORMAT", hide_possible_values = true)]
    pub(crate) output: Format,
}

#[derive(Args, Debug)]
pub(crate) struct ExecArgs {
    /// Keep stdin open
    #[arg(short, long)]
    pub(crate) interactive: bool,
    /// Give the command a terminal
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// Set an environment variable
    #[arg(short, long, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
    /// Run as this user
    #[arg(short, long, default_value = "")]
    pub(crate) user: String,
    /// Working directory
    #[arg(short, long, default_value = "")]
    pub(crate) workdir: String,
    /// Name, id or unique prefix
    pub(crate) vm: String,
    /// Command and arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    pub(crate) command: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct LogsArgs {
    /// Keep printing
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Only the last lines
    #[arg(long, value_name = "LINES")]
    pub(crate) tail: Option<u32>,
    /// Only what is younger, like 10m
    #[arg(long, value_name = "DURATION")]
    pub(crate) since: Option<jiff::SignedDuration>,
    /// Put the time before each line
    #[arg(short, long)]
    pub(crate) timestamps: bool,
    /// Name, id or unique prefix
    pub(crate) vm: String,
}

#[derive(Args, Debug)]
pub(crate) struct CpArgs {
    /// PATH or VM:PATH
    pub(crate) from: String,
    /// PATH or VM:PATH
    pub(crate) to: String,
}

#[derive(Args, Debug)]
pub(crate) struct ConsoleArgs {
    /// Print the history and return
    #[arg(long)]
    pub(crate) no_follow: bool,
    /// Name, id or unique prefix
    pub(crate) vm: String,
}

#[derive(Args, Debug)]
pub(crate) struct PortForwardArgs {
    /// Listen on this address
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) address: std::net::IpAddr,
    /// Name, id or unique prefix
    pub(crate) vm: String,
    /// [LOCAL:]GUEST
    #[arg(required = true)]
    pub(crate) ports: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct StartArgs {
    /// Give up waiting after this time, like 30s
    #[arg(long, value_name = "DURATION")]
    pub(crate) timeout: Option<jiff::SignedDuration>,
    /// Names, ids or unique prefixes
    #[arg(required = true)]
    pub(crate) vms: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct WaitArgs {
    /// What to wait for
    #[arg(long = "for", value_enum, default_value_t, value_name = "STATE")]
    pub(crate) until: Until,
    /// Give up after this time, like 30s [default: never]
    #[arg(long, value_name = "DURATION")]
    pub(crate) timeout: Option<jiff::SignedDuration>,
    /// Names, ids or unique prefixes
    #[arg(required = true)]
    pub(crate) vms: Vec<String>,
}

/// What a VM is waited for to be.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Until {
    /// Its workload has ended
    #[default]
    Off,
    /// Its workload runs
    Running,
    /// It does not exist any more
    Gone,
}

#[derive(Args, Debug)]
pub(crate) struct ExplainArgs {
    /// Name, id or unique prefix
    pub(crate) vm: String,
}

#[derive(Args, Debug)]
pub(crate) struct EventsArgs {
    /// Keep printing
    #[arg(short, long)]
    pub(crate) watch: bool,
    /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
    #[arg(short, long, default_value = "table", value_name = "FORMAT", hide_possible_values = true)]
    pub(crate) output: Format,
    /// Only of this VM: name, id or unique prefix
    pub(crate) vm: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct StopArgs {
    /// How long the guest may take, like 30s; 0s kills at once
    #[arg(short, long, default_value = "30s")]
    pub(crate) timeout: jiff::SignedDuration,
    /// Names, ids or unique prefixes
    #[arg(required = true)]
    pub(crate) vms: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct RmArgs {
    /// Also when it runs
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Give up waiting after this time, like 30s
    #[arg(long, value_name = "DURATION")]
    pub(crate) timeout: Option<jiff::SignedDuration>,
    /// Names, ids or unique prefixes
    #[arg(required = true)]
    pub(crate) vms: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct InspectArgs {
    /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
    #[arg(short, long, default_value = "json", value_name = "FORMAT", hide_possible_values = true)]
    pub(crate) output: Format,
    /// Names, ids or unique prefixes
    #[arg(required = true)]
    pub(crate) vms: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct ImageArgs {
    #[command(subcommand)]
    pub(crate) command: ImageCommand,
}

#[derive(Subcommand, Debug)]
pub(crate) enum ImageCommand {
    /// List images
    Ls {
        /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
        #[arg(short, long, default_value = "table", value_name = "FORMAT", hide_possible_values = true)]
        output: Format,
    },
    /// Fetch an image from a registry
    Pull {
        /// Image reference
        reference: String,
        /// It is a disk: write it to this file here, without the node
        #[arg(long, value_name = "FILE")]
        disk: Option<PathBuf>,
        /// How to show progress
        #[arg(long, value_enum, default_value_t)]
        progress: ProgressMode,
    },
    /// Push an image of the node to a registry, or with --disk a disk, in windows that are moved and verified alone
    Push(ImagePushArgs),
    /// Give an image one more name
    Tag {
        /// Image reference
        reference: String,
        /// Its other name
        name: String,
    },
    /// Write an image as one archive that docker, podman and skopeo load, too
    Export {
        /// Image reference
        reference: String,
        /// Where to write it; - is the standard output
        file: PathBuf,
    },
    /// Take an image from oci:DIR[:TAG] or docker-archive:FILE
    Import {
        /// Where it is, on the node's file system
        source: String,
        /// Its name here
        reference: Option<String>,
    },
    /// Show everything about an image
    Inspect {
        /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
        #[arg(short, long, default_value = "json", value_name = "FORMAT", hide_possible_values = true)]
        output: Format,
        /// Image reference
        reference: String,
    },
    /// Remove a name of an image
    Rm {
        /// Also when VMs or snapshots use it
        #[arg(short, long)]
        force: bool,
        /// Image references
        #[arg(required = true)]
        references: Vec<String>,
    },
    /// Remove what no name and no VM refers to
    Prune {
        /// Only say what would go
        #[arg(long)]
        dry_run: bool,
    },
}

/// Under the name of a tool that it replaces the binary takes that tool's flags.
pub(crate) fn drop_in(args: &mut Vec<OsString>) {
    let name = args
        .first()
        .and_then(|arg| std::path::Path::new(arg).file_name())
        .map(|name| name.to_string_lossy().into_owned());
    match name.as_deref() {
        Some("firecracker-agent") => {
            args.splice(1..1, ["node", "--legacy"].map(OsString::from));
        }
        Some(agentpool::AGENT_FORGE) => {
            let flags = agentpool::go_flags(args.split_off(1));
            args.push(agentpool::AGENT_FORGE.into());
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
    fn the_grammar_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_old_agents_name_means_its_own_flags() {
        let mut args = ["/usr/bin/firecracker-agent", "--config", "/etc/a.yaml"].map(OsString::from).to_vec();
        drop_in(&mut args);
        let cli = Cli::try_parse_from(args).unwrap();
        let Command::Node(node) = cli.command else { panic!("the node daemon") };
        assert!(node.legacy);
        assert_eq!(node.config, Some("/etc/a.yaml".into()));
    }
}
