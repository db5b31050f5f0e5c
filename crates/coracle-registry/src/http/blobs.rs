//! Reads and deletes blobs.

use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::ranges::{Wanted, is_known, requested_range};
use super::{DIGEST_HEADER, value};
use crate::error::{Code, ErrorResponse};
use crate::registry::Registry;
use coracle_oci::{Digest, RepositoryName};

/// `Cache-Control` of blobs: the content of a digest never changes.
const FOR_EVER: &str = "max-age=31536000, immutable";

pub(super) fn unknown(digest: &Digest) -> ErrorResponse {
    ErrorResponse::new(Code::BlobUnknown, "the blob is not in this repository")
        .detail(json!({"digest": digest.to_string()}))
}

/// Size of a blob in a repository. Protects the blob from the sweep for the grace period.
pub(super) async fn find(
    registry: &Registry,
    repo: &RepositoryName,
    digest: &Digest,
) -> Result<u64, ErrorResponse> {
    let stale = registry.before(registry.sweeping.grace / 4);
    let size = registry.meta.blob(repo, digest, registry.now(), stale).await?;
    size.and_then(|size| u64::try_from(size).ok()).ok_or_else(|| unknown(digest))
}

pub(super) async fn get(
    registry: &Registry,
    repo: &RepositoryName,
    digest: &Digest,
    parts: &Parts,
) -> Result<Response, ErrorResponse> {
    let size = find(registry, repo, digest).await?;
    let etag = format!("\"{digest}\"");
    let mut response = Response::new(Body::empty());
    let headers = response.headers_mut();
    headers.insert(header::ETAG, value(&etag));
    headers.insert(DIGEST_HEADER, value(&digest.to_string()));
    headers.insert(header::CACHE_CONTROL, value(FOR_EVER));
    if is_known(&parts.headers, &etag) {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        return Ok(response);
    }
    headers.insert(header::ACCEPT_RANGES, value("bytes"));
    headers.insert(header::CONTENT_TYPE, value("application/octet-stream"));
    let part = match requested_range(&parts.headers, size, &etag) {
        Wanted::Whole => 0..size,
        Wanted::Part(part) => {
            headers.insert(
                header::CONTENT_RANGE,
                value(&format!("bytes {}-{}/{size}", part.start, part.end - 1)),
            );
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            part
        }
        Wanted::Impossible => {
            return Err(ErrorResponse::new(Code::SizeInvalid, "the range is outside of the blob")
                .status(StatusCode::RANGE_NOT_SATISFIABLE)
                .header(header::CONTENT_RANGE, &format!("bytes */{size}")));
        }
    };
    let length = part.end - part.start;
    response.headers_mut().insert(header::CONTENT_LENGTH, length.into());
    if parts.method == Method::GET {
        registry.metrics.count_downloaded(length);
        *response.body_mut() = registry.storage.read(digest, part).await?.ok_or_else(|| unknown(digest))?;
    }
    Ok(response)
}

pub(super) async fn delete(
    registry: &Registry,
    repo: &RepositoryName,
    digest: &Digest,
) -> Result<Response, ErrorResponse> {
    match registry.meta.unlink(repo, digest).await? {
        true => Ok(StatusCode::ACCEPTED.into_response()),
        false => Err(unknown(digest)),
    }
}
