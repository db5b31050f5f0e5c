//! Steps that end a pod.

use std::time::Duration;

use jiff::Timestamp;

use crate::declared::ContainerKind;
use crate::hook;
use crate::members::ContainerHistory;
use crate::observed::{ContainerView, SandboxPhase};
use crate::plan_builder::{Ending, PlanBuilder};
use crate::step::{HookKind, Step, Target};
use crate::time::{add, until};

/// Shortest time between the stop signal of a container and its kill.
const GRACE_MIN: Duration = Duration::from_secs(2);
/// Time for the guest to power off after the last container has ended.
const POWER_OFF_GRACE: Duration = Duration::from_secs(5);
/// Time after the deadline of the containers at which the VM is killed, because its guest does not respond.
const STUCK_AFTER: Duration = Duration::from_secs(10);

impl<'a> PlanBuilder<'a> {
    /// Ends the pod. Returns whether its VM is down and no step for it is under way.
    pub(super) fn end(&mut self, ending: &Ending) -> bool {
        self.cancel_pending_steps();
        let phase = self.o.runtime.sandbox.as_ref().map(|sandbox| sandbox.phase);
        let stuck_at = add(ending.deadline, STUCK_AFTER);
        match phase {
            None | Some(SandboxPhase::Created | SandboxPhase::Down) => {
                return self.is_free(&Target::Sandbox);
            }
            Some(_) if ending.forced || self.o.now >= stuck_at => self.stop_sandbox(Duration::ZERO),
            Some(SandboxPhase::Ready) => {
                self.wake_at(stuck_at);
                if self.stop_containers(ending) {
                    self.stop_sandbox(POWER_OFF_GRACE);
                }
            }
            Some(SandboxPhase::Starting | SandboxPhase::Suspended) => self.stop_sandbox(Duration::ZERO),
            Some(SandboxPhase::Stopping) => self.wake_at(stuck_at),
        }
        false
    }

    fn stop_sandbox(&mut self, grace: Duration) {
        let gentler = match self.step_in_progress(&Target::Sandbox) {
            None | Some(Step::StartSandbox(_)) => true,
            Some(Step::StopSandbox { grace: earlier }) => *earlier > grace,
            Some(_) => false,
        };
        if gentler {
            self.retry(Target::Sandbox, Step::StopSandbox { grace });
        }
    }

    /// Cancels pulls, probes, token requests and postStart hooks.
    fn cancel_pending_steps(&mut self) {
        let can_wait = |step: &Step| {
            matches!(
                step,
                Step::PullImage { .. }
                    | Step::Probe { .. }
                    | Step::RequestToken(_)
                    | Step::RunHook { kind: HookKind::PostStart, .. }
            )
        };
        let busy = self.o.memory.busy.iter().filter(|(_, step)| can_wait(step));
        let targets: Vec<_> = busy.map(|(target, _)| target.clone()).collect();
        targets.into_iter().for_each(|target| self.step(Step::Cancel(target)));
    }

    /// Stops containers in parallel, then sidecars one by one, from the last to the first. Returns whether none runs or is
    /// being started.
    fn stop_containers(&mut self, ending: &Ending) -> bool {
        let members = std::mem::take(&mut self.members);
        let running = |m: &&ContainerHistory<'a>| m.running().is_some();
        let others: Vec<_> =
            members.iter().filter(|m| m.kind() != ContainerKind::Sidecar).filter(running).collect();
        let last_sidecar = members.iter().rev().filter(|m| m.kind() == ContainerKind::Sidecar).find(running);
        let next: Vec<_> = if others.is_empty() { last_sidecar.into_iter().collect() } else { others };
        for m in &next {
            if let Some(view) = m.running() {
                self.stop(m, view, ending.deadline, &ending.why);
            }
        }
        let done = next.is_empty();
        self.members = members;
        let working =
            |step: &Step| matches!(step, Step::CreateContainer { .. } | Step::StartContainer { .. });
        done && !self.o.memory.busy.values().any(|step| working(step))
    }

    /// Stops a running container by `deadline`: its preStop hook runs first, within the same time. A stop or preStop hook under
    /// way with a later deadline is replaced.
    pub(super) fn stop(
        &mut self,
        m: &ContainerHistory<'a>,
        view: &'a ContainerView,
        deadline: Timestamp,
        why: &str,
    ) {
        let now = self.o.now;
        let (id, name) = (view.id.clone(), m.name().to_owned());
        let is_under_way = match self.step_in_progress(&Target::Container(name.clone())) {
            Some(Step::StopContainer { deadline: earlier, .. }) => *earlier <= deadline,
            Some(Step::RunHook { kind: HookKind::PreStop, deadline: earlier, .. }) => *earlier <= deadline,
            Some(Step::CreateContainer { .. } | Step::StartContainer { .. }) => true,
            Some(_) | None => false,
        };
        if is_under_way {
            return;
        }
        let hook = m.declared.container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.pre_stop.as_ref());
        let ran = self.o.memory.hooks.contains(&(id.clone(), HookKind::PreStop));
        if let Some(hook) = hook.filter(|_| !ran && deadline > now) {
            let action = hook::action(hook, &m.declared.container, &self.address());
            return self.step(Step::RunHook { id, name, kind: HookKind::PreStop, action, deadline });
        }
        let target = Target::Container(name.clone());
        let grace = until(now, deadline).max(GRACE_MIN);
        self.retry(target, Step::StopContainer { id, name, grace, deadline, why: why.to_owned() });
    }
}
