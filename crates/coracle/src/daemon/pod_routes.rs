//! Routes to the Pod subnets of other nodes, derived from the Nodes of the cluster.

use std::net::Ipv4Addr;
use std::pin::pin;
use std::time::Duration;

use coracle_cli::cli::RoutesArgs;
use coracle_cli::error::Failure;
use coracle_cli::tasks::Tasks;
use coracle_net::{PodRoute, PodRoutes, Subnet};
use coracle_reconcile::{watch, watch_config};
use coracle_telemetry::{LogFormat, init_logs};
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher::Event;
use kube::{Api, Client, ResourceExt as _};
use miette::IntoDiagnostic as _;
use tokio::time::interval;
use tokio_util::sync::CancellationToken;

use super::kubeconfig;

/// Interval of checks of the host's routes, which other programs may remove.
const RESYNC: Duration = Duration::from_secs(60);
/// Time limit for the change of a route when the daemon stops.
const GRACE: Duration = Duration::from_secs(5);

/// Maintains the Pod routes of this host.
pub(crate) struct PodRouter {
    pub(crate) client: Client,
    /// Name of the Node of this host.
    pub(crate) node: String,
    /// Networks that contain the Pod subnets.
    pub(crate) networks: Vec<Subnet>,
}

impl PodRouter {
    /// Maintains the routes until `stop`. Afterwards they stay, because Pods do.
    ///
    /// # Errors
    /// Netlink is unusable.
    pub(crate) async fn maintain(self, stop: CancellationToken) -> miette::Result<()> {
        let routes = PodRoutes::open().into_diagnostic()?;
        let mut writer = Writer::<Node>::default();
        let nodes = writer.as_reader();
        let mut events = pin!(watch(Api::<Node>::all(self.client.clone()), watch_config()));
        let (mut resync, mut listed, mut last) = (interval(RESYNC), false, None);
        loop {
            let is_due = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                _ = resync.tick() => true,
                event = events.next() => {
                    let Some(event) = event else { return Ok(()) };
                    writer.apply_watcher_event(&event);
                    let is_whole = matches!(event, Event::InitDone);
                    listed |= is_whole;
                    is_whole
                }
            };
            // An incomplete list would remove routes.
            if !listed {
                continue;
            }
            let wanted = wanted_routes(&nodes.state(), &self.node, &self.networks);
            if is_due || last.as_ref() != Some(&wanted) {
                let done = routes.reconcile(&wanted).await;
                last = Some(wanted).filter(|_| done.is_ok());
                match done {
                    Ok(changes) if changes.is_empty() => {}
                    Ok(changes) => tracing::info!(?changes, "routes to Pods of other nodes changed"),
                    Err(error) => tracing::warn!(%error, "routes to Pods of other nodes are not complete"),
                }
            }
        }
    }
}

/// Returns a route for each Pod subnet of each other node. Subnets outside of the Pod networks are ignored. Pure.
fn wanted_routes(nodes: &[impl AsRef<Node>], own: &str, networks: &[Subnet]) -> Vec<PodRoute> {
    let is_pods = |subnet: &Subnet| {
        networks.iter().any(|net| net.prefix() <= subnet.prefix() && net.contains(subnet.network()))
    };
    let mut routes: Vec<PodRoute> = Vec::new();
    for node in nodes.iter().map(AsRef::as_ref).filter(|node| node.name_any() != own) {
        let Some(gateway) = address(node) else { continue };
        let spec = node.spec.clone().unwrap_or_default();
        let cidrs = spec.pod_cidrs.unwrap_or_default().into_iter().chain(spec.pod_cidr);
        for destination in cidrs.filter_map(|cidr| cidr.parse().ok()).filter(is_pods) {
            if !routes.iter().any(|route| route.destination == destination) {
                routes.push(PodRoute { destination, gateway });
            }
        }
    }
    routes.sort_by_key(|route| route.destination.network());
    routes
}

/// Returns the address by which other nodes reach a node.
fn address(node: &Node) -> Option<Ipv4Addr> {
    let addresses = node.status.as_ref()?.addresses.iter().flatten();
    addresses.filter(|at| at.type_ == "InternalIP").find_map(|at| at.address.parse().ok())
}

/// `coracle routes`: only maintains the routes, for a node without VMs.
pub(crate) async fn run(args: RoutesArgs) -> miette::Result<()> {
    init_logs(&args.log, LogFormat::Auto);
    let client = kubeconfig::client(args.kubeconfig.as_deref(), args.in_cluster).await?;
    let client = client.ok_or_else(|| Failure::usage("name a cluster: --kubeconfig FILE or --in-cluster"))?;
    let node = args.node_name.unwrap_or_else(super::hostname);
    let router = PodRouter { client, node, networks: args.pod_network };
    let mut tasks = Tasks::new();
    tasks.spawn("routes", |stop| router.maintain(stop));
    super::run(tasks, GRACE).await
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;

    fn node(name: &str, address: &str, cidrs: &[&str]) -> Arc<Node> {
        let object = json!({
            "metadata": {"name": name},
            "spec": {"podCIDR": cidrs.first(), "podCIDRs": cidrs},
            "status": {"addresses": [
                {"type": "Hostname", "address": name},
                {"type": "InternalIP", "address": "fd00::1"},
                {"type": "InternalIP", "address": address},
            ]},
        });
        Arc::new(serde_json::from_value(object).unwrap())
    }

    #[test]
    fn pod_subnets_of_other_nodes_get_routes() {
        let networks = ["10.244.0.0/16".parse().unwrap()];
        let nodes = [
            node("mac", "192.0.2.7", &["10.244.7.0/24"]),
            node("linux", "192.0.2.2", &["10.244.2.0/24", "fd00:2::/64"]),
            node("greedy", "192.0.2.3", &["10.0.0.0/8"]),
            node("twin", "192.0.2.4", &["10.244.2.0/24"]),
            node("new", "192.0.2.5", &[]),
            node("elsewhere", "unknown", &["10.244.9.0/24"]),
        ];
        let shown = |own| {
            let routes = wanted_routes(&nodes, own, &networks).into_iter();
            routes.map(|route| format!("{} {}", route.destination, route.gateway)).collect::<Vec<_>>()
        };
        assert_eq!(shown("mac"), ["10.244.2.0/24 192.0.2.2"]);
        assert_eq!(shown("linux"), ["10.244.2.0/24 192.0.2.4", "10.244.7.0/24 192.0.2.7"]);
        assert!(wanted_routes(&nodes, "mac", &[]).is_empty());
    }
}
