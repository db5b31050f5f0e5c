//! A blob into a file: streamed, hashed, gone on with where it broke off, also by an earlier try.

use std::io::{self, Read, Seek};

use reqwest::StatusCode;
use tokio::{
    fs::File,
    io::{AsyncSeekExt, AsyncWriteExt},
    sync::Mutex,
};

use super::{Session, blob::begins_at};
use crate::{Digest, ImageError, digest::Hasher};

/// Bytes that are read at once.
const BATCH: usize = 1 << 20;

/// Fetches a blob into a file and verifies it. What is in the file is taken for the blob's beginning; when that turns out
/// wrong, the blob is fetched anew, once. The file is at its beginning afterwards. Cancel-safe: what has come stays, and
/// the next call goes on with it.
///
/// # Errors
/// [`ImageError::DigestMismatch`] and [`ImageError::Hostile`] for wrong bytes; [`ImageError::StorageFull`],
/// [`ImageError::Io`]; those of the registry.
pub(crate) async fn fetch_file(
    session: &Session,
    digest: &Digest,
    size_bytes: u64,
    file: std::fs::File,
) -> Result<std::fs::File, ImageError> {
    let fail = |e| ImageError::io("write blob into", "a temporary file", e);
    let known = tokio::task::spawn_blocking(move || known(file, size_bytes)).await;
    let (file, hasher) = known.unwrap_or_else(|e| Err(io::Error::other(e))).map_err(fail)?;
    let resumed = hasher.bytes > 0;
    let state = Mutex::new((File::from_std(file), hasher));
    session.retry(|| rest(session, digest, size_bytes, &state)).await?;
    if resumed && state.lock().await.1.clone().finish() != *digest {
        empty(&mut *state.lock().await).await.map_err(fail)?;
        session.retry(|| rest(session, digest, size_bytes, &state)).await?;
    }
    let (mut file, hasher) = state.into_inner();
    let actual = hasher.finish();
    if actual != *digest {
        empty(&mut (file, Hasher::default())).await.map_err(fail)?;
        return Err(ImageError::DigestMismatch { what: "blob".to_owned(), expected: *digest, actual });
    }
    file.rewind().await.map_err(fail)?;
    Ok(file.into_std().await)
}

/// The hash of what is in the file, which is left at its end; one that is too long cannot be a beginning. Blocking.
fn known(mut file: std::fs::File, size_bytes: u64) -> io::Result<(std::fs::File, Hasher)> {
    let mut hasher = Hasher::default();
    if file.metadata()?.len() > size_bytes {
        file.set_len(0)?;
    }
    file.rewind()?;
    let mut buffer = vec![0; BATCH];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok((file, hasher)),
            n => hasher.update(&buffer[..n]),
        }
    }
}

async fn empty((file, hasher): &mut (File, Hasher)) -> io::Result<()> {
    file.set_len(0).await?;
    file.rewind().await?;
    *hasher = Hasher::default();
    Ok(())
}

/// One request, from where the last one ended.
async fn rest(
    session: &Session,
    digest: &Digest,
    size_bytes: u64,
    state: &Mutex<(File, Hasher)>,
) -> Result<(), ImageError> {
    let fail = |e| ImageError::io("write blob into", "a temporary file", e);
    let mut state = state.lock().await;
    if state.1.bytes == size_bytes && size_bytes > 0 {
        return Ok(());
    }
    let asked = session.blob(digest, state.1.bytes).await;
    if matches!(asked, Err(ImageError::Registry { status: 416, .. })) {
        empty(&mut state).await.map_err(fail)?;
        return Err(session.network("resume blob", "the registry does not accept the range"));
    }
    let mut response = asked?;
    if !begins_at(&response, state.1.bytes) {
        empty(&mut state).await.map_err(fail)?;
        if response.status() != StatusCode::OK {
            return Err(session.network("resume blob", "the registry sent another range"));
        }
    }
    let (file, hasher) = &mut *state;
    while let Some(chunk) = response.chunk().await.map_err(|e| session.network("read blob", e))? {
        if hasher.bytes + chunk.len() as u64 > size_bytes {
            return Err(ImageError::hostile(format!("blob {digest} is longer than its manifest says")));
        }
        file.write_all(&chunk).await.map_err(fail)?;
        hasher.update(&chunk);
    }
    file.flush().await.map_err(fail)?;
    match hasher.bytes == size_bytes {
        true => Ok(()),
        false => Err(session.network("read blob", "it ended early")),
    }
}
