//! Lists: repositories, tags, referrers.

use axum::Json;
use axum::http::{HeaderName, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::{parameter, value};
use crate::auth::Caller;
use crate::error::{Code, ErrorResponse};
use crate::meta::ManifestRow;
use crate::registry::Registry;
use coracle_oci::media_types::OCI_INDEX;
use coracle_oci::{Digest, RepositoryName};

const FILTERS_HEADER: HeaderName = HeaderName::from_static("oci-filters-applied");
/// Limit of entries in one page of tags.
const TAGS_MAX: i64 = 10_000;
/// Limit of repositories in a list without `n`.
const REPOSITORIES_MAX: i64 = 1_000_000;
/// Number of names read at once while repositories outside the token's scope are skipped.
const NAMES_READ: i64 = 1000;
/// Limit of bytes in one page of referrers: clients accept 4 MiB.
const REFERRERS_BYTES_MAX: usize = 3 << 20;

/// Limit of entries in one page of referrers.
const REFERRERS_MAX: i64 = 1000;
/// Largest size of a descriptor without media type, artifact type and annotations, bytes.
const DESCRIPTOR_BYTES: usize = 300;

struct Page {
    most: i64,
    last: Option<String>,
}

fn page(uri: &Uri, most: i64) -> Result<Page, ErrorResponse> {
    let invalid = || ErrorResponse::new(Code::PaginationNumberInvalid, "n is not a number");
    let n = parameter(uri, "n").map(|n| n.parse::<u32>().map_err(|_| invalid())).transpose()?;
    let most = n.map_or(most, |n| i64::from(n).min(most));
    Ok(Page { most, last: parameter(uri, "last") })
}

/// Truncates a list that was read with one entry too many, and returns the link to the next page.
fn cut(names: &mut Vec<String>, path: &str, page: &Page) -> Option<String> {
    let most = usize::try_from(page.most).unwrap_or(0);
    if names.len() <= most {
        return None;
    }
    names.truncate(most);
    let last = form_urlencoded::byte_serialize(names.last()?.as_bytes()).collect::<String>();
    Some(format!("<{path}?n={most}&last={last}>; rel=\"next\""))
}

fn with_link(body: Value, link: Option<String>) -> Response {
    let mut response = Json(body).into_response();
    if let Some(link) = link {
        response.headers_mut().insert(header::LINK, value(&link));
    }
    response
}

pub(super) async fn catalog(
    registry: &Registry,
    caller: &Caller,
    uri: &Uri,
) -> Result<Response, ErrorResponse> {
    let page = page(uri, REPOSITORIES_MAX)?;
    let mut names = readable_names(registry, caller, page.last.clone(), page.most + 1).await?;
    let link = cut(&mut names, "/v2/_catalog", &page);
    Ok(with_link(json!({"repositories": names}), link))
}

/// First `most` names after `last` that the caller may see.
async fn readable_names(
    registry: &Registry,
    caller: &Caller,
    mut last: Option<String>,
    most: i64,
) -> Result<Vec<String>, ErrorResponse> {
    if caller.can_read_all() {
        return Ok(registry.meta.repository_names(last.as_deref(), most).await?);
    }
    let wanted = usize::try_from(most).unwrap_or(0);
    let mut seen = Vec::new();
    while seen.len() < wanted {
        let names = registry.meta.repository_names(last.as_deref(), NAMES_READ).await?;
        let Some(end) = names.last() else { break };
        last = Some(end.clone());
        seen.extend(names.into_iter().filter(|name| caller.can_read(name)));
    }
    seen.truncate(wanted);
    Ok(seen)
}

pub(super) async fn tags(
    registry: &Registry,
    repo: &RepositoryName,
    uri: &Uri,
) -> Result<Response, ErrorResponse> {
    let page = page(uri, TAGS_MAX)?;
    if !registry.meta.has_repository(repo).await? {
        return Err(ErrorResponse::new(Code::NameUnknown, "repository not found")
            .detail(json!({"name": repo.as_str()})));
    }
    let mut names = registry.meta.tag_names(repo, page.last.as_deref(), page.most + 1).await?;
    let link = cut(&mut names, &format!("/v2/{repo}/tags/list"), &page);
    Ok(with_link(json!({"name": repo.as_str(), "tags": names}), link))
}

fn descriptor(row: &ManifestRow) -> Value {
    let mut entry = json!({"mediaType": row.media_type, "digest": row.digest, "size": row.size});
    if !row.artifact_type.is_empty() {
        entry["artifactType"] = json!(row.artifact_type);
    }
    let annotations: Value = serde_json::from_str(&row.annotations).unwrap_or_default();
    if annotations.as_object().is_some_and(|a| !a.is_empty()) {
        entry["annotations"] = annotations;
    }
    entry
}

/// Number of entries that fit into a page, at least one. Pure.
fn referrers_shown(sizes: &[(String, i64)]) -> usize {
    let most = usize::try_from(REFERRERS_MAX).unwrap_or(usize::MAX);
    let mut bytes = 0;
    let fits = sizes.iter().take(most).take_while(|(_, size)| {
        bytes += usize::try_from(*size).unwrap_or(usize::MAX) + DESCRIPTOR_BYTES;
        bytes <= REFERRERS_BYTES_MAX
    });
    fits.count().max(sizes.len().min(1))
}

/// Page of referrers after `last`, and its last digest if more follow.
pub(super) async fn referrers_page(
    registry: &Registry,
    repo: &RepositoryName,
    subject: &Digest,
    artifact_type: Option<&str>,
    last: &str,
) -> Result<(Vec<ManifestRow>, Option<String>), ErrorResponse> {
    let sizes = registry.meta.referrer_sizes(repo, subject, artifact_type, last, REFERRERS_MAX + 1).await?;
    let shown = referrers_shown(&sizes);
    let Some((end, _)) = shown.checked_sub(1).and_then(|n| sizes.get(n)) else {
        return Ok((Vec::new(), None));
    };
    let rows = registry.meta.referrers(repo, subject, artifact_type, last, end).await?;
    Ok((rows, (sizes.len() > shown).then(|| end.clone())))
}

/// Index of the referrers of a manifest. The manifest itself need not exist.
pub(super) async fn referrers(
    registry: &Registry,
    repo: &RepositoryName,
    subject: &Digest,
    uri: &Uri,
) -> Result<Response, ErrorResponse> {
    let (filter, last) = (parameter(uri, "artifactType"), parameter(uri, "last").unwrap_or_default());
    let (rows, next) = referrers_page(registry, repo, subject, filter.as_deref(), &last).await?;
    let entries: Vec<Value> = rows.iter().map(descriptor).collect();
    let link = next.map(|last| {
        let encode = |text: &String| form_urlencoded::byte_serialize(text.as_bytes()).collect::<String>();
        let kind = filter.as_ref().map(|f| format!("&artifactType={}", encode(f))).unwrap_or_default();
        format!("</v2/{repo}/referrers/{subject}?last={last}{kind}>; rel=\"next\"")
    });
    let body = json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries});
    let mut response = with_link(body, link);
    response.headers_mut().insert(header::CONTENT_TYPE, value(OCI_INDEX));
    if filter.is_some() {
        response.headers_mut().insert(FILTERS_HEADER, value("artifactType"));
    }
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn referrers_shown_table() {
        const MIB: i64 = 1 << 20;
        for (why, sizes, want) in [
            ("none", vec![], 0),
            ("small ones", vec![10; 5], 5),
            ("a large one alone", vec![50 * MIB, 10], 1),
            ("up to the page", vec![MIB; 5], 2),
            ("a large one next", vec![10, 50 * MIB], 1),
            ("very many", vec![1; 1001], 1000),
        ] {
            let sizes: Vec<_> = sizes.into_iter().map(|size| (String::new(), size)).collect();
            assert_eq!(referrers_shown(&sizes), want, "{why}");
        }
    }
}
