//! `coracle node --virtual-node`, and the same under the name `vk-cocoon` with the variables, ports and defaults of the
//! original.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use coracle_api::Amount;
use coracle_api::cocoon::keys;
use coracle_cli::cli::{NodeAddress, NodeArgs};
use coracle_cli::error::Failure;
use coracle_cli::tasks::Tasks;
use coracle_host::{Host, HostConfig};
use coracle_oci::{Credentials, Secret};
use coracle_types::MemoryMib;
use coracle_vm_pod::exported::ExportedSnapshots;
use coracle_vm_pod::metrics::Metrics;
use coracle_vm_pod::orphans::InvalidOrphanPolicy;
use coracle_vm_pod::saved::Registry as SavedStates;
use coracle_vm_pod::ssh::Password;
use coracle_vnode::{
    CertificateSource, InvalidPressureThresholds, InvalidTaint, StartPolicy, VirtualNode, VirtualNodeOptions,
    VmPodOptions,
};
use miette::IntoDiagnostic as _;
use prometheus_client::registry::Registry;

use super::kubeconfig;

/// Defaults of the original.
const NODE_NAME: &str = "cocoon-pool";
const REGISTRY: &str = "http://epoch.cocoon-system.svc:8080";
const LEASES: &str = "/var/lib/dnsmasq/dnsmasq.leases";
const METRICS: &str = ":9091";
const CERTIFICATE: &str = "/etc/cocoon/vk/tls/vk-kubelet.crt";
const KEY: &str = "/etc/cocoon/vk/tls/vk-kubelet.key";
const CPUS: &str = "128";
const MEMORY: &str = "512Gi";
const PODS: &str = "256";

/// Settings from the original's variables that have no flag of a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Provider {
    address: Option<IpAddr>,
    provider_id: Option<String>,
    cpus: Option<u32>,
    memory: Option<MemoryMib>,
    pods_max: Option<u32>,
    leases: Option<PathBuf>,
    ssh: Option<Password>,
    /// Program that is accepted and logged, but never run.
    ignored_program: Option<String>,
    is_original: bool,
}

impl Provider {
    /// Reads the variables if this process was started under the original's name, and sets flags from them. `get` reads a
    /// variable.
    ///
    /// # Errors
    /// A variable has a value with which the original does not start.
    pub(super) fn of(args: &mut NodeArgs, get: impl Fn(&str) -> Option<String>) -> Result<Self, Failure> {
        if !args.vk_cocoon {
            return Ok(Self::default());
        }
        let given = |name: &str| get(name).filter(|value| !value.is_empty());
        let or = |name: &str, default: &str| given(name).unwrap_or_else(|| default.to_owned());
        let invalid =
            |name: &str, value: &str, why: &str| Failure::usage(format!("invalid {name} {value:?}: {why}"));
        args.virtual_node = Some(or("VK_NODE_NAME", NODE_NAME));
        args.log = or("VK_LOG_LEVEL", "info");
        args.virtual_node_registry = Some(or("EPOCH_URL", REGISTRY));
        args.virtual_node_registry_token = given("EPOCH_TOKEN");
        args.virtual_node_orphans = or("VK_ORPHAN_POLICY", "alert");
        // The original reports no pressure.
        args.virtual_node_eviction_hard = "none".to_owned();
        args.virtual_node_pool = or("VK_NODE_POOL", keys::DEFAULT_POOL);
        args.kubeconfig = args.kubeconfig.take().or_else(|| given("KUBECONFIG").map(PathBuf::from));
        args.in_cluster = args.kubeconfig.is_none();
        let metrics = or("VK_METRICS_ADDR", METRICS);
        let full = if metrics.starts_with(':') { format!("0.0.0.0{metrics}") } else { metrics.clone() };
        let listen =
            full.parse().map_err(|_| invalid("VK_METRICS_ADDR", &metrics, "not an address with a port"))?;
        args.admin_listen.get_or_insert(listen);
        let (certificate, key) = (or("VK_TLS_CERT", CERTIFICATE), or("VK_TLS_KEY", KEY));
        if PathBuf::from(&certificate).is_file() {
            (args.tls_cert, args.tls_key) = (Some(certificate.into()), Some(key.into()));
        }
        let number = |name: &str, default: &str| {
            let value = or(name, default);
            value
                .parse::<u32>()
                .ok()
                .filter(|n| *n > 0)
                .ok_or_else(|| invalid(name, &value, "not a number above 0"))
        };
        let memory = or("VK_NODE_MEM", MEMORY);
        let mib = Amount::parse(&memory).ok().map(|amount| amount.units() >> 20);
        let mib = mib.and_then(|mib| MemoryMib::try_from(mib).ok());
        let address = given("VK_NODE_IP")
            .map(|ip| ip.parse().map_err(|_| invalid("VK_NODE_IP", &ip, "not an address")));
        Ok(Self {
            address: address.transpose()?,
            provider_id: given("VK_PROVIDER_ID"),
            cpus: Some(number("VK_NODE_CPU", CPUS)?),
            memory: Some(mib.ok_or_else(|| invalid("VK_NODE_MEM", &memory, "not a quantity of memory"))?),
            pods_max: Some(number("VK_NODE_PODS", PODS)?),
            leases: Some(or("VK_LEASES_PATH", LEASES).into()),
            ssh: given("VK_SSH_PASSWORD").map(Password::new),
            ignored_program: given("VK_COCOON_BIN"),
            is_original: true,
        })
    }
}

