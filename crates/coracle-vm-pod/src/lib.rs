//! Pods whose container is a VM: created from a snapshot, an image or another VM, hibernated, woken, and saved when they end.
//!
//! ```text
//! pod, VM, saved states ─▶ plan ─▶ one step ─▶ host core, registry
//!        ▲                   └───▶ status, annotations, events ─▶ the pod's object
//!        └────────── changes ◀──────────┘
//! ```
//! The annotations are those of [`coracle_api::cocoon`]. Plans are pure: after a restart of the process at any point, the next
//! plan starts from what exists. This crate does not manage containers in a VM ([`coracle_pod`] does).

pub mod exported;
pub mod facts;
pub mod fallback;
pub mod leases;
pub mod metrics;
pub mod orphans;
pub mod output;
pub mod plan;
pub mod pod;
pub mod saved;
pub mod ssh;
pub mod statistics;
pub mod status;
pub mod step;
pub mod task;
pub mod vm_pod_state;

mod events;
mod execute;
mod observe;
mod probe;

use coracle_net::Reach;

/// As in every Kubernetes cluster, pods reach each other and their node.
const REACH: Reach = Reach { guests: true, node: true };
