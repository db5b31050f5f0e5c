//! A blob into a file: streamed, hashed, gone on with where it broke off.

use reqwest::StatusCode;
use tokio::{
    fs::File,
    io::{AsyncSeekExt, AsyncWriteExt},
    sync::Mutex,
};

use super::Session;
use crate::{Digest, ImageError, digest::Hasher};

/// Fetches a blob into an empty file and verifies it.
///
/// # Errors
/// [`ImageError::DigestMismatch`] and [`ImageError::Hostile`] for wrong bytes; [`ImageError::StorageFull`],
/// [`ImageError::Io`]; those of the registry.
pub(crate) async fn fetch_file(
    session: &Session,
    digest: &Digest,
    size_bytes: u64,
    file: File,
) -> Result<(), ImageError> {
    let state = Mutex::new((file, Hasher::default()));
    let fail = |e| ImageError::io("write blob into", "a temporary file", e);
    session
        .retry(|| async {
            let mut state = state.lock().await;
            let (file, hasher) = &mut *state;
            let mut response = session.blob(digest, hasher.bytes).await?;
            if response.status() != StatusCode::PARTIAL_CONTENT {
                file.set_len(0).await.map_err(fail)?;
                file.rewind().await.map_err(fail)?;
                *hasher = Hasher::default();
            }
            while let Some(chunk) = response.chunk().await.map_err(|e| session.network("read blob", e))? {
                if hasher.bytes + chunk.len() as u64 > size_bytes {
                    let what = format!("blob {digest} is longer than its manifest says");
                    return Err(ImageError::hostile(what));
                }
                file.write_all(&chunk).await.map_err(fail)?;
                hasher.update(&chunk);
            }
            match hasher.bytes == size_bytes {
                true => file.flush().await.map_err(fail),
                false => Err(session.network("read blob", "it ended early")),
            }
        })
        .await?;
    let actual = state.into_inner().1.finish();
    match actual == *digest {
        true => Ok(()),
        false => Err(ImageError::DigestMismatch { what: "blob".to_owned(), expected: *digest, actual }),
    }
}
