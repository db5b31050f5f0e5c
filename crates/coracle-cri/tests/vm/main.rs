//! Tests of critest that need a guest, on real VMs. Tests that do not change their sandbox share one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod churn;
mod container;
mod disk;
mod pod;
mod sandbox;
mod security;
mod streaming;
mod support;
mod user_namespace;

use std::time::Duration;

use coracle_testkit::netns;

use crate::pod::run_rows;
use crate::support::Node;

/// Time limit of one group of tests, on a machine without KVM.
const LIMIT: Duration = Duration::from_secs(420);

#[test]
fn cri_container_cases_pass_on_a_vm() {
    netns::run_within(LIMIT, || async {
        let Some(node) = Node::new().await else { return };
        let daemon = node.open().await;
        let pod = daemon.pod("containers").await;
        run_rows(&pod, container::rows()).await;
        daemon.end().await;
    });
}

#[test]
fn cri_security_context_cases_pass_on_a_vm() {
    netns::run_within(LIMIT, || async {
        let Some(node) = Node::new().await else { return };
        let daemon = node.open().await;
        let pod = daemon.pod("security").await;
        run_rows(&pod, security::rows()).await;
        daemon.end().await;
    });
}

#[test]
fn cri_user_namespace_cases_pass_on_a_vm() {
    netns::run_within(LIMIT, || async {
        let Some(node) = Node::new().await else { return };
        let daemon = node.open().await;
        let pod = user_namespace::pod(&daemon).await;
        run_rows(&pod, user_namespace::rows()).await;
        daemon.end().await;
    });
}

#[test]
fn cri_streaming_cases_pass_on_a_vm() {
    netns::run_within(LIMIT, || async {
        let Some(node) = Node::new().await else { return };
        let daemon = node.open().await;
        let pod = daemon.pod("streaming").await;
        run_rows(&pod, streaming::rows()).await;
        daemon.end().await;
    });
}

#[test]
fn disk_pod_runs_a_command_in_its_guest() {
    netns::run_within(Duration::from_secs(900), || async {
        let Some(node) = Node::new().await else { return };
        let daemon = node.open().await;
        disk::disk_pod_passes(&daemon).await;
        daemon.end().await;
    });
}

#[test]
fn disk_pod_pushes_its_disk_as_an_image() {
    netns::run_within(Duration::from_secs(900), || async {
        let Some(node) = Node::new().await else { return };
        let daemon = node.open().await;
        disk::disk_pod_becomes_an_image(&daemon).await;
        daemon.end().await;
    });
}

#[test]
fn churn_of_pods_leaves_nothing() {
    netns::run_within(Duration::from_secs(3600), || async {
        let Some(node) = Node::new().await else { return };
        churn::pods_leave_nothing(&node).await;
    });
}

#[test]
fn cri_sandbox_cases_pass_on_vms() {
    netns::run_within(LIMIT, || async {
        let Some(node) = Node::new().await else { return };
        let daemon = node.open().await;
        sandbox::rows_pass(&daemon, &node).await;
        daemon.end().await;
    });
}
