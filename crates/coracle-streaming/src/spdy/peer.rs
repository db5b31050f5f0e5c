//! Client side of SPDY, for tests.

use bytes::{Bytes, BytesMut};
use flate2::{Compress, Compression, FlushCompress};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream};
use tokio_util::sync::CancellationToken;

use super::connection::{Incoming, serve};
use super::dictionary::DICTIONARY;
use super::frame::{Decoder, Frame, StreamId};
use super::header_block::{Headers, Inflater};
use crate::activity::Activity;
use crate::limits::Limits;
use crate::outbox::Outbox;

/// Compresses header blocks as clients do.
pub(crate) struct Deflater(Compress);

impl Deflater {
    pub(crate) fn new() -> Self {
        Self::with_level(Compression::best())
    }

    pub(crate) fn with_level(level: Compression) -> Self {
        let mut zlib = Compress::new(level, true);
        zlib.set_dictionary(&DICTIONARY).unwrap();
        Self(zlib)
    }

    /// Returns a block with `headers`.
    pub(crate) fn block(&mut self, headers: &[(String, String)]) -> Vec<u8> {
        self.raw(&Headers(headers.to_vec()).encode())
    }

    /// Returns a block with any content.
    pub(crate) fn raw(&mut self, plain: &[u8]) -> Vec<u8> {
        self.compress(plain, FlushCompress::Sync)
    }

    /// Returns a block that ends the zlib stream.
    pub(crate) fn finish_compression(&mut self) -> Vec<u8> {
        self.compress(&[0; 4], FlushCompress::Finish)
    }

    fn compress(&mut self, plain: &[u8], flush: FlushCompress) -> Vec<u8> {
        let mut out = Vec::with_capacity(2 * plain.len() + 100);
        let before = self.0.total_in();
        self.0.compress_vec(plain, &mut out, flush).unwrap();
        assert_eq!(self.0.total_in() - before, plain.len() as u64);
        out
    }
}

/// Serves `session` to the simulated `client`, until both return.
pub(crate) async fn serve_peer<S, C>(
    limits: Limits,
    session: impl FnOnce(Incoming, Outbox<Bytes>, Activity) -> S,
    client: impl FnOnce(Peer<DuplexStream>) -> C,
) -> C::Output
where
    S: Future<Output = ()>,
    C: Future,
{
    let (near, far) = tokio::io::duplex(1 << 20);
    let serving = serve(near, &limits, CancellationToken::new(), session);
    tokio::join!(serving, client(Peer::new(far))).1
}

/// Client of a connection.
pub(crate) struct Peer<C> {
    connection: C,
    input: BytesMut,
    decoder: Decoder,
    deflater: Deflater,
    inflater: Inflater,
}

impl<C: AsyncRead + AsyncWrite + Unpin> Peer<C> {
    pub(crate) fn new(connection: C) -> Self {
        let (decoder, inflater) = (Decoder::default(), Inflater::new());
        Self { connection, input: BytesMut::new(), decoder, deflater: Deflater::new(), inflater }
    }

    pub(crate) async fn send(&mut self, frame: Frame) {
        self.raw(&frame.encode()).await;
    }

    pub(crate) async fn raw(&mut self, bytes: &[u8]) {
        self.try_raw(bytes).await.unwrap();
    }

    pub(crate) async fn try_raw(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.connection.write_all(bytes).await
    }

    pub(crate) async fn data(&mut self, id: u32, fin: bool, payload: &'static [u8]) {
        self.send(Frame::Data { id: StreamId(id), fin, payload: Bytes::from_static(payload) }).await;
    }

    pub(crate) async fn open(&mut self, id: u32, headers: &[(&str, &str)]) {
        self.open_with(id, false, headers).await;
    }

    pub(crate) async fn open_with(&mut self, id: u32, fin: bool, headers: &[(&str, &str)]) {
        let headers: Vec<_> = headers.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        let block = self.deflater.block(&headers).into();
        self.send(Frame::SynStream { id: StreamId(id), fin, unidirectional: false, block }).await;
    }

    /// Returns the next frame as text; `None` at the end of the connection. Data are shown as text, the end of a stream as `.`.
    pub(crate) async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(frame) = self.decoder.next(&mut self.input).unwrap() {
                return Some(self.format_frame(frame));
            }
            self.input.reserve(1 << 16); // enough room for whole frames
            if self.connection.read_buf(&mut self.input).await.unwrap_or(0) == 0 {
                return None;
            }
        }
    }

    /// Panics unless the next frames equal `want`.
    pub(crate) async fn expect(&mut self, want: &[&str]) {
        for want in want {
            assert_eq!(self.next().await.as_deref(), Some(*want));
        }
    }

    /// Returns the frames until the end of the connection.
    pub(crate) async fn rest(&mut self) -> Vec<String> {
        let mut all = Vec::new();
        while let Some(frame) = self.next().await {
            all.push(frame);
        }
        all
    }

    fn format_frame(&mut self, frame: Frame) -> String {
        match frame {
            Frame::Data { id, fin, payload } => {
                let text = String::from_utf8_lossy(&payload);
                format!("{id}:{text}{}", if fin { "." } else { "" })
            }
            Frame::SynReply { id, block, .. } => {
                assert_eq!(self.inflater.headers(&block), Ok(Headers::default()));
                format!("reply {id}")
            }
            Frame::RstStream { id, status } => format!("reset {id} {status}"),
            Frame::Ping { id } => format!("ping {id}"),
            Frame::GoAway { last, status } => format!("goaway {last} {status}"),
            frame => format!("{frame:?}"),
        }
    }
}
