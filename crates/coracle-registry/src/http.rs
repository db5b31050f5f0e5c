//! Requests in, answers out. Each handler reads top to bottom; the rules are in `route`, `manifest`, `auth`.

mod api;
mod blobs;
mod download;
mod lists;
mod manifests;
mod pages;
pub(crate) mod ranges;
mod token;
mod uploads;

use std::sync::Arc;
use std::time::Instant;

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use tokio::time::timeout;

use crate::error::{Code, Problem};
use crate::registry::Registry;
use crate::route::{self, Route};

pub(crate) use self::api::time;

const DIGEST_HEADER: HeaderName = HeaderName::from_static("docker-content-digest");
const VERSION_HEADER: HeaderName = HeaderName::from_static("docker-distribution-api-version");

/// Answers one request. Never fails: what goes wrong is an answer too.
pub(crate) async fn answer(registry: Arc<Registry>, request: Request) -> Response {
    let began = Instant::now();
    let (parts, body) = request.into_parts();
    let head = parts.method == Method::HEAD;
    let parsed = route::parse(&parts.method, parts.uri.path());
    let word = parsed.as_ref().map_or("unknown", Route::word);
    let metrics = registry.metrics.clone();
    let v2 = parts.uri.path().starts_with("/v2");
    let outcome = match parsed {
        Ok(route) => Box::pin(admit(registry, route, parts, body)).await,
        Err(problem) => Err(problem),
    };
    let mut response = outcome.unwrap_or_else(Problem::into_response);
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

async fn admit(registry: Arc<Registry>, route: Route, parts: Parts, body: Body) -> Result<Response, Problem> {
    if let Some(access) = route.access(&parts.method) {
        if is_forged(&parts) {
            return Err(Problem::new(Code::Denied, "a page of another site may not write here"));
        }
        let now = registry.now();
        let admitted = registry.gate.admit(&registry.meta, &parts.headers, access, now).await;
        if let Err(problem) = admitted {
            return Err(match &route {
                Route::Page(_) => ask_a_person(problem),
                _ => challenge(&registry, &parts.headers, problem),
            });
        }
    }
    dispatch(registry, route, parts, body).await
}

/// Says where a token is to be had.
fn challenge(registry: &Registry, headers: &HeaderMap, problem: Problem) -> Problem {
    if problem.status != StatusCode::UNAUTHORIZED {
        return problem;
    }
    let realm = format!("{}/v2/token", base_url(registry, headers));
    problem.header(header::WWW_AUTHENTICATE, &format!("Bearer realm=\"{realm}\",service=\"epoch\""))
}

/// Browsers know no bearer; what people type as a password is the token.
fn ask_a_person(problem: Problem) -> Problem {
    match problem.status {
        StatusCode::UNAUTHORIZED => problem.header(
            header::WWW_AUTHENTICATE,
            "Basic realm=\"registry: any name, a token\", charset=\"UTF-8\"",
        ),
        _ => problem,
    }
}

/// A browser sends a password that it knows along with what any page makes it ask. It says whose page that was (Fetch
/// Metadata, "Sec-Fetch-Site"); other clients say nothing.
fn is_forged(parts: &Parts) -> bool {
    let writes = !matches!(parts.method, Method::GET | Method::HEAD);
    let site = parts.headers.get("sec-fetch-site").and_then(|site| site.to_str().ok());
    writes && site.is_some_and(|site| site != "same-origin" && site != "none")
}

/// How this client reaches the registry.
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

async fn dispatch(
    registry: Arc<Registry>,
    route: Route,
    parts: Parts,
    body: Body,
) -> Result<Response, Problem> {
    let get = matches!(parts.method, Method::GET | Method::HEAD);
    match (route, &parts.method) {
        (Route::Health, _) if get => Ok("ok\n".into_response()),
        (Route::Base, _) if get => base(&registry, &parts.headers).await,
        (Route::Token, &Method::GET | &Method::POST) => token::token(&registry, &parts, body).await,
        (Route::Catalog, _) if get => lists::catalog(&registry, &parts.uri).await,
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
            manifests::delete(&registry, &repo, &reference).await
        }
        (Route::Blob(repo, digest), _) if get => blobs::get(&registry, &repo, &digest, &parts).await,
        (Route::Blob(repo, digest), &Method::DELETE) => blobs::delete(&registry, &repo, &digest).await,
        (Route::Blob(repo, digest), &Method::PUT) => {
            uploads::whole(registry, repo, digest, parts, body).await
        }
        (Route::Uploads(repo), &Method::POST) => uploads::begin(registry, repo, parts, body).await,
        (Route::Upload(repo, id), _) if get => uploads::look(&registry, &repo, &id).await,
        (Route::Upload(repo, id), &Method::PATCH) => uploads::append(registry, repo, id, parts, body).await,
        (Route::Upload(repo, id), &Method::PUT) => uploads::finish(registry, repo, id, parts, body).await,
        (Route::Upload(repo, id), &Method::DELETE) => uploads::cancel(&registry, &repo, &id).await,
        (Route::Download(repo), _) if get => download::download(&registry, &repo, &parts.method).await,
        (Route::SingleSignOn, _) => Err(Problem::new(Code::Unsupported, "single sign-on is not set up")
            .status(StatusCode::NOT_IMPLEMENTED)),
        (Route::Page(page), _) if get => pages::page(&registry, page).await,
        (route, _) => api::api(&registry, route, &parts, body).await,
    }
}

