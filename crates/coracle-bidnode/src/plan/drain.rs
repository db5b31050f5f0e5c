//! Drain of a node: pods to evict or delete now.

use super::{demand::tolerates, input::NodeView, nodes::NOTICE, output::Step};
use crate::{
    observe::facts::{PodFacts, PodKind},
    settings::Taint,
};

/// Taint of a cordoned Node.
const CORDON: &str = "node.kubernetes.io/unschedulable";

/// Time between the end of a pod's grace period and the deadline of its node, in milliseconds.
const MARGIN_MS: i64 = 10_000;

/// Urgency of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Haste {
    /// No deadline: disruption budgets are respected, and pods of DaemonSets stay.
    None,
    /// Deadline: every pod is ended with its full grace period before the deadline, regardless of budgets.
    By { deadline_ms: i64, from_ms: i64 },
}

/// Steps of a drain in this reconcile; `None`: the drain is complete.
pub(super) fn steps(view: &NodeView, haste: Haste, now_ms: i64) -> Option<Vec<Step>> {
    let counts = |p: &&PodFacts| match haste {
        Haste::None => p.kind == PodKind::Workload,
        // A DaemonSet would recreate a pod that tolerates the taint at once.
        Haste::By { .. } => p.kind == PodKind::Workload || p.kind == PodKind::Daemon && !tolerates_notice(p),
    };
    let there: Vec<_> = view.pods.iter().filter(counts).collect();
    let tier = there.iter().map(|p| tier(p)).min()?;
    if haste != Haste::None && there.iter().all(|p| p.kind == PodKind::Daemon) {
        // Pods of DaemonSets end with the node.
        return None;
    }
    let going = there.iter().filter(|p| !p.deleting).filter_map(|pod| {
        let (namespace, name, uid) = (pod.namespace.clone(), pod.name.clone(), pod.uid.clone());
        if let Haste::By { deadline_ms, from_ms } = haste {
            let last_ms = deadline_ms - pod.grace_s * 1000 - MARGIN_MS;
            if now_ms >= last_ms || last_ms <= from_ms {
                return Some(Step::DeletePod {
                    node: view.facts.name.clone(),
                    namespace,
                    name,
                    uid,
                    grace_s: pod.grace_s,
                    allocation: view.facts.allocation.clone(),
                });
            }
        }
        (self::tier(pod) == tier).then(|| Step::EvictPod {
            node: view.facts.name.clone(),
            namespace,
            name,
            uid,
        })
    });
    Some(going.collect())
}

/// Whether a pod tolerates the taints of a cordoned Node under notice.
fn tolerates_notice(pod: &PodFacts) -> bool {
    let taint =
        |key: &str| Taint { key: key.to_owned(), value: String::new(), effect: "NoSchedule".to_owned() };
    let any_value = |key| {
        pod.tolerations.iter().any(|t| {
            t.operator.as_deref() == Some("Exists")
                && t.key.as_deref().is_none_or(|k| k.is_empty() || k == key)
        })
    };
    any_value(NOTICE) && (any_value(CORDON) || tolerates(pod, &taint(CORDON)))
}

/// Order of eviction: ordinary pods first, critical ones last.
fn tier(pod: &PodFacts) -> u8 {
    match (pod.critical, pod.kind == PodKind::Daemon) {
        (false, false) => 0,
        (false, true) => 1,
        (true, false) => 2,
        (true, true) => 3,
    }
}
