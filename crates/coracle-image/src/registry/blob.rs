//! Downloading a blob: streamed, hashed, resumed, and visible only when it is whole and right.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use backon::BackoffBuilder;
use reqwest::{Response, StatusCode, header::CONTENT_RANGE};

use super::Session;
use crate::{
    ImageError, Progress, Step,
    digest::Hasher,
    manifest::Blob,
    progress::Meter,
    store::{
        Inner, blocking,
        layout::{self, Layout},
        locks::KeyGuard,
    },
};

/// Bytes gathered before they are handed to the disk.
const BATCH: usize = 1 << 20;
/// Memory that is taken for a blob before any of it has come, in bytes: a usual window.
const WHOLE_AT_ONCE: u64 = 64 << 20;
/// A try that got this far earns the full number of tries again. Blobs are bounded, so tries are.
const HEADWAY_BYTES: u64 = 1 << 20;

/// Brings a blob into the store. `Ok(false)` when it was there already. Two calls for one blob share the
/// work. Cancel-safe: the bytes so far stay and are resumed.
///
/// # Errors
/// Those of [`Session::blob`]; [`ImageError::DigestMismatch`] and [`ImageError::Hostile`] when the bytes are
/// wrong, which removes them; [`ImageError::StorageFull`], which removes them too.
pub(crate) async fn fetch(
    inner: &Arc<Inner>,
    session: &Session,
    blob: &Blob,
    progress: &Arc<dyn Progress>,
) -> Result<bool, ImageError> {
    let guard = inner.locks.lock(blob.digest).await;
    if inner.layout.has(blob) {
        return Ok(false);
    }
    let meter = Meter::new(progress, Step::Download, Some(blob.digest), blob.size_bytes);
    let mut partial = Partial::open(&inner.layout, blob.clone(), guard).await?;
    let resumed = partial.have() > 0;
    let mut result = download(session, &mut partial, &meter).await;
    if resumed && matches!(result, Err(ImageError::DigestMismatch { .. })) {
        // The rest of an earlier download may have been damaged by a crash; the registry gets one clean
        // chance.
        partial = blocking(move || partial.reset()).await?;
        result = download(session, &mut partial, &meter).await;
    }
    let layout = inner.layout.clone();
    match result {
        Ok(()) => blocking(move || partial.publish(&layout)).await.map(|()| true),
        Err(error) => {
            if !error.is_transient() {
                blocking(move || partial.remove()).await?;
            }
            Err(error)
        }
    }
}

/// As [`fetch_small`], by digest and size.
pub(crate) async fn fetch_small_of(
    session: &Session,
    digest: &crate::Digest,
    size_bytes: u64,
) -> Result<Vec<u8>, ImageError> {
    let blob = Blob { media_type: String::new(), digest: *digest, size_bytes };
    fetch_small(session, &blob).await
}

/// Fetches a blob of some size into memory; what broke off goes on where it was. It is not verified: whoever asks knows
/// a digest of what the bytes stand for, and hashing both would take longer than the rest of a pull.
pub(crate) async fn fetch_whole(
    session: &Session,
    digest: &crate::Digest,
    size_bytes: u64,
) -> Result<Vec<u8>, ImageError> {
    let room = usize::try_from(size_bytes.min(WHOLE_AT_ONCE)).unwrap_or(0);
    let have = tokio::sync::Mutex::new(Vec::with_capacity(room));
    session
        .retry(|| async {
            let mut have = have.lock().await;
            let mut response = session.blob(digest, have.len() as u64).await?;
            if response.status() != StatusCode::PARTIAL_CONTENT {
                have.clear();
            }
            while let Some(chunk) = response.chunk().await.map_err(|e| session.network("read blob", e))? {
                have.extend_from_slice(&chunk);
                if have.len() as u64 > size_bytes {
                    return Err(ImageError::hostile(format!(
                        "blob {digest} is longer than its manifest says"
                    )));
                }
            }
            match have.len() as u64 == size_bytes {
                true => Ok(()),
                false => Err(session.network("read blob", "it ended early")),
            }
        })
        .await?;
    Ok(have.into_inner())
}

