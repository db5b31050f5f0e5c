//! Storage of bytes: a narrow trait with two implementations, files and an object store.

pub(crate) mod files;
pub(crate) mod s3;

use std::fmt::Debug;
use std::ops::Range;
use std::time::Duration;

use async_trait::async_trait;
use axum::body::Body;
use bytes::Bytes;
use http_body_util::BodyExt;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use crate::error::StoreError;
use crate::upload_id::UploadId;
use coracle_oci::{Digest, Hasher};

/// Request body that is appended to an upload.
pub(crate) struct Incoming {
    pub(crate) body: Body,
    /// Offset in the upload, bytes.
    pub(crate) offset: u64,
    /// Length that the client announced.
    pub(crate) length: Option<u64>,
    /// Largest allowed length.
    pub(crate) room: u64,
    /// Longest wait for the next byte.
    pub(crate) idle: Duration,
    /// Hasher that has processed the bytes before `offset`.
    pub(crate) hasher: Hasher,
}

/// How a body ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Whole,
    /// The client disconnected or sent less than announced.
    Cut,
    /// The client was idle or slow for too long.
    Slow,
    /// The body was longer than the limit or the announced length.
    TooLong,
}

/// Synced state of an upload after a body was appended.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) offset: u64,
    pub(crate) hasher: Hasher,
    pub(crate) ended: Ended,
}

/// Storage of bytes by name. Every write is synced when it returns. Every operation is idempotent.
#[async_trait]
pub(crate) trait Storage: Send + Sync + Debug {
    /// Creates an empty upload.
    async fn begin(&self, id: &UploadId) -> Result<(), StoreError>;
    /// Streams a body to the end of an upload. Received bytes stay, even when the client disconnects.
    async fn append(&self, id: &UploadId, incoming: Incoming) -> Result<Taken, StoreError>;
    /// Length of an upload, and its hash. `None` when the upload does not exist.
    async fn rehash(&self, id: &UploadId, hasher: Hasher) -> Result<Option<(u64, Hasher)>, StoreError>;
    /// Turns a verified upload into the blob `digest`. `Ok` when the blob exists already.
    async fn seal(&self, id: &UploadId, digest: &Digest) -> Result<(), StoreError>;
    /// Removes an upload.
    async fn discard(&self, id: &UploadId) -> Result<(), StoreError>;
    /// All uploads.
    async fn uploads(&self) -> Result<Vec<UploadId>, StoreError>;

    /// Part of a blob. `None` when the blob does not exist.
    async fn read(&self, digest: &Digest, part: Range<u64>) -> Result<Option<Body>, StoreError>;
    /// Size of a blob, bytes. `None` when the blob does not exist.
    async fn size(&self, digest: &Digest) -> Result<Option<u64>, StoreError>;
    /// Removes a blob.
    async fn remove(&self, digest: &Digest) -> Result<(), StoreError>;
    /// All blobs with their sizes.
    async fn blobs(&self) -> Result<Vec<(Digest, u64)>, StoreError>;

    /// Key of the manifest that a tag names.
    fn tag_key(&self, repository: &str, tag: &str) -> String;
    /// Writes a small object atomically.
    async fn put(&self, key: &str, bytes: Bytes) -> Result<(), StoreError>;
    /// Reads a small object.
    async fn get(&self, key: &str) -> Result<Option<Bytes>, StoreError>;
    /// Removes a small object.
    async fn delete(&self, key: &str) -> Result<(), StoreError>;
    /// Keys of all manifests and tags.
    async fn manifests(&self) -> Result<Vec<String>, StoreError>;
    /// True when other processes may use the same storage.
    fn is_shared(&self) -> bool {
        false
    }
}

/// Key of a manifest.
pub(crate) fn manifest_key(repository: &str, digest: &Digest) -> String {
    format!("manifests/{repository}/_digests/{}-{}.json", digest.algorithm().name(), digest.hex())
}

/// Minimum rate of a client over the idle time, bytes per second.
const RATE_MIN: f64 = 128.0;

/// Moves a body into the queue until it ends, is cut off, is too slow, or is too long.
pub(crate) async fn pump(
    mut body: Body,
    length: Option<u64>,
    room: u64,
    idle: Duration,
    frames: mpsc::Sender<Bytes>,
) -> Ended {
    let (mut seen, mut window) = (0, (Instant::now(), 0.0));
    loop {
        let frame = match timeout(idle, body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(None) if length.is_none_or(|length| seen == length) => return Ended::Whole,
            Ok(Some(Err(_)) | None) => return Ended::Cut,
            Err(_) => return Ended::Slow,
        };
        let Ok(data) = frame.into_data() else { continue };
        seen += data.len() as u64;
        if seen > length.unwrap_or(room).min(room) {
            return Ended::TooLong;
        }
        window.1 += f64::from(u32::try_from(data.len()).unwrap_or(u32::MAX));
        if frames.send(data).await.is_err() {
            return Ended::Cut; // the writer has failed and reports the error itself
        }
        let (since, bytes) = window;
        if since.elapsed() > idle {
            if bytes < RATE_MIN * since.elapsed().as_secs_f64() {
                return Ended::Slow;
            }
            window = (Instant::now(), 0.0);
        }
    }
}
