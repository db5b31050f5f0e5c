//! The controller's contract with nodes (docs/reference/agent-service.md), over both services.

use std::sync::atomic::Ordering;

use coracle_api::{MikromVM, Phase};
use coracle_proto::firecracker::VmState;
use kube::ResourceExt as _;
use serde_json::json;
use tonic::Code;

use crate::{
    fake_agent::{FakeAgent, Fault},
    world::{Operator, World, eventually, message, ready},
};

/// Defines a test for each scenario, in the world that `$world` creates.
macro_rules! scenarios {
    ($world:path: $($name:ident),+ $(,)?) => {$(
        #[test]
        fn $name() {
            cluster::run(|cluster| async move { super::$name($world(cluster).await?).await });
        }
    )+};
}

/// Scenarios with a node that has only the agent service.
mod agent_service {
    use coracle_testkit::cluster;

    use crate::world::World;

    scenarios! {
        World::new:
        create_to_running_in_three_writes,
        quiet_object_is_reconciled_and_never_written,
        transient_error_leaves_the_status_unchanged,
        failed_read_of_a_running_vm_changes_nothing,
        permanent_error_is_reported_and_can_be_fixed,
        in_band_error_is_classified_by_its_text,
        repeated_internal_is_reported_and_keeps_the_phase,
        deletion_stops_deletes_and_removes_the_finalizer,
        edited_address_does_not_redirect_deletion,
        vm_of_another_object_is_not_adopted,
        vm_made_by_hand_is_adopted_with_a_mark_only,
        already_exists_counts_as_created,
        hanging_agent_causes_no_second_vm,
        refusing_address_is_reported_and_can_be_corrected,
        many_vms_at_once_converge,
        spec_edited_before_create_answers_is_honoured,
        spec_edited_while_create_times_out_is_honoured,
        agent_outside_the_cluster_is_not_dialled,
    }
}

/// Scenarios with a node that announces its host service.
mod host_service {
    use coracle_testkit::cluster;

    use crate::world::World;

    scenarios! {
        World::with_host_service:
        create_to_running_in_three_writes,
        quiet_object_is_reconciled_and_never_written,
        transient_error_leaves_the_status_unchanged,
        failed_read_of_a_running_vm_changes_nothing,
        permanent_error_is_reported_and_can_be_fixed,
        repeated_internal_is_reported_and_keeps_the_phase,
        deletion_stops_deletes_and_removes_the_finalizer,
        edited_address_does_not_redirect_deletion,
        vm_of_another_object_is_not_adopted,
        vm_made_by_hand_is_adopted_with_a_mark_only,
        already_exists_counts_as_created,
        hanging_agent_causes_no_second_vm,
        refusing_address_is_reported_and_can_be_corrected,
        many_vms_at_once_converge,
        spec_edited_before_create_answers_is_honoured,
        spec_edited_while_create_times_out_is_honoured,
    }
}

async fn create_to_running_in_three_writes(w: World) -> anyhow::Result<()> {
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
    assert!(w.agent.shared.fences.lock().unwrap().iter().all(|f| *f == (made.uid().unwrap(), "1".into())));
    assert_eq!((status.phase, status.vm_id.as_str()), (Some(Phase::Running), id.as_str()));
    assert_eq!(status.ip_address, "10.100.0.42");
    assert_eq!(status.agent_address, w.agent.address);
    assert!(status.created_at.is_some() && status.observed_generation == Some(1));
    assert_eq!(vm.finalizers(), ["vm.mikrom.es/finalizer"]);
    let all = async || Some(writes.all()).filter(|all| all.last().is_some_and(MikromVM::is_provisioned));
    let writes = eventually("the last write is seen", all).await?.len() - 1; // the first is the user's own
    println!("writes from create to Running: {writes}");
    assert_eq!(writes, 3, "finalizer, binding, Running");
    w.until_event("web", "Started").await?;
    operator.stop().await
}

async fn quiet_object_is_reconciled_and_never_written(w: World) -> anyhow::Result<()> {
    let _operator = w.operator();
    w.create("web", w.spec()).await?;
    w.until_running("web").await?;
    let (writes, looks) = (w.writes("web").await?, w.agent.count("GetVM"));
    eventually("five more reads", async || (w.agent.count("GetVM") >= looks + 5).then_some(())).await?;
    assert_eq!(writes.all().len(), 0);
    assert_eq!(w.agent.count("CreateVM"), 1, "a second reconcile makes no second create");
    assert_eq!(w.agent.count("StartVM"), 1);
    eventually("only the event stream is connected", async || {
        (w.agent.shared.open.load(Ordering::SeqCst) == 1).then_some(())
    })
    .await
}

