//! Behaviour of vCenter that its simulator lacks: unreadable VMs, questions, tasks that never end, hosts that must be named,
//! notes that users write.

use std::time::Duration;

use coracle_api::agentpool::names;
use coracle_testkit::cluster;
use coracle_vsphere::{Question, Vm};
use kube::api::DeleteParams;
use serde_json::json;

use crate::{
    sims::{Style, set},
    world::{World, within_limit},
};

async fn bound(cluster: &'static cluster::Cluster) -> anyhow::Result<(World, crate::world::Operator, Vm)> {
    let mut w = World::fake(cluster).await?;
    w.simulate(Style::Old);
    w.pool(|_| {}).await?;
    let operator = w.operator();
    w.scale(1).await?;
    w.until_rows(1, "Bound").await?;
    let vm = w.until_vms(1).await?.remove(0);
    Ok((w, operator, vm))
}

fn hidden(vm: &Vm) -> impl FnOnce(&mut Option<Vm>) + use<> {
    let lost = Vm {
        name: "/vmfs/volumes/ds/w-0.vmx".into(),
        uuid: String::new(),
        instance_uuid: String::new(),
        annotation: String::new(),
        unreadable: "inaccessible".into(),
        ..vm.clone()
    };
    move |place| *place = Some(lost)
}

#[test]
fn unreadable_vm_is_neither_forgotten_nor_recreated() {
    cluster::run(|cluster| async move {
        let (w, operator, vm) = bound(cluster).await?;
        w.vcenter.fake().change_vm(&vm.object.id, hidden(&vm));
        let message = w.until_reason("w-0", "VMStatusFailed").await?;
        assert!(message.contains("cannot be read: inaccessible"), "{message}");
        // The Machine is deleted meanwhile: the VM cannot be destroyed, and must not be forgotten.
        w.scale(0).await?;
        let deleting = async || {
            let request = w.requests().get_opt("w-0").await.unwrap()?;
            request.metadata.deletion_timestamp.map(drop)
        };
        assert!(within_limit(deleting).await.is_some());
        operator.reconciles(&["vsphereagent"], 5).await?;
        assert!(w.requests().get_opt("w-0").await?.is_some(), "its finalizer holds it");
        assert_eq!(w.vcenter.fake().calls().iter().filter(|c| **c == "CreateVM_Task").count(), 1);
        // The storage returns.
        w.vcenter.fake().change_vm(&vm.object.id, |place| *place = Some(vm.clone()));
        w.until_vms(0).await?;
        let gone = async || w.requests().get_opt("w-0").await.unwrap().is_none().then_some(());
        assert!(within_limit(gone).await.is_some());
        operator.stop().await
    });
}

#[test]
fn vm_that_is_readable_again_emits_an_event() {
    cluster::run(|cluster| async move {
        let (w, operator, vm) = bound(cluster).await?;
        w.vcenter.fake().change_vm(&vm.object.id, hidden(&vm));
        w.until_reason("w-0", "VMStatusFailed").await?;
        w.vcenter.fake().change_vm(&vm.object.id, |place| *place = Some(vm.clone()));
        w.until_reason("w-0", "VMCreated").await?;
        w.until_event("VMRecovered").await?;
        operator.stop().await
    });
}

#[test]
fn existing_vm_without_notes_is_stamped() {
    cluster::run(|cluster| async move {
        let (w, operator, vm) = bound(cluster).await?;
        w.vcenter.fake().change_vm(&vm.object.id, |vm| vm.as_mut().unwrap().annotation.clear());
        let stamped = async || (w.vcenter.vms().await.first()?.annotation == vm.annotation).then_some(());
        assert!(within_limit(stamped).await.is_some(), "{:?}", w.vcenter.vms().await);
        operator.stop().await
    });
}

#[test]
fn vm_without_notes_in_another_folder_is_not_destroyed() {
    cluster::run(|cluster| async move {
        let (w, operator, vm) = bound(cluster).await?;
        operator.kill().await;
        w.vcenter.fake().change_vm(&vm.object.id, |vm| {
            let vm = vm.as_mut().unwrap();
            vm.annotation.clear();
            vm.folder.as_mut().unwrap().id = "elsewhere".into();
        });
        w.scale(0).await?;
        let operator = w.operator();
        w.until_event("VMOwnershipMismatch").await?;
        assert_eq!(w.vcenter.vms().await.len(), 1);
        operator.stop().await
    });
}

