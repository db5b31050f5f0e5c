//! Streams of the market, which fill the mirror.

use std::time::Duration;

use coracle_proto::market as pb;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::mirror::{Change, Mirror};
use crate::{Config, market::Market};

/// Pause before the streams are opened again.
const REDIAL: Duration = Duration::from_secs(1);

/// Fills the mirror until `stop`, and calls `changed` for each change.
pub(crate) async fn run(
    market: &Market,
    mirror: &Mirror,
    config: &Config,
    changed: impl Fn(Change),
    stop: &CancellationToken,
) {
    while !stop.is_cancelled() {
        let fed = async {
            market.refresh().await;
            tokio::select! {
                () = market.keep_fresh() => Ok(()),
                status = owners(market, mirror, config, &changed) => status,
                status = prices(market, mirror, config, &changed) => status,
            }
        };
        let ended = tokio::select! {
            ended = fed => ended,
            () = stop.cancelled() => return,
        };
        if let Err(status) = ended {
            tracing::debug!(%status, "market stream ended");
        }
        mirror.on_stream_end().into_iter().for_each(&changed);
        tokio::select! {
            () = sleep(REDIAL) => {}
            () = stop.cancelled() => {}
        }
    }
}

fn span(ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}

async fn owners(
    market: &Market,
    mirror: &Mirror,
    config: &Config,
    changed: &impl Fn(Change),
) -> Result<(), Status> {
    let watch =
        pb::WatchOwnerRequest { tenant: market.cluster().to_owned(), below: true, ..Default::default() };
    let mut frames = market.trading().watch_owner(market.request(watch)).await?.into_inner();
    while let Some(frame) = frames.message().await? {
        mirror.frame(frame, config.clock.now().0).into_iter().for_each(changed);
        for reached in mirror.take_reached() {
            config.bid_metrics.observe_milestone(reached.milestone, span(reached.took_ms));
        }
    }
    Ok(())
}

async fn prices(
    market: &Market,
    mirror: &Mirror,
    config: &Config,
    changed: &impl Fn(Change),
) -> Result<(), Status> {
    let mut client = market.markets();
    // The stream is opened before the list is read, so that no change between them is lost.
    let mut frames =
        client.stream_prices(market.request(pb::StreamPricesRequest::default())).await?.into_inner();
    let listed = client.list_markets(market.request(pb::ListMarketsRequest {})).await?.into_inner();
    for price in listed.markets {
        let frame = pb::PriceFrame {
            seq: price.seq,
            market: price.market.clone(),
            r#type: "price".into(),
            price: Some(price),
        };
        mirror.price(&frame).into_iter().for_each(changed);
    }
    mirror.set_prices_synced().into_iter().for_each(changed);
    while let Some(frame) = frames.message().await? {
        // A listed price is as old as the market's last command; only frames of calls are new.
        if let Some(price) = frame.price.as_ref().filter(|_| frame.r#type == "call") {
            config.bid_metrics.observe_lag(span(config.clock.now().0 - price.as_of_ms));
        }
        mirror.price(&frame).into_iter().for_each(changed);
    }
    Ok(())
}
