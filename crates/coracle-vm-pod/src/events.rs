//! Events and metrics of pods, by step. Pure.

use coracle_pod::events::PodEvent;

use crate::execute::StepError;
use crate::facts::{Facts, Source};
use crate::metrics::PodOperation;
use crate::step::{Finish, Purpose, Step};

/// Returns the event of a step that succeeded.
pub(crate) fn success_event(step: &Step, facts: &Facts) -> Option<PodEvent> {
    let wanted = facts.pod.wanted.as_ref().ok()?;
    let vm = &wanted.vm;
    let normal = |reason, message: String| Some(PodEvent::normal(reason, None, message));
    match step {
        Step::PullImage => normal("Pulled", format!("Image of VM {vm} is on the node")),
        Step::PullSnapshot => normal("Pulled", format!("Snapshot of VM {vm} is on the node")),
        Step::Run => normal("Created", format!("Started VM {vm} of its image")),
        Step::Clone => normal("Created", format!("Cloned VM {vm} from its snapshot")),
        Step::Fork => match &wanted.source {
            Source::Fork { from } => normal("Created", format!("Forked VM {vm} from VM {from}")),
            _ => None,
        },
        Step::Wake => normal("Woken", format!("VM {vm} continues from its saved state")),
        Step::Start if facts.vm.as_ref().is_some_and(|vm| vm.boots > 0) => {
            normal("Restarted", format!("Started VM {vm} again"))
        }
        Step::Push(Purpose::Hibernation) => {
            normal("Saved", format!("Pushed the state of VM {vm}, tag hibernate"))
        }
        Step::Push(Purpose::Deletion) => normal("Saved", format!("Pushed the state of VM {vm}, tag latest")),
        Step::RemoveVm { .. } if !facts.pod.ending => {
            normal("Hibernated", format!("VM {vm} is saved and gone"))
        }
        _ => None,
    }
}

/// Returns the event of a step that failed.
pub(crate) fn failure_event(_step: &Step, error: &StepError) -> PodEvent {
    PodEvent::warning(error.reason, None, error.message.clone())
}

/// Returns the event of a pod that ends.
pub(crate) fn finish_event(how: Finish) -> PodEvent {
    match how {
        Finish::NoVm => PodEvent::normal("Killing", None, "The pod has no VM of its own"),
        Finish::Removed => PodEvent::normal("Killing", None, "Its VM is removed"),
        Finish::LeftAlone => PodEvent::normal("Killing", None, "Its VM is not managed and stays"),
        Finish::Kept => PodEvent::warning(
            "SaveFailed",
            None,
            "Its VM could not be saved and is kept on the node: save or remove it by hand",
        ),
    }
}

/// Returns what a successful step is counted as.
pub(crate) fn success_operation(step: &Step, facts: &Facts) -> Option<PodOperation> {
    match step {
        Step::Run | Step::Clone | Step::Fork => Some(PodOperation::Created),
        Step::Wake => Some(PodOperation::Woken),
        Step::RemoveVm { .. } if !facts.pod.ending => Some(PodOperation::Hibernated),
        Step::Note(note) if note.message == crate::plan::ADOPTED => Some(PodOperation::Adopted),
        _ => None,
    }
}

/// Returns what a failed step is counted as.
pub(crate) fn failure_operation(step: &Step, facts: &Facts) -> Option<PodOperation> {
    match step {
        Step::Run
        | Step::Clone
        | Step::Fork
        | Step::PullImage
        | Step::PullSnapshot
        | Step::SaveForkSource => Some(PodOperation::CreateFailed),
        Step::Wake | Step::Import => Some(PodOperation::WakeFailed),
        Step::RemoveVm { .. } if facts.pod.ending => Some(PodOperation::DeleteFailed),
        Step::Hibernate | Step::Copy(_) | Step::Push(_) | Step::RemoveVm { .. } if !facts.pod.ending => {
            Some(PodOperation::HibernateFailed)
        }
        _ => None,
    }
}
