//! Blobs, manifests and uploads in an S3-compatible object store, for several replicas.
//!
//! ```text
//! blobs/<algorithm>/<hex>                       whole objects
//! uploads/<id>/begun, uploads/<id>/<offset>     an upload: pieces by their offsets, each put whole
//! manifests/<repository>/<tag>.json             the original's keys
//! manifests/<repository>/_digests/<digest>.json
//! ```
//! Any replica goes on with an upload: its pieces are in the store alone. Sealing one makes a blob of the pieces, through
//! this process, so that any server will do.

mod client;
mod list;
mod sign;

use std::fmt;
use std::ops::Range;

use async_trait::async_trait;
use axum::body::Body;
use bytes::{Bytes, BytesMut};
use coracle_types::Clock;
use tokio::sync::mpsc;

use self::client::Client;
use super::{Incoming, Storage, Taken, pump};
use crate::digest::{Digest, Hasher};
use crate::error::StoreError;
use crate::names::UploadId;

/// Bytes of a piece: the smallest part that an object can be made of (S3, "Multipart upload limits"). Each upload that
/// runs holds up to two in memory.
const PIECE: usize = 5 << 20;
/// Most parts of one object (same page). Larger parts are made of larger blobs.
const PARTS_MAX: u64 = 10_000;
/// Longest manifest, in bytes: more than the registry ever stores.
const MANIFEST_MAX: usize = 64 << 20;
/// Frames of a body that wait for the store.
const QUEUE_FRAMES: usize = 4;

/// Where the object store is, and as whom.
#[derive(Clone, PartialEq, Eq)]
pub struct S3Config {
    /// `https://HOST[:PORT]`; buckets are addressed by path.
    pub endpoint: String,
    /// Name of the region that requests are signed for.
    pub region: String,
    /// Name of the bucket, which exists.
    pub bucket: String,
    /// What all keys begin with, like `epoch/`; may be empty.
    pub prefix: String,
    /// Access key.
    pub access_key: String,
    /// Its secret.
    pub secret_key: String,
}

impl fmt::Debug for S3Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "S3Config({}/{}/{})", self.endpoint, self.bucket, self.prefix)
    }
}

/// A bucket.
pub(crate) struct S3 {
    client: Client,
}

impl fmt::Debug for S3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("S3")
    }
}

impl S3 {
    /// Looks whether the bucket can be listed with the key.
    pub(crate) async fn open(config: &S3Config, clock: Clock) -> Result<Self, StoreError> {
        let client = Client::new(config, clock)?;
        client.size("catalog.json").await?;
        Ok(Self { client })
    }

    /// Pieces of an upload in order: key, offset, length. `None` when there is no such upload.
    async fn pieces(&self, id: &UploadId) -> Result<Option<Vec<(String, u64, u64)>>, StoreError> {
        let below = format!("uploads/{id}/");
        let keys = self.client.list(&below).await?;
        if keys.is_empty() {
            return Ok(None);
        }
        let piece = |(key, size): (String, u64)| {
            let offset = key.strip_prefix(&below)?.parse().ok()?;
            Some((key, offset, size))
        };
        let mut pieces: Vec<_> = keys.into_iter().filter_map(piece).collect();
        pieces.sort_by_key(|(_, offset, _)| *offset);
        // What is behind a gap was never counted.
        let mut end = 0;
        pieces.retain(|(_, offset, size)| {
            let follows = *offset == end;
            end += if follows { *size } else { 0 };
            follows
        });
        Ok(Some(pieces))
    }

    async fn piece(&self, key: &str) -> Result<Bytes, StoreError> {
        let missing = || StoreError::S3Status { operation: "get", key: key.to_owned(), status: 404 };
        self.client.get(key, 2 * PIECE).await?.ok_or_else(missing)
    }

    /// Makes one object of many, in parts of at least `part_bytes`.
    async fn join(
        &self,
        pieces: &[(String, u64, u64)],
        to: &str,
        part_bytes: usize,
    ) -> Result<(), StoreError> {
        let id = self.client.begin_parts(to).await?;
        let sent = self.send_parts(pieces, to, &id, part_bytes).await;
        let ended = match sent {
            Ok(tags) => self.client.end_parts(to, &id, &tags).await,
            Err(error) => Err(error),
        };
        if ended.is_err() {
            let _found_again_by_the_buckets_own_rules = self.client.abort_parts(to, &id).await;
        }
        ended
    }

    async fn send_parts(
        &self,
        pieces: &[(String, u64, u64)],
        to: &str,
        id: &str,
        part_bytes: usize,
    ) -> Result<Vec<String>, StoreError> {
        let (mut tags, mut part) = (Vec::new(), BytesMut::new());
        for (n, (key, _, _)) in pieces.iter().enumerate() {
            part.extend_from_slice(&self.piece(key).await?);
            if part.len() >= part_bytes || n + 1 == pieces.len() {
                tags.push(self.client.part(to, id, tags.len() + 1, part.split().freeze()).await?);
            }
        }
        Ok(tags)
    }

