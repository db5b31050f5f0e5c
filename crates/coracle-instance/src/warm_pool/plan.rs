//! Plan of the warm pool: which clones it has. Pure.

use std::time::Duration;

use coracle_types::MemoryMib;
use tokio::time::Instant;

use crate::TemplateKey;
use crate::config::WarmPoolPolicy;

/// Assumed time to make a clone, before it was measured.
pub(crate) const MAKING_FIRST_GUESS: Duration = Duration::from_secs(1);
/// Interval between checks of the host's memory while clones are pooled.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Available memory of the host, as judged by the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Available are a quarter or [`SPARE_MIB`], and twice the memory of a guest of this size.
    Spare,
    /// Existing clones are kept, and no more are made.
    Enough,
    /// Available are less than an eighth and less than half of [`SPARE_MIB`]: clones are ended.
    Short,
}

/// Memory that counts as spare on a large host: twice what a pool of the default size takes.
const SPARE_MIB: u64 = 4096;

impl Memory {
    /// Judges a host's total and available memory in MiB. A pooled guest has touched little of its memory, but its VM may use
    /// all of it.
    pub(crate) fn of((total, available): (u64, u64), guest: MemoryMib) -> Self {
        match available {
            _ if available < (total / 8).min(SPARE_MIB / 2) => Self::Short,
            _ if available < (total / 4).min(SPARE_MIB).max(2 * u64::from(guest)) => Self::Enough,
            _ => Self::Spare,
        }
    }
}

/// Next step of the pool's task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Ends a clone of this shape.
    End(TemplateKey),
    /// Makes a clone of this shape.
    Make(TemplateKey),
    /// Waits until this time, or without a limit.
    Wait(Option<Instant>),
}

/// Shape that was started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand<'a> {
    pub(crate) key: &'a TemplateKey,
    /// Time of the latest start.
    pub(crate) started: Instant,
    /// Planned number of clones.
    pub(crate) depth: usize,
}

/// Returns the planned number of clones of a shape: the largest number of VMs that were requested while one clone was being
/// made. `asked`: times of the requests, in any order.
pub(crate) fn depth(asked: &[Instant], making: Duration, policy: &WarmPoolPolicy) -> usize {
    let mut asked = asked.to_vec();
    asked.sort_unstable();
    let while_making = |(at, first): (usize, &Instant)| {
        asked[at..].iter().take_while(|next| next.duration_since(*first) <= making).count()
    };
    let most = asked.iter().enumerate().map(while_making).max().unwrap_or(0);
    most.max(policy.depth_min).min(policy.clones_max)
}

