//! Configure: identity, network and disks of the guest. `Plan::parse` is pure; `apply` executes the plan in steps that can be
//! repeated.

use std::io;
use std::path::Path;

use coracle_proto::guest::{CgroupLimits, ConfigureRequest, ConfigureSandboxRequest};
use rustix::fs::Mode;
use rustix::time::{ClockId, Timespec};

use crate::cgroup::{CONTAINERS, Cgroup, WORKLOAD};
use crate::console::say;
use crate::error::Error;
use crate::rootfs::Root;
use crate::{base_mounts, host_keys, mounts, net, sandbox, sys, volumes};

/// Maximum length of a host name, bytes (HOST_NAME_MAX).
const HOSTNAME_MAX: usize = 64;
/// Resolver file of a system, and the maximum that is read of it, bytes.
const RESOLVER: &str = "/etc/resolv.conf";
const RESOLVER_MAX: usize = 64 * 1024;
/// Maximum size of /etc/hosts in a request, bytes.
const HOSTS_MAX: usize = 64 * 1024;

/// Validated request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    hostname: String,
    machine_id: String,
    /// Content of /etc/hosts; empty: that of [`Plan::hosts`].
    hosts: String,
    network: Option<net::Plan>,
    pub(crate) root: Option<mounts::Plan>,
    /// Makes the guest a sandbox, whose containers are created later.
    pub(crate) sandbox: Option<sandbox::Plan>,
    limits: Option<CgroupLimits>,
    /// Volumes to mount now, regardless of earlier ones.
    volumes: Volumes,
    /// Values that are ignored in the comparison of two requests.
    moment: Moment,
}

/// Values that differ each time the same request is sent.
#[derive(Clone, Debug)]
struct Moment {
    entropy: Vec<u8>,
    clock_unix_ns: i64,
    takes_over: bool,
}

/// Volumes, which are ignored in the comparison of two requests.
#[derive(Clone, Debug)]
struct Volumes(Vec<volumes::Plan>);

impl PartialEq for Volumes {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
impl Eq for Volumes {}

impl PartialEq for Moment {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
impl Eq for Moment {}

impl Plan {
    pub(crate) fn parse(request: ConfigureRequest) -> Result<Self, Error> {
        if !request.hostname.is_empty() && !net::is_name(&request.hostname, HOSTNAME_MAX) {
            return Err(Error::invalid(format!("host name {:?}", request.hostname)));
        }
        let id = &request.machine_id;
        let is_id = id.len() == 32 && id.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        if !id.is_empty() && !is_id {
            return Err(Error::invalid("machine id is not 32 lower-case hex digits"));
        }
        if request.entropy.len() > sys::ENTROPY_MAX {
            return Err(Error::invalid(format!("more than {} bytes of entropy", sys::ENTROPY_MAX)));
        }
        Ok(Self {
            network: request.network.as_ref().map(net::Plan::parse).transpose()?,
            root: request.root.as_ref().map(mounts::Plan::parse).transpose()?,
            sandbox: None,
            limits: request.limits,
            volumes: Volumes(request.mounts.iter().map(volumes::Plan::parse).collect::<Result<_, _>>()?),
            hostname: request.hostname,
            machine_id: request.machine_id,
            hosts: String::new(),
            moment: Moment {
                entropy: request.entropy,
                clock_unix_ns: request.clock_unix_ns,
                takes_over: request.takes_over,
            },
        })
    }

    pub(crate) fn parse_sandbox(request: ConfigureSandboxRequest) -> Result<Self, Error> {
        let sandbox = sandbox::Plan::parse(&request.overlay_device, request.sysctls)?;
        if request.hosts.len() > HOSTS_MAX {
            return Err(Error::invalid(format!("more than {HOSTS_MAX} bytes of /etc/hosts")));
        }
        let plan = Self::parse(ConfigureRequest {
            hostname: request.hostname,
            entropy: request.entropy,
            clock_unix_ns: request.clock_unix_ns,
            machine_id: request.machine_id,
            network: request.network,
            mounts: request.mounts,
            limits: request.limits,
            ..ConfigureRequest::default()
        })?;
        Ok(Self { sandbox: Some(sandbox), hosts: request.hosts, ..plan })
    }

    /// Makes the cgroup that limits the workload or the containers, if there are limits; blocking.
    pub(crate) fn cgroup(&self) -> Result<Option<Cgroup>, Error> {
        self.limits.as_ref().map(|limits| Cgroup::create(self.cgroup_name(), limits)).transpose()
    }

    /// Name of the cgroup of the workload, or of all containers.
    pub(crate) fn cgroup_name(&self) -> &'static str {
        if self.sandbox.is_some() { CONTAINERS } else { WORKLOAD }
    }

    pub(crate) fn volumes(&self) -> &[volumes::Plan] {
        &self.volumes.0
    }

