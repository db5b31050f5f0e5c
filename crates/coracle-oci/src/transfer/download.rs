//! Downloads of blobs: into memory, or into a file that a later download resumes.

use std::{
    fs::File,
    io::{self, Read, Seek, Write},
    path::PathBuf,
};

use reqwest::{Response, StatusCode, header::CONTENT_RANGE};
use tokio::task::spawn_blocking;

use super::Attempts;
use crate::{Digest, Hasher, OciError, Session};

/// Bytes buffered before they are written to the file.
const BATCH_BYTES: usize = 1 << 20;
/// Largest buffer allocated for a blob before its first byte arrives: the usual size of a disk chunk.
const RESERVED_BYTES_MAX: u64 = 64 << 20;
/// Bytes that an attempt must transfer to restore the full number of attempts.
const HEADWAY_BYTES: u64 = 1 << 20;

/// Fetches a small blob into memory and verifies it.
///
/// # Errors
/// [`OciError::DigestMismatch`], [`OciError::Hostile`]; those of the registry.
pub async fn fetch_bytes(session: &Session, digest: &Digest, size_bytes: u64) -> Result<Vec<u8>, OciError> {
    session
        .retry(|| async {
            let response = session.blob(digest, 0).await?;
            let bytes = session.body(response, size_bytes, "configuration").await?;
            let actual = Digest::with(digest.algorithm(), &bytes);
            if actual != *digest {
                return Err(OciError::digest_mismatch("configuration", *digest, actual));
            }
            Ok(bytes)
        })
        .await
}

/// Fetches a blob into memory without verifying it. Resumes after an interruption. For callers that verify the unpacked
/// content: hashing both would take longer than the rest of a pull.
///
/// # Errors
/// [`OciError::Hostile`] for a blob longer than `size_bytes`; those of the registry.
pub async fn fetch_unverified(
    session: &Session,
    digest: &Digest,
    size_bytes: u64,
) -> Result<Vec<u8>, OciError> {
    let reserved = usize::try_from(size_bytes.min(RESERVED_BYTES_MAX)).unwrap_or(0);
    let bytes = tokio::sync::Mutex::new(Vec::with_capacity(reserved));
    session
        .retry(|| async {
            let mut bytes = bytes.lock().await;
            let mut response = session.blob(digest, bytes.len() as u64).await?;
            if response.status() != StatusCode::PARTIAL_CONTENT {
                bytes.clear();
            }
            while let Some(part) = response.chunk().await.map_err(|e| session.network("read blob", e))? {
                bytes.extend_from_slice(&part);
                if bytes.len() as u64 > size_bytes {
                    return Err(too_long(digest, size_bytes));
                }
            }
            match bytes.len() as u64 == size_bytes {
                true => Ok(()),
                false => Err(session.network("read blob", "the response ended early")),
            }
        })
        .await?;
    Ok(bytes.into_inner())
}

/// File that receives a blob.
#[derive(Debug)]
pub struct BlobFile<G = ()> {
    /// File, open for reading and writing. Existing content is taken as the beginning of the blob.
    pub file: File,
    /// Path for error messages.
    pub path: PathBuf,
    /// Lock on the file, held until the last write has ended: a cancelled download writes its last batch in the background.
    pub guard: G,
}

/// Fetches a blob into a file and verifies it. Resumes from the content of an earlier download; if that content is wrong,
/// fetches the blob once more from its beginning. Returns the file, positioned at its beginning. Reports the bytes so far to
/// `received`. Cancel-safe: received bytes stay in the file.
///
/// # Errors
/// [`OciError::DigestMismatch`] and [`OciError::Hostile`] for wrong bytes; the file is empty after the first of them.
/// [`OciError::StorageFull`], [`OciError::Io`]; those of the registry.
pub async fn fetch_file<G: Send + 'static>(
    session: &Session,
    digest: &Digest,
    size_bytes: u64,
    to: BlobFile<G>,
    received: &(dyn Fn(u64) + Send + Sync),
) -> Result<File, OciError> {
    let mut download = Download::open(*digest, size_bytes, to).await?;
    let is_resumed = download.received_bytes() > 0;
    let mut result = download.run(session, received).await;
    if matches!(result, Err(OciError::DigestMismatch { .. })) {
        download.restart().await?;
        if is_resumed {
            // A crash may have damaged the bytes of the earlier download: download once more from the beginning.
            result = download.run(session, received).await;
            if matches!(result, Err(OciError::DigestMismatch { .. })) {
                download.restart().await?;
            }
        }
    }
    result?;
    download.finish().await
}

/// Unfinished download.
struct Download<G> {
    digest: Digest,
    size_bytes: u64,
    /// State; `None` only while a blocking thread works on it, or after a cancelled write.
    state: Option<State<G>>,
}

struct State<G> {
    to: BlobFile<G>,
    hasher: Hasher,
}

