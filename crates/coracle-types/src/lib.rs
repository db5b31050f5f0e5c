//! Vocabulary of all crates: ids, sizes, addresses, states and the clock.
//! No I/O; bad input is refused when it is parsed.

mod expand;
mod id;
mod id_mapping;
mod mac;
mod rootfs_layout;
mod size;
mod state;
mod time;

pub use expand::expand;
pub use id::{Identity, InstanceId, InvalidVmName, VmId, VmName};
pub use id_mapping::{IdMapping, InvalidIdMapping};
pub use mac::{InvalidMac, MacAddr};
pub use rootfs_layout::RootfsLayout;
pub use size::{InvalidMemory, InvalidVcpus, MemoryMib, SizeClass, Vcpus};
pub use state::{Op, Refused, VmState};
pub use time::{Clock, UnixMillis};
