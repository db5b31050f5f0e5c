//! HTTP with one server and the servers that it redirects to.

use reqwest::{
    Client, Method, Request, RequestBuilder, Response, StatusCode, Url,
    header::{AUTHORIZATION, LOCATION},
};

use super::{
    endpoint::{Endpoint, Tls},
    guard::{Guard, Refused, Route},
    policy::{Operation, Timeouts},
};
use crate::Cause;

const USER_AGENT: &str = concat!("coracle/", env!("CARGO_PKG_VERSION"));
const REDIRECTS_MAX: usize = 5;

/// HTTP clients with the settings of one server. Clones share connections.
#[derive(Clone)]
pub(crate) struct Transport {
    /// Client for any address.
    any: Client,
    /// Address rule, and a client that enforces it. `None`: every address is permitted.
    guarded: Option<(Guard, Client)>,
}

impl Transport {
    pub(crate) fn new(
        timeouts: &Timeouts,
        operation: Operation,
        endpoint: &Endpoint,
        guard: Option<Guard>,
    ) -> Result<Self, reqwest::Error> {
        let tls = &endpoint.tls;
        let connect = endpoint.dial_timeout.unwrap_or(timeouts.connect);
        let timeouts = Timeouts { connect, ..timeouts.clone() };
        let guarded = match guard {
            None => None,
            Some(guard) => {
                let client = builder(&timeouts, operation, tls)?.dns_resolver(guard.resolver()).build()?;
                Some((guard, client))
            }
        };
        Ok(Self { any: builder(&timeouts, operation, tls)?.build()?, guarded })
    }

    pub(crate) fn request(&self, method: Method, url: Url) -> RequestBuilder {
        self.any.request(method, url)
    }

    /// Sends a request and follows redirects. Redirects from TLS to plain HTTP are refused, and credentials are not sent to
    /// another server. Headers of the endpoint are sent to the endpoint only.
    pub(crate) async fn execute(&self, endpoint: &Endpoint, mut request: Request) -> Result<Response, Cause> {
        let is_secure = request.url().scheme() == "https";
        for _ in 0..=REDIRECTS_MAX {
            let client = self.route(request.url())?;
            let (method, from) = (request.method().clone(), request.url().clone());
            let next = request.try_clone();
            if endpoint.is_at(&from) {
                request.headers_mut().extend(endpoint.headers.clone());
            }
            let response = client.execute(request).await.map_err(reqwest::Error::without_url)?;
            let Some(target) = redirect_target(&response, &method) else { return Ok(response) };
            let Some(mut next) = next else { return Ok(response) };
            if is_secure && target.scheme() != "https" {
                return Err("redirected from https to plain http".into());
            }
            if target.origin() != from.origin() {
                next.headers_mut().remove(AUTHORIZATION);
            }
            *next.url_mut() = target;
            request = next;
        }
        Err("too many redirects".into())
    }

    fn route(&self, url: &Url) -> Result<&Client, Refused> {
        match &self.guarded {
            None => Ok(&self.any),
            Some((guard, permitted)) => Ok(match guard.route(url)? {
                Route::Any => &self.any,
                Route::Permitted => permitted,
            }),
        }
    }

    /// True when requests are restricted to permitted addresses.
    pub(crate) fn is_guarded(&self) -> bool {
        self.guarded.is_some()
    }
}

/// Target of a redirect. Methods other than GET and HEAD are repeated only if the status demands it.
fn redirect_target(response: &Response, method: &Method) -> Option<Url> {
    let is_safe = matches!(*method, Method::GET | Method::HEAD);
    let follows = match response.status() {
        StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT => true,
        StatusCode::MOVED_PERMANENTLY | StatusCode::FOUND | StatusCode::SEE_OTHER => is_safe,
        _ => false,
    };
    let location = response.headers().get(LOCATION).filter(|_| follows)?;
    response.url().join(location.to_str().ok()?).ok()
}

/// Client builder with the settings of one server. Redirects are off: [`Transport::execute`] follows them. A client for pushing
/// has no idle limit: reqwest counts the time in which a body is sent as waiting for the response.
fn builder(
    timeouts: &Timeouts,
    operation: Operation,
    tls: &Tls,
) -> Result<reqwest::ClientBuilder, reqwest::Error> {
    let builder = Client::builder().user_agent(USER_AGENT).redirect(reqwest::redirect::Policy::none());
    let mut builder = builder.connect_timeout(timeouts.connect);
    for certificate in reqwest::Certificate::from_pem_bundle(&tls.trust)? {
        builder = builder.add_root_certificate(certificate);
    }
    if let Some(identity) = &tls.identity {
        builder = builder.identity(reqwest::Identity::from_pem(identity.expose().as_bytes())?);
    }
    if tls.skip_verify {
        builder = builder.danger_accept_invalid_certs(true);
    }
    Ok(match operation {
        Operation::Pull => builder.read_timeout(timeouts.read_idle),
        Operation::Push => builder,
    })
}
