//! A supplier of capacity that registers Nodes and runs nothing: what a host does, as far as a cluster can see it.

use std::{sync::Arc, time::Duration};

use coracle_api::bidnode::names;
use coracle_proto::market::{
    HeartbeatRequest, Order, PutLotRequest, ReportOrderRequest, StreamOrdersRequest,
    supply_client::SupplyClient,
};
use coracle_reconcile::{Clock, WallTime as _};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::task::JoinSet;
use tonic::{Request, transport::Channel};

/// Units of a market that it offers.
#[derive(Clone, Debug)]
pub(crate) struct Lot {
    pub(crate) market: String,
    pub(crate) units: u32,
}

/// Where it registers what, and where it hears of it.
#[derive(Clone)]
pub(crate) struct Supplier {
    pub(crate) client: Client,
    pub(crate) channel: Channel,
    pub(crate) token: String,
}

impl Supplier {
    fn with<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.metadata_mut().insert("authorization", format!("Bearer {}", self.token).parse().unwrap());
        request
    }

    /// Offers a lot, or another size of it.
    pub(crate) async fn offer(&self, lot: &Lot) {
        let put = PutLotRequest {
            lot: lot.market.replace('/', "-"),
            market: lot.market.clone(),
            units: lot.units,
            notice_ms: 10_000,
        };
        SupplyClient::new(self.channel.clone()).put_lot(self.with(put)).await.unwrap();
    }

    /// Obeys orders until it is dropped. Ends when the market does.
    pub(crate) async fn serve(self: Arc<Self>) {
        let mut supply = SupplyClient::new(self.channel.clone());
        let Ok(orders) = supply.stream_orders(self.with(StreamOrdersRequest {})).await else { return };
        let mut orders = orders.into_inner();
        let mut launches = JoinSet::new();
        let mut beat = tokio::time::interval(Duration::from_secs(5));
        loop {
            tokio::select! {
                order = orders.message() => match order {
                    Ok(Some(order)) if order.kind == "launch" => {
                        let own = self.clone();
                        launches.spawn(async move { own.launch(order).await });
                    }
                    Ok(Some(_)) => {}
                    _ => return,
                },
                _ = beat.tick() => {
                    let _ = supply.heartbeat(self.with(HeartbeatRequest {})).await;
                }
                Some(_) = launches.join_next() => {}
            }
        }
    }

    async fn report(&self, order: &Order, report: &str, node: &str) {
        let report = ReportOrderRequest {
            allocation: order.allocation.clone(),
            report: report.into(),
            node: node.into(),
        };
        // The unit may be over already.
        let _ = SupplyClient::new(self.channel.clone()).report_order(self.with(report)).await;
    }

    /// What a virtual node does: it registers, is tainted until its owner has looked at it, and is Ready.
    async fn launch(&self, order: Order) {
        self.report(&order, "launched", "").await;
        let label = |key: &str| order.labels.get(key).cloned().unwrap_or_default();
        let (_, region) = order.market.split_once('/').unwrap_or_default();
        let owner = (&*label(names::BIDNODE), &*label(names::NAMESPACE));
        let Ok(name) = register(&self.client, owner, region, &order.allocation).await else {
            return self.report(&order, "failed", "").await;
        };
        self.report(&order, "registered", &name).await;
        set_ready(&self.client, &name, true).await;
        self.report(&order, "ready", "").await;
    }
}

/// Creates the Node of an allocation, of the BidNode with that name and namespace. Returns the Node's name.
pub(crate) async fn register(
    client: &Client,
    (bidnode, namespace): (&str, &str),
    region: &str,
    allocation: &str,
) -> kube::Result<String> {
    let name = names::node_name(bidnode, allocation);
    let node = serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {
            names::BIDNODE: bidnode, names::NAMESPACE: namespace, names::ALLOCATION: allocation,
        }},
        "spec": {
            "providerID": format!("coracle://{region}/{allocation}"),
            "taints": [{"key": names::UNINITIALIZED, "effect": "NoSchedule"}],
        },
    }));
    let nodes: Api<Node> = Api::all(client.clone());
    match nodes.create(&PostParams::default(), &node.unwrap()).await {
        Ok(_) => Ok(name),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(name),
        Err(error) => Err(error),
    }
}

/// A Node's kubelet says so.
pub(crate) async fn set_ready(client: &Client, name: &str, ready: bool) {
    set_ready_at(client, name, ready, Clock::system().timestamp()).await;
}

/// A Node's kubelet says so at that time.
pub(crate) async fn set_ready_at(client: &Client, name: &str, ready: bool, now: jiff::Timestamp) {
    let amounts = json!({"cpu": "48", "memory": "512Gi", "nvidia.com/gpu": "4", "pods": "110"});
    let patch = json!({"status": {
        "capacity": amounts, "allocatable": amounts,
        "conditions": [{
            "type": "Ready", "status": if ready { "True" } else { "False" }, "reason": "Test", "message": "",
            "lastTransitionTime": now, "lastHeartbeatTime": now,
        }],
    }});
    let nodes: Api<Node> = Api::all(client.clone());
    let _ = nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(&patch)).await;
}
