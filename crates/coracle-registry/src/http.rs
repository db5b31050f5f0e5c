//! HTTP requests and responses. The rules are in `route`, `manifest` and `auth`.

mod api;
mod blobs;
mod body;
mod download;
mod lists;
mod manifests;
mod pages;
pub(crate) mod ranges;
mod token;
mod uploads;

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::Request;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::auth::Caller;
use crate::error::{Code, ErrorResponse};
use crate::registry::Registry;
use crate::route::{self, PagePath, Route};

pub(crate) use self::api::time;
use self::body::read_bounded;

const DIGEST_HEADER: HeaderName = HeaderName::from_static("docker-content-digest");
const VERSION_HEADER: HeaderName = HeaderName::from_static("docker-distribution-api-version");

/// Answers one request. Never fails: errors become responses.
pub(crate) async fn answer(registry: Arc<Registry>, request: Request) -> Response {
    let began = Instant::now();
    let (mut parts, body) = request.into_parts();
    name_host(&mut parts);
    let head = parts.method == Method::HEAD;
    let parsed = route::parse(&parts.method, parts.uri.path());
    let word = parsed.as_ref().map_or("unknown", Route::word);
    let metrics = registry.metrics.clone();
    let v2 = parts.uri.path().starts_with("/v2");
    let outcome = match parsed {
        Ok(route) => Box::pin(admit(registry, route, parts, body)).await,
        Err(problem) => Err(problem),
    };
    let mut response = outcome.unwrap_or_else(ErrorResponse::into_response);
    if v2 {
        response.headers_mut().insert(VERSION_HEADER, HeaderValue::from_static("registry/2.0"));
    }
    if head && !response.status().is_success() {
        *response.body_mut() = Body::empty();
    }
    metrics.answered(word, response.status().as_u16(), began.elapsed());
    tracing::debug!(route = word, status = response.status().as_u16(), "answered");
    response
}

/// Sets `Host` from `:authority`, which replaces it in HTTP/2 (RFC 9113, section 8.3.1).
fn name_host(parts: &mut Parts) {
    if !parts.headers.contains_key(header::HOST)
        && let Some(authority) = parts.uri.authority()
        && let Ok(host) = HeaderValue::from_str(authority.as_str())
    {
        parts.headers.insert(header::HOST, host);
    }
}

async fn admit(
    registry: Arc<Registry>,
    route: Route,
    parts: Parts,
    body: Body,
) -> Result<Response, ErrorResponse> {
    let Some(need) = route.need(&parts.method) else {
        return open(registry, route, parts, body).await;
    };
    if is_forged(&parts) {
        return Err(ErrorResponse::new(Code::Denied, "a page of another site may not write here"));
    }
    let admitted = registry.gate.admit(&registry.meta, &parts.headers, need, registry.now()).await;
    let caller = admitted.map_err(|problem| match &route {
        Route::Page(_) => add_basic_challenge(problem),
        _ => challenge(&registry, &parts.headers, problem),
    })?;
    dispatch(registry, caller, route, parts, body).await
}

/// Adds a bearer challenge with the URL of the token route to a 401 response.
fn challenge(registry: &Registry, headers: &HeaderMap, problem: ErrorResponse) -> ErrorResponse {
    if problem.status != StatusCode::UNAUTHORIZED {
        return problem;
    }
    let realm = format!("{}/v2/token", base_url(registry, headers));
    problem.header(header::WWW_AUTHENTICATE, &format!("Bearer realm=\"{realm}\",service=\"epoch\""))
}

/// Adds a basic challenge to a 401 response for browsers, which send no bearer token: the password is the token.
fn add_basic_challenge(problem: ErrorResponse) -> ErrorResponse {
    match problem.status {
        StatusCode::UNAUTHORIZED => problem.header(
            header::WWW_AUTHENTICATE,
            "Basic realm=\"registry: any name, a token\", charset=\"UTF-8\"",
        ),
        _ => problem,
    }
}

/// True for a write that another site's page requests: browsers add stored passwords to such requests. Browsers report the
/// origin of the page (Fetch Metadata, "Sec-Fetch-Site"); other clients do not.
fn is_forged(parts: &Parts) -> bool {
    let writes = !matches!(parts.method, Method::GET | Method::HEAD);
    let site = parts.headers.get("sec-fetch-site").and_then(|site| site.to_str().ok());
    writes && site.is_some_and(|site| site != "same-origin" && site != "none")
}

/// Base URL of the registry as this client reaches it.
fn base_url(registry: &Registry, headers: &HeaderMap) -> String {
    if let Some(url) = &registry.public_url {
        return url.trim_end_matches('/').to_owned();
    }
    let host = headers.get(header::HOST).and_then(|h| h.to_str().ok()).unwrap_or("localhost");
    let plain = host
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b':' | b'-' | b'[' | b']' | b'_'));
    let scheme = if registry.tls { "https" } else { "http" };
    format!("{scheme}://{}", if plain { host } else { "localhost" })
}

