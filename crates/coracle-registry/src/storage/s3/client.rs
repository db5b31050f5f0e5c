//! Requests to an S3-compatible server by `object_store`: signed, limited in time and size, retried.

use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt, TryStreamExt};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::client::{HttpClient, HttpConnector};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::signer::{SignedUrlOptions, Signer};
use object_store::{
    BackoffConfig, ClientOptions, Error, GetOptions, GetRange, GetResult, ObjectStore, ObjectStoreExt,
    RetryConfig,
};
use reqwest::header::{CONTENT_LENGTH, HeaderName, HeaderValue};
use reqwest::{Method, StatusCode, Url};
use serde::Deserialize;
use tokio::time::sleep;

use super::S3Config;
use crate::error::StoreError;

/// Attempts per request, and the wait after the first attempt, which doubles each time.
const TRIES: u32 = 4;
const WAIT: Duration = Duration::from_millis(100);
/// Time after which a request is not retried.
const RETRY_LIMIT: Duration = Duration::from_secs(120);
/// Time limit for opening a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// Longest idle time of the server. Completing a large object may take minutes (S3, "CompleteMultipartUpload").
const IDLE: Duration = Duration::from_secs(300);
/// Validity of the signature of a copy request.
const SIGNED: Duration = Duration::from_secs(300);
/// Longest response to a copy request, bytes.
const ANSWER_MAX: usize = 64 << 10;
const COPY_SOURCE: HeaderName = HeaderName::from_static("x-amz-copy-source");

/// Bucket with a key prefix.
#[derive(Debug)]
pub(super) struct Client {
    store: AmazonS3,
    /// HTTP client for UploadPartCopy, which the library signs but does not send.
    http: reqwest::Client,
    bucket: String,
    prefix: String,
}

/// HTTP client of all requests.
#[derive(Debug)]
struct Connector(reqwest::Client);

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.0.clone()))
    }
}

/// Response to UploadPartCopy. An error has no such field, and may come with status 200.
#[derive(Deserialize)]
struct CopyPartResult {
    #[serde(rename = "ETag")]
    e_tag: String,
}

impl Client {
    pub(super) fn new(config: &S3Config) -> Result<Self, StoreError> {
        let endpoint = check(config)?;
        let http = reqwest::Client::builder().connect_timeout(CONNECT).read_timeout(IDLE);
        // No redirects: a signature is valid for one host only.
        let http = http.redirect(reqwest::redirect::Policy::none()).build();
        let http = http.map_err(|e| failure("prepare requests to", &config.endpoint, e))?;
        let retry = RetryConfig {
            backoff: BackoffConfig { init_backoff: WAIT, max_backoff: WAIT * 20, base: 2.0 },
            max_retries: TRIES as usize - 1,
            retry_timeout: RETRY_LIMIT,
        };
        let store = AmazonS3Builder::new()
            .with_endpoint(endpoint)
            .with_allow_http(true)
            .with_region(&config.region)
            .with_bucket_name(&config.bucket)
            .with_access_key_id(&config.access_key)
            .with_secret_access_key(&config.secret_key)
            .with_http_connector(Connector(http.clone()))
            .with_retry(retry)
            .build()
            .map_err(|e| failure("prepare requests to", &config.endpoint, e))?;
        Ok(Self { store, http, bucket: config.bucket.clone(), prefix: config.prefix.clone() })
    }

    fn path(&self, key: &str) -> Result<Path, StoreError> {
        Path::parse(format!("{}{key}", self.prefix)).map_err(|e| failure("name", key, e))
    }

    pub(super) async fn put(&self, key: &str, bytes: Bytes) -> Result<(), StoreError> {
        self.store.put(&self.path(key)?, bytes.into()).await.map(drop).map_err(error_from("put", key))
    }

    pub(super) async fn delete(&self, key: &str) -> Result<(), StoreError> {
        self.delete_all(&[key.to_owned()]).await
    }