/// Fetches a small blob into memory and verifies it.
pub(crate) async fn fetch_small(session: &Session, blob: &Blob) -> Result<Vec<u8>, ImageError> {
    session
        .retry(|| async {
            let response = session.blob(&blob.digest, 0).await?;
            let bytes = session.body(response, blob.size_bytes, "configuration").await?;
            let actual = crate::Digest::of(&bytes);
            if actual != blob.digest {
                return Err(ImageError::DigestMismatch {
                    what: "configuration".to_owned(),
                    expected: blob.digest,
                    actual,
                });
            }
            Ok(bytes)
        })
        .await
}

/// Repeats tries until all bytes are there and hash to the digest.
async fn download(session: &Session, partial: &mut Partial, meter: &Meter) -> Result<(), ImageError> {
    let mut delays = session.backoff().build();
    let mut renewed = false;
    loop {
        let before = partial.have();
        let error = match attempt(session, partial, meter).await {
            Ok(()) => return partial.verify(),
            Err(error) => error,
        };
        if partial.have() >= before + HEADWAY_BYTES {
            delays = session.backoff().build();
        }
        if matches!(error, ImageError::Unauthorized { .. }) && !renewed {
            // Tokens live for minutes, large blobs take longer.
            renewed = true;
            session.authorize().await?;
            continue;
        }
        let delay: Duration = match delays.next() {
            Some(delay) if error.is_transient() => delay,
            _ => return Err(error),
        };
        tracing::debug!(blob = %partial.blob().digest, have = partial.have(), error = &error as &dyn std::error::Error, "download is resumed");
        tokio::time::sleep(delay).await;
    }
}

/// One request, from where the last one ended.
async fn attempt(session: &Session, partial: &mut Partial, meter: &Meter) -> Result<(), ImageError> {
    if partial.have() == partial.blob().size_bytes {
        return Ok(());
    }
    let asked = session.blob(&partial.blob().digest, partial.have()).await;
    if matches!(asked, Err(ImageError::Registry { status: 416, .. })) {
        partial.reset_in_place().await?;
        return Err(session.network("resume blob", "the registry does not accept the range"));
    }
    let mut response = asked?;
    if !begins_at(&response, partial.have()) {
        partial.reset_in_place().await?;
        if response.status() != StatusCode::OK {
            return Err(session.network("resume blob", "the registry sent another range"));
        }
    }
    let mut batch = Vec::with_capacity(BATCH);
    let ended = loop {
        match response.chunk().await {
            Ok(Some(chunk)) => batch.extend_from_slice(&chunk),
            Ok(None) => break Ok(()),
            Err(error) => break Err(session.network("read blob", error)),
        }
        if partial.have() + batch.len() as u64 > partial.blob().size_bytes {
            let Blob { digest, size_bytes, .. } = partial.blob();
            return Err(ImageError::hostile(format!(
                "blob {digest} is larger than the {size_bytes} bytes it was announced with"
            )));
        }
        if batch.len() >= BATCH {
            batch = partial.append(batch).await?;
            meter.at(partial.have());
        }
    };
    partial.append(batch).await?;
    meter.at(partial.have());
    ended?;
    partial.check_end(session)
}

/// True when the answer continues at `offset`.
pub(super) fn begins_at(response: &Response, offset: u64) -> bool {
    if response.status() != StatusCode::PARTIAL_CONTENT {
        return offset == 0;
    }
    let range = response.headers().get(CONTENT_RANGE).and_then(|v| v.to_str().ok());
    let start = range.and_then(|r| r.strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok());
    start == Some(offset)
}

/// An unfinished download. Its work on disk runs on blocking threads, which take it along and give it back.
struct Partial(Option<Box<State>>);

struct State {
    blob: Blob,
    path: PathBuf,
    file: File,
    hasher: Hasher,
    /// Held as long as anybody writes: a cancelled pull's last batch ends in the background.
    _guard: KeyGuard,
}

