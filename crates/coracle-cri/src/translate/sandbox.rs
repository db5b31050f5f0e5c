//! Translates the configuration of a pod sandbox into a VM. Pure.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use coracle_host::{Sandbox, VmSpec};
use coracle_hypervisor::{Forward, Protocol as HostProtocol};
use coracle_net::Reach;
use coracle_pod::bandwidth::bandwidth;
use coracle_proto::cri::{
    LinuxContainerResources, LinuxPodSandboxConfig, NamespaceMode, NamespaceOption, PodSandboxConfig,
    PodSandboxMetadata, PortMapping, Protocol,
};
use coracle_types::{IdMapping, MemoryMib, Vcpus, VmName};

use super::security::refuse_host_labels;
use super::user_namespace;
use crate::CriOptions;
use crate::facts::SandboxFacts;
use crate::refusal::Refusal;

/// Default period of CPU quotas, in microseconds.
const CPU_PERIOD_US: i64 = 100_000;

/// Returns the VM of a sandbox.
///
/// # Errors
/// Unsupported properties, or the fault of the request.
pub(crate) fn vm_spec(
    id: &str,
    facts: &SandboxFacts,
    driver: &str,
    options: &CriOptions,
) -> Result<VmSpec, Refusal> {
    let config = &facts.config;
    check_metadata(config.metadata.as_ref())?;
    let linux = config.linux.clone().unwrap_or_default();
    check_security(&linux, options)?;
    let ids = ids(config)?;
    if facts.disk && ids.is_some() {
        let (what, why) = ("a user namespace of a disk pod", "its system brings its own users");
        return Err(Refusal::Unsupported { what, why });
    }
    let name: VmName = id.parse().map_err(|_| Refusal::invalid("id", id))?;
    let (vcpus, memory) = match facts.disk {
        true => (Vcpus::MIN, MemoryMib::MIN), // never started: the container has a VM of its own
        false => size(&linux, options),
    };
    let dns = config.dns_config.clone().unwrap_or_default();
    let sandbox = Sandbox {
        nameservers: dns.servers,
        search_domains: dns.searches,
        resolver_options: dns.options,
        sysctls: sysctls(linux.sysctls, ids),
        hosts: None, // the kubelet mounts a file of its own
    };
    Ok(VmSpec {
        vcpus,
        memory,
        hostname: hostname(config),
        metadata: facts.to_metadata(),
        ports: forwards(config)?,
        bandwidth: bandwidth(&config.annotations)
            .map_err(|error| Refusal::invalid("sandbox", error.to_string()))?,
        driver: driver.to_owned(),
        sandbox: Some(sandbox),
        // As in every Kubernetes cluster, pods reach each other and their node.
        reach: Reach { guests: true, node: true },
        cgroup_parent: cgroup_of(config.linux.as_ref(), options),
        ..VmSpec::of(name, "")
    })
}

/// Returns the host name of a pod: its `hostname`, else its name.
pub(crate) fn hostname(config: &PodSandboxConfig) -> String {
    let hostname = match config.hostname.as_str() {
        "" => config.metadata.as_ref().map(|metadata| metadata.name.as_str()).unwrap_or_default(),
        given => given,
    };
    hostname.chars().take(64).collect()
}

/// Returns the host ports that are forwarded to a pod.
///
/// # Errors
/// The fault of a port.
pub(crate) fn forwards(config: &PodSandboxConfig) -> Result<Vec<Forward>, Refusal> {
    config.port_mappings.iter().filter_map(|port| forward(port).transpose()).collect()
}

/// Returns the pod's cgroup for its VMM, whose usage then counts as the pod's; empty: none. The kubelet limits this cgroup to
/// the limits of the containers and the overhead of the RuntimeClass. If that overhead is too small for guest and VMM, the VMM
/// would be killed in it.
pub(crate) fn cgroup_of(linux: Option<&LinuxPodSandboxConfig>, options: &CriOptions) -> String {
    let Some(linux) = linux else { return String::new() };
    let limits = linux.resources.clone().unwrap_or_default();
    let overhead = linux.overhead.clone().unwrap_or_default();
    let is_limited = limits.memory_limit_in_bytes > 0 || limits.cpu_quota > 0;
    let overhead_mib = u64::try_from(overhead.memory_limit_in_bytes).unwrap_or(0) >> 20;
    let has_room = overhead_mib >= options.overhead_mib.saturating_add(options.vmm_overhead_mib);
    match is_limited && !has_room {
        true => String::new(),
        false => linux.cgroup_parent.clone(),
    }
}

