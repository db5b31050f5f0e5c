//! Addresses that requests of a cluster may not reach, and credentials that token servers receive.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{any, post},
};
use coracle_image::{ImageError, PullOptions, StoreOptions};
use coracle_oci::{Credentials, OciError, PullOrigin, Registries, RegistryHosts, Secret, Timeouts};
use tokio::task::JoinSet;

use crate::common::{Bench, options, progress};

/// Registry that answers every request in the same way and records all requests.
struct Server {
    address: SocketAddr,
    /// Realm of the challenge; empty for none.
    realm: String,
    /// Target of redirects; empty for none.
    redirect: String,
    seen: Mutex<Vec<String>>,
}

struct Running {
    server: Arc<Server>,
    _tasks: JoinSet<()>,
}

impl Running {
    async fn start(realm: &str, redirect: &str) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (realm, redirect) = (realm.replace("SELF", &address.to_string()), redirect.to_owned());
        let server = Arc::new(Server { address, realm, redirect, seen: Mutex::default() });
        let app = Router::new()
            .route("/oauth", post(oauth))
            .fallback(any(record_request))
            .with_state(server.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { server, _tasks: tasks }
    }

    fn requests(&self) -> Vec<String> {
        self.server.seen.lock().unwrap().clone()
    }

    fn registries(&self) -> Registries {
        Registries::default().with(&self.server.address.to_string(), RegistryHosts::default())
    }

    async fn pull(
        &self,
        host: &str,
        registries: Registries,
        origin: PullOrigin,
        credentials: Credentials,
    ) -> ImageError {
        let bench =
            Bench::with(StoreOptions { registries, retries: 0, timeouts: Timeouts::default(), ..options() });
        let name = format!("{host}:{}/a/b:1", self.server.address.port()).parse().unwrap();
        let options = PullOptions { credentials, origin, ..PullOptions::default() };
        bench.store.pull(&name, &options, progress()).await.unwrap_err()
    }
}

async fn record_request(State(server): State<Arc<Server>>, request: axum::extract::Request) -> Response {
    let authorization = request.headers().get("authorization").map_or("-", |v| v.to_str().unwrap());
    let path = request.uri().path_and_query().unwrap();
    server.seen.lock().unwrap().push(format!("{} {path} {authorization}", request.method()));
    if !server.redirect.is_empty() && request.uri().path() != "/v2/" {
        return (StatusCode::TEMPORARY_REDIRECT, [("location", server.redirect.clone())]).into_response();
    }
    if server.realm.is_empty() || request.uri().path() != "/v2/" {
        return (StatusCode::NOT_FOUND, "an answer with secrets").into_response();
    }
    let challenge = format!("Bearer realm=\"{}\",service=\"s\"", server.realm);
    (StatusCode::UNAUTHORIZED, [("www-authenticate", challenge)], "an answer with secrets").into_response()
}

async fn oauth(State(server): State<Arc<Server>>, headers: HeaderMap, form: String) -> Response {
    assert!(!headers.contains_key("authorization"));
    server.seen.lock().unwrap().push(format!("oauth {form}"));
    r#"{"access_token":"of-refresh"}"#.into_response()
}

fn is_address_refused(error: &ImageError) -> bool {
    matches!(error, ImageError::Oci(OciError::AddressNotAllowed { .. }))
        && !error.is_transient()
        && error.code() == "COR-IMG-017"
}

#[tokio::test]
async fn cluster_pull_of_a_loopback_registry_is_refused() {
    let running = Running::start("", "").await;
    for host in ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"] {
        let error =
            running.pull(host, Registries::default(), PullOrigin::Cluster, Credentials::Anonymous).await;
        assert!(is_address_refused(&error), "{host}: {error}");
    }
    assert_eq!(running.requests(), Vec::<String>::new(), "nothing was asked");
    let error =
        running.pull("127.0.0.1", Registries::default(), PullOrigin::Local, Credentials::Anonymous).await;
    assert!(matches!(error, ImageError::Oci(OciError::NotFound { .. })), "{error}");
    let configured =
        running.pull("127.0.0.1", running.registries(), PullOrigin::Cluster, Credentials::Anonymous).await;
    assert!(matches!(configured, ImageError::Oci(OciError::NotFound { .. })), "{configured}");
}

