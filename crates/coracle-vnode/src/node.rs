//! Node object of this node: registration, and status reports when the status changes.
//!
//! ```text
//! facts (reads) ─▶ status (pure) ─▶ reporter: apply when changed, else at an interval
//! Lease: a task and a connection of its own, so that no other work delays it
//! ```

mod facts;
mod lease;
mod object;
mod reporter;
mod status;

pub(crate) use facts::{Identity, Reader};
pub(crate) use lease::Renewer;
pub(crate) use reporter::{Registered, Reporter};
