//! Market in a separate process, for tests and benchmarks. The process is another instance of the calling program, so that no
//! other binary is built.

use std::{
    io::{Read, Write},
    net::SocketAddr,
    process::{Child, ChildStdin, Command, Stdio},
};

use coracle_market::{Config, serve};
use tokio_util::sync::CancellationToken;

/// Environment variable of the child: `STORE TOKEN LEASE_MS GRPC`, one per line.
const ARGS: &str = "CORACLE_TEST_MARKET";
/// Prefix of the line with the addresses; a test harness prints other lines.
const READY: &str = "market serves at ";

/// Addresses of a market.
#[allow(dead_code, reason = "benchmarks use one of them")]
pub(crate) struct Addresses {
    pub(crate) grpc: String,
    pub(crate) http: String,
    pub(crate) admin: String,
}

/// Starts this program again, with `args` that lead to [`serve_if_asked`]. The market serves until the pipe closes.
pub(crate) fn spawn(args: &[&str], store: &str, token: &str, lease_ms: u32) -> (Child, ChildStdin) {
    spawn_at(args, store, token, lease_ms, ([127, 0, 0, 1], 0).into())
}

/// Like [`spawn`], with an address for gRPC.
pub(crate) fn spawn_at(
    args: &[&str],
    store: &str,
    token: &str,
    lease_ms: u32,
    grpc: SocketAddr,
) -> (Child, ChildStdin) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(args)
        .env(ARGS, format!("{store}\n{token}\n{lease_ms}\n{grpc}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let alive = child.stdin.take().unwrap();
    (child, alive)
}

/// Waits until the child serves.
pub(crate) fn wait_ready(child: &mut Child) -> Addresses {
    use std::io::BufRead as _;
    // The pipe stays open, because the harness of the child writes to it once more at its end.
    let lines = std::io::BufReader::new(child.stdout.as_mut().unwrap()).lines();
    // The harness prints the name of the test before it, without a line end.
    let line = lines.map(Result::unwrap).find(|line| line.contains(READY)).expect("the market did not start");
    let addresses = line.split_once(READY).unwrap().1;
    let mut addresses = addresses.split(' ').map(|address| format!("http://{address}"));
    let mut next = || addresses.next().unwrap();
    Addresses { grpc: next(), http: next(), admin: next() }
}

/// In the child: serves until standard input closes, and returns true.
pub(crate) fn serve_if_asked() -> bool {
    let Ok(args) = std::env::var(ARGS) else { return false };
    let [store, token, lease, grpc] = args.split('\n').collect::<Vec<_>>()[..] else {
        panic!("{ARGS}={args}")
    };
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let config = Config {
        store: store.parse().unwrap(),
        grpc: grpc.parse().unwrap(),
        http: any,
        tls: None,
        plaintext: false,
        admin: Some(any),
        regions: vec!["local".into()],
        default_region: Some("local".into()),
        admin_token: Some(token.to_owned()),
        lease: std::time::Duration::from_millis(lease.parse().unwrap()),
        advertise: None,
        accounts: None,
        clock: coracle_types::Clock::system(),
    };
    let stop = CancellationToken::new();
    let parent = stop.clone();
    std::thread::spawn(move || {
        // The child ends with the parent, even if the parent is killed.
        std::io::stdin().read_to_end(&mut Vec::new()).map(drop).unwrap_or_default();
        parent.cancel();
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let ready = |at: coracle_market::Server| {
        let mut out = std::io::stdout().lock();
        let line = format!("{READY}{} {} {}", at.grpc, at.http, at.admin.unwrap());
        writeln!(out, "{line}").and_then(|()| out.flush()).unwrap_or_default();
    };
    runtime.block_on(Box::pin(serve(config, stop, ready))).unwrap();
    true
}
