//! A market in a process of its own, and a tenant in it.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::io::BufRead;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use coracle_proto::market::admin_client::AdminClient;
use coracle_proto::market::*;
use tonic::Request;
use tonic::transport::{Channel, Endpoint};

pub(crate) const ADMIN: &str = "test-admin";
pub(crate) const MARKET: &str = "a100-4x/local";
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) struct Served {
    pub(crate) child: Child,
    pub(crate) alive: Option<ChildStdin>,
    pub(crate) grpc: String,
    pub(crate) http: String,
    pub(crate) admin: String,
}

impl Served {
    pub(crate) fn start(store: &str) -> Self {
        let mut served = Self::spawn(store, "10000");
        served.wait_ready();
        served
    }

    /// Starts a process that may have to stand by.
    pub(crate) fn spawn(store: &str, lease_ms: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_coracle-market-server"))
            .args([store, ADMIN, lease_ms])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let alive = child.stdin.take();
        Self { child, alive, grpc: String::new(), http: String::new(), admin: String::new() }
    }

    /// Waits until it serves.
    pub(crate) fn wait_ready(&mut self) {
        let mut lines = std::io::BufReader::new(self.child.stdout.take().unwrap()).lines();
        let mut next = || format!("http://{}", lines.next().unwrap().unwrap());
        (self.grpc, self.http, self.admin) = (next(), next(), next());
    }

    pub(crate) fn sqlite(file: &Path) -> Self {
        Self::start(&format!("sqlite:{}", file.display()))
    }

    pub(crate) async fn connect(&self) -> Channel {
        Endpoint::from_shared(self.grpc.clone()).unwrap().connect().await.unwrap()
    }

    pub(crate) fn sigkill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Ends as its owner's end of the pipe does, and says how.
    pub(crate) fn stop(mut self) {
        drop(self.alive.take());
        let started = Instant::now();
        while started.elapsed() < DEADLINE {
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(status.success(), "{status}");
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("did not end in {DEADLINE:?}");
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn with<T>(token: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    request
}

pub(crate) async fn tenant(channel: &Channel, name: &str, cap: Option<i64>, scopes: &[&str]) -> String {
    let request = PutTenantRequest {
        tenant: name.into(),
        hourly_cap_micros: cap,
        rate: 1_000_000,
        scopes: scopes.iter().map(ToString::to_string).collect(),
    };
    AdminClient::new(channel.clone()).put_tenant(with(ADMIN, request)).await.unwrap().into_inner().token
}

pub(crate) fn bid(limit_micros: i64, quantity: u32, owner: &str, version: u64) -> PlaceBidRequest {
    PlaceBidRequest {
        market: MARKET.into(),
        limit_micros,
        quantity,
        owner_uid: owner.into(),
        if_owner_version: Some(version),
        idempotency_key: format!("{owner}/{version}"),
        ..PlaceBidRequest::default()
    }
}
