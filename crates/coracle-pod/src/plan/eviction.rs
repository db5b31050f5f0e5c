//! Limits of emptyDir volumes: what they hold is measured from time to time, and a pod whose volume holds more is evicted
//! (Kubernetes documentation, "Local ephemeral storage").

use std::time::Duration;

use crate::observed::PodFailure;
use crate::pass::Pass;
use crate::step::{Step, Target};
use crate::time::add;
use crate::volume::size_limits;

/// Time between two measurements, as the kubelet's eviction manager takes it.
const PERIOD: Duration = Duration::from_secs(10);

impl Pass<'_> {
    /// Measures the volumes that have a limit, when it is time to.
    pub(super) fn measure(&mut self) {
        let volumes: Vec<_> = size_limits(self.o.pod).into_iter().map(|limit| limit.volume).collect();
        if volumes.is_empty() || !self.is_free(&Target::Usage) {
            return;
        }
        match self.o.memory.usage.as_ref().map(|usage| add(usage.at, PERIOD)) {
            Some(due) if due > self.o.now => self.wake_at(due),
            _ => self.retry(Target::Usage, Step::MeasureVolumes { volumes }),
        }
    }

    /// A decision against the pod: that of its node, or that a volume holds more than it may.
    pub(crate) fn failure(&self) -> Option<PodFailure> {
        self.o.failure.cloned().or_else(|| self.volume_failure())
    }

    fn volume_failure(&self) -> Option<PodFailure> {
        let usage = self.o.memory.usage.as_ref()?;
        let held = |name: &str| usage.bytes.get(name).copied().unwrap_or_default();
        let full =
            size_limits(self.o.pod).into_iter().find(|limit| held(&limit.volume.name) > limit.bytes)?;
        Some(PodFailure {
            reason: "Evicted".to_owned(),
            message: format!(
                "Usage of EmptyDir volume {:?} exceeds the limit {:?}.",
                full.volume.name, full.text
            ),
            deadline: usage.at,
            disruption: Some("TerminationByKubelet"),
        })
    }
}
