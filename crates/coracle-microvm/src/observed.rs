//! Input of the plan: one object and its surroundings at one moment.

use std::{sync::Arc, time::Duration};

use coracle_api::{MikromVM, OnDrain, PowerState};
use coracle_reconcile::Backoff;
use coracle_vm_inputs::Inputs;
use jiff::{SignedDuration, Timestamp};

use crate::{
    agent::{AgentAddress, AgentError, VmInfo},
    step::{MigrationEnds, NodeBinding, Step},
};

/// Times and counts that decisions depend on. All come from the configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// Time between two reconciles of an object without events.
    pub resync: Duration,
    /// How long a node may be gone before it counts as lost.
    pub node_grace: Duration,
    /// Delay before a VM is started again.
    pub restart: Backoff,
    /// Running time after which a VM restarts with the first delay of `restart` again.
    pub healthy_after: Duration,
    /// INTERNAL answers in a row to a creation before the status reports them.
    pub internal_max: u32,
    /// Calls in a row without a response before the status reports it.
    pub silent_max: u32,
    /// Refusals in a row by a node before a VM that never existed there is bound to another node.
    pub refusals_max: u32,
    /// Time for which a VM is not placed again on a node that refused it.
    pub avoid_for: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            resync: seconds(30),
            node_grace: seconds(300),
            restart: Backoff { base: seconds(1), max: seconds(300) },
            healthy_after: seconds(600),
            internal_max: 10,
            silent_max: 5,
            refusals_max: 3,
            avoid_for: seconds(600),
        }
    }
}

impl Policy {
    /// True when a node that is gone since `gone_since` counts as lost.
    #[must_use]
    pub fn is_lost(&self, gone_since: Timestamp, now: Timestamp) -> bool {
        let grace = SignedDuration::try_from(self.node_grace).unwrap_or(SignedDuration::MAX);
        now >= gone_since.saturating_add(grace).unwrap_or(Timestamp::MAX)
    }
}

/// Reason why an object cannot be bound to a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindingError {
    /// No node accepts the VM; contains the reason.
    #[error("{0}")]
    Unschedulable(String),
    /// The spec names an agent that neither belongs to the cluster nor is allowed.
    #[error("agent {0} is not allowed")]
    NotAllowed(String),
}

/// The agent's answer to GetVM.
#[derive(Clone, Debug, PartialEq)]
pub enum AgentView {
    /// The object is bound to no agent.
    Unbound,
    /// The agent answered with this VM, or has no VM with that id.
    Answered(Option<VmInfo>),
    /// The agent refused the call.
    Refused(AgentError),
    /// The call failed, and may succeed later.
    Unreachable {
        /// Error of the call.
        error: AgentError,
        /// Time since which the node is gone; `None`: the node is present, or its name is unknown.
        gone_since: Option<Timestamp>,
        /// True when a node or Pod announces that agent.
        announced: bool,
    },
}

/// Memory of an object between reconciles. After a loss it is learned again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memo {
    /// Restarts since the VM was last healthy.
    pub streak: u32,
    /// Time since which the VM is down.
    pub down_since: Option<Timestamp>,
    /// Calls in a row without a response.
    pub silent: u32,
    /// INTERNAL answers in a row to a creation.
    pub internal: u32,
    /// True when the agent cannot start this VM again: it must be deleted and created.
    pub recreate: bool,
    /// Creations in a row that the node refused for a reason of its own.
    pub refusals: u32,
    /// Nodes that refused the VM, and until when they are avoided.
    pub avoid: Vec<(String, Timestamp)>,
    /// Time before which no move is begun, because a move failed.
    pub unmovable_until: Option<Timestamp>,
}

impl Memo {
    /// Returns the nodes that must not be chosen now, including the present one when it refuses the VM.
    #[must_use]
    pub fn avoided(&self, vm: &MikromVM, now: Timestamp) -> Vec<String> {
        let here = vm.status.as_ref().map(|s| s.node_name.clone()).filter(|_| self.refusals > 0);
        self.avoid
            .iter()
            .filter(|(_, until)| now < *until)
            .map(|(node, _)| node.clone())
            .chain(here)
            .collect()
    }
}

/// Effects that this reconcile has had already.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AppliedSteps {
    /// The VM was created, or the agent answered that it exists.
    pub created: bool,
    /// The VM was created.
    pub made: bool,
    /// The VM was started.
    pub started: bool,
    /// The VM existed before it was started: this was a restart.
    pub restarted: bool,
    /// Power state that the VM was changed to.
    pub powered: Option<PowerState>,
    /// The VM was deleted.
    pub deleted: bool,
    /// The removal of a move's snapshots was attempted.
    pub discarded: bool,
}

impl AppliedSteps {
    /// Records that `step` was carried out for `vm`, or that its effect existed before.
    pub fn record(&mut self, step: &Step, vm: &MikromVM) {
        match step {
            Step::CreateVm(..) | Step::CreateStopped(..) => self.created = true,
            Step::StartVm(_) => {
                self.started = true;
                self.restarted = vm.is_provisioned();
            }
            Step::SetPowerState(_, state) => self.powered = Some(*state),
            Step::DeleteVm(_) => self.deleted = true,
            Step::DiscardSnapshots(..) => self.discarded = true,
            Step::Migrate(_)
            | Step::SaveSnapshot(..)
            | Step::CopySnapshot(..)
            | Step::RestoreVm(..)
            | Step::DeleteSnapshot(..) => {}
            Step::AddFinalizer | Step::Bind(_) | Step::StopVm(_) | Step::RemoveFinalizer { .. } => {}
        }
    }
}

/// Action that the cordon of its node requires for a VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Drain {
    /// Policy in the VM's annotation.
    pub policy: OnDrain,
    /// Node that the VM would move to, or the reason why it cannot move.
    pub target: Result<NodeBinding, String>,
}

/// One object and its surroundings at one moment.
#[derive(Clone, Debug)]
pub struct Observed<'a> {
    /// Object that is reconciled.
    pub vm: &'a MikromVM,
    /// Agent's answer.
    pub view: AgentView,
    /// Agent that was called; empty when the object is bound to none.
    pub agent: AgentAddress,
    /// Node and agent that the object is bound to.
    pub bound_to: NodeBinding,
    /// Node and agent that the object would be bound to now.
    pub candidate: Result<NodeBinding, BindingError>,
    /// Guest's inputs, or the reason why they cannot be resolved. Read when the plan may create the VM.
    pub inputs: Result<Arc<Inputs>, String>,
    /// Action that the cordon of the node requires; `None`: no action, or not yet.
    pub drain: Option<Drain>,
    /// Agents of source and target while the VM is being moved.
    pub migration_ends: Option<MigrationEnds>,
    /// UID of the cluster, if known.
    pub cluster: Option<String>,
    /// Memory of earlier reconciles.
    pub memo: Memo,
    /// Effects of this reconcile.
    pub progress: AppliedSteps,
    /// Current time.
    pub now: Timestamp,
    /// Times and counts.
    pub policy: &'a Policy,
}
