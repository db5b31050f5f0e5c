//! Identity and resources of the machine. Reads only files and the host core of the node.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::Path;

use coracle_files::blocking;
use coracle_host::Host;
use coracle_pod::host::PodId;
use coracle_pod::node::{NodeFacts, ResolverConfig};
use coracle_types::MemoryMib;
use coracle_vm_pod::orphans::pod_uid;
use k8s_openapi::api::core::v1::NodeSystemInfo;

use super::object::architecture;
use crate::options::VirtualNodeOptions;
use crate::pressure::PressureThresholds;

/// Kubernetes version that this node reports and whose kubelet it behaves like.
const KUBERNETES: &str = "v1.36.0";
/// Most images in a status (`kubelet` reference, nodeStatusMaxImages).
const IMAGES_MAX: usize = 50;
/// Most names of an image in a status.
const NAMES_MAX: usize = 5;

/// Properties that do not change while the daemon runs.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// Address of the node.
    pub(crate) address: IpAddr,
    /// Port of the node's API.
    pub(crate) port: u16,
    pub(super) hostname: String,
    pub(super) info: NodeSystemInfo,
    pub(super) pods_max: u32,
    pub(super) pressure: PressureThresholds,
    pods: NodeFacts,
}

/// Current resources of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resources {
    pub(crate) cpus: u32,
    pub(crate) memory_bytes: u64,
    /// Memory for pods: without the memory that other VMs of the node have declared.
    pub(crate) allocatable_memory_bytes: u64,
    pub(crate) memory_available_bytes: u64,
    pub(crate) disk_bytes: u64,
    pub(crate) disk_available_bytes: u64,
    /// Names and size of each image, largest first.
    pub(crate) images: Vec<(Vec<String>, u64)>,
    /// Parts of the VMMs' jail that the host does not support, each with the reason.
    pub(crate) jail_missing: Vec<String>,
}

/// Reader of the node's resources.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    pub(crate) host: Host,
    /// Reported instead of the resources of the machine, if set.
    pub(crate) cpus: Option<u32>,
    pub(crate) memory: Option<MemoryMib>,
}

impl Reader {
    /// Reads the current resources. Values that cannot be read count as 0.
    pub(crate) async fn read(&self) -> Resources {
        let capacity = self.host.capacity();
        let said = self.memory.map(|memory| u64::from(memory.get()));
        let others = self
            .host
            .list()
            .iter()
            .filter(|view| PodId::of(&view.record).is_none() && pod_uid(&view.record).is_none())
            .fold(0_u64, |sum, view| sum.saturating_add(view.record.memory.get().into()));
        let state = self.host.config().state_dir.clone();
        let disk = blocking(move || Ok(rustix::fs::statvfs(&state)?)).await;
        let (disk_bytes, disk_available_bytes) =
            disk.map_or((0, 0), |fs| (fs.f_blocks * fs.f_frsize, fs.f_bavail * fs.f_frsize));
        let mut images = self.host.images().list().await.unwrap_or_default();
        images.sort_by_key(|image| std::cmp::Reverse(image.size_bytes));
        let images = images.into_iter().take(IMAGES_MAX).map(|image| {
            let names = image.references.iter().take(NAMES_MAX).map(ToString::to_string);
            (names.collect(), image.size_bytes)
        });
        Resources {
            cpus: self.cpus.unwrap_or_else(|| u32::try_from(capacity.cpus).unwrap_or(u32::MAX)),
            memory_bytes: said.unwrap_or(capacity.memory_mib) << 20,
            allocatable_memory_bytes: said.unwrap_or(capacity.memory_allowed_mib).saturating_sub(others)
                << 20,
            memory_available_bytes: capacity.memory_available_mib << 20,
            disk_bytes,
            disk_available_bytes,
            images: images.filter(|(names, _): &(Vec<String>, u64)| !names.is_empty()).collect(),
            jail_missing: self.host.jail_missing().to_vec(),
        }
    }
}

