//! Guest agent of every VM. In a VM of a container image it is PID 1: it mounts the root, configures the guest, runs the
//! image's command and serves the host over a virtio-serial port (docs/reference/guest-channel.md) or a vsock. In a VM of a
//! disk image it is a service.
//!
//! The agent opens no connections, has no TLS and keeps no state on disk. A panic of PID 1 is a kernel panic, so no input may
//! cause one: every request is validated and bounded, and the image is hostile ([`Root`]).
//!
//! ```text
//! boot ──▶ unconfigured ──Configure──▶ configured ──StartWorkload──▶ running ──▶ exited
//!             └─ templates are taken here              Shutdown, in any state ──▶ off
//! ```

mod agent;
mod base_mounts;
mod cgroup;
pub mod channel;
mod configure;
mod console;
mod containers;
mod copy;
mod disks;
mod early;
mod error;
mod exec;
mod exit;
mod forward;
mod host_keys;
mod logs;
mod metrics;
mod modules;
mod mounts;
mod net;
pub mod pid1;
mod pipe;
mod pit;
mod process;
mod reset;
mod sandbox;
mod service;
pub mod session;
mod shared_dir;
mod shutdown;
mod start;
mod sys;
pub mod system;
mod task_stream;
mod volumes;
pub mod vsock;
mod workload;

use coracle_rootfs as rootfs;

pub use agent::Agent;
pub use coracle_rootfs::Root;
pub use error::Error;
pub use modules::modprobe;
pub use task_stream::TaskStream;
