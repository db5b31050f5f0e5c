//! Events that must never happen: destroying a used or foreign VM, two pools that take each other's VMs, two VMs for one
//! object.

use std::{collections::BTreeMap, time::Duration};

use coracle_api::agentpool::{NameRef, names};
use coracle_testkit::{
    cluster,
    vcsim::{Act, Rule},
};
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::json;

use crate::{
    objects::{machine, pool_object},
    sims::{Style, apis, create, set},
    world::{Operator, POOL, World, within_limit},
};

#[test]
fn agent_claimed_between_plan_and_fence_keeps_its_vm() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate_guests();
        w.pool(|_| {}).await?;
        let operator = w.operator();
        w.scale(1).await?;
        let (machines, agent_machines, agents) = apis(&w.client, &w.ns);
        let waits = json!({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "NoSuitableAgents"}]}});
        set(&agent_machines, "w-0", waits, true).await?;
        w.until_rows(1, "Available").await?;
        let vm = w.until_vms(1).await?.remove(0);
        operator.kill().await;
        // The AgentMachine is gone, so the VM is surplus; meanwhile its Agent is claimed.
        set(&machines, "w-0", json!({"metadata": {"finalizers": null}}), false).await?;
        machines.delete("w-0", &DeleteParams::default()).await?;
        agent_machines.delete("w-0", &DeleteParams::default()).await?;
        w.requests().delete("w-0", &DeleteParams::default()).await?;
        let claim = json!({
            "metadata": {"labels": {names::AGENT_MACHINE_REF: "other"}},
            "spec": {"clusterDeploymentName": {"name": "demo", "namespace": w.ns}},
        });
        set(&agents, &vm.uuid, claim, false).await?;
        let _operator = w.operator();
        w.until_event("AgentDeleteDeferred").await?;
        assert_eq!(w.vcenter.vms().await.len(), 1);
        assert!(w.requests().get_opt("w-0").await?.is_some(), "its finalizer holds it");
        let free = json!({
            "metadata": {"labels": {names::AGENT_MACHINE_REF: null}}, "spec": {"clusterDeploymentName": null},
        });
        set(&agents, &vm.uuid, free, false).await?;
        w.until_vms(0).await.map(drop)
    });
}

#[test]
fn labels_that_are_edited_destroy_nothing() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        w.pool(|_| {}).await?;
        let operator = w.operator();
        w.scale(2).await?;
        w.until_rows(2, "Bound").await?;
        let seen = w.pools().get(POOL).await?.status.unwrap().observed_generation;
        w.edit(json!({"spec": {"agent": {"labels": {"customer": "another"}}}})).await?;
        for vm in w.until_vms(2).await? {
            let none = json!({"metadata": {"labels": {"customer": null, names::INFRAENV_LABEL: null, names::AGENT_MACHINE: null}}});
            set(&w.agents(), &vm.uuid, none, false).await?;
        }
        let passed = within_limit(async || {
            let status = w.pools().get(POOL).await.unwrap().status.unwrap();
            (status.observed_generation > seen).then_some(())
        });
        assert!(passed.await.is_some());
        operator.reconciles(&["vsphereagentpool"], 3).await?;
        w.until_rows(2, "Bound").await?;
        assert_eq!(w.vcenter.vms().await.len(), 2);
        anyhow::Ok(())
    });
}

#[test]
fn forged_guest_inventory_never_destroys_another_vm() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        w.pool(|_| {}).await?;
        let _operator = w.operator();
        w.scale(2).await?;
        w.until_rows(2, "Bound").await?;
        let vms = w.until_vms(2).await?;
        let of = |name: &str| vms.iter().find(|vm| vm.name == name).unwrap().clone();
        let (victim, liar) = (of("w-0"), of("w-1"));
        let lie = json!({"status": {"inventory": {
            "hostname": "w-1", "systemVendor": {"serialNumber": format!("VMware-{}", victim.uuid)},
            "interfaces": [{"macAddress": victim.mac.replace('-', ":")}],
        }}});
        set(&w.agents(), &liar.uuid, lie, true).await?;
        w.scale(1).await?;
        let left = within_limit(async || {
            let vms = w.vcenter.vms().await;
            (vms.len() < 2).then_some(vms)
        });
        // The VM of the lying guest may be destroyed or held back; the other VM never is.
        if let Ok(Some(left)) = tokio::time::timeout(Duration::from_secs(5), left).await {
            assert_eq!(left[0].uuid, victim.uuid);
        }
        assert!(w.vcenter.vms().await.iter().any(|vm| vm.uuid == victim.uuid));
        anyhow::Ok(())
    });
}

