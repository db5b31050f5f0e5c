//! Uploads: started, appended to in order, and finished once with a digest.
//!
//! Acknowledged bytes are on disk. The hash so far is kept in memory. After a restart or on another replica, it is computed
//! from the bytes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::http::{StatusCode, header};
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::OwnedMutexGuard;
use tokio::time::{sleep, timeout};

use crate::error::{Code, ErrorResponse, StoreError};
use crate::meta::{Arrival, Linked};
use crate::registry::Registry;
use crate::storage::{Ended, Incoming, Taken};
use crate::upload_id::UploadId;
use coracle_oci::{Algorithm, Digest, Hasher, RepositoryName};

/// Limit of uploads whose hash is kept in memory. For others, the bytes are read again.
const UPLOADS_IN_MEMORY_MAX: usize = 4096;
/// Longest wait for another request that uses the same upload.
const TURN: Duration = Duration::from_secs(5);
/// Longest interval after which an upload that is being written updates its time.
const SIGN_OF_LIFE: Duration = Duration::from_secs(60);
/// Longest wait of a finished upload for a sweep of the same blob, and the interval between attempts.
const SWEEP: (Duration, Duration) = (Duration::from_secs(10), Duration::from_millis(20));

/// Progress of an upload. `None` when it is not known in this process.
pub(crate) type UploadProgress = Option<Reached>;

/// Length and hash of an upload, and the time in its row at that moment. Work of another replica changes that time.
#[derive(Clone, Debug)]
pub(crate) struct Reached {
    bytes: u64,
    hasher: Hasher,
    updated: i64,
}

/// Uploads known to this process. Only one request at a time uses an upload.
#[derive(Debug, Default)]
pub(crate) struct Sessions(Mutex<HashMap<UploadId, Arc<tokio::sync::Mutex<UploadProgress>>>>);

impl Sessions {
    async fn lock_upload(&self, id: &UploadId) -> Result<OwnedMutexGuard<UploadProgress>, ErrorResponse> {
        let session = {
            let mut all = self.0.lock();
            if all.len() >= UPLOADS_IN_MEMORY_MAX {
                all.retain(|_, session| Arc::strong_count(session) > 1);
            }
            Arc::clone(all.entry(id.clone()).or_default())
        };
        timeout(TURN, session.lock_owned()).await.map_err(|_| {
            ErrorResponse::new(Code::Unavailable, "another request uses this upload")
                .header(header::RETRY_AFTER, "1")
        })
    }

    /// Takes the session of an upload. `None` when another request uses it.
    pub(crate) fn idle(&self, id: &UploadId) -> Option<OwnedMutexGuard<UploadProgress>> {
        let session = {
            let mut all = self.0.lock();
            Arc::clone(all.entry(id.clone()).or_default())
        };
        session.try_lock_owned().ok()
    }

    pub(crate) fn forget(&self, id: &UploadId) {
        self.0.lock().remove(id);
    }
}

/// Request body with the values of its headers.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) body: Body,
    pub(crate) length: Option<u64>,
    /// First and last byte of `Content-Range`.
    pub(crate) range: Option<(u64, u64)>,
}

impl Chunk {
    fn is_empty(&self) -> bool {
        self.length == Some(0) || self.body.is_end_stream()
    }
}

fn unknown() -> ErrorResponse {
    ErrorResponse::new(Code::BlobUploadUnknown, "upload not found in this repository")
}

/// Location of an upload.
pub(crate) fn location(repo: &RepositoryName, id: &UploadId) -> String {
    format!("/v2/{repo}/blobs/uploads/{id}")
}

/// `Range` header of an upload. An empty upload has no last byte; `0-0` is customary.
pub(crate) fn range(bytes: u64) -> String {
    format!("0-{}", bytes.saturating_sub(1))
}

impl Registry {
    /// Starts an upload.
    pub(crate) async fn begin_upload(&self, repo: &RepositoryName) -> Result<UploadId, ErrorResponse> {
        let id = UploadId::random();
        // Creates the row first: a file without a row is garbage.
        let updated = self.now();
        self.meta.begin_upload(&id, repo, updated).await?;
        self.storage.begin(&id).await?;
        let hasher = Hasher::new(Algorithm::Sha256);
        *self.sessions.lock_upload(&id).await? = Some(Reached { bytes: 0, hasher, updated });
        Ok(id)
    }

    /// Length of an upload, bytes.
    pub(crate) async fn upload_size(
        &self,
        repo: &RepositoryName,
        id: &UploadId,
    ) -> Result<u64, ErrorResponse> {
        let mut progress = self.lock_upload(repo, id).await?;
        let (size, _) = self.progress(id, &mut progress).await?;
        Ok(size)
    }

    /// Appends a chunk. Returns the length of the upload.
    pub(crate) async fn append(
        &self,
        repo: &RepositoryName,
        id: &UploadId,
        chunk: Chunk,
    ) -> Result<u64, ErrorResponse> {
        let mut progress = self.lock_upload(repo, id).await?;
        self.take(repo, id, &mut progress, chunk).await
    }