#[test]
fn adopted_vm_with_user_notes_is_kept_until_scale_down() {
    cluster::run(|cluster| async move {
        let (w, operator, vm) = bound(cluster).await?;
        operator.kill().await;
        let labels = json!({"metadata": {"labels": {names::CREATED_FOR: names::FOR_ADOPTED}}});
        set(&w.requests(), "w-0", labels, false).await?;
        w.vcenter.fake().change_vm(&vm.object.id, |vm| vm.as_mut().unwrap().annotation = "rack 7".into());
        let operator = w.operator();
        w.until_reason("w-0", "VMAdopted").await?;
        operator.reconciles(&["vsphereagent"], 3).await?;
        w.until_reason("w-0", "VMAdopted").await?;
        assert_eq!(w.vcenter.vms().await[0].annotation, "rack 7", "notes of people stay");
        w.scale(0).await?;
        w.until_vms(0).await?;
        let gone = async || w.requests().get_opt("w-0").await.unwrap().is_none().then_some(());
        assert!(within_limit(gone).await.is_some(), "its finalizer drops");
        operator.stop().await
    });
}

fn question(message: &str) -> Question {
    Question {
        id: "7".into(),
        text: "This VM may have been moved or copied.".into(),
        message_ids: vec![message.into()],
        choices: vec![
            ("0".into(), "Cancel".into()),
            ("1".into(), "I _moved it".into()),
            ("2".into(), "I copied it".into()),
        ],
    }
}

async fn waiting(cluster: &'static cluster::Cluster) -> anyhow::Result<World> {
    let mut w = World::fake(cluster).await?;
    w.simulate(Style::Old);
    w.pool(|_| {}).await?;
    w.scale(1).await?;
    Ok(w)
}

#[test]
fn question_about_moved_files_is_answered_and_the_vm_runs() {
    cluster::run(|cluster| async move {
        let w = waiting(cluster).await?;
        w.vcenter.fake().ask_at_power_on(Some(question("msg.uuid.altered")));
        let operator = w.operator();
        w.until_rows(1, "Bound").await?;
        assert_eq!(w.vcenter.fake().answers(), ["1"]);
        operator.stop().await
    });
}

#[test]
fn other_question_is_reported_and_answered_by_the_pool() {
    cluster::run(|cluster| async move {
        let w = waiting(cluster).await?;
        w.vcenter.fake().ask_at_power_on(Some(question("msg.disk.x")));
        let operator = w.operator();
        let message = w.until_reason("w-0", "VMCreateFailed").await?;
        for part in ["msg.disk.x", "moved or copied", "2 (I copied it)", "coracle.dev/answers"] {
            assert!(message.contains(part), "{part}: {message}");
        }
        assert!(w.vcenter.fake().answers().is_empty(), "nothing is guessed");
        w.edit(json!({"metadata": {"annotations": {"coracle.dev/answers": "msg.disk.x=I copied it"}}}))
            .await?;
        w.until_rows(1, "Bound").await?;
        assert_eq!(w.vcenter.fake().answers(), ["2"]);
        operator.stop().await
    });
}

#[test]
fn task_that_does_not_end_is_reported_and_awaited_again() {
    cluster::run(|cluster| async move {
        let w = waiting(cluster).await?;
        w.vcenter.fake().slow_tasks(Duration::from_secs(3600));
        w.vcenter.fake().limit_waits(Duration::from_millis(500));
        let operator = w.operator();
        let message = w.until_reason("w-0", "VMCreateFailed").await?;
        assert!(message.contains("still runs after"), "{message}");
        w.until_event("VMCreateFailed").await?;
        w.vcenter.fake().end_tasks();
        w.until_rows(1, "Bound").await?;
        assert_eq!(w.vcenter.fake().calls().iter().filter(|c| **c == "CreateVM_Task").count(), 1);
        operator.stop().await
    });
}

#[test]
fn operator_stops_in_time_beside_a_task_that_runs() {
    cluster::run(|cluster| async move {
        let w = waiting(cluster).await?;
        w.vcenter.fake().slow_tasks(Duration::from_secs(3600));
        let operator = w.operator();
        let noted = async || {
            let request = w.requests().get_opt("w-0").await.unwrap()?;
            request.metadata.annotations?.get(names::PENDING_TASK).cloned()
        };
        assert!(within_limit(noted).await.is_some());
        let began = std::time::Instant::now();
        operator.stop().await?;
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        anyhow::Ok(())
    });
}

#[test]
fn host_is_specified_if_vcenter_requires_one() {
    cluster::run(|cluster| async move {
        let w = waiting(cluster).await?;
        w.vcenter.fake().need_host(true);
        let operator = w.operator();
        w.until_rows(1, "Bound").await?;
        assert_eq!(w.vcenter.fake().calls().iter().filter(|c| **c == "CreateVM_Task").count(), 2);
        operator.stop().await
    });
}

#[test]
fn vms_are_deleted_after_their_secret_was_deleted() {
    cluster::run(|cluster| async move {
        let (w, operator, _) = bound(cluster).await?;
        let secrets: kube::Api<k8s_openapi::api::core::v1::Secret> =
            kube::Api::namespaced(w.client.clone(), &w.ns);
        secrets.delete("vsphere-credentials", &DeleteParams::default()).await?;
        w.scale(0).await?;
        w.until_vms(0).await?;
        let gone = async || w.requests().get_opt("w-0").await.unwrap().is_none().then_some(());
        assert!(within_limit(gone).await.is_some());
        operator.stop().await
    });
}

