//! Registry on loopback in this process, and a client for it.

use std::path::Path;
use std::time::Duration;

use coracle_registry::{Config, Metrics, serve};
use coracle_types::Clock;
use reqwest::{Method, Response, StatusCode};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha512};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";

pub(crate) struct Registry {
    pub(crate) url: String,
    pub(crate) token: String,
    pub(crate) dir: tempfile::TempDir,
    http: reqwest::Client,
    stop: CancellationToken,
    task: Option<JoinHandle<()>>,
}

/// Response of the registry.
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: reqwest::header::HeaderMap,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|v| v.to_str().unwrap())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// Code of the first error. Also checks the form of the whole body.
    pub(crate) fn code(&self) -> String {
        assert_eq!(self.header("content-type"), Some("application/json"), "{}", self.status);
        let body = self.json();
        let errors = body["errors"].as_array().unwrap_or_else(|| panic!("no errors in {body}"));
        for error in errors {
            let code = error["code"].as_str().unwrap();
            assert!(code.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'), "{code}");
            assert!(error["message"].is_string());
        }
        errors[0]["code"].as_str().unwrap().to_owned()
    }
}

/// Starts a registry with the defaults.
pub(crate) async fn start() -> Registry {
    start_with(|_| {}).await
}

/// Starts a registry with changed settings.
pub(crate) async fn start_with(change: impl FnOnce(&mut Config)) -> Registry {
    start_in(tempfile::tempdir().unwrap(), change).await
}

/// Starts a registry in the directory that another one left.
pub(crate) async fn start_in(dir: tempfile::TempDir, change: impl FnOnce(&mut Config)) -> Registry {
    let mut config = Config::new(dir.path().to_owned(), "127.0.0.1:0".parse().unwrap());
    config.clock = Clock::system();
    change(&mut config);
    let (send, ready) = oneshot::channel();
    let stop = CancellationToken::new();
    let metrics = Metrics::register(&mut prometheus_client::registry::Registry::default());
    let (until, announce) = (stop.clone(), move |r: &coracle_registry::Ready| send.send(r.address).unwrap());
    #[expect(clippy::disallowed_methods, reason = "the handle below owns it")]
    let task = tokio::spawn(async move { serve(config, metrics, until, announce).await.unwrap() });
    let address = ready.await.expect("the registry starts");
    let token = std::fs::read_to_string(dir.path().join("token")).unwrap().trim().to_owned();
    let http = reqwest::Client::builder().timeout(Duration::from_secs(20)).build().unwrap();
    Registry { url: format!("http://{address}"), token, dir, http, stop, task: Some(task) }
}

impl Registry {
    /// Ends the registry and keeps its directory.
    pub(crate) async fn end(mut self) -> tempfile::TempDir {
        self.stop.cancel();
        self.task.take().unwrap().await.unwrap();
        std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap())
    }

    pub(crate) fn request(&self, method: &str, path: &str) -> reqwest::RequestBuilder {
        let url = if path.starts_with("http") { path.to_owned() } else { format!("{}{path}", self.url) };
        self.http.request(Method::from_bytes(method.as_bytes()).unwrap(), url)
    }

    pub(crate) async fn send(&self, request: reqwest::RequestBuilder) -> Answer {
        let response: Response = request.send().await.unwrap();
        let (status, headers) = (response.status(), response.headers().clone());
        Answer { status: status.as_u16(), headers, body: response.bytes().await.unwrap().to_vec() }
    }

    /// Sends a request with the token.
    pub(crate) async fn call(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Vec<u8>>,
    ) -> Answer {
        let mut request = self.request(method, path).bearer_auth(&self.token).body(body.into());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.send(request).await
    }

    /// Sends a request without a token.
    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(self.request("GET", path)).await
    }

    /// Begins an upload and returns its location.
    pub(crate) async fn begin(&self, repo: &str) -> String {
        let begun = self.call("POST", &format!("/v2/{repo}/blobs/uploads/"), &[], "").await;
        assert_eq!(begun.status, 202);
        begun.header("location").unwrap().to_owned()
    }

    /// Pushes a blob in one piece and returns its digest.
    pub(crate) async fn push(&self, repo: &str, bytes: &[u8]) -> String {
        let (at, digest) = (self.begin(repo).await, digest(bytes));
        let done = self.call("PUT", &format!("{at}?digest={digest}"), &[], bytes).await;
        assert_eq!(done.status, 201, "{}", String::from_utf8_lossy(&done.body));
        digest
    }

    pub(crate) async fn put_manifest(
        &self,
        repo: &str,
        reference: &str,
        media_type: &str,
        body: &[u8],
    ) -> Answer {
        self.call("PUT", &format!("/v2/{repo}/manifests/{reference}"), &[("content-type", media_type)], body)
            .await
    }

    /// Pushes a small image and returns its digest and bytes.
    pub(crate) async fn image(&self, repo: &str, tag: &str) -> (String, Vec<u8>) {
        self.image_with(repo, tag, json!({})).await
    }

    /// Like `image`, with more fields in the manifest.
    pub(crate) async fn image_with(&self, repo: &str, reference: &str, extra: Value) -> (String, Vec<u8>) {
        let body = self.manifest(repo, extra).await;
        let named = digest(&body);
        let reference = if reference.is_empty() { &named } else { reference };
        let put = self.put_manifest(repo, reference, MANIFEST, &body).await;
        assert_eq!(put.status, StatusCode::CREATED.as_u16(), "{}", String::from_utf8_lossy(&put.body));
        (named, body)
    }

    /// Bytes of a manifest whose blobs are pushed.
    pub(crate) async fn manifest(&self, repo: &str, extra: Value) -> Vec<u8> {
        let config = self.push(repo, b"{}").await;
        let layer = self.push(repo, b"layer").await;
        let mut body = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config, "size": 2},
            "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": layer, "size": 5}],
        });
        for (key, value) in extra.as_object().unwrap() {
            body[key] = value.clone();
        }
        serde_json::to_vec(&body).unwrap()
    }

    /// Names of all files below a directory of the registry.
    pub(crate) fn files(&self, below: &str) -> Vec<String> {
        fn walk(dir: &Path, found: &mut Vec<String>) {
            for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
                if entry.path().is_dir() {
                    walk(&entry.path(), found);
                } else {
                    found.push(entry.file_name().to_string_lossy().into_owned());
                }
            }
        }
        let mut found = Vec::new();
        walk(&self.dir.path().join(below), &mut found);
        found.sort();
        found
    }
}

pub(crate) fn digest(bytes: &[u8]) -> String {
    coracle_testkit::oci::digest(bytes)
}

pub(crate) fn sha512(bytes: &[u8]) -> String {
    let hash = Sha512::digest(bytes);
    format!("sha512:{}", hash.iter().map(|b| format!("{b:02x}")).collect::<String>())
}

/// Deterministic noise of `len` bytes, different for each seed.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        })
        .collect()
}
