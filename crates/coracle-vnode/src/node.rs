//! The Node object: what the cluster knows of this node. It registers, and reports a status when it changes.
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
