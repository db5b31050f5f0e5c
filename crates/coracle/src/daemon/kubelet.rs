//! Kubelet of a local system, whose pods are VMs of its node: its files, its arguments, and the clean-up after it.
//!
//! The kubelet's address is that of the guests' bridge, which exists once the node runs. It has credentials of its own: a token
//! of the user `system:node:NAME`, and a serving certificate of the API server's authority (Kubernetes documentation, "Using
//! Node Authorization", "Kubelet authentication/authorization").

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use miette::{IntoDiagnostic, WrapErr};
use rustix::mount::{UnmountFlags, unmount};
use serde_json::{Value, json};

use super::plane::{self, Program};
use super::{hostname, make_dir, pki};
use coracle_cli::error::Failure;

/// Mount point of the cgroup hierarchies (cgroups(7)).
const CGROUPS: &str = "/sys/fs/cgroup";

/// Returns the root directory of the kubelet of this state directory.
fn root(state: &Path) -> PathBuf {
    state.join("kubelet")
}

/// Returns the path of the CRI socket.
pub(crate) fn cri_socket(state: &Path) -> PathBuf {
    coracle_host::run_dir_of(state).join("cri.sock")
}

/// Writes the files of the kubelet and returns the program. `address` is the node's address on the guests' bridge.
///
/// # Errors
/// The process is not root, the program is missing, or a file cannot be written.
pub(crate) fn program(state: &Path, tools: Option<&Path>, address: Ipv4Addr) -> miette::Result<Program> {
    if !rustix::process::geteuid().is_root() {
        let message = "a kubelet mounts volumes and makes cgroups, which needs root";
        return Err(Failure::new("COR-UP-009", message).help("leave kubelet out of --with").into());
    }
    let (root, name) = (root(state), node_name());
    for dir in ["manifests", "plugins", "logs"] {
        make_dir(&root.join(dir))?;
    }
    let cgroup = cgroup_of(state);
    for hierarchy in hierarchies() {
        let dir = hierarchy.join(&cgroup);
        std::fs::create_dir_all(&dir)
            .into_diagnostic()
            .wrap_err_with(|| format!("make {}", dir.display()))?;
    }
    let kubeconfig = plane::node_kubeconfig(state, &name)?;
    let serving = plane::kubelet_certificate(state, &[name.clone(), address.to_string()])?;
    let file = root.join("config.json");
    let [port, health] = plane::free_ports([address, Ipv4Addr::LOCALHOST])?;
    let config = configuration(state, address, (port, health), &serving);
    pki::write(&file, &serde_json::to_vec_pretty(&config).into_diagnostic()?)?;
    let args = vec![
        format!("--config={}", file.display()),
        format!("--kubeconfig={}", kubeconfig.display()),
        format!("--root-dir={}", root.display()),
        format!("--cert-dir={}", root.join("pki").display()),
        format!("--hostname-override={name}"),
        format!("--node-ip={address}"),
    ];
    Ok(Program { name: "kubelet", path: plane::find("kubelet", tools)?, args, env: vec![] })
}

/// Returns the name of the Node: the host name in the form of Kubernetes names.
pub(crate) fn node_name() -> String {
    hostname().to_lowercase()
}

/// Returns the name of this machine's virtual node, which is used without a kubelet.
pub(crate) fn virtual_node_name() -> String {
    format!("{}-virtual", node_name())
}

/// Returns a `KubeletConfiguration` of `kubelet.config.k8s.io/v1beta1`. Pure.
fn configuration(state: &Path, address: Ipv4Addr, (port, health): (u16, u16), serving: &pki::Leaf) -> Value {
    let root = root(state);
    // No eviction: guests have disks of their own, and the disk of a laptop may be almost full.
    let never = [
        "memory.available",
        "nodefs.available",
        "nodefs.inodesFree",
        "imagefs.available",
        "imagefs.inodesFree",
    ]
    .map(|signal| (signal, "0%"));
    let mut config = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": format!("unix://{}", cri_socket(state).display()),
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": plane::authority_file(state)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": serving.0,
        "tlsPrivateKeyFile": serving.1,
        "address": address,
        "port": port,
        "healthzPort": health,
        "failCgroupV1": false,
        "failSwapOn": false,
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": true,
        "enforceNodeAllocatable": [],
        "makeIPTablesUtilChains": false,
        "evictionHard": never.into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        "imageGCHighThresholdPercent": 100,
        "resolvConf": "/etc/resolv.conf",
        "staticPodPath": root.join("manifests"),
        "podLogsDir": root.join("logs"),
        "volumePluginDir": root.join("plugins"),
        "serializeImagePulls": false,
        // Interval after which changed ConfigMaps and Secrets reach pods. It can be short because a laptop has few pods.
        "syncFrequency": "10s",
    });
    if !is_systemd() {
        config["cgroupRoot"] = format!("/{}", cgroup_of(state)).into();
    }
    config
}

