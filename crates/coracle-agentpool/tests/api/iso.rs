//! Tests of the discovery ISO: requested with validators, uploaded once per revision, repaired, kept while a VM holds it,
//! ejected.

use std::time::Duration;

use coracle_agentpool::IsoVerify;
use coracle_api::agentpool::{IsoStatus, VsphereAgentPool};
use coracle_reconcile::{Backoff, find};
use coracle_testkit::cluster;
use coracle_vsphere::Question;
use coracle_vsphere_testing::FakeFault;
use kube::{
    ResourceExt as _,
    api::{DeleteParams, ListParams},
};
use serde_json::json;

use crate::{
    sims::{Style, set},
    world::{Operator, POOL, World, within_limit},
};

/// Makes the pool ask the image service every 300 ms.
fn set_short_interval(pool: &mut VsphereAgentPool) {
    pool.spec.iso = Some(serde_json::from_value(json!({"checkInterval": "300ms"})).unwrap());
}

async fn iso(w: &World) -> IsoStatus {
    w.pools().get(POOL).await.unwrap().status.unwrap().iso.unwrap_or_default()
}

#[test]
fn new_iso_revision_is_uploaded_once_and_repaired() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        w.pool(|p| p.spec.iso = Some(serde_json::from_value(json!({"checkInterval": "300ms"})).unwrap()))
            .await?;
        let _operator = w.operator();
        w.scale(1).await?;
        w.until_rows(1, "Bound").await?;
        let iso = async || w.pools().get(POOL).await.unwrap().status.unwrap().iso.unwrap();
        let first = iso().await;
        let asked = w.image.seen().asked;
        assert!(within_limit(async || (w.image.seen().asked > asked + 2).then_some(())).await.is_some());
        assert_eq!(w.image.seen().downloads, 1, "asked for again and again, downloaded once");
        w.image.change(|i| i.revision = 2);
        let second = within_limit(async || Some(iso().await).filter(|i| i.path != first.path))
            .await
            .expect("a new ISO");
        assert_eq!((w.image.seen().downloads, second.history.len()), (2, 2));
        w.vcenter.fake().lose_file(&second.path);
        let repaired = within_limit(async || Some(iso().await).filter(|i| i.path != second.path))
            .await
            .expect("a new upload");
        assert!(w.vcenter.fake().stored().contains_key(&repaired.path));
        w.edit(json!({"metadata": {"annotations": {"agent-forge.containeroo.ch/force-iso-refresh": "now"}}}))
            .await?;
        let forced =
            within_limit(async || Some(iso().await).filter(|i| i.force_refresh_token == "now")).await;
        assert_ne!(forced.expect("a forced refresh").path, repaired.path);
        let files = w.vcenter.fake().stored();
        assert!(files.keys().all(|f| !f.ends_with(".partial")), "{files:?}");
        assert!(files.contains_key(&first.path), "the VM still has it in its drive: {files:?}");
        let names = w.requests().list(&ListParams::default()).await?;
        assert_eq!(names.iter().map(|r| r.name_any()).collect::<Vec<_>>(), ["w-0"]);
        anyhow::Ok(())
    });
}

#[test]
fn etag_takes_precedence_over_last_modified() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.image.change(|i| i.etag = true);
        w.simulate(Style::Old);
        w.pool(set_short_interval).await?;
        let _operator = w.operator();
        w.scale(1).await?;
        w.until_rows(1, "Bound").await?;
        let first = iso(&w).await;
        assert_eq!(first.etag, "\"revision-1\"");
        let asked = w.image.seen().asked;
        assert!(within_limit(async || (w.image.seen().asked > asked + 2).then_some(())).await.is_some());
        assert_eq!(w.image.seen().downloads, 1);
        w.image.change(|i| i.revision = 2);
        let second = within_limit(async || Some(iso(&w).await).filter(|i| i.path != first.path)).await;
        let second = second.expect("a new ISO");
        assert_eq!((second.etag.as_str(), second.last_modified), ("\"revision-2\"", first.last_modified));
        assert_eq!(w.image.seen().downloads, 2);
        anyhow::Ok(())
    });
}

