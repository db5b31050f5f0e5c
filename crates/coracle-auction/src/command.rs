//! Commands to a market.

use serde::{Deserialize, Serialize};

use crate::{AllocationId, BidId, LotNo, OwnerKey, Params, Price, SupplierNo, TenantNo, Time};

/// A new bid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BidRequest {
    /// Tenant that pays.
    pub tenant: TenantNo,
    /// Owner inside the tenant, whose version fences changes.
    pub owner: OwnerKey,
    /// Refused unless the owner's version is this.
    pub if_owner_version: Option<u64>,
    /// Digest of the idempotency key, unique in the tenant; all zero: none was given.
    pub key: [u8; 16],
    /// Digest of the whole request, to tell a retry from another request under the same key.
    pub body: u64,
    /// Highest price per node-hour, a multiple of the tick.
    pub limit: Price,
    /// Number of nodes wanted.
    pub quantity: u32,
    /// Units that must be matched together; 0 and 1 mean none.
    pub min_fill: u32,
    /// Lease of open units: they expire this long after the owner's last heartbeat.
    pub lease_ms: u32,
    /// Time at which open units expire, regardless of heartbeats.
    pub expires_at: Option<Time>,
    /// Labels that the owner chose; the market only stores them.
    pub labels: Vec<(Box<str>, Box<str>)>,
}

/// A change of a bid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Amendment {
    /// Tenant of the bid.
    pub tenant: TenantNo,
    /// The bid.
    pub bid: BidId,
    /// Refused unless the owner's version is this.
    pub if_owner_version: Option<u64>,
    /// New limit. Time priority is lost.
    pub limit: Option<Price>,
    /// New number of unfinished units. Fewer keeps time priority; added units get a new one.
    pub units: Option<u32>,
}

/// Report about one allocation, from its supplier or from the operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SupplierReport {
    /// The machine runs.
    Launched,
    /// The node registered under this name.
    Registered {
        /// Its name.
        node: Box<str>,
    },
    /// The node is ready.
    Ready,
    /// The launch failed.
    Failed,
    /// The machine or the node died.
    Died {
        /// Whose fault it was.
        by: Fault,
    },
}

/// Origin of the end of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fault {
    /// The guest powered off or crashed: nothing is refunded.
    Guest,
    /// The host failed.
    Host,
}

/// Why an owner releases an allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReleaseReason {
    /// It is not needed any more.
    #[default]
    Unneeded,
    /// Its node does not work: the lot gets a strike, and the minimum is not charged.
    NodeFailed,
}

/// A command to one market.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Advances the time; nothing else happens.
    Tick,
    /// The service restarted or stood still: owners could not renew and suppliers could not report meanwhile, so leases and
    /// launch deadlines start again.
    Restarted,
    /// Parameters, effective at once or later. Replaces a change that was announced before.
    Configure {
        /// All parameters.
        params: Params,
        /// When they take effect.
        effective_at: Time,
    },
    /// Takes no more bids and holds no calls.
    Halt,
    /// Takes bids and holds calls again.
    Resume,
    /// A tenant's share of its hourly cap for this market; `None`: no cap.
    Budget {
        /// Tenant.
        tenant: TenantNo,
        /// The sum of the limits of unfinished units never exceeds this.
        cap: Option<Price>,
    },
    /// A new bid.
    Place {
        /// The bid.
        request: Box<BidRequest>,
    },
    /// A changed bid.
    Amend {
        /// The change.
        amendment: Amendment,
    },
    /// Cancels the open units of a bid.
    Cancel {
        /// Tenant of the bid.
        tenant: TenantNo,
        /// Which.
        bid: BidId,
        /// Refused unless the owner's version is this.
        if_owner_version: Option<u64>,
    },
    /// Releases an allocation.
    Release {
        /// Tenant of the allocation.
        tenant: TenantNo,
        /// Which.
        allocation: AllocationId,
        /// Refused unless the owner's version is this.
        if_owner_version: Option<u64>,
        /// Why.
        reason: ReleaseReason,
    },
    /// Releases another allocation in place of one under notice.
    Substitute {
        /// Tenant of both.
        tenant: TenantNo,
        /// Allocation under notice.
        victim: AllocationId,
        /// Allocation to end instead.
        other: AllocationId,
    },
    /// Heartbeat of an owner; renews its leases.
    Renew {
        /// Its tenant.
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
        /// The notice that the supplier can give.
        notice_ms: u64,
    },
    /// Removes a lot, with notice to its allocations.
    DrainLot {
        /// The lot.
        lot: LotNo,
    },
    /// A silent or lost supplier is back.
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
    /// A supplier has been silent for so long that its lots take nothing new.
    Silent {
        /// The supplier.
        supplier: SupplierNo,
    },
    /// A supplier has been silent for so long that its allocations are lost.
    Lost {
        /// The supplier.
        supplier: SupplierNo,
    },
    /// The machine of an ended allocation is gone: its slot is free.
    Gone {
        /// The lot.
        lot: LotNo,
        /// Index of the slot.
        slot: u32,
        /// The ended allocation.
        allocation: AllocationId,
    },
}

/// A command with its time: one entry of the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Journaled {
    /// Engine time, never before the entry in front of it.
    pub at: Time,
    /// The command.
    pub command: Command,
}
