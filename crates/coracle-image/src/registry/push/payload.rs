//! What is uploaded: bytes in memory, or a file that is read as it goes.

use std::{
    io::SeekFrom,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use futures_util::{Stream, StreamExt, TryStreamExt, stream};
use reqwest::Body;
use tokio::{
    fs::File,
    io::{AsyncReadExt, AsyncSeekExt},
    time::Instant,
};
use tokio_util::io::ReaderStream;

use crate::ImageError;

/// Bytes of one piece of a body.
const PIECE: usize = 512 << 10;

/// Hears how many bytes of a blob are with the registry or on their way.
pub(crate) type Sent = Arc<dyn Fn(u64) + Send + Sync>;

/// Hears nothing.
pub(super) fn unheard() -> Sent {
    Arc::new(|_| {})
}

/// A blob that can be sent more than once.
#[derive(Clone, Debug)]
pub(crate) enum Payload {
    Bytes(Bytes),
    /// So many bytes of a file from `start` on.
    File {
        path: PathBuf,
        start: u64,
        bytes: u64,
    },
}

impl Payload {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::File { bytes, .. } => *bytes,
        }
    }

    /// What is behind `offset`.
    pub(super) async fn body(&self, offset: u64, sent: &Sent, pulse: &Pulse) -> Result<Body, ImageError> {
        match self {
            Self::Bytes(bytes) => {
                let rest = bytes.slice(usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len())..);
                Ok(watched(stream::iter(pieces(rest)).map(Ok), offset, self.len(), sent, pulse))
            }
            Self::File { path, start, bytes } => {
                let fail = |operation: &'static str| move |e| ImageError::io(operation, path, e);
                let mut file = File::open(path).await.map_err(fail("open"))?;
                file.seek(SeekFrom::Start(start + offset)).await.map_err(fail("seek in"))?;
                let pieces = ReaderStream::with_capacity(file.take(bytes - offset), PIECE);
                Ok(watched(pieces, offset, self.len(), sent, pulse))
            }
        }
    }
}

fn pieces(mut rest: Bytes) -> impl Iterator<Item = Bytes> + Send {
    std::iter::from_fn(move || (!rest.is_empty()).then(|| rest.split_to(rest.len().min(PIECE))))
}

fn watched(
    pieces: impl Stream<Item = std::io::Result<Bytes>> + Send + 'static,
    offset: u64,
    total: u64,
    sent: &Sent,
    pulse: &Pulse,
) -> Body {
    let (sent, pulse, mut done) = (Arc::clone(sent), pulse.clone(), offset);
    Body::wrap_stream(pieces.inspect_ok(move |piece| {
        done += piece.len() as u64;
        pulse.beat(done >= total);
        sent(done);
    }))
}

/// When a body last moved.
#[derive(Clone, Debug)]
pub(super) struct Pulse(Arc<Mutex<(Instant, bool)>>);

impl Pulse {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new((Instant::now(), false))))
    }

    fn beat(&self, ended: bool) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (Instant::now(), ended);
    }

    /// When, and whether it was the end.
    pub(super) fn last(&self) -> (Instant, bool) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
