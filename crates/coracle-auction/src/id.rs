//! Names of things inside one market. Small numbers: the service keeps the long names.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Milliseconds since 1970, as journaled. The engine never reads a clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Time(pub u64);

impl Time {
    /// A time that is never reached.
    pub const NEVER: Self = Self(u64::MAX);

    /// The time `ms` milliseconds later; never past the end of time.
    #[must_use]
    pub const fn plus_ms(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms))
    }

    /// Milliseconds from `earlier` to `self`; 0 when it is not earlier.
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
    /// A tenant, as the service numbers them.
    TenantNo(u32)
);
number!(
    /// A lot of capacity, as the service numbers them.
    LotNo(u32)
);
number!(
    /// A supplier of lots, as the service numbers them.
    SupplierNo(u32)
);
number!(
    /// A bid of this market: place in the table, and how often that place was used before.
    BidId(u64)
);
number!(
    /// An allocation: one slot sold to one bid.
    AllocationId(u64)
);

/// Owner of bids inside a tenant: the bytes of a UUID, or the digest of another name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OwnerKey(pub [u8; 16]);
