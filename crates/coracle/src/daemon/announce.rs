//! A node tells the cluster that it lives and what it has: a Lease in
//! `coracle-nodes`, renewed every third of its duration.

use std::path::Path;
use std::time::Duration;

use coracle_api::keys::{NODE_NAMESPACE, node as keys};
use coracle_host::Host;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt as _};
use miette::{IntoDiagnostic, WrapErr};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::guest_subnet::GuestSubnet;

/// How long the node counts as alive after its last word.
const LEASE: Duration = Duration::from_secs(40);

/// Between two renewals.
const RENEW: Duration = Duration::from_secs(10);

/// How long a node that stops waits for the API server.
const WITHDRAW: Duration = Duration::from_secs(2);

/// Where the cluster reaches a node: `host:port` of each frontend that listens.
pub(crate) struct Endpoints {
    pub(crate) agent: String,
    pub(crate) host: Option<String>,
    /// The name in the certificate; `None`: the host of the address.
    pub(crate) server_name: Option<String>,
}

/// A client for a cluster; `None` when none is named.
pub(crate) async fn client(kubeconfig: Option<&Path>, in_cluster: bool) -> miette::Result<Option<Client>> {
    config(kubeconfig, in_cluster).await?.map(Client::try_from).transpose().into_diagnostic()
}

/// How a cluster is reached; `None` when none is named.
pub(crate) async fn config(kubeconfig: Option<&Path>, in_cluster: bool) -> miette::Result<Option<Config>> {
    match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).into_diagnostic().wrap_err("read the kubeconfig")?;
            let options = KubeConfigOptions::default();
            Config::from_custom_kubeconfig(file, &options).await.map(Some).into_diagnostic()
        }
        None if in_cluster => Config::incluster().map(Some).into_diagnostic(),
        None => Ok(None),
    }
}

/// Renews the Lease until `stop`, also after the API server was away.
pub(crate) async fn run(
    client: Client,
    (node, endpoints): (String, Endpoints),
    host: Host,
    mut guests: Option<GuestSubnet>,
    stop: CancellationToken,
) -> miette::Result<()> {
    let leases: Api<Lease> = Api::namespaced(client, NODE_NAMESPACE);
    let params = PatchParams::apply("coracle-node").force();
    let mut announced = None;
    loop {
        if let Some(guests) = &mut guests {
            guests.keep(host.network()).await;
        }
        let lease = lease(&node, &endpoints, &host);
        let renewed = leases.patch(&node, &params, &Patch::Apply(&lease)).await;
        match &renewed {
            Ok(_) if announced.is_none() => {
                tracing::info!(node, agent = endpoints.agent, host = endpoints.host, "node announced");
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(node, %error, "node not announced"),
        }
        announced = renewed.ok().and_then(|lease| lease.resource_version()).or(announced);
        let pause = if announced.is_some() { RENEW } else { Duration::from_secs(1) };
        if stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
            break;
        }
    }
    if let Some(version) = announced {
        withdraw(&leases, &node, version).await;
    }
    Ok(())
}

/// A node that stops takes its Lease with it, so that nothing is placed on it. A process that has renewed the Lease
/// since keeps it.
async fn withdraw(leases: &Api<Lease>, node: &str, version: String) {
    let unchanged = Preconditions { resource_version: Some(version), uid: None };
    let params = DeleteParams { preconditions: Some(unchanged), ..DeleteParams::default() };
    match tokio::time::timeout(WITHDRAW, leases.delete(node, &params)).await {
        Ok(Ok(_)) => tracing::info!(node, "node withdrawn"),
        Ok(Err(error)) => tracing::warn!(node, %error, "node not withdrawn"),
        Err(_) => tracing::warn!(node, "node not withdrawn: the API server does not answer"),
    }
}

fn lease(node: &str, endpoints: &Endpoints, host: &Host) -> serde_json::Value {
    let capacity = host.capacity();
    let now = jiff::Timestamp::from_millisecond(host.clock().now().0).unwrap_or_default();
    let first = host.probes().first();
    let accelerator =
        first.and_then(|(_, probe)| probe.accelerator).map_or("", coracle_hypervisor::Accelerator::as_str);
    let mut lease = json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": node,
            "labels": {
                keys::AGENT_LABEL: "true",
                "app.kubernetes.io/name": "coracle",
                "app.kubernetes.io/component": "node",
            },
            "annotations": {
                keys::NODE: node,
                keys::AGENT_ADDRESS: endpoints.agent,
                keys::CAPACITY_VCPUS: capacity.cpus.to_string(),
                keys::CAPACITY_MEMORY_MIB: capacity.memory_allowed_mib.to_string(),
                keys::DRIVER: first.map(|(name, _)| *name),
                keys::ACCELERATOR: accelerator,
            },
        },
        "spec": {
            "holderIdentity": node,
            "leaseDurationSeconds": LEASE.as_secs(),
            "renewTime": format!("{now:.6}"),
        },
    });
    if let Some(subnet) = host.network().subnet() {
        lease["metadata"]["annotations"][keys::GUEST_SUBNET] = subnet.to_string().into();
    }
    if let Some(address) = &endpoints.host {
        lease["metadata"]["annotations"][keys::HOST_ADDRESS] = address.as_str().into();
    }
    if let Some(name) = &endpoints.server_name {
        lease["metadata"]["annotations"][keys::TLS_SERVER_NAME] = name.as_str().into();
    }
    lease
}
