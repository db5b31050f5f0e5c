//! The agent inside every VM. PID 1 of a machine whose root is a container
//! image: it mounts the root, configures the machine, runs the image's command
//! and serves the host over one virtio-serial port (`guest-channel.md`).
//!
//! It calls nobody, speaks no TLS and keeps nothing on disk. A panic here is a
//! kernel panic, so no input may cause one: every request is checked and
//! bounded, and the image is hostile ([`Root`]).
//!
//! ```text
//! boot ──▶ unconfigured ──Configure──▶ configured ──StartWorkload──▶ running ──▶ exited
//!             └─ templates are taken here                 Shutdown, from anywhere ──▶ off
//! ```

mod agent;
pub mod channel;
mod configure;
mod console;
mod copy;
mod disks;
mod error;
mod exec;
mod folder;
mod forward;
mod furniture;
mod host_keys;
mod logs;
mod metrics;
mod modules;
mod mounts;
mod net;
pub mod pid1;
mod pipe;
mod process;
mod program;
mod pumped;
mod reap;
mod rehearsal;
mod root;
mod service;
pub mod session;
mod shutdown;
mod sys;
pub mod system;
mod user;
mod volumes;
pub mod vsock;
mod workload;

pub use agent::Agent;
pub use error::Error;
pub use pumped::Pumped;
pub use root::Root;
