//! Parts of programs that stand in for a VMM where the real one cannot be had: a guest behind a vsock socket, and the
//! HTTP server of its API.

mod guest;
pub mod server;
pub mod view;

pub use self::guest::Guest;
