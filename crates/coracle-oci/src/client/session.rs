//! Authenticated requests to one repository on one server.

use std::{fmt::Display, time::Duration};

use backon::{ExponentialBuilder, Retryable};
use reqwest::{
    Method, RequestBuilder, Response, StatusCode, Url,
    header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue, InvalidHeaderValue, RANGE, WWW_AUTHENTICATE},
};
use tokio::sync::Mutex;

use super::{
    address::authority_of,
    endpoint::Endpoint,
    guard::Refused,
    policy::{Operation, RetryPolicy, Timeouts},
    token::Challenge,
    transport::Transport,
};
use crate::{Cause, Digest, Reference, auth::Login};
use crate::{OciError, media_types};

/// Token renewals per request: a new token may expire before it is used.
pub(crate) const RENEWALS_MAX: usize = 3;

/// Login to one repository on one server.
pub struct Session {
    pub(super) transport: Transport,
    pub(super) endpoint: Endpoint,
    pub(super) reference: Reference,
    pub(super) login: Login,
    pub(crate) timeouts: Timeouts,
    pub(super) operation: Operation,
    retries: usize,
    authorization: Mutex<Option<HeaderValue>>,
    /// Held while an expired token is replaced.
    renewing: Mutex<()>,
}

/// Manifest or index as received.
#[derive(Debug)]
pub struct ManifestBytes {
    /// Verified bytes.
    pub bytes: Vec<u8>,
    /// Media type in the header of the response.
    pub content_type: Option<String>,
}

impl Session {
    /// Logs in if the registry requires it. Retries transient failures.
    ///
    /// # Errors
    /// [`OciError::Unauthorized`], [`OciError::Network`], [`OciError::Registry`],
    /// [`OciError::AddressNotAllowed`].
    pub(crate) async fn open(
        transport: Transport,
        endpoint: Endpoint,
        reference: Reference,
        login: Login,
        policy: RetryPolicy,
        operation: Operation,
    ) -> Result<Self, OciError> {
        let (authorization, renewing) = (Mutex::new(None), Mutex::new(()));
        let RetryPolicy { timeouts, retries } = policy;
        let session = Self {
            transport,
            endpoint,
            reference,
            login,
            timeouts,
            operation,
            retries,
            authorization,
            renewing,
        };
        session.retry(|| session.authorize()).await?;
        Ok(session)
    }

