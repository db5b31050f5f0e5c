//! Execution of steps, in order. Every step is idempotent.

mod drains;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use coracle_api::bidnode::{BidNode, names};
use coracle_auction::Price;
use coracle_proto::market as pb;
use coracle_reconcile::{add_finalizer, remove_finalizer};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, EvictParams, ListParams, Patch, PatchParams, Preconditions},
};
use serde_json::json;

use crate::{
    Context, Error,
    error::api,
    events::ObjectEvent,
    ids::{AllocationName, BidName, MarketName},
    market::MarketError,
    observe::bids::Owner,
    plan::{Group, NODE_FINALIZER, NodeChange, Release, Step},
    status::MarketReply,
};

pub(crate) use drains::Drains;

/// Result of an execution.
#[derive(Debug, Default)]
pub(crate) struct Done {
    pub(crate) outcome: MarketReply,
    /// The object is gone or its finalizer is removed, so there is no status to write.
    pub(crate) gone: bool,
    /// The market or the cluster changed meanwhile: reconcile again soon.
    pub(crate) stale: bool,
}

/// State of one execution.
struct Executor<'a> {
    cx: &'a Context,
    object: &'a BidNode,
    uid: String,
    tenant: String,
    /// Owner version in each market for the next command.
    versions: BTreeMap<MarketName, u64>,
    done: Done,
}

/// Executes the steps. The first failure of a group ends that group. Returns the first failure of all groups.
pub(crate) async fn execute(
    cx: &Context,
    object: &BidNode,
    owner: &Owner,
    steps: &[Step],
) -> (Done, Result<(), Error>) {
    let namespace = object.namespace().unwrap_or_default();
    let mut executor = Executor {
        cx,
        object,
        uid: object.uid().unwrap_or_default(),
        tenant: cx.market.tenant(&namespace),
        versions: owner.versions.clone(),
        done: Done::default(),
    };
    let mut ended: BTreeSet<Group> = BTreeSet::new();
    let mut first = None;
    for step in steps {
        let group = step.group();
        // After a refused version the mirror is out of date, so the market would refuse the following steps as well.
        if ended.contains(&group) || executor.done.stale && step.is_versioned() {
            continue;
        }
        if let Err(error) = executor.step(step).await {
            if group == Group::Object {
                ended.insert(Group::Trade);
            }
            ended.insert(group);
            first = first.or(executor.record_error(error));
        }
        if executor.done.gone {
            break;
        }
    }
    (executor.done, first.map_or(Ok(()), Err))
}

