//! Steps of the containers of a pod whose VM runs.

use coracle_host::PullPolicy;
use coracle_record::ContainerId;
use coracle_types::MemoryMib;

use super::run::MISSING_RETRY;
use crate::container_spec::{Attempt, container_spec};
use crate::declared::{AfterExit, ContainerKind, pod_policy};
use crate::events::PodEvent;
use crate::hook;
use crate::members::{ContainerHistory, is_initialized};
use crate::observed::{ContainerPhase, ContainerView};
use crate::plan_builder::PlanBuilder;
use crate::pull_secrets::pull_credentials;
use crate::reason;
use crate::resources::vm_size;
use crate::step::{HookKind, Step, Target};
use crate::time::add;
use crate::volume::pull_policy;

/// Exit code of a container that was killed.
const KILLED: i32 = 137;
/// Longest run of a postStart hook.
const POST_START_LIMIT: std::time::Duration = std::time::Duration::from_secs(600);

impl<'a> PlanBuilder<'a> {
    /// Plans the steps of all containers. `can_begin`: the files that containers mount are written.
    pub(super) fn containers(&mut self, can_begin: bool) {
        let members = std::mem::take(&mut self.members);
        if members.iter().any(|m| m.after_exit(&self.o) == Some(AfterExit::RestartAll)) {
            self.restart_all(&members);
        } else {
            self.remove_old(&members);
            self.start_in_order(&members, can_begin);
        }
        self.members = members;
    }

    fn start_in_order(&mut self, members: &[ContainerHistory<'a>], can_begin: bool) {
        let initialized = is_initialized(&self.o, members);
        let mut open = true;
        for m in members {
            match m.kind() {
                ContainerKind::Init if initialized => {}
                ContainerKind::Init | ContainerKind::Sidecar if open || initialized => {
                    if !m.is_done(&self.o) || m.kind() == ContainerKind::Sidecar {
                        self.advance(m, can_begin);
                    }
                    open &= m.is_done(&self.o);
                }
                // Containers behind one that is not done wait for their turn.
                ContainerKind::Init | ContainerKind::Sidecar => {}
                ContainerKind::App if initialized => self.advance(m, can_begin),
                ContainerKind::App => {}
                ContainerKind::Ephemeral => self.advance(m, can_begin),
            }
        }
    }

    /// Plans the next step of one container.
    fn advance(&mut self, m: &ContainerHistory<'a>, can_begin: bool) {
        let target = Target::Container(m.name().to_owned());
        if let Some(view) = m.running() {
            return self.follow(m, view);
        }
        if !self.is_free(&target) {
            return;
        }
        match m.latest {
            None => self.begin(m, 0, can_begin),
            Some(view) if view.phase == ContainerPhase::Created => {
                let (id, name) = (view.id.clone(), view.name.clone());
                if !self.is_waiting(m, &target) {
                    self.step(Step::StartContainer { id, name });
                }
            }
            Some(_) => self.restart_if_due(m, can_begin),
        }
    }

    /// Restarts an ended container when its policy says so, or when the VM was restarted before an init container was done.
    fn restart_if_due(&mut self, m: &ContainerHistory<'a>, can_begin: bool) {
        let again = m.kind() == ContainerKind::Init && !m.is_current(&self.o);
        if m.after_exit(&self.o) != Some(AfterExit::Restart) && !again {
            return;
        }
        let Some(restart) = m.restart() else { return };
        if restart.at > self.o.now {
            let name = m.name();
            let pod = self.o.pod.metadata.name.as_deref().unwrap_or_default();
            let seconds = restart.delay.as_secs();
            let message = format!("back-off {seconds}s restarting failed container={name} pod={pod}");
            self.event(PodEvent::warning(reason::BACK_OFF, Some(name), message.clone()));
            self.wait(name, "CrashLoopBackOff", Some(message));
            self.wake_at(restart.at);
        } else {
            self.begin(m, restart.streak, can_begin);
        }
    }

    /// Returns whether the backoff after a failure is not over; the status then shows the failure.
    fn is_waiting(&mut self, m: &ContainerHistory<'a>, target: &Target) -> bool {
        let Some(failure) = self.o.memory.failures.get(target) else { return false };
        self.wait(m.name(), failure.reason, Some(failure.message.clone()));
        if failure.retry_at() <= self.o.now {
            return false;
        }
        self.wake_at(failure.retry_at());
        true
    }

    /// Begins a new attempt: its spec, then its image, then the container.
    fn begin(&mut self, m: &ContainerHistory<'a>, streak: u32, can_begin: bool) {
        let number = m.next_attempt(&self.o);
        let (id, name) = (m.id(&self.o, number), m.name().to_owned());
        if !can_begin || self.is_waiting(m, &Target::Container(name.clone())) {
            return;
        }
        let attempt = Attempt { number, streak, target: self.target_of(m) };
        let memory = self.vm_memory();
        let made = container_spec(&m.declared, &attempt, &self.fields_context(), self.o.objects, memory);
        let (container, notes) = match made {
            Ok(made) => made,
            Err(error) => {
                self.event(PodEvent::warning(error.event, Some(&name), error.message.clone()));
                self.wait(&name, "CreateContainerConfigError", Some(error.message));
                return self.wake_after(MISSING_RETRY);
            }
        };
        for note in &notes {
            self.event(PodEvent::of_note(note, &name));
        }
        if self.o.memory.images.contains(&id) {
            return self.step(Step::CreateContainer { id, name, container: Box::new(container) });
        }
        let image = container.spec.image;
        let policy = pull_policy(m.declared.container.image_pull_policy.as_deref(), &image);
        let (credentials, unusable) = pull_credentials(self.o.pod, self.o.objects, &image);
        if policy != PullPolicy::Never && !unusable.is_empty() {
            let message = format!("image {image:?} is pulled without: {}", unusable.join("; "));
            self.event(PodEvent::warning(reason::FAILED_IMAGE_PULL_SECRETS, Some(&name), message));
        }
        self.step(Step::PullImage { id, name, image, policy, credentials });
    }

    fn vm_memory(&self) -> MemoryMib {
        vm_size(self.o.pod, self.o.node).1
    }

    /// Returns the running container whose processes an ephemeral container sees.
    fn target_of(&self, m: &ContainerHistory<'_>) -> Option<ContainerId> {
        let target = m.declared.target?;
        let running = self.o.runtime.containers.iter().find(|view| view.name == target && view.is_running());
        running.map(|view| view.id.clone())
    }

    /// Plans for a running container: its hook, then its probes.
    fn follow(&mut self, m: &ContainerHistory<'a>, view: &'a ContainerView) {
        let name = m.name().to_owned();
        if let Some((at, why)) = self.o.memory.hook_failures.get(&view.id) {
            let deadline = add(*at, self.grace());
            return self.stop(m, view, deadline, &format!("postStart hook failed: {why}"));
        }
        if self.has_new_image(m, view) {
            let deadline = add(self.o.now, self.grace());
            return self.stop(m, view, deadline, "its image was changed");
        }
        if !m.has_run_post_start(&self.o, view) {
            let hook =
                m.declared.container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.post_start.as_ref());
            if let Some(hook) = hook.filter(|_| self.is_free(&Target::Container(name.clone()))) {
                let action = hook::action(hook, &m.declared.container, &self.address());
                let deadline = add(self.o.now, POST_START_LIMIT);
                let (id, kind) = (view.id.clone(), HookKind::PostStart);
                self.step(Step::RunHook { id, name, kind, action, deadline });
            }
            return;
        }
        self.probes(m, view);
    }

