//! Kinds of starts, by which the node chooses the warm-up of a pooled clone: code that a VM does not run would only take memory.

use std::time::Duration;

use tokio::time::Instant;

/// Kind of a started VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartKind {
    /// One workload.
    Workload,
    /// Sandbox of a Pod, with containers.
    Sandbox,
}

/// Latest starts of the VMs of a shape.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LatestStarts {
    workload: Option<Instant>,
    sandbox: Option<Instant>,
}

/// Starts to warm a clone up for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WarmUps {
    pub(super) workload: bool,
    pub(super) sandbox: bool,
}

impl LatestStarts {
    /// Adds a start.
    pub(super) fn add(&mut self, kind: StartKind, now: Instant) {
        match kind {
            StartKind::Workload => self.workload = Some(now),
            StartKind::Sandbox => self.sandbox = Some(now),
        }
    }

    /// Returns the kinds of starts within the idle time; all, if there was none. Pure.
    pub(super) fn warm_ups(&self, idle_max: Duration, now: Instant) -> WarmUps {
        let is_recent = |start: Option<Instant>| start.is_some_and(|start| start + idle_max > now);
        let (workload, sandbox) = (is_recent(self.workload), is_recent(self.sandbox));
        let none = !workload && !sandbox;
        WarmUps { workload: workload || none, sandbox: sandbox || none }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_are_warmed_up_for_recent_starts() {
        use StartKind::{Sandbox, Workload};
        const IDLE: Duration = Duration::from_secs(600);
        let began = Instant::now();
        for (why, starts, after, workload, sandbox) in [
            ("unknown: all", &[][..], 0, true, true),
            ("workloads", &[(Workload, 0)], 599, true, false),
            ("Pods", &[(Sandbox, 0)], 599, false, true),
            ("both", &[(Workload, 0), (Sandbox, 300)], 400, true, true),
            ("one of them long ago", &[(Workload, 0), (Sandbox, 300)], 600, false, true),
            ("all long ago", &[(Workload, 0)], 600, true, true),
        ] {
            let mut latest = LatestStarts::default();
            let at = |seconds: u64| began + Duration::from_secs(seconds);
            starts.iter().for_each(|(kind, seconds)| latest.add(*kind, at(*seconds)));
            assert_eq!(latest.warm_ups(IDLE, at(after)), WarmUps { workload, sandbox }, "{why}");
        }
    }
}
