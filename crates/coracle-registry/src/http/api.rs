//! `/api/*`: the original's routes for people and tools.

use axum::Json;
use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::{bounded, manifests, method};
use crate::auth::{Caller, hash, secret};
use crate::error::{Code, Problem};
use crate::meta::{RepositoryRow, TagRow, TokenRow};
use crate::names::{Reference, RepositoryName, Tag};
use crate::registry::Registry;
use crate::route::Route;

/// Largest question, in bytes.
const BODY_MAX: u64 = 64 << 10;
/// Longest name of a token.
const NAME_MAX: usize = 100;

pub(super) async fn api(
    registry: &Registry,
    route: Route,
    parts: &Parts,
    body: Body,
) -> Result<Response, Problem> {
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
            json(rows.iter().map(repository).collect())
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
        (Route::Tag(repo, name), &Method::DELETE) => match manifests::untag(registry, &repo, &name).await? {
            true => Ok(StatusCode::NO_CONTENT.into_response()),
            false => Err(manifests::unknown(&Reference::Tag(name))),
        },
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
        (Route::Tokens, &Method::POST) => make_token(registry, parts, body).await,
        (Route::StoredToken(id), &Method::DELETE) => match registry.meta.remove_token(&id).await? {
            true => {
                registry.gate.forget_all();
                Ok(StatusCode::NO_CONTENT.into_response())
            }
            false => Err(Problem::new(Code::NameUnknown, "there is no such token")),
        },
        _ => Err(method()),
    }
}

fn no_repository(repo: &RepositoryName) -> Problem {
    Problem::new(Code::NameUnknown, "there is no such repository").detail(json!({"name": repo.as_str()}))
}

/// A moment as text.
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

/// A tag's entry, and the bytes of its manifest.
async fn tag(registry: &Registry, repo: &RepositoryName, row: &TagRow) -> Result<(Value, Value), Problem> {
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

async fn one_tag(registry: &Registry, repo: &RepositoryName, name: &Tag) -> Result<Value, Problem> {
    let rows = registry.meta.tags(repo, Some(name)).await?;
    let row = rows.first().ok_or_else(|| manifests::unknown(&Reference::Tag(name.clone())))?;
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
    json!({
        "id": row.id,
        "name": row.name,
        "createdBy": row.created_by,
        "createdAt": time(row.created),
        "lastUsed": row.last_used.map(time),
        "expiresAt": row.expires.map(time),
        "readOnly": row.writes == 0,
    })
}

/// `{name, ttlSeconds?, readOnly?}`. The answer is the only time that the token is shown.
async fn make_token(registry: &Registry, parts: &Parts, body: Body) -> Result<Response, Problem> {
    let invalid = |why: &str| Problem::new(Code::Unsupported, why).status(StatusCode::BAD_REQUEST);
    let bytes = bounded(registry, body, BODY_MAX).await?;
    let asked: Value = serde_json::from_slice(&bytes).map_err(|_| invalid("the question is no JSON"))?;
    let name = asked["name"].as_str().map(str::trim).unwrap_or_default();
    if name.is_empty() || name.chars().count() > NAME_MAX || name.chars().any(char::is_control) {
        return Err(invalid("a token has a name of 1 to 100 characters"));
    }
    let ttl = asked.get("ttlSeconds").filter(|t| !t.is_null());
    let ttl = ttl
        .map(|t| t.as_i64().filter(|t| *t > 0).ok_or_else(|| invalid("ttlSeconds is no count")))
        .transpose()?;
    let now = registry.now();
    let admitted =
        registry.gate.admit(&registry.meta, &parts.headers, crate::auth::Access::Tokens, now).await?;
    let created_by = match admitted {
        Caller::Token { name, .. } => name,
        Caller::Anonymous => "anonymous".to_owned(),
    };
    let secret = secret();
    let row = TokenRow {
        id: hex::encode(rand::random::<[u8; 8]>()),
        name: name.to_owned(),
        writes: i64::from(asked["readOnly"] != json!(true)),
        created_by,
        created: now,
        expires: ttl.map(|ttl| now.saturating_add(ttl.saturating_mul(1000))),
        last_used: None,
    };
    registry.meta.put_token(&hash(&secret), &row).await?;
    Ok((StatusCode::CREATED, Json(json!({"token": secret, "name": row.name, "id": row.id}))).into_response())
}
