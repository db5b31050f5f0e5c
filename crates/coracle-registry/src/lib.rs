//! OCI distribution server (specification 1.1) for any client. It is optimised for VM disks and memory, and has the routes of
//! epoch, the registry of cocoon.
//!
//! ```text
//! request ─▶ route (pure) ─▶ auth ─▶ http/… ─▶ uploads · manifest (pure) ─▶ storage  bytes, synced
//!                                                                      └▶ meta     names: SQLite or PostgreSQL
//!                        manifest_store: bytes and rows of manifests, changed and repaired together
//!                        gc: mark, grace, sweep             rebuild: tables from the storage
//! ```
//!
//! Of the image crates it uses only `coracle-oci`: digests, names, manifests. This crate never acknowledges bytes that are not
//! on disk, never holds a blob in memory, never uses an unparsed name as a path, stores only the hashes of tokens, and never
//! makes a push wait for the sweep.

mod auth;
mod catalog;
mod connection;
mod error;
#[doc(hidden)]
pub mod fuzz;
mod gc;
mod http;
mod manifest;
mod manifest_memory;
mod manifest_store;
mod meta;
mod metrics;
mod rebuild;
mod registry;
mod rights;
mod route;
mod serve;
mod storage;
mod sys;
mod tls;
mod upload_id;
mod uploads;

pub use error::StoreError;
pub use meta::MetaAt;
pub use metrics::Metrics;
pub use registry::{Limits, Sweeping};
pub use serve::{Config, Ready, ServeError, serve};
pub use storage::s3::S3Config;
