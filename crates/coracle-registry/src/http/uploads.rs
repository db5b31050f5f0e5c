//! HTTP of uploads. The rules are in `crate::uploads`.

use std::sync::Arc;

use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::ranges::content_range;
use super::{DIGEST_HEADER, parameter, run_to_completion, value};
use crate::auth::Caller;
use crate::error::{Code, ErrorResponse};
use crate::meta::Linked;
use crate::registry::Registry;
use crate::upload_id::UploadId;
use crate::uploads::{Chunk, location, over_quota, range};
use coracle_oci::{Digest, RepositoryName};

const UUID_HEADER: HeaderName = HeaderName::from_static("docker-upload-uuid");

fn chunk(parts: &Parts, body: Body) -> Result<Chunk, ErrorResponse> {
    let length = match parts.headers.get(header::CONTENT_LENGTH) {
        Some(said) => Some(
            said.to_str()
                .ok()
                .and_then(|s| s.parse().ok())
                .ok_or_else(|| ErrorResponse::new(Code::SizeInvalid, "Content-Length is not a number"))?,
        ),
        None => None,
    };
    let range = content_range(&parts.headers)
        .map_err(|()| ErrorResponse::new(Code::BlobUploadInvalid, "Content-Range is not FIRST-LAST"))?;
    Ok(Chunk { body, length, range })
}

fn wanted_digest(parts: &Parts) -> Result<Digest, ErrorResponse> {
    let said = parameter(&parts.uri, "digest");
    let said =
        said.ok_or_else(|| ErrorResponse::new(Code::DigestInvalid, "the digest parameter is missing"))?;
    said.parse().map_err(|e| ErrorResponse::new(Code::DigestInvalid, format!("{e}")))
}

fn upload_response(status: StatusCode, repo: &RepositoryName, id: &UploadId, bytes: u64) -> Response {
    let headers = [
        (header::LOCATION, value(&location(repo, id))),
        (header::RANGE, value(&range(bytes))),
        (UUID_HEADER, value(id.as_str())),
        (header::CONTENT_LENGTH, HeaderValue::from_static("0")),
    ];
    let skip = usize::from(status == StatusCode::NO_CONTENT);
    let mut response = status.into_response();
    response.headers_mut().extend(headers.into_iter().rev().skip(skip));
    response
}

fn created_response(repo: &RepositoryName, digest: &Digest) -> Response {
    let headers = [
        (header::LOCATION, value(&format!("/v2/{repo}/blobs/{digest}"))),
        (DIGEST_HEADER, value(&digest.to_string())),
    ];
    (StatusCode::CREATED, headers).into_response()
}

/// POST: mounts a blob if possible, stores a whole blob if a digest is given, otherwise starts an upload.
pub(super) async fn begin(
    registry: Arc<Registry>,
    caller: Caller,
    repo: RepositoryName,
    parts: Parts,
    body: Body,
) -> Result<Response, ErrorResponse> {
    if let Some(digest) = parameter(&parts.uri, "mount") {
        if let Some(mounted) =
            mount(&registry, &caller, &repo, &digest, parameter(&parts.uri, "from")).await?
        {
            return Ok(mounted);
        }
    } else if parameter(&parts.uri, "digest").is_some() {
        let digest = wanted_digest(&parts)?;
        return put_blob(registry, repo, digest, parts, body).await;
    }
    let id = registry.begin_upload(&repo).await?;
    Ok(upload_response(StatusCode::ACCEPTED, &repo, &id, 0))
}

/// Mounts a blob from another repository that the caller may read; without `from`, from any of these.
async fn mount(
    registry: &Registry,
    caller: &Caller,
    repo: &RepositoryName,
    digest: &str,
    from: Option<String>,
) -> Result<Option<Response>, ErrorResponse> {
    let Ok(digest) = digest.parse::<Digest>() else { return Ok(None) };
    let readable = match from.map(|from| from.parse::<RepositoryName>()) {
        Some(Err(_)) => false,
        Some(Ok(from)) => caller.can_read(from.as_str()) && registry.meta.has_link(&from, &digest).await?,
        None if caller.can_read_all() => true,
        None => registry.meta.links_of(&digest).await?.iter().any(|name| caller.can_read(name)),
    };
    if !readable {
        return Ok(None);
    }
    let quota = registry.limits.repository_quota;
    match registry.meta.mount(repo, &digest, registry.now(), quota).await? {
        Linked::Done => Ok(Some(created_response(repo, &digest))),
        Linked::Absent => Ok(None),
        Linked::Full => Err(over_quota()),
    }
}

/// Stores a blob that comes in one request: POST with a digest, or the PUT of epoch.
pub(super) async fn put_blob(
    registry: Arc<Registry>,
    repo: RepositoryName,
    digest: Digest,
    parts: Parts,
    body: Body,
) -> Result<Response, ErrorResponse> {
    let chunk = Chunk { range: None, ..chunk(&parts, body)? };
    let own = Arc::clone(&registry);
    run_to_completion(&registry, async move {
        let id = own.begin_upload(&repo).await?;
        let finished = own.finish(&repo, &id, chunk, &digest).await;
        if finished.is_err() {
            own.cancel(&repo, &id).await.ok();
        }
        finished.map(|()| created_response(&repo, &digest))
    })
    .await
}

pub(super) async fn upload_status(
    registry: &Registry,
    repo: &RepositoryName,
    id: &UploadId,
) -> Result<Response, ErrorResponse> {
    let bytes = registry.upload_size(repo, id).await?;
    Ok(upload_response(StatusCode::NO_CONTENT, repo, id, bytes))
}

pub(super) async fn append(
    registry: Arc<Registry>,
    repo: RepositoryName,
    id: UploadId,
    parts: Parts,
    body: Body,
) -> Result<Response, ErrorResponse> {
    let chunk = chunk(&parts, body)?;
    let own = Arc::clone(&registry);
    run_to_completion(&registry, async move {
        let bytes = own.append(&repo, &id, chunk).await?;
        Ok(upload_response(StatusCode::ACCEPTED, &repo, &id, bytes))
    })
    .await
}

pub(super) async fn finish(
    registry: Arc<Registry>,
    repo: RepositoryName,
    id: UploadId,
    parts: Parts,
    body: Body,
) -> Result<Response, ErrorResponse> {
    let (digest, chunk) = (wanted_digest(&parts)?, chunk(&parts, body)?);
    let own = Arc::clone(&registry);
    run_to_completion(&registry, async move {
        own.finish(&repo, &id, chunk, &digest).await?;
        Ok(created_response(&repo, &digest))
    })
    .await
}

pub(super) async fn cancel(
    registry: &Registry,
    repo: &RepositoryName,
    id: &UploadId,
) -> Result<Response, ErrorResponse> {
    registry.cancel(repo, id).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
