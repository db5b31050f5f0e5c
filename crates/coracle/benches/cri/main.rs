//! `cargo xtask bench cri`: latencies that a kubelet sees.
//!
//! Starts, bursts and ExecSync use the real program and QEMU over its socket, and are compared with a cold boot of the same
//! run. Lists, memory and statistics use 500 and 50 pods on the fake driver, which this program serves as a process of its own,
//! and the fake guests as another.

mod fake;
#[path = "../support/fake_node.rs"]
mod fake_node;
#[path = "../support/kubelet.rs"]
mod kubelet;
mod real;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use coracle_testkit::netns;

fn main() {
    if fake_node::serve_guests() {
        return;
    }
    if let Some(dir) = std::env::var_os(fake::DIR) {
        fake::serve(PathBuf::from(dir));
        return;
    }
    netns::run_within(Duration::from_secs(1800), || async {
        let dir = tempfile::tempdir().expect("a temporary directory");
        real::measure(&dir.path().join("real")).await;
        fake::measure(&dir.path().join("fake")).await;
    });
}

fn ms_since(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1000.0
}
