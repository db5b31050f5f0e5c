//! SPDY/3.1 as Kubernetes' clients use it: without flow control, and with streams that only the client opens.
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
