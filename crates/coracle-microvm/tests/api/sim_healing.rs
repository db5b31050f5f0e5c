//! Restarts, lost nodes, and deletion that always ends, in simulations.

use std::{sync::atomic::Ordering, time::Duration};

use coracle_api::{MikromVM, MikromVMSpec, Phase, RestartPolicy};
use coracle_microvm::{Config, Policy};
use coracle_proto::firecracker::VmState;
use coracle_reconcile::{Backoff, WallTime as _};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::json;

use crate::{
    fake_agent::FakeAgent,
    world::{Operator, World, eventually, message, simulate},
};

#[test]
fn restart_policy_decides_about_a_vm_that_is_down() {
    simulate(|w| async move {
        use {RestartPolicy::*, VmState::*};
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
        Ok(())
    });
}

#[test]
fn vanished_vm_is_created_again() {
    simulate(|w| async move {
        let _operator = w.operator();
        w.create("web", w.spec()).await?;
        w.until_running("web").await?;
        w.agent.remove_vm(&w.id("web"));
        w.until("web", "restarted", |vm| vm.unwrap().status.as_ref().unwrap().restarts == 1).await?;
        assert_eq!(w.agent.machines(), [format!("{} VM_STATE_RUNNING", w.id("web"))]);
        Ok(())
    });
}

#[test]
fn vm_that_cannot_restart_is_recreated() {
    simulate(|w| async move {
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
        Ok(())
    });
}

#[test]
fn event_of_the_agent_triggers_a_reconcile() {
    simulate(|w| async move {
        let hour = Duration::from_secs(3600);
        let policy = Policy { resync: hour, ..w.config().policy };
        let _operator = Operator::start(w.client.clone(), Config { policy, ..w.config() });
        w.create("web", MikromVMSpec { restart_policy: RestartPolicy::Never, ..w.spec() }).await?;
        w.until_running("web").await?;
        eventually("a stream is open", async || (w.agent.count("WatchVMEvents") > 0).then_some(())).await?;
        w.agent.set_state(&w.id("web"), VmState::Stopped);
        w.until_reason("web", "VMStopped").await?;
        Ok(())
    });
}

#[test]
fn event_stream_is_reopened_after_an_agent_restart() {
    simulate(|mut w| async move {
        let policy = Policy { resync: Duration::from_secs(3600), ..w.config().policy };
        let _operator = Operator::start(w.client.clone(), Config { policy, ..w.config() });
        w.create("web", MikromVMSpec { restart_policy: RestartPolicy::Never, ..w.spec() }).await?;
        w.until_running("web").await?;
        let (shared, address) = w.kill_agent().await;
        // The VM ends while the agent is down; the new stream triggers a reconcile.
        shared.vms.lock().unwrap().get_mut(&w.id("web")).unwrap()[0].state = VmState::Stopped;
        w.agent = FakeAgent::start_with(&w.net, shared, Some(&address)).await;
        w.until_reason("web", "VMStopped").await?;
        Ok(())
    });
}

#[test]
fn deletion_on_a_gone_node_ends_after_grace() {
    simulate(|mut w| async move {
        w.announce("gone-1", &w.agent.address, 4, 4096, 600).await?;
        let _operator = w.operator();
        w.create("web", MikromVMSpec { agent_address: String::new(), ..w.spec() }).await?;
        let vm = w.until_running("web").await?;
        assert_eq!(vm.status.unwrap().node_name, "gone-1");
        let (shared, address) = w.kill_agent().await;
        w.withdraw("gone-1").await?;
        w.delete("web").await?;
        w.until_gone("web").await?;
        assert!(w.until_event("web", "Released").await?.contains("node is gone"));
        // A VM of another cluster stays when the node returns.
        let mut other = shared.vms.lock().unwrap()[&w.id("web")].clone();
        other[0].request.vm_id = "other-web".into();
        other[0].request.metadata.insert("coracle.dev/cluster".into(), "another".into());
        shared.vms.lock().unwrap().insert("other-web".into(), other);
        let back = FakeAgent::start_with(&w.net, shared, Some(&address)).await;
        w.announce("gone-1", &back.address, 4, 4096, 600).await?;
        eventually("the VM is removed", async || {
            (back.machines() == ["other-web VM_STATE_RUNNING"]).then_some(())
        })
        .await?;
        Ok(())
    });
}

#[test]
fn deletion_waits_for_the_agent_of_a_ready_node() {
    simulate(|mut w| async move {
        let node = format!("{}-node", w.ns);
        let nodes: Api<Node> = Api::all(w.client.clone());
        ready_node(&w, &nodes, &node, true).await?;
        w.announce(&node, &w.agent.address, 4, 4096, 1).await?; // its Lease ends within a second
        let _operator = w.operator();
        w.create("web", MikromVMSpec { node_name: node.clone(), agent_address: String::new(), ..w.spec() })
            .await?;
        w.until_running("web").await?;
        let (shared, address) = w.kill_agent().await;
        w.delete("web").await?;
        let vm = w.until_reason("web", "AgentUnreachable").await?;
        assert_eq!(vm.status.unwrap().phase, Some(Phase::Deleting));
        // The Lease has expired and the grace period of 1.5 s passes: the VM still waits, since the Node is Ready.
        w.until_reconciled(50).await?;
        assert!(w.vms().get_opt("web").await?.is_some());
        w.agent = FakeAgent::start_with(&w.net, shared, Some(&address)).await;
        w.until_gone("web").await?;
        assert_eq!(w.agent.machines(), [] as [&str; 0]);
        nodes.delete(&node, &DeleteParams::default()).await?;
        Ok(())
    });
}

