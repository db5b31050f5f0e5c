//! Lists: repositories, tags, referrers.

use axum::Json;
use axum::http::{HeaderName, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::{parameter, value};
use crate::digest::Digest;
use crate::error::{Code, Problem};
use crate::manifest::OCI_INDEX;
use crate::meta::ManifestRow;
use crate::names::RepositoryName;
use crate::registry::Registry;

const FILTERS_HEADER: HeaderName = HeaderName::from_static("oci-filters-applied");
/// Most entries of one page of tags, whatever the client asks for.
const TAGS_MAX: i64 = 10_000;
/// Without `n` all repositories are listed; this is what "all" may be.
const REPOSITORIES_MAX: i64 = 1_000_000;
/// Most bytes of one page of referrers: clients take 4 MiB.
const REFERRERS_BYTES_MAX: usize = 3 << 20;

struct Page {
    most: i64,
    last: Option<String>,
}

fn page(uri: &Uri, most: i64) -> Result<Page, Problem> {
    let invalid = || Problem::new(Code::PaginationNumberInvalid, "n is no count");
    let n = parameter(uri, "n").map(|n| n.parse::<u32>().map_err(|_| invalid())).transpose()?;
    let most = n.map_or(most, |n| i64::from(n).min(most));
    Ok(Page { most, last: parameter(uri, "last") })
}

/// Cuts a list that was read one longer than wanted, and names the next page where there is one.
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

pub(super) async fn catalog(registry: &Registry, uri: &Uri) -> Result<Response, Problem> {
    let page = page(uri, REPOSITORIES_MAX)?;
    let mut names = registry.meta.repository_names(page.last.as_deref(), page.most + 1).await?;
    let link = cut(&mut names, "/v2/_catalog", &page);
    Ok(with_link(json!({"repositories": names}), link))
}

pub(super) async fn tags(registry: &Registry, repo: &RepositoryName, uri: &Uri) -> Result<Response, Problem> {
    let page = page(uri, TAGS_MAX)?;
    if !registry.meta.knows(repo).await? {
        return Err(Problem::new(Code::NameUnknown, "there is no such repository")
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

/// An index of what was said about a manifest, which need not be there itself.
pub(super) async fn referrers(
    registry: &Registry,
    repo: &RepositoryName,
    subject: &Digest,
    uri: &Uri,
) -> Result<Response, Problem> {
    let (filter, last) = (parameter(uri, "artifactType"), parameter(uri, "last"));
    let rows = registry.meta.referrers(repo, subject).await?;
    let wanted = rows.iter().filter(|row| filter.as_ref().is_none_or(|f| row.artifact_type == *f));
    let behind = wanted.filter(|row| last.as_ref().is_none_or(|last| row.digest > *last));
    let (mut entries, mut bytes, mut link): (Vec<Value>, _, _) = (Vec::new(), 0, None);
    for row in behind {
        let entry = descriptor(row);
        bytes += entry.to_string().len();
        if bytes > REFERRERS_BYTES_MAX && !entries.is_empty() {
            let last = entries.last().and_then(|e| e["digest"].as_str()).unwrap_or_default();
            let filter =
                filter.as_ref().map(|f| form_urlencoded::byte_serialize(f.as_bytes()).collect::<String>());
            let filter = filter.map(|f| format!("&artifactType={f}")).unwrap_or_default();
            link = Some(format!("</v2/{repo}/referrers/{subject}?last={last}{filter}>; rel=\"next\""));
            break;
        }
        entries.push(entry);
    }
    let body = json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries});
    let mut response = with_link(body, link);
    response.headers_mut().insert(header::CONTENT_TYPE, value(OCI_INDEX));
    if filter.is_some() {
        response.headers_mut().insert(FILTERS_HEADER, value("artifactType"));
    }
    Ok(response)
}
