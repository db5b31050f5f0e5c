//! Tests of the controllers with a real API server, and either a real vCenter API (govmomi's simulator) or the fake vCenter
//! that can halt all calls. A simulated Agent provider claims and releases Agents for Machines, and a simulated guest registers
//! VMs.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod bad;
mod burst;
mod crash;
mod image;
mod iso;
mod isolation;
mod life;
mod objects;
mod pools;
mod safety;
mod sim_crash;
mod sims;
mod trouble;
mod world;
