//! `coracle market serve`, and the market inside an operator.

use std::net::SocketAddr;
use std::time::Duration;

use coracle_market::{Config, serve};
use coracle_telemetry::{LogFormat, init_logs};
use coracle_types::Clock;
use miette::{IntoDiagnostic, WrapErr, bail};
use tokio::sync::oneshot;

use super::make_dir;
use crate::cli::{Global, MarketServeArgs};
use crate::tasks::{Tasks, stop_signal};

const GRACE: Duration = Duration::from_secs(20);
/// An embedded market replays its journal before it answers.
const START: Duration = Duration::from_secs(60);

/// Runs until a signal.
pub(crate) async fn run(global: &Global, args: MarketServeArgs) -> miette::Result<()> {
    init_logs(&args.log, LogFormat::Auto);
    let store = match &args.store {
        Some(store) => store.clone(),
        None => {
            make_dir(&global.state())?;
            format!("sqlite:{}", global.state().join("market.db").display())
        }
    };
    let config = Config {
        store: store.parse().into_diagnostic()?,
        grpc: args.grpc,
        http: args.http,
        admin: args.admin_listen,
        default_region: args.regions.first().cloned(),
        regions: args.regions,
        admin_token: args.admin_token,
        lease: Duration::try_from(args.lease).into_diagnostic()?,
        clock: Clock::system(),
    };
    let mut tasks = Tasks::new();
    tasks.spawn("market", |stop| async move {
        let ready = |at: coracle_market::Server| {
            tracing::info!(grpc = %at.grpc, http = %at.http, "market ready");
        };
        Box::pin(serve(config, stop, ready)).await.into_diagnostic()
    });
    tasks.run(stop_signal(), GRACE).await
}

/// Starts a market in this process and waits until it answers. Its address, and a token of its administrator.
pub(super) async fn embed(
    tasks: &mut Tasks,
    store: &str,
    grpc: SocketAddr,
    region: &str,
) -> miette::Result<(SocketAddr, String)> {
    let token = format!("{:032x}", rand::random::<u128>());
    let config = Config {
        store: store.parse().into_diagnostic()?,
        grpc,
        http: (grpc.ip(), 0).into(),
        admin: None,
        regions: vec![region.to_owned()],
        default_region: Some(region.to_owned()),
        admin_token: Some(token.clone()),
        lease: Duration::from_secs(10),
        clock: Clock::system(),
    };
    let (tell, told) = oneshot::channel();
    tasks.spawn("market", |stop| async move {
        // Who waits has given up when nobody hears it.
        let ready = |at: coracle_market::Server| tell.send(at.grpc).map_or_else(|_| (), |()| ());
        Box::pin(serve(config, stop, ready)).await.into_diagnostic()
    });
    match tokio::time::timeout(START, told).await {
        Ok(Ok(at)) => Ok((at, token)),
        Ok(Err(_)) => bail!("the embedded market ended: look at its store {store} and its address {grpc}"),
        Err(late) => Err(late).into_diagnostic().wrap_err("wait for the embedded market"),
    }
}