    /// Appends the last chunk, verifies the digest, and turns the upload into a blob of the repository.
    pub(crate) async fn finish(
        &self,
        repo: &RepositoryName,
        id: &UploadId,
        chunk: Chunk,
        digest: &Digest,
    ) -> Result<(), ErrorResponse> {
        let mut progress = self.lock_upload(repo, id).await?;
        if !chunk.is_empty() {
            self.take(repo, id, &mut progress, chunk).await?;
        }
        let (size, hasher) = self.progress(id, &mut progress).await?;
        if let Some(reached) = progress.as_mut() {
            reached.updated = self.touch(id, reached.updated).await?;
        }
        let actual = match digest.algorithm() {
            Algorithm::Sha256 => hasher.finish(),
            other => {
                let read = self.storage.rehash(id, Hasher::new(other)).await?;
                read.ok_or_else(unknown)?.1.finish()
            }
        };
        if actual != *digest {
            self.end(id).await?;
            return Err(ErrorResponse::new(Code::DigestInvalid, "the content does not have the digest")
                .detail(json!({"digest": digest.to_string(), "actual": actual.to_string()})));
        }
        self.place(repo, id, digest, size).await?;
        self.metrics.count_uploaded(size);
        self.sessions.forget(id);
        Ok(self.meta.end_upload(id).await?)
    }

    /// Removes an upload.
    pub(crate) async fn cancel(&self, repo: &RepositoryName, id: &UploadId) -> Result<(), ErrorResponse> {
        let _lock = self.lock_upload(repo, id).await?;
        self.end(id).await
    }

    async fn end(&self, id: &UploadId) -> Result<(), ErrorResponse> {
        self.storage.discard(id).await?;
        self.meta.end_upload(id).await?;
        self.sessions.forget(id);
        Ok(())
    }

    async fn lock_upload(
        &self,
        repo: &RepositoryName,
        id: &UploadId,
    ) -> Result<OwnedMutexGuard<UploadProgress>, ErrorResponse> {
        let mut progress = self.sessions.lock_upload(id).await?;
        let known = self.meta.upload(id).await?;
        let row = known.filter(|row| row.repo == repo.as_str()).ok_or_else(unknown)?;
        if progress.as_ref().is_some_and(|reached| reached.updated != row.updated) {
            *progress = None;
        }
        Ok(progress)
    }

    async fn progress(
        &self,
        id: &UploadId,
        progress: &mut UploadProgress,
    ) -> Result<(u64, Hasher), ErrorResponse> {
        if let Some(reached) = progress {
            return Ok((reached.bytes, reached.hasher.clone()));
        }
        let updated = self.meta.upload(id).await?.ok_or_else(unknown)?.updated;
        let read = self.storage.rehash(id, Hasher::new(Algorithm::Sha256)).await?;
        let (bytes, hasher) = read.ok_or_else(unknown)?;
        *progress = Some(Reached { bytes, hasher: hasher.clone(), updated });
        Ok((bytes, hasher))
    }

    async fn take(
        &self,
        repo: &RepositoryName,
        id: &UploadId,
        progress: &mut UploadProgress,
        chunk: Chunk,
    ) -> Result<u64, ErrorResponse> {
        let (offset, hasher) = self.progress(id, progress).await?;
        check_range(repo, id, offset, &chunk)?;
        let room = self.room(repo, offset).await?;
        if chunk.length.is_some_and(|length| length > room) {
            return Err(too_large());
        }
        let idle = self.limits.body_idle;
        let incoming = Incoming { body: chunk.body, offset, length: chunk.length, room, idle, hasher };
        let before = progress.as_ref().map_or(0, |reached| reached.updated);
        // After an error the length of the file is unknown.
        *progress = None;
        let mut updated = self.touch(id, before).await?;
        let taken = match self.write(id, incoming, &mut updated).await {
            Ok(taken) => taken,
            Err(error) => {
                // Frees the space for other uploads.
                if error.is_full() {
                    self.end(id).await?;
                }
                return Err(error.into());
            }
        };
        let updated = self.touch(id, updated).await?;
        *progress = Some(Reached { bytes: taken.offset, hasher: taken.hasher, updated });
        match taken.ended {
            Ended::Whole => Ok(taken.offset),
            Ended::Cut => Err(ErrorResponse::new(Code::SizeInvalid, "the body ended before its length")
                .header(header::RANGE, &range(taken.offset))),
            Ended::Slow => Err(ErrorResponse::new(Code::BlobUploadInvalid, "the body came too slowly")
                .status(StatusCode::REQUEST_TIMEOUT)),
            Ended::TooLong => Err(too_large()),
        }
    }

    /// Writes a body. Meanwhile updates the time of the upload, so that the sweep of another replica does not remove it.
    async fn write(&self, id: &UploadId, incoming: Incoming, updated: &mut i64) -> Result<Taken, StoreError> {
        let every = (self.limits.upload_age / 4).clamp(Duration::from_millis(1), SIGN_OF_LIFE);
        let mut writing = self.storage.append(id, incoming);
        loop {
            match timeout(every, &mut writing).await {
                Ok(taken) => return taken,
                // Ignored: the error appears again at the end.
                Err(_) => *updated = self.touch(id, *updated).await.unwrap_or(*updated),
            }
        }
    }