    /// Delays between attempts: from 200 ms, doubling, up to 5 s, with jitter.
    pub(crate) fn backoff(&self) -> ExponentialBuilder {
        ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(200))
            .with_max_delay(Duration::from_secs(5))
            .with_max_times(self.retries)
            .with_jitter()
    }

    /// Gets a (new) token, or uses the password itself if the registry uses basic authentication.
    async fn authorize(&self) -> Result<(), OciError> {
        let asked = tokio::time::timeout(self.timeouts.request, self.answer_challenge()).await;
        let header = asked.map_err(|e| self.network("log in", e))??;
        *self.authorization.lock().await = header;
        Ok(())
    }

    async fn answer_challenge(&self) -> Result<Option<HeaderValue>, OciError> {
        let bearer = |token: &str| {
            sensitive(&format!("Bearer {token}")).map(Some).map_err(|e| self.unauthorized(Some(e.into())))
        };
        if let Login::Bearer(token) = &self.login {
            return bearer(token.expose());
        }
        let mut root = self.endpoint.root.clone();
        root.set_path(&format!("{}/", root.path()));
        let request = self.transport.request(Method::GET, root).timeout(self.timeouts.request);
        let answer = self.run(request, "log in").await?;
        let headers = answer.headers().get_all(WWW_AUTHENTICATE);
        let challenge = Challenge::parse(headers.iter().filter_map(|value| value.to_str().ok()));
        match (challenge, &self.login) {
            (Some(Challenge::Bearer { realm, service }), _) => {
                bearer(&self.exchange(&realm, service.as_deref()).await?)
            }
            (_, Login::Basic { user, password }) => self.basic(user, password).map(Some),
            (None, _) if answer.status().is_server_error() => {
                Err(self.status("log in", answer.status().as_u16()))
            }
            (_, _) => Ok(None),
        }
    }

    /// Returns a replacement for the token `expired`: the one that a concurrent request obtained, or a new one. `None` when
    /// credentials cannot be renewed, such as a password.
    pub(crate) async fn renew(&self, expired: &HeaderValue) -> Result<Option<HeaderValue>, OciError> {
        let _one_at_a_time = self.renewing.lock().await;
        if self.authorization.lock().await.as_ref() == Some(expired) {
            self.retry(|| self.authorize()).await?;
        }
        Ok(self.authorization.lock().await.clone().filter(|now| now != expired))
    }

    /// Digest of the manifest that the reference names, without fetching it. `None` when the registry does not report it.
    ///
    /// # Errors
    /// [`OciError::NotFound`]; those of every request.
    pub async fn resolve(&self) -> Result<Option<Digest>, OciError> {
        let name = self.reference.api_name();
        let ask = || async {
            let request = self
                .request(Method::HEAD, &format!("manifests/{name}"))
                .await
                .header(ACCEPT, media_types::ACCEPT);
            let response =
                self.send(request.timeout(self.timeouts.request), "resolve manifest", "manifest").await?;
            let digest =
                response.headers().get("docker-content-digest").and_then(|v| v.to_str().ok()?.parse().ok());
            Ok(digest)
        };
        self.retry(ask).await
    }

    /// Fetches and verifies a manifest or index of at most `bytes_max` bytes, by tag or digest.
    ///
    /// # Errors
    /// [`OciError::NotFound`], [`OciError::DigestMismatch`], [`OciError::Hostile`]; those of every request.
    pub async fn manifest(&self, name: &str, bytes_max: u64) -> Result<ManifestBytes, OciError> {
        self.retry(|| async {
            let request = self
                .request(Method::GET, &format!("manifests/{name}"))
                .await
                .header(ACCEPT, media_types::ACCEPT);
            let response =
                self.send(request.timeout(self.timeouts.request), "get manifest", "manifest").await?;
            let header = |name| response.headers().get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
            let (content_type, said) = (header(CONTENT_TYPE.as_str()), header("docker-content-digest"));
            let bytes = self.body(response, bytes_max, "manifest").await?;
            // A tag has no expected digest: only the response header can be checked.
            let expected = name.parse::<Digest>().ok().or_else(|| said?.parse().ok());
            let Some(expected) = expected else { return Ok(ManifestBytes { bytes, content_type }) };
            let actual = Digest::with(expected.algorithm(), &bytes);
            match expected == actual {
                false => Err(OciError::digest_mismatch(
                    format!("manifest of {}", self.reference),
                    expected,
                    actual,
                )),
                true => Ok(ManifestBytes { bytes, content_type }),
            }
        })
        .await
    }

    /// Deletes the tag of the reference. If the registry cannot delete tags (400 or 405), deletes the manifest, and with it
    /// every tag of the same content. Idempotent: `Ok` when the tag does not exist.
    ///
    /// # Errors
    /// Errors of every request; 405 if the registry does not support deletion.
    pub async fn delete_tag(&self) -> Result<(), OciError> {
        let by_tag = self.delete_manifest(&self.reference.api_name()).await;
        let Err(OciError::Registry { status: 400 | 405, .. }) = by_tag else { return by_tag };
        match self.resolve().await {
            Ok(Some(digest)) => self.delete_manifest(&digest.to_string()).await,
            Ok(None) | Err(OciError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn delete_manifest(&self, name: &str) -> Result<(), OciError> {
        let delete = || async {
            let request = self.request(Method::DELETE, &format!("manifests/{name}")).await;
            let sent = self.send(request.timeout(self.timeouts.request), "delete manifest", "manifest").await;
            match sent {
                Ok(_) | Err(OciError::NotFound { .. }) => Ok(()),
                Err(error) => Err(error),
            }
        };
        self.retry(delete).await
    }

    /// Requests a blob from `offset`. Status 206 means that the response begins there, 200 that it begins at 0.
    pub(crate) async fn blob(&self, digest: &Digest, offset: u64) -> Result<Response, OciError> {
        let mut request = self.request(Method::GET, &format!("blobs/{digest}")).await;
        if offset > 0 {
            request = request.header(RANGE, format!("bytes={offset}-"));
        }
        self.send(request, "get blob", &digest.to_string()).await
    }

    /// Reads a body of bounded size.
    pub(crate) async fn body(
        &self,
        mut response: Response,
        bytes_max: u64,
        what: &str,
    ) -> Result<Vec<u8>, OciError> {
        let mut bytes = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|e| self.network("read answer", e))? {
            bytes.extend_from_slice(&chunk);
            if bytes.len() as u64 > bytes_max {
                return Err(OciError::hostile(format!("{what} is larger than {bytes_max} bytes")));
            }
        }
        Ok(bytes)
    }

    /// Retries `work` after transient failures.
    pub(crate) async fn retry<T, F: Future<Output = Result<T, OciError>>>(
        &self,
        work: impl FnMut() -> F,
    ) -> Result<T, OciError> {
        let log = |error: &OciError, delay: Duration| {
            tracing::debug!(
                error = error as &dyn std::error::Error,
                ?delay,
                "retry registry request after error"
            )
        };
        work.retry(self.backoff()).when(OciError::is_transient).notify(log).await
    }

    pub(crate) async fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let mut url = self.endpoint.root.clone();
        url.set_path(&format!("{}/{}/{path}", url.path().trim_end_matches('/'), self.reference.repository()));
        if let Some(namespace) = &self.endpoint.namespace {
            url.query_pairs_mut().append_pair("ns", namespace);
        }
        self.authorized(method, url).await
    }

    /// Request to a URL that the registry returned. Credentials are sent only to the registry, and only over TLS if the
    /// registry uses TLS.
    pub(crate) async fn to(&self, method: Method, target: Url) -> RequestBuilder {
        let is_safe = target.scheme() == "https" || self.endpoint.plain_http;
        match is_safe && authority_of(&target) == authority_of(&self.endpoint.root) {
            true => self.authorized(method, target).await,
            false => self.transport.request(method, target),
        }
    }

    /// Value of the `Authorization` header.
    pub(crate) async fn authorization(&self) -> Option<HeaderValue> {
        self.authorization.lock().await.clone()
    }

    async fn authorized(&self, method: Method, url: Url) -> RequestBuilder {
        let request = self.transport.request(method, url);
        match self.authorization.lock().await.clone() {
            Some(value) => request.header(AUTHORIZATION, value),
            None => request,
        }
    }

    /// Sends a request once, without renewing the token.
    pub(super) async fn run(&self, request: RequestBuilder, operation: &str) -> Result<Response, OciError> {
        let request = request.build().map_err(|e| self.network(operation, e))?;
        self.transport.execute(&self.endpoint, request).await.map_err(|e| self.request_error(operation, e))
    }

    /// Sends a request and turns an error status into an error. If the token has expired, renews it and sends the request
    /// again, unless the body is a stream.
    pub(crate) async fn send(
        &self,
        request: RequestBuilder,
        operation: &str,
        what: &str,
    ) -> Result<Response, OciError> {
        let response = self.execute(request, operation).await?;
        match response.status() {
            status if status.is_success() => Ok(response),
            StatusCode::NOT_FOUND => Err(OciError::NotFound {
                registry: self.endpoint.host.clone(),
                image: Box::new(self.reference.clone()),
                what: what.to_owned(),
            }),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(self.unauthorized(None)),
            status => Err(self.status(operation, status.as_u16())),
        }
    }

    async fn execute(&self, request: RequestBuilder, operation: &str) -> Result<Response, OciError> {
        let mut request = request.build().map_err(|e| self.network(operation, e))?;
        let mut renewals = 0;
        loop {
            let again = request.try_clone().filter(|_| renewals < RENEWALS_MAX);
            let shown = request.headers().get(AUTHORIZATION).cloned();
            let response = self.transport.execute(&self.endpoint, request).await;
            let response = response.map_err(|e| self.request_error(operation, e))?;
            let (Some(mut again), Some(shown)) = (again, shown) else { return Ok(response) };
            if response.status() != StatusCode::UNAUTHORIZED {
                return Ok(response);
            }
            let Some(renewed) = self.renew(&shown).await? else { return Ok(response) };
            again.headers_mut().insert(AUTHORIZATION, renewed);
            (request, renewals) = (again, renewals + 1);
        }
    }

    /// Error for a request that got no response.
    fn request_error(&self, operation: &str, cause: Cause) -> OciError {
        let mut next: Option<&(dyn std::error::Error + 'static)> = Some(&*cause);
        while let Some(error) = next {
            if let Some(Refused { host, kind }) = error.downcast_ref() {
                let registry = self.endpoint.host.clone();
                return OciError::AddressNotAllowed { registry, host: host.clone(), kind };
            }
            next = error.source();
        }
        self.network(operation, cause)
    }

    /// [`OciError::Network`] for this server.
    pub fn network(&self, operation: impl Display, error: impl Into<Cause>) -> OciError {
        OciError::Network {
            registry: self.endpoint.host.clone(),
            operation: operation.to_string(),
            source: error.into(),
        }
    }

    pub(crate) fn status(&self, operation: &str, status: u16) -> OciError {
        let operation = format!("{operation} for {}", self.reference);
        OciError::Registry { registry: self.endpoint.host.clone(), operation, status }
    }

    pub(crate) fn unauthorized(&self, source: Option<Cause>) -> OciError {
        OciError::Unauthorized {
            registry: self.endpoint.host.clone(),
            image: Box::new(self.reference.clone()),
            source,
        }
    }
}

/// Header value that debug output hides.
pub(super) fn sensitive(text: &str) -> Result<HeaderValue, InvalidHeaderValue> {
    let mut value = HeaderValue::from_str(text)?;
    value.set_sensitive(true);
    Ok(value)
}
