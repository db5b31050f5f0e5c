//! Reads, writes and deletes manifests.

use std::sync::Arc;

use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{HeaderName, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::json;

use super::ranges::is_known;
use super::{DIGEST_HEADER, body, parameters, run_to_completion, too_large, value};
use crate::error::{Code, ErrorResponse};
use crate::manifest::{self, PushedManifest};
use crate::meta::{ManifestRow, NewManifest, Put};
use crate::registry::Registry;
use crate::storage::manifest_key;
use coracle_oci::{Digest, RepositoryName, Tag, TagOrDigest};

const SUBJECT_HEADER: HeaderName = HeaderName::from_static("oci-subject");
const TAG_HEADER: HeaderName = HeaderName::from_static("oci-tag");
/// Limit of tags that one request may set in addition to the tag in its path.
const TAGS_MAX: usize = 64;

pub(super) fn unknown(reference: &TagOrDigest) -> ErrorResponse {
    ErrorResponse::new(Code::ManifestUnknown, "the manifest is not in this repository")
        .detail(json!({"reference": reference.to_string()}))
}

/// Row of a manifest, found by tag or digest.
pub(super) async fn find(
    registry: &Registry,
    repo: &RepositoryName,
    reference: &TagOrDigest,
) -> Result<Option<ManifestRow>, ErrorResponse> {
    let digest = match reference {
        TagOrDigest::Digest(digest) => digest.to_string(),
        TagOrDigest::Tag(tag) => match registry.meta.tag_digest(repo, tag).await? {
            Some(digest) => digest,
            None => return Ok(None),
        },
    };
    Ok(registry.meta.manifest(repo, &digest).await?)
}

/// Bytes of a manifest.
pub(super) async fn bytes(
    registry: &Registry,
    repo: &RepositoryName,
    digest: &str,
) -> Result<Option<Bytes>, ErrorResponse> {
    let Ok(digest) = digest.parse() else { return Ok(None) };
    Ok(registry.storage.get(&manifest_key(repo.as_str(), &digest)).await?)
}

pub(super) async fn get(
    registry: &Registry,
    repo: &RepositoryName,
    reference: &TagOrDigest,
    parts: &Parts,
) -> Result<Response, ErrorResponse> {
    let row = find(registry, repo, reference).await?.ok_or_else(|| unknown(reference))?;
    let etag = format!("\"{}\"", row.digest);
    let mut response = Response::new(Body::empty());
    let headers = response.headers_mut();
    headers.insert(header::ETAG, value(&etag));
    headers.insert(DIGEST_HEADER, value(&row.digest));
    let fixed = matches!(reference, TagOrDigest::Digest(_));
    headers
        .insert(header::CACHE_CONTROL, value(if fixed { "max-age=31536000, immutable" } else { "no-cache" }));
    if is_known(&parts.headers, &etag) {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        return Ok(response);
    }
    headers.insert(header::CONTENT_TYPE, value(&row.media_type));
    headers.insert(header::CONTENT_LENGTH, row.size.into());
    if parts.method == Method::GET {
        let bytes = bytes(registry, repo, &row.digest).await?.ok_or_else(|| unknown(reference))?;
        *response.body_mut() = Body::from(bytes);
    }
    Ok(response)
}

/// Receives a manifest as memory becomes available.
async fn read(registry: &Registry, parts: &Parts, content: Body) -> Result<Bytes, ErrorResponse> {
    let most = registry.limits.manifest_bytes;
    let said = parts.headers.get(header::CONTENT_LENGTH).and_then(|l| l.to_str().ok()?.parse::<u64>().ok());
    if said.is_some_and(|said| said > most) {
        return Err(too_large(most));
    }
    body::manifest(registry, content, most).await
}

pub(super) async fn put(
    registry: Arc<Registry>,
    repo: RepositoryName,
    reference: TagOrDigest,
    parts: Parts,
    body: Body,
) -> Result<Response, ErrorResponse> {
    let bytes = read(&registry, &parts, body).await?;
    let said = parts.headers.get(header::CONTENT_TYPE).and_then(|t| t.to_str().ok());
    let parsed = manifest::parse(&bytes, said)?;
    let digest = match &reference {
        TagOrDigest::Digest(digest) => {
            let actual = Digest::with(digest.algorithm(), &bytes);
            if actual != *digest {
                return Err(ErrorResponse::new(Code::DigestInvalid, "the manifest does not have the digest")
                    .detail(json!({"digest": digest.to_string(), "actual": actual.to_string()})));
            }
            *digest
        }
        TagOrDigest::Tag(_) => Digest::of(&bytes),
    };
    let (tags, extra) = tags(&reference, &parts)?;
    let (own, name, of, what) = (Arc::clone(&registry), repo.clone(), digest, parsed.clone());
    run_to_completion(&registry, async move { store(&own, &name, &of, &what, &tags, bytes).await }).await?;
    let mut response = StatusCode::CREATED.into_response();
    let headers = response.headers_mut();
    headers.insert(header::LOCATION, value(&format!("/v2/{repo}/manifests/{reference}")));
    headers.insert(DIGEST_HEADER, value(&digest.to_string()));
    if let Some(subject) = &parsed.subject {
        headers.insert(SUBJECT_HEADER, value(&subject.to_string()));
    }
    for tag in extra {
        headers.append(TAG_HEADER, value(tag.as_str()));
    }
    Ok(response)
}

/// Tags to set: the tag of the path, or for a digest the tags of the query.
fn tags(reference: &TagOrDigest, parts: &Parts) -> Result<(Vec<Tag>, Vec<Tag>), ErrorResponse> {
    if let TagOrDigest::Tag(tag) = reference {
        return Ok((vec![tag.clone()], Vec::new()));
    }
    let named = parameters(&parts.uri, "tag");
    if named.len() > TAGS_MAX {
        return Err(ErrorResponse::new(Code::TagInvalid, format!("a request sets at most {TAGS_MAX} tags"))
            .status(StatusCode::URI_TOO_LONG));
    }
    let invalid = |e| ErrorResponse::new(Code::TagInvalid, format!("{e}"));
    let named: Vec<Tag> = named.iter().map(|t| t.parse()).collect::<Result<_, _>>().map_err(invalid)?;
    Ok((named.clone(), named))
}

async fn store(
    registry: &Registry,
    repo: &RepositoryName,
    digest: &Digest,
    manifest: &PushedManifest,
    tags: &[Tag],
    bytes: Bytes,
) -> Result<(), ErrorResponse> {
    let size = i64::try_from(bytes.len()).unwrap_or(i64::MAX);
    let new = NewManifest { repo, digest, tags, size, manifest };
    match registry.manifests.put(&new, bytes, registry.pushed).await? {
        Put::Done => Ok(()),
        Put::Missing(missing) => {
            let problem = ErrorResponse::new(
                Code::ManifestBlobUnknown,
                "content of the manifest not found in this repository",
            );
            Err(missing.iter().fold(problem, |all, one| all.detail(json!({"digest": one.to_string()}))))
        }
        Put::Sizes(wrong) => {
            let problem = ErrorResponse::new(
                Code::ManifestInvalid,
                "the manifest gives a size that its content does not have",
            );
            Err(wrong.iter().fold(problem, |all, one| {
                all.detail(json!({"digest": one.digest.to_string(), "size": one.said, "actual": one.actual}))
            }))
        }
    }
}

pub(super) async fn delete(
    registry: Arc<Registry>,
    repo: RepositoryName,
    reference: TagOrDigest,
) -> Result<Response, ErrorResponse> {
    let gone = remove(registry, repo, reference.clone()).await?;
    if gone { Ok(StatusCode::ACCEPTED.into_response()) } else { Err(unknown(&reference)) }
}

/// Deletes a tag, or a manifest with its tags. Returns false when it did not exist.
pub(super) async fn remove(
    registry: Arc<Registry>,
    repo: RepositoryName,
    reference: TagOrDigest,
) -> Result<bool, ErrorResponse> {
    let own = Arc::clone(&registry);
    run_to_completion(&registry, async move {
        Ok(match &reference {
            TagOrDigest::Tag(tag) => own.manifests.untag(&repo, tag).await?,
            TagOrDigest::Digest(digest) => own.manifests.remove(&repo, digest).await?,
        })
    })
    .await
}
