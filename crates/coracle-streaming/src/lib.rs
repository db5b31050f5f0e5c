//! Server side of kubectl's exec, attach and port-forward: SPDY/3.1, WebSocket v1/v4/v5, and the port-forward tunnel.
//!
//! ```text
//! request ─▶ handshake (pure) ─▶ 400 · 403
//!                 └─▶ 101, a task of `Tasks`:
//!                      spdy       frame, header_block (pure) ─▶ table (pure) ─▶ connection ─▶ session · port_forward
//!                      websocket  channel (pure) ─▶ connection ─▶ session · port_forward;  tunnel: SPDY in messages
//! both sessions ─▶ run: the process on its streams, sizes     outbox: what a connection sends, in order and bounded
//! both port-forwards ─▶ forward: one connection               tokens: single-use paths
//! ```
//!
//! Sources: SPDY draft 3.1 as Kubernetes' clients use it, RFC 6455, streaming protocols of `k8s.io/apimachinery` and
//! `k8s.io/kubelet`. This crate never runs a process, dials a port, authenticates, or buffers without a bound.

mod activity;
mod client;
mod forward;
#[doc(hidden)]
pub mod fuzz;
mod handshake;
mod limits;
mod outbox;
mod resize;
mod run;
mod serve;
mod session;
mod spdy;
mod status;
mod tasks;
mod tokens;
mod websocket;

pub use client::Handshake;
pub use forward::{Connection, Dial, Duplex};
pub use limits::Limits;
pub use serve::{Body, serve_port_forward, serve_session, serve_tunnel};
pub use session::{Reader, RunSession, Session, SessionOutcome, Streams, TerminalSize, Writer};
pub use tasks::Tasks;
pub use tokens::{Token, Tokens, TooMany};
pub use websocket::tunnel::Tunnel;
