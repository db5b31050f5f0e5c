//! Finalizer, labels, annotations, conditions and events of BidNodes. The first three of the labels are the
//! article's.

/// Finalizer: bids, units and Nodes may exist until this is gone.
pub const FINALIZER: &str = "kubebid.io/finalizer";
/// Server-side apply owner of what the controller writes.
pub const MANAGER: &str = "coracle-bidnode";

/// Label on Nodes and bids: name of the BidNode.
pub const BIDNODE: &str = "kubebid.io/bidnode";
/// Label on Nodes and bids: namespace of the BidNode.
pub const NAMESPACE: &str = "kubebid.io/namespace";
/// Label on Nodes: id of the unit in the market.
pub const ALLOCATION: &str = "kubebid.io/allocation";
/// Label on Nodes, always [`AUCTION`].
pub const CAPACITY_TYPE: &str = "kubebid.io/capacity-type";
/// Value of [`CAPACITY_TYPE`].
pub const AUCTION: &str = "auction";
/// Label on Nodes: type.
pub const INSTANCE_TYPE: &str = "node.kubernetes.io/instance-type";
/// Label on Nodes: region.
pub const REGION: &str = "topology.kubernetes.io/region";
/// Label on Nodes that load balancers pass over.
pub const NO_BALANCER: &str = "node.kubernetes.io/exclude-from-external-load-balancers";

/// Name of the Node of a unit: `bn-<BidNode, at most 40 characters>-<8 characters that the unit's id hashes
/// to>`.
#[must_use]
pub fn node_name(bidnode: &str, allocation: &str) -> String {
    const LETTERS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
    // FNV-1a: the same in every release, and no secret is behind it.
    let hash = allocation
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    let tail: String =
        (0..8).map(|n| char::from(LETTERS[usize::try_from(hash >> (n * 5) & 31).unwrap_or(0)])).collect();
    let cut = bidnode.char_indices().nth(40).map_or(bidnode.len(), |(at, _)| at);
    format!("bn-{}-{tail}", bidnode[..cut].trim_end_matches(['-', '.']))
}

/// Taint of a Node until its labels and taints are in place and it is Ready.
pub const UNINITIALIZED: &str = "kubebid.io/uninitialized";
/// Taint of a Node under notice; the value is the deadline in seconds since 1970.
pub const PREEMPTING: &str = "kubebid.io/preempting";

/// Annotation of a Node: the labels and taints that it was given, as JSON, to know which of them to take
/// back.
pub const GIVEN: &str = "kubebid.io/spec-hash";
/// Annotation of a Node under a voluntary drain: its begin, in milliseconds since 1970.
pub const DRAINING: &str = "kubebid.io/draining";

/// Prefix of keys that `spec.nodeSelector` must not have.
pub const RESERVED: [&str; 4] =
    ["kubebid.io/", "node.kubernetes.io/", "topology.kubernetes.io/", "node-role.kubernetes.io/"];

/// Annotations of a BidNode.
pub mod annotation {
    /// `true`: only status is written.
    pub const PAUSED: &str = "kubebid.io/paused";
    /// Σ limits of live and open units never exceeds it, in US$.
    pub const MAX_HOURLY_COST: &str = "kubebid.io/max-hourly-cost";
    /// `false`: limits of running nodes are never raised.
    pub const DEFEND: &str = "kubebid.io/defend";
    /// `true`: the whole shortfall or nothing.
    pub const GANG: &str = "kubebid.io/gang";
    /// Idle time before a node above minNodes is released.
    pub const IDLE_AFTER: &str = "kubebid.io/idle-after";
    /// `when-empty`, `balanced` or `never`.
    pub const CONSOLIDATION: &str = "kubebid.io/consolidation";
    /// Voluntary removals at once: a number or a percentage.
    pub const DISRUPTION_BUDGET: &str = "kubebid.io/disruption-budget";
    /// How long a voluntary drain may take.
    pub const DRAIN_TIMEOUT: &str = "kubebid.io/drain-timeout";
    /// `kubelet` or `virtual`.
    pub const JOIN_MODE: &str = "kubebid.io/join-mode";
    /// `true`: remove the finalizer without the market.
    pub const FORCE_DELETE: &str = "kubebid.io/force-delete";
}

/// Annotations of a Pod that must not be moved, with their value: ours and those of other autoscalers.
pub const DO_NOT_DISRUPT: [(&str, &str); 3] = [
    ("kubebid.io/do-not-disrupt", "true"),
    ("karpenter.sh/do-not-disrupt", "true"),
    ("cluster-autoscaler.kubernetes.io/safe-to-evict", "false"),
];

/// Types of conditions.
pub mod condition {
    /// As many nodes as minNodes are active.
    pub const READY: &str = "Ready";
    /// The market took the last bid.
    pub const BID_ACCEPTED: &str = "BidAccepted";
    /// The open bid would win.
    pub const BID_COMPETITIVE: &str = "BidCompetitive";
    /// No unit is open.
    pub const ALLOCATED: &str = "Allocated";
    /// No unit is in flight.
    pub const NODE_JOINED: &str = "NodeJoined";
    /// Nodes are being taken.
    pub const PREEMPTION_NOTICE: &str = "PreemptionNotice";
    /// Nodes would be taken in the next call.
    pub const AT_RISK: &str = "AtRisk";
    /// The cost stays below the cap.
    pub const WITHIN_BUDGET: &str = "WithinBudget";
    /// The market answers.
    pub const MARKET_REACHABLE: &str = "MarketReachable";
    /// Repairs are suspended.
    pub const DEGRADED: &str = "Degraded";
    /// Being deleted, and why it is not done.
    pub const TERMINATING: &str = "Terminating";
}

/// Reasons of conditions.
pub mod reason {
    /// As many nodes as minNodes are active.
    pub const NODES_AVAILABLE: &str = "NodesAvailable";
    /// Fewer.
    pub const NODES_UNAVAILABLE: &str = "NodesUnavailable";
    /// Invalid specification or annotation; the message names the field.
    pub const INVALID_SPEC: &str = "InvalidSpec";
    /// No market exists for the type and region.
    pub const UNKNOWN_MARKET: &str = "UnknownMarket";
    /// The bid is at the price or above.
    pub const COMPETITIVE: &str = "Competitive";
    /// No bid below the reserve wins.
    pub const BELOW_RESERVE: &str = "BelowReserve";
    /// Others pay more.
    pub const BELOW_CLEARING_PRICE: &str = "BelowClearingPrice";
    /// A cap of the tenant holds the bid.
    pub const BUDGET_HOLD: &str = "BudgetHold";
    /// The market does not answer.
    pub const MARKET_UNREACHABLE: &str = "MarketUnreachable";
    /// Too many nodes are not Ready at once.
    pub const TOO_MANY_UNHEALTHY: &str = "TooManyUnhealthy";
}
