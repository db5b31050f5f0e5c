//! The controllers on a real API server: with a real vCenter API (govmomi's simulator) and with the fake that can stop the
//! world at any call. Machines are claimed and given back by a simulated Agent provider, and VMs register by a simulated
//! guest.
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
