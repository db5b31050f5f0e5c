//! The grammar of the command line. Help texts are written for the person who types.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Virtual machines for Kubernetes, on one command line.
#[derive(Parser, Debug)]
#[command(name = "coracle", version, arg_required_else_help = true)]
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
}

impl Global {
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
    Up(UpArgs),
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
    Start(NamesArgs),
    /// Power VMs off
    Stop(StopArgs),
    /// Remove VMs
    Rm(RmArgs),
    /// Wait until VMs are off and print their exit codes
    Wait(NamesArgs),
    /// Show everything about VMs
    Inspect(InspectArgs),
    /// Images on the node
    Image(ImageArgs),
    /// Run the node daemon
    Node(Box<NodeArgs>),
    /// Run the controllers and webhooks
    Operator(Box<OperatorArgs>),
    /// Print a shell completion script
    Completion {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Prove that KVM runs guest code
    #[command(hide = true)]
    KvmProbe {
        /// The device
        device: PathBuf,
    },
}

impl Command {
    pub(crate) fn is_daemon(&self) -> bool {
        matches!(self, Self::Node(_) | Self::Operator(_) | Self::Up(_))
    }
}

/// How to print what was asked for.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Format {
    /// Columns for people.
    #[default]
    Table,
    /// One JSON document.
    Json,
    /// One YAML document.
    Yaml,
    /// Names only.
    Name,
}

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
    /// Folder with etcd, kube-apiserver and kubectl
    #[arg(long, env = "CORACLE_TOOLS", value_name = "DIR")]
    pub(crate) tools: Option<PathBuf>,
    /// Run as the background process of a detached start
    #[arg(long, hide = true)]
    pub(crate) supervise: bool,
}

#[derive(Args, Debug)]
pub(crate) struct DownArgs {
    /// Also remove the state folder: VMs, images and the cluster's data
    #[arg(long)]
    pub(crate) purge: bool,
}

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
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
    /// Number of CPUs
    #[arg(long, default_value_t = 1)]
    pub(crate) cpus: u32,
    /// Memory in MiB
    #[arg(short, long, default_value_t = 256, value_name = "MIB")]
    pub(crate) memory: u64,
    /// Size of the writable disk in MiB
    #[arg(long, value_name = "MIB")]
    pub(crate) disk: Option<u64>,
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
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
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
pub(crate) struct NamesArgs {
    /// Names, ids or unique prefixes
    #[arg(required = true)]
    pub(crate) vms: Vec<String>,
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
    /// Names, ids or unique prefixes
    #[arg(required = true)]
    pub(crate) vms: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct InspectArgs {
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Format::Json)]
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
        /// Output format
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// Fetch an image from a registry
    Pull {
        /// Image reference
        reference: String,
        /// How to show progress
        #[arg(long, value_enum, default_value_t)]
        progress: ProgressMode,
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
        /// Output format
        #[arg(short, long, value_enum, default_value_t = Format::Json)]
        output: Format,
        /// Image reference
        reference: String,
    },
    /// Remove a name of an image
    Rm {
        /// Also when VMs use it
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
    /// Folder that kernels named by callers may lie in
    #[arg(long, env = "CORACLE_NODE_KERNEL_DIR", value_name = "DIR")]
    pub(crate) kernel_dir: Vec<PathBuf>,
    /// QEMU's system emulator
    #[arg(long, env = "CORACLE_NODE_QEMU", default_value = "qemu-system-x86_64")]
    pub(crate) qemu: PathBuf,
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
    #[arg(long, env = "CORACLE_OPERATOR_CONTROLLERS", value_delimiter = ',', default_value = "mikromvm")]
    pub(crate) controllers: Vec<String>,
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
}

/// Under the name of a tool that it replaces the binary takes that tool's flags.
pub(crate) fn drop_in(args: &mut Vec<OsString>) {
    let name = args
        .first()
        .and_then(|arg| std::path::Path::new(arg).file_name())
        .map(|name| name.to_string_lossy().into_owned());
    if name.as_deref() == Some("firecracker-agent") {
        args.splice(1..1, ["node", "--legacy"].map(OsString::from));
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
