//! Words that every crate of coracle shares: ids, sizes, addresses and states.
//! Nothing here does I/O; everything refuses bad input when it is parsed.

mod id;
mod mac;
mod size;
mod state;
mod time;

pub use id::{Identity, InvalidVmName, VmId, VmName};
pub use mac::{InvalidMac, MacAddr};
pub use size::{InvalidMemory, InvalidVcpus, MemoryMib, Vcpus};
pub use state::{Op, Refused, VmState};
pub use time::{Clock, UnixMillis};
