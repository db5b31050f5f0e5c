//! Statistics of the node, its pods and their containers, in the formats of a kubelet.
//!
//! ```text
//! host core: last reports of the guests ─▶ observe ─▶ PodSample ─┬▶ summary (JSON)      all pure
//! /proc, statvfs of the node ────────────▶ node ────▶ NodeSample ┴▶ resource, cadvisor, kubelet (Prometheus text)
//! ```
//! No request waits for a guest: each value has the time at which its guest reported it. Unknown values are left out.

mod cadvisor;
mod kubelet;
mod node;
mod observe;
mod rates;
mod resource;
mod sample;
mod summary;
mod text;

pub(crate) use cadvisor::container_metrics;
pub(crate) use kubelet::{node_metrics, probe_metrics};
pub(crate) use node::read as read_node;
pub(crate) use observe::observe;
pub(crate) use rates::Rates;
pub(crate) use resource::resource_metrics;
pub(crate) use sample::NodeSample;
pub(crate) use summary::{Summary, summary};
pub(crate) use text::CONTENT_TYPE;

#[cfg(test)]
mod tests;
