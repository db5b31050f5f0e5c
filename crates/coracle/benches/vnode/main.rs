//! `cargo xtask bench vnode`: cost of pods on a virtual node.
//!
//! A thousand pods run on the fake driver, in a node that this program serves as a process of its own against a real API
//! server, with the fake guests in another process. Starts, exec, logs and port-forward use the real program and QEMU, through
//! the API server and the scheduler; exec also uses the kubelet API of the node. They are compared with a cold boot of the same
//! run. The argument `fake` or `real` selects one of the two parts.

mod fake;
#[path = "../support/fake_node.rs"]
mod fake_node;
#[path = "../../src/daemon/memory.rs"]
mod memory;
#[path = "../support/node.rs"]
mod node;
mod pods;
mod real;
mod streams;
#[path = "../support/system.rs"]
mod system;

use std::time::{Duration, Instant};

use coracle_testkit::netns;

fn main() {
    if fake_node::serve_guests() {
        return;
    }
    let _the_only_one = rustls::crypto::aws_lc_rs::default_provider().install_default();
    if let Some(dir) = std::env::var_os(fake::DIR) {
        fake::serve(dir.into());
        return;
    }
    let is_wanted = |part: &str| {
        let mut parts = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).peekable();
        parts.peek().is_none() || parts.any(|arg| arg == part)
    };
    if is_wanted("real") {
        netns::run_within(Duration::from_secs(2400), || async {
            let dir = tempfile::tempdir().expect("a temporary directory");
            real::measure(&dir.path().join("real")).await;
        });
    }
    if is_wanted("fake") {
        fake::measure();
    }
}

fn ms_since(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1000.0
}
