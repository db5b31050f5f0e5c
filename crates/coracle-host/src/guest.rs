//! A session with the agent inside a VM, over the one byte stream there is.
//!
//! The stream has no boundaries: a session begins with the agent's hello, and
//! the host says nothing before it has read it. A connection is used for one
//! session; it ends by `shutdown(2)`, which the guest sees at once.

use std::io;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

use coracle_hypervisor::{Driver, VmRecipe};
use coracle_proto::guest as pb;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::transport::{Channel, Endpoint};

/// First bytes of a hello; a session number of eight bytes follows.
const HELLO_MAGIC: &[u8; 8] = b"CORACLE1";

/// How much of a hello has begun anew where the next byte is not the one that was awaited after so many: the end of
/// `CORAC` may be the beginning of another one. The remains of a hello that was cut off are such a case.
const HELLO_AGAIN: [usize; 8] = [0, 0, 0, 0, 0, 1, 0, 0];

/// A running agent says hello within milliseconds; after this a new try is better.
const HELLO_LIMIT: Duration = Duration::from_millis(300);

/// The guest sees that the host is gone only when it stays away for a moment.
pub(crate) const GAP: Duration = Duration::from_millis(50);

/// Bytes of a dead session that may precede the hello.
const STALE_BYTES_MAX: usize = 4 << 20;

const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 1024 * 1024;

/// Largest message taken from a guest.
const MESSAGE_MAX: usize = 1 << 20;

/// Limit of a call that only asks.
pub(crate) const ASK_LIMIT: Duration = Duration::from_secs(10);

/// A session. Clones share it; the last one to go closes it.
#[derive(Clone, Debug)]
pub struct GuestClient {
    client: pb::guest_client::GuestClient<Channel>,
    hangup: Arc<Hangup>,
}

/// Closes the stream for sure: dropping a channel does so only when its task runs.
#[derive(Debug)]
struct Hangup(std::os::unix::net::UnixStream);

impl Drop for Hangup {
    fn drop(&mut self) {
        let _already_closed = self.0.shutdown(Shutdown::Both);
    }
}

impl GuestClient {
    /// Opens a session within `limit`, however often it must try: the guest may be
    /// booting, or an earlier session may be dying. The first try is on `channel` when
    /// there is one already. Cancel-safe.
    ///
    /// # Errors
    /// The last reason, when the limit is over.
    pub(crate) async fn open(
        driver: &dyn Driver,
        recipe: &VmRecipe,
        limit: Duration,
        mut channel: Option<UnixStream>,
    ) -> io::Result<Self> {
        let deadline = Instant::now() + limit;
        // A guest that boots needs one long wait; one that runs answers at once or after a gap.
        let mut patience = HELLO_LIMIT;
        loop {
            let patience_left = patience.min(deadline.saturating_duration_since(Instant::now()));
            let attempt = async {
                let stream = match channel.take() {
                    Some(stream) => stream,
                    // A guest that does not listen yet may keep it waiting.
                    None => match timeout_at(deadline, driver.guest_channel(recipe)).await {
                        Ok(opened) => opened.map_err(io::Error::other)?,
                        Err(_) => return Err(io::ErrorKind::TimedOut.into()),
                    },
                };
                Self::over(stream, patience_left).await
            };
            let why = match attempt.await {
                Ok(client) => return Ok(client),
                Err(why) => why,
            };
            if Instant::now() + GAP >= deadline {
                return Err(why);
            }
            sleep(GAP).await;
            patience = (patience * 2).min(Duration::from_secs(20));
        }
    }

    /// A session over an open channel, if the agent says hello within `limit`.
    async fn over(stream: UnixStream, limit: Duration) -> io::Result<Self> {
        let stream = stream.into_std()?;
        let hangup = Arc::new(Hangup(stream.try_clone()?));
        let mut stream = UnixStream::from_std(stream)?;
        timeout(limit, read_hello(&mut stream))
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "no hello from the guest agent"))??;
        let mut once = Some(TokioIo::new(stream));
        let connector = tower::service_fn(move |_| {
            let stream = once.take().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected));
            std::future::ready(stream)
        });
        let channel = Endpoint::from_static("http://guest")
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .connect_with_connector(connector)
            .await
            .map_err(io::Error::other)?;
        let client = pb::guest_client::GuestClient::new(channel).max_decoding_message_size(MESSAGE_MAX);
        Ok(Self { client, hangup })
    }

    /// Ends the session for all who share it; the guest sees that at once.
    pub(crate) fn close(&self) {
        let _already_closed = self.hangup.0.shutdown(Shutdown::Both);
    }

    /// The stub. Every call through it needs a deadline of the caller's.
    #[must_use]
    pub fn rpc(&self) -> pb::guest_client::GuestClient<Channel> {
        self.client.clone()
    }

    /// How far the guest has come.
    ///
    /// # Errors
    /// The guest's status, or `DEADLINE_EXCEEDED`.
    pub(crate) async fn status(&self) -> Result<pb::StatusResponse, tonic::Status> {
        within(ASK_LIMIT, self.rpc().status(pb::StatusRequest {})).await
    }
}

/// Runs a call with a deadline; running out of time is a status like any other.
pub(crate) async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, tonic::Status> {
    match timeout(limit, call).await {
        Ok(reply) => reply.map(tonic::Response::into_inner),
        Err(_) => Err(tonic::Status::deadline_exceeded(format!("no answer within {} ms", limit.as_millis()))),
    }
}

/// Passes over what a dead session left, up to and including a hello.
pub(crate) async fn read_hello(stream: &mut UnixStream) -> io::Result<u64> {
    let mut matched = 0;
    for _ in 0..STALE_BYTES_MAX {
        let byte = stream.read_u8().await?;
        while matched > 0 && HELLO_MAGIC[matched] != byte {
            matched = HELLO_AGAIN[matched];
        }
        matched += usize::from(HELLO_MAGIC[matched] == byte);
        if matched == HELLO_MAGIC.len() {
            return stream.read_u64().await;
        }
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "the guest talks, but says no hello"))
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test]
    async fn a_hello_is_found_behind_the_remains_of_a_session() {
        let (mut host, mut guest) = UnixStream::pair().unwrap();
        for remains in [&b"\0\0\x12CORAC"[..], b"", b"C", b"CORA", b"CORACORA", b"CORACLE"] {
            guest.write_all(&[remains, HELLO_MAGIC].concat()).await.unwrap();
            guest.write_u64(42).await.unwrap();
            assert_eq!(read_hello(&mut host).await.unwrap(), 42, "{remains:?}");
        }
    }

    #[tokio::test]
    async fn a_guest_that_only_talks_is_given_up() {
        let (mut host, mut guest) = UnixStream::pair().unwrap();
        let flood = async {
            let chunk = vec![b'x'; 1 << 16];
            while guest.write_all(&chunk).await.is_ok() {}
        };
        let outcome = tokio::select! {
            () = flood => unreachable!("the flood ends only with the host"),
            outcome = read_hello(&mut host) => outcome,
        };
        assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