#[test]
fn stalled_image_service_blocks_no_worker() {
    cluster::run(|cluster| async move {
        let w = World::fake(cluster).await?;
        w.image.change(|i| i.silent = true);
        w.pool(|_| {}).await?;
        let mut config = w.config();
        config.iso.idle = Duration::from_secs(3600);
        config.workers = [1, 1, 1];
        let _operator = crate::world::Operator::start(w.operators.clone(), config);
        w.scale(1).await?;
        let (_, agent_machines, _) = crate::sims::apis(&w.client, &w.ns);
        let condition = json!({"type": "Ready", "status": "False", "reason": "NoSuitableAgents"});
        set(&agent_machines, "w-0", json!({"status": {"conditions": [condition]}}), true).await?;
        let asked = async || (w.image.seen().asked > 0).then_some(());
        assert!(within_limit(asked).await.is_some());
        // The only worker is free for another VsphereAgent, whose pool does not exist.
        let other = coracle_api::agentpool::VsphereAgent::new(
            "stray",
            coracle_api::agentpool::VsphereAgentSpec {
                pool_ref: coracle_api::agentpool::NameRef { name: "none".into() },
            },
        );
        w.requests().create(&Default::default(), &other).await?;
        w.until_reason("stray", "PoolNotFound").await.map(drop)
    });
}

#[test]
fn unstored_creation_of_a_killed_operator_is_waited_for() {
    cluster::run(|cluster| async move {
        let w = waiting(cluster).await?;
        let fake = w.vcenter.fake();
        fake.slow_tasks(Duration::from_secs(3600));
        // vCenter accepts the creation, and the operator is killed before it receives the reply.
        let before = fake.calls().len();
        let mut operator = w.operator();
        let creates = || fake.calls().iter().skip(before).position(|call| *call == "CreateVM_Task");
        assert!(within_limit(async || creates().map(drop)).await.is_some());
        operator.kill().await;
        set(&w.requests(), "w-0", json!({"metadata": {"annotations": {names::PENDING_TASK: null}}}), false)
            .await?;
        assert!(fake.vms().is_empty(), "the task still runs");
        fake.forget_calls();
        operator = w.operator();
        let message = w.until_reason("w-0", "VMCreateFailed").await?;
        assert!(message.contains("of an earlier process"), "{message}");
        fake.end_tasks();
        w.until_rows(1, "Bound").await?;
        assert_eq!(fake.calls().iter().filter(|call| **call == "CreateVM_Task").count(), 0);
        assert_eq!(w.vcenter.vms().await.len(), 1);
        operator.stop().await
    });
}

#[test]
fn rows_that_another_writer_left_are_removed() {
    cluster::run(|cluster| async move {
        let w = World::fake(cluster).await?;
        w.pool(|_| {}).await?;
        let ghost =
            json!({"status": {"ownedVMs": [{"name": "ghost", "source": "VsphereAgent", "phase": "Bound"}]}});
        set(&w.pools(), crate::world::POOL, ghost, true).await?;
        let operator = w.operator();
        w.until_rows(0, "").await?;
        operator.stop().await
    });
}

#[test]
fn pools_sharing_a_node_pool_report_several_pools() {
    cluster::run(|cluster| async move {
        let w = waiting(cluster).await?;
        let mut second = crate::objects::pool_object(&w.ns);
        second.metadata.name = Some("second".into());
        w.pools().create(&Default::default(), &second).await?;
        let operator = w.operator();
        let message = w.until_condition("Ready", "False", "SeveralPools").await?;
        assert!(message.contains("second"), "{message}");
        assert!(w.vcenter.vms().await.is_empty(), "no pool is guessed");
        w.pools().delete("second", &DeleteParams::default()).await?;
        w.until_rows(1, "Bound").await?;
        w.until_condition("Ready", "True", "Reconciled").await?;
        operator.stop().await
    });
}

#[test]
fn unowned_vm_is_counted_for_an_empty_pool() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        w.pool(|_| {}).await?;
        let mut registry = prometheus_client::registry::Registry::default();
        let mut config = w.config();
        config.pool_metrics = coracle_agentpool::PoolMetrics::register(&mut registry);
        let operator = crate::world::Operator::start(w.operators.clone(), config);
        w.scale(1).await?;
        w.until_rows(1, "Bound").await?;
        let vm = w.until_vms(1).await?.remove(0);
        w.scale(0).await?;
        w.until_rows(0, "").await?;
        w.until_vms(0).await?;
        let annotation = format!("{}gone", names::OWNER_NOTE);
        w.vcenter.fake().change_vm("leak", |place| *place = Some(Vm { annotation, powered_on: false, ..vm }));
        let want = format!("coracle_agentpool_unowned_vms{{pool=\"{}/{}\"}} 1", w.ns, crate::world::POOL);
        let counted = async || {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            text.contains(&want).then_some(())
        };
        assert!(within_limit(counted).await.is_some());
        operator.stop().await
    });
}
