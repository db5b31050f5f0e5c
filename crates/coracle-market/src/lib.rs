//! The market service around `coracle-auction`: journal, registry, gRPC, HTTP, streams.
//!
//! ```text
//!   gRPC · HTTP ─▶ service (who may what, names ↔ numbers) ─▶ writer ─▶ journal (fsync) ─▶ engine ─▶ reply, events
//!                        └───────────── reads ──────────────────────────────────────────────┘
//! ```
//!
//! A command is journaled before it is applied, and applied before it is answered. A command that the journal does not accept
//! is refused and changes nothing. Everything except the journal and the registry of names can be rebuilt from them.

mod announce;
mod audit;
mod auth;
mod caller;
mod catalogue;
mod convert;
mod error;
mod focus;
mod grpc;
mod history;
mod http;
mod json;
mod learning;
mod metrics;
mod names;
mod price_stream;
mod prices;
mod recover;
mod registry;
mod replica;
mod review;
mod serve;
mod service;
mod signed;
mod state;
mod store;
mod verify;
mod websocket;
mod writer;

pub use coracle_certificate::{TlsError, TlsFiles};
pub use error::{RequestError, StoreError};
pub use metrics::register_metrics;
pub use review::{AUDIENCE, Account, Accounts, Answer, Review, Unreviewed};
pub use serve::{Config, ServeError, Server, serve};
pub use store::{JournalVerification, StoreAt};
