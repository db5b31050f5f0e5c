//! The status of a set. Pure.

use coracle_api::CocoonSet;
use coracle_api::cocoon::{AgentStatus, CocoonSetStatus, ConnType, Role, SetPhase, ToolboxStatus};
use coracle_reconcile::{Desired, merge};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

use super::members::{Member, Members};

/// Condition type: all members are ready.
const READY: &str = "Ready";
/// Condition type: the set has not reached its desired state.
const PROGRESSING: &str = "Progressing";

/// Derives the status of `set` from its pods.
pub(crate) fn derive(
    set: &CocoonSet,
    pods: &[Pod],
    phase: SetPhase,
    problems: &[String],
    now: Timestamp,
) -> CocoonSetStatus {
    let members = Members::sort(pods);
    let agents: Vec<_> = members.main.iter().map(|main| (0, main)).collect();
    let agents: Vec<_> =
        agents.into_iter().chain(members.subs.iter().map(|(slot, sub)| (*slot, sub))).collect();
    let desired = set.spec.desired_agents();
    let is_wanted = |slot: u32| i32::try_from(slot).is_ok_and(|slot| slot < desired);
    let ready = count(agents.iter().filter(|(slot, member)| is_wanted(*slot) && member.is_ready()));
    let toolboxes = &set.spec.toolboxes;
    let ready_toolboxes = count(
        toolboxes.iter().filter(|toolbox| members.toolboxes.get(&toolbox.name).is_some_and(Member::is_ready)),
    );
    let desired_toolboxes = count(toolboxes.iter());
    let mut message = format!("{ready}/{desired} agents ready");
    if desired_toolboxes > 0 {
        message += &format!(", {ready_toolboxes}/{desired_toolboxes} toolboxes ready");
    }
    problems.iter().for_each(|problem| message += &format!("; {problem}"));
    let is_ready = ready == desired && ready_toolboxes == desired_toolboxes && problems.is_empty();
    let is_stable = matches!(phase, SetPhase::Running | SetPhase::Suspended | SetPhase::Failed);
    let wanted = [
        Desired {
            kind: READY,
            status: Some(is_ready),
            reason: if is_ready { "AllAgentsReady" } else { "AgentsNotReady" },
            message,
        },
        Desired {
            kind: PROGRESSING,
            status: Some(!is_stable),
            reason: if is_stable { "Stable" } else { "Reconciling" },
            message: phase.as_str().to_owned(),
        },
    ];
    let stored = set.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    CocoonSetStatus {
        observed_generation: set.metadata.generation,
        phase: Some(phase),
        ready_agents: ready,
        desired_agents: desired,
        ready_toolboxes: (desired_toolboxes > 0).then_some(ready_toolboxes),
        desired_toolboxes: (desired_toolboxes > 0).then_some(desired_toolboxes),
        agents: agents.iter().map(|(slot, member)| agent(*slot, member)).collect(),
        toolboxes: members.toolboxes.iter().map(|(name, member)| toolbox(name, member)).collect(),
        conditions: merge(stored, &wanted, set.metadata.generation, now),
    }
}

fn count(all: impl Iterator) -> i32 {
    i32::try_from(all.count()).unwrap_or(i32::MAX)
}

fn agent(slot: u32, member: &Member<'_>) -> AgentStatus {
    let role = if slot == 0 { Role::Main } else { Role::SubAgent };
    AgentStatus {
        slot: i32::try_from(slot).unwrap_or(i32::MAX),
        role: role.as_str().to_owned(),
        pod_name: member.id().name,
        vm_name: member.spec.vm_name.clone(),
        vm_id: member.runtime.id.clone(),
        ip: member.runtime.ip.clone(),
        phase: member.phase().to_owned(),
        forked_from: member.spec.fork_from.clone(),
    }
}

fn toolbox(name: &str, member: &Member<'_>) -> ToolboxStatus {
    let vnc_port = member.runtime.vnc_port;
    let conn_type = ConnType::infer(member.spec.conn_type, vnc_port.is_some(), member.spec.os);
    ToolboxStatus {
        name: name.to_owned(),
        pod_name: member.id().name,
        vm_name: member.spec.vm_name.clone(),
        vm_id: member.runtime.id.clone(),
        ip: member.runtime.ip.clone(),
        phase: member.phase().to_owned(),
        conn_type: conn_type.as_str().to_owned(),
        vnc_port: vnc_port.map(i32::from),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::set::testing::{pods_of, set_with};

    #[test]
    fn status_counts_desired_and_ready_agents() {
        let tool = json!({"name": "win", "mode": "static", "staticIP": "10.0.0.9", "staticVMID": "vm-9", "os": "windows",
            "vncPort": 5900});
        let set = set_with(json!({"agent": {"image": "u", "replicas": 1}, "toolboxes": [tool]}));
        let pods = pods_of(&set, "0=ready 1=new 2=ready win=ready");
        let status = derive(&set, &pods, SetPhase::Scaling, &["why".into()], Timestamp::UNIX_EPOCH);
        assert_eq!((status.ready_agents, status.desired_agents), (1, 2), "slot 2 is not wanted");
        assert_eq!((status.ready_toolboxes, status.desired_toolboxes), (Some(1), Some(1)));
        assert_eq!(status.agents.len(), 3);
        assert_eq!(
            (status.agents[1].forked_from.as_str(), status.agents[1].role.as_str()),
            ("vk-prod-demo-0", "sub-agent")
        );
        assert_eq!(
            (status.toolboxes[0].conn_type.as_str(), status.toolboxes[0].vnc_port),
            ("vnc", Some(5900))
        );
        let shown: Vec<_> = status
            .conditions
            .iter()
            .map(|c| format!("{} {} {} {}", c.type_, c.status, c.reason, c.message))
            .collect();
        assert_eq!(
            shown,
            [
                "Progressing True Reconciling Scaling",
                "Ready False AgentsNotReady 1/2 agents ready, 1/1 toolboxes ready; why"
            ]
        );
    }

    #[test]
    fn ready_set_is_stable() {
        let set = set_with(json!({"agent": {"image": "u"}}));
        let status = derive(&set, &pods_of(&set, "0=ready"), SetPhase::Running, &[], Timestamp::UNIX_EPOCH);
        let shown: Vec<_> = status.conditions.iter().map(|c| format!("{} {}", c.status, c.message)).collect();
        assert_eq!(shown, ["False Running", "True 1/1 agents ready"]);
        assert_eq!(status.ready_toolboxes, None);
    }
}