/// Gives the host core access to the registry of saved states, with the scheme of the URL; its token is sent only there.
pub(super) fn reach_registry(config: &mut HostConfig, args: &NodeArgs) {
    let Some(url) = &args.virtual_node_registry else { return };
    config.registries = std::mem::take(&mut config.registries).with_url(url);
    if let Some(token) = &args.virtual_node_registry_token {
        let token = Credentials::Bearer(Secret::new(token));
        config.credentials.insert(SavedStates::at(url).host().to_owned(), token);
    }
}

/// Runs a Node of the cluster whose pods are VMs of this host core.
///
/// # Errors
/// The cluster cannot be reached, or a flag has an invalid value.
pub(super) async fn run(
    tasks: &mut Tasks,
    host: &Host,
    args: &NodeArgs,
    name: &str,
    (provider, registry): (Provider, &mut Registry),
) -> miette::Result<()> {
    let connect = || kubeconfig::client(args.kubeconfig.as_deref(), args.in_cluster);
    let (Some(client), Some(lease_client)) = (connect().await?, connect().await?) else {
        return Err(Failure::usage("--virtual-node needs --kubeconfig or --in-cluster").into());
    };
    if let Some(path) = &provider.ignored_program {
        tracing::info!(path, "VK_COCOON_BIN is not run: this process has the VMs itself");
    }
    let options = options(host, args, name, provider, registry)?;
    let node = VirtualNode::new(host.clone(), client, options).with_lease_client(lease_client);
    tasks.spawn("virtual node", |stop| async move { node.run(stop).await.into_diagnostic() });
    Ok(())
}

