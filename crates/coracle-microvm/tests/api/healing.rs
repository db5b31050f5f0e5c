//! R5 and R6: restarts, lost nodes, deletion that does not hang.

use std::{sync::atomic::Ordering, time::Duration};

use coracle_api::{MikromVMSpec, Phase, RestartPolicy};
use coracle_microvm::{Config, Policy};
use coracle_proto::firecracker::VmState;
use coracle_testkit::cluster;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::json;

use crate::{
    fake_agent::FakeAgent,
    world::{Operator, World, eventually, message},
};

#[test]
fn down_is_started_again_as_the_policy_says() {
    cluster::run(|cluster| async move {
        use {RestartPolicy::*, VmState::*};
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        for (why, policy, state, again) in [
            ("always after a clean end", Always, Stopped, true),
            ("always after an error", Always, Error, true),
            ("not after a clean end", OnFailure, Stopped, false),
            ("but after an error", OnFailure, Error, true),
            ("never", Never, Stopped, false),
            ("never even after an error", Never, Error, false),
        ] {
            let name = format!("{policy:?}-{state:?}").to_lowercase();
            w.create(&name, MikromVMSpec { restart_policy: policy, ..w.spec() }).await?;
            w.until_running(&name).await?;
            w.agent.set_state(&w.id(&name), state);
            if again {
                let vm = w
                    .until(&name, why, |vm| vm.unwrap().status.as_ref().unwrap().restarts == 1)
                    .await?
                    .unwrap();
                assert_eq!(vm.status.unwrap().phase, Some(Phase::Running), "{why}");
                w.until_event(&name, "Restarted").await?;
            } else {
                let reason = if state == Stopped { "VMStopped" } else { "VMFailed" };
                let vm = w.until_reason(&name, reason).await?;
                let looks = w.agent.count("GetVM");
                eventually("it stays down", async || (w.agent.count("GetVM") >= looks + 8).then_some(()))
                    .await?;
                assert_eq!(
                    w.vms().get(&name).await?.metadata.resource_version,
                    vm.metadata.resource_version,
                    "{why}"
                );
            }
        }
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn a_vanished_vm_is_made_anew() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        w.create("web", w.spec()).await?;
        w.until_running("web").await?;
        w.agent.lose(&w.id("web"));
        w.until("web", "restarted", |vm| vm.unwrap().status.as_ref().unwrap().restarts == 1).await?;
        assert_eq!(w.agent.machines(), [format!("{} VM_STATE_RUNNING", w.id("web"))]);
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn an_agent_that_cannot_restart_gets_a_new_vm() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        w.agent.shared.cannot_restart.store(true, Ordering::SeqCst);
        let _operator = w.operator();
        w.create("web", w.spec()).await?;
        w.until_running("web").await?;
        w.agent.set_state(&w.id("web"), VmState::Stopped);
        w.until("web", "restarted", |vm| vm.unwrap().status.as_ref().unwrap().restarts == 1).await?;
        let id = w.id("web");
        let tail = w.agent.mutations().split_off(2);
        assert_eq!(
            tail,
            [
                format!("StartVM {id}"),
                format!("DeleteVM {id}"),
                format!("CreateVM {id}"),
                format!("StartVM {id}")
            ]
        );
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn an_event_is_enough() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let hour = Duration::from_secs(3600);
        let policy = Policy { resync: hour, ..w.config().policy };
        let _operator = Operator::start(w.client.clone(), Config { policy, ..w.config() });
        w.create("web", MikromVMSpec { restart_policy: RestartPolicy::Never, ..w.spec() }).await?;
        w.until_running("web").await?;
        eventually("a stream is open", async || (w.agent.count("WatchVMEvents") > 0).then_some(())).await?;
        w.agent.set_state(&w.id("web"), VmState::Stopped);
        w.until_reason("web", "VMStopped").await?;
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn an_agent_that_comes_back_is_followed_again() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        let policy = Policy { resync: Duration::from_secs(3600), ..w.config().policy };
        let _operator = Operator::start(w.client.clone(), Config { policy, ..w.config() });
        w.create("web", MikromVMSpec { restart_policy: RestartPolicy::Never, ..w.spec() }).await?;
        w.until_running("web").await?;
        let spare = FakeAgent::start().await;
        let (shared, address) = std::mem::replace(&mut w.agent, spare).kill().await;
        // The VM ends while nobody can tell; the reconnecting stream looks at it anew.
        shared.vms.lock().unwrap().get_mut(&w.id("web")).unwrap()[0].state = VmState::Stopped;
        w.agent = FakeAgent::start_with(shared, &address).await;
        w.until_reason("web", "VMStopped").await?;
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn deletion_on_a_node_that_is_gone_ends_after_grace() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.announce("gone-1", &w.agent.address, 4, 4096, 600).await?;
        let _operator = w.operator();
        w.create("web", MikromVMSpec { agent_address: String::new(), ..w.spec() }).await?;
        let vm = w.until_running("web").await?;
        assert_eq!(vm.status.unwrap().node_name, "gone-1");
        let spare = FakeAgent::start().await;
        std::mem::replace(&mut w.agent, spare).kill().await;
        w.withdraw("gone-1").await?;
        w.delete("web").await?;
        w.until_gone("web").await?;
        assert!(w.until_event("web", "Released").await?.contains("node is gone"));
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn deletion_waits_for_an_agent_that_is_down_on_a_node_that_lives() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        let node = format!("{}-node", w.ns);
        let nodes: Api<Node> = Api::all(w.client.clone());
        ready_node(&nodes, &node, true).await?;
        w.announce(&node, &w.agent.address, 4, 4096, 1).await?; // its Lease ends within a second
        let _operator = w.operator();
        w.create("web", MikromVMSpec { node_name: node.clone(), agent_address: String::new(), ..w.spec() })
            .await?;
        w.until_running("web").await?;
        let spare = FakeAgent::start().await;
        let (shared, address) = std::mem::replace(&mut w.agent, spare).kill().await;
        w.delete("web").await?;
        let vm = w.until_reason("web", "AgentUnreachable").await?;
        assert_eq!(vm.status.unwrap().phase, Some(Phase::Deleting));
        // Longer than the grace of 1.5 s: it still waits, since the node is there.
        tokio::time::sleep(Duration::from_millis(2500)).await;
        assert!(w.vms().get_opt("web").await?.is_some());
        w.agent = FakeAgent::start_with(shared, &address).await;
        w.until_gone("web").await?;
        assert_eq!(w.agent.machines(), [] as [&str; 0]);
        nodes.delete(&node, &DeleteParams::default()).await?;
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn deletion_can_be_abandoned() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        let _operator = w.operator();
        w.create("web", w.spec()).await?; // an agent outside the cluster: no node is known
        w.until_running("web").await?;
        let spare = FakeAgent::start().await;
        std::mem::replace(&mut w.agent, spare).kill().await;
        w.delete("web").await?;
        w.until_reason("web", "AgentUnreachable").await?;
        w.patch("web", json!({"metadata": {"annotations": {"coracle.dev/abandon": "true"}}})).await?;
        w.until_gone("web").await?;
        assert!(w.until_event("web", "Released").await?.contains("abandoned"));
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn a_vm_of_a_lost_node_moves_and_the_old_one_goes_when_the_node_returns() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.announce("n1", &w.agent.address, 4, 4096, 600).await?;
        let _operator = w.operator();
        w.create("free", MikromVMSpec { agent_address: String::new(), ..w.spec() }).await?;
        w.create("tied", MikromVMSpec { agent_address: String::new(), node_name: "n1".into(), ..w.spec() })
            .await?;
        w.until_running("free").await?;
        w.until_running("tied").await?;
        let second = FakeAgent::start().await;
        w.announce("n2", &second.address, 4, 4096, 600).await?;
        let (shared, address) = std::mem::replace(&mut w.agent, second).kill().await;
        w.withdraw("n1").await?;
        let tied = w.until_reason("tied", "NodeLost").await?;
        assert_eq!(tied.status.as_ref().unwrap().phase, Some(Phase::Failed));
        assert!(message(&tied).contains("n1"));
        let moved = w
            .until("free", "moved", |vm| {
                vm.unwrap().status.as_ref().unwrap().node_name == "n2" && vm.unwrap().is_provisioned()
            })
            .await?;
        assert_eq!(moved.unwrap().status.unwrap().restarts, 1);
        // The old node comes back with both: what moved is removed there, what is tied to it runs on.
        let first = FakeAgent::start_with(shared, &address).await;
        w.announce("n1", &first.address, 4, 4096, 600).await?;
        let only = [format!("{} VM_STATE_RUNNING", w.id("tied"))];
        let swept = eventually("one VM each", async || (first.machines() == only).then_some(())).await;
        swept.map_err(|e| {
            e.context(format!("{:?} {:?}", first.machines(), first.shared.calls.lock().unwrap()))
        })?;
        assert_eq!(w.agent.machines(), [format!("{} VM_STATE_RUNNING", w.id("free"))]);
        w.until_running("tied").await?;
        w.until_event("free", "OrphanFound").await?;
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn a_node_that_is_not_ready_is_lost_after_grace() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        let node = format!("{}-node", w.ns);
        let nodes: Api<Node> = Api::all(w.client.clone());
        ready_node(&nodes, &node, true).await?;
        w.announce(&node, &w.agent.address, 4, 4096, 600).await?;
        let _operator = w.operator();
        w.create("web", MikromVMSpec { node_name: node.clone(), agent_address: String::new(), ..w.spec() })
            .await?;
        w.until_running("web").await?;
        let spare = FakeAgent::start().await;
        std::mem::replace(&mut w.agent, spare).kill().await;
        ready_node(&nodes, &node, false).await?;
        w.until_reason("web", "NodeLost").await?;
        w.delete("web").await?;
        w.until_gone("web").await?;
        nodes.delete(&node, &DeleteParams::default()).await?;
        Ok::<_, anyhow::Error>(())
    });
}

async fn ready_node(nodes: &Api<Node>, name: &str, ready: bool) -> anyhow::Result<()> {
    let params = PatchParams::apply("kubelet").force();
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
    nodes.patch(name, &params, &Patch::Apply(node)).await?;
    let condition = json!({"type": "Ready", "status": if ready { "True" } else { "Unknown" },
        "lastTransitionTime": coracle_reconcile::Clock::now(&coracle_reconcile::SystemClock).to_string()});
    let status = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": {"conditions": [condition]}});
    nodes.patch_status(name, &params, &Patch::Apply(status)).await?;
    Ok(())
}
