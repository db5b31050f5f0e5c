//! Virtual node: a Node of a cluster whose pods are VMs of this host core.
//!
//! ```text
//! API server ◀─Lease, Node status── node ─▶ certificate ─▶ api (kubelet's HTTPS API) ◀── kubectl logs, exec
//!     │                                                      │ reads
//!     └─watch of pods─▶ pods ─▶ coracle-pod ─▶ host core     ▼
//!                         └──────────────────────────▶ table of pods
//! ```
//! This crate never launches a VMM, never decides what a pod's containers do ([`coracle_pod`] does), and never ends a VM
//! because its pod is missing unless a fresh read confirmed that. VMs keep running while the API server or this process is
//! unavailable.

mod api;
pub mod image_policy;
mod node;
mod options;
pub mod pod_events;
mod pods;
mod pressure;
mod stats;
mod table;
mod virtual_node;

pub use coracle_certificate::CertificateSource;
pub use options::{
    Intervals, InvalidTaint, KUBELET_PORT, NodeTaint, StartPolicy, VirtualNodeOptions, VmPodOptions,
};
pub use pressure::{InvalidPressureThresholds, PressureThresholds};
pub use virtual_node::{VirtualNode, VirtualNodeError};

/// Field manager of this node (server-side apply).
const FIELD_MANAGER: &str = "coracle-virtual-node";
