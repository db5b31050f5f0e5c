//! Virtual node: a Node of a cluster whose pods are VMs.

#[allow(dead_code, reason = "the node serves it")]
mod api;
mod options;
#[allow(dead_code, reason = "the API shows them")]
mod stats;
#[allow(dead_code, reason = "the API and the tasks of pods use it")]
mod table;
