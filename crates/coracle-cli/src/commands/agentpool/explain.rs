//! `coracle agentpool explain`: for each object in an unexpected state, the cause and what to do.

use std::fmt::Write;

use coracle_agentpool::demand;
use coracle_api::VsphereAgent;
use coracle_api::agentpool::{OwnedVm, names::phase};
use kube::ResourceExt;
use serde::Serialize;
use serde_json::json;

use super::{Facts, document};
use crate::cli::Format;
use crate::error::{Failure, printable};
use crate::{output, view};

/// Explanation of one object: its state, the cause, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Explanation {
    about: String,
    state: String,
    since: String,
    cause: String,
    fix: String,
}

pub(super) fn run(facts: &Facts, format: &Format, now: jiff::Timestamp) -> Result<(), Failure> {
    let explanations = explanations(facts, now);
    match format {
        Format::Table | Format::Wide => output::write(&text(facts, &explanations)),
        Format::Name => {
            output::write(&explanations.iter().map(|w| format!("{}\n", w.about)).collect::<String>())
        }
        Format::Json | Format::Yaml | Format::JsonPath(_) => output::document(
            format,
            &document(&facts.pool, "AgentPoolExplanation", json!({"items": explanations})),
        ),
    }
}

/// Returns all explanations, the pool first. Pure.
fn explanations(facts: &Facts, now: jiff::Timestamp) -> Vec<Explanation> {
    let status = facts.pool.status.clone().unwrap_or_default();
    let mut all = Vec::new();
    for c in status.conditions.iter().filter(|c| c.status == "False") {
        let (cause, fix) = (c.message.clone(), of_pool(&c.type_, &c.reason));
        let since = view::age(Some(&c.last_transition_time.0.to_string()), now);
        let state = format!("{} False, {}", c.type_, c.reason);
        let about = format!("pool/{}", facts.pool.name_any());
        all.push(Explanation { about, state, since, cause, fix: fix.to_owned() });
    }
    for row in &status.owned_vms {
        let request = facts.requests.iter().find(|r| vm_of(r) == row.name);
        all.push(of_row(row, request, now));
    }
    for am in facts.agent_machines.iter().flatten().filter(|am| demand::is_waiting(am)) {
        if !facts.requests.iter().any(|r| demand::serves(r, am)) {
            all.push(Explanation {
                about: format!("agentmachine/{}", am.name_any()),
                state: "waits for an Agent".to_owned(),
                since: "-".to_owned(),
                cause: "no VsphereAgent was made for it yet".to_owned(),
                fix: "see that the operator runs and leads, and that one pool alone serves its NodePool"
                    .to_owned(),
            });
        }
    }
    all
}

fn vm_of(request: &VsphereAgent) -> String {
    request.vm().map_or_else(|| coracle_agentpool::identity::vm_name(request), |vm| vm.name.clone())
}

/// Explains what a VM waits for, or what is wrong with it.
fn of_row(row: &OwnedVm, request: Option<&VsphereAgent>, now: jiff::Timestamp) -> Explanation {
    let conditions = request.and_then(|r| r.status.as_ref()).map(|s| s.conditions.as_slice());
    let ready = conditions.unwrap_or_default().iter().find(|c| c.type_ == "Ready");
    let since = row.last_transition_time.as_ref().map(|t| t.0.to_string());
    let (cause, fix) = match ready.filter(|c| c.status == "False") {
        Some(c) => (format!("{}: {}", c.reason, c.message), of_request(&c.reason)),
        None => of_phase(row),
    };
    Explanation {
        about: format!("vm/{}", row.name),
        state: format!("{}, {}", row.phase, row.reason),
        since: view::age(since.as_deref(), now),
        cause,
        fix: fix.to_owned(),
    }
}

