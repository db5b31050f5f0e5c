//! Commands to a market.

use serde::{Deserialize, Serialize};

use crate::{AllocationId, BidId, LotNo, OwnerKey, Params, Price, SupplierNo, TenantNo, Time};

/// A new bid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BidRequest {
    /// Tenant that pays.
    pub tenant: TenantNo,
    /// Owner within the tenant, whose version fences changes.
    pub owner: OwnerKey,
    /// Expected version of the owner; the request is refused if it differs.
    pub if_owner_version: Option<u64>,
    /// Digest of the idempotency key, unique within the tenant; all zero: none was given.
    pub key: [u8; 16],
    /// Digest of the whole request, which distinguishes a retry from another request with the same key.
    pub body: u64,
    /// Highest price per node-hour, a multiple of the tick.
    pub limit: Price,
    /// Number of requested nodes.
    pub quantity: u32,
    /// Number of units that must be matched together; 0 and 1 mean no such requirement.
    pub min_fill: u32,
    /// Lease of open units in milliseconds: they expire this long after the owner's last heartbeat.
    pub lease_ms: u32,
    /// Time at which open units expire, regardless of heartbeats.
    pub expires_at: Option<Time>,
    /// Labels set by the owner; the market only stores them.
    pub labels: Vec<(Box<str>, Box<str>)>,
}

/// Change of a bid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Amendment {
    /// Tenant of the bid.
    pub tenant: TenantNo,
    /// Bid to change.
    pub bid: BidId,
    /// Expected version of the owner; the request is refused if it differs.
    pub if_owner_version: Option<u64>,
    /// New limit. The bid loses its time priority.
    pub limit: Option<Price>,
    /// New number of unfinished units. A reduction keeps the time priority; added units get a new one.
    pub units: Option<u32>,
}

/// Report about one allocation, from its supplier or from the operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SupplierReport {
    /// The machine runs.
    Launched,
    /// The node registered under this name.
    Registered {
        /// Name of the node.
        node: Box<str>,
    },
    /// The node is ready.
    Ready,
    /// The launch failed.
    Failed,
    /// The machine or the node died.
    Died {
        /// Origin of the failure.
        by: Fault,
    },
}

/// Origin of the end of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fault {
    /// The guest powered off or crashed; nothing is refunded.
    Guest,
    /// The host failed.
    Host,
}

/// Why an owner releases an allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReleaseReason {
    /// The allocation is no longer needed.
    #[default]
    Unneeded,
    /// The node does not work: the lot gets a strike, and the minimum is not charged.
    NodeFailed,
}

/// Command to one market.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Advances the time and has no other effect.
    Tick,
    /// The service restarted or stood still. Owners could not renew and suppliers could not report meanwhile, so leases and
    /// launch deadlines start again.
    Restarted,
    /// Sets parameters, effective at once or later. Replaces a change that was announced before.
    Configure {
        /// All parameters.
        params: Params,
        /// Time from which they apply.
        effective_at: Time,
    },
    /// Stops accepting bids and holding calls.
    Halt,
    /// Accepts bids and holds calls again.
    Resume,
    /// Sets the part of a tenant's hourly cap for this market; `None`: no cap.
    Budget {
        /// Tenant.
        tenant: TenantNo,
        /// Upper bound of the sum of the limits of unfinished units.
        cap: Option<Price>,
    },
    /// Places a bid.
    Place {
        /// Bid to place.
        request: Box<BidRequest>,
    },
    /// Changes a bid.
    Amend {
        /// Change of the bid.
        amendment: Amendment,
    },
    /// Cancels the open units of a bid.
    Cancel {
        /// Tenant of the bid.
        tenant: TenantNo,
        /// Bid to cancel.
        bid: BidId,
        /// Expected version of the owner; the command is refused if it differs.
        if_owner_version: Option<u64>,
    },
    /// Releases an allocation.
    Release {
        /// Tenant of the allocation.
        tenant: TenantNo,
        /// Allocation to release.
        allocation: AllocationId,
        /// Expected version of the owner; the command is refused if it differs.
        if_owner_version: Option<u64>,
        /// Reason of the release.
        reason: ReleaseReason,
    },
    /// Releases another allocation in place of one under notice.
    Substitute {
        /// Tenant of both allocations.
        tenant: TenantNo,
        /// Allocation under notice.
        victim: AllocationId,
        /// Allocation to end instead.
        other: AllocationId,
    },
    /// Heartbeat of an owner, which renews the leases of its bids.
    Renew {
        /// Tenant of the owner.
        tenant: TenantNo,
        /// The owner.
        owner: OwnerKey,
    },
    /// Adds a lot, or sets its number of slots. Counts as [`Command::Heard`].
    PutLot {
        /// The lot.
        lot: LotNo,
        /// Supplier.
        supplier: SupplierNo,
        /// Number of slots.
        slots: u32,
        /// Longest notice that the supplier can give, in milliseconds.
        notice_ms: u64,
    },
    /// Removes a lot after giving notice to its allocations.
    DrainLot {
        /// The lot.
        lot: LotNo,
    },
    /// A silent or lost supplier reports again.
    Heard {
        /// The supplier.
        supplier: SupplierNo,
    },
    /// Report about one allocation.
    Report {
        /// The allocation.
        allocation: AllocationId,
        /// The report.
        report: SupplierReport,
    },
    /// A supplier has been silent for so long that its lots accept no new allocations.
    Silent {
        /// The supplier.
        supplier: SupplierNo,
    },
    /// A supplier has been silent for so long that its allocations are lost.
    Lost {
        /// The supplier.
        supplier: SupplierNo,
    },
    /// The machine of an ended allocation no longer exists, so its slot is free.
    Gone {
        /// The lot.
        lot: LotNo,
        /// Index of the slot.
        slot: u32,
        /// The ended allocation.
        allocation: AllocationId,
    },
}

/// Command with its time: one entry of the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Journaled {
    /// Engine time, never earlier than that of the previous entry.
    pub at: Time,
    /// The command.
    pub command: Command,
}
