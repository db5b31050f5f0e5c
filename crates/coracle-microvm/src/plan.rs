//! What is to be done about one MikromVM (`microvm.md` §2.1, §2.3). Pure: a snapshot comes in, data goes out.
//!
//! ```text
//!  no finalizer ─▶ Hold        unbound ─▶ Bind ─▶ Create ─▶ Start ─▶ (look again) ─▶ vmID, Running
//!  deleted ─▶ Stop ─▶ Delete ─▶ (look again: nothing) ─▶ Release
//! ```
//! The intent is stored before anything outside is touched: `Hold` before `Bind`, `Bind` before `Create`. After effects
//! the shell looks again and plans again, so what the status says was seen and not assumed.

use std::time::Duration;

use coracle_api::{MikromVM, PowerState, RestartPolicy, keys};
use coracle_reconcile::Backoff;
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt as _;

use crate::{
    agent::{AgentError, Machine, State},
    status::{self, Report},
};

/// Calls in a row without an answer from an address that nobody announces.
const UNKNOWN_SILENT_MAX: u32 = 2;

/// Times that decide something. All come from the configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// Backstop: a quiet object is looked at this often.
    pub resync: Duration,
    /// How long a node may be gone before it counts as lost.
    pub node_grace: Duration,
    /// Delay before a VM is started again.
    pub restart: Backoff,
    /// A VM that ran this long starts anew in `restart`.
    pub healthy_after: Duration,
    /// INTERNAL answers in a row to a create before the status says so.
    pub internal_max: u32,
    /// Calls in a row without an answer before the status says so.
    pub silent_max: u32,
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
        }
    }
}

/// Where a VM is, or is to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The node; empty when only an address is known.
    pub node: String,
    /// The agent's `host:port`.
    pub address: String,
}

/// What asking the agent brought.
#[derive(Clone, Debug, PartialEq)]
pub enum Look {
    /// There is no agent to ask: the object is bound to none.
    Nowhere,
    /// The agent answered: it knows this machine, or none.
    Seen(Option<Machine>),
    /// The agent refused the question.
    Refused(AgentError),
    /// Nobody answered, or not usefully.
    Silent {
        /// What went wrong.
        error: AgentError,
        /// The node is gone since then; `None`: it is there, or nobody knows which node it is.
        gone_since: Option<Timestamp>,
        /// Some node or Pod announces that agent.
        announced: bool,
    },
}

/// What this process remembers of an object between reconciles. Losing it costs at most a second try.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memo {
    /// Restarts since the VM was last healthy.
    pub streak: u32,
    /// Since when the VM is down.
    pub down_since: Option<Timestamp>,
    /// Calls in a row that nobody answered.
    pub silent: u32,
    /// INTERNAL in a row to a create.
    pub internal: u32,
    /// The agent cannot start this VM again: delete it and make it anew.
    pub recreate: bool,
}

/// What this reconcile has done already.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// The VM was created, or the agent said that it is there.
    pub created: bool,
    /// The VM was started.
    pub started: bool,
    /// It was down before: this was a restart.
    pub restarted: bool,
}

/// One object and the world around it, at one moment.
#[derive(Clone, Debug)]
pub struct Observed<'a> {
    /// The object.
    pub vm: &'a MikromVM,
    /// What the agent says.
    pub look: Look,
    /// Where the agent that was asked is.
    pub at: Place,
    /// Where the VM would go if it were bound now; why nowhere.
    pub place: Result<Place, String>,
    /// What we remember.
    pub memo: Memo,
    /// What we did a moment ago.
    pub progress: Progress,
    /// Now.
    pub now: Timestamp,
    /// Times.
    pub policy: &'a Policy,
}

/// One effect, with every choice in it.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Store the finalizer.
    Hold,
    /// Store where the VM goes, before anything is there.
    Bind(Place),
    /// Create (and with our agents boot) it.
    Create,
    /// Create it powered off.
    Lay,
    /// Start it.
    Start,
    /// Bring it into a power state.
    Power(PowerState),
    /// Stop it by force.
    Stop,
    /// Delete it.
    Delete,
    /// Remove the finalizer. With a reason: although the VM may still be somewhere.
    Release(Option<String>),
}

