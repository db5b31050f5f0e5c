//! Steps of a plan, in order. Nothing is chosen here; every step may be done twice.

use std::{collections::BTreeMap, time::Duration};

use coracle_api::bidnode::{BidNode, names};
use coracle_proto::market as pb;
use coracle_reconcile::{add_finalizer, remove_finalizer};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, EvictParams, ListParams, Patch, PatchParams, Preconditions},
};

use crate::{
    Context, Error,
    error::api,
    market::MarketError,
    mirror::{Note, Owner},
    plan::{NodeChange, Step},
    status::Outcome,
};

/// How far the steps came.
#[derive(Debug, Default)]
pub(crate) struct Done {
    pub(crate) outcome: Outcome,
    /// The object is gone, or is let go: there is no status to write.
    pub(crate) gone: bool,
    /// The world was not as it was seen: look again soon.
    pub(crate) stale: bool,
}

/// One pass's hands.
pub(crate) struct Hands<'a> {
    cx: &'a Context,
    object: &'a BidNode,
    uid: String,
    tenant: String,
    /// The version in each market that the next change names.
    versions: BTreeMap<String, u64>,
    done: Done,
}

/// Does the steps until one fails.
pub(crate) async fn execute(
    cx: &Context,
    object: &BidNode,
    owner: &Owner,
    steps: &[Step],
) -> (Done, Result<(), Error>) {
    let namespace = object.namespace().unwrap_or_default();
    let mut hands = Hands {
        cx,
        object,
        uid: object.uid().unwrap_or_default(),
        tenant: cx.market.tenant(&namespace),
        versions: owner.versions.clone(),
        done: Done::default(),
    };
    for step in steps {
        let result = hands.step(step).await;
        if let Err(error) = result {
            return hands.failed(error);
        }
        if hands.done.gone || hands.done.stale {
            break;
        }
    }
    (hands.done, Ok(()))
}

