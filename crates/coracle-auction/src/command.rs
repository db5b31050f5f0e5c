//! What can be asked of a market.

use crate::wire::{wire_enum, wire_struct};
use crate::{AllocId, BidId, LotNo, OwnerKey, Params, Price, SupplierNo, TenantNo, Time};

/// A new bid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Who pays.
    pub tenant: TenantNo,
    /// Who decides, inside the tenant.
    pub owner: OwnerKey,
    /// Refused unless the owner's version is this.
    pub if_owner_version: Option<u64>,
    /// Digest of the idempotency key, unique in the tenant; all zero: none was given.
    pub key: [u8; 16],
    /// Digest of the whole request, to tell a retry from another request under the same key.
    pub body: u64,
    /// Highest price per node-hour, a multiple of the tick.
    pub limit: Price,
    /// Number of units.
    pub quantity: u32,
    /// Units that must be matched together; 0 and 1 mean none.
    pub min_fill: u32,
    /// Open units die this long after the owner's last sign of life.
    pub lease_ms: u32,
    /// Open units die at this time in any case.
    pub expires_at: Option<Time>,
    /// Words of the owner.
    pub labels: Vec<(Box<str>, Box<str>)>,
}

/// A change of a bid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Amendment {
    /// Whose bid it is.
    pub tenant: TenantNo,
    /// Which one.
    pub bid: BidId,
    /// Refused unless the owner's version is this.
    pub if_owner_version: Option<u64>,
    /// New limit. Time priority is lost.
    pub limit: Option<Price>,
    /// New number of unfinished units. Fewer keeps time priority; added units get a new one.
    pub units: Option<u32>,
}

/// What a supplier or the operator says of one unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
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
    /// The guest is drained and can go before its deadline.
    Drained,
    /// The machine or the node died.
    Died,
}

/// A command to one market.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Time passed.
    Tick,
    /// The service was away: nobody could renew or report, so leases and silences start again.
    Restarted,
    /// Parameters, at once or from a later time. In place of what was to come.
    Configure {
        /// All parameters.
        params: Params,
        /// When they take effect.
        effective_at: Time,
    },
    /// Take no more bids and hold no calls.
    Halt,
    /// Go on.
    Resume,
    /// A tenant's share of its hourly cap for this market; `None`: no cap.
    Budget {
        /// Whose.
        tenant: TenantNo,
        /// Σ limits of unfinished units never passes this.
        cap: Option<Price>,
    },
    /// A new bid.
    Place {
        /// The bid.
        placement: Box<Placement>,
    },
    /// A changed bid.
    Amend {
        /// The change.
        amendment: Amendment,
    },
    /// Take back what is open.
    Cancel {
        /// Whose bid.
        tenant: TenantNo,
        /// Which.
        bid: BidId,
        /// Refused unless the owner's version is this.
        if_owner_version: Option<u64>,
    },
    /// Give back a unit.
    Release {
        /// Whose unit.
        tenant: TenantNo,
        /// Which.
        alloc: AllocId,
        /// Refused unless the owner's version is this.
        if_owner_version: Option<u64>,
    },
    /// Give up another unit in place of one under notice.
    Substitute {
        /// Whose units.
        tenant: TenantNo,
        /// The one under notice.
        victim: AllocId,
        /// The one to go instead.
        other: AllocId,
    },
    /// An owner is alive.
    Renew {
        /// Its tenant.
        tenant: TenantNo,
        /// The owner.
        owner: OwnerKey,
    },
    /// A lot is there with so many units. Also its first sign of life.
    PutLot {
        /// The lot.
        lot: LotNo,
        /// Whose.
        supplier: SupplierNo,
        /// How many units.
        units: u32,
        /// The notice that the supplier can give.
        notice_ms: u64,
    },
    /// Take a lot away with notice.
    DrainLot {
        /// The lot.
        lot: LotNo,
    },
    /// A supplier is alive.
    Heartbeat {
        /// The supplier.
        supplier: SupplierNo,
    },
    /// News of one unit.
    Report {
        /// The unit.
        alloc: AllocId,
        /// The news.
        report: Report,
    },
}

/// A command with its time: one entry of the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Journaled {
    /// Engine time, never before the entry in front of it.
    pub at: Time,
    /// The command.
    pub command: Command,
}

wire_struct!(Placement {
    tenant,
    owner,
    if_owner_version,
    key,
    body,
    limit,
    quantity,
    min_fill,
    lease_ms,
    expires_at,
    labels,
});
wire_struct!(Amendment { tenant, bid, if_owner_version, limit, units });
wire_struct!(Journaled { at, command });
wire_enum!(Report { 0 Launched, 1 Registered { node }, 2 Ready, 3 Failed, 4 Drained, 5 Died });
wire_enum!(Command {
    0 Tick,
    1 Restarted,
    2 Configure { params, effective_at },
    3 Halt,
    4 Resume,
    5 Budget { tenant, cap },
    6 Place { placement },
    7 Amend { amendment },
    8 Cancel { tenant, bid, if_owner_version },
    9 Release { tenant, alloc, if_owner_version },
    10 Substitute { tenant, victim, other },
    11 Renew { tenant, owner },
    12 PutLot { lot, supplier, units, notice_ms },
    13 DrainLot { lot },
    14 Heartbeat { supplier },
    15 Report { alloc, report },
});
