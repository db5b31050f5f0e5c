//! SPDY connection: reads frames into streams, writes the queue of its streams, and closes in order.

use std::io;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::frame::{Decoder, Frame, FrameError, GoAway, Reset, StreamId};
use super::header_block::{BlockError, EmptyBlocks, Inflater};
use super::stream::{Pending, Remote};
use super::table::{Arrival, Table};
use crate::activity::Activity;
use crate::limits::Limits;
use crate::outbox::{self, Full, Outbox, Queue};

/// Bytes that are read at a time. Go's client writes the fields of a frame one by one.
const READ: usize = 64 << 10;

/// Error that ends a connection before its session.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("cannot read frame")]
    Read(#[source] io::Error),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Block(#[from] BlockError),
    #[error(transparent)]
    Unread(#[from] Full),
}

/// Streams that the client requests; ends when the client opens no more.
pub(crate) type Incoming = mpsc::Receiver<Pending>;

/// Serves a connection from its first frame to its end. The future of `session` is dropped when the client disconnects; it must
/// return soon after [`Activity::wait_for_interruption`].
pub(crate) async fn serve<C, F>(
    connection: C,
    limits: &Limits,
    stop: CancellationToken,
    session: impl FnOnce(Incoming, Outbox<Bytes>, Activity) -> F,
) where
    C: AsyncRead + AsyncWrite,
    F: Future<Output = ()>,
{
    let (read, write) = tokio::io::split(connection);
    let (outbox, queue) = outbox::channel();
    let activity = Activity::new(limits.idle, stop);
    let (opened, incoming) = mpsc::channel(limits.streams_max.max(1));
    let last = Arc::new(Mutex::new(StreamId(0)));
    let reader = Reader {
        decoder: Decoder::default(),
        inflater: Inflater::new(),
        table: Table::new(limits.streams_max),
        outbox: outbox.clone(),
        blocks: Arc::default(),
        opened: Some(opened),
        last: Arc::clone(&last),
        activity: activity.clone(),
        input_max: limits.input_max,
    };
    let mut reader = std::pin::pin!(reader.run(read));
    let mut writer = std::pin::pin!(write_all(queue, write, &activity));
    let (reading, status) = tokio::select! {
        result = &mut reader => match result {
            // The client disconnected: the output has no reader.
            Ok(()) | Err(ConnectionError::Read(_)) => return,
            Err(error) => {
                tracing::debug!(error = %error, "SPDY connection failed");
                (false, GoAway::Protocol)
            }
        },
        _failed = &mut writer => return,
        () = session(incoming, outbox.clone(), activity.clone()) => (true, GoAway::Ok),
    };
    outbox.control(Frame::GoAway { last: *last.lock(), status: status as u32 }.encode());
    outbox.close();
    // Reading continues, because the kernel would reset a connection with unread input and destroy output that the client has
    // not read yet.
    let closed = async {
        if reading {
            let _either = reader.await;
        } else {
            std::future::pending::<()>().await;
        }
    };
    let written = async {
        let Ok(Ok(mut write)) = timeout(limits.last_message, writer).await else { return };
        if reading {
            activity.linger_until_quiet(limits.linger).await;
        }
        let _either = timeout(limits.last_message, write.shutdown()).await;
    };
    tokio::select! {
        () = closed => {}
        () = written => {}
    }
}

/// Writes the queue until its end.
async fn write_all<C: AsyncWrite>(
    mut queue: Queue<Bytes>,
    mut connection: WriteHalf<C>,
    activity: &Activity,
) -> io::Result<WriteHalf<C>> {
    let mut joined = Vec::new();
    while let Some(frames) = queue.next().await {
        if let [frame] = frames.as_slice() {
            connection.write_all(frame).await?;
        } else {
            joined.clear();
            frames.iter().for_each(|frame| joined.extend_from_slice(frame));
            connection.write_all(&joined).await?;
        }
        connection.flush().await?;
        activity.touch();
    }
    Ok(connection)
}

/// Reader of a connection.
struct Reader {
    decoder: Decoder,
    inflater: Inflater,
    table: Table<Remote>,
    outbox: Outbox<Bytes>,
    blocks: Arc<Mutex<EmptyBlocks>>,
    /// `None` after GOAWAY.
    opened: Option<mpsc::Sender<Pending>>,
    /// Last stream that was admitted.
    last: Arc<Mutex<StreamId>>,
    activity: Activity,
    input_max: usize,
}

impl Reader {
    /// Reads until the client closes the connection. Reading pauses while the input buffer of a stream is full.
    async fn run<C: AsyncRead>(mut self, mut connection: ReadHalf<C>) -> Result<(), ConnectionError> {
        let mut input = BytesMut::new();
        loop {
            while let Some(frame) = self.decoder.next(&mut input)? {
                self.take(frame).await?;
            }
            input.reserve(READ);
            if connection.read_buf(&mut input).await.map_err(ConnectionError::Read)? == 0 {
                return Ok(());
            }
            self.activity.touch();
        }
    }

    async fn take(&mut self, frame: Frame) -> Result<(), ConnectionError> {
        match frame {
            Frame::Data { id, fin, payload } => self.data(id, fin, &payload).await?,
            Frame::SynStream { id, fin, unidirectional, block } => {
                self.outbox.check()?;
                self.open(id, fin, unidirectional, &block)?;
            }
            // Ignored blocks must be inflated, too, because they change the state of the compression.
            Frame::SynReply { block, .. } => drop(self.inflater.headers(&block)?),
            Frame::Headers { id, fin, block } => {
                self.inflater.headers(&block)?;
                if fin {
                    self.data(id, fin, b"").await?;
                }
            }
            Frame::RstStream { id, .. } => self.close(id),
            // An even id is the reply to a ping of the server, which sends none.
            Frame::Ping { id } if id % 2 == 1 => {
                self.outbox.check()?;
                self.outbox.control(Frame::Ping { id }.encode());
            }
            Frame::Ping { .. } => {}
            Frame::GoAway { .. } => self.opened = None,
        }
        Ok(())
    }

    async fn data(&mut self, id: StreamId, fin: bool, payload: &[u8]) -> Result<(), ConnectionError> {
        match self.table.arrival(id) {
            Arrival::Deliver(remote) => {
                if let Some(input) = &mut remote.input {
                    // Data of a stream without a reader are discarded.
                    let _either = input.write_all(payload).await;
                }
                if fin {
                    remote.input = None;
                    self.table.remote_end(id);
                }
            }
            Arrival::Discard => {}
            Arrival::Answer(status) => {
                self.outbox.check()?;
                self.reset_stream(id, status);
            }
        }
        Ok(())
    }

    fn open(
        &mut self,
        id: StreamId,
        fin: bool,
        unidirectional: bool,
        block: &[u8],
    ) -> Result<(), BlockError> {
        let headers = self.inflater.headers(block)?;
        if let Err(status) = self.table.admit(id) {
            self.reset_stream(id, status);
            return Ok(());
        }
        *self.last.lock() = id;
        let (pending, mut remote) = Pending::new(id, headers, self.input_max, &self.outbox, &self.blocks);
        if fin {
            remote.input = None;
        }
        self.table.insert(id, remote, fin);
        // No known client opens a stream without output.
        if unidirectional {
            pending.refuse(Reset::Refused);
        } else if let Some(opened) = &self.opened {
            // A dropped stream is refused: the session accepts no more streams, or has ended.
            let _refused = opened.try_send(pending);
        }
        Ok(())
    }

    fn close(&mut self, id: StreamId) {
        if let Some(remote) = self.table.close(id) {
            remote.reset();
        }
    }

    /// Resets a stream with this status, open or not.
    fn reset_stream(&mut self, id: StreamId, status: Reset) {
        self.close(id);
        self.outbox.control(Frame::RstStream { id, status: status as u32 }.encode());
    }
}

impl Drop for Reader {
    /// Resets all streams when the connection ends: writers fail, and readers see the end.
    fn drop(&mut self) {
        self.table.streams().for_each(Remote::reset);
    }
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