impl Executor<'_> {
    /// Decides whether an error is a failure. A refusal because of a concurrent change is not; any other refusal is reported
    /// and retried.
    fn record_error(&mut self, error: Error) -> Option<Error> {
        match &error {
            Error::Market(refusal) if refusal.is_stale() || refusal.is_over() => {
                self.done.stale = true;
                return None;
            }
            Error::Market(refusal @ MarketError::Call { source, .. }) => {
                self.done.outcome.refused = Some((refusal.code(), source.message().to_owned()));
            }
            _ => {}
        }
        Some(error)
    }

    async fn step(&mut self, step: &Step) -> Result<(), Error> {
        match step {
            Step::AddFinalizer => self.add_finalizer().await,
            Step::PlaceBid { market, limit, quantity, min_fill } => {
                self.place(market, *limit, *quantity, *min_fill).await
            }
            Step::AmendBid { bid, market, limit, units } => self.amend(bid, market, *limit, *units).await,
            Step::CancelBid { bid, market } => self.cancel(bid, market).await,
            Step::ReleaseAllocation(release) => self.release(release).await,
            Step::SubstituteVictim { victim, other } => {
                self.substitute(victim, other).await;
                Ok(())
            }
            Step::PatchNode(change) | Step::DrainNode(change) => self.patch_node(change).await.map(drop),
            Step::NotifyPreemption { change, note } => {
                if self.patch_node(change).await? {
                    self.emit("NodePreempted", note.clone(), true);
                }
                Ok(())
            }
            Step::EvictPod { namespace, name, uid, .. } => self.evict(namespace, name, uid).await,
            Step::DeletePod { namespace, name, uid, grace_s, allocation, .. } => {
                if self.delete_pod(namespace, name, uid, *grace_s).await? {
                    self.cx.drains.mark_forced(allocation);
                }
                Ok(())
            }
            Step::DeleteNode { name, allocation, draining_ms } => {
                self.delete_node(name, allocation, *draining_ms).await
            }
            Step::RemoveFinalizer { confirm } => self.remove_finalizer(*confirm).await,
        }
    }

    fn bidnodes(&self) -> Api<BidNode> {
        Api::namespaced(self.cx.client.clone(), &self.object.namespace().unwrap_or_default())
    }

    async fn add_finalizer(&mut self) -> Result<(), Error> {
        let added = add_finalizer(&self.bidnodes(), self.object, names::FINALIZER, names::MANAGER).await?;
        self.done.gone = added.is_none();
        Ok(())
    }

    fn version(&self, market: &MarketName) -> u64 {
        self.versions.get(market).copied().unwrap_or(0)
    }

    /// Stores the owner version of a reply. `at_ms` is zero unless a bid was placed or amended.
    fn record_reply(
        &mut self,
        market: &MarketName,
        reply: &pb::BidReply,
        at_ms: i64,
        amended: Option<&BidName>,
    ) {
        self.versions.insert(market.clone(), reply.owner_version);
        self.cx.mirror.record_reply(&self.uid, market, reply.owner_version, at_ms, amended);
        if at_ms > 0 {
            self.done.outcome.accepted = true;
            self.done.outcome.at_ms = at_ms;
        }
    }

    async fn place(
        &mut self,
        market: &MarketName,
        limit: Price,
        quantity: u32,
        min_fill: u32,
    ) -> Result<(), Error> {
        let version = self.version(market);
        let labels = [
            (names::BIDNODE, self.object.name_any()),
            (names::NAMESPACE, self.object.namespace().unwrap_or_default()),
        ];
        let request = pb::PlaceBidRequest {
            market: market.to_string(),
            limit_micros: limit.as_micros(),
            quantity,
            min_fill,
            owner_uid: self.uid.clone(),
            if_owner_version: Some(version),
            idempotency_key: format!("{}/{version}", self.uid),
            labels: labels.into_iter().map(|(k, v)| (k.to_owned(), v)).collect(),
            tenant: self.tenant.clone(),
            ..pb::PlaceBidRequest::default()
        };
        let reply = self.cx.market.place(request).await?;
        self.record_reply(market, &reply, reply.at_ms, None);
        self.emit("BidPlaced", format!("bid {} for {quantity} nodes at {limit}", reply.bid), false);
        Ok(())
    }

    async fn amend(
        &mut self,
        bid: &BidName,
        market: &MarketName,
        limit: Option<Price>,
        quantity: Option<u32>,
    ) -> Result<(), Error> {
        let request = pb::AmendBidRequest {
            bid: bid.to_string(),
            limit_micros: limit.map(Price::as_micros),
            quantity,
            if_owner_version: Some(self.version(market)),
            tenant: self.tenant.clone(),
        };
        let reply = self.cx.market.amend(market, request).await?;
        self.record_reply(market, &reply, reply.at_ms, Some(bid));
        if let Some(limit) = limit {
            self.emit("BidRepriced", format!("bid {bid} is now at {limit}"), false);
        }
        Ok(())
    }

    async fn cancel(&mut self, bid: &BidName, market: &MarketName) -> Result<(), Error> {
        let request = pb::CancelBidRequest {
            bid: bid.to_string(),
            if_owner_version: Some(self.version(market)),
            tenant: self.tenant.clone(),
        };
        let reply = self.cx.market.cancel(market, request).await?;
        self.record_reply(market, &reply, 0, None);
        Ok(())
    }

    async fn release(&mut self, release: &Release) -> Result<(), Error> {
        let Release { allocation, market, note, failed, draining_ms, .. } = release;
        let request = pb::ReleaseAllocationRequest {
            allocation: allocation.to_string(),
            if_owner_version: Some(self.version(market)),
            tenant: self.tenant.clone(),
            reason: if *failed { pb::ReleaseReason::NodeFailed } else { pb::ReleaseReason::Unspecified }
                .into(),
        };
        let reply = self.cx.market.release(market, request).await?;
        self.record_reply(market, &reply, 0, None);
        if let Some(began_ms) = draining_ms
            && let Some(forced) = self.cx.drains.complete_drain(allocation)
        {
            self.cx.config.bid_metrics.observe_drain(forced, self.since(*began_ms));
        }
        let reason = if *failed { "NodeFailed" } else { "Released" };
        self.emit(reason, note.clone(), *failed);
        Ok(())
    }

    /// Substitutes the victim of a preemption. A refusal is not an error: if it is too late, or the lots differ, the victim
    /// ends as announced.
    async fn substitute(&self, victim: &AllocationName, other: &AllocationName) {
        let request = pb::SubstituteVictimRequest {
            preempting: victim.to_string(),
            other: other.to_string(),
            tenant: self.tenant.clone(),
        };
        if let Err(error) = self.cx.market.substitute("*", request).await {
            tracing::debug!(error = &error as &dyn std::error::Error, "substitute victim refused");
        }
    }

    fn since(&self, ms: i64) -> Duration {
        Duration::from_millis(u64::try_from(self.cx.now_ms() - ms).unwrap_or(0))
    }

    /// Patches a Node. Returns true if the patch was written. A Node that has changed meanwhile is planned again.
    async fn patch_node(&mut self, change: &NodeChange) -> Result<bool, Error> {
        let nodes: Api<Node> = Api::all(self.cx.client.clone());
        let params = PatchParams { field_manager: Some(names::MANAGER.into()), ..PatchParams::default() };
        match nodes.patch(&change.name, &params, &Patch::Merge(&change.patch)).await {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(false),
            Err(error) => Err(api("patch Node", &change.name)(error)),
        }
    }

    async fn evict(&self, namespace: &str, name: &str, uid: &str) -> Result<(), Error> {
        let pods: Api<Pod> = Api::namespaced(self.cx.client.clone(), namespace);
        let only = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
        let params = EvictParams {
            delete_options: Some(DeleteParams::default().preconditions(only)),
            ..EvictParams::default()
        };
        match pods.evict(name, &params).await {
            Ok(_) => Ok(()),
            // The pod is gone, was replaced by another pod of the same name, or is protected by a disruption budget for now.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409 | 429) => Ok(()),
            Err(error) => Err(api("evict Pod", &format!("{namespace}/{name}"))(error)),
        }
    }

    /// Deletes a pod. Returns true if the deletion was accepted.
    async fn delete_pod(&self, namespace: &str, name: &str, uid: &str, grace_s: i64) -> Result<bool, Error> {
        let pods: Api<Pod> = Api::namespaced(self.cx.client.clone(), namespace);
        let only = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
        let grace = u32::try_from(grace_s).unwrap_or(0);
        match pods.delete(name, &DeleteParams::default().grace_period(grace).preconditions(only)).await {
            Ok(_) => {
                self.cx.config.bid_metrics.count_forced_deletion();
                let note = format!("Pod {namespace}/{name} is ended with its whole grace");
                self.emit("DrainForced", note, true);
                Ok(true)
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(false),
            Err(error) => Err(api("delete Pod", &format!("{namespace}/{name}"))(error)),
        }
    }

    async fn delete_node(
        &self,
        name: &str,
        allocation: &AllocationName,
        draining_ms: Option<i64>,
    ) -> Result<(), Error> {
        let deleted = delete_node(self.cx, name, allocation).await?;
        if let Some(began_ms) = draining_ms.filter(|_| deleted && self.cx.drains.end_drain(allocation)) {
            self.cx.config.bid_metrics.observe_drain(true, self.since(began_ms));
        }
        Ok(())
    }

    /// Removes the finalizer; with `confirm`, only if a fresh read of market and cluster finds nothing left.
    async fn remove_finalizer(&mut self, confirm: bool) -> Result<(), Error> {
        if confirm {
            let namespace = self.object.namespace().unwrap_or_default();
            let labels =
                format!("{}={},{}={namespace}", names::BIDNODE, self.object.name_any(), names::NAMESPACE);
            let nodes: Api<Node> = Api::all(self.cx.client.clone());
            let list = ListParams::default().labels(&labels).limit(1);
            let nodes =
                nodes.list(&list).await.map_err(api("list Nodes of BidNode", &self.object.name_any()))?;
            let left = self.cx.market.remaining(&self.tenant, &self.uid).await?;
            if !nodes.items.is_empty() || left > 0 {
                self.done.stale = true;
                return Ok(());
            }
        }
        self.cx.forget(self.object);
        remove_finalizer(&self.bidnodes(), self.object, names::FINALIZER, names::MANAGER).await?;
        self.done.gone = true;
        Ok(())
    }

    fn emit(&self, reason: &'static str, text: String, warning: bool) {
        self.cx.events.emit(self.object, ObjectEvent { reason, text, warning });
    }
}

