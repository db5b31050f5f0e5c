//! The auction of one market of nodes: a deterministic state machine.
//!
//! [`Market::apply`] takes a journaled time and a command, and returns a reply and events. The same commands at the same times
//! always give the same bytes: there is no I/O, no clock, no floating point, no thread, and no unordered map.
//!
//! ```text
//!   bid unit:  pending ─▶ matched ─▶ provisioning ─▶ active ─▶ preempting ─▶ ended
//!                 │  ▲                    │             │                      ▲
//!                 │  └── launch failed ───┘             └── release, death ────┘
//!                 └─▶ cancelled · expired
//!
//!   call:  observe (book, running, slots) ─▶ plan (pure) ─▶ execute ─▶ record
//! ```
//!
//! Every 30 s a *call* decides which bids hold a slot and what they all pay: the highest losing bid, but not less than the
//! reserve. Between calls, a free slot is matched at once.

mod advice;
mod allocation;
mod bid;
mod book;
pub mod codec;
mod command;
mod event;
mod history;
mod id;
mod keys;
mod lots;
mod market;
mod money;
mod names;
mod observed;
mod params;
mod presence;
mod slab;
mod tenants;
#[cfg(test)]
mod tests;
mod timers;

pub use advice::{Advice, advise};
pub use allocation::{Allocation, AllocationState, EndReason, Stage};
pub use bid::{Bid, BidState, Units};
pub use book::BANDS;
pub use command::{Amendment, BidRequest, Command, Fault, Journaled, ReleaseReason, SupplierReport};
pub use event::{CallRecord, ChargeReason, Event, Rejection, Reply};
pub use history::PricePoint;
pub use id::{AllocationId, BidId, LotNo, OwnerKey, SupplierNo, TenantNo, Time};
pub use lots::{Lot, LotState};
pub use market::Market;
pub use market::explain::{Explanation, Standing};
pub use market::simulate::{Hypothetical, Simulation};
pub use market::view::{Depth, Quotes, TenantAccount};
pub use money::{Charge, InvalidPrice, Price};
pub use observed::{Desired, Machine, MachineState};
pub use params::{InvalidParams, Params};
pub use presence::{Continuity, Presence};

/// Most units of one bid.
pub const QUANTITY_MAX: u32 = 10_000;
/// Most units, allocated or requested, of one tenant in one market.
pub const TENANT_UNITS_MAX: u64 = 100_000;
/// Retention of an ended bid and its idempotency key, in milliseconds.
pub const RETENTION_MS: u64 = 24 * 3600 * 1000;
