//! An OCI distribution server (specification 1.1) that any client can use and that carries VM disks and memory well,
//! with the routes of the original registry of VM snapshots.
//!
//! ```text
//! request ─▶ route (pure) ─▶ auth ─▶ http/… ─▶ uploads · manifest (pure) ─▶ storage  bytes, on disk when acknowledged
//!                                                                      └▶ meta     names: SQLite or PostgreSQL
//!                              gc: mark, grace, sweep            rebuild: names made again from the bytes
//! ```
//!
//! What this crate never does: acknowledge what is not on disk, hold a blob in memory, let a name become a path that
//! was not parsed, keep a token (only its hash), or make a push wait for the sweep.

mod auth;
mod catalog;
mod digest;
mod error;
#[doc(hidden)]
pub mod fuzz;
mod gc;
mod http;
mod manifest;
mod meta;
mod metrics;
mod names;
mod rebuild;
mod registry;
mod route;
mod serve;
mod storage;
mod sys;
mod uploads;

pub use error::StoreError;
pub use meta::MetaAt;
pub use metrics::Metrics;
pub use registry::{Limits, Sweeping};
pub use serve::{Config, Ready, ServeError, serve};
pub use storage::s3::S3Config;