/// Answers routes that need no authorization.
async fn open(
    registry: Arc<Registry>,
    route: Route,
    parts: Parts,
    body: Body,
) -> Result<Response, ErrorResponse> {
    let get = matches!(parts.method, Method::GET | Method::HEAD);
    match (route, &parts.method) {
        (Route::Health, _) if get => Ok("ok\n".into_response()),
        (Route::Base, _) if get => base(&registry, &parts.headers).await,
        (Route::Token, &Method::GET | &Method::POST) => token::token(&registry, &parts, body).await,
        (Route::SingleSignOn, _) => {
            Err(ErrorResponse::new(Code::Unsupported, "single sign-on is not set up")
                .status(StatusCode::NOT_IMPLEMENTED))
        }
        (Route::Page(PagePath::Style), _) if get => Ok(pages::style()),
        _ => Err(method()),
    }
}

async fn dispatch(
    registry: Arc<Registry>,
    caller: Caller,
    route: Route,
    parts: Parts,
    body: Body,
) -> Result<Response, ErrorResponse> {
    let get = matches!(parts.method, Method::GET | Method::HEAD);
    match (route, &parts.method) {
        (Route::Catalog, _) if get => lists::catalog(&registry, &caller, &parts.uri).await,
        (Route::TagNames(repo), _) if get => lists::tags(&registry, &repo, &parts.uri).await,
        (Route::Referrers(repo, digest), _) if get => {
            lists::referrers(&registry, &repo, &digest, &parts.uri).await
        }
        (Route::Manifest(repo, reference), _) if get => {
            manifests::get(&registry, &repo, &reference, &parts).await
        }
        (Route::Manifest(repo, reference), &Method::PUT) => {
            manifests::put(registry, repo, reference, parts, body).await
        }
        (Route::Manifest(repo, reference), &Method::DELETE) => {
            manifests::delete(registry, repo, reference).await
        }
        (Route::Blob(repo, digest), _) if get => blobs::get(&registry, &repo, &digest, &parts).await,
        (Route::Blob(repo, digest), &Method::DELETE) => blobs::delete(&registry, &repo, &digest).await,
        (Route::Blob(repo, digest), &Method::PUT) => {
            uploads::put_blob(registry, repo, digest, parts, body).await
        }
        (Route::Uploads(repo), &Method::POST) => uploads::begin(registry, caller, repo, parts, body).await,
        (Route::Upload(repo, id), _) if get => uploads::upload_status(&registry, &repo, &id).await,
        (Route::Upload(repo, id), &Method::PATCH) => uploads::append(registry, repo, id, parts, body).await,
        (Route::Upload(repo, id), &Method::PUT) => uploads::finish(registry, repo, id, parts, body).await,
        (Route::Upload(repo, id), &Method::DELETE) => uploads::cancel(&registry, &repo, &id).await,
        (Route::Download(repo), _) if get => download::download(&registry, &repo, &parts.method).await,
        (Route::Page(page), _) if get => pages::page(&registry, &caller, page).await,
        (route, _) => api::api(registry, &caller, route, &parts, body).await,
    }
}

/// Runs work to completion even if the client disconnects, so that no step is cut off.
async fn run_to_completion<T: Send + 'static>(
    registry: &Registry,
    work: impl Future<Output = Result<T, ErrorResponse>> + Send + 'static,
) -> Result<T, ErrorResponse> {
    let ended = registry.writes.spawn(work).await;
    ended.unwrap_or_else(|error| {
        tracing::error!(%error, "task of a request panicked");
        Err(ErrorResponse::new(Code::Unknown, "internal error of the registry; see its log"))
    })
}

fn too_large(bytes_max: u64) -> ErrorResponse {
    ErrorResponse::new(Code::SizeInvalid, format!("the body is larger than {bytes_max} bytes"))
        .status(StatusCode::PAYLOAD_TOO_LARGE)
}

/// Error for a method that the path does not support.
fn method() -> ErrorResponse {
    ErrorResponse::new(Code::Unsupported, "method not allowed for this path")
}

/// `/v2/`: version check, with a challenge if some requests need a login.
async fn base(registry: &Registry, headers: &HeaderMap) -> Result<Response, ErrorResponse> {
    if registry.gate.wants_login() {
        let token = crate::auth::request_token(headers);
        let known = match token {
            Some(token) => registry.gate.holder(&registry.meta, &token, registry.now()).await?.is_some(),
            // A client that presents the anonymous token stays anonymous.
            None => headers.contains_key(header::AUTHORIZATION) && !registry.gate.private_reads(),
        };
        if !known {
            return Err(challenge(
                registry,
                headers,
                ErrorResponse::new(Code::Unauthorized, "a token is needed for some requests"),
            ));
        }
    }
    Ok(([(header::CONTENT_TYPE, "application/json")], "{}").into_response())
}

fn value(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static(""))
}

/// First query parameter with this name.
fn parameter(uri: &axum::http::Uri, name: &str) -> Option<String> {
    let query = uri.query().unwrap_or_default();
    form_urlencoded::parse(query.as_bytes()).find(|(key, _)| key == name).map(|(_, value)| value.into_owned())
}

fn parameters(uri: &axum::http::Uri, name: &str) -> Vec<String> {
    let query = uri.query().unwrap_or_default();
    form_urlencoded::parse(query.as_bytes())
        .filter(|(key, _)| key == name)
        .map(|(_, v)| v.into_owned())
        .collect()
}