    /// Whether the guest continues from another VM's memory.
    pub(crate) fn takes_over(&self) -> bool {
        self.moment.takes_over
    }

    /// Adds the root that an earlier plan has mounted, if this plan has none.
    pub(crate) fn or_root(mut self, mounted: Option<mounts::Plan>) -> Self {
        self.root = self.root.or(mounted);
        self
    }

    fn hosts(&self) -> String {
        if !self.hosts.is_empty() {
            return self.hosts.clone();
        }
        let mut text = String::from("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
        let address = self.network.as_ref().and_then(|n| n.link.as_ref()).map(|l| l.address);
        if !self.hostname.is_empty() {
            let address = address.unwrap_or(std::net::Ipv4Addr::new(127, 0, 1, 1));
            text.push_str(&format!("{address}\t{}\n", self.hostname));
        }
        text
    }
}

/// Result of a Configure.
#[derive(Debug)]
pub(crate) struct Applied {
    pub(crate) addresses: Vec<String>,
    /// Root of the container, if this call mounted it.
    pub(crate) root: Option<Root>,
}

/// Configures the guest; blocking. `mounted` is the root that is mounted already. `changed`: the plan differs from the previous
/// one. Entropy comes first: no random number may be drawn that another clone of the template draws as well.
pub(crate) fn apply(plan: &Plan, mounted: Option<&Root>, changed: bool) -> Result<Applied, Error> {
    identity(plan)?;
    let (root, identity) = match (&plan.root, mounted) {
        (Some(wanted), None) => {
            let (root, identity) = mounts::root(wanted)?;
            (Some(root), identity)
        }
        (None, None) => (plan.sandbox.as_ref().map(sandbox::Plan::root).transpose()?, None),
        _ => (None, None),
    };
    let target = root.as_ref().or(mounted).map(|root| FilesTarget { root, etc: identity.as_ref() });
    match write_identity(plan, target.filter(|_| root.is_some() || changed)) {
        Ok(addresses) => Ok(Applied { addresses, root }),
        Err(error) => {
            if root.is_some() {
                drop(root);
                mounts::unmount_all();
            }
            Err(error)
        }
    }
}

/// Writes files first, then configures the network, so that all packets have the new identity. Until then the packet filter of
/// the host drops the packets of a copy, whose MAC and address are those of another VM.
fn write_identity(plan: &Plan, target: Option<FilesTarget<'_>>) -> Result<Vec<String>, Error> {
    if let Some(target) = target {
        files(target, plan)?;
    }
    let addresses = plan.network.as_ref().map(net::apply).transpose()?.unwrap_or_default();
    plan.sandbox.as_ref().map_or(Ok(()), sandbox::Plan::set_sysctls)?;
    Ok(addresses)
}

/// Like [`apply`], for a system from a disk image, which gets names and network in its own first boot. It gets new ones when it
/// continues from the memory of another VM.
pub(crate) fn apply_to_system(plan: &Plan, root: &Root) -> Result<Applied, Error> {
    identity(plan)?;
    if plan.takes_over() {
        base_mounts::cover_boot_id(Path::new("/"))?;
        files(FilesTarget { root, etc: None }, plan)?;
        host_keys::renew(root);
    } else if !has_nameserver(root) {
        resolver(root, plan)?;
    }
    let addresses = plan.network.as_ref().map(net::apply_to_system).transpose()?.unwrap_or_default();
    Ok(Applied { addresses, root: None })
}

fn has_nameserver(root: &Root) -> bool {
    let text = root.read(Path::new(RESOLVER), RESOLVER_MAX).unwrap_or_default();
    String::from_utf8_lossy(&text).lines().any(|line| line.trim_start().starts_with("nameserver"))
}

fn resolver(root: &Root, plan: &Plan) -> Result<(), Error> {
    let Some(network) = plan.network.as_ref().filter(|n| !n.nameservers.is_empty()) else { return Ok(()) };
    root.replace(Path::new(RESOLVER), network.resolv_conf().as_bytes(), Mode::from_raw_mode(0o644))
        .map_err(Error::io(format!("write {RESOLVER} in the image")))
}

/// Sets entropy, clock and host name, which is cheap and may be repeated.
pub(crate) fn identity(plan: &Plan) -> Result<(), Error> {
    if !plan.moment.entropy.is_empty() {
        sys::add_entropy(&plan.moment.entropy).map_err(Error::io("add entropy"))?;
    }
    let ns = plan.moment.clock_unix_ns;
    if ns > 0 {
        let time = Timespec { tv_sec: ns / 1_000_000_000, tv_nsec: ns % 1_000_000_000 };
        rustix::time::clock_settime(ClockId::Realtime, time).map_err(Error::io("set the clock"))?;
    }
    if !plan.hostname.is_empty() {
        rustix::system::sethostname(plan.hostname.as_bytes()).map_err(Error::io("set the host name"))?;
    }
    Ok(())
}

/// Place of the files with the guest's identity.
#[derive(Clone, Copy)]
struct FilesTarget<'r> {
    /// Root of the container.
    root: &'r Root,
    /// Root of the files in `/etc`, if it is another one.
    etc: Option<&'r Root>,
}

/// Writes the files of the guest's identity into the container.
fn files(FilesTarget { root, etc }: FilesTarget<'_>, plan: &Plan) -> Result<(), Error> {
    let etc = etc.unwrap_or(root);
    let put_into = |root: &Root, path: &str, text: &str, mode: u32| {
        root.replace(Path::new(path), text.as_bytes(), Mode::from_raw_mode(mode))
            .map_err(Error::io(format!("write {path} in the image")))
    };
    let put = |path: &str, text: &str, mode: u32| put_into(etc, path, text, mode);
    put("/etc/hosts", &plan.hosts(), 0o644)?;
    if !plan.hostname.is_empty() {
        put("/etc/hostname", &format!("{}\n", plan.hostname), 0o644)?;
    }
    resolver(etc, plan)?;
    if !plan.machine_id.is_empty() {
        let text = format!("{}\n", plan.machine_id);
        put("/etc/machine-id", &text, 0o444)?;
        if root.dir(Path::new("/var/lib/dbus")).is_ok() {
            put_into(root, "/var/lib/dbus/machine-id", &text, 0o444)?;
        }
    }
    if let Err(e) = boot_id() {
        say!("boot id: {e}"); // not fatal: the guest then has the boot id of its template
    }
    Ok(())
}

/// Sets a new boot id.
fn boot_id() -> io::Result<()> {
    let mut id = [0u8; 16];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
    base_mounts::boot_id(&uuid(u128::from_be_bytes(id)))
}

/// UUID of version 4 and a line feed.
fn uuid(bits: u128) -> String {
    let version = bits & !(0xf << 76) | (4 << 76);
    let hex = format!("{:032x}", version & !(0b11 << 62) | (0b10 << 62));
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
    format!("{}-{}-{}-{}-{}\n", part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use coracle_proto::guest::Network;

    fn request() -> ConfigureRequest {
        let network =
            Network { mac: "02:00:00:00:00:01".into(), address: "10.0.0.2/24".into(), ..Network::default() };
        ConfigureRequest {
            hostname: "web-0".into(),
            machine_id: "0".repeat(32),
            network: Some(network),
            ..ConfigureRequest::default()
        }
    }

    #[test]
    fn plans_compare_equal_regardless_of_clock_and_entropy() {
        let plan = |r| Plan::parse(r).unwrap();
        let later = ConfigureRequest { entropy: vec![1; 64], clock_unix_ns: 5, ..request() };
        assert_eq!(plan(request()), plan(later));
        assert_ne!(plan(request()), plan(ConfigureRequest { hostname: "web-1".into(), ..request() }));
    }

    #[test]
    fn bad_requests_are_refused() {
        for (why, bad) in [
            ("host name with a line feed", ConfigureRequest { hostname: "a\nb".into(), ..request() }),
            ("long host name", ConfigureRequest { hostname: "a".repeat(65), ..request() }),
            ("short machine id", ConfigureRequest { machine_id: "0".into(), ..request() }),
            ("upper-case machine id", ConfigureRequest { machine_id: "A".repeat(32), ..request() }),
            ("too much entropy", ConfigureRequest { entropy: vec![0; 513], ..request() }),
        ] {
            assert!(matches!(Plan::parse(bad), Err(Error::Invalid(_))), "{why}");
        }
        assert!(Plan::parse(ConfigureRequest::default()).is_ok(), "everything is optional");
    }

    #[test]
    fn files_stay_inside_a_hostile_image() {
        let outer = tempfile::tempdir().unwrap();
        let inner = outer.path().join("root");
        std::fs::create_dir(&inner).unwrap();
        std::os::unix::fs::symlink("../..", inner.join("etc")).unwrap();
        let root = Root::open(&inner).unwrap();
        let _ = files(FilesTarget { root: &root, etc: None }, &Plan::parse(request()).unwrap());
        assert!(!outer.path().join("hosts").exists());
        assert_eq!(
            std::fs::read_to_string(inner.join("hosts")).unwrap().lines().last(),
            Some("10.0.0.2\tweb-0")
        );
    }

    #[test]
    fn uuids_are_version_4() {
        assert_eq!(uuid(0), "00000000-0000-4000-8000-000000000000\n");
        assert_eq!(uuid(u128::MAX), "ffffffff-ffff-4fff-bfff-ffffffffffff\n");
    }
}
