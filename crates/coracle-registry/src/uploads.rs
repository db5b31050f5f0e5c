//! Uploads: begun, appended to in order, finished once with a digest.
//!
//! What a client was told to be there is on disk. The hash so far is kept in memory; after a restart, or on another
//! replica, it is made again from the bytes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::http::{StatusCode, header};
use serde_json::json;
use tokio::sync::OwnedMutexGuard;
use tokio::time::{sleep, timeout};

use crate::digest::{Algorithm, Digest, Hasher};
use crate::error::{Code, Problem, StoreError};
use crate::meta::Arrival;
use crate::names::{RepositoryName, UploadId};
use crate::registry::Registry;
use crate::storage::{Ended, Incoming};

/// Uploads whose hash is kept in memory; more only cost reading the bytes again.
const REMEMBERED: usize = 4096;
/// How long a request waits for another one of the same upload.
const TURN: Duration = Duration::from_secs(5);
/// How long a finished upload waits for the sweep to let go of the same blob, and how often it looks.
const SWEEP: (Duration, Duration) = (Duration::from_secs(10), Duration::from_millis(20));

/// How far an upload is. `None`: not known here yet.
type Progress = Option<Reached>;

/// The bytes of an upload, their hash, and the time of its row then: another replica's work moves that.
#[derive(Clone, Debug)]
struct Reached {
    bytes: u64,
    hasher: Hasher,
    updated: i64,
}

/// Uploads that this process knows. One request at a time has one.
#[derive(Debug, Default)]
pub(crate) struct Sessions(Mutex<HashMap<UploadId, Arc<tokio::sync::Mutex<Progress>>>>);

impl Sessions {
    async fn turn(&self, id: &UploadId) -> Result<OwnedMutexGuard<Progress>, Problem> {
        let session = {
            let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if all.len() >= REMEMBERED {
                all.retain(|_, session| Arc::strong_count(session) > 1);
            }
            Arc::clone(all.entry(id.clone()).or_default())
        };
        timeout(TURN, session.lock_owned()).await.map_err(|_| {
            Problem::new(Code::Unavailable, "another request is at work on this upload")
                .header(header::RETRY_AFTER, "1")
        })
    }

    pub(crate) fn forget(&self, id: &UploadId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
    }
}

/// A body with what its headers say of it.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) body: Body,
    pub(crate) length: Option<u64>,
    /// First and last byte, of `Content-Range`.
    pub(crate) range: Option<(u64, u64)>,
}

impl Chunk {
    fn is_empty(&self) -> bool {
        self.length == Some(0)
    }
}

fn unknown() -> Problem {
    Problem::new(Code::BlobUploadUnknown, "there is no such upload in this repository")
}

/// Where an upload is.
pub(crate) fn location(repo: &RepositoryName, id: &UploadId) -> String {
    format!("/v2/{repo}/blobs/uploads/{id}")
}

/// The `Range` header of an upload with so many bytes. An empty one has no last byte; 0-0 is what everybody says.
pub(crate) fn range(bytes: u64) -> String {
    format!("0-{}", bytes.saturating_sub(1))
}

impl Registry {
    /// Begins an upload.
    pub(crate) async fn begin_upload(&self, repo: &RepositoryName) -> Result<UploadId, Problem> {
        let id = UploadId::random();
        // The row first: a file without one is garbage.
        let updated = self.now();
        self.meta.begin_upload(&id, repo, updated).await?;
        self.storage.begin(&id).await?;
        let hasher = Hasher::new(Algorithm::Sha256);
        *self.sessions.turn(&id).await? = Some(Reached { bytes: 0, hasher, updated });
        Ok(id)
    }

    /// Bytes of an upload.
    pub(crate) async fn upload_size(&self, repo: &RepositoryName, id: &UploadId) -> Result<u64, Problem> {
        let mut turn = self.turn(repo, id).await?;
        let (size, _) = self.progress(id, &mut turn).await?;
        Ok(size)
    }

    /// Appends a chunk. Returns the bytes that are there now.
    pub(crate) async fn append(
        &self,
        repo: &RepositoryName,
        id: &UploadId,
        chunk: Chunk,
    ) -> Result<u64, Problem> {
        let mut turn = self.turn(repo, id).await?;
        self.take(repo, id, &mut turn, chunk).await
    }

    /// Appends the last chunk, verifies, and makes the upload a blob of the repository.
    pub(crate) async fn finish(
        &self,
        repo: &RepositoryName,
        id: &UploadId,
        chunk: Chunk,
        digest: &Digest,
    ) -> Result<(), Problem> {
        let mut turn = self.turn(repo, id).await?;
        if !chunk.is_empty() {
            self.take(repo, id, &mut turn, chunk).await?;
        }
        let (size, hasher) = self.progress(id, &mut turn).await?;
        let actual = match digest.algorithm() {
            Algorithm::Sha256 => hasher.finish(),
            other => {
                let read = self.storage.rehash(id, Hasher::new(other)).await?;
                read.ok_or_else(unknown)?.1.finish()
            }
        };
        if actual != *digest {
            self.end(id).await?;
            return Err(Problem::new(Code::DigestInvalid, "the content does not have the digest")
                .detail(json!({"digest": digest.to_string(), "actual": actual.to_string()})));
        }
        self.place(repo, id, digest, size).await?;
        self.metrics.uploaded(size);
        self.sessions.forget(id);
        Ok(self.meta.end_upload(id).await?)
    }

    /// Forgets an upload.
    pub(crate) async fn cancel(&self, repo: &RepositoryName, id: &UploadId) -> Result<(), Problem> {
        let _turn = self.turn(repo, id).await?;
        self.end(id).await
    }