fn options(
    host: &Host,
    args: &NodeArgs,
    name: &str,
    provider: Provider,
    registry: &mut Registry,
) -> miette::Result<VirtualNodeOptions> {
    let taints = args.virtual_node_taint.iter().filter(|text| *text != "none").map(|text| text.parse());
    let taints = taints.collect::<Result<_, InvalidTaint>>();
    let orphans = args.virtual_node_orphans.parse();
    let mut options = VirtualNodeOptions::new(name);
    options.taints = taints.map_err(|error| Failure::usage(error.to_string()))?;
    options.vms = VmPodOptions {
        registry: args.virtual_node_registry.as_deref().map(SavedStates::at),
        orphans: orphans.map_err(|error: InvalidOrphanPolicy| Failure::usage(error.to_string()))?,
        leases: provider.leases,
        exported: ExportedSnapshots::below(args.virtual_node_clone_dir.clone()),
        ssh: provider.ssh,
        metrics: Metrics::registered(registry),
    };
    (options.listen, options.address) = match args.virtual_node_address {
        None => (args.virtual_node_listen, provider.address),
        Some(NodeAddress::Ip(address)) => (args.virtual_node_listen, Some(address)),
        Some(NodeAddress::Bridge) => {
            let subnet = host.network().subnet();
            let subnet =
                subnet.ok_or_else(|| Failure::usage("--virtual-node-address bridge needs a bridge"))?;
            host.network().pin();
            let address = subnet.gateway().into();
            (SocketAddr::new(address, args.virtual_node_listen.port()), Some(address))
        }
    };
    if provider.is_original {
        options.start = StartPolicy::ExitUnlessReconciled;
    }
    options.cluster_dns.clone_from(&args.virtual_node_dns);
    options.image_policy.clone_from(&args.virtual_node_image_policy);
    (options.provider_id, options.cpus, options.memory) =
        (provider.provider_id, provider.cpus, provider.memory);
    options.pressure =
        args.virtual_node_eviction_hard.parse().map_err(|error: InvalidPressureThresholds| {
            Failure::usage(format!("--virtual-node-eviction-hard: {error}"))
        })?;
    options.pods_max = provider.pods_max.unwrap_or(options.pods_max);
    let labels = [(keys::POOL_LABEL, args.virtual_node_pool.as_str()), (keys::ROLE_LABEL, "")];
    let of_original = [("type", "virtual-kubelet"), ("kubernetes.io/role", "agent")];
    let of_original = of_original.into_iter().filter(|_| provider.is_original);
    let labels = labels.into_iter().chain(of_original);
    options.labels.extend(labels.map(|(key, value)| (key.to_owned(), value.to_owned())));
    options.certificate = match (args.tls_cert.clone(), args.tls_key.clone()) {
        (Some(certificate), Some(key)) => CertificateSource::Files { certificate, key },
        _ if provider.is_original => CertificateSource::SelfSigned,
        _ => CertificateSource::Cluster,
    };
    Ok(options)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use coracle_cli::cli::{Cli, Command};

    use super::*;

    fn args() -> NodeArgs {
        let Command::Node(args) = Cli::parse_from(["coracle", "node", "--vk-cocoon"]).command else {
            panic!("a node")
        };
        *args
    }

    #[test]
    fn vk_cocoon_applies_the_original_defaults() {
        let mut args = args();
        let provider = Provider::of(&mut args, |_| None).unwrap();
        assert_eq!(args.virtual_node.as_deref(), Some("cocoon-pool"));
        assert_eq!(args.virtual_node_registry.as_deref(), Some(REGISTRY));
        assert_eq!(args.admin_listen, Some("0.0.0.0:9091".parse().unwrap()));
        assert_eq!((args.virtual_node_orphans.as_str(), args.in_cluster), ("alert", true));
        assert_eq!((provider.cpus, provider.pods_max), (Some(128), Some(256)));
        assert_eq!(provider.memory.map(MemoryMib::get), Some(512 * 1024));
        assert_eq!(provider.leases, Some(LEASES.into()));
    }

    #[test]
    fn vk_cocoon_reads_the_original_variables() {
        let mut args = args();
        let get = |name: &str| {
            let value = match name {
                "VK_NODE_NAME" => "edge-1",
                "VK_NODE_CPU" => "4",
                "VK_NODE_IP" => "10.0.0.9",
                "VK_METRICS_ADDR" => "127.0.0.1:9",
                "VK_ORPHAN_POLICY" => "Destroy",
                "KUBECONFIG" => "/etc/cocoon/kubeconfig",
                "EPOCH_TOKEN" => "secret",
                "VK_SSH_PASSWORD" => "swordfish",
                _ => return None,
            };
            Some(value.to_owned())
        };
        let provider = Provider::of(&mut args, get).unwrap();
        assert_eq!(args.virtual_node.as_deref(), Some("edge-1"));
        assert_eq!((provider.cpus, provider.address), (Some(4), Some("10.0.0.9".parse().unwrap())));
        assert_eq!(args.kubeconfig, Some("/etc/cocoon/kubeconfig".into()));
        assert!(!args.in_cluster);
        assert_eq!(args.admin_listen, Some("127.0.0.1:9".parse().unwrap()));
        assert_eq!(args.virtual_node_registry_token.as_deref(), Some("secret"));
        assert_eq!(provider.ssh, Some(Password::new("swordfish")));
    }

    #[test]
    fn malformed_capacity_is_refused() {
        for (name, value) in [("VK_NODE_CPU", "many"), ("VK_NODE_MEM", "lots"), ("VK_NODE_PODS", "0")] {
            let get = |asked: &str| (asked == name).then(|| value.to_owned());
            let error = Provider::of(&mut args(), get).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
