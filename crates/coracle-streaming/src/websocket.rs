//! The WebSocket forms: channels in messages, and SPDY inside of messages.
//!
//! ```text
//! messages ─▶ channel (pure) ─▶ session · port_forward        messages ─▶ tunnel ─▶ spdy
//! ```

pub(crate) mod channel;
