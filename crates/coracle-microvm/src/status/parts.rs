//! Conditions that Ready depends on: the progress of a VM. Pure.

use coracle_api::{
    condition::{AGENT_REACHABLE, IMAGE_READY, SCHEDULED},
    reason,
};
use coracle_reconcile::Desired;

use super::Finding;
use crate::{
    agent::{AgentError, State, VmInfo},
    step::NodeBinding,
};

/// Returns the conditions that a finding affects; the others stay.
pub(super) fn parts(finding: &Finding, bound_to: &NodeBinding) -> Vec<Desired> {
    let node = if bound_to.node.is_empty() { &bound_to.address } else { &bound_to.node };
    let bound = || true_condition(SCHEDULED, reason::BOUND, format!("bound to node {node}"));
    let answers = || true_condition(AGENT_REACHABLE, reason::ANSWERS, format!("node {node} answers"));
    match finding {
        Finding::Creating => {
            vec![bound(), unknown_condition(IMAGE_READY), unknown_condition(AGENT_REACHABLE)]
        }
        Finding::Unschedulable(why) => vec![false_condition(SCHEDULED, reason::UNSCHEDULABLE, why.clone())],
        Finding::NotAllowed(_) => {
            vec![false_condition(SCHEDULED, reason::AGENT_NOT_ALLOWED, "its agent is not allowed".to_owned())]
        }
        Finding::Vm(info) | Finding::Drained(info) | Finding::DrainBlocked(info, _) => {
            let pulled = has_image(info)
                .then(|| true_condition(IMAGE_READY, reason::PULLED, "the node has the image".into()));
            [bound(), answers()].into_iter().chain(pulled).collect()
        }
        Finding::Refused(error) | Finding::Waiting(error) if error.is_of_image() => {
            vec![
                bound(),
                answers(),
                false_condition(IMAGE_READY, reason::IMAGE_PULL_FAILED, failure_summary(error)),
            ]
        }
        Finding::Refused(_) | Finding::Waiting(_) | Finding::Internal(_) | Finding::PowerFailed(_) => {
            vec![bound(), answers()]
        }
        Finding::Vanished | Finding::Conflict(_) | Finding::MoveFailed(_) => vec![bound(), answers()],
        // The error of the transport would expose the operator's network to the user.
        Finding::Unreachable(_) => {
            vec![false_condition(
                AGENT_REACHABLE,
                reason::AGENT_UNREACHABLE,
                format!("node {node} does not answer"),
            )]
        }
        Finding::NodeLost(_) => {
            vec![false_condition(AGENT_REACHABLE, reason::NODE_LOST, format!("node {node} is gone"))]
        }
        Finding::ConfigError(_) => vec![],
    }
}

/// True for a VM that was created from its image.
fn has_image(info: &VmInfo) -> bool {
    !info.image_digest.is_empty() || info.state == State::Running
}

/// Returns the failure without its text, which may vary from call to call.
fn failure_summary(error: &AgentError) -> String {
    format!("the node cannot pull or use the image ({})", error.failure)
}

fn true_condition(kind: &'static str, reason: &'static str, message: String) -> Desired {
    Desired { kind, status: Some(true), reason, message }
}

fn false_condition(kind: &'static str, reason: &'static str, message: String) -> Desired {
    Desired { kind, status: Some(false), reason, message }
}

fn unknown_condition(kind: &'static str) -> Desired {
    Desired { kind, status: None, reason: reason::WAITING, message: "the node was not asked yet".to_owned() }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crate::agent::Origin;

    fn error(failure: &str) -> AgentError {
        AgentError {
            operation: "CreateVM",
            address: "a:1".into(),
            code: Code::FailedPrecondition,
            message: "no".into(),
            failure: failure.into(),
            origin: Origin::Agent,
        }
    }

    #[test]
    fn part_table() {
        let vm = |state, digest: &str| {
            Finding::Vm(VmInfo { state, image_digest: digest.into(), ..VmInfo::default() })
        };
        for (why, finding, want) in [
            ("bound, not asked yet", Finding::Creating, "Scheduled=T ImageReady=? AgentReachable=?"),
            ("no node fits", Finding::Unschedulable("full".into()), "Scheduled=F"),
            ("an agent that is not allowed", Finding::NotAllowed("x:1".into()), "Scheduled=F"),
            ("a VM that runs", vm(State::Running, ""), "Scheduled=T AgentReachable=T ImageReady=T"),
            ("a VM that is being made", vm(State::Creating, ""), "Scheduled=T AgentReachable=T"),
            (
                "a VM with an image",
                vm(State::Stopped, "sha256:1"),
                "Scheduled=T AgentReachable=T ImageReady=T",
            ),
            (
                "no such image",
                Finding::Refused(error("COR-IMG-004")),
                "Scheduled=T AgentReachable=T ImageReady=F",
            ),
            (
                "no such image yet",
                Finding::Waiting(error("COR-IMG-004")),
                "Scheduled=T AgentReachable=T ImageReady=F",
            ),
            ("another refusal", Finding::Refused(error("")), "Scheduled=T AgentReachable=T"),
            ("silence", Finding::Unreachable(error("")), "AgentReachable=F"),
            ("a lost node", Finding::NodeLost("tied".into()), "AgentReachable=F"),
            ("a Secret is missing", Finding::ConfigError("x".into()), ""),
        ] {
            let bound_to = NodeBinding { node: "n1".into(), address: "a:1".into() };
            let short = |part: &Desired| {
                let status = part.status.map_or("?", |yes| if yes { "T" } else { "F" });
                format!("{}={status}", part.kind)
            };
            let found = parts(&finding, &bound_to).iter().map(short).collect::<Vec<_>>().join(" ");
            assert_eq!(found, want, "{why}");
        }
    }
}
