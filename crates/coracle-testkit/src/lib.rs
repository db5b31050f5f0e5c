//! Peers for tests: tools, network namespaces, a control plane, images, simulations, leak inventory.
//!
//! No product binary links this crate. Each part is usable on its own:
//!
//! ```text
//! tools ──▶ netns::run (a namespace a test) ──▶ cluster::run (one control plane a test binary)
//! oci   (images from literals)                   leaks (before and after, as text)
//! figures (output of benchmarks)               gate, spoil (cut connections, damaged archives)
//! sim (API server, network and clock in memory)  wire (frames of guests, taps, captures)
//! world (what API tests of controllers share)    eventually, elapse
//! ```

#[cfg(feature = "cluster")]
pub mod cluster;
mod eventually;
pub mod figures;
#[cfg(feature = "cluster")]
mod front_proxy;
pub mod gate;
pub mod leaks;
#[cfg(feature = "netns")]
pub mod netns;
pub mod oci;
pub mod postgres;
pub mod registry;
pub mod s3;
#[cfg(feature = "sim")]
pub mod sim;
pub mod spoil;
pub mod tools;
pub mod vcsim;
#[cfg(feature = "netns")]
pub mod wire;
#[cfg(any(feature = "cluster", feature = "sim"))]
pub mod world;

pub use eventually::{
    LIMIT, elapse, eventually, eventually_blocking, eventually_ok_within, eventually_within,
};

/// Type that a test body may return: `()`, or a result whose error fails the test.
pub trait TestResult {
    /// Panics with the error, if there is one.
    fn settle(self);
}

impl TestResult for () {
    fn settle(self) {}
}

impl<E: std::fmt::Debug> TestResult for Result<(), E> {
    #[expect(clippy::panic, reason = "this is how a test fails")]
    fn settle(self) {
        if let Err(error) = self {
            panic!("{error:?}");
        }
    }
}
