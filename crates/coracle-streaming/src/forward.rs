//! Copies the data of one forwarded connection.

use std::io;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite, copy, copy_bidirectional_with_sizes, split};

use crate::outbox::PAYLOAD_MAX;

/// Byte stream in both directions. Shutting it down closes the local half.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// Connection to a port of a pod.
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

/// Copies in both directions until both halves are closed, and forwards each half-close.
///
/// # Errors
/// When either side fails; both should be closed then.
pub(crate) async fn copy_both<C>(client: &mut C, connection: &mut Connection) -> io::Result<()>
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    copy_bidirectional_with_sizes(client, connection, PAYLOAD_MAX, PAYLOAD_MAX).await.map(|_lengths| ())
}

/// Copies in both directions until the pod closes its half. For clients that cannot close their half, and that notice the
/// half-close of the pod only by the end of the connection.
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
