//! Frees reservations whose pods have been gone for long enough.

use std::collections::BTreeMap;

use coracle_reconcile::WallTime as _;
use jiff::{SignedDuration, Timestamp};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::{
    Webhook,
    mutate::{claimed_reservations, pods_of},
    placement::{PodFact, Reservation, is_held},
    store::{self, Pool},
};
use crate::error::Error;

/// Frees reservations until `stop`. Two replicas may run this: the write of the slower one is refused.
pub async fn reap(hook: Webhook, stop: CancellationToken) {
    let interval = hook.settings.reaper_interval;
    while stop.run_until_cancelled(tokio::time::sleep(interval)).await.is_some() {
        if let Err(error) = reap_once(&hook).await {
            warn!(error = &error as &dyn std::error::Error, "free reservations failed");
        }
    }
}

async fn reap_once(hook: &Webhook) -> Result<(), Error> {
    let mut pods: BTreeMap<String, Vec<PodFact>> = BTreeMap::new();
    for pool in store::read_all(&hook.client, &hook.settings.namespace).await? {
        for reservation in &pool.reservations {
            if !pods.contains_key(&reservation.namespace) {
                let found = pods_of(hook, &reservation.namespace).await?;
                pods.insert(reservation.namespace.clone(), found);
            }
        }
        let grace = SignedDuration::try_from(hook.settings.reaper_grace).unwrap_or(SignedDuration::MAX);
        let changes = changes(&pool, &pods, hook.clock.timestamp(), grace);
        if changes.is_empty() {
            continue;
        }
        let freed = changes.values().filter(|change| change.is_none()).count();
        if store::write(&hook.client, &hook.settings.namespace, &pool, &changes).await? {
            (0..freed).for_each(|_| hook.metrics.count_release(&pool.name));
            debug!(pool = pool.name, freed, "reservations freed");
        }
    }
    Ok(())
}

/// Returns reservations to change, and (`None`) to remove. Pure.
fn changes(
    pool: &Pool,
    pods: &BTreeMap<String, Vec<PodFact>>,
    now: Timestamp,
    grace: SignedDuration,
) -> BTreeMap<String, Option<Reservation>> {
    let mut changes = BTreeMap::new();
    for reservation in &pool.reservations {
        let here = pods.get(&reservation.namespace).map(Vec::as_slice).unwrap_or_default();
        changes.extend(claimed_reservations(std::slice::from_ref(reservation), &reservation.namespace, here));
        let gone_since = match (is_held(reservation, here, now), reservation.gone_since) {
            (true, _) => None,
            (false, Some(since)) if now.duration_since(since) >= grace => {
                changes.insert(reservation.key(), None);
                continue;
            }
            (false, since) => Some(since.unwrap_or(now)),
        };
        if gone_since != reservation.gone_since {
            let entry = changes.entry(reservation.key()).or_insert_with(|| Some(reservation.clone()));
            if let Some(changed) = entry {
                changed.gone_since = gone_since;
            }
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservation_is_freed_after_its_grace() {
        let at = |seconds: i64| Timestamp::from_second(100_000 + seconds).unwrap();
        let mut reservation = Reservation {
            namespace: "prod".into(),
            deployment: "web".into(),
            vm_name: "vk-prod-web-0".into(),
            updated_at: Some(at(0)),
            ..Reservation::default()
        };
        let grace = SignedDuration::from_secs(1800);
        let live = PodFact {
            name: "web-x".into(),
            uid: "u".into(),
            vm_name: "vk-prod-web-0".into(),
            is_going: false,
        };
        let mut step = |seconds: i64, pods: &[PodFact]| {
            let pods = BTreeMap::from([("prod".to_owned(), pods.to_vec())]);
            let pool = Pool::of("default", vec![reservation.clone()]);
            match changes(&pool, &pods, at(seconds), grace).remove("prod.web.0") {
                Some(Some(changed)) => reservation = changed,
                Some(None) => return "freed".to_owned(),
                None => return "same".to_owned(),
            }
            let gone = reservation.gone_since.is_some();
            format!("{} {}", reservation.pod, if gone { "gone" } else { "there" })
        };
        assert_eq!(step(10, &[]), "same", "not visible yet");
        assert_eq!(step(20, std::slice::from_ref(&live)), "web-x there");
        assert_eq!(step(30, std::slice::from_ref(&live)), "same");
        assert_eq!(step(100, &[]), "web-x gone");
        assert_eq!(step(1899, &[]), "same");
        assert_eq!(step(1899, &[live]), "web-x there", "it came back");
        assert_eq!(step(2000, &[]), "web-x gone");
        assert_eq!(step(3800, &[]), "freed");
    }
}
