//! Virtual node: a Node of a cluster whose pods are VMs.

mod options;
#[allow(dead_code, reason = "the API and the tasks of pods use it")]
mod table;
