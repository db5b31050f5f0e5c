//! One conversation with one registry about one repository.

use std::{fmt::Display, time::Duration};

use backon::{ExponentialBuilder, Retryable};
use oci_client::{
    RegistryOperation,
    client::{Certificate, CertificateEncoding, ClientConfig, ClientProtocol},
    errors::OciDistributionError,
    secrets::RegistryAuth,
};
use reqwest::{
    Method, RequestBuilder, Response, StatusCode, Url,
    header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue, RANGE},
};
use tokio::sync::Mutex;

use super::{Endpoint, Timeouts};
use crate::{Digest, ImageError, Reference, auth::Login, error::Cause, manifest};

const USER_AGENT: &str = concat!("coracle/", env!("CARGO_PKG_VERSION"));
const REDIRECTS_MAX: usize = 5;

/// A repository on one server.
pub(crate) struct Session {
    http: reqwest::Client,
    endpoint: Endpoint,
    reference: Reference,
    login: Login,
    pub(crate) timeouts: Timeouts,
    operation: Operation,
    retries: usize,
    authorization: Mutex<Option<HeaderValue>>,
}

/// What a login is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Pull,
    Push,
}

/// A manifest or index as it came.
pub(crate) struct Fetched {
    pub(crate) bytes: Vec<u8>,
    pub(crate) content_type: Option<String>,
}

/// An HTTP client. Redirects never leave TLS for plain HTTP. One for pushing has no idle limit of its own: reqwest counts
/// the sending of a body as waiting for its answer.
pub(crate) fn client(
    timeouts: &Timeouts,
    operation: Operation,
    trust: &[u8],
) -> Result<reqwest::Client, reqwest::Error> {
    let policy = reqwest::redirect::Policy::custom(|attempt| {
        let secure = attempt.previous().first().is_some_and(|url| url.scheme() == "https");
        if attempt.previous().len() > REDIRECTS_MAX {
            attempt.error("too many redirects")
        } else if secure && attempt.url().scheme() != "https" {
            attempt.error("redirected from https to plain http")
        } else {
            attempt.follow()
        }
    });
    let builder = reqwest::Client::builder().user_agent(USER_AGENT).redirect(policy);
    let mut builder = builder.connect_timeout(timeouts.connect);
    for certificate in reqwest::Certificate::from_pem_bundle(trust)? {
        builder = builder.add_root_certificate(certificate);
    }
    match operation {
        Operation::Pull => builder.read_timeout(timeouts.read_idle).build(),
        Operation::Push => builder.build(),
    }
}

impl Session {
    /// Logs in where the registry asks for it. Retries what is transient.
    ///
    /// # Errors
    /// [`ImageError::Unauthorized`], [`ImageError::Network`], [`ImageError::Registry`].
    pub(crate) async fn open(
        http: reqwest::Client,
        endpoint: Endpoint,
        reference: Reference,
        login: Login,
        timeouts: Timeouts,
        retries: usize,
    ) -> Result<Self, ImageError> {
        Self::open_for(http, endpoint, reference, login, timeouts, retries, Operation::Pull).await
    }

    /// As [`Session::open`], for pulling or pushing.
    pub(crate) async fn open_for(
        http: reqwest::Client,
        endpoint: Endpoint,
        reference: Reference,
        login: Login,
        timeouts: Timeouts,
        retries: usize,
        operation: Operation,
    ) -> Result<Self, ImageError> {
        let authorization = Mutex::new(None);
        let session = Self { http, endpoint, reference, login, timeouts, operation, retries, authorization };
        session.retry(|| session.authorize()).await?;
        Ok(session)
    }

