//! TLS with real certificates: access to the market, access of suppliers, and a renewal without a restart.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_market::{Config, ServeError, Server, TlsFiles, serve};
use coracle_proto::market::market_client::MarketClient;
use coracle_proto::market::supply_client::SupplyClient;
use coracle_proto::market::{ListMarketsRequest, PutLotRequest};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Status};

use crate::support::{ADMIN, MARKET, tenant, with};

/// Certificate authority with its certificate.
struct Authority(Issuer<'static, KeyPair>, String);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self(Issuer::new(params, key), pem)
    }

    /// Issues a certificate and returns it with its key.
    fn sign(&self, expired: bool) -> (String, String) {
        let names = ["localhost", "127.0.0.1"].map(str::to_owned);
        let mut params = CertificateParams::new(names).unwrap();
        if expired {
            (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2021, 1, 1));
        }
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }

    fn identity(&self, expired: bool) -> Identity {
        let (certificate, key) = self.sign(expired);
        Identity::from_pem(certificate, key)
    }
}

fn write(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

fn config(dir: &Path, tls: Option<TlsFiles>) -> Config {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    Config {
        store: format!("sqlite:{}", dir.join("market.db").display()).parse().unwrap(),
        grpc: any,
        http: any,
        tls,
        plaintext: false,
        admin: None,
        regions: vec!["local".into()],
        default_region: Some("local".into()),
        admin_token: Some(ADMIN.into()),
        lease: Duration::from_secs(10),
        advertise: None,
        accounts: None,
        clock: coracle_types::Clock::system(),
    }
}

struct Running {
    at: Server,
    stop: CancellationToken,
    task: JoinSet<Result<(), ServeError>>,
}

impl Running {
    async fn start(config: Config) -> Result<Self, ServeError> {
        let (tell, told) = oneshot::channel();
        let stop = CancellationToken::new();
        let inner = stop.clone();
        let mut task = JoinSet::new();
        task.spawn(async move {
            Box::pin(serve(config, inner, |at| tell.send(at).map_or_else(|_| (), |()| ()))).await
        });
        match told.await {
            Ok(at) => Ok(Self { at, stop, task }),
            Err(_) => Err(task.join_next().await.unwrap().unwrap().unwrap_err()),
        }
    }

    async fn end(mut self) {
        self.stop.cancel();
        self.task.join_next().await.unwrap().unwrap().unwrap();
    }

    /// Connection that trusts an authority and presents an identity.
    fn channel(&self, trusts: &Authority, identity: Option<Identity>) -> Channel {
        let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&trusts.1));
        if let Some(identity) = identity {
            tls = tls.identity(identity);
        }
        let url = format!("https://localhost:{}", self.at.grpc.port());
        Endpoint::from_shared(url).unwrap().tls_config(tls).unwrap().connect_lazy()
    }
}

async fn list(channel: Channel) -> Result<(), Status> {
    MarketClient::new(channel).list_markets(with(ADMIN, ListMarketsRequest {})).await.map(drop)
}

async fn offer(channel: Channel, token: &str) -> Result<(), Status> {
    let lot = PutLotRequest { lot: "rack".into(), market: MARKET.into(), units: 1, notice_ms: 60_000 };
    SupplyClient::new(channel).put_lot(with(token, lot)).await.map(drop)
}

#[tokio::test]
async fn suppliers_need_a_client_certificate_and_tenants_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let [server, clients, other] = [(); 3].map(|()| Authority::new());
    let (certificate, key) = server.sign(false);
    let files = TlsFiles {
        certificate: write(dir.path(), "tls.crt", &certificate),
        key: write(dir.path(), "tls.key", &key),
        client_ca: Some(write(dir.path(), "clients.crt", &clients.1)),
    };
    let market = Running::start(config(dir.path(), Some(files))).await.unwrap();

    let plain = Endpoint::from_shared(format!("http://{}", market.at.grpc)).unwrap().connect_lazy();
    list(plain).await.expect_err("a client without TLS");
    let refused = list(market.channel(&other, None)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "the market's authority is not trusted");
    let open = market.channel(&server, None);
    list(open.clone()).await.expect("tenants need no certificate");

    let token = tenant(&open, "host", None, &["supply"]).await;
    let refused = offer(open, &token).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated, "a supplier without a certificate: {refused}");
    assert_eq!(refused.metadata().get("coracle-code").unwrap(), "CLIENT_CERTIFICATE");
    for (why, identity) in [("another authority", other.identity(false)), ("expired", clients.identity(true))]
    {
        let refused = offer(market.channel(&server, Some(identity)), &token).await.unwrap_err();
        // The handshake fails, so no service answers.
        assert!(refused.metadata().get("coracle-code").is_none(), "{why}: {refused}");
        assert!(refused.message().contains("transport error"), "{why}: {refused}");
    }
    let supplier = market.channel(&server, Some(clients.identity(false)));
    offer(supplier.clone(), &token).await.expect("a supplier with a certificate");
    let denied = offer(supplier, "cmt_none").await.unwrap_err();
    assert_eq!(denied.code(), Code::Unauthenticated, "the certificate does not replace the token");

    let root = reqwest::Certificate::from_pem(server.1.as_bytes()).unwrap();
    let http = reqwest::Client::builder().tls_certs_only([root]).build().unwrap();
    let url = format!("https://localhost:{}/v1/markets", market.at.http.port());
    assert_eq!(http.get(&url).bearer_auth(ADMIN).send().await.unwrap().status(), 200);
    market.end().await;
}

#[tokio::test]
async fn renewed_certificate_is_served_without_restart() {
    let dir = tempfile::tempdir().unwrap();
    let [old, new] = [(); 2].map(|()| Authority::new());
    let (certificate, key) = old.sign(false);
    let files = TlsFiles {
        certificate: write(dir.path(), "tls.crt", &certificate),
        key: write(dir.path(), "tls.key", &key),
        client_ca: None,
    };
    let market = Running::start(config(dir.path(), Some(files))).await.unwrap();
    let connected = market.channel(&old, None);
    list(connected.clone()).await.unwrap();

    // The two files are not replaced atomically: the old pair serves meanwhile.
    let (certificate, key) = new.sign(false);
    write(dir.path(), "tls.crt", &certificate);
    list(market.channel(&old, None)).await.expect("half a renewal");
    write(dir.path(), "tls.key", &key);
    list(market.channel(&new, None)).await.expect("the renewed certificate");
    list(market.channel(&old, None)).await.expect_err("the certificate before it");
    list(connected).await.expect("a connection from before");
    market.end().await;
}

#[tokio::test]
async fn plaintext_is_served_on_loopback_or_by_permission() {
    let dir = tempfile::tempdir().unwrap();
    let open = Config { grpc: ([0, 0, 0, 0], 0).into(), ..config(dir.path(), None) };
    let refused = Running::start(open.clone()).await.map(drop).unwrap_err();
    assert!(matches!(refused, ServeError::Plaintext { .. }), "{refused}");
    let web = Config { http: ([0, 0, 0, 0], 0).into(), ..config(dir.path(), None) };
    let refused = Running::start(web).await.map(drop).unwrap_err();
    assert!(matches!(refused, ServeError::Plaintext { .. }), "{refused}");
    Running::start(Config { plaintext: true, ..open }).await.unwrap().end().await;
}
