//! BidNode controller, configured from the flags.

use coracle_bidnode::{BidMetrics, Config, MarketAt, election};
use coracle_reconcile::ControllerMetrics;
use kube::Client;
use miette::IntoDiagnostic;
use prometheus_client::registry::Registry;

use super::{identity, market};
use coracle_cli::cli::{BidFlags, EMBEDDED};
use coracle_cli::tasks::Tasks;

/// Region of an embedded market.
const LOCAL: &str = "local";

/// Returns the configuration of the controller, and starts an embedded market if requested. `namespace` is that of its Lease;
/// `None` runs it without leader election.
pub(super) async fn config(
    flags: &BidFlags,
    namespace: Option<&str>,
    metrics: ControllerMetrics,
    registry: &mut Registry,
    tasks: &mut Tasks,
) -> miette::Result<Config> {
    let region = flags.market_region.clone();
    let (url, token, region) = if flags.market == EMBEDDED {
        let region = region.unwrap_or_else(|| LOCAL.to_owned());
        let (at, token) = market::embed(tasks, &flags.market_store, flags.market_listen, &region).await?;
        (format!("http://{at}"), token, Some(region))
    } else {
        (flags.market.clone(), flags.market_token.clone(), region)
    };
    let cluster = flags.market_cluster.clone();
    let token_file = flags.market_token_file.clone().filter(|_| flags.market != EMBEDDED);
    let ca = flags.market_ca.clone().filter(|_| flags.market != EMBEDDED);
    let mut config = Config::new(MarketAt { url, ca, token, token_file, cluster, rate: flags.market_rate });
    config.default_region = region;
    config.allowed_labels = flags.bidnode_labels.iter().cloned().collect();
    config.identity = identity();
    config.election = namespace.map(|namespace| election(namespace, &config.identity));
    config.metrics = metrics;
    config.bid_metrics = BidMetrics::register(registry);
    Ok(config)
}

/// Runs the controller as a task of the process.
pub(super) fn spawn(tasks: &mut Tasks, client: Client, config: Config) {
    tasks.spawn("bidnode", |stop| async move {
        Box::pin(coracle_bidnode::run(client, config, stop)).await.into_diagnostic()
    });
}
