//! Size limits of emptyDir volumes: the usage is measured periodically, and a pod whose volume exceeds its limit is evicted
//! (Kubernetes documentation, "Local ephemeral storage").

use std::time::Duration;

use crate::observed::PodFailure;
use crate::plan_builder::PlanBuilder;
use crate::step::{Step, Target};
use crate::time::add;
use crate::volume::size_limits;

/// Time between two measurements, as in the kubelet's eviction manager.
const PERIOD: Duration = Duration::from_secs(10);

impl PlanBuilder<'_> {
    /// Measures the volumes that have a limit, when a measurement is due.
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

    /// Returns a decision against the pod: that of its node, or an eviction because a volume exceeds its limit.
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