/// Returns whether systemd manages the cgroups of the host; the kubelet then asks systemd for its top-level cgroups.
fn is_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// Returns the cgroup of this system's pods, a different one for each system on the machine.
fn cgroup_of(state: &Path) -> String {
    let run = coracle_host::run_dir_of(state);
    format!("coracle-{}", run.file_name().unwrap_or_default().display())
}

/// Returns the roots of the mounted hierarchies: the only one of version 2, or one per controller and an empty one of version
/// 2.
fn hierarchies() -> Vec<PathBuf> {
    let root = PathBuf::from(CGROUPS);
    if root.join("cgroup.procs").exists() {
        return vec![root];
    }
    let entries = std::fs::read_dir(&root).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|dir| dir.join("cgroup.procs").exists() && !dir.is_symlink())
        .collect()
}

/// Removes mounts and cgroups that a kubelet leaves when it ends. Idempotent.
///
/// # Errors
/// A mount is in use.
pub(crate) fn remove_traces(state: &Path) -> miette::Result<()> {
    let root = root(state);
    if !root.exists() {
        return Ok(());
    }
    // The kernel lists mounts by paths without symbolic links.
    let root = root.canonicalize().into_diagnostic()?;
    for at in mounts_below(&std::fs::read_to_string("/proc/thread-self/mounts").into_diagnostic()?, &root) {
        unmount(&at, UnmountFlags::DETACH)
            .into_diagnostic()
            .wrap_err_with(|| format!("unmount {}", at.display()))?;
    }
    let cgroup = cgroup_of(state);
    for hierarchy in hierarchies() {
        remove_cgroups(&hierarchy.join(&cgroup));
    }
    Ok(())
}

/// Returns the mount points at `root` and below, the deepest first. Pure.
fn mounts_below(mounts: &str, root: &Path) -> Vec<PathBuf> {
    let targets = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    // Spaces in paths are octal escapes (fstab(5)).
    let mut below: Vec<_> = targets
        .map(|target| PathBuf::from(target.replace("\\040", " ")))
        .filter(|target| target.starts_with(root))
        .collect();
    below.sort_by_key(|path| std::cmp::Reverse(path.components().count()));
    below
}

/// Removes cgroups from the leaves upwards; a cgroup with processes stays.
fn remove_cgroups(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_cgroups(&entry.path());
        }
    }
    let _absent_or_in_use = std::fs::remove_dir(dir);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_a_kubelet_are_unmounted_deepest_first() {
        let mounts = "tmpfs /s/kubelet/pods/a/volumes/token tmpfs rw 0 0\n/dev/vda /s/kubelet ext4 rw 0 0\n\
                      tmpfs /s/kubelet-other tmpfs rw 0 0\ntmpfs /s/kubelet/a\\040b tmpfs rw 0 0\n";
        let below = mounts_below(mounts, Path::new("/s/kubelet"));
        let want = ["/s/kubelet/pods/a/volumes/token", "/s/kubelet/a b", "/s/kubelet"].map(PathBuf::from);
        assert_eq!(below, want);
    }

    #[test]
    fn configuration_answers_only_with_a_credential() {
        let serving = ("/k.crt".into(), "/k.key".into());
        let config = configuration(Path::new("/s"), [10, 100, 0, 1].into(), (1, 2), &serving);
        assert_eq!(config["authentication"]["anonymous"]["enabled"], false);
        assert_eq!(config["authorization"]["mode"], "Webhook");
        assert_eq!(config["address"], "10.100.0.1");
    }
}
