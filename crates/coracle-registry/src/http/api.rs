//! `/api/*`: epoch's routes for users and tools.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{manifests, method, read_bounded};
use crate::auth::{Caller, hash, secret};
use crate::error::{Code, ErrorResponse};
use crate::meta::{RepositoryRow, TagRow, TokenRow};
use crate::registry::Registry;
use crate::rights::{InvalidRights, Rights, Role};
use crate::route::Route;
use coracle_oci::{RepositoryName, Tag, TagOrDigest};

/// Largest request body, bytes.
const BODY_MAX: u64 = 64 << 10;
/// Longest name of a token, bytes.
const NAME_MAX: usize = 100;

pub(super) async fn api(
    own: Arc<Registry>,
    caller: &Caller,
    route: Route,
    parts: &Parts,
    body: Body,
) -> Result<Response, ErrorResponse> {
    let registry = own.as_ref();
    let json = |value: Value| Ok(Json(value).into_response());
    let get = matches!(parts.method, Method::GET | Method::HEAD);
    match (route, &parts.method) {
        (Route::Stats, _) if get => {
            let s = registry.meta.stats().await?;
            json(
                json!({"repositoryCount": s.repositories, "tagCount": s.tags, "blobCount": s.blobs, "totalSize": s.bytes}),
            )
        }
        (Route::Repositories, _) if get => {
            let rows = registry.meta.repositories(None).await?;
            json(rows.iter().filter(|row| caller.can_read(&row.name)).map(repository).collect())
        }
        (Route::Repository(repo), _) if get => {
            let rows = registry.meta.repositories(Some(repo.as_str())).await?;
            json(repository(rows.first().ok_or_else(|| no_repository(&repo))?))
        }
        (Route::Tags(repo), _) if get => {
            let mut tags = Vec::new();
            for row in registry.meta.tags(&repo, None).await? {
                tags.push(tag(registry, &repo, &row).await?.0);
            }
            json(tags.into())
        }
        (Route::Tag(repo, name), _) if get => json(one_tag(registry, &repo, &name).await?),
        (Route::Tag(repo, name), &Method::DELETE) => {
            let tag = TagOrDigest::Tag(name);
            match manifests::remove(Arc::clone(&own), repo, tag.clone()).await? {
                true => Ok(StatusCode::NO_CONTENT.into_response()),
                false => Err(manifests::unknown(&tag)),
            }
        }
        (Route::Sync, &Method::POST) => {
            let found = registry.rebuild().await?;
            registry.write_catalog().await?;
            json(json!({"manifests": found.manifests, "tags": found.tags, "blobs": found.blobs}))
        }
        (Route::Garbage, _) if get => {
            let doomed = registry.would_free().await?;
            let bytes: i64 = doomed.iter().map(|d| d.size).sum();
            let digests: Vec<_> = doomed.iter().map(|d| d.digest.clone()).collect();
            json(json!({"blobs": digests, "bytes": bytes}))
        }
        (Route::Garbage, &Method::POST) => {
            let swept = registry.sweep().await?;
            json(
                json!({"blobs": swept.blobs, "bytes": swept.bytes, "uploads": swept.uploads, "manifests": swept.manifests}),
            )
        }
        (Route::Tokens, _) if get => json(registry.meta.tokens().await?.iter().map(token).collect()),
        (Route::Tokens, &Method::POST) => make_token(registry, caller, body).await,
        (Route::StoredToken(id), &Method::DELETE) => match registry.meta.remove_token(&id).await? {
            true => {
                registry.gate.forget_all();
                Ok(StatusCode::NO_CONTENT.into_response())
            }
            false => Err(ErrorResponse::new(Code::NameUnknown, "token not found")),
        },
        _ => Err(method()),
    }
}

fn no_repository(repo: &RepositoryName) -> ErrorResponse {
    ErrorResponse::new(Code::NameUnknown, "repository not found").detail(json!({"name": repo.as_str()}))
}

/// Time as RFC 3339 text.
pub(crate) fn time(millis: i64) -> String {
    jiff::Timestamp::from_millisecond(millis).unwrap_or_default().to_string()
}

fn repository(row: &RepositoryRow) -> Value {
    json!({
        "id": row.name,
        "name": row.name,
        "tagCount": row.tag_count,
        "totalSize": row.total,
        "artifactType": row.artifact_type,
        "kind": row.kind,
        "createdAt": time(row.created),
        "updatedAt": time(row.updated),
    })
}

/// Row of a tag, and the bytes of its manifest.
async fn tag(
    registry: &Registry,
    repo: &RepositoryName,
    row: &TagRow,
) -> Result<(Value, Value), ErrorResponse> {
    let bytes = manifests::bytes(registry, repo, &row.digest).await?.unwrap_or_default();
    let manifest: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    let mut platforms = Vec::new();
    for child in manifest["manifests"].as_array().into_iter().flatten().take(64) {
        let digest = child["digest"].as_str().unwrap_or_default();
        if let Some(child) = registry.meta.manifest(repo, digest).await? {
            platforms.push(json!({"digest": digest, "size": child.total, "layerCount": child.layers}));
        }
    }
    let entry = json!({
        "id": format!("{repo}:{}", row.tag),
        "repoName": repo.as_str(),
        "name": row.tag,
        "digest": row.digest,
        "artifactType": row.artifact_type,
        "kind": row.kind,
        "totalSize": row.total,
        "layerCount": row.layers,
        "platformSizes": platforms,
        "pushedAt": time(row.pushed),
        "syncedAt": time(row.pushed),
    });
    Ok((entry, manifest))
}

