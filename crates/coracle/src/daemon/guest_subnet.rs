//! The network of a node's guests, agreed with the cluster: the pod CIDR of its Node, or a /24 that no other node has.

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

/// Limit of one agreement.
const LIMIT: Duration = Duration::from_secs(10);

/// Agrees with the cluster on the network of guests.
pub(crate) struct GuestSubnet {
    client: Client,
    /// Name of its Lease: what it has leased is its own while that is there.
    node: String,
    /// Name of its Node object.
    object: String,
    flag: Option<Subnet>,
    range: Subnet,
    /// As this node reaches it.
    api_server: Vec<SocketAddrV4>,
    /// What the cluster knows that the node's guests have.
    agreed: Option<Subnet>,
}

impl GuestSubnet {
    /// `None` where guests have no addresses of the node's, or there is no cluster.
    ///
    /// # Errors
    /// When the kubeconfig cannot be read.
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

    /// What the node shall have, before it opens its network. `None`: the cluster does not answer, and the node takes what it
    /// had, or one that is free on this host, until it does.
    pub(super) async fn before_start(&self, state: &Path) -> Option<Subnet> {
        let holds = kept_subnet(state).await.ok().flatten();
        self.agree(holds)
            .await
            .inspect_err(|error| tracing::warn!(%error, "network of guests not agreed with the cluster"))
            .ok()
    }

    /// Tells the cluster what the guests have, whenever it is another network, and moves them where they shall be.
    async fn keep(&mut self, network: &Arc<dyn Network>) {
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

    /// Where the cluster's API server answers: as this node reaches it, and the addresses behind its Service.
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

    /// The IPv4 network that the cluster assigned to the Node of this name. One that it does not have, or that this node may
    /// not read, has none.
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
        self.keep(host.network()).await;
    }
}

/// The IPv4 addresses of a URL; none of the node's loopback, which guests never reach.
async fn resolve(url: &http::Uri) -> Vec<SocketAddrV4> {
    let port = url.port_u16().unwrap_or(443);
    let Some(host) = url.host() else { return vec![] };
    let found = timeout(LIMIT, tokio::net::lookup_host((host, port))).await;
    let found = found.into_iter().flatten().flatten();
    let v4 = found.filter_map(|at| if let SocketAddr::V4(at) = at { Some(at) } else { None });
    v4.filter(|at| !at.ip().is_loopback()).collect()
}