#[tokio::test]
async fn cluster_pull_follows_no_redirect_to_this_host() {
    let inner = Running::start("", "").await;
    for target in [
        format!("http://{}/secret", inner.server.address),
        format!("http://localhost:{}/secret", inner.server.address.port()),
        "http://169.254.169.254/latest/meta-data".to_owned(),
    ] {
        let running = Running::start("", &target).await;
        let error = running
            .pull("127.0.0.1", running.registries(), PullOrigin::Cluster, Credentials::Anonymous)
            .await;
        assert!(is_address_refused(&error), "{target}: {error}");
    }
    assert_eq!(inner.requests(), Vec::<String>::new());
}

#[tokio::test]
async fn cluster_pull_asks_no_token_server_on_this_host() {
    let inner = Running::start("", "").await;
    for realm in [
        format!("http://{}/token", inner.server.address),
        "http://169.254.169.254/latest/api/token".to_owned(),
    ] {
        let running = Running::start(&realm, "").await;
        let error = running
            .pull("127.0.0.1", running.registries(), PullOrigin::Cluster, Credentials::Anonymous)
            .await;
        assert!(is_address_refused(&error), "{realm}: {error}");
    }
    assert_eq!(inner.requests(), Vec::<String>::new());
}

/// Tests the deny rule for private ranges by the reference, the token server and the redirect. The error contains nothing that
/// a server sent.
#[tokio::test]
async fn cluster_pull_reaches_no_private_address() {
    let hosts = ["10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "[fd12::1]", "[::ffff:10.0.0.1]"];
    for host in hosts.into_iter().chain(["127.0.0.2", "169.254.169.254", "[fe80::1]"]) {
        let url = format!("http://{host}/there");
        for (by, name, realm, redirect) in [
            ("reference", host, "", ""),
            ("token server", "127.0.0.1", url.as_str(), ""),
            ("redirect", "127.0.0.1", "", url.as_str()),
        ] {
            let running = Running::start(realm, redirect).await;
            let registries = running.registries().deny_private(true);
            let error = running.pull(name, registries, PullOrigin::Cluster, Credentials::Anonymous).await;
            assert!(is_address_refused(&error), "{by} {host}: {error}");
            assert!(!error_chain(&error).contains("secrets"), "{by} {host}: {}", error_chain(&error));
        }
    }
}

/// Text of an error with its causes.
fn error_chain(error: &ImageError) -> String {
    let mut shown = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(source) = cause {
        shown += &source.to_string();
        cause = source.source();
    }
    shown
}

#[tokio::test]
async fn redirect_to_another_server_takes_no_credentials() {
    let inner = Running::start("", "").await;
    let running = Running::start("", &format!("http://{}/there", inner.server.address)).await;
    let credentials = Credentials::Basic { user: "u".into(), password: Secret::new("p") };
    running.pull("127.0.0.1", Registries::default(), PullOrigin::Local, credentials).await;
    assert!(
        running.requests().iter().any(|seen| seen.contains("manifests/1 Basic dTpw")),
        "{:?}",
        running.requests()
    );
    assert_eq!(inner.requests(), ["GET /there -"]);
}

#[tokio::test]
async fn refused_login_does_not_repeat_the_answer() {
    let running = Running::start("http://SELF/token", "").await;
    let error =
        running.pull("127.0.0.1", Registries::default(), PullOrigin::Local, Credentials::Anonymous).await;
    assert!(!error_chain(&error).contains("secrets"), "{}", error_chain(&error));
}

#[tokio::test]
async fn identity_token_is_exchanged_by_oauth() {
    let running = Running::start("http://SELF/oauth", "").await;
    let dir = tempfile::tempdir().unwrap();
    let config = format!(
        r#"{{"auths":{{"{}":{{"auth":"dTo=","identitytoken":"refresh-me"}}}}}}"#,
        running.server.address
    );
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let credentials = Credentials::Docker { dir: Some(dir.path().to_owned()) };
    running.pull("127.0.0.1", Registries::default(), PullOrigin::Local, credentials).await;
    let seen = running.requests().join("\n");
    for want in [
        "grant_type=refresh_token",
        "refresh_token=refresh-me",
        "scope=repository%3Aa%2Fb%3Apull",
        "service=s",
        "manifests/1 Bearer of-refresh",
    ] {
        assert!(seen.contains(want), "{want}: {seen}");
    }
}
