//! The WebSocket forms: channels in messages, and SPDY inside of messages.
//!
//! ```text
//! messages ─▶ channel (pure) ─▶ connection ─▶ session · port_forward        messages ─▶ tunnel ─▶ spdy
//! ```

pub(crate) mod channel;
mod connection;
pub(crate) mod port_forward;
pub(crate) mod session;
pub(crate) mod tunnel;

use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

/// Longest message of a client, in bytes. Clients send 32 KiB; base64 makes a third more of the 1 MiB that others may.
const MESSAGE_MAX: usize = 2 << 20;
/// Bytes that are read at a time. Of the library's default of 128 KiB each connection would allocate all.
const READ: usize = 16 << 10;

fn config() -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(READ)
        .max_message_size(Some(MESSAGE_MAX))
        .max_frame_size(Some(MESSAGE_MAX))
}
