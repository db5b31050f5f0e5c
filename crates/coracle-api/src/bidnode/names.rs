//! Finalizer, labels, annotations, conditions and events of BidNodes. The first three labels are those of existing manifests.

/// Finalizer of a BidNode: bids, allocations and Nodes may exist until it is removed.
pub const FINALIZER: &str = "kubebid.io/finalizer";
/// Field manager of the BidNode controller in server-side apply.
pub const MANAGER: &str = "coracle-bidnode";

/// Label on Nodes and bids: name of the BidNode.
pub const BIDNODE: &str = "kubebid.io/bidnode";
/// Label on Nodes and bids: namespace of the BidNode.
pub const NAMESPACE: &str = "kubebid.io/namespace";
/// Label on Nodes: id of the allocation in the market.
pub const ALLOCATION: &str = "kubebid.io/allocation";
/// Label on Nodes: capacity type, always [`AUCTION`].
pub const CAPACITY_TYPE: &str = "kubebid.io/capacity-type";
/// Value of [`CAPACITY_TYPE`].
pub const AUCTION: &str = "auction";
/// Label on Nodes: instance type.
pub const INSTANCE_TYPE: &str = "node.kubernetes.io/instance-type";
/// Label on Nodes: region.
pub const REGION: &str = "topology.kubernetes.io/region";
/// Label on Nodes that excludes them from load balancers.
pub const NO_BALANCER: &str = "node.kubernetes.io/exclude-from-external-load-balancers";

/// Returns the name of the Node of an allocation: `bn-<BidNode, at most 40 characters>-<8 characters of a hash of the
/// allocation's id>`.
#[must_use]
pub fn node_name(bidnode: &str, allocation: &str) -> String {
    const LETTERS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
    // FNV-1a gives the same name in every release. The hash protects no secret.
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
/// Taint of a Node under preemption notice; the value is the deadline in seconds since 1970.
pub const PREEMPTING: &str = "kubebid.io/preempting";

/// Annotation of a Node: labels and taints that the controller has set, as JSON, so that it can remove them.
pub const GIVEN: &str = "kubebid.io/spec-hash";
/// Annotation of a Node in a voluntary drain: start of the drain, in milliseconds since 1970.
pub const DRAINING: &str = "kubebid.io/draining";

/// Prefixes of keys that `spec.nodeSelector` must not have.
pub const RESERVED: [&str; 4] =
    ["kubebid.io/", "node.kubernetes.io/", "topology.kubernetes.io/", "node-role.kubernetes.io/"];

/// Annotations of a BidNode.
pub mod annotation {
    /// `true`: the controller writes only the status.
    pub const PAUSED: &str = "kubebid.io/paused";
    /// Cap in US$ on the sum of the limit prices of all live allocations and open bids.
    pub const MAX_HOURLY_COST: &str = "kubebid.io/max-hourly-cost";
    /// `false`: limit prices of running nodes are never raised.
    pub const DEFEND: &str = "kubebid.io/defend";
    /// `true`: buy the whole shortfall or nothing.
    pub const GANG: &str = "kubebid.io/gang";
    /// Idle time before a node above minNodes is released.
    pub const IDLE_AFTER: &str = "kubebid.io/idle-after";
    /// `when-empty`, `balanced` or `never`.
    pub const CONSOLIDATION: &str = "kubebid.io/consolidation";
    /// Voluntary removals at the same time: a number or a percentage.
    pub const DISRUPTION_BUDGET: &str = "kubebid.io/disruption-budget";
    /// Time limit of a voluntary drain.
    pub const DRAIN_TIMEOUT: &str = "kubebid.io/drain-timeout";
    /// `kubelet` or `virtual`.
    pub const JOIN_MODE: &str = "kubebid.io/join-mode";
    /// `true`: remove the finalizer without waiting for the market.
    pub const FORCE_DELETE: &str = "kubebid.io/force-delete";
}

/// Annotations, with their value, of a Pod that must not be moved: those of this project and of other autoscalers.
pub const DO_NOT_DISRUPT: [(&str, &str); 3] = [
    ("kubebid.io/do-not-disrupt", "true"),
    ("karpenter.sh/do-not-disrupt", "true"),
    ("cluster-autoscaler.kubernetes.io/safe-to-evict", "false"),
];

/// Types of conditions.
pub mod condition {
    /// At least minNodes nodes are active.
    pub const READY: &str = "Ready";
    /// The market accepted the last bid.
    pub const BID_ACCEPTED: &str = "BidAccepted";
    /// The open bid would win.
    pub const BID_COMPETITIVE: &str = "BidCompetitive";
    /// Every requested slot is allocated.
    pub const ALLOCATED: &str = "Allocated";
    /// Every allocated node has joined the cluster.
    pub const NODE_JOINED: &str = "NodeJoined";
    /// Nodes are under preemption notice.
    pub const PREEMPTION_NOTICE: &str = "PreemptionNotice";
    /// Nodes would be preempted in the next call of the market.
    pub const AT_RISK: &str = "AtRisk";
    /// The cost stays below the cap.
    pub const WITHIN_BUDGET: &str = "WithinBudget";
    /// The market responds.
    pub const MARKET_REACHABLE: &str = "MarketReachable";
    /// Repairs of nodes are suspended.
    pub const DEGRADED: &str = "Degraded";
    /// The BidNode is being deleted; the message says what the deletion waits for.
    pub const TERMINATING: &str = "Terminating";
}

/// Reasons of conditions.
pub mod reason {
    /// At least minNodes nodes are active.
    pub const NODES_AVAILABLE: &str = "NodesAvailable";
    /// Fewer than minNodes nodes are active.
    pub const NODES_UNAVAILABLE: &str = "NodesUnavailable";
    /// Invalid specification or annotation; the message names the field.
    pub const INVALID_SPEC: &str = "InvalidSpec";
    /// No market exists for the type and region.
    pub const UNKNOWN_MARKET: &str = "UnknownMarket";
    /// The bid is at the market's price or above.
    pub const COMPETITIVE: &str = "Competitive";
    /// The bid is below the reserve price and cannot win.
    pub const BELOW_RESERVE: &str = "BelowReserve";
    /// Other bids are higher.
    pub const BELOW_CLEARING_PRICE: &str = "BelowClearingPrice";
    /// A spending cap of the tenant holds the bid back.
    pub const BUDGET_HOLD: &str = "BudgetHold";
    /// The market does not respond.
    pub const MARKET_UNREACHABLE: &str = "MarketUnreachable";
    /// Too many nodes are not Ready at once.
    pub const TOO_MANY_UNHEALTHY: &str = "TooManyUnhealthy";
}
