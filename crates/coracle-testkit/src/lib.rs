//! Real peers for tests: tools, network namespaces, a control plane, images, and the look at what was left behind.
//!
//! Nothing here is linked into a product binary. Three layers, each of use alone:
//!
//! ```text
//! tools ──▶ netns::run (a namespace a test) ──▶ cluster::run (one control plane a test binary)
//! oci   (images made of nothing)                 leaks (before and after, as text)
//! figures (what benchmarks print)              gate, spoil (connections cut, archives made wrong)
//! ```

#[cfg(feature = "cluster")]
pub mod cluster;
pub mod figures;
pub mod gate;
pub mod leaks;
#[cfg(feature = "netns")]
pub mod netns;
pub mod oci;
pub mod postgres;
pub mod registry;
pub mod s3;
pub mod spoil;
pub mod tools;
pub mod vcsim;

/// What a test body may return: nothing, or a result whose error fails the test.
pub trait Outcome {
    /// Panics with the error, if there is one.
    fn settle(self);
}

impl Outcome for () {
    fn settle(self) {}
}

impl<E: std::fmt::Debug> Outcome for Result<(), E> {
    #[expect(clippy::panic, reason = "this is how a test fails")]
    fn settle(self) {
        if let Err(error) = self {
            panic!("{error:?}");
        }
    }
}
