//! Emptying a node: which pods go now, and how.

use super::{NodeView, Step};
use crate::facts::{PodFacts, PodKind};

/// Between a pod's last second and the end of its node, in milliseconds.
const MARGIN_MS: i64 = 10_000;

/// How a node is emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Haste {
    /// As long as it takes: disruption budgets are respected to the end, and what runs on every node stays.
    None,
    /// Everything is gone by then, each pod with its whole grace, budget or not.
    By { deadline_ms: i64, from_ms: i64 },
}

/// The steps of this pass; `None`: nothing is left that has to go.
pub(super) fn steps(view: &NodeView, haste: Haste, now_ms: i64) -> Option<Vec<Step>> {
    let counts = |p: &&PodFacts| match haste {
        Haste::None => p.kind == PodKind::Workload,
        Haste::By { .. } => matches!(p.kind, PodKind::Workload | PodKind::Daemon),
    };
    let there: Vec<_> = view.pods.iter().filter(counts).collect();
    let tier = there.iter().map(|p| tier(p)).min()?;
    if haste != Haste::None && there.iter().all(|p| p.kind == PodKind::Daemon) {
        // What runs on every node ends with the node.
        return None;
    }
    let going = there.iter().filter(|p| !p.deleting).filter_map(|pod| {
        let (namespace, name, uid) = (pod.namespace.clone(), pod.name.clone(), pod.uid.clone());
        if let Haste::By { deadline_ms, from_ms } = haste {
            let last_ms = deadline_ms - pod.grace_s * 1000 - MARGIN_MS;
            if now_ms >= last_ms || last_ms <= from_ms {
                return Some(Step::End { namespace, name, uid, grace_s: pod.grace_s });
            }
        }
        (self::tier(pod) == tier).then_some(Step::Evict { namespace, name, uid })
    });
    Some(going.collect())
}

/// Ordinary pods first, critical ones last.
fn tier(pod: &PodFacts) -> u8 {
    match (pod.critical, pod.kind == PodKind::Daemon) {
        (false, false) => 0,
        (false, true) => 1,
        (true, false) => 2,
        (true, true) => 3,
    }
}