impl Identity {
    /// Reads the identity. `bound` is the address that the API listens on.
    pub(crate) fn read(options: &VirtualNodeOptions, bound: SocketAddr, version: &str) -> Self {
        let address = options.address.unwrap_or_else(|| own_address(bound));
        let uname = rustix::system::uname();
        let machine_id = line("/etc/machine-id");
        let system_uuid = line("/sys/class/dmi/id/product_uuid");
        let info = NodeSystemInfo {
            architecture: architecture().to_owned(),
            boot_id: line("/proc/sys/kernel/random/boot_id"),
            container_runtime_version: format!("coracle://{version}"),
            kernel_version: uname.release().to_string_lossy().into_owned(),
            kube_proxy_version: String::new(),
            kubelet_version: format!("{KUBERNETES}-coracle.{version}"),
            system_uuid: if system_uuid.is_empty() { machine_id.clone() } else { system_uuid },
            machine_id,
            operating_system: "linux".to_owned(),
            os_image: os_image(&std::fs::read_to_string("/etc/os-release").unwrap_or_default()),
            swap: None,
        };
        let resolver = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
        let pods = NodeFacts {
            name: options.name.clone(),
            addresses: vec![address],
            cluster_domain: options.cluster_domain.clone(),
            cluster_dns: options.cluster_dns.clone(),
            resolver: resolver_config(&resolver),
            allocatable_cpus: 1,
            allocatable_memory: MemoryMib::MIN,
            default_memory: options.default_memory,
            guest_overhead_mib: options.guest_overhead_mib,
        };
        let hostname = options.hostname.clone().unwrap_or_else(|| options.name.clone());
        Self {
            address,
            port: bound.port(),
            hostname,
            info,
            pods_max: options.pods_max,
            pressure: options.pressure,
            pods,
        }
    }

    /// Returns the properties of the node that pods depend on.
    pub(crate) fn pod_facts(&self, resources: &Resources) -> NodeFacts {
        let mib = (resources.allocatable_memory_bytes >> 20).clamp(MemoryMib::MIN.get().into(), 1 << 20);
        NodeFacts {
            allocatable_cpus: resources.cpus,
            allocatable_memory: MemoryMib::try_from(mib).unwrap_or(MemoryMib::MIN),
            ..self.pods.clone()
        }
    }
}

/// Returns the listening address if it is specific, else the address of the interface with the default route. Sends no packet.
fn own_address(bound: SocketAddr) -> IpAddr {
    let routed = || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
        Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_unspecified())
    };
    match bound.ip() {
        ip if !ip.is_unspecified() => ip,
        _ => routed().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)),
    }
}

fn line(path: &str) -> String {
    std::fs::read_to_string(Path::new(path)).unwrap_or_default().trim().to_owned()
}

/// Returns `PRETTY_NAME` of os-release(5).
fn os_image(text: &str) -> String {
    let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.unwrap_or("Linux").trim_matches(['"', '\'']).to_owned()
}

/// Parses resolv.conf(5).
fn resolver_config(text: &str) -> ResolverConfig {
    let mut config = ResolverConfig::default();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let keyword = words.next();
        let words = words.map(str::to_owned);
        match keyword {
            Some("nameserver") => config.nameservers.extend(words.take(1)),
            // The last `search` line applies.
            Some("search") => config.searches = words.collect(),
            Some("options") => config.options.extend(words),
            _ => {}
        }
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolver_config_is_read_from_its_file() {
        let text = "# a comment\nnameserver 10.0.0.1\nsearch old\nsearch a.b c\noptions ndots:2 rotate\nnameserver ::1\n";
        let config = resolver_config(text);
        assert_eq!(config.nameservers, ["10.0.0.1", "::1"]);
        assert_eq!(config.searches, ["a.b", "c"]);
        assert_eq!(config.options, ["ndots:2", "rotate"]);
    }

    #[test]
    fn os_image_is_read_from_os_release() {
        assert_eq!(os_image("ID=debian\nPRETTY_NAME=\"Debian 13\"\n"), "Debian 13");
        assert_eq!(os_image(""), "Linux");
    }

    #[test]
    fn node_address_is_the_listen_address() {
        assert_eq!(own_address("192.0.2.7:1".parse().unwrap()).to_string(), "192.0.2.7");
        assert!(!own_address("0.0.0.0:1".parse().unwrap()).is_unspecified());
    }
}
