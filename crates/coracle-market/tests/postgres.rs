//! Two processes on one PostgreSQL: one writes, the other takes over, a stale writer is refused.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod support;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coracle_proto::market::GetPendingBidsRequest;
use coracle_proto::market::trading_client::TradingClient;
use tonic::Code;

use support::{DEADLINE, Served, bid, tenant, with};

const LEASE_MS: &str = "1500";

/// A server of our own, gone with this value.
struct Postgres {
    server: Child,
    dir: tempfile::TempDir,
    port: u16,
}

/// `initdb` and the server refuse root.
fn as_postgres(program: &str) -> Command {
    let mut command = Command::new("runuser");
    command.args(["-u", "postgres", "--", program]).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

impl Postgres {
    /// `None` where PostgreSQL is not installed, which fails in CI.
    fn start() -> Option<Self> {
        if !Command::new("initdb").arg("--version").output().is_ok_and(|o| o.status.success()) {
            assert!(std::env::var("CI").is_err(), "PostgreSQL is needed in CI");
            eprintln!("skipped: no initdb");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        std::fs::create_dir(&data).unwrap();
        std::os::unix::fs::chown(dir.path(), Some(uid("-u")), Some(uid("-g"))).unwrap();
        std::os::unix::fs::chown(&data, Some(uid("-u")), Some(uid("-g"))).unwrap();
        let made = as_postgres("initdb")
            .args(["-A", "trust", "-U", "coracle", "--no-sync", "-D"])
            .arg(&data)
            .status()
            .unwrap();
        assert!(made.success());
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let server = as_postgres("postgres")
            .args(["-h", "127.0.0.1", "-p", &port.to_string(), "-k"])
            .arg(dir.path())
            .arg("-D")
            .arg(&data)
            .spawn()
            .unwrap();
        let postgres = Self { server, dir, port };
        let started = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(started.elapsed() < DEADLINE, "PostgreSQL does not listen");
            std::thread::sleep(Duration::from_millis(50));
        }
        Some(postgres)
    }

    fn dsn(&self) -> String {
        format!("postgres://coracle@127.0.0.1:{}/postgres", self.port)
    }
}

fn uid(which: &str) -> u32 {
    let output = Command::new("id").args([which, "postgres"]).output().unwrap();
    String::from_utf8_lossy(&output.stdout).trim().parse().unwrap()
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // The server's own pid: `runuser` does not pass signals on.
        if let Ok(text) = std::fs::read_to_string(self.dir.path().join("data/postmaster.pid"))
            && let Some(pid) = text.lines().next()
        {
            let _ = Command::new("kill").args(["-INT", pid]).status();
        }
        let _ = self.server.wait();
    }
}

fn signal(served: &Served, signal: &str) {
    let pid = served.child.id().to_string();
    assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
}

#[tokio::test]
async fn a_stale_writer_cannot_write() {
    let Some(postgres) = Postgres::start() else { return };
    let mut first = Served::spawn(&postgres.dsn(), LEASE_MS);
    first.wait_ready();
    let channel = first.connect().await;
    let token = tenant(&channel, "c/ns", None, &["trade", "read"]).await;
    let mut old = TradingClient::new(channel);
    let placed = old.place_bid(with(&token, bid(2_000_000, 1, "u", 0))).await.unwrap().into_inner();

    // The first one stands still, as a process does whose machine is frozen.
    signal(&first, "-STOP");
    let mut second = Served::spawn(&postgres.dsn(), LEASE_MS);
    second.wait_ready();
    let mut new = TradingClient::new(second.connect().await);
    let list = || with(&token, GetPendingBidsRequest::default());
    let found = new.get_pending_bids(list()).await.unwrap().into_inner();
    assert_eq!(found.bids.iter().map(|b| &b.bid).collect::<Vec<_>>(), [&placed.bid], "nothing is lost");
    let next = new.place_bid(with(&token, bid(2_000_000, 1, "u", 1))).await.unwrap().into_inner();

    // It wakes and believes that it still writes.
    signal(&first, "-CONT");
    let refused = old.place_bid(with(&token, bid(3_000_000, 1, "w", 0))).await.unwrap_err();
    assert!(matches!(refused.code(), Code::Unavailable | Code::Unknown), "{refused:?}");
    let started = Instant::now();
    while first.child.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < DEADLINE, "the stale writer goes on");
        std::thread::sleep(Duration::from_millis(20));
    }
    let found = new.get_pending_bids(list()).await.unwrap().into_inner();
    let mut known: Vec<_> = found.bids.into_iter().map(|b| b.bid).collect();
    known.sort();
    assert_eq!(known, [placed.bid, next.bid], "and wrote nothing");
    second.stop();
}