async fn one_tag(registry: &Registry, repo: &RepositoryName, name: &Tag) -> Result<Value, ErrorResponse> {
    let rows = registry.meta.tags(repo, Some(name)).await?;
    let row = rows.first().ok_or_else(|| manifests::unknown(&TagOrDigest::Tag(name.clone())))?;
    let (mut entry, manifest) = tag(registry, repo, row).await?;
    if row.kind == "snapshot"
        && let Some(config) = super::download::shown_config(registry, repo, &manifest).await?
    {
        entry["snapshotConfig"] = config;
    }
    entry["tag"] = json!(row.tag);
    if let Some(fields) = entry.as_object_mut() {
        fields.remove("id");
        fields.remove("name");
        if row.kind != "image-index" {
            fields.remove("platformSizes");
        }
    }
    entry["manifest"] = manifest;
    Ok(entry)
}

fn token(row: &TokenRow) -> Value {
    let rights = row.rights().ok();
    json!({
        "id": row.id,
        "name": row.name,
        "createdBy": row.created_by,
        "createdAt": time(row.created),
        "lastUsed": row.last_used.map(time),
        "expiresAt": row.expires.map(time),
        "readOnly": row.writes == 0,
        "role": rights.as_ref().map(|rights| rights.role().as_str()),
        "repositories": rights.as_ref().map(Rights::globs),
    })
}

/// Body of `POST /api/tokens`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TokenRequest {
    name: String,
    ttl_seconds: Option<i64>,
    #[serde(default)]
    read_only: bool,
    role: Option<String>,
    repositories: Option<Vec<String>>,
}

impl TokenRequest {
    /// Rights of the token. As in epoch, a token without a role may push and delete, unless it is `readOnly`.
    fn rights(&self) -> Result<Rights, InvalidRights> {
        let role = match &self.role {
            Some(role) => role.parse()?,
            None if self.read_only => Role::Read,
            None => Role::Delete,
        };
        match &self.repositories {
            Some(globs) => Rights::new(role, globs.iter().map(|g| g.parse()).collect::<Result<_, _>>()?),
            None => Ok(Rights::everywhere(role)),
        }
    }
}

/// Expiry of a new token: as requested, but not later than that of the creating token.
fn expiry(ttl_seconds: Option<i64>, maker: Option<i64>, now: i64) -> Result<Option<i64>, ErrorResponse> {
    let asked = ttl_seconds.map(|ttl| now.saturating_add(ttl.saturating_mul(1000)));
    match (asked, maker) {
        (Some(asked), Some(maker)) if asked > maker => {
            Err(ErrorResponse::new(Code::Denied, "a new token cannot outlive the token that creates it"))
        }
        _ => Ok(asked.or(maker)),
    }
}

/// Creates a token from `{name, ttlSeconds?, readOnly?, role?, repositories?}`. Only this response contains the token.
async fn make_token(registry: &Registry, caller: &Caller, body: Body) -> Result<Response, ErrorResponse> {
    let invalid = |why: &str| ErrorResponse::new(Code::Unsupported, why).status(StatusCode::BAD_REQUEST);
    let bytes = read_bounded(registry, body, BODY_MAX).await?;
    let asked: TokenRequest =
        serde_json::from_slice(&bytes).map_err(|e| invalid(&format!("invalid token request: {e}")))?;
    let name = asked.name.trim();
    if name.is_empty() || name.chars().count() > NAME_MAX || name.chars().any(char::is_control) {
        return Err(invalid("a token has a name of 1 to 100 characters"));
    }
    if asked.ttl_seconds.is_some_and(|ttl| ttl <= 0) {
        return Err(invalid("ttlSeconds is not a positive number"));
    }
    let rights = asked.rights().map_err(|e| invalid(&e.to_string()))?;
    if asked.read_only && rights.role() != Role::Read {
        return Err(invalid("readOnly and role differ"));
    }
    let maker =
        caller.holder.as_ref().ok_or_else(|| ErrorResponse::new(Code::Unauthorized, "a token is needed"))?;
    let (secret, now) = (secret(), registry.now());
    let row = TokenRow {
        id: hex::encode(rand::random::<[u8; 8]>()),
        name: name.to_owned(),
        writes: i64::from(rights.role() != Role::Read),
        role: Some(rights.role().to_string()),
        repositories: Some(rights.globs().join(" ")),
        created_by: maker.name.clone(),
        created: now,
        expires: expiry(asked.ttl_seconds, maker.expires, now)?,
        last_used: None,
    };
    registry.meta.put_token(&hash(&secret), &row).await?;
    let mut shown = token(&row);
    shown["token"] = json!(secret);
    Ok((StatusCode::CREATED, Json(shown)).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_expiry_table() {
        for (why, ttl, maker, want) in [
            ("neither ends", None, None, Some(None)),
            ("as asked", Some(5), None, Some(Some(6_000))),
            ("as its maker", None, Some(3_000), Some(Some(3_000))),
            ("before its maker", Some(1), Some(3_000), Some(Some(2_000))),
            ("after its maker", Some(5), Some(3_000), None),
        ] {
            assert_eq!(expiry(ttl, maker, 1_000).ok(), want, "{why}");
        }
    }
}