#[test]
fn pools_sharing_an_infra_env_never_take_each_others_vms() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        let labelled = |name: &str| {
            BTreeMap::from(
                [("customer", "example"), (names::NODEPOOL, name)].map(|(k, v)| (k.to_owned(), v.to_owned())),
            )
        };
        w.pool(|p| p.spec.agent.labels = labelled("first")).await?;
        let mut second = pool_object(&w.ns);
        second.metadata.name = Some("second".into());
        second.spec.node_pool_ref = NameRef { name: "second".into() };
        second.spec.agent.labels = labelled("second");
        w.pools().create(&PostParams::default(), &second).await?;
        let _operator = w.operator();
        w.scale(3).await?;
        let (machines, agent_machines, _) = apis(&w.client, &w.ns);
        for name in ["x-0", "x-1"] {
            machine(&w.client, &w.ns, name).await?;
            let of_second = json!({"metadata": {"annotations": {names::NODEPOOL_ANNOTATION: format!("{}/second", w.ns)}}});
            set(&machines, name, of_second.clone(), false).await?;
            set(&agent_machines, name, of_second, false).await?;
        }
        w.until_rows(3, "Bound").await?;
        let rows = async || {
            let status = w.pools().get("second").await.unwrap().status.unwrap_or_default();
            let mut rows: Vec<_> = status.owned_vms.into_iter().map(|r| (r.name, r.phase)).collect();
            rows.sort();
            rows
        };
        let want = ["x-0", "x-1"].map(|name| (name.to_owned(), "Bound".to_owned()));
        assert!(
            within_limit(async || (rows().await == want).then_some(())).await.is_some(),
            "{:?}",
            rows().await
        );
        let mut first: Vec<_> = w.rows().await.into_iter().map(|r| r.name).collect();
        first.sort();
        assert_eq!(first, ["w-0", "w-1", "w-2"]);
        assert_eq!(w.image.seen().downloads, 2, "each pool has a folder of its own");
        anyhow::Ok(())
    });
}

#[test]
fn long_machine_name_is_shortened_for_vm_and_hostname() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        w.pool(|_| {}).await?;
        let _operator = w.operator();
        let long = format!("w-{}", "x".repeat(198));
        machine(&w.client, &w.ns, &long).await?;
        // The provider's own label cannot hold such a long name, so the Agent is never claimed here.
        w.until_rows(1, "Available").await?;
        let prepared = async || (w.rows().await[0].reason == "AgentPrepared").then_some(());
        assert!(within_limit(prepared).await.is_some());
        let vm = w.until_vms(1).await?.remove(0);
        assert!(vm.name.len() == 63 && long.starts_with(&vm.name[..52]), "{}", vm.name);
        assert_eq!(w.agents().get(&vm.uuid).await?.view.spec.hostname, Some(vm.name.clone()));
        assert!(w.requests().get_opt(&long).await?.is_some(), "objects keep their names");
        anyhow::Ok(())
    });
}

#[test]
fn pool_deleted_during_vm_creation_leaves_nothing() {
    cluster::run(|cluster| async move {
        let w = World::fake(cluster).await?;
        w.pool(|_| {}).await?;
        w.vcenter.fake().slow_tasks(Duration::from_secs(1));
        let _operator = w.operator();
        w.scale(3).await?;
        let (machines, agent_machines, _) = apis(&w.client, &w.ns);
        for name in ["w-0", "w-1", "w-2"] {
            let waits = json!({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "NoSuitableAgents"}]}});
            set(&agent_machines, name, waits, true).await?;
        }
        let creates = async || w.vcenter.fake().calls().iter().filter(|c| **c == "CreateVM_Task").count();
        assert!(within_limit(async || (creates().await == 3).then_some(())).await.is_some());
        w.pools().delete(POOL, &DeleteParams::default()).await?;
        let gone = async || w.pools().get_opt(POOL).await.unwrap().is_none().then_some(());
        assert!(within_limit(gone).await.is_some(), "{}", w.dump_objects().await?);
        assert!(
            w.vcenter.vms().await.is_empty()
                && w.requests().list(&ListParams::default()).await?.items.is_empty()
        );
        assert_eq!(machines.list(&ListParams::default()).await?.items.len(), 3, "Machines are not ours");
        anyhow::Ok(())
    });
}

#[test]
fn vm_without_agent_is_replaced() {
    cluster::run(|cluster| async move {
        let w = World::fake(cluster).await?;
        w.pool(|_| {}).await?;
        let mut config = w.config();
        config.times.discovery = SignedDuration::from_secs(2);
        config.times.orphan = SignedDuration::from_secs(2);
        let _operator = Operator::start(w.operators.clone(), config);
        w.scale(1).await?;
        let waits = json!({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "NoSuitableAgents"}]}});
        set(&apis(&w.client, &w.ns).1, "w-0", waits, true).await?;
        let first = w.until_vms(1).await?.remove(0);
        w.until_rows(1, "Orphaned").await?;
        let other = within_limit(async || {
            let vms = w.vcenter.vms().await;
            vms.into_iter().find(|vm| vm.uuid != first.uuid)
        });
        let other = other.await.expect("a new VM");
        assert_eq!(other.name, "w-0");
        assert!(w.vcenter.vms().await.iter().all(|vm| vm.uuid != first.uuid), "the first is gone");
        anyhow::Ok(())
    });
}

