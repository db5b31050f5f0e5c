//! Blobs, manifests and uploads in an S3-compatible object store, for several replicas.
//!
//! ```text
//! blobs/<algorithm>/<hex>                       whole objects
//! uploads/<id>/begun, uploads/<id>/<offset>     an upload: parts by offset, each put whole
//! uploads/<id>/join                             the multipart upload that joins them
//! manifests/<repository>/<tag>.json             keys of epoch
//! manifests/<repository>/_digests/<digest>.json
//! ```
//! Any replica can continue an upload: its parts are in the store only. Sealing joins the parts by UploadPartCopy, without
//! moving bytes through this process.

mod client;

use std::fmt;
use std::ops::Range;

use async_trait::async_trait;
use axum::body::Body;
use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::sync::mpsc;

use self::client::Client;
use super::{Incoming, Storage, Taken, pump};
use crate::error::StoreError;
use crate::upload_id::UploadId;
use coracle_oci::{Digest, Hasher};

/// Minimum size of a part of an object, bytes (S3, "Multipart upload limits"). Each running upload holds up to two parts in
/// memory.
const PIECE_MIN: u64 = 5 << 20;
/// Limit of parts in the largest upload. An object has at most 10,000 parts (same page).
const PIECES_MAX: u64 = 8192;
/// Longest manifest, bytes: above the limit of the registry.
const MANIFEST_MAX: u64 = 64 << 20;
/// Longest note of a join, bytes.
const JOIN_MAX: u64 = 16 << 10;
/// Limit of concurrent copies of parts.
const COPIES: usize = 8;
/// Frames of a body that wait for the store.
const QUEUE_FRAMES: usize = 4;

/// Address of the object store, and credentials.
#[derive(Clone, PartialEq, Eq)]
pub struct S3Config {
    /// `https://HOST[:PORT]`; buckets are addressed by path.
    pub endpoint: String,
    /// Region of the signatures.
    pub region: String,
    /// Existing bucket.
    pub bucket: String,
    /// Prefix of all keys, such as `epoch/`; may be empty.
    pub prefix: String,
    /// Access key.
    pub access_key: String,
    /// Secret of the access key.
    pub secret_key: String,
}

impl fmt::Debug for S3Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "S3Config({}/{}/{})", self.endpoint, self.bucket, self.prefix)
    }
}

/// Storage in a bucket.
#[derive(Debug)]
pub(crate) struct S3 {
    client: Client,
    /// Size of a part, bytes. Every part of an upload except the last has at least the minimum size.
    piece: u64,
}

/// Part of an upload.
struct Piece {
    key: String,
    offset: u64,
    size: u64,
}

impl S3 {
    /// Opens the bucket and checks that the access key can read it. Uploads have at most `upload_bytes`.
    pub(crate) async fn open(config: &S3Config, upload_bytes: u64) -> Result<Self, StoreError> {
        let client = Client::new(config)?;
        client.size("catalog.json").await?;
        Ok(Self { client, piece: upload_bytes.div_ceil(PIECES_MAX).max(PIECE_MIN) })
    }

    /// Parts of an upload in order. `None` when the upload does not exist.
    async fn pieces(&self, id: &UploadId) -> Result<Option<Vec<Piece>>, StoreError> {
        let below = format!("uploads/{id}/");
        let keys = self.client.list(&below).await?;
        if keys.is_empty() {
            return Ok(None);
        }
        let piece = |(key, size): (String, u64)| {
            let offset = key.strip_prefix(&below)?.parse().ok()?;
            Some(Piece { key, offset, size })
        };
        let mut pieces: Vec<_> = keys.into_iter().filter_map(piece).collect();
        pieces.sort_by_key(|piece| piece.offset);
        // Bytes after a gap were never acknowledged.
        let mut end = 0;
        pieces.retain(|piece| {
            let follows = piece.offset == end;
            end += if follows { piece.size } else { 0 };
            follows
        });
        Ok(Some(pieces))
    }

    async fn read_piece(&self, piece: &Piece) -> Result<Bytes, StoreError> {
        let missing = || StoreError::S3Status { operation: "get", key: piece.key.clone(), status: 404 };
        self.client.get(&piece.key, piece.size).await?.ok_or_else(missing)
    }

