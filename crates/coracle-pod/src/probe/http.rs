//! HTTP requests of probes and hooks.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, HTTPGetAction};
use reqwest::header::{ACCEPT, HOST, HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use reqwest::redirect::Policy;

use super::{ProbeOutcome, port};

/// User agent of kubelets; some servers let probes through because of it.
const AGENT: &str = "kube-probe/1.36";
/// Most redirects that one check follows.
const REDIRECTS_MAX: usize = 10;
/// Most bytes of a response body that are read and shown.
const BODY_MAX: usize = 10 << 10;
const SHOWN_MAX: usize = 256;

/// A GET request of a probe or a hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpRequest {
    /// `http` or `https`.
    pub scheme: &'static str,
    /// Address or name to connect to.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Path with query, beginning with `/`.
    pub path: String,
    /// Headers of the pod's spec.
    pub headers: Vec<(String, String)>,
}

/// Returns the request of an `httpGet`. The request is sent to the pod's address unless it names another host.
///
/// # Errors
/// A sentence that says what is wrong.
pub fn request(get: &HTTPGetAction, container: &Container, address: &str) -> Result<HttpRequest, String> {
    let scheme = match get.scheme.as_deref().map(str::to_uppercase).as_deref() {
        None | Some("" | "HTTP") => "http",
        Some("HTTPS") => "https",
        Some(other) => return Err(format!("invalid scheme {other:?}: HTTP or HTTPS")),
    };
    let path = get.path.as_deref().unwrap_or_default();
    let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
    let headers = get.http_headers.iter().flatten();
    Ok(HttpRequest {
        scheme,
        host: get.host.clone().filter(|host| !host.is_empty()).unwrap_or_else(|| address.to_owned()),
        port: port(&get.port, container)?,
        path,
        headers: headers.map(|header| (header.name.clone(), header.value.clone())).collect(),
    })
}

/// Sends the request once. Certificates are not verified: a probe checks liveness, not identity. A redirect to another host is
/// not followed and passes with a warning. Cancel-safe.
pub async fn get(request: &HttpRequest, limit: Duration) -> ProbeOutcome {
    match tokio::time::timeout(limit, send(request)).await {
        Ok(outcome) => outcome,
        Err(_) => ProbeOutcome::Failure(format!("no answer within {limit:?}")),
    }
}

async fn send(request: &HttpRequest) -> ProbeOutcome {
    let headers = match headers(request) {
        Ok(headers) => headers,
        Err(why) => return ProbeOutcome::Unknown(why),
    };
    let client = reqwest::Client::builder()
        .redirect(Policy::custom(same_host))
        .danger_accept_invalid_certs(true)
        .no_proxy()
        .pool_max_idle_per_host(0)
        .build();
    let client = match client {
        Ok(client) => client,
        Err(error) => return ProbeOutcome::Unknown(format!("cannot make an HTTP client: {error}")),
    };
    let sent = client.get(url(request)).headers(headers).send().await;
    let mut answer = match sent {
        Ok(answer) => answer,
        Err(error) => {
            return ProbeOutcome::Failure(format!("cannot get {}: {}", url(request), cause(&error)));
        }
    };
    let status = answer.status().as_u16();
    let mut body = Vec::new();
    while let Ok(Some(chunk)) = answer.chunk().await {
        body.extend_from_slice(&chunk);
        if body.len() >= BODY_MAX {
            break;
        }
    }
    status_outcome(status, &body)
}

/// Returns the outcome for a status code: 200 to 399 passes.
fn status_outcome(status: u16, body: &[u8]) -> ProbeOutcome {
    match status {
        200..=299 => ProbeOutcome::Success,
        300..=399 => {
            ProbeOutcome::Warning(format!("redirect to another host was not followed: status {status}"))
        }
        _ => {
            let body = String::from_utf8_lossy(body);
            let clean = body.chars().take(SHOWN_MAX).map(|c| if c.is_control() { ' ' } else { c });
            let said: String = clean.collect();
            let said = said.trim();
            let colon = if said.is_empty() { "" } else { ": " };
            ProbeOutcome::Failure(format!("HTTP probe failed with status {status}{colon}{said}"))
        }
    }
}

fn same_host(attempt: reqwest::redirect::Attempt<'_>) -> reqwest::redirect::Action {
    let first = attempt.previous().first().and_then(|url| url.host_str());
    if attempt.previous().len() > REDIRECTS_MAX {
        return attempt.error("stopped after 10 redirects");
    }
    if first != attempt.url().host_str() {
        return attempt.stop();
    }
    attempt.follow()
}

fn url(request: &HttpRequest) -> String {
    let host = match request.host.contains(':') && !request.host.starts_with('[') {
        true => format!("[{}]", request.host),
        false => request.host.clone(),
    };
    format!("{}://{host}:{}{}", request.scheme, request.port, request.path)
}

/// Returns the headers of a request. Headers of the spec replace default ones of the same name. An empty `User-Agent`, `Accept`
/// or `Host` is not sent.
fn headers(request: &HttpRequest) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    headers.insert(USER_AGENT, HeaderValue::from_static(AGENT));
    headers.insert(ACCEPT, HeaderValue::from_static("*/*"));
    let mut own = HeaderMap::new();
    for (name, value) in &request.headers {
        let parsed = (HeaderName::try_from(name.as_str()), HeaderValue::try_from(value.as_str()));
        let (Ok(name), Ok(value)) = parsed else { return Err(format!("invalid header {name:?}")) };
        own.append(name, value);
    }
    for name in own.keys() {
        headers.remove(name);
    }
    headers.extend(own);
    for name in [USER_AGENT, ACCEPT, HOST] {
        if headers.get(&name).is_some_and(HeaderValue::is_empty) {
            headers.remove(&name);
        }
    }
    Ok(headers)
}

/// Returns the innermost cause of an error, which is the most specific one.
fn cause(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

#[cfg(test)]
mod tests;
