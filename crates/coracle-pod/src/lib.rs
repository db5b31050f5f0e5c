//! Pods in VMs: the work of a kubelet for a pod, on top of the containers of the host core.
//!
//! All decisions are pure: [`plan::plan`] takes a snapshot of a pod, of its VM and containers, and of the time, and returns the
//! steps, the status, and the time of the next plan. This crate never calls the API server and never launches a VMM:
//! [`runtime::PodRuntime`] and [`runtime::PodObject`] are the ports for both.
//!
//! ```text
//! pod, objects, containers, probes, now ─▶ plan ─▶ steps ─▶ PodRuntime (the host core)
//!        ▲                                  └────▶ status, events ─▶ PodObject (the API server)
//!        └──────────── changes ◀──────────────────────┘
//! ```

pub mod bandwidth;
pub mod container_spec;
pub mod declared;
pub mod env;
pub mod events;
mod execute;
pub mod fields;
mod hook;
pub mod host;
mod image_keys;
mod members;
pub mod network;
pub mod node;
pub mod objects;
pub mod observed;
mod outcome;
pub mod plan;
mod plan_builder;
pub mod probe;
mod pull_secrets;
pub mod reason;
pub mod resources;
pub mod runtime;
mod status;
pub mod step;
pub mod streams;
pub mod task;
pub mod time;
pub mod volume;

pub use image_keys::{ImageKeys, NamespaceKeys};
