//! Market in a separate process, and a tenant of it.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, ChildStdin};
use std::time::Duration;

use coracle_proto::market::admin_client::AdminClient;
use coracle_proto::market::supply_client::SupplyClient;
use coracle_proto::market::*;
use coracle_testkit::eventually_blocking;
use tonic::Request;
use tonic::transport::{Channel, Endpoint};

use crate::server;

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
        let mut served = Self::spawn(store, 10_000);
        served.wait_ready();
        served
    }

    /// Starts a process, which waits while another one holds the lease.
    pub(crate) fn spawn(store: &str, lease_ms: u32) -> Self {
        let args = ["--exact", "server_process", "--nocapture"];
        let (child, alive) = server::spawn(&args, store, ADMIN, lease_ms);
        Self { child, alive: Some(alive), grpc: String::new(), http: String::new(), admin: String::new() }
    }

    /// Like [`spawn`](Self::spawn), with an address for gRPC that exists before the process itself serves.
    pub(crate) fn spawn_at(store: &str, lease_ms: u32, grpc: SocketAddr) -> Self {
        let args = ["--exact", "server_process", "--nocapture"];
        let (child, alive) = server::spawn_at(&args, store, ADMIN, lease_ms, grpc);
        let url = format!("http://{grpc}");
        Self { child, alive: Some(alive), grpc: url, http: String::new(), admin: String::new() }
    }

    /// Waits until the process serves.
    pub(crate) fn wait_ready(&mut self) {
        let at = server::wait_ready(&mut self.child);
        (self.grpc, self.http, self.admin) = (at.grpc, at.http, at.admin);
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

    /// Closes the pipe and waits until the process has ended successfully.
    pub(crate) fn stop(mut self) {
        drop(self.alive.take());
        let ended = eventually_blocking(DEADLINE, "the market ends", || self.child.try_wait().unwrap());
        let status = ended.unwrap();
        assert!(status.success(), "{status}");
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
        ..Default::default()
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

/// Reports the supplier's only machine, in slot 0, with a node `bn-1` if the state has one. The report names the present
/// version of the desired set.
pub(crate) async fn observe(
    channel: &Channel,
    token: &str,
    lot: &str,
    allocation: &str,
    state: MachineState,
) {
    let machine = ObservedAllocation {
        market: MARKET.into(),
        lot: lot.into(),
        slot: 0,
        allocation: allocation.into(),
        state: state.into(),
        node: "bn-1".into(),
        fault: 0,
    };
    let report =
        ReportObservedRequest { epochs: [(MARKET.to_owned(), u64::MAX)].into(), allocations: vec![machine] };
    SupplyClient::new(channel.clone()).report_observed(with(token, report)).await.unwrap();
}
