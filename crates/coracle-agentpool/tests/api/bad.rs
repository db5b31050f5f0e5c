//! Errors of users and of the environment: a condition names each, an event is emitted, and nothing is left half-made.

use coracle_testkit::cluster;
use coracle_vsphere_testing::FakeFault;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use serde_json::json;

use crate::{
    sims::{Style, set},
    world::World,
};

async fn waiting(cluster: &'static cluster::Cluster) -> anyhow::Result<World> {
    let mut w = World::fake(cluster).await?;
    w.simulate(Style::Old);
    w.pool(|_| {}).await?;
    w.scale(1).await?;
    Ok(w)
}

#[test]
fn secret_without_key_is_reported_and_next_one_used() {
    cluster::run(|cluster| async move {
        let w = waiting(cluster).await?;
        let secrets: Api<Secret> = Api::namespaced(w.client.clone(), &w.ns);
        set(&secrets, "vsphere-credentials", json!({"data": {"password": null}}), false).await?;
        let _operator = w.operator();
        let message = w.until_reason("w-0", "ProviderUnavailable").await?;
        assert!(message.ends_with("key \"password\" is missing or empty"), "{message}");
        w.until_event("ProviderUnavailable").await?;
        w.until_condition("VsphereReady", "False", "Error").await?;
        set(&secrets, "vsphere-credentials", json!({"stringData": {"password": "new"}}), false).await?;
        w.until_rows(1, "Bound").await?;
        w.until_condition("VsphereReady", "True", "Ready").await.map(drop)
    });
}

#[test]
fn refused_vcenter_login_is_reported_and_recovers() {
    cluster::run(|cluster| async move {
        let w = waiting(cluster).await?;
        w.vcenter.fake().refuse_login(true);
        let _operator = w.operator();
        let message = w.until_reason("w-0", "ProviderUnavailable").await?;
        assert!(message.contains("InvalidLogin"), "{message}");
        w.vcenter.fake().refuse_login(false);
        w.until_rows(1, "Bound").await
    });
}

#[test]
fn unknown_vsphere_object_is_reported_with_its_field() {
    cluster::run(|cluster| async move {
        for field in [
            "vsphere.datacenter",
            "vsphere.network",
            "vsphere.resourcePool",
            "vsphere.isoDatastore",
            "vsphere.datastoreCluster",
        ] {
            let w = waiting(cluster).await?;
            w.vcenter.fake().remove_inventory(field);
            let _operator = w.operator();
            let message = w.until_reason("w-0", "VMCreateFailed").await?;
            assert!(message.starts_with(field), "{message}");
            assert!(
                w.vcenter.vms().await.is_empty() && w.vcenter.fake().stored().is_empty(),
                "nothing half-made"
            );
        }
        anyhow::Ok(())
    });
}

#[test]
fn missing_or_truncated_image_leaves_no_iso() {
    cluster::run(|cluster| async move {
        let w = waiting(cluster).await?;
        w.image.change(|i| i.status = 404);
        let _operator = w.operator();
        let message = w.until_reason("w-0", "ISORefreshFailed").await?;
        assert!(message.contains("HTTP status 404"), "{message}");
        w.until_event("ISORefreshFailed").await?;
        w.until_condition("ISOReady", "False", "ISORefreshFailed").await?;
        w.image.change(|i| (i.status, i.truncate) = (200, true));
        let asked = w.image.seen().asked;
        assert!(
            crate::world::within_limit(async || (w.image.seen().asked > asked + 1).then_some(()))
                .await
                .is_some()
        );
        assert!(
            w.vcenter.fake().stored().keys().all(|f| !f.ends_with(".iso")),
            "{:?}",
            w.vcenter.fake().stored()
        );
        w.image.change(|i| i.truncate = false);
        w.until_rows(1, "Bound").await?;
        let files = w.vcenter.fake().stored();
        assert_eq!(files.len(), 1, "{files:?}");
        assert!(!w.dump_objects().await?.contains("SECRET-TOKEN"), "the token is in no status and no event");
        anyhow::Ok(())
    });
}

#[test]
fn infra_env_that_is_not_ready_is_awaited() {
    cluster::run(|cluster| async move {
        let w = waiting(cluster).await?;
        w.image_ready(false).await?;
        let _operator = w.operator();
        w.until_reason("w-0", "InfraEnvUnavailable").await?;
        w.until_condition("InfraEnvAvailable", "False", "InfraEnvUnavailable").await?;
        w.image_ready(true).await?;
        w.until_rows(1, "Bound").await
    });
}

#[test]
fn full_datastore_is_reported_and_retried() {
    cluster::run(|cluster| async move {
        let w = waiting(cluster).await?;
        w.vcenter.fake().fail("CreateVM_Task", 0, 1000, FakeFault::Task("NoDiskSpace"));
        let _operator = w.operator();
        let message = w.until_reason("w-0", "VMCreateFailed").await?;
        assert!(message.contains("NoDiskSpace"), "{message}");
        w.until_condition("VsphereReady", "False", "Error").await?;
        w.vcenter.fake().heal();
        w.until_rows(1, "Bound").await
    });
}