#[test]
fn unapproved_agent_is_patched_once() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate_guests();
        w.pool(|p| p.spec.agent.approve = Some(false)).await?;
        let operator = w.operator();
        w.scale(1).await?;
        let waits = json!({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "NoSuitableAgents"}]}});
        set(&apis(&w.client, &w.ns).1, "w-0", waits, true).await?;
        w.until_rows(1, "Available").await?;
        let prepared = async || (w.rows().await[0].reason == "AgentPrepared").then_some(());
        assert!(within_limit(prepared).await.is_some());
        let vm = w.until_vms(1).await?.remove(0);
        let version = async || {
            let agent = w.agents().get(&vm.uuid).await.unwrap();
            assert!(!agent.view.spec.approved);
            let pool = w.pools().get(POOL).await.unwrap();
            let request = w.requests().get("w-0").await.unwrap();
            [agent.resource_version(), pool.resource_version(), request.resource_version()]
        };
        let all = ["vsphereagentpool", "agentmachine", "vsphereagent"];
        // Idle: two reconciles of every object changed nothing.
        let mut before = version().await;
        loop {
            operator.reconciles(&all, 2).await?;
            let now = version().await;
            if now == before {
                break;
            }
            before = now;
        }
        operator.reconciles(&all, 3).await?;
        assert_eq!(version().await, before, "nothing is written at rest");
        anyhow::Ok(())
    });
}

#[test]
fn changed_secret_opens_a_new_session_and_loses_no_vm() {
    cluster::run(|cluster| async move {
        let Some(mut w) = World::real(cluster, &[]).await? else { return anyhow::Ok(()) };
        w.simulate(Style::Old);
        w.pool(|_| {}).await?;
        let _operator = w.operator();
        w.scale(1).await?;
        w.until_rows(1, "Bound").await?;
        let vcsim = w.vcenter.vcsim();
        vcsim.reset()?;
        let secrets: Api<Secret> = Api::namespaced(w.client.clone(), &w.ns);
        let rotated = json!({"stringData": {"password": "another", "username": "another"}});
        set(&secrets, "vsphere-credentials", rotated, false).await?;
        w.scale(3).await?;
        w.until_rows(3, "Bound").await?;
        assert_eq!(vcsim.calls()?.get("Login"), Some(&1), "one login with the new user");
        // A Secret that vCenter refuses: nothing is lost, and the next valid Secret is used.
        vcsim.rules(&[Rule::always("Login", Act::Fault("InvalidLogin".into(), String::new()))])?;
        set(&secrets, "vsphere-credentials", json!({"stringData": {"password": "wrong"}}), false).await?;
        w.scale(4).await?;
        w.until_reason("w-3", "ProviderUnavailable").await?;
        vcsim.rules(&[])?;
        set(&secrets, "vsphere-credentials", json!({"stringData": {"password": "right"}}), false).await?;
        w.until_rows(4, "Bound").await?;
        assert_eq!(w.until_vms(4).await?.len(), 4);
        Ok(())
    });
}

#[test]
fn missing_infra_env_blocks_new_vms_and_keeps_existing_ones() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        w.pool(|_| {}).await?;
        let _operator = w.operator();
        w.scale(2).await?;
        w.until_rows(2, "Bound").await?;
        let kind = coracle_api::agentpool::foreign::INFRA_ENV;
        let envs: Api<coracle_api::agentpool::foreign::InfraEnv> =
            Api::namespaced_with(w.client.clone(), &w.ns, &kind.resource("v1beta1"));
        envs.delete("demo", &DeleteParams::default()).await?;
        w.until_condition("InfraEnvAvailable", "False", "InfraEnvUnavailable").await?;
        w.scale(3).await?;
        let message = w.until_reason("w-2", "InfraEnvUnavailable").await?;
        assert!(message.contains("does not exist"), "{message}");
        w.until_event("InfraEnvUnavailable").await?;
        assert_eq!(w.vcenter.vms().await.len(), 2);
        // Deletions are still carried out.
        w.scale(1).await?;
        w.until_vms(1).await?;
        create(&w.client, &w.ns, &kind, json!({"metadata": {"name": "demo"}, "spec": {}})).await?;
        w.image_ready(true).await?;
        w.scale(2).await?;
        w.until_rows(2, "Bound").await?;
        w.until_condition("Ready", "True", "Reconciled").await.map(drop)
    });
}
