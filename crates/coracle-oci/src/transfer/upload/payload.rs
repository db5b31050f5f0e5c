//! Content of uploads: bytes in memory, or a file that is read while it is sent.

use std::{io::SeekFrom, path::PathBuf, sync::Arc};

use bytes::Bytes;
use futures_util::{Stream, StreamExt, TryStreamExt, stream};
use parking_lot::Mutex;
use reqwest::Body;
use tokio::{
    fs::File,
    io::{AsyncReadExt, AsyncSeekExt},
    time::Instant,
};
use tokio_util::io::ReaderStream;

use crate::OciError;

/// Size of one part of a body, bytes.
const PART_BYTES: usize = 512 << 10;

/// Callback that receives the number of bytes sent so far.
pub type SentBytes = Arc<dyn Fn(u64) + Send + Sync>;

/// Ignores sent bytes.
pub(super) fn ignore_progress() -> SentBytes {
    Arc::new(|_| {})
}

/// Content of a blob. It can be sent more than once.
#[derive(Clone, Debug)]
pub enum Payload {
    /// Bytes in memory.
    Bytes(Bytes),
    /// Part of a file.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Offset of the first byte.
        start: u64,
        /// Length of the part, bytes.
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

    /// Body of a request that sends the content from `offset` on.
    pub(super) async fn body(
        &self,
        offset: u64,
        sent: &SentBytes,
        activity: &Activity,
    ) -> Result<Body, OciError> {
        match self {
            Self::Bytes(bytes) => {
                let rest = bytes.slice(usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len())..);
                Ok(tracked_body(stream::iter(parts(rest)).map(Ok), offset, self.len(), sent, activity))
            }
            Self::File { path, start, bytes } => {
                let fail = |operation: &'static str| move |e| OciError::io(operation, path, e);
                let mut file = File::open(path).await.map_err(fail("open"))?;
                file.seek(SeekFrom::Start(start + offset)).await.map_err(fail("seek in"))?;
                let parts = ReaderStream::with_capacity(file.take(bytes - offset), PART_BYTES);
                Ok(tracked_body(parts, offset, self.len(), sent, activity))
            }
        }
    }
}

fn parts(mut rest: Bytes) -> impl Iterator<Item = Bytes> + Send {
    std::iter::from_fn(move || (!rest.is_empty()).then(|| rest.split_to(rest.len().min(PART_BYTES))))
}

fn tracked_body(
    parts: impl Stream<Item = std::io::Result<Bytes>> + Send + 'static,
    offset: u64,
    total: u64,
    sent: &SentBytes,
    activity: &Activity,
) -> Body {
    let (sent, activity, mut done) = (Arc::clone(sent), activity.clone(), offset);
    Body::wrap_stream(parts.inspect_ok(move |part| {
        done += part.len() as u64;
        activity.record(done >= total);
        sent(done);
    }))
}

/// Time of the last read from a body.
#[derive(Clone, Debug)]
pub(super) struct Activity(Arc<Mutex<(Instant, bool)>>);

impl Activity {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new((Instant::now(), false))))
    }

    fn record(&self, ended: bool) {
        *self.0.lock() = (Instant::now(), ended);
    }

    /// Time of the last read, and whether it was the end of the body.
    pub(super) fn last(&self) -> (Instant, bool) {
        *self.0.lock()
    }
}
