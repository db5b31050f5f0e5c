//! Configuration of the host core.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use coracle_hypervisor::Jail;
use coracle_net::Reach;
use coracle_oci::{Credentials, Registries};
use sha2::{Digest, Sha256};

use crate::memory::memory_mib;

/// Plain settings of one host core; parsed and checked at the edge.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Records, images, disks. Made when it is not there.
    pub state_dir: PathBuf,
    /// Sockets. Short: a socket path has 107 bytes at most.
    pub run_dir: PathBuf,
    /// Default guest kernel.
    pub kernel: PathBuf,
    /// Initramfs with the guest agent.
    pub initrd: PathBuf,
    /// The agent's binary, for systems that disk images bring.
    pub agent: PathBuf,
    /// Directories that a kernel named by a caller may lie in.
    pub kernel_dirs: Vec<PathBuf>,
    /// Directories that disks and directories named by a caller may lie in, beside `<state>/volumes`.
    pub volume_dirs: Vec<PathBuf>,
    /// Directories of disk classes, by name: VMs ask for disks of their own there. One directory belongs to one node
    /// daemon.
    pub disk_classes: BTreeMap<String, PathBuf>,
    /// Guests of a network inside the VMM reach what the daemon's user reaches, the host's loopback and metadata addresses
    /// included. Off: nothing but the ports that lead in.
    pub user_network_open: bool,
    /// What guests of the bridge reach beside what is outside of the node, all of them.
    pub guest_reach: Reach,
    /// Size of a VM's writable disk unless the caller says otherwise, in MiB. Sparse.
    pub disk_mib: u64,
    /// From start to acknowledged configuration.
    pub boot_limit: Duration,
    /// The same of a system that a disk image brings: its first boot does a lot. Where its processors are emulated it has four
    /// times as long.
    pub disk_image_vm_boot_limit: Duration,
    /// Limit for a clone to get its identity; a slower one is replaced by a cold boot.
    pub identity_limit: Duration,
    /// How many guests may boot at once.
    pub boots_at_once: usize,
    /// Memory that VMs may declare together, as a share of the host's.
    pub memory_overcommit: f64,
    /// DNS servers for guests.
    pub nameservers: Vec<String>,
    /// How registries are reached; the image store has them, too.
    pub registries: Registries,
    /// Credentials for snapshots and disks of single registries, by host and optional port; for all others docker's
    /// configuration has them.
    pub credentials: BTreeMap<String, Credentials>,
    /// A VM that the node is to remove by itself stays so long after its last client has released it, and is looked at so often
    /// while it runs: not zero.
    pub released_grace: Duration,
    /// VMMs run in a jail, each as a user of its own ([`Jail`]). Off where this process may not make one.
    pub jail: bool,
    /// Whether, and how many, machines are kept to start clones from.
    pub templates: TemplatePolicy,
    /// How many of their clones run before anybody asks for them, and for how long.
    pub warm_pool: WarmPoolPolicy,
}

impl HostConfig {
    /// Sensible settings for a state directory.
    #[must_use]
    pub fn new(state_dir: PathBuf, kernel: PathBuf, initrd: PathBuf) -> Self {
        Self {
            run_dir: run_dir_of(&state_dir),
            state_dir,
            kernel,
            agent: initrd.with_file_name("agent"),
            initrd,
            kernel_dirs: vec![],
            volume_dirs: vec![],
            disk_classes: BTreeMap::new(),
            disk_mib: 10 * 1024,
            boot_limit: Duration::from_secs(120),
            disk_image_vm_boot_limit: Duration::from_secs(600),
            identity_limit: Duration::from_secs(2),
            boots_at_once: boots_at_once(),
            memory_overcommit: 1.0,
            user_network_open: false,
            guest_reach: Reach::default(),
            nameservers: nameservers(),
            registries: Registries::default(),
            credentials: BTreeMap::new(),
            released_grace: Duration::from_secs(15),
            jail: Jail::is_possible(),
            templates: TemplatePolicy::default(),
            warm_pool: WarmPoolPolicy::default(),
        }
    }
}

/// Two for each CPU: one waits for its disk while another one computes.
fn boots_at_once() -> usize {
    const LEAST: usize = 4;
    thread::available_parallelism().map_or(LEAST, |cpus| LEAST.max(2 * cpus.get()))
}

/// What bounds the templates of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplatePolicy {
    /// False: every start is a cold boot, and nothing is kept.
    pub enabled: bool,
    /// Templates kept; the oldest go first.
    pub count_max: usize,
    /// A template older than this is taken anew.
    pub age_max: Duration,
    /// Memory that templates take together; the oldest go first.
    pub bytes_max: u64,
}

impl Default for TemplatePolicy {
    fn default() -> Self {
        Self { enabled: true, count_max: 8, age_max: Duration::from_secs(7 * 24 * 3600), bytes_max: 4 << 30 }
    }
}

/// Limits of the warm pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarmPoolPolicy {
    /// Size classes that have clones, those started last; 0: none has.
    pub shapes_max: usize,
    /// Clones that a size class has at least: a burst of starts finds them.
    pub depth_min: usize,
    /// Clones of all size classes together.
    pub clones_max: usize,
    /// A shape without a start for so long has none.
    pub idle_max: Duration,
}

impl Default for WarmPoolPolicy {
    fn default() -> Self {
        let depth_min = depth_min_of(memory_mib().0);
        Self { shapes_max: 2, depth_min, clones_max: 32, idle_max: Duration::from_secs(10 * 60) }
    }
}

/// One for each GiB of the host's memory, up to twenty: some six hundredths of it, at most, under TCG.
fn depth_min_of(memory_mib: u64) -> usize {
    usize::try_from(memory_mib / 1024).unwrap_or(usize::MAX).clamp(1, 20)
}

/// Where sockets of this state directory live: `/run/coracle/<8 hex of the path>` for
/// root, below `$XDG_RUNTIME_DIR` or the temporary directory otherwise.
#[must_use]
pub fn run_dir_of(state_dir: &Path) -> PathBuf {
    let mut hash = hex(&Sha256::digest(state_dir.as_os_str().as_encoded_bytes()));
    hash.truncate(8);
    if rustix::process::geteuid().is_root() {
        return Path::new("/run/coracle").join(hash);
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) => Path::new(&dir).join("coracle").join(hash),
        None => {
            let user = rustix::process::geteuid().as_raw();
            std::env::temp_dir().join(format!("coracle-{user}")).join(hash)
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The host's own DNS servers, but those on its loopback, which no guest reaches.
fn nameservers() -> Vec<String> {
    let text = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let servers = text.lines().filter_map(|line| line.strip_prefix("nameserver "));
    servers
        .map(str::trim)
        .filter(|s| !s.starts_with("127.") && !s.contains(':'))
        .take(3)
        .map(str::to_owned)
        .collect()
}