    /// Delays between tries of a transient failure: from 200 ms, doubling, up to 5 s, with jitter.
    pub(crate) fn backoff(&self) -> ExponentialBuilder {
        ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(200))
            .with_max_delay(Duration::from_secs(5))
            .with_max_times(self.retries)
            .with_jitter()
    }

    /// Gets a (new) token, or takes the password itself where the registry wants that.
    pub(crate) async fn authorize(&self) -> Result<(), ImageError> {
        let auth = match &self.login {
            Login::Anonymous => RegistryAuth::Anonymous,
            Login::Basic { user, password } => {
                RegistryAuth::Basic(user.clone(), password.expose().to_owned())
            }
            Login::Bearer(token) => RegistryAuth::Bearer(token.expose().to_owned()),
        };
        let protocol = if self.endpoint.plain_http { ClientProtocol::Http } else { ClientProtocol::Https };
        let config = ClientConfig {
            protocol,
            user_agent: USER_AGENT,
            connect_timeout: Some(self.timeouts.connect),
            read_timeout: Some(self.timeouts.read_idle),
            extra_root_certificates: certificates(&self.endpoint.trust),
            ..ClientConfig::default()
        };
        // A new client each time: it would answer from its cache, and a refresh is asked for because that
        // answer has run out.
        let client = oci_client::Client::new(config);
        let image = oci_client::Reference::with_tag(
            self.endpoint.host.clone(),
            self.reference.repository().to_owned(),
            "latest".to_owned(),
        );
        let operation = match self.operation {
            Operation::Pull => RegistryOperation::Pull,
            Operation::Push => RegistryOperation::Push,
        };
        let asked = tokio::time::timeout(self.timeouts.request, client.auth(&image, &auth, operation)).await;
        let token = asked.map_err(|e| self.network("log in", e))?.map_err(|e| self.refused(e))?;
        let header = match (token, &self.login) {
            (Some(token), _) => Some(format!("Bearer {token}")),
            (None, Login::Basic { user, password }) => Some(basic(user, password.expose())),
            (None, _) => None,
        };
        let header = header
            .map(|text| HeaderValue::from_str(&text))
            .transpose()
            .map_err(|e| self.unauthorized(Some(e.into())))?;
        let header = header.map(|mut value| {
            value.set_sensitive(true);
            value
        });
        *self.authorization.lock().await = header;
        Ok(())
    }

    /// Asks which manifest a name means, without fetching it. `None` when the registry does not say.
    pub(crate) async fn resolve(&self) -> Result<Option<Digest>, ImageError> {
        let name = self.reference.api_name();
        let ask = || async {
            let request = self
                .request(Method::HEAD, &format!("manifests/{name}"))
                .await
                .header(ACCEPT, manifest::ACCEPT);
            let response =
                self.send(request.timeout(self.timeouts.request), "resolve manifest", "manifest").await?;
            let digest =
                response.headers().get("docker-content-digest").and_then(|v| v.to_str().ok()?.parse().ok());
            Ok(digest)
        };
        self.retry(ask).await
    }

    /// Fetches a manifest or index by tag or digest, at most `bytes_max` long.
    pub(crate) async fn manifest(&self, name: &str, bytes_max: u64) -> Result<Fetched, ImageError> {
        self.retry(|| async {
            let request = self
                .request(Method::GET, &format!("manifests/{name}"))
                .await
                .header(ACCEPT, manifest::ACCEPT);
            let response =
                self.send(request.timeout(self.timeouts.request), "get manifest", "manifest").await?;
            let header = |name| response.headers().get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
            let (content_type, said) = (header(CONTENT_TYPE.as_str()), header("docker-content-digest"));
            let bytes = self.body(response, bytes_max, "manifest").await?;
            // A pinned name is the promise; for a tag the registry's own word is all there is.
            let promise = name.parse::<Digest>().ok().or_else(|| said?.parse().ok());
            let actual = Digest::of(&bytes);
            match promise.filter(|p| *p != actual) {
                Some(expected) => Err(ImageError::DigestMismatch {
                    what: format!("manifest of {}", self.reference),
                    expected,
                    actual,
                }),
                None => Ok(Fetched { bytes, content_type }),
            }
        })
        .await
    }

    /// Begins a blob's bytes at `offset`. The status is 206 when the registry begins there, 200 when it
    /// begins at 0.
    pub(crate) async fn blob(&self, digest: &Digest, offset: u64) -> Result<Response, ImageError> {
        let mut request = self.request(Method::GET, &format!("blobs/{digest}")).await;
        if offset > 0 {
            request = request.header(RANGE, format!("bytes={offset}-"));
        }
        self.send(request, "get blob", &digest.to_string()).await
    }

    /// Reads a whole body of bounded size.
    pub(crate) async fn body(
        &self,
        mut response: Response,
        bytes_max: u64,
        what: &str,
    ) -> Result<Vec<u8>, ImageError> {
        let mut bytes = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|e| self.network("read answer", e))? {
            bytes.extend_from_slice(&chunk);
            if bytes.len() as u64 > bytes_max {
                return Err(ImageError::hostile(format!("{what} is larger than {bytes_max} bytes")));
            }
        }
        Ok(bytes)
    }

    /// Repeats what fails for transient reasons.
    pub(crate) async fn retry<T, F: Future<Output = Result<T, ImageError>>>(
        &self,
        work: impl FnMut() -> F,
    ) -> Result<T, ImageError> {
        let note = |error: &ImageError, delay: Duration| {
            tracing::debug!(error = error as &dyn std::error::Error, ?delay, "registry request is retried")
        };
        work.retry(self.backoff()).when(ImageError::is_transient).notify(note).await
    }

    pub(super) async fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let scheme = if self.endpoint.plain_http { "http" } else { "https" };
        // Docker Hub's API has another name than Docker Hub's images.
        let host =
            if self.endpoint.host == "docker.io" { "registry-1.docker.io" } else { &self.endpoint.host };
        self.authorized(method, &format!("{scheme}://{host}/v2/{}/{path}", self.reference.repository())).await
    }

    /// A request to where the registry said. Credentials go to the registry itself alone.
    pub(super) async fn to(&self, method: Method, target: Url) -> RequestBuilder {
        let host = target.host_str().unwrap_or_default();
        let authority = target.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        match authority == self.endpoint.host {
            true => self.authorized(method, target.as_str()).await,
            false => self.http.request(method, target),
        }
    }

    async fn authorized(&self, method: Method, url: &str) -> RequestBuilder {
        let request = self.http.request(method, url);
        match self.authorization.lock().await.clone() {
            Some(value) => request.header(AUTHORIZATION, value),
            None => request,
        }
    }

    /// Sends a request and turns an error status into an error.
    pub(super) async fn send(
        &self,
        request: RequestBuilder,
        operation: &str,
        what: &str,
    ) -> Result<Response, ImageError> {
        let response = request.send().await.map_err(|e| self.network(operation, e))?;
        match response.status() {
            status if status.is_success() => Ok(response),
            StatusCode::NOT_FOUND => Err(ImageError::NotFound {
                registry: self.endpoint.host.clone(),
                image: Box::new(self.reference.clone()),
                what: what.to_owned(),
            }),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(self.unauthorized(None)),
            status => Err(self.status(operation, status.as_u16())),
        }
    }

    /// What the token exchange said.
    fn refused(&self, error: OciDistributionError) -> ImageError {
        match error {
            OciDistributionError::AuthenticationFailure(said) => {
                let said: String = said.chars().filter(|c| !c.is_control()).take(200).collect();
                self.unauthorized((!said.is_empty()).then(|| said.into()))
            }
            OciDistributionError::UnauthorizedError { .. } => self.unauthorized(None),
            OciDistributionError::ServerError { code, .. } => self.status("log in", code),
            OciDistributionError::RequestError(e) => self.network("log in", e),
            other => self.unauthorized(Some(other.into())),
        }
    }

    pub(crate) fn network(&self, operation: impl Display, error: impl Into<Cause>) -> ImageError {
        ImageError::Network {
            registry: self.endpoint.host.clone(),
            operation: operation.to_string(),
            source: error.into(),
        }
    }

    pub(crate) fn status(&self, operation: &str, status: u16) -> ImageError {
        let operation = format!("{operation} for {}", self.reference);
        ImageError::Registry { registry: self.endpoint.host.clone(), operation, status }
    }

    fn unauthorized(&self, source: Option<Cause>) -> ImageError {
        ImageError::Unauthorized {
            registry: self.endpoint.host.clone(),
            image: Box::new(self.reference.clone()),
            source,
        }
    }
}

/// Each of a file's certificates: `oci-client` reads one.
fn certificates(pem: &[u8]) -> Vec<Certificate> {
    const END: &str = "-----END CERTIFICATE-----";
    let text = String::from_utf8_lossy(pem);
    let each = text.split_inclusive(END).filter(|one| one.contains(END));
    each.map(|one| Certificate { encoding: CertificateEncoding::Pem, data: one.as_bytes().to_vec() })
        .collect()
}

fn basic(user: &str, password: &str) -> String {
    use base64::{Engine, engine::general_purpose::STANDARD};
    format!("Basic {}", STANDARD.encode(format!("{user}:{password}")))
}
