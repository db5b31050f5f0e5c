//! Manifests: reading, writing, removing.

use std::sync::Arc;

use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{HeaderName, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::json;

use super::ranges::is_known;
use super::{DIGEST_HEADER, bounded, parameters, to_its_end, too_large, value};
use crate::digest::Digest;
use crate::error::{Code, Problem};
use crate::manifest::{self, Manifest};
use crate::meta::{ManifestRow, NewManifest, Put};
use crate::names::{Reference, RepositoryName, Tag};
use crate::registry::Registry;
use crate::storage::manifest_key;

const SUBJECT_HEADER: HeaderName = HeaderName::from_static("oci-subject");
const TAG_HEADER: HeaderName = HeaderName::from_static("oci-tag");
/// Tags that one request may set beside the one of its path.
const TAGS_MAX: usize = 64;
/// Unit in which memory for manifests is counted.
pub(crate) const MEMORY_UNIT: u64 = 64 << 10;

pub(super) fn unknown(reference: &Reference) -> Problem {
    Problem::new(Code::ManifestUnknown, "the manifest is not in this repository")
        .detail(json!({"reference": reference.to_string()}))
}

/// The row of a manifest, by tag or digest.
pub(super) async fn find(
    registry: &Registry,
    repo: &RepositoryName,
    reference: &Reference,
) -> Result<Option<ManifestRow>, Problem> {
    let digest = match reference {
        Reference::Digest(digest) => digest.to_string(),
        Reference::Tag(tag) => match registry.meta.tagged(repo, tag).await? {
            Some(digest) => digest,
            None => return Ok(None),
        },
    };
    Ok(registry.meta.manifest(repo, &digest).await?)
}

/// The bytes of a manifest.
pub(super) async fn bytes(
    registry: &Registry,
    repo: &RepositoryName,
    digest: &str,
) -> Result<Option<Bytes>, Problem> {
    let Ok(digest) = digest.parse() else { return Ok(None) };
    Ok(registry.storage.get(&manifest_key(repo.as_str(), &digest)).await?)
}

pub(super) async fn get(
    registry: &Registry,
    repo: &RepositoryName,
    reference: &Reference,
    parts: &Parts,
) -> Result<Response, Problem> {
    let row = find(registry, repo, reference).await?.ok_or_else(|| unknown(reference))?;
    let etag = format!("\"{}\"", row.digest);
    let mut response = Response::new(Body::empty());
    let headers = response.headers_mut();
    headers.insert(header::ETAG, value(&etag));
    headers.insert(DIGEST_HEADER, value(&row.digest));
    let fixed = matches!(reference, Reference::Digest(_));
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

/// Reads a manifest, while there is memory for it.
async fn read(registry: &Registry, parts: &Parts, body: Body) -> Result<Bytes, Problem> {
    let most = registry.limits.manifest_bytes;
    let said = parts.headers.get(header::CONTENT_LENGTH).and_then(|l| l.to_str().ok()?.parse::<u64>().ok());
    if said.is_some_and(|said| said > most) {
        return Err(too_large(most));
    }
    let units = u32::try_from(said.unwrap_or(most).div_ceil(MEMORY_UNIT).max(1)).unwrap_or(u32::MAX);
    let _memory = registry.manifest_memory.acquire_many(units).await;
    bounded(registry, body, most).await
}

pub(super) async fn put(
    registry: Arc<Registry>,
    repo: RepositoryName,
    reference: Reference,
    parts: Parts,
    body: Body,
) -> Result<Response, Problem> {
    let bytes = read(&registry, &parts, body).await?;
    let said = parts.headers.get(header::CONTENT_TYPE).and_then(|t| t.to_str().ok());
    let parsed = manifest::parse(&bytes, said)?;
    let digest = match &reference {
        Reference::Digest(digest) => {
            let actual = Digest::made(&bytes, digest.algorithm());
            if actual != *digest {
                return Err(Problem::new(Code::DigestInvalid, "the manifest does not have the digest")
                    .detail(json!({"digest": digest.to_string(), "actual": actual.to_string()})));
            }
            digest.clone()
        }
        Reference::Tag(_) => Digest::of(&bytes),
    };
    let (tags, extra) = tags(&reference, &parts)?;
    let (own, name, of, what) = (Arc::clone(&registry), repo.clone(), digest.clone(), parsed.clone());
    to_its_end(&registry, async move { store(&own, &name, &of, &what, &tags, bytes).await }).await?;
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

/// The tags to set: that of the path, or those of the query beside a digest.
fn tags(reference: &Reference, parts: &Parts) -> Result<(Vec<Tag>, Vec<Tag>), Problem> {
    if let Reference::Tag(tag) = reference {
        return Ok((vec![tag.clone()], Vec::new()));
    }
    let named = parameters(&parts.uri, "tag");
    if named.len() > TAGS_MAX {
        return Err(Problem::new(Code::TagInvalid, format!("a request sets at most {TAGS_MAX} tags"))
            .status(StatusCode::URI_TOO_LONG));
    }
    let invalid = |e| Problem::new(Code::TagInvalid, format!("{e}"));
    let named: Vec<Tag> = named.iter().map(|t| t.parse()).collect::<Result<_, _>>().map_err(invalid)?;
    Ok((named.clone(), named))
}

/// Bytes first, then the tables; the tables decide what is there, and a rebuild finds no more than was asked for.
async fn store(
    registry: &Registry,
    repo: &RepositoryName,
    digest: &Digest,
    manifest: &Manifest,
    tags: &[Tag],
    bytes: Bytes,
) -> Result<(), Problem> {
    let _turn = registry.turns.of(repo).await;
    let size = i64::try_from(bytes.len()).unwrap_or(i64::MAX);
    let key = manifest_key(repo.as_str(), digest);
    let known = registry.meta.manifest(repo, &digest.to_string()).await?.is_some();
    registry.storage.put(&key, bytes.clone()).await?;
    let new = NewManifest { repo, digest, tags, size, manifest };
    let put = registry.meta.put_manifest(&new, registry.now(), false).await?;
    if let Put::Missing(missing) = put {
        if !known {
            registry.storage.delete(&key).await?;
        }
        let mut problem =
            Problem::new(Code::ManifestBlobUnknown, "the manifest names what is not in this repository");
        for digest in missing {
            problem = problem.detail(json!({"digest": digest.to_string()}));
        }
        return Err(problem);
    }
    for tag in tags {
        registry.storage.put(&registry.storage.tag_key(repo.as_str(), tag.as_str()), bytes.clone()).await?;
    }
    // Another replica may have removed the same manifest meanwhile, its bytes before its row: then ours is left alone.
    if registry.storage.is_shared() && registry.storage.get(&key).await?.is_none() {
        registry.storage.put(&key, bytes).await?;
    }
    Ok(())
}

pub(super) async fn delete(
    registry: &Registry,
    repo: &RepositoryName,
    reference: &Reference,
) -> Result<Response, Problem> {
    let gone = match reference {
        Reference::Tag(tag) => untag(registry, repo, tag).await?,
        Reference::Digest(digest) => registry.remove_manifest(repo, digest).await?,
    };
    if gone { Ok(StatusCode::ACCEPTED.into_response()) } else { Err(unknown(reference)) }
}

/// Takes a tag away. `false` when there was none.
pub(super) async fn untag(registry: &Registry, repo: &RepositoryName, tag: &Tag) -> Result<bool, Problem> {
    let _turn = registry.turns.of(repo).await;
    registry.storage.delete(&registry.storage.tag_key(repo.as_str(), tag.as_str())).await?;
    Ok(registry.meta.remove_tag(repo, tag).await?)
}
