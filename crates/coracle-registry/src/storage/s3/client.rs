//! Requests to an S3-compatible server: signed, bounded in time and size, repeated when that can help.

use std::time::Duration;

use bytes::Bytes;
use coracle_types::Clock;
use reqwest::{Method, Response, StatusCode, Url};
use tokio::time::sleep;

use super::S3Config;
use super::list::{self, Page};
use super::sign::{self, Key};
use crate::error::StoreError;

/// Tries of a request, and the wait after the first; it doubles.
const TRIES: u32 = 4;
const WAIT: Duration = Duration::from_millis(100);
/// A request whose answer is small takes no longer.
const LIMIT: Duration = Duration::from_secs(60);
/// Longest silence of a body that is read.
const IDLE: Duration = Duration::from_secs(30);
/// Longest answer that is XML, bytes.
const XML_MAX: usize = 8 << 20;

/// A bucket, below a prefix.
pub(super) struct Client {
    http: reqwest::Client,
    endpoint: Url,
    bucket: String,
    prefix: String,
    key: Key,
    clock: Clock,
}

/// One request.
struct Call<'a> {
    operation: &'static str,
    method: Method,
    key: &'a str,
    /// Sorted by name.
    query: &'a [(&'a str, &'a str)],
    headers: &'a [(&'static str, &'a str)],
    body: Bytes,
}

