//! A vCenter in memory behind the trait `Vsphere`, for tests. No product crate may depend on it.

mod fake;

pub use fake::{FakeFault, FakeVsphere};
