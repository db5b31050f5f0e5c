//! `microvm.md` §2.2, line by line.

use std::sync::atomic::Ordering;

use coracle_api::{MikromVM, Phase};
use coracle_proto::firecracker::VmState;
use coracle_testkit::cluster;
use kube::ResourceExt as _;
use serde_json::json;
use tonic::Code;

use crate::{
    fake_agent::{FakeAgent, Fault},
    world::{World, eventually, message, ready},
};

#[test]
fn create_to_running_in_three_writes() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let writes = w.writes("web").await?;
        let operator = w.operator();
        let made = w.create("web", w.spec()).await?;
        let vm = w.until_running("web").await?;
        let (id, status) = (w.id("web"), vm.status.clone().unwrap());
        assert_eq!(w.agent.mutations(), [format!("CreateVM {id}"), format!("StartVM {id}")]);
        let request = w.agent.request(&id);
        assert_eq!(
            (request.image_ref.as_str(), request.vm_id.as_str()),
            ("docker.io/myorg/my-app:v1.2.3", id.as_str())
        );
        assert_eq!((request.vcpu_count, request.memory_mb), (2, 1024));
        let meta = |key: &str| request.metadata.get(key).cloned().unwrap_or_default();
        assert_eq!(meta("coracle.dev/uid"), made.uid().unwrap());
        assert_eq!(meta("coracle.dev/idempotent"), "true");
        assert_eq!((meta("coracle.dev/namespace"), meta("coracle.dev/name")), (w.ns.clone(), "web".into()));
        assert!(
            w.agent.shared.fences.lock().unwrap().iter().all(|f| *f == (made.uid().unwrap(), "1".into()))
        );
        assert_eq!((status.phase, status.vm_id.as_str()), (Some(Phase::Running), id.as_str()));
        assert_eq!(status.ip_address, "10.100.0.42");
        assert_eq!(status.agent_address, w.agent.address);
        assert!(status.created_at.is_some() && status.observed_generation == Some(1));
        assert_eq!(vm.finalizers(), ["vm.mikrom.es/finalizer"]);
        let all = async || Some(writes.all()).filter(|all| all.last().is_some_and(MikromVM::is_provisioned));
        let writes = eventually("the last write is seen", all).await?.len() - 1; // the first is the user's own
        println!("writes from create to Running: {writes}");
        assert_eq!(writes, 3, "finalizer, binding, Running");
        w.until_event("web", "Created").await?;
        w.until_event("web", "Started").await?;
        operator.stop().await
    });
}

#[test]
fn a_quiet_object_is_looked_at_and_never_written() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        w.create("web", w.spec()).await?;
        w.until_running("web").await?;
        let (writes, looks) = (w.writes("web").await?, w.agent.count("GetVM"));
        eventually("five more looks", async || (w.agent.count("GetVM") >= looks + 5).then_some(())).await?;
        assert_eq!(writes.all().len(), 0);
        assert_eq!(w.agent.count("CreateVM"), 1, "a second reconcile makes no second create");
        assert_eq!(w.agent.count("StartVM"), 1);
        eventually("only the event stream is connected", async || {
            (w.agent.shared.open.load(Ordering::SeqCst) == 1).then_some(())
        })
        .await
    });
}

