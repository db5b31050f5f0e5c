//! One forwarded connection.

use std::io;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite, copy, copy_bidirectional_with_sizes, split};

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
pub(crate) async fn copy_both<C>(client: &mut C, connection: &mut Connection) -> io::Result<()>
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    copy_bidirectional_with_sizes(client, connection, PAYLOAD_MAX, PAYLOAD_MAX).await.map(|_lengths| ())
}

/// Copies both ways until the pod closed its half, for a client that cannot close its own, and learns of the pod's by the
/// end of the whole.
///
/// # Errors
/// When either side fails.
pub(crate) async fn copy_until_served(
    mut input: impl AsyncRead + Unpin,
    mut output: impl AsyncWrite + Unpin,
    connection: Connection,
) -> io::Result<()> {
    let (mut from, mut to) = split(connection);
    let sending = async {
        copy(&mut input, &mut to).await?;
        std::future::pending::<io::Result<()>>().await
    };
    tokio::select! {
        received = copy(&mut from, &mut output) => received.map(|_length| ()),
        failed = sending => failed,
    }
}
