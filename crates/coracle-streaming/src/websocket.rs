//! WebSocket protocols: channels in messages, and SPDY inside messages.
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

/// Most bytes of a client's message. Clients send 32 KiB; 1 MiB, which other clients may send, grows by a third in base64.
const MESSAGE_MAX: usize = 2 << 20;
/// Bytes that are read at a time. Each connection would allocate the library's default of 128 KiB.
const READ: usize = 16 << 10;

fn config() -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(READ)
        .max_message_size(Some(MESSAGE_MAX))
        .max_frame_size(Some(MESSAGE_MAX))
}
