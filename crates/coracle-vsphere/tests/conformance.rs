//! Contract of the port, run against the fake and against a vCenter simulator.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod support;

use bytes::Bytes;
use coracle_testkit::netns;
use coracle_vsphere::{Change, FaultClass, Vsphere, Wanted};
use coracle_vsphere_testing::FakeVsphere;
use futures_util::{FutureExt as _, StreamExt as _, stream};
use sha2::{Digest as _, Sha256};
use support::{client, credentials, site_spec, vm_spec};

/// Life cycle of one VM, and all forms in which names and files are requested.
async fn check(vsphere: &dyn Vsphere) -> anyhow::Result<()> {
    let site = vsphere.site(&site_spec()).await?;
    let spec = vm_spec("worker-a", 1);
    let wanted = Wanted {
        instance_uuid: spec.instance_uuid.clone(),
        uuids: vec![spec.uuid.clone()],
        name: spec.name.clone(),
    };
    assert_eq!(vsphere.find(&site, &wanted).await?, [], "nothing is there before");

    let mut machines = vsphere.machines(&site);
    let store = vsphere.place(&site, &spec).await?;
    let task = vsphere.create(&site, &store, &spec).await?;
    let object = vsphere.wait_task(&task).await?.unwrap();
    assert_eq!(vsphere.wait_task(&task).await?, Some(object.clone()), "a task that has ended tells it again");
    for one in [
        Wanted { instance_uuid: spec.instance_uuid.clone(), ..Wanted::default() },
        Wanted { uuids: vec![spec.uuid.clone()], ..Wanted::default() },
        Wanted { name: spec.name.clone(), ..Wanted::default() },
        wanted.clone(),
    ] {
        let found = vsphere.find(&site, &one).await?;
        assert_eq!(found.len(), 1, "{one:?}");
        let vm = &found[0];
        assert_eq!((&vm.object, &vm.uuid, &vm.instance_uuid), (&object, &spec.uuid, &spec.instance_uuid));
        assert_eq!((&vm.annotation, vm.powered_on, &vm.name), (&spec.annotation, false, &spec.name));
        assert_eq!(vm.mac.len(), 17, "{:?}", vm.mac);
        assert_eq!(vm.cdrom.as_ref().unwrap().iso.as_deref(), Some(spec.iso.as_str()));
    }
    let seen = vsphere.find(&site, &wanted).await?.remove(0);
    let same =
        |m: &std::sync::Arc<coracle_vsphere::SiteVms>| m.vms.get(&object.id).is_some_and(|vm| **vm == seen);
    machines.wait_for(same).await?;

    let on = vsphere.power_on(&object).await?;
    vsphere.wait_task(&on).await?;
    machines.wait_for(|m| m.vms.get(&object.id).is_some_and(|vm| vm.powered_on)).await?;
    let again = vsphere.power_on(&object).await?;
    let error = vsphere.wait_task(&again).await.unwrap_err();
    assert_eq!(
        (error.fault(), error.class()),
        (Some("InvalidPowerState"), FaultClass::Race),
        "it runs already"
    );

    let drive = vsphere.find(&site, &wanted).await?[0].cdrom.clone().unwrap();
    for change in [
        Change::Annotation("another's".into()),
        Change::InsertIso { cdrom: drive.clone(), iso: "[LocalDS_0] other.iso".into() },
    ] {
        let task = vsphere.reconfigure(&object, &change).await?;
        vsphere.wait_task(&task).await?;
    }
    let vm = &vsphere.find(&site, &wanted).await?[0];
    assert_eq!(vm.annotation, "another's");
    let drive = vm.cdrom.clone().unwrap();
    assert_eq!((drive.iso.as_deref(), drive.connected), (Some("[LocalDS_0] other.iso"), true));
    for (change, iso) in [
        (Change::Disconnect(drive.clone()), Some("[LocalDS_0] other.iso")),
        (Change::Empty(drive.clone()), None),
    ] {
        let task = vsphere.reconfigure(&object, &change).await?;
        vsphere.wait_task(&task).await?;
        let seen = vsphere.find(&site, &wanted).await?[0].cdrom.clone().unwrap();
        assert_eq!((seen.key, seen.iso.as_deref(), seen.connected), (drive.key, iso, false), "{change:?}");
    }

    let off = vsphere.power_off(&object).await?;
    vsphere.wait_task(&off).await?;
    let gone = vsphere.destroy(&object).await?;
    vsphere.wait_task(&gone).await?;
    machines.wait_for(|m| !m.vms.contains_key(&object.id)).await?;
    assert_eq!(vsphere.find(&site, &wanted).await?, [], "nothing is there after");
    let error = match vsphere.destroy(&object).await {
        Err(error) => error,
        Ok(task) => vsphere.wait_task(&task).await.unwrap_err(),
    };
    assert_eq!(error.class(), FaultClass::Gone);

    files(vsphere, &site).await
}

async fn files(vsphere: &dyn Vsphere, site: &coracle_vsphere::Site) -> anyhow::Result<()> {
    let folder = "agent-forge/ns/po ol";
    assert_eq!(vsphere.files(site, folder, "*.iso").await?, None, "no folder yet");
    vsphere.make_folder(site, folder).await?;
    vsphere.make_folder(site, folder).await?;
    let chunks = || stream::iter((0..64).map(|n: u8| Ok(Bytes::from(vec![n; 4096])))).boxed();
    let partial = format!("{folder}/.x.partial");
    vsphere.upload(site, &partial, 64 * 4096, chunks()).await?;
    let found = vsphere.files(site, folder, "*.partial").await?.unwrap();
    assert_eq!(
        found.iter().map(|f| (f.name.as_str(), f.size)).collect::<Vec<_>>(),
        [(".x.partial", 64 * 4096)]
    );
    let iso = format!("{folder}/a.iso");
    assert!(vsphere.move_file(site, &partial, &iso).await?);
    let whole: Vec<u8> = (0..64).flat_map(|n: u8| vec![n; 4096]).collect();
    assert_eq!(
        vsphere.digest(site, &iso).await?,
        Some(hex::encode(Sha256::digest(&whole))),
        "read back whole"
    );
    assert!(vsphere.digest(site, &format!("{folder}/none.iso")).await.is_err());
    vsphere.upload(site, &partial, 64 * 4096, chunks()).await?;
    assert!(!vsphere.move_file(site, &partial, &iso).await?, "one of that name is there");
    vsphere.delete_file(site, &partial).await?;
    vsphere.delete_file(site, &partial).await?;
    assert_eq!(vsphere.files(site, folder, "*.partial").await?.unwrap(), []);
    assert_eq!(vsphere.files(site, folder, "a.iso").await?.unwrap().len(), 1);
    Ok(())
}

#[tokio::test]
async fn fake_vsphere_conforms() {
    check(&FakeVsphere::default()).boxed().await.unwrap();
}

#[test]
fn client_conforms_on_vcsim() {
    netns::run(|| async {
        let Some(vcsim) = support::vcsim(&[])? else { return Ok(()) };
        let client = client(&credentials(&vcsim)).await?;
        check(&client).boxed().await?;
        client.close().await;
        anyhow::Ok(())
    });
}