#[test]
fn deletion_can_be_abandoned() {
    simulate(|mut w| async move {
        let _operator = w.operator();
        w.create("web", w.spec()).await?; // an agent outside the cluster: no node is known
        w.until_running("web").await?;
        w.kill_agent().await;
        w.delete("web").await?;
        w.until_reason("web", "AgentUnreachable").await?;
        w.patch("web", json!({"metadata": {"annotations": {"coracle.dev/abandon": "true"}}})).await?;
        w.until_gone("web").await?;
        assert!(w.until_event("web", "Released").await?.contains("abandoned"));
        Ok(())
    });
}

#[test]
fn vm_of_a_lost_node_moves_and_its_left_over_is_removed() {
    simulate(|mut w| async move {
        w.announce("n1", &w.agent.address, 4, 4096, 600).await?;
        let _operator = w.operator();
        w.create("free", MikromVMSpec { agent_address: String::new(), ..w.spec() }).await?;
        w.create("tied", MikromVMSpec { agent_address: String::new(), node_name: "n1".into(), ..w.spec() })
            .await?;
        w.until_running("free").await?;
        w.until_running("tied").await?;
        let second = FakeAgent::start(&w.net).await;
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
        // The old node returns with both VMs: the VM that moved is removed there, the pinned VM keeps running.
        let first = FakeAgent::start_with(&w.net, shared, Some(&address)).await;
        w.announce("n1", &first.address, 4, 4096, 600).await?;
        let only = [format!("{} VM_STATE_RUNNING", w.id("tied"))];
        let swept = eventually("one VM each", async || (first.machines() == only).then_some(())).await;
        swept.map_err(|e| {
            e.context(format!("{:?} {:?}", first.machines(), first.shared.calls.lock().unwrap()))
        })?;
        assert_eq!(w.agent.machines(), [format!("{} VM_STATE_RUNNING", w.id("free"))]);
        w.until_running("tied").await?;
        w.until_event("free", "OrphanFound").await?;
        Ok(())
    });
}

#[test]
fn vms_of_a_lost_node_do_not_wait_for_their_backoff() {
    simulate(|mut w| async move {
        let hour = Duration::from_secs(3600);
        let policy = Policy { resync: hour, ..w.config().policy };
        let backoff = Backoff { base: hour, max: hour };
        w.announce("n1", &w.agent.address, 64, 65_536, 600).await?;
        let _operator = Operator::start(w.client.clone(), Config { policy, backoff, ..w.config() });
        for n in 0..8 {
            w.create(&format!("vm-{n}"), MikromVMSpec { agent_address: String::new(), ..w.spec() }).await?;
            w.until_running(&format!("vm-{n}")).await?;
        }
        let second = FakeAgent::start(&w.net).await;
        w.announce("n2", &second.address, 64, 65_536, 600).await?;
        std::mem::replace(&mut w.agent, second).kill().await;
        w.withdraw("n1").await?;
        for n in 0..8 {
            let moved = |vm: Option<&MikromVM>| vm.unwrap().status.as_ref().unwrap().node_name == "n2";
            w.until(&format!("vm-{n}"), "moved", moved).await?;
        }
        Ok(())
    });
}

#[test]
fn node_that_is_not_ready_is_lost_after_grace() {
    simulate(|mut w| async move {
        let node = format!("{}-node", w.ns);
        let nodes: Api<Node> = Api::all(w.client.clone());
        ready_node(&w, &nodes, &node, true).await?;
        w.announce(&node, &w.agent.address, 4, 4096, 600).await?;
        let _operator = w.operator();
        w.create("web", MikromVMSpec { node_name: node.clone(), agent_address: String::new(), ..w.spec() })
            .await?;
        w.until_running("web").await?;
        w.kill_agent().await;
        ready_node(&w, &nodes, &node, false).await?;
        w.until_reason("web", "NodeLost").await?;
        w.delete("web").await?;
        w.until_gone("web").await?;
        nodes.delete(&node, &DeleteParams::default()).await?;
        Ok(())
    });
}

async fn ready_node(w: &World, nodes: &Api<Node>, name: &str, ready: bool) -> anyhow::Result<()> {
    let params = PatchParams::apply("kubelet").force();
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
    nodes.patch(name, &params, &Patch::Apply(node)).await?;
    let condition = json!({"type": "Ready", "status": if ready { "True" } else { "Unknown" },
        "lastTransitionTime": w.clock().timestamp().to_string()});
    let status = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": {"conditions": [condition]}});
    nodes.patch_status(name, &params, &Patch::Apply(status)).await?;
    Ok(())
}
