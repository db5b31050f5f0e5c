//! Subnet of a node's guests, agreed with the cluster: the pod CIDR of its Node, or a /24 that no other node has.

use std::net::{SocketAddr, SocketAddrV4};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use coracle_api::keys::NODE_NAMESPACE;
use coracle_cli::cli::{NetworkMode, NodeArgs};
use coracle_host::Host;
use coracle_microvm::subnets::lease_subnet;
use coracle_net::{Assignment, Network, Sources, Subnet, Taken, choose, host_networks, kept_subnet};
use coracle_node_lease::BeforeRenewal;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Api, Client};
use miette::{IntoDiagnostic as _, miette};
use tokio::time::timeout;

use super::kubeconfig;

/// Time limit of one agreement.
const LIMIT: Duration = Duration::from_secs(10);

/// Agrees with the cluster on the subnet of guests.
pub(crate) struct GuestSubnet {
    client: Client,
    /// Name of the node's Lease. A leased subnet belongs to the node while that Lease exists.
    node: String,
    /// Name of the node's Node object.
    object: String,
    flag: Option<Subnet>,
    range: Subnet,
    /// Addresses of the API server from this node.
    api_server: Vec<SocketAddrV4>,
    /// Subnet that the cluster has recorded for this node.
    agreed: Option<Subnet>,
}

impl GuestSubnet {
    /// `None` if guests have no addresses of the node, or if there is no cluster.
    ///
    /// # Errors
    /// The kubeconfig cannot be read.
    pub(super) async fn of(args: &NodeArgs, mode: NetworkMode) -> miette::Result<Option<Self>> {
        if mode != NetworkMode::Bridge {
            return Ok(None);
        }
        let Some(config) = kubeconfig::config(args.kubeconfig.as_deref(), args.in_cluster).await? else {
            return Ok(None);
        };
        let api_server = resolve(&config.cluster_url).await;
        let client = Client::try_from(config).into_diagnostic()?;
        let node = super::node_name(args);
        Ok(Some(Self {
            client,
            object: super::node_object(args),
            node,
            flag: args.subnet,
            range: args.subnet_range,
            api_server,
            agreed: None,
        }))
    }

    /// Returns the subnet for the node before it opens its network. `None`: the cluster does not answer. Until it does, the
    /// node uses its earlier subnet, or one that is free on this host.
    pub(super) async fn initial_subnet(&self, state: &Path) -> Option<Subnet> {
        let holds = kept_subnet(state).await.ok().flatten();
        self.agree(holds)
            .await
            .inspect_err(|error| tracing::warn!(%error, "network of guests not agreed with the cluster"))
            .ok()
    }

    /// Reports the subnet of guests to the cluster whenever it changed. If the cluster wants another one, the network takes it,
    /// but not before the last VM is removed.
    async fn report_change(&mut self, network: &Arc<dyn Network>) {
        let holds = network.subnet();
        if self.agreed.is_some() && self.agreed == holds {
            return;
        }
        let wanted = match self.agree(holds).await {
            Ok(wanted) => wanted,
            Err(error) => return tracing::warn!(%error, "network of guests not agreed with the cluster"),
        };
        match network.assign(wanted).await {
            Ok(Assignment::Current | Assignment::Fixed) => {}
            Ok(Assignment::Pending) => {
                tracing::warn!(%wanted, "network of guests is taken when the last VM is removed");
            }
            Err(error) => return tracing::error!(%wanted, %error, "take the network of guests failed"),
        }
        self.agreed = network.subnet();
    }

    /// Returns the addresses of the cluster's API server: those that this node uses, and those behind its Service.
    pub(super) async fn api_server(&self) -> Vec<SocketAddrV4> {
        let mut addresses = self.api_server.clone();
        let slices: Api<EndpointSlice> = Api::namespaced(self.client.clone(), "default");
        let slice = match timeout(LIMIT, slices.get_opt("kubernetes")).await {
            Ok(Ok(slice)) => slice,
            Ok(Err(error)) => {
                tracing::warn!(%error, "read the addresses of the API server failed");
                None
            }
            Err(_) => None,
        };
        let ports = slice.iter().flat_map(|slice| slice.ports.iter().flatten()).filter_map(|port| port.port);
        let ports: Vec<_> = ports.filter_map(|port| u16::try_from(port).ok()).collect();
        let endpoints = slice.iter().flat_map(|slice| slice.endpoints.iter().flatten());
        for address in endpoints.flat_map(|at| &at.addresses) {
            let Ok(address) = address.parse() else { continue };
            addresses.extend(ports.iter().map(|port| SocketAddrV4::new(address, *port)));
        }
        addresses.sort_unstable();
        addresses.dedup();
        addresses
    }

    async fn agree(&self, holds: Option<Subnet>) -> miette::Result<Subnet> {
        let agreement = async {
            let by_host = host_networks().await.into_diagnostic()?;
            let sources = Sources {
                flag: self.flag,
                cluster: self.pod_cidr().await,
                kept: holds,
                range: Some(self.range),
            };
            let choose = |others: &[ipnet::Ipv4Net]| {
                let by_nodes = others.iter().map(|net| Subnet::from(*net)).collect();
                choose(&sources, &Taken { by_nodes, by_host: by_host.clone() }).map(ipnet::Ipv4Net::from)
            };
            let holds = holds.map(ipnet::Ipv4Net::from);
            let leased = lease_subnet(&self.client, NODE_NAMESPACE, &self.node, holds, choose).await;
            leased.map(Subnet::from).into_diagnostic()
        };
        timeout(LIMIT, agreement).await.map_err(|_| miette!("the API server does not answer"))?
    }

    /// Returns the IPv4 network that the cluster assigned to the node's Node. `None` if the Node does not exist, or this node
    /// may not read it.
    async fn pod_cidr(&self) -> Option<Subnet> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let node = nodes.get_opt(&self.object).await;
        let spec = node.inspect_err(|error| tracing::debug!(%error, "read the Node failed")).ok()??.spec?;
        let assigned = spec.pod_cidrs.unwrap_or_default().into_iter().chain(spec.pod_cidr);
        assigned.into_iter().find_map(|cidr| cidr.parse().ok())
    }
}

impl BeforeRenewal for GuestSubnet {
    async fn prepare(&mut self, host: &Host) {
        self.report_change(host.network()).await;
    }
}

/// Returns the IPv4 addresses of a URL, without loopback addresses of the node, which guests cannot reach.
async fn resolve(url: &http::Uri) -> Vec<SocketAddrV4> {
    let port = url.port_u16().unwrap_or(443);
    let Some(host) = url.host() else { return vec![] };
    let found = timeout(LIMIT, tokio::net::lookup_host((host, port))).await;
    let found = found.into_iter().flatten().flatten();
    let v4 = found.filter_map(|at| if let SocketAddr::V4(at) = at { Some(at) } else { None });
    v4.filter(|at| !at.ip().is_loopback()).collect()
}