/// What to do, what to say, and when to come back.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Effects, in order.
    pub steps: Vec<Step>,
    /// What the status is to say when there are no effects. `None`: leave it byte for byte.
    pub report: Option<Report>,
    /// An answer that did not come: try again with backoff.
    pub retry: Option<AgentError>,
    /// Look again after this time.
    pub requeue: Duration,
    /// What to remember.
    pub memo: Memo,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Intent {
    /// Nothing is ours to do.
    Ignore,
    /// Hold it first.
    Adopt,
    /// It shall run.
    Keep,
    /// It shall go.
    Remove,
}

fn intent(vm: &MikromVM) -> Intent {
    let held = vm.finalizers().iter().any(|f| f == keys::MIKROMVM_FINALIZER);
    match (vm.metadata.deletion_timestamp.is_some(), held) {
        (true, false) => Intent::Ignore,
        (true, true) => Intent::Remove,
        (false, false) => Intent::Adopt,
        (false, true) => Intent::Keep,
    }
}

/// Decides.
#[must_use]
pub fn plan(o: &Observed<'_>) -> Plan {
    match intent(o.vm) {
        Intent::Ignore => Plan { requeue: o.policy.resync, ..act(o, vec![]) },
        Intent::Adopt => act(o, vec![Step::Hold]), // nothing outside exists before the finalizer is stored
        Intent::Keep => keep(o),
        Intent::Remove => remove(o),
    }
}

fn keep(o: &Observed<'_>) -> Plan {
    match &o.look {
        Look::Nowhere => bind(o),
        Look::Refused(error) => say(o, Report::Refused(error.clone())),
        Look::Seen(Some(machine)) if is_foreign(o.vm, machine) => {
            say(o, Report::Conflict(machine.uid.clone()))
        }
        Look::Seen(machine) if o.vm.is_provisioned() => running(o, machine.as_ref()),
        Look::Seen(machine) => provision(o, machine.as_ref()),
        Look::Silent { error, gone_since, announced } => silent(o, error, *gone_since, *announced),
    }
}

/// Not bound: store where it goes, then look there.
fn bind(o: &Observed<'_>) -> Plan {
    match &o.place {
        Ok(place) => act(o, vec![Step::Bind(place.clone())]),
        Err(why) => say(o, Report::Unschedulable(why.clone())),
    }
}

/// Bound, but its existence was never confirmed: the contract's order is create, then start, whoever created it.
fn provision(o: &Observed<'_>, machine: Option<&Machine>) -> Plan {
    let elsewhere =
        o.place.as_ref().ok().filter(|place| o.vm.spec.agent_address == place.address && moved(o.vm, place));
    match (machine, elsewhere) {
        (None, Some(place)) if !o.progress.created => act(o, vec![Step::Bind(place.clone())]), // corrected before anything was made
        (None, _) if o.progress.started => retry(o, vanished(o)),
        (None, _) if at_rest(o.vm) && !o.progress.created => act(o, vec![Step::Lay]),
        (None, _) if o.progress.created => act(o, vec![Step::Start]), // "already exists", says an agent that shows none
        (None, _) => act(o, vec![Step::Create, Step::Start]),
        (Some(_), _) if o.memo.recreate => recreate(o),
        (Some(machine), _) if at_rest(o.vm) => say(o, Report::Machine(machine.clone())),
        (Some(_), _) if !o.progress.started => act(o, vec![Step::Start]),
        (Some(machine), _) => say(o, Report::Machine(machine.clone())),
    }
}

/// Shall it begin powered off? A copy goes on where its snapshot was taken, whatever it shall do then.
fn at_rest(vm: &MikromVM) -> bool {
    vm.spec.power_state == Some(PowerState::Stopped) && vm.spec.clone_from.is_empty()
}

/// The agent cannot start a VM a second time: the same one is made anew.
fn recreate(o: &Observed<'_>) -> Plan {
    let memo = Memo { recreate: false, ..o.memo.clone() };
    Plan { memo, ..act(o, vec![Step::Delete, Step::Create, Step::Start]) }
}

