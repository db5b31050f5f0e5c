//! Consequences of a failed call for the object. Pure.

use coracle_api::PowerState;
use tonic::Code;

use crate::{
    agent::AgentError,
    observed::{Memo, Policy},
    status::Finding,
    step::Step,
};

/// Consequences of a failed step.
#[derive(Clone, Debug, PartialEq)]
pub struct Consequences {
    /// Finding for the status; `None`: leave the status unchanged.
    pub finding: Option<Finding>,
    /// Observe and plan again at once instead of failing.
    pub again: bool,
    /// Memo to store.
    pub memo: Memo,
}

/// Derives the consequences of a failure of `step`.
#[must_use]
pub fn judge(step: &Step, error: &AgentError, memo: &Memo, policy: &Policy) -> Consequences {
    let creates = matches!(step, Step::CreateVm(..) | Step::CreateStopped(..));
    let boots = creates || matches!(step, Step::StartVm(_));
    let moves = matches!(step, Step::SaveSnapshot(..) | Step::CopySnapshot(..) | Step::RestoreVm(..));
    let refused = u32::from((creates && is_of_the_node(error)) || (moves && !error.is_local()));
    let memo = Memo { refusals: memo.refusals.saturating_add(refused), ..memo.clone() };
    let quiet = Consequences { finding: None, again: false, memo: memo.clone() };
    match (step, error.code) {
        // The error says nothing about the VM: a problem of this process, or a generation newer than the one that was read.
        _ if error.is_local() || error.is_fenced() => quiet,
        (_, Code::AlreadyExists) if creates => Consequences { again: true, ..quiet },
        (Step::StartVm(_) | Step::SetPowerState(_, PowerState::Running), _) if error.must_recreate() => {
            Consequences { again: true, memo: Memo { recreate: true, ..memo }, ..quiet }
        }
        (Step::StartVm(_), Code::NotFound) => quiet,
        (Step::DiscardSnapshots(..), _) => Consequences { again: true, ..quiet },
        _ if moves => Consequences { finding: Some(Finding::MoveFailed(error.clone())), ..quiet },
        // The agent accepted the call and may be pulling the image; the next GetVM shows the result.
        (_, Code::DeadlineExceeded) if boots => quiet,
        // The VM keeps its state; its phase shows it.
        (Step::SetPowerState(..), _) if !error.is_silence() => {
            Consequences { finding: Some(Finding::PowerFailed(error.to_string())), ..quiet }
        }
        // Coracle agents report at once what a user can fix; the call is repeated nevertheless.
        _ if boots && error.is_transient() && error.is_explained() => Consequences {
            finding: Some(Finding::Waiting(error.clone())),
            again: false,
            memo: Memo { silent: 0, internal: 0, ..memo },
        },
        (_, Code::Internal) if creates => {
            let internal = memo.internal.saturating_add(1);
            let finding = (internal >= policy.internal_max).then(|| Finding::Internal(error.clone()));
            Consequences { finding, memo: Memo { internal, ..memo }, again: false }
        }
        _ if error.is_transient() => {
            let silent = if error.is_silence() { memo.silent.saturating_add(1) } else { memo.silent };
            let finding = (error.is_silence() && silent >= policy.silent_max)
                .then(|| Finding::Unreachable(error.clone()));
            Consequences { finding, memo: Memo { silent, internal: 0, ..memo }, again: false }
        }
        _ => Consequences {
            finding: Some(Finding::Refused(error.clone())),
            memo: Memo { internal: 0, ..memo },
            again: false,
        },
    }
}

/// True for a refusal that another node might not repeat. An image that is missing at one node is missing at all.
fn is_of_the_node(error: &AgentError) -> bool {
    let ours = error.is_local() || error.is_fenced() || error.code == Code::AlreadyExists;
    let node = !error.is_transient()
        || error.code == Code::ResourceExhausted
        || error.failure.starts_with("COR-DRV-");
    node && !ours && !error.is_of_image()
}
