//! Virtual node: a Node of a cluster whose pods are VMs of this host core.
//!
//! ```text
//! API server ◀─Lease, Node status── node ─▶ certificate ─▶ api (kubelet's HTTPS API) ◀── kubectl logs, exec
//!     │                                                      │ reads
//!     └─watch of pods─▶ pods ─▶ coracle-pod ─▶ host core     ▼
//!                         └──────────────────────────▶ table of pods
//! ```
//! What this crate never does: launch a VMM, decide what a pod's containers do ([`coracle_pod`] does), or end a VM for the
//! absence of a pod that no fresh read confirmed. VMs keep running while the API server or this process is away.

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

/// Owner of the fields that this node writes (server-side apply).
const FIELD_MANAGER: &str = "coracle-virtual-node";
