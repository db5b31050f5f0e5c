//! Stream of a SPDY connection, as its session uses it.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::DuplexStream;
use tokio_util::sync::CancellationToken;

use super::frame::{Frame, Reset, StreamId, data};
use super::header_block::{EmptyBlocks, Headers};
use super::table::{Half, Local};
use crate::outbox::{Encode, Ender, Outbox, Output};

/// Encoding of a stream's data as data frames.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataFrames(pub(crate) StreamId);

impl Encode for DataFrames {
    type Message = Bytes;

    fn data(&self, payload: &[u8]) -> Bytes {
        data(self.0, false, payload)
    }

    fn end(&self) -> Option<Bytes> {
        Some(data(self.0, true, b""))
    }
}

/// Part of an open stream that the reader of the connection keeps.
#[derive(Debug)]
pub(crate) struct Remote {
    /// Input buffer for the client's data; `None` after its end.
    pub(crate) input: Option<DuplexStream>,
    ender: Ender<DataFrames>,
}

impl Remote {
    /// Marks the stream as reset by the client or as disconnected.
    pub(crate) fn reset(&self) {
        self.ender.reset_token().cancel();
    }
}

impl Half for Remote {
    fn local(&self) -> Local {
        if self.ender.reset_token().is_cancelled() {
            Local::Reset
        } else if self.ender.is_ended() {
            Local::Ended
        } else {
            Local::Open
        }
    }
}

/// Stream that the client requests. Dropping it refuses it.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) id: StreamId,
    pub(crate) headers: Headers,
    /// `None` after the stream was accepted or refused.
    parts: Option<(DuplexStream, Ender<DataFrames>)>,
    outbox: Outbox<Bytes>,
    blocks: Arc<Mutex<EmptyBlocks>>,
}

impl Pending {
    /// Returns a stream with `headers`, and its part for the reader of the connection. At most `input_max` bytes of input are
    /// buffered.
    pub(crate) fn new(
        id: StreamId,
        headers: Headers,
        input_max: usize,
        outbox: &Outbox<Bytes>,
        blocks: &Arc<Mutex<EmptyBlocks>>,
    ) -> (Self, Remote) {
        let (near, far) = tokio::io::duplex(input_max);
        let ender = Ender::new(DataFrames(id), outbox.clone(), CancellationToken::new());
        let remote = Remote { input: Some(near), ender: ender.clone() };
        let parts = Some((far, ender));
        (Self { id, headers, parts, outbox: outbox.clone(), blocks: Arc::clone(blocks) }, remote)
    }

    /// Confirms the stream to the client. `None` if the client has reset it.
    pub(crate) fn accept(mut self) -> Option<Stream> {
        let (input, ender) = self.parts.take()?;
        if ender.reset_token().is_cancelled() {
            return None;
        }
        // Sent under the lock, because the compression requires the blocks in the order of the queue.
        let mut blocks = self.blocks.lock();
        self.outbox.control(Frame::SynReply { id: self.id, fin: false, block: blocks.next_block() }.encode());
        Some(Stream { id: self.id, input, output: Output::new(ender) })
    }

    /// Resets the stream.
    pub(crate) fn refuse(mut self, status: Reset) {
        self.reset(status);
    }

    fn reset(&mut self, status: Reset) {
        if let Some((_, ender)) = self.parts.take() {
            reset(&ender, &self.outbox, self.id, status);
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.reset(Reset::Refused);
    }
}

fn reset(ender: &Ender<DataFrames>, outbox: &Outbox<Bytes>, id: StreamId, status: Reset) {
    if !ender.reset_token().is_cancelled() {
        ender.reset_token().cancel();
        outbox.control(Frame::RstStream { id, status: status as u32 }.encode());
    }
}

/// Open stream. Its input ends when the client ends its half, resets the stream or disconnects. Dropping the stream ends its
/// output.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) id: StreamId,
    pub(crate) input: DuplexStream,
    pub(crate) output: Output<DataFrames>,
}

impl Stream {
    /// Closes both halves at once.
    pub(crate) fn reset(self, status: Reset) {
        let ender = self.output.end_handle();
        reset(&ender, ender.outbox(), self.id, status);
    }

    /// Returns a token that is cancelled when the stream is reset.
    pub(crate) fn reset_token(&self) -> CancellationToken {
        self.output.end_handle().reset_token().clone()
    }
}
