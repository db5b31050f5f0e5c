//! Packs waiting pods after changes of pods, nodes or prices; several changes are one packing.

use std::{collections::BTreeSet, sync::Arc};

use coracle_auction::AllocationState;
use kube::ResourceExt as _;
use tokio::time::{Instant, sleep, sleep_until};

use super::facts::Resources;
use crate::{
    Context,
    plan::{
        self,
        demand::{self, Pool},
    },
    settings::parse,
};

/// A packing starts at the latest after so many pauses.
const PATIENCE: u32 = 10;

/// Packs until the task is dropped; never returns.
pub(crate) async fn run(cx: &Arc<Context>) {
    let (changed, pause) = (&cx.triggers.pack, cx.config.times.pack);
    loop {
        changed.notified().await;
        let latest = Instant::now() + pause * PATIENCE;
        loop {
            tokio::select! {
                () = changed.notified() => {}
                () = sleep(pause) => break,
                () = sleep_until(latest) => break,
            }
        }
        let pods = cx.cluster.pending();
        let needs = if pods.is_empty() { Default::default() } else { demand::assign(&pools(cx), &pods) };
        for uid in cx.cluster.set_needs(needs) {
            cx.triggers.wake_uid(&uid, false);
        }
    }
}

/// BidNodes that could buy nodes for pods.
fn pools(cx: &Context) -> Vec<Pool> {
    let all = cx.objects.state();
    all.iter().filter_map(|guard| pool(cx, guard.0.as_ref().ok()?)).collect()
}

fn pool(cx: &Context, object: &coracle_api::BidNode) -> Option<Pool> {
    let settings =
        parse(object).ok().filter(|s| !s.paused && object.metadata.deletion_timestamp.is_none())?;
    let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
    let key = format!("{namespace}/{name}");
    let uid = object.uid()?;
    let owner = cx.mirror.owner(&uid);
    let quotes = cx.mirror.quotes_of(&settings.instance_type);
    let nodes = cx.cluster.nodes(&key);
    let seen = plan::Observed {
        object,
        settings: Ok(&settings),
        owner: &owner,
        quotes: &quotes,
        synced: cx.mirror.is_synced(),
        default_region: cx.config.default_region.as_deref(),
        nodes: &nodes,
        need: &demand::Need::default(),
        now_ms: cx.now_ms(),
        times: &cx.config.times,
    };
    let market = plan::market_of(&seen, &settings)?;
    let price = quotes.get(&market)?.quote;
    let free = |view: &plan::NodeView| {
        let mut free: Resources = view.facts.allocatable.clone();
        view.pods.iter().for_each(|pod| demand::take(&mut free, &pod.requests));
        (view.facts.name.clone(), free)
    };
    let in_flight = owner
        .allocations
        .values()
        .filter(|u| matches!(u.state, AllocationState::Matched | AllocationState::Provisioning))
        .count()
        + owner.bids.values().map(|b| usize::try_from(b.open).unwrap_or(0)).sum::<usize>();
    Some(Pool {
        uid,
        key,
        labels: demand::template(&namespace, &name, &settings, market.region()),
        named: settings.labels.keys().cloned().collect::<BTreeSet<_>>(),
        taints: settings.taints.clone(),
        shape: cx.config.shapes.get(&settings.instance_type)?.clone(),
        price,
        active: nodes.iter().filter(|v| plan::is_active(&seen, v)).map(free).collect(),
        in_flight,
    })
}
