//! Demand of the cluster becomes VMs, and VMs are destroyed when their Machines are gone.

use std::time::Duration;

use coracle_api::agentpool::foreign::AGENT;
use coracle_testkit::{
    cluster,
    vcsim::{Act, Rule},
};
use coracle_vsphere::Vsphere as _;
use kube::api::ListParams;
use serde_json::json;

use crate::{
    sims::{Style, create, set},
    world::{POOL, Vcenter, World, within_limit},
};

const LONG: Duration = Duration::from_secs(500);

#[test]
fn hypershift_scales_from_0_to_20_to_5_to_0_and_vcenter_follows() {
    cluster::run_within(LONG, |cluster| async move {
        let Some(mut w) = World::real(cluster, &[]).await? else { return anyhow::Ok(()) };
        w.simulate(Style::Old);
        w.pool(|_| {}).await?;
        let operator = w.operator();
        w.scale(20).await?;
        w.until_rows(20, "Bound").await?;
        w.until_condition("CapacitySatisfied", "True", "Satisfied").await?;
        let vms = w.until_vms(20).await?;
        let rows = w.rows().await;
        for row in &rows {
            let vm = vms.iter().find(|vm| vm.name == row.name).unwrap();
            assert_eq!(
                (&row.bios_uuid, &row.mac_address),
                (&vm.uuid, &vm.mac),
                "what vSphere reports is recorded"
            );
            assert!(vm.annotation.ends_with(&row.owner_uid));
            let hostname = w.agents().get(&vm.uuid).await?.view.spec.hostname;
            assert_eq!(hostname.as_deref(), Some(row.name.as_str()), "the node is named as its VM");
        }
        assert_eq!(w.image.seen().downloads, 1, "twenty VMs share one upload");
        w.scale(5).await?;
        w.until_rows(5, "Bound").await?;
        let mut left: Vec<_> = w.until_vms(5).await?.into_iter().map(|vm| vm.name).collect();
        left.sort();
        assert_eq!(left, ["w-0", "w-1", "w-2", "w-3", "w-4"], "only VMs of deleted Machines go");
        w.scale(0).await?;
        w.until_rows(0, "").await?;
        w.until_vms(0).await?;
        let gone = async || {
            let agents = w.agents().list(&ListParams::default()).await.unwrap().items.len();
            let requests = w.requests().list(&ListParams::default()).await.unwrap().items.len();
            (agents + requests == 0).then_some(())
        };
        assert!(within_limit(gone).await.is_some(), "Agents and VsphereAgents go after their VMs");
        assert!(!w.dump_objects().await?.contains("SECRET-TOKEN"));
        let calls = w.vcenter.vcsim().calls()?;
        eprintln!("calls of the whole life: {calls:?}");
        assert!(calls["Login"] <= 2, "one session for the operator, one for the guests' eyes: {calls:?}");
        operator.stop().await
    });
}

#[test]
fn provider_reporting_on_agent_reserved_gets_vms() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::New);
        w.pool(|_| {}).await?;
        let _operator = w.operator();
        w.scale(3).await?;
        w.until_rows(3, "Bound").await
    });
}

#[test]
fn cleanup_policy_retain_keeps_vm_and_agent() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        w.pool(|p| p.spec.cleanup_policy = coracle_api::agentpool::CleanupPolicy::Retain).await?;
        let _operator = w.operator();
        w.scale(2).await?;
        w.until_rows(2, "Bound").await?;
        w.scale(0).await?;
        w.until_rows(2, "Released").await?;
        w.pools().delete(POOL, &Default::default()).await?;
        assert!(
            within_limit(async || w.pools().get_opt(POOL).await.unwrap().is_none().then_some(()))
                .await
                .is_some()
        );
        assert_eq!(w.vcenter.vms().await.len(), 2, "nothing is destroyed");
        assert_eq!(w.agents().list(&ListParams::default()).await?.items.len(), 2);
        anyhow::Ok(())
    });
}

#[test]
fn surplus_vm_is_deleted_only_without_waiting_requests() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        w.pool(|_| {}).await?;
        let operator = w.operator();
        w.scale(1).await?;
        w.until_rows(1, "Bound").await?;
        // A second Machine is created and deleted before its VM registers an Agent that the Machine could take.
        operator.kill().await;
        w.scale(2).await?;
        let _operator = w.operator();
        w.until_vms(2).await?;
        w.scale(1).await?;
        w.until_vms(1).await?;
        w.until_rows(1, "Bound").await
    });
}

#[test]
fn deleted_vm_is_recreated_unless_it_is_bound() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.pool(|_| {}).await?;
        let _operator = w.operator();
        w.scale(1).await?;
        sims_without_provider(&mut w, &["w-0"]).await?;
        w.until_reason("w-0", "VMCreated").await?;
        let first = w.until_vms(1).await?.remove(0);
        w.vcenter.fake().change_vm(&first.object.id, |vm| *vm = None);
        let second =
            within_limit(async || w.vcenter.vms().await.into_iter().find(|vm| vm.object != first.object))
                .await;
        let second = second.expect("a new VM");
        assert_eq!(second.uuid, first.uuid, "with the identity that belongs to its object");
        w.simulate(Style::Old);
        w.until_rows(1, "Bound").await?;
        w.vcenter.fake().change_vm(&second.object.id, |vm| *vm = None);
        w.until_reason("w-0", "VMNotFound").await?;
        assert!(w.vcenter.vms().await.is_empty(), "its Machine could not use a new one");
        anyhow::Ok(())
    });
}