fn check_metadata(metadata: Option<&PodSandboxMetadata>) -> Result<(), Refusal> {
    match metadata {
        Some(m) if !m.name.is_empty() && !m.namespace.is_empty() && !m.uid.is_empty() => Ok(()),
        _ => Err(Refusal::invalid("sandbox metadata", "name, namespace or uid is missing")),
    }
}

/// Refuses namespaces of the host, and labels that only the host's kernel knows.
fn check_security(linux: &LinuxPodSandboxConfig, options: &CriOptions) -> Result<(), Refusal> {
    let security = linux.security_context.clone().unwrap_or_default();
    if security.run_as_group.is_some() && security.run_as_user.is_none() {
        return Err(Refusal::invalid("sandbox security context", "a group without a user"));
    }
    refuse_host_labels(security.apparmor.as_ref(), "")?;
    check_namespaces(&security.namespace_options.unwrap_or_default(), options)
}

pub(crate) fn check_namespaces(namespaces: &NamespaceOption, options: &CriOptions) -> Result<(), Refusal> {
    let unsupported = |what, why| Err(Refusal::Unsupported { what, why });
    match namespaces.network() {
        NamespaceMode::Node if !options.degrade_host_network => {
            return unsupported("the host's network", "a VM has a network of its own");
        }
        NamespaceMode::Container => return unsupported("a network of one container", "a pod has one"),
        NamespaceMode::Target => return unsupported("another pod's network", "a VM has one of its own"),
        NamespaceMode::Node | NamespaceMode::Pod => {}
    }
    match namespaces.ipc() {
        NamespaceMode::Node => unsupported("the host's IPC", "a VM has a kernel of its own"),
        NamespaceMode::Pod | NamespaceMode::Container | NamespaceMode::Target => Ok(()),
    }
}

/// Returns the ids of the pod's user namespace, if it has one.
///
/// # Errors
/// Errors of [`user_namespace::ids`].
pub(crate) fn ids(config: &PodSandboxConfig) -> Result<Option<IdMapping>, Refusal> {
    let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    let namespaces = security.and_then(|security| security.namespace_options.as_ref());
    namespaces.map_or(Ok(None), user_namespace::ids)
}

/// Returns the kernel parameters of the guest: the requested ones, and those that a user namespace needs.
fn sysctls(asked: BTreeMap<String, String>, ids: Option<IdMapping>) -> BTreeMap<String, String> {
    let needed = if ids.is_some() { user_namespace::SYSCTLS.as_slice() } else { &[] };
    let needed = needed.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    needed.chain(asked).collect()
}

/// Returns the size of the VM: the sum of the containers' limits, and the overhead of kernel and agent.
pub(crate) fn size(linux: &LinuxPodSandboxConfig, options: &CriOptions) -> (Vcpus, MemoryMib) {
    let resources = linux.resources.clone().unwrap_or_default();
    let limit = u64::try_from(resources.memory_limit_in_bytes).unwrap_or(0);
    let memory_mib = match limit.div_ceil(1 << 20) {
        0 => options.memory_mib,
        limit => limit.saturating_add(options.overhead_mib),
    };
    let period = if resources.cpu_period > 0 { resources.cpu_period } else { CPU_PERIOD_US };
    let vcpus = match resources.cpu_quota {
        quota if quota > 0 => u64::try_from(quota).unwrap_or(1).div_ceil(period.unsigned_abs()),
        _ => options.vcpus,
    };
    let vcpus = u32::try_from(vcpus.clamp(1, options.vcpus_max.max(1))).unwrap_or(u32::MAX);
    let memory_mib = memory_mib.max(MemoryMib::MIN.get().into());
    (vcpus.try_into().unwrap_or(Vcpus::MIN), memory_mib.try_into().unwrap_or(MemoryMib::MIN))
}