#[test]
fn a_transient_error_leaves_the_status_byte_for_byte() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        for (code, name) in [
            (Code::Unavailable, "unavailable"),
            (Code::Internal, "internal"),
            (Code::Aborted, "aborted"),
            (Code::ResourceExhausted, "exhausted"),
            (Code::DeadlineExceeded, "deadline"),
        ] {
            w.agent.fail("CreateVM", Fault::Status(code, "a blip"));
            w.agent.fail("CreateVM", Fault::Status(code, "another"));
            let writes = w.writes(name).await?;
            let operator = w.operator();
            w.create(name, w.spec()).await?;
            w.until_running(name).await?;
            operator.stop().await?;
            let statuses: Vec<_> = writes.all().into_iter().filter_map(|vm| vm.status).collect();
            let phases: Vec<_> = statuses.iter().map(|s| s.phase.unwrap()).collect();
            assert_eq!(phases, [Phase::Creating, Phase::Running], "{name}: nothing is written in between");
        }
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn a_blip_while_it_runs_changes_nothing() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        w.create("web", w.spec()).await?;
        let before = w.until_running("web").await?;
        w.agent.fail("GetVM", Fault::Status(Code::Unavailable, "a blip"));
        w.agent.fail("GetVM", Fault::Status(Code::Internal, "another"));
        let looks = w.agent.count("GetVM");
        eventually("the blips are over", async || (w.agent.count("GetVM") >= looks + 4).then_some(()))
            .await?;
        let after = w.vms().get("web").await?;
        assert_eq!(before.resource_version(), after.resource_version());
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn a_permanent_error_is_failed_and_can_be_put_right() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        w.agent.fail_always(
            "CreateVM",
            Some(Fault::Status(Code::FailedPrecondition, "no image docker.io/myorg/nope:1")),
        );
        let _operator = w.operator();
        w.create("web", w.spec()).await?;
        let vm = w.until_reason("web", "AgentError").await?;
        assert_eq!(vm.status.as_ref().unwrap().phase, Some(Phase::Failed));
        assert_eq!(ready(&vm), ("False".into(), "AgentError".into()));
        assert!(message(&vm).contains("no image docker.io/myorg/nope:1"), "{}", message(&vm));
        assert!(w.until_event("web", "Failed").await?.contains("no image"));
        // It is tried again without a write each time, and a mended spec is taken up.
        let tries = w.agent.count("CreateVM");
        eventually("more tries", async || (w.agent.count("CreateVM") >= tries + 3).then_some(())).await?;
        assert_eq!(w.vms().get("web").await?.resource_version(), vm.resource_version());
        w.agent.fail_always("CreateVM", None);
        w.patch("web", json!({"spec": {"image": "docker.io/myorg/right:1"}})).await?;
        w.until_running("web").await?;
        assert_eq!(w.agent.request(&w.id("web")).image_ref, "docker.io/myorg/right:1");
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn the_first_generations_errors_count_by_their_text() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        w.agent.fail("CreateVM", Fault::InBand("jailer: exit status 1")); // INTERNAL: passes
        w.create("one", w.spec()).await?;
        w.until_running("one").await?;
        w.agent.fail("StopVM", Fault::InBand("VM one not found"));
        w.agent.fail("DeleteVM", Fault::InBand("VM one not found"));
        w.delete("one").await?;
        w.until_gone("one").await?;
        assert_eq!(w.agent.machines(), [] as [&str; 0], "tried again until it is seen to be gone");
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn internal_again_and_again_is_said_and_keeps_the_phase() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        w.agent.fail_always(
            "CreateVM",
            Some(Fault::Status(Code::Internal, "failed to start VM task: no such image")),
        );
        let _operator = w.operator();
        w.create("web", w.spec()).await?;
        let vm = w.until_reason("web", "AgentInternalError").await?;
        assert_eq!(vm.status.as_ref().unwrap().phase, Some(Phase::Creating), "the phase stays");
        assert!(w.agent.count("CreateVM") >= 3, "said only after three in a row");
        assert!(w.until_event("web", "AgentInternalError").await?.contains("no such image"));
        w.agent.fail_always("CreateVM", None);
        w.until_running("web").await?;
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn deletion_stops_deletes_and_lets_go() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        w.create("web", w.spec()).await?;
        w.until_running("web").await?;
        w.agent.fail("StopVM", Fault::Status(Code::NotFound, "VM not found"));
        w.delete("web").await?;
        w.until_gone("web").await?;
        let id = w.id("web");
        assert_eq!(w.agent.mutations()[2..], [format!("StopVM {id}"), format!("DeleteVM {id}")]);
        assert_eq!(w.agent.machines(), [] as [&str; 0]);
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn a_changed_address_does_not_redirect_deletion() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let other = FakeAgent::start().await;
        let _operator = w.operator();
        w.create("web", w.spec()).await?;
        w.until_running("web").await?;
        w.patch("web", json!({"spec": {"agentAddress": other.address, "nodeName": "elsewhere"}})).await?;
        let looks = w.agent.count("GetVM");
        eventually("it is looked at where it is", async || {
            (w.agent.count("GetVM") >= looks + 3).then_some(())
        })
        .await?;
        assert_eq!(w.vms().get("web").await?.status.unwrap().agent_address, w.agent.address);
        w.delete("web").await?;
        w.until_gone("web").await?;
        assert_eq!(w.agent.machines(), [] as [&str; 0]);
        assert_eq!(other.mutations(), [] as [&str; 0], "the other agent never heard of it");
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn a_vm_of_another_object_is_never_adopted() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        w.agent.plant(&w.id("web"), Some("someone-else"), VmState::Running);
        let _operator = w.operator();
        w.create("web", w.spec()).await?;
        let vm = w.until_reason("web", "VMIDConflict").await?;
        assert!(vm.status.as_ref().unwrap().vm_id.is_empty());
        w.until_event("web", "VMIDConflict").await?;
        w.delete("web").await?;
        w.until_gone("web").await?;
        assert_eq!(w.agent.mutations(), [] as [&str; 0]);
        assert_eq!(
            w.agent.machines(),
            [format!("{} VM_STATE_RUNNING", w.id("web"))],
            "and not deleted with it"
        );
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn a_vm_of_the_original_operator_is_adopted() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        w.agent.plant(&w.id("web"), None, VmState::Stopped);
        let _operator = w.operator();
        w.create("web", w.spec()).await?;
        w.until_running("web").await?;
        assert_eq!(w.agent.mutations(), [format!("StartVM {}", w.id("web"))]);
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn already_exists_counts_as_created() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        w.agent.fail("GetVM", Fault::Status(Code::NotFound, "VM not found")); // seen by the first look only
        w.agent.plant(&w.id("web"), None, VmState::Running);
        let _operator = w.operator();
        w.create("web", w.spec()).await?;
        w.until_running("web").await?;
        let id = w.id("web");
        assert_eq!(w.agent.mutations(), [format!("CreateVM {id}"), format!("StartVM {id}")]);
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn an_agent_that_hangs_delays_and_doubles_nothing() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        for (rpc, fault) in
            [("CreateVM", Fault::HangAfter), ("StartVM", Fault::HangBefore), ("GetVM", Fault::HangBefore)]
        {
            w.agent.fail(rpc, fault);
        }
        let _operator = w.operator();
        w.create("web", w.spec()).await?;
        w.until_running("web").await?;
        assert_eq!(w.agent.shared.created.load(Ordering::SeqCst), 1);
        eventually("no connection is left", async || {
            (w.agent.shared.open.load(Ordering::SeqCst) <= 1).then_some(())
        })
        .await
    });
}