    /// Removes objects, many per request. Missing objects count as removed.
    pub(super) async fn delete_all(&self, keys: &[String]) -> Result<(), StoreError> {
        let Some(first) = keys.first() else { return Ok(()) };
        let paths: Vec<_> = keys.iter().map(|key| self.path(key)).collect::<Result<_, _>>()?;
        let mut removed = self.store.delete_stream(stream::iter(paths.into_iter().map(Ok)).boxed());
        while let Some(outcome) = removed.next().await {
            absent_is_none(outcome).map_err(error_from("delete", first))?;
        }
        Ok(())
    }

    pub(super) async fn copy(&self, from: &str, to: &str) -> Result<(), StoreError> {
        self.store.copy(&self.path(from)?, &self.path(to)?).await.map_err(error_from("copy", from))
    }

    /// Size of an object, bytes. `None` when it does not exist.
    pub(super) async fn size(&self, key: &str) -> Result<Option<u64>, StoreError> {
        let found =
            absent_is_none(self.store.head(&self.path(key)?).await).map_err(error_from("look at", key))?;
        Ok(found.map(|meta| meta.size))
    }

    /// Reads a small object of at most `bytes_max` bytes.
    pub(super) async fn get(&self, key: &str, bytes_max: u64) -> Result<Option<Bytes>, StoreError> {
        let found = absent_is_none(self.store.get(&self.path(key)?).await).map_err(error_from("get", key))?;
        let Some(found) = found else { return Ok(None) };
        if found.meta.size > bytes_max {
            return Err(StoreError::S3Size { key: key.to_owned(), size: found.meta.size, want: bytes_max });
        }
        found.bytes().await.map(Some).map_err(error_from("get", key))
    }

    /// Starts reading a part of an object.
    pub(super) async fn read(
        &self,
        key: &str,
        part: std::ops::Range<u64>,
    ) -> Result<Option<BoxStream<'static, object_store::Result<Bytes>>>, StoreError> {
        let options = GetOptions { range: Some(GetRange::Bounded(part)), ..GetOptions::default() };
        let found = absent_is_none(self.store.get_opts(&self.path(key)?, options).await);
        Ok(found.map_err(error_from("read", key))?.map(GetResult::into_stream))
    }

    /// Keys below `below`, without the prefix, and sizes.
    pub(super) async fn list(&self, below: &str) -> Result<Vec<(String, u64)>, StoreError> {
        let found = self.store.list(Some(&self.path(below)?));
        let own = found.try_filter_map(async |meta| {
            let key = meta.location.as_ref().strip_prefix(&self.prefix);
            Ok(key.map(|key| (key.to_owned(), meta.size)))
        });
        own.try_collect().await.map_err(error_from("list", below))
    }

    /// Starts a multipart upload.
    pub(super) async fn begin_parts(&self, key: &str) -> Result<String, StoreError> {
        self.store.create_multipart(&self.path(key)?).await.map_err(error_from("begin", key))
    }

    /// Copies a part of an existing object as part `number`, counted from 1. The bytes stay on the server.
    pub(super) async fn copy_part(
        &self,
        from: &str,
        to: &str,
        id: &str,
        number: usize,
    ) -> Result<PartId, StoreError> {
        let (path, source) = (self.path(to)?, format!("/{}/{}", self.bucket, self.path(from)?));
        let source = HeaderValue::from_str(&source).map_err(|e| failure("copy", from, e))?;
        let options = SignedUrlOptions::new()
            .with_query([("partNumber", number.to_string()), ("uploadId", id.to_owned())])
            .with_signed_header(COPY_SOURCE, source.clone());
        let (mut wait, mut left) = (WAIT, TRIES);
        loop {
            let url = self.store.signed_url_opts(Method::PUT, &path, SIGNED, &options).await;
            let url = url.map_err(error_from("copy", from))?;
            let error = match self.attempt_copy(url, &source, from).await {
                Ok(part) => return Ok(part),
                Err((error, _)) if left <= 1 => return Err(error),
                Err((error, false)) => return Err(error),
                Err((error, true)) => error,
            };
            tracing::debug!(
                error = &error as &dyn std::error::Error,
                "retry request to object store after error"
            );
            sleep(wait).await;
            (wait, left) = (wait * 2, left - 1);
        }
    }

    /// Sends one copy request. An error comes with whether a retry may succeed.
    async fn attempt_copy(
        &self,
        url: Url,
        source: &HeaderValue,
        from: &str,
    ) -> Result<PartId, (StoreError, bool)> {
        let failed = |e: reqwest::Error| (failure("copy", from, e.without_url()), true);
        let request = self.http.put(url).header(COPY_SOURCE, source).header(CONTENT_LENGTH, 0);
        let mut answer = request.send().await.map_err(failed)?;
        let status = answer.status();
        if !status.is_success() {
            let passes = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
            return Err((status_error("copy", from, status), passes));
        }
        let mut body = Vec::new();
        while let Some(piece) = answer.chunk().await.map_err(failed)? {
            body.extend_from_slice(&piece);
            if body.len() > ANSWER_MAX {
                return Err((status_error("copy", from, status), false));
            }
        }
        let parsed: Result<CopyPartResult, _> = quick_xml::de::from_reader(&body[..]);
        match parsed {
            Ok(part) => Ok(PartId { content_id: part.e_tag }),
            Err(error) => Err((failure("copy", from, error), true)),
        }
    }

    pub(super) async fn end_parts(&self, key: &str, id: &str, parts: Vec<PartId>) -> Result<(), StoreError> {
        let ended = self.store.complete_multipart(&self.path(key)?, &id.to_owned(), parts).await;
        ended.map(drop).map_err(error_from("end", key))
    }

    /// Aborts a multipart upload. `Ok` when it was aborted already.
    pub(super) async fn abort_parts(&self, key: &str, id: &str) -> Result<(), StoreError> {
        let ended = self.store.abort_multipart(&self.path(key)?, &id.to_owned()).await;
        absent_is_none(ended).map(drop).map_err(error_from("give up", key))
    }
}