fn of_phase(row: &OwnedVm) -> (String, &'static str) {
    let name = |r: &Option<k8s_openapi::api::core::v1::ObjectReference>| {
        r.as_ref().and_then(|r| r.name.clone()).unwrap_or_else(|| "-".to_owned())
    };
    let (agent, machine) = (name(&row.agent_ref), name(&row.machine_ref));
    match (row.phase.as_str(), row.reason.as_str()) {
        (phase::PROVISIONING, "VMCreatePending") => ("its VM is being made".into(), ""),
        (phase::PROVISIONING, _) => (
            "its VM runs and no Agent has registered yet".into(),
            "look at the VM's console: it must reach the image service and Assisted Installer",
        ),
        (phase::AVAILABLE, _) => {
            (format!("Agent {agent} is free"), "the Agent provider binds it once a Machine waits")
        }
        (phase::BOUND, _) => (format!("Agent {agent} is Machine {machine}"), ""),
        (phase::RELEASED, "MachineDeleted") => ("its Machine is gone: its VM goes".into(), ""),
        (phase::RELEASED, "MachineDeleting") => {
            (format!("Machine {machine} is being deleted; the VM goes after it"), "")
        }
        (phase::RELEASED, _) => (
            format!("Agent {agent} was given back, and Machine {machine} was not seen going"),
            "delete the VsphereAgent if nothing is to bind it again",
        ),
        (phase::ORPHANED, "AgentDiscoveryExpired") => (
            "no Agent registered in time".into(),
            "it is destroyed after the grace; look at its console for why it did not register",
        ),
        (phase::ORPHANED, _) => {
            ("its Agent vanished".into(), "it is destroyed after the grace, once its Machine is absent")
        }
        _ => (String::new(), ""),
    }
}

/// Returns what to do about a VsphereAgent that is not Ready.
fn of_request(reason: &str) -> &'static str {
    match reason {
        "PoolNotFound" => "make the pool again, or delete the VsphereAgent",
        "InfraEnvUnavailable" => "wait until the InfraEnv's image is made, or put the InfraEnv right",
        "ProviderUnavailable" => "put the Secret right, or see that vCenter answers; it is tried again",
        "ISORefreshFailed" => {
            "see that the operator reaches the image service and the ISO datastore has room; it is tried again"
        }
        "VMCreateFailed" => "change what the message names, in the pool or in vSphere; it is tried again",
        "AdoptedVMUnavailable" => "the VM must be in the pool's directory under its name",
        "VMNotFound" => "delete its Machine: a new VM could not be the node that is gone",
        "VMStatusFailed" => "see that vCenter answers; it is tried again",
        "VMOwnershipMismatch" => {
            "it is left alone: rename or remove the other VM, or annotate the VsphereAgent with \
             coracle.dev/claim-vm=<BIOS UUID>"
        }
        _ => "",
    }
}

/// Returns what to do about a condition of a pool.
fn of_pool(kind: &str, reason: &str) -> &'static str {
    match (kind, reason) {
        ("CapacitySatisfied", _) => "VMs are being made; what holds them up is below",
        ("InfraEnvAvailable", _) | (_, "InfraEnvUnavailable") => of_request("InfraEnvUnavailable"),
        ("VsphereReady", _) => "what vCenter refused is below",
        ("ISOReady", _) => of_request("ISORefreshFailed"),
        (_, "ApplyFailed") => "see that the operator may write what the message names; it is tried again",
        _ => "",
    }
}

/// Renders the explanations as text. Pure.
fn text(facts: &Facts, explanations: &[Explanation]) -> String {
    let mut text = String::new();
    for item in explanations {
        let _strings_take_everything =
            writeln!(text, "{} ({}): {}", printable(&item.about), item.since, printable(&item.state));
        for (label, said) in [("cause", &item.cause), ("fix", &item.fix)] {
            if !said.is_empty() {
                let _strings_take_everything = writeln!(text, "  {label:<6} {}", printable(said));
            }
        }
    }
    if facts.agent_machines.is_none() {
        let ns = &facts.pool.spec.control_plane_namespace;
        let _strings_take_everything =
            writeln!(text, "AgentMachines of namespace {ns} cannot be read: what waits is not shown");
    }
    if text.is_empty() {
        text.push_str("nothing is asked for, and nothing is there\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::tests::{facts, now};
    use super::*;

    #[test]
    fn golden_explanation_of_a_pool_in_trouble() {
        let facts = facts();
        insta::assert_snapshot!("explanation", text(&facts, &explanations(&facts, now())));
    }

    #[test]
    fn unreadable_agent_machines_are_reported_in_explain() {
        let mut facts = facts();
        facts.agent_machines = None;
        facts.requests.clear();
        facts.pool.status = None;
        let said = text(&facts, &explanations(&facts, now()));
        assert_eq!(said, "AgentMachines of namespace demo-demo cannot be read: what waits is not shown\n");
    }

    #[test]
    fn documented_failure_reasons_have_a_fix() {
        for reason in [
            "PoolNotFound",
            "InfraEnvUnavailable",
            "ProviderUnavailable",
            "ISORefreshFailed",
            "VMCreateFailed",
            "AdoptedVMUnavailable",
            "VMNotFound",
            "VMStatusFailed",
            "VMOwnershipMismatch",
        ] {
            assert!(!of_request(reason).is_empty(), "{reason}");
        }
    }
}