    async fn end(&self, id: &UploadId) -> Result<(), Problem> {
        self.storage.discard(id).await?;
        self.meta.end_upload(id).await?;
        self.sessions.forget(id);
        Ok(())
    }

    async fn turn(&self, repo: &RepositoryName, id: &UploadId) -> Result<OwnedMutexGuard<Progress>, Problem> {
        let mut turn = self.sessions.turn(id).await?;
        let known = self.meta.upload(id).await?;
        let row = known.filter(|row| row.repo == repo.as_str()).ok_or_else(unknown)?;
        if turn.as_ref().is_some_and(|reached| reached.updated != row.updated) {
            *turn = None;
        }
        Ok(turn)
    }

    async fn progress(&self, id: &UploadId, turn: &mut Progress) -> Result<(u64, Hasher), Problem> {
        if let Some(reached) = turn {
            return Ok((reached.bytes, reached.hasher.clone()));
        }
        let updated = self.meta.upload(id).await?.ok_or_else(unknown)?.updated;
        let read = self.storage.rehash(id, Hasher::new(Algorithm::Sha256)).await?;
        let (bytes, hasher) = read.ok_or_else(unknown)?;
        *turn = Some(Reached { bytes, hasher: hasher.clone(), updated });
        Ok((bytes, hasher))
    }

    async fn take(
        &self,
        repo: &RepositoryName,
        id: &UploadId,
        turn: &mut Progress,
        chunk: Chunk,
    ) -> Result<u64, Problem> {
        let (offset, hasher) = self.progress(id, turn).await?;
        check_range(repo, id, offset, &chunk)?;
        let room = self.room(repo, offset).await?;
        if chunk.length.is_some_and(|length| length > room) {
            return Err(too_large());
        }
        let idle = self.limits.body_idle;
        let incoming = Incoming { body: chunk.body, offset, length: chunk.length, room, idle, hasher };
        let before = turn.as_ref().map_or(0, |reached| reached.updated);
        // What goes wrong in there leaves the length of the file unknown.
        *turn = None;
        let taken = match self.storage.append(id, incoming).await {
            Ok(taken) => taken,
            Err(error) => {
                // What is written of it would keep everybody else from writing.
                if error.is_full() {
                    self.end(id).await?;
                }
                return Err(error.into());
            }
        };
        // Each step moves the time, also within one millisecond: others must see that there was one.
        let updated = self.now().max(before.saturating_add(1));
        self.meta.touch_upload(id, updated).await?;
        *turn = Some(Reached { bytes: taken.offset, hasher: taken.hasher, updated });
        match taken.ended {
            Ended::Whole => Ok(taken.offset),
            Ended::Cut => Err(Problem::new(Code::SizeInvalid, "the body ended before its length")
                .header(header::RANGE, &range(taken.offset))),
            Ended::Slow => Err(Problem::new(Code::BlobUploadInvalid, "the body came too slowly")
                .status(StatusCode::REQUEST_TIMEOUT)),
            Ended::TooLong => Err(too_large()),
        }
    }

    /// Bytes that an upload may still take.
    async fn room(&self, repo: &RepositoryName, offset: u64) -> Result<u64, Problem> {
        let mut room = self.limits.upload_bytes.saturating_sub(offset);
        if self.limits.quota.is_some() || self.limits.repository_quota.is_some() {
            let (all, own) = self.meta.used(repo).await?;
            for (quota, used) in [(self.limits.quota, all), (self.limits.repository_quota, own)] {
                let used = u64::try_from(used).unwrap_or(0).saturating_add(offset);
                let left = quota.map_or(u64::MAX, |quota| quota.saturating_sub(used));
                if left == 0 {
                    return Err(Problem::new(Code::Denied, "the quota is used up"));
                }
                room = room.min(left);
            }
        }
        Ok(room)
    }

    /// Gives verified bytes their name, and the repository the blob.
    async fn place(
        &self,
        repo: &RepositoryName,
        id: &UploadId,
        digest: &Digest,
        size: u64,
    ) -> Result<(), Problem> {
        let row_size = i64::try_from(size).unwrap_or(i64::MAX);
        let placed = timeout(SWEEP.0, async {
            loop {
                let arrival = self.meta.arrive(digest, row_size, self.now()).await?;
                if arrival == Arrival::Wait {
                    sleep(SWEEP.1).await;
                    continue;
                }
                let same = arrival == Arrival::Here && self.storage.size(digest).await? == Some(size);
                match same {
                    true => self.storage.discard(id).await?,
                    false => self.storage.seal(id, digest).await?,
                }
                return self.meta.arrived(repo, digest, self.now()).await;
            }
        });
        match placed.await {
            Ok(Ok(true)) => Ok(()),
            Ok(Ok(false)) | Err(_) => Err(StoreError::Dying { digest: digest.to_string() }.into()),
            Ok(Err(error)) => Err(error.into()),
        }
    }
}

fn too_large() -> Problem {
    Problem::new(Code::SizeInvalid, "the upload is larger than the registry takes")
        .status(StatusCode::PAYLOAD_TOO_LARGE)
}

/// A chunk begins where the last one ended, and is as long as it says.
fn check_range(repo: &RepositoryName, id: &UploadId, offset: u64, chunk: &Chunk) -> Result<(), Problem> {
    let Some((first, last)) = chunk.range else { return Ok(()) };
    let length = last.checked_sub(first).map(|n| n + 1);
    if first == offset && length.is_some() && chunk.length.is_none_or(|said| Some(said) == length) {
        return Ok(());
    }
    Err(Problem::new(Code::BlobUploadInvalid, "the chunk does not begin where the upload ends")
        .status(StatusCode::RANGE_NOT_SATISFIABLE)
        .header(header::RANGE, &range(offset))
        .header(header::LOCATION, &location(repo, id)))
}
