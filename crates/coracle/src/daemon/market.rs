//! `coracle market serve`, and the market inside an operator.

use std::net::SocketAddr;
use std::time::Duration;

use coracle_access::{review_access, review_token};
use coracle_bidnode::trade_access;
use coracle_market::{AUDIENCE, Account, Accounts, Answer, Config, Review, TlsFiles, Unreviewed, serve};
use coracle_telemetry::{LogFormat, init_logs};
use coracle_types::Clock;
use kube::Client;
use miette::{IntoDiagnostic, WrapErr, bail};
use tokio::sync::oneshot;

use super::{kubeconfig, make_dir};
use coracle_cli::cli::{Global, MarketServeArgs};
use coracle_cli::tasks::Tasks;

const GRACE: Duration = Duration::from_secs(20);
/// Time limit for the start of an embedded market, which first replays its journal.
const START: Duration = Duration::from_secs(60);
/// Time limit of a token review by the API server.
const REVIEW: Duration = Duration::from_secs(5);
/// Value of `--accounts` for the cluster that the process runs in.
const IN_CLUSTER: &str = "in-cluster";

/// Cluster whose service accounts trade at the market.
struct Cluster(Client);

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cluster")
    }
}

impl Review for Cluster {
    fn review<'a>(&'a self, token: &'a str) -> Answer<'a> {
        Box::pin(async move {
            let review = tokio::time::timeout(REVIEW, review_token(&self.0, token, Some(AUDIENCE))).await;
            let user = review.map_err(|late| Unreviewed(late.into()))?.map_err(|e| Unreviewed(e.into()))?;
            let Some(account) = user.as_ref().and_then(|user| Account::of_user(user.username.as_deref()?))
            else {
                return Ok(None);
            };
            let access = trade_access(&account.namespace);
            let allowed = review_access(&self.0, user.unwrap_or_default(), access);
            let allowed = tokio::time::timeout(REVIEW, allowed).await;
            let may_trade =
                allowed.map_err(|late| Unreviewed(late.into()))?.map_err(|e| Unreviewed(e.into()))?;
            Ok(Some(Account { may_trade, ..account }))
        })
    }
}

/// Returns the cluster that `--accounts` names.
async fn accounts(args: &MarketServeArgs) -> miette::Result<Option<Accounts>> {
    let Some(which) = &args.accounts else { return Ok(None) };
    let file = (which != IN_CLUSTER).then(|| std::path::Path::new(which));
    let client = kubeconfig::client(file, true).await?;
    Ok(client.map(|client| Accounts {
        review: std::sync::Arc::new(Cluster(client)),
        cluster: args.cluster.clone(),
        operator: args.operator.clone(),
    }))
}

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
        accounts: accounts(&args).await?,
        grpc: args.grpc,
        http: args.http,
        tls: args.tls_cert.zip(args.tls_key).map(|(certificate, key)| TlsFiles {
            certificate,
            key,
            client_ca: args.tls_client_ca,
        }),
        plaintext: args.plaintext,
        admin: args.admin_listen,
        default_region: args.regions.first().cloned(),
        regions: args.regions,
        admin_token: args.admin_token,
        lease: Duration::try_from(args.lease).into_diagnostic()?,
        advertise: args.advertise,
        clock: Clock::system(),
    };
    let mut tasks = Tasks::new();
    tasks.spawn("market", |stop| async move {
        let ready = |at: coracle_market::Server| {
            tracing::info!(grpc = %at.grpc, http = %at.http, "market ready");
        };
        Box::pin(serve(config, stop, ready)).await.into_diagnostic()
    });
    super::run(tasks, GRACE).await
}

/// Starts a market in this process and waits until it answers. Returns its address, and a token of its administrator.
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
        tls: None,
        plaintext: false,
        admin: None,
        regions: vec![region.to_owned()],
        default_region: Some(region.to_owned()),
        admin_token: Some(token.clone()),
        lease: Duration::from_secs(10),
        advertise: None,
        accounts: None,
        clock: Clock::system(),
    };
    let (tell, told) = oneshot::channel();
    tasks.spawn("market", |stop| async move {
        // The receiver is closed if the caller has given up.
        let ready = |at: coracle_market::Server| tell.send(at.grpc).map_or_else(|_| (), |()| ());
        Box::pin(serve(config, stop, ready)).await.into_diagnostic()
    });
    match tokio::time::timeout(START, told).await {
        Ok(Ok(at)) => Ok((at, token)),
        Ok(Err(_)) => bail!("the embedded market ended: look at its store {store} and its address {grpc}"),
        Err(late) => Err(late).into_diagnostic().wrap_err("wait for the embedded market"),
    }
}
