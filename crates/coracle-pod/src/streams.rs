//! Exec, attach and port-forward of containers in VMs: the handlers that [`coracle_streaming`] runs for a client, over the
//! session with the guest agent.
//!
//! When the client disconnects, the future is dropped, and with it the call to the guest: the process of an exec gets SIGHUP
//! and is soon killed, an attached container continues, and a forwarded connection is closed.

mod copy;
mod forward;
mod session;

pub use forward::PortDialer;
pub use session::{AttachSession, ExecSession};
