//! A vCenter in memory behind the trait `Vsphere`, and one by SOAP whose answers a test writes. No product crate may depend on
//! them.

mod fake;
mod scripted;

pub use fake::{FakeFault, FakeVsphere};
pub use scripted::{ScriptedCall, ScriptedReply, ScriptedVcenter};
