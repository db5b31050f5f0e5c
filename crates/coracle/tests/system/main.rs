//! Tests of the binary as users run it. One test program, because each links most of the product.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod bad_input;
mod cli;
mod cocoon;
mod cocoon_suspend;
mod crash_node;
mod credentials;
mod image_build;
mod installation;
mod kubelet;
mod market;
mod metrics_server;
mod nginx;
mod planes;
mod pod_system;
mod pod_tools;
mod pod_users;
mod pods_outage;
mod push_layout;
mod registry;
mod registry_kill;
mod registry_peers;
mod routes;
mod support;
mod up;
mod virtual_node;
mod vm_inputs;
mod vm_snapshots;
