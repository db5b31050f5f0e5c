//! What a reconcile knows when it plans: one object and its surroundings at one moment.

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
    /// A VM that ran this long restarts with the first delay of `restart`.
    pub healthy_after: Duration,
    /// INTERNAL answers in a row to a creation before the status reports them.
    pub internal_max: u32,
    /// Calls in a row without an answer before the status reports it.
    pub silent_max: u32,
    /// Refusals in a row by a node before a VM that never existed there goes to another one.
    pub refusals_max: u32,
    /// How long a VM is not placed again on a node that refused it.
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
    /// True when a node that is gone since then counts as lost.
    #[must_use]
    pub fn is_lost(&self, gone_since: Timestamp, now: Timestamp) -> bool {
        let grace = SignedDuration::try_from(self.node_grace).unwrap_or(SignedDuration::MAX);
        now >= gone_since.saturating_add(grace).unwrap_or(Timestamp::MAX)
    }
}

/// Why an object cannot be bound to a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindingError {
    /// No node accepts the VM; why.
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
    /// The agent answered: this VM, or none with that id.
    Answered(Option<VmInfo>),
    /// The agent refused the call.
    Refused(AgentError),
    /// The call failed, and may succeed later.
    Unreachable {
        /// Error of the call.
        error: AgentError,
        /// The node is gone since then; `None`: it is there, or its name is unknown.
        gone_since: Option<Timestamp>,
        /// A node or Pod announces that agent.
        announced: bool,
    },
}

/// What this process remembers of an object between reconciles. After a loss it is learned again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memo {
    /// Restarts since the VM was last healthy.
    pub streak: u32,
    /// Since when the VM is down.
    pub down_since: Option<Timestamp>,
    /// Calls in a row without an answer.
    pub silent: u32,
    /// INTERNAL answers in a row to a creation.
    pub internal: u32,
    /// The agent cannot start this VM again: it must be deleted and created.
    pub recreate: bool,
    /// Creations in a row that the node refused for a reason of its own.
    pub refusals: u32,
    /// Nodes that refused the VM, and until when they are avoided.
    pub avoid: Vec<(String, Timestamp)>,
    /// A move failed: none is begun before then.
    pub unmovable_until: Option<Timestamp>,
}

impl Memo {
    /// Nodes that must not be chosen now, the present one included when it refuses the VM.
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

/// Effects that this reconcile had already.
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
    /// Power state that the VM was brought into.
    pub powered: Option<PowerState>,
    /// The VM was deleted.
    pub deleted: bool,
    /// Removing what a move left was tried.
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

/// What the cordon of its node requires of a VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Drain {
    /// The VM's annotation.
    pub policy: OnDrain,
    /// Where the VM would move; why nowhere.
    pub target: Result<NodeBinding, String>,
}

/// One object and its surroundings at one moment.
#[derive(Clone, Debug)]
pub struct Observed<'a> {
    /// The object.
    pub vm: &'a MikromVM,
    /// The agent's answer.
    pub view: AgentView,
    /// Agent that was asked; empty when the object is bound to none.
    pub agent: AgentAddress,
    /// Node and agent that the object is bound to.
    pub bound_to: NodeBinding,
    /// Node and agent that it would be bound to now.
    pub candidate: Result<NodeBinding, BindingError>,
    /// What the guest is given; why it cannot be. Read where the plan may create the VM.
    pub inputs: Result<Arc<Inputs>, String>,
    /// What the cordon of its node requires; `None`: nothing, or not yet.
    pub drain: Option<Drain>,
    /// The agents of its move, while it is moved.
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
