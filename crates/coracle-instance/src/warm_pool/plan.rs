//! Which clones the warm pool has. Pure.

use std::time::Duration;

use tokio::time::Instant;

use crate::TemplateKey;
use crate::config::WarmPoolPolicy;

/// Time over which starts are counted.
pub(crate) const DEMAND_WINDOW: Duration = Duration::from_secs(10);
/// Time to make a clone, before one was measured.
pub(crate) const MAKING_FIRST_GUESS: Duration = Duration::from_secs(1);

/// What the task does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// End one of this shape.
    End(TemplateKey),
    /// Make one of this shape.
    Make(TemplateKey),
    /// Nothing, until then.
    Wait(Option<Instant>),
}

/// A shape that was started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand<'a> {
    pub(crate) key: &'a TemplateKey,
    /// When it was started last.
    pub(crate) started: Instant,
    /// Clones that it shall have.
    pub(crate) depth: usize,
}

/// Clones that a shape shall have: as many as are started while one is being made.
pub(crate) fn depth(starts: usize, making: Duration, policy: &WarmPoolPolicy) -> usize {
    let while_making = making.as_millis().saturating_mul(starts as u128).div_ceil(DEMAND_WINDOW.as_millis());
    usize::try_from(while_making).unwrap_or(usize::MAX).max(policy.depth_min).min(policy.clones_max)
}

/// `shapes`: the latest first; `ready`: shapes of pooled clones. Ends clones before it makes others.
pub(crate) fn next(
    shapes: &[Demand<'_>],
    ready: &[&TemplateKey],
    policy: &WarmPoolPolicy,
    now: Instant,
) -> Step {
    let wanted = || shapes.iter().filter(|shape| shape.started + policy.idle_max > now);
    if let Some(idle) = ready.iter().find(|key| !wanted().any(|shape| shape.key == **key)) {
        return Step::End((*idle).clone());
    }
    let has = |shape: &Demand<'_>| ready.iter().filter(|key| **key == shape.key).count();
    let missing = wanted().find(|shape| has(shape) < shape.depth);
    match missing.filter(|_| ready.len() < policy.clones_max) {
        Some(missing) => Step::Make(missing.key.clone()),
        None => Step::Wait(wanted().map(|shape| shape.started + policy.idle_max).min()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(depth_min: usize, clones_max: usize) -> WarmPoolPolicy {
        WarmPoolPolicy { shapes_max: 2, depth_min, clones_max, idle_max: Duration::from_secs(10) }
    }

    #[test]
    fn table_of_steps() {
        let start = Instant::now();
        let key = |digit: char| TemplateKey::parse(&digit.to_string().repeat(16)).unwrap();
        let (a, b) = (key('a'), key('b'));
        let at = |seconds| start + Duration::from_secs(seconds);
        let (make_a, make_b) = (Step::Make(a.clone()), Step::Make(b.clone()));
        let wait = |seconds| Step::Wait(Some(at(seconds)));
        for (why, shapes, ready, now, want) in [
            ("nothing was started", vec![], vec![], 0, Step::Wait(None)),
            ("the first start is over", vec![(&a, 0, 1)], vec![], 1, make_a.clone()),
            ("it is pooled", vec![(&a, 0, 1)], vec![&a], 1, wait(10)),
            ("more are started than that", vec![(&a, 0, 2)], vec![&a], 1, make_a.clone()),
            ("the latest comes first", vec![(&b, 1, 1), (&a, 0, 1)], vec![], 2, make_b),
            ("then the other", vec![(&b, 1, 1), (&a, 0, 1)], vec![&b], 2, make_a),
            ("both are pooled", vec![(&b, 1, 1), (&a, 0, 1)], vec![&b, &a], 2, wait(10)),
            ("the pool is full", vec![(&b, 1, 9), (&a, 0, 1)], vec![&b, &b, &b], 2, wait(10)),
            ("one is idle", vec![(&b, 1, 1), (&a, 0, 1)], vec![&b, &a], 10, Step::End(a.clone())),
            ("and is not made anew", vec![(&b, 1, 1), (&a, 0, 1)], vec![&b], 10, wait(11)),
            ("less are started now", vec![(&a, 0, 1)], vec![&a, &a], 2, wait(10)),
            ("its shape is forgotten", vec![(&b, 1, 1)], vec![&a], 2, Step::End(a.clone())),
            ("all are idle", vec![(&b, 1, 1)], vec![], 11, Step::Wait(None)),
        ] {
            let shapes: Vec<_> = shapes
                .into_iter()
                .map(|(key, seconds, depth)| Demand { key, started: at(seconds), depth })
                .collect();
            assert_eq!(next(&shapes, &ready, &policy(1, 3), at(now)), want, "{why}");
        }
    }

    #[test]
    fn depth_follows_demand() {
        for (why, starts, making_ms, depth_min, want) in [
            ("none was started lately", 0, 500, 1, 1),
            ("now and then", 3, 500, 1, 1),
            ("two a second, each takes half a second", 20, 500, 1, 1),
            ("and on a slow node", 20, 2000, 1, 4),
            ("no more than fit", 1000, 2000, 1, 8),
            ("what the administrator asks for", 0, 500, 5, 5),
            ("but no more than fit", 0, 500, 50, 8),
        ] {
            let got = depth(starts, Duration::from_millis(making_ms), &policy(depth_min, 8));
            assert_eq!(got, want, "{why}");
        }
    }
}
