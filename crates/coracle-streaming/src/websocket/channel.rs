//! Messages with a channel: its number, then data. Pure.

use crate::status::Form;

/// How a channel and its data are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coding {
    /// A byte, then the data.
    Binary,
    /// A digit, then base64.
    Base64,
}

/// Variant of the remote command protocol on WebSocket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Variant {
    pub(crate) coding: Coding,
    pub(crate) form: Form,
    /// The client can close a channel: v5.
    pub(crate) half_close: bool,
}
