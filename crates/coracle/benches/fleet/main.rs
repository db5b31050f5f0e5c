//! `cargo xtask bench fleet`: ten thousand MikromVMs on three nodes with VMMs in memory.
//!
//! The operator is the real program. Each node is a process of this program, with the host core, the host service by mutual TLS
//! and the Lease of a real node. Figures of a quiet minute are differences to a minute without VMs.

#[path = "../support/fake_node.rs"]
mod fake_node;
mod load;
mod node;
mod pki;

use coracle_testkit::cluster;

fn main() {
    if fake_node::serve_guests() {
        return;
    }
    let _the_only_one = rustls::crypto::aws_lc_rs::default_provider().install_default();
    match node::Settings::of_this_process() {
        Some(settings) => node::serve(&settings),
        None => cluster::run_within(load::LIMIT, load::measure),
    }
}