/// It was confirmed before: the status follows the agent, and restarting is a policy.
fn running(o: &Observed<'_>, machine: Option<&Machine>) -> Plan {
    use State::{Creating, Deleting, Error, Running, Stopped, Stopping, Unspecified};
    let Some(machine) = machine else { return down(o, Report::Vanished, true) };
    let bedtime = bedtime(o);
    let wanted = wanted(o, machine, bedtime);
    match power(wanted, machine) {
        Power::To(state) => return act(o, vec![Step::Power(state)]),
        Power::AsWanted => return say(o, Report::Machine(machine.clone())),
        Power::Unsupported => {
            return say(o, Report::PowerFailed(format!("the agent cannot make it {}", wanted.as_str())));
        }
        Power::ByPolicy => {}
    }
    match machine.state {
        Running => {
            let memo = Memo { streak: o.memo.streak, ..Memo::default() };
            let said = say(o, Report::Machine(machine.clone()));
            let wait = bedtime.and_then(|at| Duration::try_from(at.duration_since(o.now)).ok());
            Plan { memo, requeue: wait.unwrap_or(said.requeue).min(said.requeue), ..said }
        }
        Creating | Stopping | Deleting | Unspecified => say(o, Report::Machine(machine.clone())),
        Stopped => down(o, Report::Machine(machine.clone()), false),
        Error => down(o, Report::Machine(machine.clone()), true),
    }
}

/// When it hibernates by itself: so long after it became Ready, where nobody says what it shall do.
fn bedtime(o: &Observed<'_>) -> Option<Timestamp> {
    let after: SignedDuration = o.vm.spec.hibernate_after.parse().ok()?; // empty: never
    let ready = status::ready_since(o.vm).filter(|_| o.vm.spec.power_state.is_none())?;
    Some(ready.saturating_add(after).unwrap_or(Timestamp::MAX))
}

/// The power state that it shall have now.
fn wanted(o: &Observed<'_>, machine: &Machine, bedtime: Option<Timestamp>) -> PowerState {
    let sleeps = machine.power == Some(PowerState::Hibernated) && !o.vm.spec.hibernate_after.is_empty();
    let by_itself = if sleeps || bedtime.is_some_and(|at| at <= o.now) {
        PowerState::Hibernated
    } else {
        PowerState::Running
    };
    o.vm.spec.power_state.unwrap_or(by_itself)
}

/// What a wanted power state asks of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Power {
    /// It is as it shall be, and stays.
    AsWanted,
    /// It is brought there, by way of running where it must.
    To(PowerState),
    /// Its agent has no way to.
    Unsupported,
    /// It shall be up: restartPolicy decides what becomes of one that is down.
    ByPolicy,
}

fn power(wanted: PowerState, machine: &Machine) -> Power {
    use PowerState::{Hibernated, Paused, Running, Stopped};
    let now = match (machine.power, machine.state) {
        (Some(power), State::Running | State::Stopped | State::Error) => power,
        (None, State::Running) => Running,
        (None, State::Stopped | State::Error) => Stopped,
        _ => return Power::ByPolicy, // on its way
    };
    match (wanted, now) {
        (Running, Paused | Hibernated) | (Paused, Hibernated) => Power::To(Running),
        (Running, Running) => Power::ByPolicy,
        (Running | Paused | Hibernated, Stopped) => Power::ByPolicy,
        (Stopped, Running | Paused) => Power::To(Stopped),
        (Paused, Running) | (Hibernated, Running | Paused) if machine.power.is_some() => Power::To(wanted),
        (Paused, Running) | (Hibernated, Running | Paused) => Power::Unsupported,
        _ => Power::AsWanted,
    }
}

/// Down without having been asked to: say so, and start it again when policy and backoff allow.
fn down(o: &Observed<'_>, report: Report, failed: bool) -> Plan {
    let wanted = match o.vm.spec.restart_policy {
        RestartPolicy::Always => true,
        RestartPolicy::OnFailure => failed,
        RestartPolicy::Never => false,
    };
    if !wanted {
        return say(o, report);
    }
    let since = o.memo.down_since.unwrap_or(o.now);
    let streak = if was_healthy(o) { 0 } else { o.memo.streak };
    let memo = Memo { down_since: Some(since), streak, ..o.memo.clone() };
    let due = add(since, o.policy.restart.delay(streak));
    if o.memo.recreate {
        return recreate(o);
    }
    if o.now < due {
        let wait = Duration::try_from(due.duration_since(o.now)).unwrap_or_default();
        return Plan { requeue: wait.min(o.policy.resync), memo, ..say(o, report) };
    }
    let steps = match (&o.look, o.progress.created) {
        (Look::Seen(None), false) => vec![Step::Create, Step::Start],
        _ => vec![Step::Start],
    };
    Plan { memo: Memo { streak: streak.saturating_add(1), ..memo }, ..act(o, steps) }
}