/// Returns the next step. `shapes`: the latest first; `ready`: shapes of the pooled clones. Ends clones before it makes others.
pub(crate) fn next(
    shapes: &[Demand<'_>],
    ready: &[&TemplateKey],
    policy: &WarmPoolPolicy,
    memory: impl Fn(&TemplateKey) -> Memory,
    now: Instant,
) -> Step {
    let wanted = || shapes.iter().filter(|shape| shape.started + policy.idle_max > now);
    let is_idle = |key: &TemplateKey| !wanted().any(|shape| shape.key == key);
    if let Some(key) = ready.iter().find(|key| is_idle(key) || memory(key) == Memory::Short) {
        return Step::End((*key).clone());
    }
    let has = |shape: &Demand<'_>| ready.iter().filter(|key| **key == shape.key).count();
    let is_missing = |shape: &&Demand<'_>| has(shape) < shape.depth && memory(shape.key) == Memory::Spare;
    // A shape below its share comes first. In a full pool it replaces a clone of a shape above its share.
    let share = policy.clones_max / wanted().count().max(1);
    let below = wanted().filter(is_missing).find(|shape| has(shape) < share);
    let missing = below.or_else(|| wanted().find(is_missing)).filter(|_| ready.len() < policy.clones_max);
    let surplus = below.and_then(|_| wanted().find(|shape| has(shape) > share));
    match (missing, surplus) {
        (Some(missing), _) => Step::Make(missing.key.clone()),
        (None, Some(surplus)) => Step::End(surplus.key.clone()),
        (None, None) => {
            let idle = wanted().map(|shape| shape.started + policy.idle_max).min();
            Step::Wait(idle.map(|idle| idle.min(now + LOOK_EVERY)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(depth_min: usize, clones_max: usize) -> WarmPoolPolicy {
        WarmPoolPolicy { shapes_max: 2, depth_min, clones_max, idle_max: Duration::from_secs(10) }
    }

    #[test]
    fn warm_pool_steps_table() {
        let start = Instant::now();
        let key = |digit: char| TemplateKey::parse(&digit.to_string().repeat(16)).unwrap();
        let (a, b) = (key('a'), key('b'));
        let at = |seconds| start + Duration::from_secs(seconds);
        let (make_a, make_b) = (Step::Make(a.clone()), Step::Make(b.clone()));
        let wait = |seconds| Step::Wait(Some(at(seconds)));
        let full = vec![(&b, 1, 9), (&a, 0, 1)];
        for (why, shapes, ready, now, want) in [
            ("nothing was started", vec![], vec![], 0, Step::Wait(None)),
            ("the first start is over", vec![(&a, 0, 1)], vec![], 1, make_a.clone()),
            ("it is pooled", vec![(&a, 0, 1)], vec![&a], 1, wait(10)),
            ("more are started than that", vec![(&a, 0, 2)], vec![&a], 1, make_a.clone()),
            ("the latest comes first", vec![(&b, 1, 1), (&a, 0, 1)], vec![], 2, make_b),
            ("then the other", vec![(&b, 1, 1), (&a, 0, 1)], vec![&b], 2, make_a.clone()),
            ("both are pooled", vec![(&b, 1, 1), (&a, 0, 1)], vec![&b, &a], 2, wait(10)),
            ("the pool is full", full.clone(), vec![&b, &b, &a], 2, wait(10)),
            ("one has more than its share", full.clone(), vec![&b, &b, &b], 2, Step::End(b.clone())),
            ("which the other gets", full.clone(), vec![&b, &b], 2, make_a),
            ("one is idle", vec![(&b, 1, 1), (&a, 0, 1)], vec![&b, &a], 10, Step::End(a.clone())),
            ("and is not made anew", vec![(&b, 1, 1), (&a, 0, 1)], vec![&b], 10, wait(11)),
            ("less are started now", vec![(&a, 0, 1)], vec![&a, &a], 2, wait(10)),
            ("its shape is forgotten", vec![(&b, 1, 1)], vec![&a], 2, Step::End(a.clone())),
            ("all are idle", vec![(&b, 1, 1)], vec![], 11, Step::Wait(None)),
        ] {
            let shapes = demands(&shapes, start);
            assert_eq!(next(&shapes, &ready, &policy(1, 3), |_| Memory::Spare, at(now)), want, "{why}");
        }
    }

    fn demands<'a>(shapes: &[(&'a TemplateKey, u64, usize)], start: Instant) -> Vec<Demand<'a>> {
        let demand = |&(key, seconds, depth): &(&'a TemplateKey, u64, usize)| Demand {
            key,
            started: start + Duration::from_secs(seconds),
            depth,
        };
        shapes.iter().map(demand).collect()
    }

    #[test]
    fn warm_pool_steps_by_memory_table() {
        let start = Instant::now();
        let a = TemplateKey::parse(&"a".repeat(16)).unwrap();
        let wait = |seconds| Step::Wait(Some(start + Duration::from_secs(seconds)));
        for (why, memory, ready, idle, want) in [
            ("there is room", Memory::Spare, vec![&a], 10, Step::Make(a.clone())),
            ("no more are made", Memory::Enough, vec![&a], 10, wait(10)),
            ("they are ended", Memory::Short, vec![&a], 10, Step::End(a.clone())),
            ("and none is made", Memory::Short, vec![], 10, wait(10)),
            ("it is looked at again", Memory::Enough, vec![&a], 600, wait(10)),
        ] {
            let policy = WarmPoolPolicy { idle_max: Duration::from_secs(idle), ..policy(1, 3) };
            let got = next(&demands(&[(&a, 0, 2)], start), &ready, &policy, |_| memory, start);
            assert_eq!(got, want, "{why}");
        }
    }

    #[test]
    fn host_memory_pressure_table() {
        let guest = MemoryMib::try_from(256).unwrap();
        for (total, available, want) in [
            (4096, 1024, Memory::Spare),
            (4096, 1023, Memory::Enough),
            (4096, 512, Memory::Enough),
            (4096, 511, Memory::Short),
            (1024, 512, Memory::Spare),
            (1024, 511, Memory::Enough),
            (65536, 4096, Memory::Spare),
            (65536, 4095, Memory::Enough),
            (65536, 2047, Memory::Short),
        ] {
            assert_eq!(Memory::of((total, available), guest), want, "{available} of {total} MiB");
        }
    }

    #[test]
    fn depth_follows_demand() {
        let start = Instant::now();
        let every = |ms: u64, count: u64| (0..count).map(move |n| Duration::from_millis(n * ms));
        let burst = |count| every(0, count);
        for (why, asked, making_ms, depth_min, want) in [
            ("none was started lately", vec![], 500, 1, 1),
            ("now and then", every(10_000, 3).collect(), 500, 1, 1),
            ("two a second, each takes less than half a second", every(500, 20).collect(), 499, 1, 1),
            ("and on a slow node", every(500, 20).collect(), 1900, 1, 4),
            ("five at once, some minutes ago", burst(5).collect(), 500, 1, 5),
            ("listed as they became ready", every(100, 5).chain(burst(1)).collect(), 400, 1, 6),
            ("no more than fit", burst(1000).collect(), 2000, 1, 8),
            ("what the administrator asks for", vec![], 500, 5, 5),
            ("but no more than fit", vec![], 500, 50, 8),
        ] {
            let asked: Vec<_> = asked.into_iter().map(|after| start + after).collect();
            let got = depth(&asked, Duration::from_millis(making_ms), &policy(depth_min, 8));
            assert_eq!(got, want, "{why}");
        }
    }
}
