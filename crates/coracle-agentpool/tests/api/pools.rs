//! Options that a pool has by annotations, and its behaviour with invalid objects of others.

use std::time::Duration;

use coracle_api::agentpool::{
    foreign::{AGENT, MACHINE},
    names,
};
use coracle_testkit::{
    cluster::{self, Cluster},
    netns, world,
};
use coracle_vsphere::{Object, Vm};
use kube::{Api, api::DeleteParams};
use serde_json::json;

use crate::{
    objects::definitions,
    sims::{Style, apis, create, set},
    world::{POOL, World, within_limit},
};

fn waits() -> serde_json::Value {
    json!({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "NoSuitableAgents"}]}})
}

/// Deletes a Machine and its AgentMachine at once, as if they had never got an Agent.
async fn delete_machine(w: &World, name: &str) -> anyhow::Result<()> {
    let (machines, agent_machines, _) = apis(&w.client, &w.ns);
    set(&machines, name, json!({"metadata": {"finalizers": null}}), false).await?;
    machines.delete(name, &DeleteParams::default()).await?;
    agent_machines.delete(name, &DeleteParams::default()).await?;
    Ok(())
}

#[test]
fn pool_with_reuse_gives_free_agent_instead_of_vm() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate_guests();
        w.pool(|p| p.metadata.annotations = Some([(names::REUSE.into(), "true".into())].into())).await?;
        let operator = w.operator();
        w.scale(1).await?;
        let (_, agent_machines, agents) = apis(&w.client, &w.ns);
        set(&agent_machines, "w-0", waits(), true).await?;
        let prepared = async || (w.rows().await.first()?.reason == "AgentPrepared").then_some(());
        assert!(within_limit(prepared).await.is_some());
        let vm = w.until_vms(1).await?.remove(0);
        operator.kill().await;
        w.scale(2).await?;
        set(&agent_machines, "w-1", waits(), true).await?;
        delete_machine(&w, "w-0").await?;
        let _operator = w.operator();
        let selected = async || {
            let agent = agents.get(&vm.uuid).await.unwrap();
            (agent.metadata.labels?.get(names::AGENT_MACHINE)? == "w-1").then_some(())
        };
        assert!(within_limit(selected).await.is_some(), "{}", w.dump_objects().await?);
        w.simulate_provider(Style::Old);
        w.until_rows(1, "Bound").await?;
        let row = w.rows().await.remove(0);
        assert_eq!((row.name.as_str(), row.machine_ref.unwrap().name.as_deref()), ("w-0", Some("w-1")));
        assert_eq!(w.until_vms(1).await?.remove(0).uuid, vm.uuid, "the VM that was there");
        assert_eq!(agents.get(&vm.uuid).await?.view.spec.hostname.as_deref(), Some("w-0"));
        // The next AgentMachine of the old name gets its own VM, and the node keeps its VM.
        w.scale(1).await?;
        w.until_vms(1).await?;
        anyhow::Ok(())
    });
}