/// Validates the settings and returns the endpoint without a path.
fn check(config: &S3Config) -> Result<String, StoreError> {
    let address = |why: &str| StoreError::S3Address { text: config.endpoint.clone(), why: why.to_owned() };
    let endpoint = Url::parse(&config.endpoint).map_err(|e| address(&e.to_string()))?;
    if !matches!(endpoint.scheme(), "http" | "https") || endpoint.host_str().is_none() {
        return Err(address("it is http://HOST[:PORT] or https://HOST[:PORT]"));
    }
    let name = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'-');
    if config.bucket.is_empty() || !config.bucket.bytes().all(name) {
        return Err(address("the bucket's name is none"));
    }
    let path = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_' | b'/');
    let folders = ["..", "//"].iter().all(|part| !config.prefix.contains(part));
    if !config.prefix.bytes().all(path) || !folders || config.prefix.starts_with('/') {
        return Err(address("the prefix is not a path of letters, digits, dots and dashes"));
    }
    Ok(endpoint.origin().ascii_serialization())
}

/// Turns a missing object into `None`.
fn absent_is_none<T>(outcome: object_store::Result<T>) -> object_store::Result<Option<T>> {
    match outcome {
        Ok(found) => Ok(Some(found)),
        Err(Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn status_error(operation: &'static str, key: &str, status: StatusCode) -> StoreError {
    StoreError::S3Status { operation, key: key.to_owned(), status: status.as_u16() }
}

fn failure(
    operation: &'static str,
    key: &str,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> StoreError {
    StoreError::S3 { operation, key: key.to_owned(), source: source.into() }
}

fn error_from(operation: &'static str, key: &str) -> impl FnOnce(Error) -> StoreError {
    let key = key.to_owned();
    move |error| match error {
        Error::PermissionDenied { .. } => status_error(operation, &key, StatusCode::FORBIDDEN),
        Error::Unauthenticated { .. } => status_error(operation, &key, StatusCode::UNAUTHORIZED),
        error => failure(operation, &key, error),
    }
}