/// Checks that the limits of a pod fit its VM.
///
/// # Errors
/// [`Refusal::Resize`] with the size of the VM.
pub(crate) fn check_resize(
    limits: &LinuxContainerResources,
    (vcpus, memory): (Vcpus, MemoryMib),
    options: &CriOptions,
) -> Result<(), Refusal> {
    let wanted =
        LinuxPodSandboxConfig { resources: Some(limits.clone()), ..LinuxPodSandboxConfig::default() };
    let (wanted_vcpus, wanted_memory) = size(&wanted, options);
    let more_memory = limits.memory_limit_in_bytes > 0 && wanted_memory > memory;
    let more_vcpus = limits.cpu_quota > 0 && wanted_vcpus > vcpus;
    match more_memory || more_vcpus {
        true => Err(Refusal::Resize { vcpus: vcpus.get(), memory_mib: memory.get() }),
        false => Ok(()),
    }
}

/// Returns a forwarded host port; `None`: the port is only informational.
fn forward(port: &PortMapping) -> Result<Option<Forward>, Refusal> {
    if port.host_port == 0 {
        return Ok(None);
    }
    let number = |value: i32| {
        let number = u16::try_from(value).ok().filter(|port| *port > 0);
        number.ok_or_else(|| Refusal::invalid("port mapping", format!("{value} is not a port")))
    };
    let host_address = match port.host_ip.as_str() {
        "" | "::" => Ipv4Addr::UNSPECIFIED,
        address => address
            .parse()
            .map_err(|_| Refusal::invalid("port mapping", format!("{address} is not an IPv4 address")))?,
    };
    let protocol = match port.protocol() {
        Protocol::Tcp => HostProtocol::Tcp,
        Protocol::Udp => HostProtocol::Udp,
        Protocol::Sctp => {
            return Err(Refusal::Unsupported { what: "SCTP on a host port", why: "only TCP and UDP are" });
        }
    };
    let (host_port, guest_port) = (number(port.host_port)?, number(port.container_port)?);
    Ok(Some(Forward { protocol, host_address, host_port, guest_port }))
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::{
        DnsConfig, LinuxContainerResources, LinuxSandboxSecurityContext, SecurityProfile, UserNamespace,
        security_profile::ProfileType,
    };

    use super::*;

    fn facts(change: impl FnOnce(&mut PodSandboxConfig)) -> SandboxFacts {
        let (name, uid, namespace) = ("web".into(), "u".into(), "default".into());
        let metadata = Some(PodSandboxMetadata { name, uid, namespace, attempt: 0 });
        let mut config = PodSandboxConfig { metadata, ..PodSandboxConfig::default() };
        change(&mut config);
        SandboxFacts { config, ..SandboxFacts::default() }
    }

    fn spec(change: impl FnOnce(&mut PodSandboxConfig)) -> Result<VmSpec, Refusal> {
        vm_spec("ab12", &facts(change), "", &CriOptions::default())
    }

    fn resources(memory: i64, quota: i64, period: i64) -> Option<LinuxPodSandboxConfig> {
        let resources = LinuxContainerResources {
            memory_limit_in_bytes: memory,
            cpu_quota: quota,
            cpu_period: period,
            ..LinuxContainerResources::default()
        };
        Some(LinuxPodSandboxConfig { resources: Some(resources), ..LinuxPodSandboxConfig::default() })
    }

    #[test]
    fn vmm_joins_the_pod_cgroup_unless_overhead_is_too_small() {
        let linux = |memory, overhead: i64| {
            let of = |memory_limit_in_bytes| {
                Some(LinuxContainerResources { memory_limit_in_bytes, ..LinuxContainerResources::default() })
            };
            let overhead = of(overhead).filter(|_| overhead > 0);
            let cgroup_parent = "/kubepods/podu".to_owned();
            LinuxPodSandboxConfig { cgroup_parent, resources: of(memory), overhead, ..Default::default() }
        };
        for (why, memory, overhead, want) in [
            ("no limits", 0, 0, "/kubepods/podu"),
            ("limits without overhead", 16 << 20, 0, ""),
            ("limits with too little overhead", 16 << 20, 64 << 20, ""),
            ("limits with overhead", 16 << 20, 576 << 20, "/kubepods/podu"),
        ] {
            let spec = spec(|config| config.linux = Some(linux(memory, overhead))).unwrap();
            assert_eq!(spec.cgroup_parent, want, "{why}");
        }
    }

    #[test]
    fn size_follows_the_limits() {
        for (why, memory, quota, period, want) in [
            ("no limits", 0, 0, 0, (2, 512)),
            ("unlimited", -1, -1, 100_000, (2, 512)),
            ("limit and overhead", 256 << 20, 150_000, 100_000, (2, 320)),
            ("at least what boots", 1, 1, 100_000, (1, 128)),
            ("another period", 128 << 20, 30_000, 10_000, (3, 192)),
            ("a period left out", 128 << 20, 100_000, 0, (1, 192)),
        ] {
            let spec = spec(|config| config.linux = resources(memory, quota, period)).unwrap();
            assert_eq!((spec.vcpus.get(), spec.memory.get()), want, "{why}");
        }
    }

    #[test]
    fn resizes_table() {
        let vm = (2.try_into().unwrap(), 256.try_into().unwrap());
        for (why, memory, quota, fits) in [
            ("nothing said", 0, 0, true),
            ("what it has", 192 << 20, 200_000, true),
            ("less", 64 << 20, 50_000, true),
            ("more memory", 193 << 20, 0, false),
            ("more CPU time", 0, 200_001, false),
            ("no limit any more", -1, -1, true),
        ] {
            let limits = resources(memory, quota, 100_000).unwrap().resources.unwrap();
            assert_eq!(check_resize(&limits, vm, &CriOptions::default()).is_ok(), fits, "{why}");
        }
    }

    #[test]
    fn names_resolver_and_ports_are_passed_on() {
        let spec = spec(|config| {
            config.dns_config = Some(DnsConfig {
                servers: vec!["10.96.0.10".into()],
                searches: vec!["svc".into()],
                options: vec!["ndots:5".into()],
            });
            let port = PortMapping { container_port: 80, host_port: 8080, ..PortMapping::default() };
            config.port_mappings = vec![port.clone(), PortMapping { host_port: 0, ..port }];
        })
        .unwrap();
        let sandbox = spec.sandbox.unwrap();
        assert_eq!(spec.hostname, "web");
        assert_eq!(
            (sandbox.nameservers[0].as_str(), sandbox.resolver_options[0].as_str()),
            ("10.96.0.10", "ndots:5")
        );
        assert_eq!(spec.ports.len(), 1);
        assert_eq!((spec.ports[0].host_port, spec.ports[0].guest_port), (8080, 80));
    }

    #[test]
    fn unsupported_sandbox_options_are_refused() {
        let namespaces = |change: fn(&mut NamespaceOption)| {
            let mut options = NamespaceOption::default();
            change(&mut options);
            let security = LinuxSandboxSecurityContext {
                namespace_options: Some(options),
                ..LinuxSandboxSecurityContext::default()
            };
            Some(LinuxPodSandboxConfig {
                security_context: Some(security),
                ..LinuxPodSandboxConfig::default()
            })
        };
        let apparmor =
            SecurityProfile { profile_type: ProfileType::Localhost.into(), localhost_ref: "x".into() };
        let labelled = LinuxSandboxSecurityContext { apparmor: Some(apparmor), ..Default::default() };
        let labelled = LinuxPodSandboxConfig { security_context: Some(labelled), ..Default::default() };
        for (why, linux) in [
            ("host network", namespaces(|o| o.network = NamespaceMode::Node.into())),
            ("host IPC", namespaces(|o| o.ipc = NamespaceMode::Node.into())),
            (
                "a user namespace without ids",
                namespaces(|o| o.userns_options = Some(UserNamespace::default())),
            ),
            ("AppArmor profile of the host", Some(labelled)),
        ] {
            let refused = spec(|config| config.linux = linux).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{why}: {refused}");
        }
        assert!(spec(|config| config.linux = namespaces(|o| o.pid = NamespaceMode::Node.into())).is_ok());
        assert!(spec(|config| config.metadata = None).is_err());
        let degraded = CriOptions { degrade_host_network: true, ..CriOptions::default() };
        let host_network =
            facts(|config| config.linux = namespaces(|o| o.network = NamespaceMode::Node.into()));
        assert!(vm_spec("ab12", &host_network, "", &degraded).is_ok());
    }
}
