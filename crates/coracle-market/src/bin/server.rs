//! The market alone, for tests and benchmarks: `coracle-market-server STORE TOKEN [LEASE_MS]`. Writes its
//! addresses to stdout, one a line, and serves until its standard input closes.

use std::io::{Read, Write};

use coracle_market::{Config, serve};
use tokio_util::sync::CancellationToken;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(store), Some(token)) = (args.next(), args.next()) else {
        return Err("usage: coracle-market-server STORE TOKEN [LEASE_MS]".into());
    };
    let lease = args.next().map_or(Ok(10_000), |ms| ms.parse())?;
    let any = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    let config = Config {
        store: store.parse()?,
        grpc: any,
        http: any,
        admin: Some(any),
        regions: vec!["local".into()],
        default_region: Some("local".into()),
        admin_token: Some(token),
        lease: std::time::Duration::from_millis(lease),
        accounts: None,
        clock: coracle_types::Clock::system(),
    };
    let stop = CancellationToken::new();
    let parent = stop.clone();
    std::thread::spawn(move || {
        // Ends with the process that started us, however it ends.
        std::io::stdin().read_to_end(&mut Vec::new()).map(drop).unwrap_or_default();
        parent.cancel();
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(Box::pin(serve(config, stop, |at| {
        let mut out = std::io::stdout().lock();
        let admin = at.admin.map(|at| at.to_string()).unwrap_or_default();
        writeln!(out, "{}\n{}\n{admin}", at.grpc, at.http).and_then(|()| out.flush()).unwrap_or_default();
    })))?;
    Ok(())
}