    /// Returns whether a running container must be restarted for a new image. The image is the only part of a container's spec
    /// that may change. A container that is not restarted keeps the old image.
    fn has_new_image(&self, m: &ContainerHistory<'a>, view: &ContainerView) -> bool {
        let policy = pod_policy(self.o.pod.spec.as_ref());
        let image = m.declared.container.image.as_deref().unwrap_or_default();
        image != view.image && m.declared.after_exit(policy, KILLED) == AfterExit::Restart
    }

    /// Returns the address of the pod, for probes and hooks.
    pub(super) fn address(&self) -> String {
        let sandbox = self.o.runtime.sandbox.as_ref();
        sandbox.and_then(|sandbox| sandbox.addresses.first()).map(ToString::to_string).unwrap_or_default()
    }

    /// Removes attempts before the previous one. The latest and the previous attempt stay, for logs and the last state.
    fn remove_old(&mut self, members: &[ContainerHistory<'a>]) {
        for view in members.iter().flat_map(|m| &m.older) {
            self.remove(view);
        }
    }

    fn remove(&mut self, view: &ContainerView) {
        let target = Target::Old(view.id.clone());
        if self.is_free(&target) {
            let step = Step::RemoveContainer { id: view.id.clone(), name: view.name.clone() };
            self.retry(target, step);
        }
    }

    /// Kills and removes all containers. The container that caused the restart is removed last, so that a crash in between does
    /// not lose the cause.
    fn restart_all(&mut self, members: &[ContainerHistory<'a>]) {
        let o = self.o;
        let is_cause = |m: &ContainerHistory<'_>| m.after_exit(&o) == Some(AfterExit::RestartAll);
        let mut others_left = false;
        for m in members {
            if let Some(view) = m.running() {
                self.stop(m, view, o.now, "all containers of the pod restart");
                others_left = true;
                continue;
            }
            others_left |= !self.is_free(&Target::Container(m.name().to_owned()));
            let latest = m.latest.filter(|_| !is_cause(m));
            for view in m.older.iter().copied().chain(m.previous).chain(latest) {
                self.remove(view);
                others_left = true;
            }
        }
        if !others_left {
            members
                .iter()
                .filter(|m| is_cause(m))
                .filter_map(|m| m.latest)
                .for_each(|view| self.remove(view));
        }
    }
}
