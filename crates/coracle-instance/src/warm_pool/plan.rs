//! Which clones the warm pool has. Pure.

use std::time::Duration;

use tokio::time::Instant;

use crate::TemplateKey;

/// What the task does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// End the one of this shape.
    End(TemplateKey),
    /// Make one of this shape.
    Make(TemplateKey),
    /// Nothing, until then.
    Wait(Option<Instant>),
}

/// `shapes`: started shapes with their time, the latest first; `ready`: pooled ones. Ends clones before it makes others.
pub(crate) fn next(
    shapes: &[(&TemplateKey, Instant)],
    ready: &[&TemplateKey],
    idle_max: Duration,
    now: Instant,
) -> Step {
    let wanted = || shapes.iter().filter(|(_, started)| *started + idle_max > now);
    if let Some(idle) = ready.iter().find(|key| !wanted().any(|(shape, _)| shape == *key)) {
        return Step::End((*idle).clone());
    }
    match wanted().find(|(shape, _)| !ready.contains(shape)) {
        Some((missing, _)) => Step::Make((*missing).clone()),
        None => Step::Wait(wanted().map(|(_, started)| *started + idle_max).min()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_of_steps() {
        let start = Instant::now();
        let key = |digit: char| TemplateKey::parse(&digit.to_string().repeat(16)).unwrap();
        let (a, b) = (key('a'), key('b'));
        let at = |seconds| start + Duration::from_secs(seconds);
        for (why, shapes, ready, now, want) in [
            ("nothing was started", vec![], vec![], 0, Step::Wait(None)),
            ("the first start is over", vec![(&a, at(0))], vec![], 1, Step::Make(a.clone())),
            ("it is pooled", vec![(&a, at(0))], vec![&a], 1, Step::Wait(Some(at(10)))),
            ("the latest comes first", vec![(&b, at(1)), (&a, at(0))], vec![], 2, Step::Make(b.clone())),
            ("then the other", vec![(&b, at(1)), (&a, at(0))], vec![&b], 2, Step::Make(a.clone())),
            ("both do", vec![(&b, at(1)), (&a, at(0))], vec![&b, &a], 2, Step::Wait(Some(at(10)))),
            ("one is idle", vec![(&b, at(1)), (&a, at(0))], vec![&b, &a], 10, Step::End(a.clone())),
            ("and is not made anew", vec![(&b, at(1)), (&a, at(0))], vec![&b], 10, Step::Wait(Some(at(11)))),
            ("its shape is forgotten", vec![(&b, at(1))], vec![&a], 2, Step::End(a.clone())),
            ("all are idle", vec![(&b, at(1))], vec![], 11, Step::Wait(None)),
        ] {
            assert_eq!(next(&shapes, &ready, Duration::from_secs(10), at(now)), want, "{why}");
        }
    }
}