/// Noticed only now, after a long healthy time.
fn was_healthy(o: &Observed<'_>) -> bool {
    let ready = status::ready_since(o.vm);
    o.memo.down_since.is_none() && ready.is_some_and(|since| o.now >= add(since, o.policy.healthy_after))
}

fn silent(o: &Observed<'_>, error: &AgentError, gone_since: Option<Timestamp>, announced: bool) -> Plan {
    if error.is_busy() {
        return retry(o, error.clone()); // it says nothing of the agent
    }
    let memo = Memo { silent: o.memo.silent.saturating_add(1), ..o.memo.clone() };
    let corrected = o.place.as_ref().ok().filter(|p| o.vm.spec.agent_address == p.address && moved(o.vm, p));
    if let (Some(place), false, false) = (corrected, o.vm.is_provisioned(), announced) {
        return act(o, vec![Step::Bind(place.clone())]); // a mistyped address, where nobody ever answered
    }
    if is_lost(o, gone_since) {
        let movable = o.vm.spec.agent_address.is_empty()
            && o.vm.spec.node_name.is_empty()
            && !o.vm.spec.image.is_empty() // the root disk can be made again from it
            && o.vm.spec.restart_policy != RestartPolicy::Never;
        return match (&o.place, movable) {
            (Ok(place), true) if moved(o.vm, place) => {
                Plan { memo, ..act(o, vec![Step::Bind(place.clone())]) }
            }
            (Err(why), true) => Plan { memo, ..say(o, Report::NodeLost(why.clone())) },
            _ => Plan { memo, ..say(o, Report::NodeLost("the VM is tied to it".into())) },
        };
    }
    // An address that no node announces, and where nothing was ever made, is likely mistyped: said sooner.
    let enough = if announced || o.vm.is_provisioned() { o.policy.silent_max } else { UNKNOWN_SILENT_MAX };
    let report = (error.is_silence() && memo.silent >= enough.min(o.policy.silent_max))
        .then(|| Report::Unreachable(error.clone()));
    Plan { report, memo, ..retry(o, error.clone()) }
}

fn remove(o: &Observed<'_>) -> Plan {
    let bound = o.vm.status.as_ref().is_some_and(|s| !s.agent_address.is_empty());
    match &o.look {
        Look::Nowhere | Look::Seen(None) => act(o, vec![Step::Release(None)]), // a pass has seen that nothing is left
        Look::Seen(Some(machine)) if is_foreign(o.vm, machine) => act(o, vec![Step::Release(None)]),
        Look::Seen(Some(_)) => act(o, vec![Step::Stop, Step::Delete]),
        Look::Refused(error) | Look::Silent { error, .. } if is_abandoned(o.vm) => {
            act(o, vec![Step::Release(Some(format!("abandoned as asked: {error}")))])
        }
        Look::Refused(error) => say(o, Report::Refused(error.clone())),
        Look::Silent { error, .. } if error.is_busy() => retry(o, error.clone()),
        Look::Silent { error, .. } if !bound => {
            // Never bound by us, so nothing of ours can be there; the address was the user's word alone.
            act(o, vec![Step::Release(Some(format!("never created: {error}")))])
        }
        Look::Silent { error, gone_since, .. } => {
            if is_lost(o, *gone_since) {
                return act(o, vec![Step::Release(Some("its node is gone".into()))]);
            }
            let memo = Memo { silent: o.memo.silent.saturating_add(1), ..o.memo.clone() };
            let report = (memo.silent >= o.policy.silent_max).then(|| Report::Unreachable(error.clone()));
            Plan { report, memo, ..retry(o, error.clone()) }
        }
    }
}

