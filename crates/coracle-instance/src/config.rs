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

/// Settings of one host core; parsed and checked at the edge.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Directory of records, images and disks. Created when it does not exist.
    pub state_dir: PathBuf,
    /// Directory of sockets. Must be short: a socket path has at most 107 bytes.
    pub run_dir: PathBuf,
    /// Default guest kernel.
    pub kernel: PathBuf,
    /// Initramfs with the guest agent.
    pub initrd: PathBuf,
    /// Guest agent binary, for disk image VMs.
    pub agent: PathBuf,
    /// Allowed directories of a kernel that a caller names.
    pub kernel_dirs: Vec<PathBuf>,
    /// Allowed directories of disks and directories that a caller names, beside `<state>/volumes`.
    pub volume_dirs: Vec<PathBuf>,
    /// Directories of disk classes, by name, in which VMs ask for disks of their own. Each directory belongs to one node
    /// daemon.
    pub disk_classes: BTreeMap<String, PathBuf>,
    /// Whether guests with user-mode networking reach everything that the daemon's user reaches, the host's loopback and
    /// metadata addresses included. Off: only the forwarded ports pass.
    pub user_network_open: bool,
    /// Networks and services that all guests on the bridge may reach, beside what is outside of the node.
    pub guest_reach: Reach,
    /// Default size of a VM's writable disk, MiB. Sparse.
    pub disk_mib: u64,
    /// Time limit from start to acknowledged configuration.
    pub boot_limit: Duration,
    /// The same limit for a disk image VM, whose first boot does more work. Multiplied by four if the CPU is emulated.
    pub disk_image_vm_boot_limit: Duration,
    /// Time limit for a clone to get its identity. A slower clone is replaced by a cold boot.
    pub identity_limit: Duration,
    /// Maximum number of guests that boot at the same time.
    pub boots_at_once: usize,
    /// Memory that all VMs together may declare, as a fraction of the host's memory.
    pub memory_overcommit: f64,
    /// DNS servers for guests.
    pub nameservers: Vec<String>,
    /// Settings of registries, also used by the image store.
    pub registries: Registries,
    /// Credentials for snapshots and disks of individual registries, by host and optional port. Docker's configuration applies
    /// to all others.
    pub credentials: BTreeMap<String, Credentials>,
    /// Time that a VM with automatic removal stays after its last client has released it; also the interval at which it is
    /// checked while it runs. Not zero.
    pub released_grace: Duration,
    /// Whether VMMs run in a jail, each as a user of its own ([`Jail`]). Off where this process may not make jails.
    pub jail: bool,
    /// Policy for keeping templates.
    pub templates: TemplatePolicy,
    /// Policy for the warm pool.
    pub warm_pool: WarmPoolPolicy,
}

impl HostConfig {
    /// Returns the default settings for a state directory.
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

/// Returns two boots for each CPU: one waits for its disk while another one computes.
fn boots_at_once() -> usize {
    const LEAST: usize = 4;
    thread::available_parallelism().map_or(LEAST, |cpus| LEAST.max(2 * cpus.get()))
}

/// Limits of the templates of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplatePolicy {
    /// False: every start is a cold boot, and no template is kept.
    pub enabled: bool,
    /// Maximum number of templates; the oldest are removed first.
    pub count_max: usize,
    /// Maximum age of a template; an older one is taken anew.
    pub age_max: Duration,
    /// Maximum memory of all templates together, bytes; the oldest are removed first.
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
    /// Maximum number of size classes with clones, the most recently started; 0: none.
    pub shapes_max: usize,
    /// Minimum number of clones of a size class, for a burst of starts.
    pub depth_min: usize,
    /// Maximum number of clones of all size classes together.
    pub clones_max: usize,
    /// Time without a start after which a size class has no clones.
    pub idle_max: Duration,
}

impl Default for WarmPoolPolicy {
    fn default() -> Self {
        let depth_min = depth_min_of(memory_mib().0);
        Self { shapes_max: 2, depth_min, clones_max: 32, idle_max: Duration::from_secs(10 * 60) }
    }
}

/// Returns one clone for each GiB of the host's memory, up to twenty: under TCG, these take at most some six hundredths of it.
fn depth_min_of(memory_mib: u64) -> usize {
    usize::try_from(memory_mib / 1024).unwrap_or(usize::MAX).clamp(1, 20)
}

/// Returns the directory for the sockets of a state directory: `/run/coracle/<8 hex of the path>` for root, otherwise below
/// `$XDG_RUNTIME_DIR` or the temporary directory.
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

/// Returns the host's own DNS servers, except those on its loopback, which no guest reaches.
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