    /// Records that a request works on an upload. Each call increases the time, even within one millisecond, so that other
    /// replicas notice.
    async fn touch(&self, id: &UploadId, before: i64) -> Result<i64, ErrorResponse> {
        let updated = self.now().max(before.saturating_add(1));
        match self.meta.touch_upload(id, updated).await? {
            true => Ok(updated),
            false => Err(unknown()),
        }
    }

    /// Bytes that may still be appended to an upload.
    async fn room(&self, repo: &RepositoryName, offset: u64) -> Result<u64, ErrorResponse> {
        let mut room = self.limits.upload_bytes.saturating_sub(offset);
        let all = match self.limits.quota {
            Some(quota) => Some((quota, self.used().await?)),
            None => None,
        };
        let own = match self.limits.repository_quota {
            Some(quota) => Some((quota, self.meta.used_by(repo).await?)),
            None => None,
        };
        for (quota, used) in all.into_iter().chain(own) {
            let used = u64::try_from(used).unwrap_or(0).saturating_add(offset);
            let left = quota.saturating_sub(used);
            if left == 0 {
                return Err(over_quota());
            }
            room = room.min(left);
        }
        Ok(room)
    }

    /// Size of all blobs, at most some seconds old.
    async fn used(&self) -> Result<i64, StoreError> {
        if let Some(used) = self.used.get(self.now()) {
            return Ok(used);
        }
        let used = self.meta.used().await?;
        self.used.set(used, self.now());
        Ok(used)
    }

    /// Gives verified bytes their name, and enters the blob into the repository. Exceeding a quota ends the upload.
    async fn place(
        &self,
        repo: &RepositoryName,
        id: &UploadId,
        digest: &Digest,
        size: u64,
    ) -> Result<(), ErrorResponse> {
        let fits = self.fits(repo, digest, size).await?;
        let arrival = if fits { self.announce(digest, size).await? } else { Arrival::Full };
        self.used.forget();
        if arrival == Arrival::Full {
            self.end(id).await?;
            return Err(over_quota());
        }
        let same = arrival == Arrival::Exists && self.storage.size(digest).await? == Some(size);
        match same {
            true => self.storage.discard(id).await?,
            false => self.storage.seal(id, digest).await?,
        }
        match self.meta.confirm(repo, digest, self.now(), self.limits.repository_quota).await? {
            Linked::Done => Ok(()),
            Linked::Absent => Err(StoreError::Dying { digest: digest.to_string() }.into()),
            Linked::Full => {
                self.end(id).await?;
                Err(over_quota())
            }
        }
    }

    /// Announces a blob, and waits while the sweep removes the same blob.
    async fn announce(&self, digest: &Digest, size: u64) -> Result<Arrival, StoreError> {
        let size = i64::try_from(size).unwrap_or(i64::MAX);
        let announced = timeout(SWEEP.0, async {
            loop {
                match self.meta.announce(digest, size, self.now(), self.limits.quota).await? {
                    Arrival::Wait => sleep(SWEEP.1).await,
                    arrival => return Ok(arrival),
                }
            }
        });
        announced.await.unwrap_or_else(|_| Err(StoreError::Dying { digest: digest.to_string() }))
    }

    /// Early check of the repository's quota, which avoids unreachable blobs. The exact check follows when the blob is entered.
    async fn fits(&self, repo: &RepositoryName, digest: &Digest, size: u64) -> Result<bool, StoreError> {
        let Some(quota) = self.limits.repository_quota else { return Ok(true) };
        if self.meta.has_link(repo, digest).await? {
            return Ok(true);
        }
        let own = self.meta.used_by(repo).await?;
        Ok(u64::try_from(own).unwrap_or(0).saturating_add(size) <= quota)
    }
}

/// Response when a quota is exceeded.
pub(crate) fn over_quota() -> ErrorResponse {
    ErrorResponse::new(Code::Denied, "quota exceeded")
}

fn too_large() -> ErrorResponse {
    ErrorResponse::new(Code::SizeInvalid, "the upload is larger than the registry allows")
        .status(StatusCode::PAYLOAD_TOO_LARGE)
}

/// Checks that a chunk starts at the end of the last one and has the announced length.
fn check_range(
    repo: &RepositoryName,
    id: &UploadId,
    offset: u64,
    chunk: &Chunk,
) -> Result<(), ErrorResponse> {
    let Some((first, last)) = chunk.range else { return Ok(()) };
    let length = last.checked_sub(first).map(|n| n + 1);
    if first == offset && length.is_some() && chunk.length.is_none_or(|said| Some(said) == length) {
        return Ok(());
    }
    Err(ErrorResponse::new(Code::BlobUploadInvalid, "the chunk does not begin where the upload ends")
        .status(StatusCode::RANGE_NOT_SATISFIABLE)
        .header(header::RANGE, &range(offset))
        .header(header::LOCATION, &location(repo, id)))
}
