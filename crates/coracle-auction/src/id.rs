//! Ids of objects in one market. They are small numbers; the service keeps the long names.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Milliseconds since 1970, as journaled. The engine never reads a clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Time(pub u64);

impl Time {
    /// Time that is never reached.
    pub const NEVER: Self = Self(u64::MAX);

    /// Time `ms` milliseconds later, saturating.
    #[must_use]
    pub const fn plus_ms(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms))
    }

    /// Milliseconds from `earlier` to `self`; 0 if `earlier` is not earlier.
    #[must_use]
    pub const fn since_ms(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

number!(
    /// Tenant, as the service numbers them.
    TenantNo(u32)
);
number!(
    /// Lot of capacity, as the service numbers them.
    LotNo(u32)
);
number!(
    /// Supplier of lots, as the service numbers them.
    SupplierNo(u32)
);
number!(
    /// Bid of this market: row in the table, and the number of earlier uses of that row.
    BidId(u64)
);
number!(
    /// Allocation: one slot sold to one bid.
    AllocationId(u64)
);

/// Owner of bids within a tenant: the bytes of a UUID, or the digest of another name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OwnerKey(pub [u8; 16]);