#[test]
fn an_address_that_refuses_is_said_and_can_be_corrected() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        w.create("web", coracle_api::MikromVMSpec { agent_address: "127.0.0.1:1".into(), ..w.spec() })
            .await?;
        let vm = w.until_reason("web", "AgentUnreachable").await?;
        assert!(message(&vm).contains("127.0.0.1:1") && message(&vm).contains("refused"), "{}", message(&vm));
        w.until_event("web", "AgentUnreachable").await?;
        w.patch("web", json!({"spec": {"agentAddress": w.agent.address}})).await?;
        let vm = w.until_running("web").await?;
        assert_eq!(vm.status.unwrap().agent_address, w.agent.address);
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn many_at_once_all_converge() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        for n in 0..50 {
            w.create(&format!("vm-{n}"), w.spec()).await?;
        }
        for n in 0..50 {
            w.until_running(&format!("vm-{n}")).await?;
        }
        assert_eq!(w.agent.shared.created.load(Ordering::SeqCst), 50);
        let all: Vec<MikromVM> = w.vms().list(&Default::default()).await?.items;
        for vm in &all {
            w.delete(&vm.name_any()).await?;
        }
        for vm in &all {
            w.until_gone(&vm.name_any()).await?;
        }
        assert_eq!(w.agent.machines(), [] as [&str; 0]);
        Ok::<_, anyhow::Error>(())
    });
}
