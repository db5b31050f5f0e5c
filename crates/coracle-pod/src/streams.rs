//! Exec, attach and port-forward of containers in VMs: what [`coracle_streaming`] runs for a client, over the session with
//! the guest agent.
//!
//! When the client is gone the future is dropped, and with it the call to the guest: the process of an exec is hung up on
//! and soon killed, an attached container continues, and a forwarded connection is closed.

mod copy;
mod forward;
mod session;

pub use forward::PortDialer;
pub use session::{AttachSession, ExecSession};