#[test]
fn pool_with_manage_adopts_vm_that_vsphere_confirms() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        let operator = w.operator();
        w.pool(|_| {}).await?;
        w.scale(1).await?;
        w.until_rows(1, "Bound").await?;
        let made = w.until_vms(1).await?.remove(0);
        operator.kill().await;
        // A VM that a user created in the same folder, and a second Agent that falsely reports the identity of that VM.
        let (uuid, mac) = ("42000000-0000-0000-0000-00000000000a", "00-50-56-00-00-0a");
        let object = Object { id: "vm-by-hand".into(), ..made.object.clone() };
        let by_hand = Vm {
            object,
            name: "old-node".into(),
            uuid: uuid.into(),
            instance_uuid: "none".into(),
            mac: mac.into(),
            annotation: String::new(),
            ..made
        };
        for (agent, hostname, serial) in [(uuid, "old-node", uuid), ("liar", "w-none", uuid)] {
            let labels =
                json!({names::INFRAENV_LABEL: "demo", "customer": "example", "agentMachineRef": "x-0"});
            let object = json!({
                "metadata": {"name": agent, "labels": labels},
                "spec": {"approved": true, "role": "worker", "hostname": hostname},
            });
            create(&w.client, &w.ns, &AGENT, object).await?;
            let status = json!({"status": {"inventory": {
                "hostname": hostname, "systemVendor": {"serialNumber": serial},
                "interfaces": [{"macAddress": mac.replace('-', ":")}],
            }}});
            set(&w.agents(), agent, status, true).await?;
        }
        // The guest of the VM is registered already, under the name that the simulated guests use.
        w.vcenter.fake().change_vm("vm-by-hand", |place| *place = Some(by_hand));
        let _operator = w.operator();
        let rows = async || {
            let mut rows: Vec<_> = w.rows().await.into_iter().map(|r| (r.name, r.source)).collect();
            rows.sort();
            rows
        };
        let reported =
            [("old-node", "DiscoveredAgent"), ("w-0", "VsphereAgent"), ("w-none", "DiscoveredAgent")];
        let reported = reported.map(|(n, s)| (n.to_owned(), s.to_owned()));
        assert!(
            within_limit(async || (rows().await == reported).then_some(())).await.is_some(),
            "{:?}",
            rows().await
        );
        w.edit(json!({"metadata": {"annotations": {names::ADOPT: "manage"}}})).await?;
        w.until_reason("old-node", "VMAdopted").await?;
        let taken = async || {
            let row = w.rows().await.into_iter().find(|r| r.name == "old-node")?;
            (row.source == "VsphereAgent" && row.phase == "Bound" && row.bios_uuid == uuid).then_some(())
        };
        assert!(within_limit(taken).await.is_some(), "{:?}", w.rows().await);
        assert!(w.requests().get_opt("w-none").await?.is_none(), "no VM of that name is in the folder");
        w.until_event("VMAdopted").await.map(drop)
    });
}

#[test]
fn unmet_selector_emits_an_event_with_the_label() {
    cluster::run(|cluster| async move {
        let w = World::fake(cluster).await?;
        w.pool(|p| p.spec.agent.labels = [("customer".to_owned(), "another".to_owned())].into()).await?;
        let _operator = w.operator();
        w.scale(1).await?;
        let event = w.until_event("SelectorMismatch").await?;
        let note = event.note.unwrap_or_default();
        assert!(note.contains("customer=example") && note.contains("spec.agent.labels"), "{note}");
        assert_eq!(event.regarding.and_then(|r| r.name).as_deref(), Some(POOL));
        anyhow::Ok(())
    });
}

#[test]
fn agent_without_vm_does_not_block_forty_nine_others() {
    cluster::run_within(Duration::from_secs(170), |cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        w.pool(|_| {}).await?;
        // The Agent has the host name of a VM that is not its own.
        let stray = json!({
            "metadata": {"name": "stray", "labels": {names::INFRAENV_LABEL: "demo", "customer": "example"}},
            "spec": {"approved": false, "role": "", "hostname": "w-7"},
        });
        create(&w.client, &w.ns, &AGENT, stray).await?;
        let serial = json!({"serialNumber": "42000000-0000-0000-0000-00000000000b"});
        let status = json!({"status": {"inventory": {"hostname": "w-7", "systemVendor": serial}}});
        set(&w.agents(), "stray", status, true).await?;
        let _operator = w.operator();
        w.scale(49).await?;
        w.until_rows(49, "Bound").await?;
        let agent = w.agents().get("stray").await?;
        assert!(
            !agent.view.spec.approved
                && agent.metadata.labels.is_some_and(|l| !l.contains_key(names::ROLE_LABEL))
        );
        let told = within_limit(async || {
            let message = w.until_condition("Ready", "True", "Reconciled").await.ok()?;
            message.contains("Agent stray").then_some(())
        });
        assert!(told.await.is_some(), "the pool names it");
        anyhow::Ok(())
    });
}

#[test]
fn cluster_with_only_v1beta2_machines_is_supported() {
    netns::run_within(Duration::from_secs(170), || async {
        let cluster = Cluster::start().await?;
        world::install(&cluster.client(), &definitions(&["v1beta2"])).await?;
        let mut w = World::on(&cluster).await?;
        let v1beta1: Api<coracle_api::agentpool::foreign::Machine> =
            Api::namespaced_with(w.client.clone(), &w.ns, &MACHINE.resource("v1beta1"));
        assert!(v1beta1.list(&Default::default()).await.is_err(), "the older version is not there");
        w.simulate(Style::New);
        w.pool(|_| {}).await?;
        let _operator = w.operator();
        w.scale(2).await?;
        w.until_rows(2, "Bound").await?;
        w.scale(1).await?;
        w.until_vms(1).await.map(drop)
    });
}