impl Client {
    pub(super) fn new(config: &S3Config, clock: Clock) -> Result<Self, StoreError> {
        let address =
            |why: &str| StoreError::S3Address { text: config.endpoint.clone(), why: why.to_owned() };
        let endpoint = Url::parse(&config.endpoint).map_err(|e| address(&e.to_string()))?;
        if !matches!(endpoint.scheme(), "http" | "https") || endpoint.host_str().is_none() {
            return Err(address("it is http://HOST[:PORT] or https://HOST[:PORT]"));
        }
        let name = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'-');
        if config.bucket.is_empty() || !config.bucket.bytes().all(name) {
            return Err(address("the bucket's name is none"));
        }
        let path = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_' | b'/');
        if !config.prefix.bytes().all(path) || config.prefix.contains("..") || config.prefix.starts_with('/')
        {
            return Err(address("the prefix is no path of letters, digits, points and dashes"));
        }
        let http = reqwest::Client::builder().connect_timeout(Duration::from_secs(10)).read_timeout(IDLE);
        // A signature is for one host.
        let http = http.redirect(reqwest::redirect::Policy::none()).build();
        let http = http.map_err(|e| StoreError::s3("prepare requests to", &config.endpoint, e))?;
        let key = Key {
            access: config.access_key.clone(),
            secret: config.secret_key.clone(),
            region: config.region.clone(),
        };
        let (bucket, prefix) = (config.bucket.clone(), config.prefix.clone());
        Ok(Self { http, endpoint, bucket, prefix, key, clock })
    }

    pub(super) async fn put(&self, key: &str, bytes: Bytes) -> Result<(), StoreError> {
        self.small(&Call { body: bytes, ..self.call("put", Method::PUT, key) }).await.map(drop)
    }

    pub(super) async fn delete(&self, key: &str) -> Result<(), StoreError> {
        self.small(&self.call("delete", Method::DELETE, key)).await.map(drop)
    }

    pub(super) async fn copy(&self, from: &str, to: &str) -> Result<(), StoreError> {
        let source = format!("/{}/{}{from}", self.bucket, self.prefix);
        let headers = [("x-amz-copy-source", source.as_str())];
        let (found, answer) =
            self.small(&Call { headers: &headers, ..self.call("copy", Method::PUT, to) }).await?;
        match found && !list::is_error(&answer) {
            true => Ok(()),
            false => Err(self.refused("copy", from, StatusCode::NOT_FOUND)),
        }
    }

    /// Bytes of an object; `None` when there is none.
    pub(super) async fn size(&self, key: &str) -> Result<Option<u64>, StoreError> {
        let answer = self.send(&self.call("look at", Method::HEAD, key)).await?;
        let said =
            answer.as_ref().and_then(|a| a.headers().get("content-length")?.to_str().ok()?.parse().ok());
        match answer {
            None => Ok(None),
            Some(answer) => said.map(Some).ok_or_else(|| self.refused("look at", key, answer.status())),
        }
    }

    /// A whole small object, at most `bytes_max` long.
    pub(super) async fn get(&self, key: &str, bytes_max: usize) -> Result<Option<Bytes>, StoreError> {
        let mut tries = 0;
        loop {
            let Some(answer) = self.send(&self.call("get", Method::GET, key)).await? else { return Ok(None) };
            match self.body(answer, "get", key, bytes_max).await {
                Err(_) if tries < TRIES => tries += 1,
                done => return done.map(Some),
            }
        }
    }

    /// Begins to read an object, or the part `first..=last` of it.
    pub(super) async fn read(
        &self,
        key: &str,
        part: Option<(u64, u64)>,
    ) -> Result<Option<Response>, StoreError> {
        let range = part.map(|(first, last)| format!("bytes={first}-{last}"));
        let headers: Vec<_> = range.as_deref().map(|r| ("range", r)).into_iter().collect();
        let call = self.call("read", Method::GET, key);
        let answer = self.send(&Call { headers: &headers, ..call }).await?;
        match answer {
            Some(answer) if part.is_some() && answer.status() != StatusCode::PARTIAL_CONTENT => {
                Err(self.refused("read", key, answer.status()))
            }
            answer => Ok(answer),
        }
    }

    /// All keys below `below`, with their sizes, the prefix cut off.
    pub(super) async fn list(&self, below: &str) -> Result<Vec<(String, u64)>, StoreError> {
        let (prefix, mut found, mut next) = (format!("{}{below}", self.prefix), Vec::new(), None::<String>);
        loop {
            let mut query = vec![("list-type", "2"), ("prefix", prefix.as_str())];
            query.extend(next.as_deref().map(|token| ("continuation-token", token)));
            query.sort_unstable();
            let mut call = self.call("list", Method::GET, "");
            call.query = &query;
            let (_, xml) = self.small(&call).await?;
            let damaged = || self.refused("list", below, StatusCode::OK);
            let Page { keys, next: more } = list::page(&xml).ok_or_else(damaged)?;
            let own =
                keys.into_iter().filter_map(|(k, n)| Some((k.strip_prefix(&self.prefix)?.to_owned(), n)));
            found.extend(own);
            if more.is_none() || more == next {
                return Ok(found);
            }
            next = more;
        }
    }

    /// Begins an object that is made of parts.
    pub(super) async fn begin_parts(&self, key: &str) -> Result<String, StoreError> {
        let call = Call { query: &[("uploads", "")], ..self.call("begin", Method::POST, key) };
        let (_, answer) = self.small(&call).await?;
        list::upload_id(&answer).ok_or_else(|| self.refused("begin", key, StatusCode::OK))
    }

    /// Sends part `number`, from 1; returns its tag.
    pub(super) async fn part(
        &self,
        key: &str,
        id: &str,
        number: usize,
        body: Bytes,
    ) -> Result<String, StoreError> {
        let number = number.to_string();
        let query = [("partNumber", number.as_str()), ("uploadId", id)];
        let call = Call { query: &query, body, ..self.call("send a part of", Method::PUT, key) };
        let answer = self.send(&call).await?;
        let answer = answer.ok_or_else(|| self.refused("send a part of", key, StatusCode::NOT_FOUND))?;
        let tag = answer.headers().get("etag").and_then(|t| t.to_str().ok()).map(str::to_owned);
        tag.ok_or_else(|| self.refused("send a part of", key, answer.status()))
    }

    pub(super) async fn end_parts(&self, key: &str, id: &str, tags: &[String]) -> Result<(), StoreError> {
        let part = |(n, tag): (usize, &String)| {
            format!("<Part><PartNumber>{}</PartNumber><ETag>{tag}</ETag></Part>", n + 1)
        };
        let parts: String = tags.iter().enumerate().map(part).collect();
        let body = format!("<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>").into();
        let query = [("uploadId", id)];
        let (found, answer) =
            self.small(&Call { query: &query, body, ..self.call("end", Method::POST, key) }).await?;
        match found && !list::is_error(&answer) {
            true => Ok(()),
            false => Err(self.refused("end", key, StatusCode::OK)),
        }
    }

    /// Gives up an object that is made of parts.
    pub(super) async fn abort_parts(&self, key: &str, id: &str) -> Result<(), StoreError> {
        let query = [("uploadId", id)];
        self.small(&Call { query: &query, ..self.call("give up", Method::DELETE, key) }).await.map(drop)
    }

    fn call<'a>(&self, operation: &'static str, method: Method, key: &'a str) -> Call<'a> {
        Call { operation, method, key, query: &[], headers: &[], body: Bytes::new() }
    }

    /// A request with a small answer. `false`: there is no such object.
    async fn small(&self, call: &Call<'_>) -> Result<(bool, Bytes), StoreError> {
        match self.send(call).await? {
            None => Ok((false, Bytes::new())),
            Some(answer) => Ok((true, self.body(answer, call.operation, call.key, XML_MAX).await?)),
        }
    }

    async fn body(
        &self,
        mut answer: Response,
        operation: &'static str,
        key: &str,
        bytes_max: usize,
    ) -> Result<Bytes, StoreError> {
        let mut all = Vec::new();
        while let Some(piece) = answer.chunk().await.map_err(|e| StoreError::s3(operation, key, e))? {
            all.extend_from_slice(&piece);
            if all.len() > bytes_max {
                return Err(self.refused(operation, key, answer.status()));
            }
        }
        Ok(all.into())
    }

    fn refused(&self, operation: &'static str, key: &str, status: StatusCode) -> StoreError {
        StoreError::S3Status { operation, key: key.to_owned(), status: status.as_u16() }
    }

    /// Sends a request until it is answered. `None`: there is no such object. Every request may be repeated: objects are
    /// written whole, and parts by their numbers.
    async fn send(&self, call: &Call<'_>) -> Result<Option<Response>, StoreError> {
        let mut wait = WAIT;
        for left in (0..TRIES).rev() {
            let error = match self.attempt(call).await {
                Ok(answer) if answer.status().is_success() => return Ok(Some(answer)),
                Ok(answer) if answer.status() == StatusCode::NOT_FOUND => return Ok(None),
                Ok(answer) => {
                    let status = answer.status();
                    let error = self.refused(call.operation, call.key, status);
                    if !status.is_server_error() && status != StatusCode::TOO_MANY_REQUESTS {
                        return Err(error);
                    }
                    error
                }
                Err(error) => StoreError::s3(call.operation, call.key, error),
            };
            if left == 0 {
                return Err(error);
            }
            tracing::debug!(
                error = &error as &dyn std::error::Error,
                "request to the object store is repeated"
            );
            sleep(wait).await;
            wait *= 2;
        }
        Err(self.refused(call.operation, call.key, StatusCode::SERVICE_UNAVAILABLE))
    }

    async fn attempt(&self, call: &Call<'_>) -> Result<Response, reqwest::Error> {
        let object = if call.key.is_empty() { String::new() } else { format!("{}{}", self.prefix, call.key) };
        let path = format!("/{}/{object}", self.bucket);
        let pair = |(name, value): &(&str, &str)| format!("{}={}", sign::encode(name), sign::encode(value));
        let query = call.query.iter().map(pair).collect::<Vec<_>>().join("&");
        let mut url = self.endpoint.clone();
        url.set_path(&path);
        url.set_query((!query.is_empty()).then_some(&query));
        let host = url.host_str().unwrap_or_default();
        let host = url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        let body = sign::sha256(&call.body);
        let at = jiff::Timestamp::from_millisecond(self.clock.now().0).unwrap_or_default();
        let at = at.strftime("%Y%m%dT%H%M%SZ").to_string();
        let request = sign::Request {
            method: call.method.as_str(),
            host: &host,
            path: &path,
            query: &query,
            headers: call.headers,
            body: &body,
            at: &at,
        };
        let authorization = sign::authorization(&request, &self.key);
        let mut request = self.http.request(call.method.clone(), url);
        for (name, value) in call.headers {
            request = request.header(*name, *value);
        }
        let request = request.header("x-amz-content-sha256", body).header("x-amz-date", at);
        let mut request = request.header("authorization", authorization);
        if matches!(call.method, Method::PUT | Method::POST) {
            // The library says nothing of a body that is empty, and servers want to know.
            request = request.header("content-length", call.body.len());
        }
        let request = request.body(call.body.clone());
        // What is streamed has a limit of silence instead.
        let streamed = call.method == Method::GET && call.query.is_empty();
        if streamed { request.send().await } else { request.timeout(LIMIT).send().await }
    }
}
