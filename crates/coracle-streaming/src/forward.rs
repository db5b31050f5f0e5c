//! One forwarded connection.

use std::io;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional_with_sizes};

use crate::outbox::PAYLOAD_MAX;

/// A byte stream in both directions; shutting it down closes our half.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A connection to a port of a pod.
pub type Connection = Box<dyn Duplex>;

/// Opens connections to ports of a pod.
#[async_trait]
pub trait Dial: Send + Sync + 'static {
    /// Connects to `port`, which is not 0. The future is dropped when the client is gone; the implementer bounds its time.
    ///
    /// # Errors
    /// Text for the client, such as "connection refused".
    async fn dial(&self, port: u16) -> Result<Connection, String>;
}

/// Copies both ways until both halves are closed, and passes each half-close on.
///
/// # Errors
/// When either side fails; both should be closed then.
pub(crate) async fn copy<C>(client: &mut C, connection: &mut Connection) -> io::Result<()>
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    copy_bidirectional_with_sizes(client, connection, PAYLOAD_MAX, PAYLOAD_MAX).await.map(|_lengths| ())
}