/// Sets the conditions that a provider sets at first, without claiming Agents.
async fn sims_without_provider(w: &mut World, machines: &[&str]) -> anyhow::Result<()> {
    let (_, agent_machines, _) = crate::sims::apis(&w.client, &w.ns);
    for name in machines {
        let condition = json!({"type": "Ready", "status": "False", "reason": "NoSuitableAgents"});
        set(&agent_machines, name, json!({"status": {"conditions": [condition]}}), true).await?;
    }
    Ok(())
}

#[test]
fn machine_whose_vm_was_taken_gets_a_second_vm() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate_guests();
        w.pool(|_| {}).await?;
        let _operator = w.operator();
        w.scale(2).await?;
        sims_without_provider(&mut w, &["w-0"]).await?;
        let vm = w.until_vms(1).await?.remove(0);
        assert!(within_limit(async || w.agents().get_opt(&vm.uuid).await.unwrap()).await.is_some());
        // The Machine of w-1 claimed any Agent, before its selector was pinned to its own.
        let claim = json!({
            "metadata": {"labels": {"agentMachineRef": "w-1"}},
            "spec": {"approved": true, "clusterDeploymentName": {"name": "demo", "namespace": w.ns}},
        });
        set(&w.agents(), &vm.uuid, claim, false).await?;
        let (_, agent_machines, _) = crate::sims::apis(&w.client, &w.ns);
        let ready = json!({"status": {
            "agentRef": {"name": vm.uuid, "namespace": w.ns},
            "conditions": [{"type": "Ready", "status": "True", "reason": "AgentBound"}],
        }});
        set(&agent_machines, "w-1", ready, true).await?;
        w.simulate_provider(Style::Old);
        w.until_rows(2, "Bound").await?;
        let mut vms = w.until_vms(2).await?;
        vms.retain(|other| other.uuid != vm.uuid);
        assert!(vms[0].name.starts_with("w-0-demo-worker-"), "{}", vms[0].name);
        w.scale(0).await?;
        w.until_vms(0).await.map(drop)
    });
}

#[test]
fn existing_agents_are_adopted_as_rows_and_never_destroyed() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        let agent = json!({
            "metadata": {"name": "old", "labels": {
                "infraenvs.agent-install.openshift.io": "demo", "customer": "example", "agentMachineRef": "w-0",
            }},
            "spec": {"approved": true, "role": "worker", "hostname": "old-node"},
        });
        create(&w.client, &w.ns, &AGENT, agent).await?;
        w.pool(|_| {}).await?;
        let _operator = w.operator();
        w.until_rows(1, "Bound").await?;
        let row = w.rows().await.remove(0);
        assert_eq!((row.name.as_str(), row.source.as_str()), ("old-node", "DiscoveredAgent"));
        set(&w.agents(), "old", json!({"metadata": {"labels": {"agentMachineRef": null}}}), false).await?;
        w.until_rows(1, "Released").await?;
        assert!(w.agents().get_opt("old").await?.is_some());
        anyhow::Ok(())
    });
}

#[test]
fn vcenter_outage_and_lost_session_lose_no_vm() {
    cluster::run_within(LONG, |cluster| async move {
        let Some(mut w) = World::real(cluster, &[]).await? else { return anyhow::Ok(()) };
        w.simulate(Style::Old);
        w.pool(|_| {}).await?;
        let _operator = w.operator();
        w.scale(2).await?;
        w.until_rows(2, "Bound").await?;
        let vcsim = w.vcenter.vcsim();
        vcsim.expire_sessions()?;
        w.scale(4).await?;
        w.until_rows(4, "Bound").await?;
        // vCenter is down: every connection is cut.
        vcsim.rules(&[Rule::always("*", Act::Cut)])?;
        w.scale(6).await?;
        w.until_reason("w-5", "VMCreateFailed").await?;
        vcsim.rules(&[
            Rule::next("CreateVM_Task", 2, Act::CutAfter),
            Rule::next("PowerOnVM_Task", 2, Act::Status(503)),
        ])?;
        w.until_rows(6, "Bound").await?;
        let mut names: Vec<_> = w.until_vms(6).await?.into_iter().map(|vm| vm.name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 6, "no second VM for any");
        let Vcenter::Real(_, eyes) = &w.vcenter else { return Ok(()) };
        eyes.close().await;
        Ok(())
    });
}

#[test]
fn operator_failover_creates_no_duplicate_vm() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        w.pool(|_| {}).await?;
        let with = |identity: &str| {
            let mut config = w.config();
            let mut election = coracle_agentpool::election(&w.ns, identity);
            (election.lease, election.renew_deadline, election.retry) =
                (Duration::from_millis(1000), Duration::from_millis(700), Duration::from_millis(100));
            config.election = Some(election);
            crate::world::Operator::start(w.operators.clone(), config)
        };
        let (first, _second) = (with("first"), with("second"));
        w.scale(4).await?;
        // At least two VMs exist: they may be created faster than the test polls.
        within_limit(async || (w.vcenter.vms().await.len() >= 2).then_some(())).await.expect("two VMs");
        first.kill().await;
        w.until_rows(4, "Bound").await?;
        assert_eq!(w.vcenter.vms().await.len(), 4);
        let creates = w.vcenter.fake().calls().into_iter().filter(|c| *c == "CreateVM_Task").count();
        assert_eq!(creates, 4, "a stolen lease does not make a second VM");
        anyhow::Ok(())
    });
}