#[test]
fn changing_iso_gives_each_vm_one_revision() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        w.pool(set_short_interval).await?;
        w.vcenter.fake().slow_tasks(Duration::from_millis(400));
        let _operator = w.operator();
        w.scale(10).await?;
        within_limit(async || (!w.vcenter.vms().await.is_empty()).then_some(())).await.expect("a first VM");
        let first = iso(&w).await.path;
        w.image.change(|i| i.revision = 2);
        w.until_rows(10, "Bound").await?;
        let second = within_limit(async || Some(iso(&w).await.path).filter(|p| *p != first)).await;
        let both = [first, second.expect("a new ISO")].map(|path| format!("[LocalDS_0] {path}"));
        for vm in w.until_vms(10).await? {
            let held = vm.cdrom.and_then(|drive| drive.iso).unwrap_or_default();
            assert!(both.contains(&held), "{} boots {held}", vm.name);
        }
        assert_eq!(w.image.seen().downloads, 2);
        let files = w.vcenter.fake().stored();
        assert!(files.keys().all(|f| !f.ends_with(".partial")), "{files:?}");
        anyhow::Ok(())
    });
}

#[test]
fn corrupt_iso_is_replaced_and_one_in_use_checked_later() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        w.pool(set_short_interval).await?;
        let mut config = w.config();
        config.iso.verify = IsoVerify::Full;
        let _operator = Operator::start(w.operators.clone(), config);
        w.scale(1).await?;
        w.until_rows(1, "Bound").await?;
        let first = iso(&w).await;
        w.vcenter.fake().lock_file(&first.path, true);
        w.until_condition("ISOReady", "True", "VerificationDeferred").await?;
        w.vcenter.fake().lock_file(&first.path, false);
        w.until_condition("ISOReady", "True", "Reused").await?;
        assert_eq!(w.image.seen().downloads, 1);
        w.vcenter.fake().corrupt_file(&first.path);
        let second = within_limit(async || Some(iso(&w).await).filter(|i| i.path != first.path)).await;
        assert!(w.vcenter.fake().stored().contains_key(&second.expect("a new upload").path));
        anyhow::Ok(())
    });
}

#[test]
fn deleted_iso_is_stored_again_before_it_is_due() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.vcenter.fake().check_images();
        w.simulate(Style::Old);
        w.pool(|p| p.spec.iso = Some(serde_json::from_value(json!({"checkInterval": "24h"})).unwrap()))
            .await?;
        let _operator = w.operator();
        w.scale(1).await?;
        w.until_rows(1, "Bound").await?;
        let first = iso(&w).await;
        w.vcenter.fake().lose_file(&first.path);
        w.scale(2).await?;
        w.until_rows(2, "Bound").await?;
        let second = iso(&w).await;
        assert!(w.vcenter.fake().stored().contains_key(&second.path), "{:?}", w.vcenter.fake().stored());
        assert_eq!(w.image.seen().downloads, 2, "stored again, once");
        anyhow::Ok(())
    });
}

#[test]
fn failed_download_is_shared_by_all_that_wait() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.image.change(|i| i.status = 503);
        w.simulate(Style::Old);
        w.pool(|_| {}).await?;
        let mut config = w.config();
        config.backoff = Backoff { base: Duration::from_secs(5), max: Duration::from_secs(5) };
        let _operator = Operator::start(w.operators.clone(), config);
        w.scale(10).await?;
        for n in 0..10 {
            w.until_reason(&format!("w-{n}"), "ISORefreshFailed").await?;
        }
        assert_eq!(w.image.seen().asked, 1, "ten VMs wait for one download");
        w.image.change(|i| i.status = 200);
        w.until_rows(10, "Bound").await?;
        assert_eq!(w.image.seen().downloads, 1);
        anyhow::Ok(())
    });
}

#[test]
fn undeletable_iso_stays_in_history_and_is_retried() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        w.pool(|p| {
            set_short_interval(p);
            p.spec.iso.as_mut().unwrap().retain_versions = 1;
        })
        .await?;
        let _operator = w.operator();
        w.scale(1).await?;
        w.until_rows(1, "Bound").await?;
        let first = iso(&w).await;
        w.scale(0).await?;
        w.until_vms(0).await?;
        w.vcenter.fake().fail("DeleteDatastoreFile_Task", 0, 1000, FakeFault::Call("FileFault"));
        w.image.change(|i| i.revision = 2);
        w.until_event("ISOPruneFailed").await?;
        assert!(iso(&w).await.history.iter().any(|v| v.path == first.path), "not forgotten");
        w.vcenter.fake().heal();
        let gone = within_limit(async || {
            let history = iso(&w).await.history;
            (history.len() == 1 && history[0].path != first.path).then_some(())
        });
        assert!(gone.await.is_some());
        assert!(!w.vcenter.fake().stored().contains_key(&first.path));
        anyhow::Ok(())
    });
}