impl<G: Send + 'static> Download<G> {
    /// Hashes the content of the file.
    async fn open(digest: Digest, size_bytes: u64, to: BlobFile<G>) -> Result<Self, OciError> {
        let state = Some(State { to, hasher: digest.hasher() });
        let mut download = Self { digest, size_bytes, state };
        download.on_file("read", move |state| state.hash_content(digest, size_bytes)).await?;
        Ok(download)
    }

    fn received_bytes(&self) -> u64 {
        self.state.as_ref().map_or(0, |state| state.hasher.bytes())
    }

    /// Runs `work` on a blocking thread, which keeps the file and its guard until `work` returns.
    async fn on_file<T: Send + 'static>(
        &mut self,
        operation: &'static str,
        work: impl FnOnce(&mut State<G>) -> io::Result<T> + Send + 'static,
    ) -> Result<T, OciError> {
        let mut state = self.state.take().expect("a download is not used after a cancelled call");
        let joined = spawn_blocking(move || {
            let result = work(&mut state);
            (state, result)
        });
        let (state, result) = match joined.await {
            Ok(done) => done,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // Only a runtime that shuts down cancels blocking work, and such a runtime polls no future again.
                Err(_) => std::future::pending().await,
            },
        };
        let result = result.map_err(|e| OciError::io(operation, state.to.path.clone(), e));
        self.state = Some(state);
        result
    }

    /// Empties the file.
    async fn restart(&mut self) -> Result<(), OciError> {
        let digest = self.digest;
        self.on_file("truncate", move |state| state.restart(digest)).await
    }

    async fn append(&mut self, mut batch: Vec<u8>) -> Result<Vec<u8>, OciError> {
        self.on_file("write", move |state| {
            state.to.file.write_all(&batch)?;
            state.hasher.update(&batch);
            batch.clear();
            Ok(batch)
        })
        .await
    }

    /// Repeats attempts until the file has all bytes, then verifies the digest.
    async fn run(
        &mut self,
        session: &Session,
        received: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), OciError> {
        let mut attempts = Attempts::new(session);
        loop {
            let before = self.received_bytes();
            let Err(error) = self.attempt(session, received).await else { return self.verify() };
            if self.received_bytes() >= before + HEADWAY_BYTES {
                attempts.reset();
            }
            attempts.after(error).await?;
        }
    }

    /// Makes one request, starting at the end of the file.
    async fn attempt(
        &mut self,
        session: &Session,
        received: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), OciError> {
        if self.received_bytes() == self.size_bytes {
            return Ok(());
        }
        let response = session.blob(&self.digest, self.received_bytes()).await;
        if matches!(response, Err(OciError::Registry { status: 416, .. })) {
            self.restart().await?;
            return Err(session.network("resume blob", "the registry does not accept the range"));
        }
        let mut response = response?;
        if !is_from_offset(&response, self.received_bytes()) {
            self.restart().await?;
            if response.status() != StatusCode::OK {
                return Err(session.network("resume blob", "the registry sent another range"));
            }
        }
        let mut batch = Vec::with_capacity(BATCH_BYTES);
        let ended = loop {
            match response.chunk().await {
                Ok(Some(part)) => batch.extend_from_slice(&part),
                Ok(None) => break Ok(()),
                Err(error) => break Err(session.network("read blob", error)),
            }
            if self.received_bytes() + batch.len() as u64 > self.size_bytes {
                return Err(too_long(&self.digest, self.size_bytes));
            }
            if batch.len() >= BATCH_BYTES {
                batch = self.append(batch).await?;
                received(self.received_bytes());
            }
        };
        self.append(batch).await?;
        received(self.received_bytes());
        ended?;
        self.check_end(session)
    }

    /// Distinguishes a broken connection from a blob whose announced size is wrong.
    fn check_end(&self, session: &Session) -> Result<(), OciError> {
        let (have, size) = (self.received_bytes(), self.size_bytes);
        if have == size {
            return Ok(());
        }
        if self.actual_digest() == Some(self.digest) {
            let digest = self.digest;
            return Err(OciError::hostile(format!(
                "blob {digest} has {have} bytes, but was announced with {size}"
            )));
        }
        Err(session.network("read blob", "the response ended early"))
    }

    fn actual_digest(&self) -> Option<Digest> {
        self.state.as_ref().map(|state| state.hasher.clone().finish())
    }

    fn verify(&self) -> Result<(), OciError> {
        match self.actual_digest() {
            Some(actual) if actual != self.digest => {
                Err(OciError::digest_mismatch("blob", self.digest, actual))
            }
            _ => Ok(()),
        }
    }

    async fn finish(mut self) -> Result<File, OciError> {
        self.on_file("rewind", |state| {
            state.to.file.rewind()?;
            state.to.file.try_clone()
        })
        .await
    }
}

impl<G> State<G> {
    fn restart(&mut self, digest: Digest) -> io::Result<()> {
        self.to.file.set_len(0)?;
        self.to.file.rewind()?;
        self.hasher = digest.hasher();
        Ok(())
    }

    /// Hashes the content and leaves the file at its end. A file longer than the blob is emptied: it cannot be the blob's
    /// beginning.
    fn hash_content(&mut self, digest: Digest, size_bytes: u64) -> io::Result<()> {
        if self.to.file.metadata()?.len() > size_bytes {
            return self.restart(digest);
        }
        self.to.file.rewind()?;
        let mut buffer = vec![0; BATCH_BYTES];
        loop {
            match self.to.file.read(&mut buffer)? {
                0 => return Ok(()),
                n => self.hasher.update(&buffer[..n]),
            }
        }
    }
}

fn too_long(digest: &Digest, size_bytes: u64) -> OciError {
    OciError::hostile(format!("blob {digest} is larger than the {size_bytes} bytes it was announced with"))
}

/// True when the response begins at `offset`.
fn is_from_offset(response: &Response, offset: u64) -> bool {
    if response.status() != StatusCode::PARTIAL_CONTENT {
        return offset == 0;
    }
    let range = response.headers().get(CONTENT_RANGE).and_then(|v| v.to_str().ok());
    let start = range.and_then(|r| r.strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok());
    start == Some(offset)
}
