//! Faults and resource usage of a guest's kernel, as shown by `/proc`: the guest agent reports them to the host, which cannot see
//! them.

pub mod stuck;
pub mod timer;
pub mod usage;