/// Runs work to its end even when the client hangs up, so that nothing is left in the middle of a step.
async fn to_its_end<T: Send + 'static>(
    registry: &Registry,
    work: impl Future<Output = Result<T, Problem>> + Send + 'static,
) -> Result<T, Problem> {
    let ended = registry.writes.spawn(work).await;
    ended.unwrap_or_else(|error| {
        tracing::error!(%error, "a request's task broke");
        Err(Problem::new(Code::Unknown, "the registry could not do it; its log says why"))
    })
}

/// A body that is kept in memory: bounded, and here within the idle time, or the connection is no longer waited for.
async fn bounded(registry: &Registry, body: Body, bytes_max: u64) -> Result<Bytes, Problem> {
    let slow =
        || Problem::new(Code::SizeInvalid, "the body came too slowly").status(StatusCode::REQUEST_TIMEOUT);
    let read = to_bytes(body, usize::try_from(bytes_max).unwrap_or(usize::MAX));
    let read = timeout(registry.limits.body_idle, read).await.map_err(|_| slow())?;
    read.map_err(|error| {
        match std::error::Error::source(&error).is_some_and(|s| s.is::<http_body_util::LengthLimitError>()) {
            true => too_large(bytes_max),
            false => Problem::new(Code::SizeInvalid, "the body ended before its length"),
        }
    })
}

fn too_large(bytes_max: u64) -> Problem {
    Problem::new(Code::SizeInvalid, format!("the body is larger than {bytes_max} bytes"))
        .status(StatusCode::PAYLOAD_TOO_LARGE)
}

/// The method is not for this path.
fn method() -> Problem {
    Problem::new(Code::Unsupported, "the method is not for this path")
}

/// `/v2/`: speaks the protocol, and asks for a login where some requests need one.
async fn base(registry: &Registry, headers: &HeaderMap) -> Result<Response, Problem> {
    if registry.gate.wants_login() {
        let token = crate::auth::presented(headers);
        let known = match token {
            Some(token) => registry.gate.caller(&registry.meta, &token, registry.now()).await?.is_some(),
            // A client that was told that it is anonymous may go on as such.
            None => headers.contains_key(header::AUTHORIZATION) && !registry.gate.private_reads(),
        };
        if !known {
            return Err(challenge(
                registry,
                headers,
                Problem::new(Code::Unauthorized, "a token is needed for some requests"),
            ));
        }
    }
    Ok(([(header::CONTENT_TYPE, "application/json")], "{}").into_response())
}

fn value(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static(""))
}

/// A parameter of the query. A repeated one counts once.
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