/// Removes this controller's finalizer from a Node and deletes the Node, only if it still belongs to the allocation. Returns
/// true if it was deleted. Idempotent.
pub(crate) async fn delete_node(
    cx: &Context,
    name: &str,
    allocation: &AllocationName,
) -> Result<bool, Error> {
    let nodes: Api<Node> = Api::all(cx.client.clone());
    let Some(node) = nodes.get_opt(name).await.map_err(api("read Node", name))? else { return Ok(false) };
    if node.labels().get(names::ALLOCATION).map(String::as_str) != Some(&**allocation) {
        return Ok(false);
    }
    let rest: Vec<_> = node.finalizers().iter().filter(|f| *f != NODE_FINALIZER).cloned().collect();
    if rest.len() < node.finalizers().len() {
        let patch = json!({"metadata": {"resourceVersion": node.resource_version(), "finalizers": rest}});
        let params = PatchParams { field_manager: Some(names::MANAGER.into()), ..PatchParams::default() };
        match nodes.patch(name, &params, &Patch::Merge(&patch)).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => return Ok(false),
            Err(error) => return Err(api("patch Node", name)(error)),
        }
    }
    let only = Preconditions { uid: node.uid(), resource_version: None };
    match nodes.delete(name, &DeleteParams::default().preconditions(only)).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {
            Ok(node.metadata.deletion_timestamp.is_some())
        }
        Err(error) => Err(api("delete Node", name)(error)),
    }
}
