//! Derives the status of a pool. Pure.

use coracle_api::{MikromVMPoolStatus, condition, pool_reason as reason};
use coracle_reconcile::{Desired, merge};
use jiff::Timestamp;

use crate::plan::{Counted, Observed, is_ready};

/// Derives the whole status.
pub(crate) fn derive(o: &Observed<'_>, now: Timestamp) -> MikromVMPoolStatus {
    let old = o.pool.status.clone().unwrap_or_default();
    let (counted, generation) = (Counted::of(o), o.pool.metadata.generation);
    let count = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    let (replicas, ready) = (o.pool.spec.replicas, count(counted.ready));
    let current = counted.updated.iter().filter(|vm| is_ready(vm)).count();
    let complete =
        counted.old.is_empty() && count(current) == replicas && count(counted.live.len()) == replicas;
    let enough = ready >= replicas.saturating_sub(o.pool.spec.max_unavailable);
    let message = format!("{ready} of {replicas} VMs are Ready, {current} of them of the present template");
    let one = |kind, is: bool, yes, no| Desired {
        kind,
        status: Some(is),
        reason: if is { yes } else { no },
        message: message.clone(),
    };
    let conditions = [
        one(condition::READY, complete, reason::COMPLETE, reason::PROGRESSING),
        one(condition::AVAILABLE, enough, reason::ENOUGH_READY, reason::TOO_FEW_READY),
    ];
    let labels = &o.pool.spec.selector.match_labels;
    MikromVMPoolStatus {
        replicas: count(counted.live.len()),
        ready_replicas: ready,
        updated_replicas: count(counted.updated.len()),
        selector: labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(","),
        observed_generation: generation,
        conditions: merge(&old.conditions, &conditions, generation, now),
    }
}

#[cfg(test)]
mod tests {
    use coracle_reconcile::find;

    use super::*;
    use crate::testing::{pool, vms};

    #[test]
    fn status_table() {
        for (why, all, want) in [
            ("nothing yet", "", (0, 0, 0, "Progressing", "TooFewReady")),
            ("all are there", "UUU", (3, 3, 3, "Complete", "EnoughReady")),
            ("one is down", "UUu", (3, 2, 3, "Progressing", "EnoughReady")),
            ("two are down", "Uuu", (3, 1, 3, "Progressing", "TooFewReady")),
            ("one is being replaced", "UUOd", (3, 3, 2, "Progressing", "EnoughReady")),
            ("one too many", "UUUU", (4, 4, 4, "Progressing", "EnoughReady")),
        ] {
            let pool = pool(3, 1, 1);
            let vms = vms(&pool, all);
            let status = derive(&Observed { pool: &pool, vms: &vms }, Timestamp::from_second(9).unwrap());
            let reason = |kind| find(&status.conditions, kind).unwrap().reason.clone();
            let found = (
                status.replicas,
                status.ready_replicas,
                status.updated_replicas,
                reason(condition::READY),
                reason(condition::AVAILABLE),
            );
            let (replicas, ready, updated, complete, enough) = want;
            assert_eq!(found, (replicas, ready, updated, complete.into(), enough.into()), "{why}");
            assert_eq!(status.selector, "app=web");
        }
    }
}
