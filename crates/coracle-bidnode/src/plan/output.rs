//! Output of the planner: steps, facts for status, and the time of the next reconcile.

use coracle_auction::Price;
use serde_json::Value;

use super::counts::Counts;
use crate::{
    ids::{AllocationName, BidName, MarketName},
    observe::bids::Quote,
};

/// One effect with all its data: the executor does not read the specification.
#[expect(missing_docs, reason = "fields are named for what they are, and the variant says the rest")]
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Adds the finalizer.
    AddFinalizer,
    /// Places a bid.
    PlaceBid { market: MarketName, limit: Price, quantity: u32, min_fill: u32 },
    /// Changes the limit or the number of unfinished units of a bid.
    AmendBid { bid: BidName, market: MarketName, limit: Option<Price>, units: Option<u32> },
    /// Cancels the open units of a bid.
    CancelBid { bid: BidName, market: MarketName },
    /// Releases an allocation.
    ReleaseAllocation(Release),
    /// Releases `other` instead of `victim`, which is under notice.
    SubstituteVictim { victim: AllocationName, other: AllocationName },
    /// Sets labels and taints of a Node.
    PatchNode(NodeChange),
    /// Cordons a Node under notice, and emits an event.
    NotifyPreemption { change: NodeChange, note: String },
    /// Cordons a Node that the controller drains.
    DrainNode(NodeChange),
    /// Evicts a pod; a disruption budget may refuse.
    EvictPod { node: String, namespace: String, name: String, uid: String },
    /// Deletes a pod with its own grace period, regardless of budgets.
    DeletePod {
        node: String,
        namespace: String,
        name: String,
        uid: String,
        grace_s: i64,
        allocation: AllocationName,
    },
    /// Deletes the Node object of an allocation; `draining_ms` is the start of its drain.
    DeleteNode { name: String, allocation: AllocationName, draining_ms: Option<i64> },
    /// Removes the finalizer; with `confirm` only if a fresh read of market and cluster finds nothing left.
    RemoveFinalizer { confirm: bool },
}

/// Steps that depend on each other: the first failure ends its group only.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// Finalizer of the object. If it cannot be added, nothing is bought.
    Object,
    /// Steps of one Node.
    Node(String),
    /// Bids, and allocations without a Node.
    Trade,
}

impl Step {
    /// Group of the step.
    #[must_use]
    pub fn group(&self) -> Group {
        match self {
            Self::AddFinalizer | Self::RemoveFinalizer { .. } => Group::Object,
            Self::PatchNode(change) | Self::NotifyPreemption { change, .. } | Self::DrainNode(change) => {
                Group::Node(change.name.clone())
            }
            Self::EvictPod { node, .. } | Self::DeletePod { node, .. } => Group::Node(node.clone()),
            Self::DeleteNode { name, .. } => Group::Node(name.clone()),
            Self::ReleaseAllocation(release) => release.node.clone().map_or(Group::Trade, Group::Node),
            Self::PlaceBid { .. }
            | Self::AmendBid { .. }
            | Self::CancelBid { .. }
            | Self::SubstituteVictim { .. } => Group::Trade,
        }
    }

    /// Whether the step responds to a preemption notice.
    #[must_use]
    pub fn is_of_notice(&self) -> bool {
        matches!(self, Self::NotifyPreemption { .. } | Self::SubstituteVictim { .. })
    }

    /// Whether the step is a market command that names the owner version.
    #[must_use]
    pub fn is_versioned(&self) -> bool {
        self.is_trade() || matches!(self, Self::ReleaseAllocation(_))
    }

    /// Whether the step places, amends or cancels a bid.
    #[must_use]
    pub fn is_trade(&self) -> bool {
        matches!(self, Self::PlaceBid { .. } | Self::AmendBid { .. } | Self::CancelBid { .. })
    }
}

/// Release of an allocation.
#[derive(Clone, Debug, PartialEq)]
pub struct Release {
    /// Allocation to release.
    pub allocation: AllocationName,
    /// Market of the allocation.
    pub market: MarketName,
    /// Message of the event.
    pub note: String,
    /// Node of the allocation, if it exists.
    pub node: Option<String>,
    /// Whether the Node failed.
    pub failed: bool,
    /// Start of the Node's drain, in milliseconds since 1970, if it was drained.
    pub draining_ms: Option<i64>,
}

/// Merge patch of a Node at the resource version that was observed.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeChange {
    /// Name of the Node.
    pub name: String,
    /// Body of the patch.
    pub patch: Value,
}

/// Results of planning for status and metrics.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// Nodes by kind.
    pub counts: Counts,
    /// Error of an invalid specification.
    pub invalid: Option<String>,
    /// Chosen market.
    pub market: Option<MarketName>,
    /// Message if the market does not exist; lists the existing ones.
    pub unknown_market: Option<String>,
    /// Prices in the chosen market.
    pub quote: Option<Quote>,
    /// Limit of a bid at these prices.
    pub limit: Option<Price>,
    /// Message if the hourly cap of the BidNode prevents a bid.
    pub over_budget: Option<String>,
    /// Message if repairs are suspended.
    pub degraded: Option<String>,
    /// Message if launches fail and nothing is bought for a while.
    pub provision_failing: Option<String>,
    /// Message about what remains before deletion.
    pub terminating: Option<String>,
}

/// Steps, facts for status, and the time of the next reconcile.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Steps in order; the first failure of a group ends that group.
    pub steps: Vec<Step>,
    /// Results for status and metrics.
    pub facts: Facts,
    /// Time to the next reconcile; `None`: the poll interval.
    pub again: Option<std::time::Duration>,
}
