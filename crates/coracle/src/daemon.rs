//! Long-lived processes. Each parses its flags into plain settings, builds its parts, and hands every task to one owner.

pub(crate) mod agent_forge;
pub(crate) mod agentpool;
pub(crate) mod bidnode;
pub(crate) mod cluster;
pub(crate) mod cocoon;
pub(crate) mod down;
mod guest_subnet;
pub(crate) mod kubeconfig;
pub(crate) mod kubelet;
mod limits;
pub(crate) mod market;
pub(crate) mod memory;
pub(crate) mod node;
pub(crate) mod operator;
pub(crate) mod pki;
pub(crate) mod plane;
pub(crate) mod pod_routes;
pub(crate) mod registry;
mod saved_states;
mod service_tls;
pub(crate) mod supervise;
pub(crate) mod up;
mod virtual_node;
pub(crate) mod vm_metrics;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_cli::cli::NodeArgs;
use coracle_cli::tasks::{Tasks, stop_signal};
use coracle_hypervisor::KvmProbe;
use miette::{IntoDiagnostic, WrapErr};

/// Identity of this process in leader elections and events.
fn identity() -> String {
    format!("{}-{}", hostname(), std::process::id())
}

/// Runs the tasks of a daemon until it stops, and meanwhile returns freed memory to the system.
async fn run(mut tasks: Tasks, grace: Duration) -> miette::Result<()> {
    tasks.spawn("memory", |stop| async move {
        memory::trim_when_idle(stop).await;
        Ok(())
    });
    tasks.run(stop_signal(), grace).await
}

/// Returns a probe that runs this program's KVM payload in a child process.
pub(crate) fn kvm_probe_of(kept: Option<PathBuf>) -> KvmProbe {
    let own = std::env::current_exe().unwrap_or_else(|_| "coracle".into());
    KvmProbe { device: "/dev/kvm".into(), command: vec![own, "kvm-probe".into()], kept }
}

/// Finds a program: in `tools` or its `bin`, next to this binary, in PATH, or in the directories of system administration
/// programs.
pub(crate) fn find_tool(name: &str, tools: Option<&Path>) -> Option<PathBuf> {
    let named = tools.into_iter().flat_map(|dir| [dir.join("bin"), dir.to_owned()]);
    let cache = default_tools().into_iter().map(|dir| dir.join("bin"));
    let own = std::env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_owned));
    let path = std::env::var_os("PATH").unwrap_or_default();
    named
        .chain(cache)
        .chain(own)
        .chain(std::env::split_paths(&path))
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|dir| dir.join(name))
        .find(|file| file.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0))
}

/// Returns `$CORACLE_TOOLS`, else the tool cache of `cargo xtask setup`.
pub(crate) fn default_tools() -> Option<PathBuf> {
    match std::env::var_os("CORACLE_TOOLS") {
        Some(dir) => Some(dir.into()),
        None => Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/coracle/tools")),
    }
}

/// Sets the umask so that other users can neither read nor connect to files that this process and its children create. Call
/// this before any thread runs and any file is created.
pub(crate) fn keep_files_private() {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
}

/// Creates a directory; the error names it.
pub(crate) fn make_dir(dir: &Path) -> miette::Result<()> {
    std::fs::create_dir_all(dir).into_diagnostic().wrap_err_with(|| format!("make {}", dir.display()))
}

/// Returns the host name.
pub(crate) fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Returns the name of a node, which is also the name of its Lease.
pub(crate) fn node_name(args: &NodeArgs) -> String {
    args.node_name.clone().unwrap_or_else(hostname)
}

/// Returns the name of a node's Node object, which a virtual node overrides.
pub(crate) fn node_object(args: &NodeArgs) -> String {
    args.virtual_node.clone().unwrap_or_else(|| node_name(args))
}

/// Returns the namespace of this Pod, or `default` outside of a Pod.
pub(crate) fn own_namespace(default: String) -> String {
    let mounted = || {
        let file = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
        std::fs::read_to_string(file).ok().map(|text| text.trim().to_owned())
    };
    let said = std::env::var("POD_NAMESPACE").ok().or_else(mounted);
    said.filter(|name| !name.is_empty()).unwrap_or(default)
}