#[test]
fn vm_with_notes_of_another_owner_is_left_alone() {
    cluster::run(|cluster| async move {
        let w = waiting(cluster).await?;
        let operator = w.operator();
        w.until_rows(1, "Bound").await?;
        let vm = w.until_vms(1).await?.remove(0);
        operator.kill().await;
        w.vcenter
            .fake()
            .change_vm(&vm.object.id, |vm| vm.as_mut().unwrap().annotation = "another owner".into());
        let _operator = w.operator();
        w.until_reason("w-0", "VMOwnershipMismatch").await?;
        w.scale(0).await?;
        w.until_event("VMOwnershipMismatch").await?;
        assert_eq!(w.vcenter.vms().await.len(), 1, "it is not ours to destroy");
        anyhow::Ok(())
    });
}

#[test]
fn unowned_vm_is_not_adopted_without_claim() {
    cluster::run(|cluster| async move {
        let w = waiting(cluster).await?;
        let operator = w.operator();
        w.until_rows(1, "Bound").await?;
        // The same VM as one that a user created: no notes, and an unrecorded UUID.
        let vm = w.until_vms(1).await?.remove(0);
        operator.kill().await;
        let other = "11111111-2222-3333-4444-555555555555";
        w.vcenter.fake().change_vm(&vm.object.id, |vm| {
            let vm = vm.as_mut().unwrap();
            (vm.annotation, vm.uuid, vm.instance_uuid) = (String::new(), other.into(), "none".into());
        });
        set(&w.requests(), "w-0", json!({"status": {"vm": null}}), true).await?;
        let _operator = w.operator();
        w.until_reason("w-0", "VMOwnershipMismatch").await?;
        assert_eq!(w.vcenter.vms().await.len(), 1, "no second VM of that name is made");
        set(
            &w.requests(),
            "w-0",
            json!({"metadata": {"annotations": {"coracle.dev/claim-vm": other}}}),
            false,
        )
        .await?;
        w.until_reason("w-0", "VMCreated").await?;
        let vm = w.until_vms(1).await?.remove(0);
        assert!(
            vm.annotation.starts_with("agent-forge.containeroo.ch/vsphere-agent-uid="),
            "{}",
            vm.annotation
        );
        anyhow::Ok(())
    });
}

#[test]
fn two_vms_with_the_same_owner_notes_are_both_kept() {
    cluster::run(|cluster| async move {
        let w = waiting(cluster).await?;
        let operator = w.operator();
        w.until_rows(1, "Bound").await?;
        let vm = w.until_vms(1).await?.remove(0);
        operator.kill().await;
        w.vcenter.fake().change_vm("a-copy", |place| {
            let mut copy = vm.clone();
            copy.object.id = "a-copy".into();
            *place = Some(copy);
        });
        w.scale(0).await?;
        let _operator = w.operator();
        w.until_event("VMOwnershipMismatch").await?;
        assert_eq!(w.vcenter.vms().await.len(), 2, "which of them was ours cannot be known");
        anyhow::Ok(())
    });
}

#[test]
fn vcenter_certificate_with_wrong_thumbprint_is_refused() {
    cluster::run(|cluster| async move {
        let Some(mut w) = World::real(cluster, &[]).await? else { return anyhow::Ok(()) };
        w.simulate(Style::Old);
        w.pool(|_| {}).await?;
        let secrets: Api<Secret> = Api::namespaced(w.client.clone(), &w.ns);
        let right = w.vcenter.vcsim().thumbprint().to_owned();
        set(&secrets, "vsphere-credentials", json!({"stringData": {"thumbprint": "ab".repeat(32)}}), false)
            .await?;
        let _operator = w.operator();
        w.scale(1).await?;
        let message = w.until_reason("w-0", "ProviderUnavailable").await?;
        assert!(message.contains("thumbprint"), "{message}");
        w.until_event("ProviderUnavailable").await?;
        set(&secrets, "vsphere-credentials", json!({"stringData": {"thumbprint": right}}), false).await?;
        w.until_rows(1, "Bound").await
    });
}

#[test]
fn sizes_that_no_vm_can_have_are_refused_by_the_api_server() {
    cluster::run(|cluster| async move {
        let w = World::fake(cluster).await?;
        for (field, value) in [
            ("numCPUs", 0),
            ("numCPUs", 129),
            ("memoryMiB", 1023),
            ("memoryMiB", 1_048_577),
            ("diskGiB", 19),
            ("diskGiB", 65_537),
        ] {
            let refused = w.pool(|pool| {
                let template = &mut pool.spec.template;
                match field {
                    "numCPUs" => template.num_cpus = value,
                    "memoryMiB" => template.memory_mib = value,
                    _ => template.disk_gib = value,
                }
            });
            let error = refused.await.unwrap_err().to_string();
            assert!(error.contains(&format!("spec.template.{field}")), "{value}: {error}");
        }
        anyhow::Ok(())
    });
}