impl Partial {
    /// Opens what an earlier pull left and hashes it from the start.
    async fn open(layout: &Layout, blob: Blob, guard: KeyGuard) -> Result<Self, ImageError> {
        let path = layout.partial(&blob.digest);
        blocking(move || {
            let open = File::options().create(true).truncate(false).read(true).write(true).open(&path);
            let file = open.map_err(|e| ImageError::io("open", &path, e))?;
            let mut state = State { blob, path, file, hasher: Hasher::default(), _guard: guard };
            state.rehash()?;
            Ok(Self(Some(Box::new(state))))
        })
        .await
    }

    fn state(&self) -> &State {
        self.0.as_ref().expect("the state is only away during a call that borrows self mutably")
    }

    fn blob(&self) -> &Blob {
        &self.state().blob
    }

    fn have(&self) -> u64 {
        self.0.as_ref().map_or(0, |state| state.hasher.bytes)
    }

    /// Writes a batch behind what is there and returns the emptied buffer.
    async fn append(&mut self, mut batch: Vec<u8>) -> Result<Vec<u8>, ImageError> {
        let mut state = self.0.take().expect("append is not called after a cancelled append");
        let (state, batch, result) = blocking(move || {
            let result = state.file.write_all(&batch);
            if result.is_ok() {
                state.hasher.update(&batch);
            }
            batch.clear();
            (state, batch, result)
        })
        .await;
        let path = state.path.clone();
        self.0 = Some(state);
        result.map_err(|e| ImageError::io("write", path, e)).map(|()| batch)
    }

    async fn reset_in_place(&mut self) -> Result<(), ImageError> {
        let partial = Self(self.0.take());
        let partial = blocking(move || partial.reset()).await?;
        self.0 = partial.0;
        Ok(())
    }

    fn reset(mut self) -> Result<Self, ImageError> {
        let state = self.0.as_mut().expect("reset is not called during another call");
        let cut = state.file.set_len(0).and_then(|()| io::Seek::rewind(&mut state.file));
        cut.map_err(|e| ImageError::io("cut", &state.path, e))?;
        state.hasher = Hasher::default();
        Ok(self)
    }

    /// A body that ended early: either the connection broke without our being told, or the announced size was
    /// a lie.
    fn check_end(&self, session: &Session) -> Result<(), ImageError> {
        let State { blob, hasher, .. } = self.state();
        if hasher.bytes == blob.size_bytes {
            return Ok(());
        }
        if hasher.clone().finish() == blob.digest {
            let (digest, said) = (blob.digest, blob.size_bytes);
            return Err(ImageError::hostile(format!(
                "blob {digest} has {} bytes, but was announced with {said}",
                hasher.bytes
            )));
        }
        Err(session.network("read blob", "the answer ended early"))
    }

    fn verify(&self) -> Result<(), ImageError> {
        let State { blob, hasher, .. } = self.state();
        let actual = hasher.clone().finish();
        if actual == blob.digest {
            return Ok(());
        }
        Err(ImageError::DigestMismatch { what: "blob".to_owned(), expected: blob.digest, actual })
    }

    /// Syncs the file and gives it its place among the blobs.
    fn publish(self, layout: &Layout) -> Result<(), ImageError> {
        let state = self.state();
        let to = layout.blob(&state.blob.digest);
        state.file.sync_all().map_err(|e| ImageError::io("sync", &state.path, e))?;
        fs::rename(&state.path, &to).map_err(|e| ImageError::io("name", &to, e))?;
        layout::sync_parent(&to)
    }

    fn remove(self) -> Result<(), ImageError> {
        self.0.map_or(Ok(()), |state| layout::remove(&state.path))
    }
}

impl State {
    fn rehash(&mut self) -> Result<(), ImageError> {
        let mut buffer = vec![0; BATCH];
        loop {
            let got = self.file.read(&mut buffer).map_err(|e| ImageError::io("read", &self.path, e))?;
            if got == 0 {
                break;
            }
            self.hasher.update(&buffer[..got]);
        }
        // Longer than the blob: it cannot be its beginning.
        if self.hasher.bytes > self.blob.size_bytes {
            let cut = self.file.set_len(0).and_then(|()| io::Seek::rewind(&mut self.file));
            cut.map_err(|e| ImageError::io("cut", &self.path, e))?;
            self.hasher = Hasher::default();
        }
        Ok(())
    }
}
