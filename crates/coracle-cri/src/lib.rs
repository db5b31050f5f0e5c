//! CRI v1 server: an unmodified kubelet runs its pods in VMs of this node.
//!
//! ```text
//! kubelet ──unix socket──▶ service (runtime.v1) ─▶ sandboxes · containers · images · exec · stats · events
//!                                                     │ translate (pure): request ─▶ VmSpec, ContainerSpec
//!                                                     │ status, metrics (pure): records ─▶ messages
//!         ◀──127.0.0.1, SPDY and WebSocket── streams  ▼
//!                                                  host core (one VM a pod, containers in it)
//! ```
//! All state is in the host core; data that only the kubelet knows of a pod is in the metadata of its records ([`facts`]), so
//! that a restart of the daemon loses nothing. Lists and statuses never access a guest or a file.

mod containers;
mod disk_pods;
mod events;
mod exec;
mod facts;
mod handlers;
mod images;
mod lists;
mod metrics;
mod options;
mod refusal;
mod sandboxes;
mod seccomp;
mod serve;
mod server;
mod service;
mod signatures;
mod stats;
mod status;
mod streams;
mod table;
mod trace;
mod translate;
mod vm_container;

pub use options::{CriOptions, PodEvents};
pub use serve::CriError;
pub use server::CriServer;