    /// Joins parts on the server into one object. Aborts the multipart upload if it fails.
    async fn join(&self, id: &UploadId, pieces: &[Piece], to: &str) -> Result<(), StoreError> {
        self.end_join(id).await?;
        let parts = self.client.begin_parts(to).await?;
        let joined = self.copy_pieces(id, pieces, to, &parts).await;
        if joined.is_err() {
            // If this fails too, the note stays: the next attempt or the end of the upload aborts the multipart upload.
            match self.client.abort_parts(to, &parts).await {
                Ok(()) => self.client.delete(&join_key(id)).await.unwrap_or(()),
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "abort multipart upload failed");
                }
            }
        }
        joined
    }

    async fn copy_pieces(
        &self,
        id: &UploadId,
        pieces: &[Piece],
        to: &str,
        parts: &str,
    ) -> Result<(), StoreError> {
        self.client.put(&join_key(id), format!("{to}\n{parts}").into()).await?;
        let copies =
            pieces.iter().enumerate().map(|(n, piece)| self.client.copy_part(&piece.key, to, parts, n + 1));
        let copied: Vec<_> = stream::iter(copies.collect::<Vec<_>>()).buffered(COPIES).try_collect().await?;
        let ended = self.client.end_parts(to, parts, copied).await;
        let (want, size) = (pieces.iter().map(|piece| piece.size).sum(), self.client.size(to).await?);
        match ended {
            Ok(()) if size == Some(want) => Ok(()),
            // A server without UploadPartCopy may treat the copies as empty parts.
            Ok(()) => {
                self.client.delete(to).await?;
                Err(StoreError::S3Size { key: to.to_owned(), size: size.unwrap_or(0), want })
            }
            // Completing a large object takes minutes. When the response is lost, a repeated request does not find the
            // multipart upload.
            Err(error) if size == Some(want) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "response to end of join lost");
                self.client.abort_parts(to, parts).await
            }
            Err(error) => Err(error),
        }
    }

    /// Keys of all objects of an upload.
    async fn keys(&self, id: &UploadId) -> Result<Vec<String>, StoreError> {
        let found = self.client.list(&format!("uploads/{id}/")).await?;
        Ok(found.into_iter().map(|(key, _)| key).collect())
    }

    /// Aborts the multipart upload of an interrupted join.
    async fn end_join(&self, id: &UploadId) -> Result<(), StoreError> {
        let key = join_key(id);
        let Some(note) = self.client.get(&key, JOIN_MAX).await? else { return Ok(()) };
        if let Some((to, parts)) = std::str::from_utf8(&note).ok().and_then(|note| note.split_once('\n')) {
            self.client.abort_parts(to, parts).await?;
        }
        self.client.delete(&key).await
    }

    /// Removes parts of an interrupted request that were not counted. Returns the offset to write at, and the bytes of a last
    /// part that is rewritten: only the last part may be smaller than the minimum.
    async fn resume(&self, id: &UploadId, offset: u64) -> Result<(u64, BytesMut), StoreError> {
        let (mut late, mut at, mut kept) = (Vec::new(), offset, BytesMut::new());
        for piece in self.pieces(id).await?.unwrap_or_default() {
            let end = piece.offset + piece.size;
            if piece.offset >= offset {
                late.push(piece.key);
            } else if end > offset || (end == offset && piece.size < PIECE_MIN) {
                let bytes = self.read_piece(&piece).await?;
                let counted = usize::try_from(offset - piece.offset).unwrap_or(usize::MAX);
                kept.extend_from_slice(&bytes[..counted.min(bytes.len())]);
                at = piece.offset;
            }
        }
        self.client.delete_all(&late).await?;
        Ok((at, kept))
    }

    /// Writes the body as parts, starting at `offset`.
    async fn write_pieces(
        &self,
        id: &UploadId,
        offset: u64,
        mut hasher: Hasher,
        mut frames: mpsc::Receiver<Bytes>,
    ) -> Result<(u64, Hasher), StoreError> {
        let (mut at, mut piece) = self.resume(id, offset).await?;
        loop {
            let frame = frames.recv().await;
            if let Some(frame) = &frame {
                hasher.update(frame);
                piece.extend_from_slice(frame);
            }
            if piece.len() as u64 >= self.piece || (frame.is_none() && !piece.is_empty()) {
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

fn join_key(id: &UploadId) -> String {
    format!("uploads/{id}/join")
}

fn piece_key(id: &UploadId, offset: u64) -> String {
    format!("uploads/{id}/{offset:020}")
}

fn blob_key(digest: &Digest) -> String {
    format!("blobs/{}/{}", digest.algorithm().name(), digest.hex())
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
        for piece in pieces {
            hasher.update(&self.read_piece(&piece).await?);
            size += piece.size;
        }
        Ok(Some((size, hasher)))
    }

    async fn seal(&self, id: &UploadId, digest: &Digest) -> Result<(), StoreError> {
        let (pieces, to) = (self.pieces(id).await?.unwrap_or_default(), blob_key(digest));
        match pieces.as_slice() {
            [] => self.client.put(&to, Bytes::new()).await?,
            [one] => self.client.copy(&one.key, &to).await?,
            many => self.join(id, many, &to).await?,
        }
        let keys = self.keys(id).await?;
        self.client.delete_all(&keys).await
    }

    async fn discard(&self, id: &UploadId) -> Result<(), StoreError> {
        let keys = self.keys(id).await?;
        if keys.contains(&join_key(id)) {
            self.end_join(id).await?;
        }
        self.client.delete_all(&keys).await
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
        Ok(self.client.read(&key, part).await?.map(Body::from_stream))
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