#[test]
fn silent_image_service_times_out_and_leaves_no_iso() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.image.change(|i| i.silent = true);
        w.simulate(Style::Old);
        w.pool(|_| {}).await?;
        let mut config = w.config();
        config.iso.idle = Duration::from_millis(300);
        let _operator = Operator::start(w.operators.clone(), config);
        w.scale(1).await?;
        w.until_reason("w-0", "ISORefreshFailed").await?;
        assert!(w.vcenter.fake().stored().keys().all(|f| !f.ends_with(".iso")));
        w.image.change(|i| i.silent = false);
        w.until_rows(1, "Bound").await?;
        let left = within_limit(async || {
            let files = w.vcenter.fake().stored();
            (files.len() == 1).then_some(())
        });
        assert!(left.await.is_some(), "{:?}", w.vcenter.fake().stored());
        anyhow::Ok(())
    });
}

#[test]
fn isos_outlive_their_pool_unless_delete_isos_is_set() {
    cluster::run(|cluster| async move {
        for (annotation, left) in [("false", 1), ("true", 0)] {
            let mut w = World::fake(cluster).await?;
            w.simulate(Style::Old);
            w.pool(|p| {
                p.metadata.annotations = Some([("coracle.dev/delete-isos".into(), annotation.into())].into());
            })
            .await?;
            let _operator = w.operator();
            w.scale(1).await?;
            w.until_rows(1, "Bound").await?;
            w.scale(0).await?;
            w.until_vms(0).await?;
            w.pools().delete(POOL, &DeleteParams::default()).await?;
            let gone = async || w.pools().get_opt(POOL).await.unwrap().is_none().then_some(());
            assert!(within_limit(gone).await.is_some());
            assert_eq!(w.vcenter.fake().stored().len(), left, "delete-isos={annotation}");
        }
        anyhow::Ok(())
    });
}

/// Waits for the condition ISOEjected of `w-0`.
async fn until_ejected(w: &World, status: &str, reason: &str) -> anyhow::Result<()> {
    let said = async || {
        let conditions = w.requests().get("w-0").await.unwrap().status.unwrap().conditions;
        find(&conditions, "ISOEjected").map(|c| (c.status.clone(), c.reason.clone(), c.message.clone()))
    };
    let found = within_limit(async || said().await.filter(|(s, r, _)| s == status && r == reason)).await;
    anyhow::ensure!(found.is_some(), "ISOEjected is {:?}", said().await);
    Ok(())
}

#[test]
fn drive_is_emptied_after_installation_and_question_answered() {
    cluster::run(|cluster| async move {
        let mut w = World::fake(cluster).await?;
        w.simulate(Style::Old);
        w.pool(|p| p.spec.iso = Some(serde_json::from_value(json!({"ejectAfterInstall": true})).unwrap()))
            .await?;
        let operator = w.operator();
        w.scale(1).await?;
        w.until_rows(1, "Bound").await?;
        until_ejected(&w, "False", "WaitingForInstallation").await?;
        let vm = w.until_vms(1).await?.remove(0);
        assert!(vm.cdrom.as_ref().unwrap().iso.is_some());
        // The guest locks the drive: vCenter asks a question, but another one first.
        let question = |message: &str| Question {
            text: String::new(),
            id: "7".into(),
            message_ids: vec![message.into()],
            choices: vec![("0".into(), "button.no".into()), ("1".into(), "button.yes".into())],
        };
        w.vcenter.fake().ask(&vm.object.id, question("msg.something.else"));
        let installed =
            json!({"status": {"conditions": [{"type": "Installed", "status": "True", "reason": "x"}]}});
        set(&w.agents(), &vm.uuid, installed, true).await?;
        until_ejected(&w, "False", "EjectionFailed").await?;
        assert!(!w.vcenter.fake().calls().contains(&"AnswerVM"), "it is left alone");
        let record = w.requests().get("w-0").await?.status.unwrap().iso_ejection.expect("a record");
        assert_eq!((record.vm_name.as_str(), record.device_key), ("w-0", vm.cdrom.unwrap().key));
        operator.kill().await;
        w.vcenter.fake().ask(&vm.object.id, question("msg.cdromdisconnect.locked"));
        let _operator = w.operator();
        until_ejected(&w, "True", "Ejected").await?;
        assert!(w.vcenter.fake().calls().contains(&"AnswerVM"));
        let vm = w.until_vms(1).await?.remove(0);
        assert_eq!(vm.cdrom.unwrap().iso, None);
        let cleared = within_limit(async || {
            w.requests().get("w-0").await.unwrap().status.unwrap().iso_ejection.is_none().then_some(())
        });
        assert!(cleared.await.is_some(), "the record is gone");
        assert_eq!(w.requests().list(&ListParams::default()).await?.items[0].name_any(), "w-0");
        anyhow::Ok(())
    });
}
