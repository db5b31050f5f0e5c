//! Uploads: the requests around `crate::uploads`.

use std::sync::Arc;

use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::ranges::content_range;
use super::{DIGEST_HEADER, parameter, to_its_end, value};
use crate::digest::Digest;
use crate::error::{Code, Problem};
use crate::names::{RepositoryName, UploadId};
use crate::registry::Registry;
use crate::uploads::{Chunk, location, range};

const UUID_HEADER: HeaderName = HeaderName::from_static("docker-upload-uuid");

fn chunk(parts: &Parts, body: Body) -> Result<Chunk, Problem> {
    let length = match parts.headers.get(header::CONTENT_LENGTH) {
        Some(said) => Some(
            said.to_str()
                .ok()
                .and_then(|s| s.parse().ok())
                .ok_or_else(|| Problem::new(Code::SizeInvalid, "Content-Length is no number"))?,
        ),
        None => None,
    };
    let range = content_range(&parts.headers).map_err(|()| {
        Problem::new(Code::BlobUploadInvalid, "Content-Range is not FIRST-LAST")
            .status(StatusCode::RANGE_NOT_SATISFIABLE)
    })?;
    Ok(Chunk { body, length, range })
}

fn wanted_digest(parts: &Parts) -> Result<Digest, Problem> {
    let said = parameter(&parts.uri, "digest");
    let said = said.ok_or_else(|| Problem::new(Code::DigestInvalid, "the digest parameter is missing"))?;
    said.parse().map_err(|e| Problem::new(Code::DigestInvalid, format!("{e}")))
}

fn accepted(status: StatusCode, repo: &RepositoryName, id: &UploadId, bytes: u64) -> Response {
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

fn created(repo: &RepositoryName, digest: &Digest) -> Response {
    let headers = [
        (header::LOCATION, value(&format!("/v2/{repo}/blobs/{digest}"))),
        (DIGEST_HEADER, value(&digest.to_string())),
    ];
    (StatusCode::CREATED, headers).into_response()
}

/// POST: a mount where that can be, a whole blob where a digest is given, else a session.
pub(super) async fn begin(
    registry: Arc<Registry>,
    repo: RepositoryName,
    parts: Parts,
    body: Body,
) -> Result<Response, Problem> {
    if let Some(digest) = parameter(&parts.uri, "mount") {
        if let Some(mounted) = mount(&registry, &repo, &digest, parameter(&parts.uri, "from")).await? {
            return Ok(mounted);
        }
    } else if parameter(&parts.uri, "digest").is_some() {
        let digest = wanted_digest(&parts)?;
        return whole(registry, repo, digest, parts, body).await;
    }
    let id = registry.begin_upload(&repo).await?;
    Ok(accepted(StatusCode::ACCEPTED, &repo, &id, 0))
}

/// A blob of another repository. Without `from` it may be in any: whoever may write here may read everything.
async fn mount(
    registry: &Registry,
    repo: &RepositoryName,
    digest: &str,
    from: Option<String>,
) -> Result<Option<Response>, Problem> {
    let Ok(digest) = digest.parse::<Digest>() else { return Ok(None) };
    if let Some(from) = from {
        let Ok(from) = from.parse() else { return Ok(None) };
        if !registry.meta.has_link(&from, &digest).await? {
            return Ok(None);
        }
    }
    let linked = registry.meta.link(repo, &digest.to_string(), registry.now()).await?;
    Ok(linked.then(|| created(repo, &digest)))
}

/// A blob in one request: POST with a digest, and the original's PUT.
pub(super) async fn whole(
    registry: Arc<Registry>,
    repo: RepositoryName,
    digest: Digest,
    parts: Parts,
    body: Body,
) -> Result<Response, Problem> {
    let chunk = Chunk { range: None, ..chunk(&parts, body)? };
    let own = Arc::clone(&registry);
    to_its_end(&registry, async move {
        let id = own.begin_upload(&repo).await?;
        let finished = own.finish(&repo, &id, chunk, &digest).await;
        if finished.is_err() {
            own.cancel(&repo, &id).await.ok();
        }
        finished.map(|()| created(&repo, &digest))
    })
    .await
}

pub(super) async fn look(
    registry: &Registry,
    repo: &RepositoryName,
    id: &UploadId,
) -> Result<Response, Problem> {
    let bytes = registry.upload_size(repo, id).await?;
    Ok(accepted(StatusCode::NO_CONTENT, repo, id, bytes))
}

pub(super) async fn append(
    registry: Arc<Registry>,
    repo: RepositoryName,
    id: UploadId,
    parts: Parts,
    body: Body,
) -> Result<Response, Problem> {
    let chunk = chunk(&parts, body)?;
    let own = Arc::clone(&registry);
    to_its_end(&registry, async move {
        let bytes = own.append(&repo, &id, chunk).await?;
        Ok(accepted(StatusCode::ACCEPTED, &repo, &id, bytes))
    })
    .await
}

pub(super) async fn finish(
    registry: Arc<Registry>,
    repo: RepositoryName,
    id: UploadId,
    parts: Parts,
    body: Body,
) -> Result<Response, Problem> {
    let (digest, chunk) = (wanted_digest(&parts)?, chunk(&parts, body)?);
    let own = Arc::clone(&registry);
    to_its_end(&registry, async move {
        own.finish(&repo, &id, chunk, &digest).await?;
        Ok(created(&repo, &digest))
    })
    .await
}

pub(super) async fn cancel(
    registry: &Registry,
    repo: &RepositoryName,
    id: &UploadId,
) -> Result<Response, Problem> {
    registry.cancel(repo, id).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
