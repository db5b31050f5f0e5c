//! SPDY/3.1 as Kubernetes' clients speak it: without flow control, streams opened by the client only.
//!
//! ```text
//! bytes ─▶ frame::Decoder (pure) ─▶ header_block::Inflater (pure) ─▶ table::Table (pure) ─▶ connection: streams
//!                                                                     streams ─▶ session · port_forward
//! ```

mod connection;
pub(crate) use connection::{Incoming, serve};
pub(crate) mod dictionary;
pub(crate) mod frame;
pub(crate) mod header_block;
#[cfg(test)]
pub(crate) mod peer;
pub(crate) mod port_forward;
pub(crate) mod session;
mod stream;
mod table;
