//! Market in a separate process, its tenants, and bids for them.

use std::path::Path;
use std::process::{Child, ChildStdin};
use std::time::Duration;

use coracle_proto::market::admin_client::AdminClient;
use coracle_proto::market::{PlaceBidRequest, PutTenantRequest};
use tonic::Request;
use tonic::transport::{Channel, Endpoint};

pub(crate) const ADMIN: &str = "bench-admin";
pub(crate) const MARKET: &str = "a100-4x/local";
pub(crate) const TENANTS: usize = 100;
pub(crate) const CONNECTIONS: usize = 4;

pub(crate) struct Served {
    child: Child,
    _alive: ChildStdin,
    grpc: String,
}

impl Served {
    pub(crate) fn start(store: &Path) -> Self {
        let store = format!("sqlite:{}", store.display());
        let (mut child, alive) = crate::process::spawn(&[], &store, ADMIN, 10_000);
        let grpc = crate::process::wait_ready(&mut child).grpc;
        Self { child, _alive: alive, grpc }
    }

    pub(crate) async fn connect(&self) -> Channel {
        Endpoint::from_shared(self.grpc.clone()).unwrap().tcp_nodelay(true).connect().await.unwrap()
    }

    pub(crate) async fn channels(&self) -> Vec<Channel> {
        let mut channels = Vec::new();
        for _ in 0..CONNECTIONS {
            channels.push(self.connect().await);
        }
        channels
    }

    pub(crate) fn rss_mib(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1024.0
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

pub(crate) fn with<T>(token: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    request
}

/// Creates the n-th bid; owners, keys and labels have the same size as those of the operator.
pub(crate) fn bid(n: u64) -> PlaceBidRequest {
    let owner = n / 64 % 1000;
    let spread = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    PlaceBidRequest {
        market: MARKET.into(),
        limit_micros: 2_000_000 + i64::try_from(spread % 59_000).unwrap() * 100,
        quantity: 1,
        owner_uid: format!("6f9619ff-8b86-d011-b42d-{owner:012x}"),
        idempotency_key: format!("6f9619ff-8b86-d011-b42d-{owner:012x}/{n}"),
        ..PlaceBidRequest::default()
    }
}

pub(crate) async fn tokens(channel: Channel) -> Vec<String> {
    let mut admin = AdminClient::new(channel);
    let mut tokens = Vec::new();
    for n in 0..TENANTS {
        let tenant = PutTenantRequest {
            tenant: format!("bench/ns-{n}"),
            rate: 100_000_000,
            scopes: vec!["trade".into(), "read".into()],
            ..PutTenantRequest::default()
        };
        tokens.push(admin.put_tenant(with(ADMIN, tenant)).await.unwrap().into_inner().token);
    }
    tokens
}

/// Current time in milliseconds since 1970, from the same clock as the market's process.
pub(crate) fn now_ms() -> i64 {
    coracle_types::Clock::system().now().0
}

/// p99 of durations in milliseconds; other percentiles are printed on stderr.
pub(crate) fn p99_ms(what: &str, mut took: Vec<Duration>) -> Option<f64> {
    took.sort_unstable();
    let of = |permille| crate::engine::percentile(&took, permille);
    eprintln!("  {what}: {} samples, p50 {:?}, p99 {:?}, max {:?}", took.len(), of(500), of(990), of(1000));
    (!took.is_empty()).then(|| of(990).as_secs_f64() * 1000.0)
}
