//! Events of pods: their reasons, and the events of steps that begin, succeed and fail.

use coracle_host::PullPolicy;

use crate::env::Note;
use crate::reason;
use crate::step::{HookKind, Step};

/// An event of a pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodEvent {
    /// Type Warning instead of Normal.
    pub is_warning: bool,
    /// Reason, one of [`reason`].
    pub reason: &'static str,
    /// Message: one sentence.
    pub message: String,
    /// Container that the event is about; `None`: the pod.
    pub container: Option<String>,
}

impl PodEvent {
    /// Returns an event of type Normal.
    #[must_use]
    pub fn normal(reason: &'static str, container: Option<&str>, message: impl Into<String>) -> Self {
        let container = container.map(str::to_owned);
        Self { is_warning: false, reason, message: message.into(), container }
    }

    /// Returns an event of type Warning.
    #[must_use]
    pub fn warning(reason: &'static str, container: Option<&str>, message: impl Into<String>) -> Self {
        Self { is_warning: true, ..Self::normal(reason, container, message) }
    }

    /// Returns a warning about an optional object or value of a container.
    #[must_use]
    pub fn of_note(note: &Note, container: &str) -> Self {
        Self::warning(note.reason, Some(container), note.message.clone())
    }
}

/// Returns the event of a step that begins.
#[must_use]
pub fn start_event(step: &Step) -> Option<PodEvent> {
    match step {
        // No pull: the image is only looked up on the node.
        Step::PullImage { policy: PullPolicy::Never, .. } => None,
        Step::PullImage { name, image, .. } => {
            Some(PodEvent::normal(reason::PULLING, Some(name), format!("Pulling image {image:?}")))
        }
        Step::StopContainer { name, why, .. } => {
            Some(PodEvent::normal(reason::KILLING, Some(name), format!("Stopping container {name}: {why}")))
        }
        Step::StartSandbox(_)
        | Step::StopSandbox { .. }
        | Step::RemoveSandbox
        | Step::WriteVolume(_)
        | Step::RequestToken(_)
        | Step::CreateContainer { .. }
        | Step::StartContainer { .. }
        | Step::RunHook { .. }
        | Step::RemoveContainer { .. }
        | Step::Probe { .. }
        | Step::MeasureVolumes { .. }
        | Step::Cancel(_) => None,
    }
}

/// Returns the event of a step that succeeded.
#[must_use]
pub fn success_event(step: &Step) -> Option<PodEvent> {
    match step {
        Step::PullImage { name, image, .. } => {
            Some(PodEvent::normal(reason::PULLED, Some(name), format!("Image {image:?} is on the node")))
        }
        Step::CreateContainer { name, .. } => {
            Some(PodEvent::normal(reason::CREATED, Some(name), format!("Created container {name}")))
        }
        Step::StartContainer { name, .. } => {
            Some(PodEvent::normal(reason::STARTED, Some(name), format!("Started container {name}")))
        }
        Step::StartSandbox(_)
        | Step::StopSandbox { .. }
        | Step::RemoveSandbox
        | Step::WriteVolume(_)
        | Step::RequestToken(_)
        | Step::RunHook { .. }
        | Step::StopContainer { .. }
        | Step::RemoveContainer { .. }
        | Step::Probe { .. }
        | Step::MeasureVolumes { .. }
        | Step::Cancel(_) => None,
    }
}

/// Returns the event of a step that failed.
#[must_use]
pub fn failure_event(step: &Step, why: &str) -> PodEvent {
    let name = step.container();
    let warn = |reason, message: String| PodEvent::warning(reason, name, message);
    match step {
        Step::StartSandbox(_) | Step::StopSandbox { .. } | Step::RemoveSandbox => {
            warn(reason::FAILED_CREATE_POD_SANDBOX, format!("cannot {}: {why}", phrase(step)))
        }
        Step::WriteVolume(content) => {
            warn(reason::FAILED_MOUNT, format!("cannot write volume {:?}: {why}", content.name))
        }
        Step::RequestToken(request) => warn(
            reason::FAILED_MOUNT,
            format!("cannot request a token for volume {:?}: {why}", request.volume),
        ),
        Step::RunHook { kind: HookKind::PostStart, .. } => {
            warn(reason::FAILED_POST_START_HOOK, format!("postStart hook failed: {why}"))
        }
        Step::RunHook { kind: HookKind::PreStop, .. } => {
            warn(reason::FAILED_PRE_STOP_HOOK, format!("preStop hook failed: {why}"))
        }
        Step::PullImage { image, .. } => warn(reason::FAILED, format!("cannot pull image {image:?}: {why}")),
        Step::CreateContainer { .. }
        | Step::StartContainer { .. }
        | Step::StopContainer { .. }
        | Step::RemoveContainer { .. }
        | Step::Probe { .. }
        | Step::MeasureVolumes { .. }
        | Step::Cancel(_) => warn(reason::FAILED, format!("cannot {}: {why}", phrase(step))),
    }
}

/// Returns the phrase that completes "cannot …" for a step.
fn phrase(step: &Step) -> &'static str {
    match step {
        Step::StartSandbox(_) => "start the VM",
        Step::StopSandbox { .. } => "stop the VM",
        Step::RemoveSandbox => "remove the VM",
        Step::WriteVolume(_) => "write a volume",
        Step::RequestToken(_) => "request a token",
        Step::PullImage { .. } => "pull the image",
        Step::CreateContainer { .. } => "create the container",
        Step::StartContainer { .. } => "start the container",
        Step::RunHook { .. } => "run the hook",
        Step::StopContainer { .. } => "stop the container",
        Step::RemoveContainer { .. } => "remove the container",
        Step::Probe { .. } => "run the probe",
        Step::MeasureVolumes { .. } => "measure volumes",
        Step::Cancel(_) => "cancel the step",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_that_is_only_looked_up_is_not_pulled() {
        let step = |policy| Step::PullImage {
            id: "a".parse().unwrap(),
            name: "web".to_owned(),
            image: "web:1".to_owned(),
            policy,
            credentials: vec![],
        };
        assert_eq!(start_event(&step(PullPolicy::Never)), None);
        assert_eq!(start_event(&step(PullPolicy::Always)).unwrap().reason, reason::PULLING);
        assert_eq!(success_event(&step(PullPolicy::Never)).unwrap().reason, reason::PULLED);
    }
}