async fn transient_error_leaves_the_status_unchanged(w: World) -> anyhow::Result<()> {
    for (code, name) in [
        (Code::Unavailable, "unavailable"),
        (Code::Internal, "internal"),
        (Code::Aborted, "aborted"),
        (Code::ResourceExhausted, "exhausted"),
        (Code::DeadlineExceeded, "deadline"),
    ] {
        w.agent.fail("CreateVM", Fault::Status(code, "a failure"));
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
    Ok(())
}

async fn failed_read_of_a_running_vm_changes_nothing(w: World) -> anyhow::Result<()> {
    let _operator = w.operator();
    w.create("web", w.spec()).await?;
    let before = w.until_running("web").await?;
    w.agent.fail("GetVM", Fault::Status(Code::Unavailable, "a failure"));
    w.agent.fail("GetVM", Fault::Status(Code::Internal, "another"));
    let looks = w.agent.count("GetVM");
    eventually("the failures are over", async || (w.agent.count("GetVM") >= looks + 4).then_some(())).await?;
    let after = w.vms().get("web").await?;
    assert_eq!(before.resource_version(), after.resource_version());
    Ok(())
}

async fn permanent_error_is_reported_and_can_be_fixed(w: World) -> anyhow::Result<()> {
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
    // Retries write nothing, and a corrected spec is used.
    let tries = w.agent.count("CreateVM");
    eventually("more tries", async || (w.agent.count("CreateVM") >= tries + 3).then_some(())).await?;
    assert_eq!(w.vms().get("web").await?.resource_version(), vm.resource_version());
    w.agent.fail_always("CreateVM", None);
    w.patch("web", json!({"spec": {"image": "docker.io/myorg/right:1"}})).await?;
    w.until_running("web").await?;
    assert_eq!(w.agent.request(&w.id("web")).image_ref, "docker.io/myorg/right:1");
    Ok(())
}

async fn in_band_error_is_classified_by_its_text(w: World) -> anyhow::Result<()> {
    let _operator = w.operator();
    w.agent.fail("CreateVM", Fault::InBand("jailer: exit status 1")); // INTERNAL: passes
    w.create("one", w.spec()).await?;
    w.until_running("one").await?;
    w.agent.fail("StopVM", Fault::InBand("VM one not found"));
    w.agent.fail("DeleteVM", Fault::InBand("VM one not found"));
    w.delete("one").await?;
    w.until_gone("one").await?;
    assert_eq!(w.agent.machines(), [] as [&str; 0], "tried again until it is seen to be gone");
    Ok(())
}

async fn repeated_internal_is_reported_and_keeps_the_phase(w: World) -> anyhow::Result<()> {
    w.agent.fail_always(
        "CreateVM",
        Some(Fault::Status(Code::Internal, "failed to start VM task: no such image")),
    );
    let _operator = w.operator();
    w.create("web", w.spec()).await?;
    let vm = w.until_reason("web", "AgentInternalError").await?;
    assert_eq!(vm.status.as_ref().unwrap().phase, Some(Phase::Creating), "the phase stays");
    assert!(w.agent.count("CreateVM") >= 3, "reported only after three in a row");
    assert!(w.until_event("web", "AgentInternalError").await?.contains("no such image"));
    w.agent.fail_always("CreateVM", None);
    w.until_running("web").await?;
    Ok(())
}

async fn deletion_stops_deletes_and_removes_the_finalizer(w: World) -> anyhow::Result<()> {
    let _operator = w.operator();
    w.create("web", w.spec()).await?;
    w.until_running("web").await?;
    w.agent.fail("StopVM", Fault::Status(Code::NotFound, "VM not found"));
    w.delete("web").await?;
    w.until_gone("web").await?;
    let id = w.id("web");
    assert_eq!(w.agent.mutations()[2..], [format!("StopVM {id}"), format!("DeleteVM {id}")]);
    assert_eq!(w.agent.machines(), [] as [&str; 0]);
    Ok(())
}

async fn edited_address_does_not_redirect_deletion(w: World) -> anyhow::Result<()> {
    let other = FakeAgent::start(&w.net).await;
    let _operator = w.operator();
    w.create("web", w.spec()).await?;
    w.until_running("web").await?;
    w.patch("web", json!({"spec": {"agentAddress": other.address, "nodeName": "elsewhere"}})).await?;
    let looks = w.agent.count("GetVM");
    eventually("it is read at its agent", async || (w.agent.count("GetVM") >= looks + 3).then_some(()))
        .await?;
    assert_eq!(w.vms().get("web").await?.status.unwrap().agent_address, w.agent.address);
    w.delete("web").await?;
    w.until_gone("web").await?;
    assert_eq!(w.agent.machines(), [] as [&str; 0]);
    assert_eq!(other.mutations(), [] as [&str; 0], "the other agent gets no call");
    Ok(())
}

async fn vm_of_another_object_is_not_adopted(w: World) -> anyhow::Result<()> {
    w.agent.add_vm(&w.id("web"), Some("someone-else"), VmState::Running);
    let _operator = w.operator();
    w.create("web", w.spec()).await?;
    let vm = w.until_reason("web", "VMIDConflict").await?;
    assert!(vm.status.as_ref().unwrap().vm_id.is_empty());
    w.until_event("web", "VMIDConflict").await?;
    w.delete("web").await?;
    w.until_gone("web").await?;
    assert_eq!(w.agent.mutations(), [] as [&str; 0]);
    assert_eq!(w.agent.machines(), [format!("{} VM_STATE_RUNNING", w.id("web"))], "and not deleted with it");
    Ok(())
}

async fn vm_made_by_hand_is_adopted_with_a_mark_only(w: World) -> anyhow::Result<()> {
    w.agent.add_vm(&w.id("web"), None, VmState::Stopped);
    let _operator = w.operator();
    w.create("web", w.spec()).await?;
    let refused = w.until_reason("web", "VMIDConflict").await?;
    assert!(message(&refused).contains("coracle.dev/adopt"), "{refused:?}");
    assert_eq!(w.agent.mutations(), [] as [&str; 0]);
    w.agent.mark(&w.id("web"), &format!("{}/web", w.ns));
    w.until_running("web").await?;
    assert_eq!(w.agent.mutations(), [format!("StartVM {}", w.id("web"))]);
    Ok(())
}

async fn already_exists_counts_as_created(w: World) -> anyhow::Result<()> {
    w.agent.fail("GetVM", Fault::Status(Code::NotFound, "VM not found")); // for the first read only
    w.agent.add_vm(&w.id("web"), None, VmState::Running);
    w.agent.mark(&w.id("web"), &format!("{}/web", w.ns));
    let _operator = w.operator();
    w.create("web", w.spec()).await?;
    w.until_running("web").await?;
    let id = w.id("web");
    assert_eq!(w.agent.mutations(), [format!("CreateVM {id}"), format!("StartVM {id}")]);
    Ok(())
}

async fn hanging_agent_causes_no_second_vm(w: World) -> anyhow::Result<()> {
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
}

async fn refusing_address_is_reported_and_can_be_corrected(w: World) -> anyhow::Result<()> {
    let _operator = w.operator();
    w.create("web", coracle_api::MikromVMSpec { agent_address: "127.0.0.1:1".into(), ..w.spec() }).await?;
    let vm = w.until_reason("web", "AgentUnreachable").await?;
    assert_eq!(message(&vm), "agent 127.0.0.1:1 does not answer", "not how the connection failed");
    w.until_event("web", "AgentUnreachable").await?;
    w.patch("web", json!({"spec": {"agentAddress": w.agent.address}})).await?;
    let vm = w.until_running("web").await?;
    assert_eq!(vm.status.unwrap().agent_address, w.agent.address);
    Ok(())
}

async fn many_vms_at_once_converge(w: World) -> anyhow::Result<()> {
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
    Ok(())
}

/// Edits the image while the first CreateVM is under way, and waits for the VM.
async fn edit_during_creation(
    w: &World,
    fault: Fault,
    edited: impl FnOnce(),
) -> anyhow::Result<(MikromVM, String)> {
    w.agent.fail("CreateVM", fault);
    w.create("web", w.spec()).await?;
    eventually("the creation is under way", async || (w.agent.count("CreateVM") == 1).then_some(())).await?;
    w.patch("web", json!({"spec": {"image": "docker.io/myorg/my-app:v2"}})).await?;
    edited();
    let vm = w.until_running("web").await?;
    let image = w.agent.request(&w.id("web")).image_ref;
    Ok((vm, image))
}

async fn spec_edited_before_create_answers_is_honoured(w: World) -> anyhow::Result<()> {
    let operator = w.operator();
    let answer = std::sync::Arc::new(tokio::sync::Notify::new());
    let (vm, image) = edit_during_creation(&w, Fault::Hold(answer.clone()), || answer.notify_one()).await?;
    assert_eq!((image.as_str(), vm.metadata.generation), ("docker.io/myorg/my-app:v2", Some(2)));
    operator.stop().await
}

async fn spec_edited_while_create_times_out_is_honoured(w: World) -> anyhow::Result<()> {
    let operator = w.operator();
    let (vm, image) = edit_during_creation(&w, Fault::HangAfter, || ()).await?;
    assert_eq!((image.as_str(), vm.metadata.generation), ("docker.io/myorg/my-app:v2", Some(2)));
    operator.stop().await
}

async fn agent_outside_the_cluster_is_not_dialled(w: World) -> anyhow::Result<()> {
    let mut config = w.config();
    config.scope.allowed.clear();
    let _operator = Operator::start(w.client.clone(), config);
    w.create("web", w.spec()).await?;
    let vm = w.until_reason("web", "AgentNotAllowed").await?;
    assert_eq!(vm.status.unwrap().phase, Some(Phase::Pending));
    assert_eq!(w.agent.shared.open.load(Ordering::SeqCst), 0);
    // An announcement by a node makes the agent part of the cluster.
    w.announce("n1", &w.agent.address, 4, 4096, 600).await?;
    w.until_running("web").await?;
    Ok(())
}
