//! Rebuilds sub-agents that ended, a limited number of times, and then leaves them for their user. Pure.

use std::collections::BTreeMap;

use coracle_api::cocoon::keys;
use coracle_reconcile::Kind;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{
    members::Members,
    plan::Observed,
    step::{Plan, Step},
};

/// Delay in seconds before each attempt.
const WAITS: [i64; 4] = [0, 1, 5, 30];

/// Entry of one slot in [`keys::REBUILD_HISTORY`].
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
struct Attempts {
    #[serde(default)]
    count: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    last_deleted: Option<Timestamp>,
}

type History = BTreeMap<u32, Attempts>;

/// Returns the attempts so far. A changed spec resets them.
fn history(o: &Observed<'_>) -> History {
    let observed = o.set.status.as_ref().and_then(|status| status.observed_generation);
    if observed != o.set.metadata.generation {
        return History::new();
    }
    o.annotation(keys::REBUILD_HISTORY).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

/// Adds the steps that rebuild sub-agents up to `replicas` that ended.
pub(super) fn plan(o: &Observed<'_>, members: &Members<'_>, replicas: u32, plan: &mut Plan) {
    if !o.settings.rebuild {
        return;
    }
    let mut history = history(o);
    let before = history.clone();
    let (mut deletions, mut marks) = (Vec::new(), Vec::new());
    for (slot, member) in members.subs.range(..=replicas).filter(|(_, member)| member.is_terminal()) {
        let name = member.id().name;
        let attempts = history.entry(*slot).or_default();
        let Some(wait) = WAITS.get(attempts.count) else {
            if !member.pod.metadata.annotations.iter().any(|all| all.contains_key(keys::DEAD_LETTER)) {
                let note = format!("pod {name} failed {} times", WAITS.len());
                plan.event(Kind::Warning, "SubAgentDeadLetter", note);
                marks.push(Step::DeadLetter(member.id()));
            }
            plan.problems.push(format!("sub-agent pod {name} failed {} times", WAITS.len()));
            continue;
        };
        let is_due = attempts.last_deleted.is_none_or(|last| o.now.as_second() - last.as_second() >= *wait);
        if is_due {
            attempts.count += 1;
            attempts.last_deleted = Some(o.now);
            let note = format!("pod {name}: attempt {} of {}", attempts.count, WAITS.len());
            plan.event(Kind::Normal, "SubAgentRebuilding", note);
            deletions.push(Step::DeletePod(member.id()));
        }
    }
    history.retain(|slot, _| *slot <= replicas);
    if history != before || (history.is_empty() && o.annotation(keys::REBUILD_HISTORY).is_some()) {
        let text = (!history.is_empty()).then(|| serde_json::to_string(&history).unwrap_or_default());
        // The history is stored before the deletions: an attempt that is not counted could be repeated forever.
        plan.steps.push(Step::Annotate(keys::REBUILD_HISTORY, text));
    }
    plan.steps.extend(deletions.into_iter().chain(marks));
}
