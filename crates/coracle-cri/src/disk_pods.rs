//! Disk pods: pods whose only container is a VM that boots a disk image.
//!
//! ```text
//! sandbox    a VM record that never starts: it has the address, the ports and the name of the pod
//! container  a VM record of its own over the disk image, with the address of the sandbox; one for each attempt
//!            Created ─StartContainer─▶ its VMM runs: Running ─ agent answers ─▶ command ─ exit ─▶ off: Exited
//! ```
//! Changes of the disk are removed with the container. A task attends each VM from its start to the last line of its log.

mod attend;
mod containers;
mod ports;

pub(crate) use ports::DiskPorts;
