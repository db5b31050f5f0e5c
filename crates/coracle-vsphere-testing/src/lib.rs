//! vCenter in memory that implements the trait `Vsphere`, and a SOAP vCenter with scripted answers. Product crates must not
//! depend on them.

mod fake;
mod scripted;

pub use fake::{FakeFault, FakeVsphere};
pub use scripted::{ScriptedCall, ScriptedReply, ScriptedVcenter};
