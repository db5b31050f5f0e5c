//! Packs waiting pods after changes of pods, nodes or prices. Changes that follow closely are packed together.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use coracle_auction::AllocationState;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::ResourceExt as _;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::facts::{PodFacts, Resources};
use crate::{
    Context,
    events::ObjectEvent,
    plan::{
        self,
        demand::{self, Pool},
    },
    settings::parse,
};

/// Factor on the patience with a node that is not Ready: after that time a refused pod counts again.
const REFUSED: i64 = 10;
/// Most pauses before a packing starts, even if changes continue.
const PATIENCE: u32 = 10;

/// Packs until the task is dropped; never returns.
pub(crate) async fn run(cx: &Arc<Context>) {
    let (changed, pause) = (&cx.triggers.pack, cx.config.times.pack);
    // Time of refusal by UIDs of pod and BidNode, for pods that no node of the BidNode helps.
    let mut refused: HashMap<(String, String), i64> = HashMap::new();
    loop {
        // The packing also runs without a change: a pod that the scheduler keeps refusing causes none.
        let _ = timeout(cx.config.times.poll, changed.notified()).await;
        let latest = Instant::now() + pause * PATIENCE;
        loop {
            tokio::select! {
                () = changed.notified() => {}
                () = sleep(pause) => break,
                () = sleep_until(latest) => break,
            }
        }
        let pods = cx.cluster.pending();
        let needs = if pods.is_empty() {
            Default::default()
        } else {
            demand::assign(&pools(cx, &pods, &mut refused), &pods)
        };
        for uid in cx.cluster.set_needs(needs) {
            cx.triggers.wake_uid(&uid, false);
        }
    }
}

/// BidNodes that can buy nodes for pods.
fn pools(cx: &Context, pods: &[PodFacts], refused: &mut HashMap<(String, String), i64>) -> Vec<Pool> {
    let (all, daemons, now) = (cx.objects.state(), cx.cluster.daemons(), cx.now_ms());
    let mut pools: Vec<_> = all.iter().filter_map(|guard| pool(cx, guard.0.as_ref().ok()?)).collect();
    let patience = cx.config.times.unhealthy_ms;
    refused.retain(|(pod, _), since| now - *since < patience * REFUSED && pods.iter().any(|p| p.uid == *pod));
    for pool in &mut pools {
        pool.reserve(&daemons);
        for pod in pods.iter().filter(|pod| pool.gives_up(pod, now, patience)) {
            if demand::accepts(pool, pod)
                && refused.insert((pod.uid.clone(), pool.uid.clone()), now).is_none()
            {
                tracing::info!(
                    namespace = pod.namespace,
                    name = pod.name,
                    bidnode = pool.key,
                    "pod refused by the scheduler with a node there, not counted"
                );
                cx.events.emit_about(reference(pod), give_up_event(&pool.key));
            }
        }
        let own = refused.keys().filter(|(_, uid)| *uid == pool.uid);
        pool.refused = own.map(|(pod, _)| pod.clone()).collect();
    }
    pools
}

fn reference(pod: &PodFacts) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(pod.namespace.clone()),
        name: Some(pod.name.clone()),
        uid: Some(pod.uid.clone()),
        ..ObjectReference::default()
    }
}

/// Event about a pod for which no further node of a BidNode is bought. The reason is that of cluster-autoscaler.
fn give_up_event(bidnode: &str) -> ObjectEvent {
    let text = format!(
        "no node of BidNode {bidnode} is bought for this pod: the scheduler refuses it although a node that it fits on by \
         its requests is Ready; see the message of its condition PodScheduled"
    );
    ObjectEvent { reason: "NotTriggeredScaleUp", text, warning: false }
}

fn pool(cx: &Context, object: &coracle_api::BidNode) -> Option<Pool> {
    let settings = parse(object, &cx.config.allowed_labels)
        .ok()
        .filter(|s| !s.paused && object.metadata.deletion_timestamp.is_none())?;
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
        fleet_unhealthy: false,
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
    let active: Vec<_> = nodes.iter().filter(|v| plan::is_active(&seen, v)).collect();
    let settled_ms = active.iter().map(|v| v.facts.since_ms).max().filter(|_| in_flight == 0);
    let have = active.len() + in_flight;
    Some(Pool {
        uid,
        key,
        labels: demand::template(&namespace, &name, &settings, market.region()),
        named: settings.labels.keys().cloned().collect::<BTreeSet<_>>(),
        taints: settings.taints.clone(),
        shape: cx.config.shapes.get(&settings.instance_type)?.clone(),
        price,
        room: Some(usize::try_from(settings.max).unwrap_or(usize::MAX).saturating_sub(have)),
        refused: BTreeSet::new(),
        settled_ms,
        active: active.into_iter().map(free).collect(),
        in_flight,
    })
}