impl Hands<'_> {
    /// A refusal because something changed meanwhile is no failure; any other one is told and tried again.
    fn failed(mut self, error: Error) -> (Done, Result<(), Error>) {
        match &error {
            Error::Market(refusal) if refusal.is_stale() || refusal.is_over() => {
                self.done.stale = true;
                return (self.done, Ok(()));
            }
            Error::Market(refusal @ MarketError::Call { source, .. }) => {
                self.done.outcome.refused = Some((refusal.code(), source.message().to_owned()));
            }
            _ => {}
        }
        (self.done, Err(error))
    }

    async fn step(&mut self, step: &Step) -> Result<(), Error> {
        match step {
            Step::Hold => self.hold().await,
            Step::Place { market, limit, quantity, min_fill } => {
                self.place(market, limit.as_micros(), *quantity, *min_fill).await
            }
            Step::Amend { bid, market, limit, units } => {
                let limit = limit.map(coracle_auction::Price::as_micros);
                self.amend(bid, market, limit, *units).await
            }
            Step::Cancel { bid, market } => self.cancel(bid, market).await,
            Step::Release { unit, market, note, failed } => self.release(unit, market, note, *failed).await,
            Step::Substitute { unit, other, market } => {
                let request = pb::SubstituteVictimRequest {
                    preempting: unit.clone(),
                    other: other.clone(),
                    tenant: self.tenant.clone(),
                };
                match self.cx.market.substitute(market, request).await {
                    Ok(()) => Ok(()),
                    // Too late, or not of the same lot: the node under notice goes after all.
                    Err(error) => {
                        tracing::debug!(error = &error as &dyn std::error::Error, "no substitution");
                        Ok(())
                    }
                }
            }
            Step::Shape(change) | Step::Drain(change) => self.patch_node(change).await.map(drop),
            Step::Notice { change, note } => {
                if self.patch_node(change).await? {
                    self.tell("NodePreempted", note.clone(), true);
                }
                Ok(())
            }
            Step::Evict { namespace, name, uid } => self.evict(namespace, name, uid).await,
            Step::End { namespace, name, uid, grace_s } => self.end(namespace, name, uid, *grace_s).await,
            Step::DeleteNode { name, allocation } => self.delete_node(name, allocation).await,
            Step::LetGo { look } => self.let_go(*look).await,
        }
    }

    fn bidnodes(&self) -> Api<BidNode> {
        Api::namespaced(self.cx.client.clone(), &self.object.namespace().unwrap_or_default())
    }

    async fn hold(&mut self) -> Result<(), Error> {
        let held = add_finalizer(&self.bidnodes(), self.object, names::FINALIZER, names::MANAGER).await?;
        self.done.gone = held.is_none();
        Ok(())
    }

    fn version(&self, market: &str) -> u64 {
        self.versions.get(market).copied().unwrap_or(0)
    }

    /// Remembers what a reply told. `at_ms` is zero for what is no bid.
    fn took(&mut self, market: &str, reply: &pb::BidReply, at_ms: i64, amended: Option<&str>) {
        self.versions.insert(market.to_owned(), reply.owner_version);
        self.cx.mirror.replied(&self.uid, market, reply.owner_version, at_ms, amended);
        if at_ms > 0 {
            self.done.outcome.accepted = true;
            self.done.outcome.at_ms = at_ms;
        }
    }

    async fn place(&mut self, market: &str, limit: i64, quantity: u32, min_fill: u32) -> Result<(), Error> {
        let version = self.version(market);
        let labels = [
            (names::BIDNODE, self.object.name_any()),
            (names::NAMESPACE, self.object.namespace().unwrap_or_default()),
        ];
        let request = pb::PlaceBidRequest {
            market: market.to_owned(),
            limit_micros: limit,
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
        self.took(market, &reply, reply.at_ms, None);
        let price = coracle_auction::Price::micros(limit);
        self.tell("BidPlaced", format!("bid {} for {quantity} nodes at {price}", reply.bid), false);
        Ok(())
    }

    async fn amend(
        &mut self,
        bid: &str,
        market: &str,
        limit_micros: Option<i64>,
        quantity: Option<u32>,
    ) -> Result<(), Error> {
        let request = pb::AmendBidRequest {
            bid: bid.to_owned(),
            limit_micros,
            quantity,
            if_owner_version: Some(self.version(market)),
            tenant: self.tenant.clone(),
        };
        let reply = self.cx.market.amend(market, request).await?;
        self.took(market, &reply, reply.at_ms, Some(bid));
        if let Some(limit) = limit_micros {
            let note = format!("bid {bid} is now at {}", coracle_auction::Price::micros(limit));
            self.tell("BidRepriced", note, false);
        }
        Ok(())
    }

    async fn cancel(&mut self, bid: &str, market: &str) -> Result<(), Error> {
        let request = pb::CancelBidRequest {
            bid: bid.to_owned(),
            if_owner_version: Some(self.version(market)),
            tenant: self.tenant.clone(),
        };
        let reply = self.cx.market.cancel(market, request).await?;
        self.took(market, &reply, 0, None);
        Ok(())
    }

    async fn release(&mut self, unit: &str, market: &str, note: &str, failed: bool) -> Result<(), Error> {
        let request = pb::ReleaseAllocationRequest {
            allocation: unit.to_owned(),
            if_owner_version: Some(self.version(market)),
            tenant: self.tenant.clone(),
        };
        let reply = self.cx.market.release(market, request).await?;
        self.took(market, &reply, 0, None);
        if let Some(began_ms) = self.draining_since(unit)
            && let Some(forced) = self.cx.drains.emptied(unit)
        {
            self.cx.config.bid_metrics.drained(forced, self.since(began_ms));
        }
        let reason = if failed { "NodeFailed" } else { "Released" };
        self.tell(reason, note.to_owned(), failed);
        Ok(())
    }

    /// Since when the Node of a unit is emptied.
    fn draining_since(&self, unit: &str) -> Option<i64> {
        let owner = format!("{}/{}", self.object.namespace().unwrap_or_default(), self.object.name_any());
        let nodes = self.cx.world.nodes(&owner);
        nodes.iter().find(|view| view.facts.allocation == unit)?.facts.draining_ms
    }

    fn since(&self, ms: i64) -> Duration {
        Duration::from_millis(u64::try_from(self.cx.now_ms() - ms).unwrap_or(0))
    }

    /// True when it was written. A Node that changed or went meanwhile is looked at again.
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
            // Gone, another pod by that name, or a disruption budget that says not yet.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409 | 429) => Ok(()),
            Err(error) => Err(api("evict Pod", &format!("{namespace}/{name}"))(error)),
        }
    }

    async fn end(&self, namespace: &str, name: &str, uid: &str, grace_s: i64) -> Result<(), Error> {
        let pods: Api<Pod> = Api::namespaced(self.cx.client.clone(), namespace);
        let only = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
        let grace = u32::try_from(grace_s).unwrap_or(0);
        match pods.delete(name, &DeleteParams::default().grace_period(grace).preconditions(only)).await {
            Ok(_) => {
                self.cx.config.bid_metrics.forced();
                if let Some(unit) = self.cx.world.unit_of_pod(uid) {
                    self.cx.drains.forced(&unit);
                }
                let note = format!("Pod {namespace}/{name} is ended with its whole grace");
                self.tell("DrainForced", note, true);
                Ok(())
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(error) => Err(api("delete Pod", &format!("{namespace}/{name}"))(error)),
        }
    }

    /// Only the Node of that unit, as it is now.
    async fn delete_node(&self, name: &str, allocation: &str) -> Result<(), Error> {
        let nodes: Api<Node> = Api::all(self.cx.client.clone());
        let Some(node) = nodes.get_opt(name).await.map_err(api("read Node", name))? else { return Ok(()) };
        if node.labels().get(names::ALLOCATION).map(String::as_str) != Some(allocation) {
            return Ok(());
        }
        let only = Preconditions { uid: node.uid(), resource_version: None };
        let began_ms = self.draining_since(allocation);
        match nodes.delete(name, &DeleteParams::default().preconditions(only)).await {
            Ok(_) => {
                if let Some(began_ms) = began_ms.filter(|_| self.cx.drains.gone(allocation)) {
                    self.cx.config.bid_metrics.drained(true, self.since(began_ms));
                }
                Ok(())
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(error) => Err(api("delete Node", name)(error)),
        }
    }

    /// Takes the finalizer off, when a fresh look at market and cluster finds nothing left.
    async fn let_go(&mut self, look: bool) -> Result<(), Error> {
        if look {
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

    fn tell(&self, reason: &'static str, text: String, warning: bool) {
        self.cx.events.tell(self.object, Note { reason, text, warning });
    }
}