fn is_lost(o: &Observed<'_>, gone_since: Option<Timestamp>) -> bool {
    gone_since.is_some_and(|since| o.now >= add(since, o.policy.node_grace))
}

fn is_abandoned(vm: &MikromVM) -> bool {
    vm.annotations().get(keys::ABANDON).is_some_and(|v| v == "true")
}

/// Made for another object. A VM without a UID is of an older operator, and ours by its name.
fn is_foreign(vm: &MikromVM, machine: &Machine) -> bool {
    machine.uid.is_some() && machine.uid != vm.uid()
}

fn moved(vm: &MikromVM, place: &Place) -> bool {
    vm.status.as_ref().is_none_or(|s| s.agent_address != place.address || s.node_name != place.node)
}

fn vanished(o: &Observed<'_>) -> AgentError {
    let address = o.vm.status.as_ref().map(|s| s.agent_address.clone()).unwrap_or_default();
    let message = format!("VM {} is not there although it was started", o.vm.vm_id());
    AgentError { operation: "GetVM", address, code: tonic::Code::Aborted, message, failure: String::new() }
}

fn add(t: Timestamp, by: Duration) -> Timestamp {
    t.saturating_add(SignedDuration::try_from(by).unwrap_or(SignedDuration::MAX)).unwrap_or(Timestamp::MAX)
}

fn act(o: &Observed<'_>, steps: Vec<Step>) -> Plan {
    Plan { steps, report: None, retry: None, requeue: o.policy.resync, memo: o.memo.clone() }
}

fn say(o: &Observed<'_>, report: Report) -> Plan {
    let memo = Memo { silent: 0, ..o.memo.clone() };
    Plan { report: Some(report), memo, ..act(o, vec![]) }
}

fn retry(o: &Observed<'_>, error: AgentError) -> Plan {
    Plan { retry: Some(error), ..act(o, vec![]) }
}

/// What becomes of the plan when a step's call failed.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// What the status is to say; `None`: leave it.
    pub report: Option<Report>,
    /// Look again at once instead of failing.
    pub again: bool,
    /// What to remember.
    pub memo: Memo,
}

/// Judges the failure of `step`.
#[must_use]
pub fn judge(step: &Step, error: &AgentError, memo: &Memo, policy: &Policy) -> Verdict {
    let memo = memo.clone();
    let quiet = Verdict { report: None, again: false, memo: memo.clone() };
    match (step, error.code) {
        (Step::Create | Step::Lay, tonic::Code::AlreadyExists) => Verdict { again: true, ..quiet },
        (Step::Start, _) if error.must_recreate() => {
            Verdict { again: true, memo: Memo { recreate: true, ..memo }, ..quiet }
        }
        (Step::Start, tonic::Code::NotFound) => quiet,
        // The VM does what it did; its phase says so.
        (Step::Power(_), _) if !error.is_silence() => {
            Verdict { report: Some(Report::PowerFailed(error.to_string())), again: false, memo }
        }
        // Agents of ours say at once what a person can mend; it is tried again all the same.
        (Step::Create | Step::Lay | Step::Start, _) if error.is_transient() && error.is_explained() => {
            Verdict {
                report: Some(Report::Waiting(error.clone())),
                again: false,
                memo: Memo { silent: 0, internal: 0, ..memo },
            }
        }
        (Step::Create | Step::Lay, tonic::Code::Internal) => {
            let internal = memo.internal.saturating_add(1);
            let report = (internal >= policy.internal_max).then(|| Report::Internal(error.clone()));
            Verdict { report, memo: Memo { internal, ..memo }, again: false }
        }
        _ if error.is_transient() => {
            let silent = if error.is_silence() { memo.silent.saturating_add(1) } else { memo.silent };
            let report = (error.is_silence() && silent >= policy.silent_max)
                .then(|| Report::Unreachable(error.clone()));
            Verdict { report, memo: Memo { silent, internal: 0, ..memo }, again: false }
        }
        _ => Verdict {
            report: Some(Report::Refused(error.clone())),
            memo: Memo { internal: 0, ..memo },
            again: false,
        },
    }
}

#[cfg(test)]
mod tests;