    /// Writes what comes as pieces, from `offset` on.
    async fn write_pieces(
        &self,
        id: &UploadId,
        offset: u64,
        mut hasher: Hasher,
        mut frames: mpsc::Receiver<Bytes>,
    ) -> Result<(u64, Hasher), StoreError> {
        // What a request left behind that was cut off before its bytes were counted.
        for (key, at, _) in self.pieces(id).await?.unwrap_or_default() {
            if at >= offset {
                self.client.delete(&key).await?;
            }
        }
        let (mut at, mut piece) = (offset, BytesMut::new());
        loop {
            let frame = frames.recv().await;
            if let Some(frame) = &frame {
                hasher.update(frame);
                piece.extend_from_slice(frame);
            }
            if piece.len() >= PIECE || (frame.is_none() && !piece.is_empty()) {
                let length = piece.len() as u64;
                self.client.put(&piece_key(id, at), piece.split().freeze()).await?;
                at += length;
            }
            if frame.is_none() {
                return Ok((at, hasher));
            }
        }
    }
}

fn piece_key(id: &UploadId, offset: u64) -> String {
    format!("uploads/{id}/{offset:020}")
}

fn blob_key(digest: &Digest) -> String {
    format!("blobs/{}/{}", digest.algorithm_name(), digest.hex())
}

#[async_trait]
impl Storage for S3 {
    async fn begin(&self, id: &UploadId) -> Result<(), StoreError> {
        self.client.put(&format!("uploads/{id}/begun"), Bytes::new()).await
    }

    async fn append(&self, id: &UploadId, incoming: Incoming) -> Result<Taken, StoreError> {
        let Incoming { body, offset, length, room, idle, hasher } = incoming;
        let (send, frames) = mpsc::channel(QUEUE_FRAMES);
        let writer = self.write_pieces(id, offset, hasher, frames);
        let (ended, written) = tokio::join!(pump(body, length, room, idle, send), writer);
        let (offset, hasher) = written?;
        Ok(Taken { offset, hasher, ended })
    }

    async fn rehash(&self, id: &UploadId, mut hasher: Hasher) -> Result<Option<(u64, Hasher)>, StoreError> {
        let Some(pieces) = self.pieces(id).await? else { return Ok(None) };
        let mut size = 0;
        for (key, _, length) in pieces {
            hasher.update(&self.piece(&key).await?);
            size += length;
        }
        Ok(Some((size, hasher)))
    }

    async fn seal(&self, id: &UploadId, digest: &Digest) -> Result<(), StoreError> {
        let (pieces, to) = (self.pieces(id).await?.unwrap_or_default(), blob_key(digest));
        match pieces.as_slice() {
            [] => self.client.put(&to, Bytes::new()).await?,
            [(one, _, _)] => self.client.copy(one, &to).await?,
            many => {
                let size: u64 = many.iter().map(|(_, _, n)| n).sum();
                let part = usize::try_from(size / PARTS_MAX).unwrap_or(usize::MAX).saturating_add(1);
                self.join(many, &to, part.max(PIECE)).await?;
            }
        }
        self.discard(id).await
    }

    async fn discard(&self, id: &UploadId) -> Result<(), StoreError> {
        for (key, _) in self.client.list(&format!("uploads/{id}/")).await? {
            self.client.delete(&key).await?;
        }
        Ok(())
    }

    async fn uploads(&self) -> Result<Vec<UploadId>, StoreError> {
        let keys = self.client.list("uploads/").await?;
        let id = |(key, _): &(String, u64)| key.strip_prefix("uploads/")?.split('/').next()?.parse().ok();
        let mut ids: Vec<UploadId> = keys.iter().filter_map(id).collect();
        ids.dedup();
        Ok(ids)
    }

    async fn read(&self, digest: &Digest, part: Range<u64>) -> Result<Option<Body>, StoreError> {
        let key = blob_key(digest);
        if part.start >= part.end {
            return Ok(self.client.size(&key).await?.map(|_| Body::empty()));
        }
        let answer = self.client.read(&key, Some((part.start, part.end - 1))).await?;
        Ok(answer.map(|answer| Body::from_stream(answer.bytes_stream())))
    }

    async fn size(&self, digest: &Digest) -> Result<Option<u64>, StoreError> {
        self.client.size(&blob_key(digest)).await
    }

    async fn remove(&self, digest: &Digest) -> Result<(), StoreError> {
        self.client.delete(&blob_key(digest)).await
    }

    async fn blobs(&self) -> Result<Vec<(Digest, u64)>, StoreError> {
        let keys = self.client.list("blobs/").await?;
        let blob = |(key, size): (String, u64)| {
            let name = key.strip_prefix("blobs/")?.replacen('/', ":", 1);
            Some((name.parse().ok()?, size))
        };
        Ok(keys.into_iter().filter_map(blob).collect())
    }

    fn tag_key(&self, repository: &str, tag: &str) -> String {
        format!("manifests/{repository}/{tag}.json")
    }

    async fn put(&self, key: &str, bytes: Bytes) -> Result<(), StoreError> {
        self.client.put(key, bytes).await
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>, StoreError> {
        self.client.get(key, MANIFEST_MAX).await
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        self.client.delete(key).await
    }

    async fn manifests(&self) -> Result<Vec<String>, StoreError> {
        Ok(self.client.list("manifests/").await?.into_iter().map(|(key, _)| key).collect())
    }

    fn is_shared(&self) -> bool {
        true
    }
}
