//! Two processes on one PostgreSQL database: one writes, the other takes over, and a stale writer is refused.

use std::process::Command;

use coracle_proto::market::GetPendingBidsRequest;
use coracle_proto::market::trading_client::TradingClient;
use coracle_testkit::postgres::Postgres;
use coracle_testkit::{eventually, eventually_blocking};
use tonic::Code;
use tonic::transport::Endpoint;

use crate::support::{DEADLINE, Served, bid, tenant, with};

const LEASE_MS: u32 = 1500;

fn signal(served: &Served, signal: &str) {
    let pid = served.child.id().to_string();
    assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
}

#[tokio::test]
async fn stale_writer_cannot_write() {
    let Some(postgres) = Postgres::start().unwrap() else { return };
    let mut first = Served::spawn(&postgres.dsn(), LEASE_MS);
    first.wait_ready();
    let channel = first.connect().await;
    let token = tenant(&channel, "c/ns", None, &["trade", "read"]).await;
    let mut old = TradingClient::new(channel);
    let placed = old.place_bid(with(&token, bid(2_000_000, 1, "u", 0))).await.unwrap().into_inner();

    // The first process is suspended, as on a frozen host.
    signal(&first, "-STOP");
    let mut second = Served::spawn(&postgres.dsn(), LEASE_MS);
    second.wait_ready();
    let mut new = TradingClient::new(second.connect().await);
    let list = || with(&token, GetPendingBidsRequest::default());
    let found = new.get_pending_bids(list()).await.unwrap().into_inner();
    assert_eq!(found.bids.iter().map(|b| &b.bid).collect::<Vec<_>>(), [&placed.bid], "nothing is lost");
    let next = new.place_bid(with(&token, bid(2_000_000, 1, "u", 1))).await.unwrap().into_inner();

    // The process continues as if it were still the writer.
    signal(&first, "-CONT");
    let refused = old.place_bid(with(&token, bid(3_000_000, 1, "w", 0))).await.unwrap_err();
    assert!(matches!(refused.code(), Code::Unavailable | Code::Unknown), "{refused:?}");
    eventually_blocking(DEADLINE, "the stale writer ends", || first.child.try_wait().unwrap()).unwrap();
    let found = new.get_pending_bids(list()).await.unwrap().into_inner();
    let mut known: Vec<_> = found.bids.into_iter().map(|b| b.bid).collect();
    known.sort();
    assert_eq!(known, [placed.bid, next.bid], "and wrote nothing");
    second.stop();
}

/// A waiting replica forwards to the writer, and serves by itself after the writer is gone.
#[tokio::test]
async fn replica_forwards_to_writer_and_takes_over() {
    let Some(postgres) = Postgres::start().unwrap() else { return };
    let mut first = Served::spawn(&postgres.dsn(), LEASE_MS);
    first.wait_ready();
    let token = tenant(&first.connect().await, "c/ns", None, &["trade", "read"]).await;
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut second = Served::spawn_at(&postgres.dsn(), LEASE_MS, free);

    let replica = Endpoint::from_shared(second.grpc.clone()).unwrap().connect_lazy();
    let mut trading = TradingClient::new(replica);
    let placed = eventually("the replica forwards", async || {
        let reply = trading.place_bid(with(&token, bid(2_000_000, 1, "u", 0))).await;
        reply.ok().map(tonic::Response::into_inner)
    });
    let placed = placed.await.unwrap();
    let mut writer = TradingClient::new(first.connect().await);
    let list = || with(&token, GetPendingBidsRequest::default());
    let written = writer.get_pending_bids(list()).await.unwrap().into_inner();
    assert_eq!(written.bids.iter().map(|b| &b.bid).collect::<Vec<_>>(), [&placed.bid]);
    let read = trading.get_pending_bids(list()).await.unwrap().into_inner();
    assert_eq!(read, written, "the replica reads what the writer has");
    assert!(second.child.try_wait().unwrap().is_none());

    first.sigkill();
    second.wait_ready();
    let read = eventually("the replica serves", async || trading.get_pending_bids(list()).await.ok()).await;
    assert_eq!(read.unwrap().into_inner(), written);
    second.stop();
}
