//! Supplier of capacity that registers Nodes without machines: what a cluster sees of a host.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use coracle_api::bidnode::names;
use coracle_proto::market::{
    DesiredAllocation, MachineState, ObservedAllocation, PutLotRequest, ReportObservedRequest,
    StreamDesiredRequest, desired_frame::Frame, supply_client::SupplyClient,
};
use coracle_reconcile::{Clock, WallTime as _};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::{sync::Notify, task::JoinSet};
use tonic::{Request, transport::Channel};

/// Units that the supplier offers in a market.
#[derive(Clone, Debug)]
pub(crate) struct Lot {
    pub(crate) market: String,
    pub(crate) units: u32,
}

/// Known epochs of the desired set, and machines.
#[derive(Debug, Default)]
pub(crate) struct Machines {
    epochs: BTreeMap<String, u64>,
    machines: BTreeMap<String, ObservedAllocation>,
}

/// Supplier with its connections to cluster and market.
#[derive(Clone)]
pub(crate) struct Supplier {
    pub(crate) client: Client,
    pub(crate) channel: Channel,
    pub(crate) token: String,
    pub(crate) known: Arc<Mutex<Machines>>,
    pub(crate) changed: Arc<Notify>,
}

impl Supplier {
    pub(crate) fn new(client: Client, channel: Channel, token: String) -> Self {
        Self { client, channel, token, known: Arc::default(), changed: Arc::default() }
    }

    fn with<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.metadata_mut().insert("authorization", format!("Bearer {}", self.token).parse().unwrap());
        request
    }

    /// Offers a lot, or changes its size.
    pub(crate) async fn offer(&self, lot: &Lot) {
        let put = PutLotRequest {
            lot: lot.market.replace('/', "-"),
            market: lot.market.clone(),
            units: lot.units,
            notice_ms: 10_000,
        };
        SupplyClient::new(self.channel.clone()).put_lot(self.with(put)).await.unwrap();
    }

    /// Starts desired machines until dropped. Returns when the market ends.
    pub(crate) async fn serve(self: Arc<Self>) {
        let mut supply = SupplyClient::new(self.channel.clone());
        let Ok(frames) = supply.stream_desired(self.with(StreamDesiredRequest {})).await else { return };
        let mut frames = frames.into_inner();
        let mut launches = JoinSet::new();
        let mut beat = tokio::time::interval(Duration::from_secs(5));
        let mut set = Vec::new();
        loop {
            tokio::select! {
                frame = frames.message() => match frame {
                    Ok(Some(frame)) => self.take(frame.frame, &mut set, &mut launches),
                    _ => return,
                },
                () = self.changed.notified() => self.report(&mut supply).await,
                _ = beat.tick() => self.report(&mut supply).await,
                Some(_) = launches.join_next() => {}
            }
        }
    }

    fn take(&self, frame: Option<Frame>, set: &mut Vec<String>, launches: &mut JoinSet<()>) {
        let mut known = self.known.lock().unwrap();
        match frame {
            Some(Frame::Begin(_)) => set.clear(),
            Some(Frame::Desired(one)) => {
                set.push(one.allocation.clone());
                if one.epoch > 0 {
                    known.epochs.insert(one.market.clone(), one.epoch);
                }
                if !known.machines.contains_key(&one.allocation) {
                    let machine = ObservedAllocation {
                        market: one.market.clone(),
                        lot: one.lot.clone(),
                        slot: one.slot,
                        allocation: one.allocation.clone(),
                        state: MachineState::Starting.into(),
                        ..ObservedAllocation::default()
                    };
                    known.machines.insert(one.allocation.clone(), machine);
                    launches.spawn(self.clone().launch(one));
                }
            }
            Some(Frame::Removed(one)) => {
                known.epochs.insert(one.market, one.epoch);
                known.machines.remove(&one.allocation);
            }
            Some(Frame::End(end)) => {
                known.epochs.extend(end.epochs);
                known.machines.retain(|allocation, _| set.contains(allocation));
            }
            None => {}
        }
        drop(known);
        self.changed.notify_one();
    }

    async fn report(&self, supply: &mut SupplyClient<Channel>) {
        let report = {
            let known = self.known.lock().unwrap();
            let allocations = known.machines.values().cloned().collect();
            ReportObservedRequest { epochs: known.epochs.clone(), allocations }
        };
        // The next report contains everything again.
        let _ = supply.report_observed(self.with(report)).await;
    }

    fn set(&self, allocation: &str, state: MachineState, node: &str) {
        if let Some(machine) = self.known.lock().unwrap().machines.get_mut(allocation) {
            machine.state = state.into();
            machine.node = node.into();
        }
        self.changed.notify_one();
    }

    /// Acts as a virtual node: registers, is tainted until its owner has initialised it, and is Ready.
    async fn launch(self, one: DesiredAllocation) {
        let label = |key: &str| one.labels.get(key).cloned().unwrap_or_default();
        let (_, region) = one.market.split_once('/').unwrap_or_default();
        let owner = (&*label(names::BIDNODE), &*label(names::NAMESPACE));
        let Ok(name) = register(&self.client, owner, region, &one.allocation).await else {
            return self.set(&one.allocation, MachineState::Failed, "");
        };
        self.set(&one.allocation, MachineState::Registered, &name);
        set_ready(&self.client, &name, true).await;
        self.set(&one.allocation, MachineState::Ready, &name);
    }
}

/// Creates the Node of an allocation for a BidNode, given by name and namespace. Returns the Node's name.
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

/// Sets the condition Ready of a Node, as its kubelet would.
pub(crate) async fn set_ready(client: &Client, name: &str, ready: bool) {
    set_ready_at(client, name, ready, Clock::system().timestamp()).await;
}

/// Sets the condition Ready of a Node at a given time, as its kubelet would.
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
