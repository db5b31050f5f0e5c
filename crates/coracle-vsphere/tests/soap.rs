//! Tests of the client against a vCenter that misbehaves.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod scripted;
mod support;

use std::{sync::Arc, time::Duration};

use coracle_testkit::{
    netns,
    vcsim::{Act, Rule},
};
use coracle_vsphere::{Credentials, FaultClass, SiteSpec, Vsphere, VsphereError, Wanted};
use futures_util::future::{join_all, try_join_all};
use support::{client, credentials, secret, site_spec, vm_spec};

fn run<Fut: Future<Output = anyhow::Result<()>>>(
    args: &'static [&'static str],
    body: impl FnOnce(coracle_testkit::vcsim::Vcsim) -> Fut + Send,
) {
    netns::run(move || async move {
        match support::vcsim(args)? {
            Some(vcsim) => body(vcsim).await,
            None => Ok(()),
        }
    });
}

#[test]
fn twenty_machines_take_six_calls_each_and_shared_waits() {
    run(&["-method-delay", "CreateVm:150,PowerOn:100"], |vcsim| async move {
        let client = Arc::new(client(&credentials(&vcsim)).await?);
        let site = client.site(&site_spec()).await?;
        client.machines(&site).wait_for(|m| m.is_current).await?;
        client.place(&site, &vm_spec("warm", 0)).await?;
        vcsim.reset()?;
        let began = std::time::Instant::now();
        try_join_all((1..=20).map(|n| {
            let (client, site) = (client.clone(), site.clone());
            async move {
                let spec = vm_spec(&format!("w-{n}"), n);
                let wanted = Wanted {
                    instance_uuid: spec.instance_uuid.clone(),
                    uuids: vec![spec.uuid.clone()],
                    name: spec.name.clone(),
                };
                assert!(client.find(&site, &wanted).await?.is_empty());
                let store = client.place(&site, &spec).await?;
                let task = client.create(&site, &store, &spec).await?;
                let vm = client.wait_task(&task).await?.unwrap();
                let task = client.power_on(&vm).await?;
                client.wait_task(&task).await?;
                let up =
                    |m: &Arc<coracle_vsphere::SiteVms>| m.vms.get(&vm.id).is_some_and(|vm| vm.powered_on);
                client.machines(&site).wait_for(up).await.map(drop).unwrap();
                Ok::<_, VsphereError>(())
            }
        }))
        .await?;
        let calls = vcsim.calls()?;
        eprintln!("20 machines in {:?}: {calls:?}", began.elapsed());
        // The number of updates in one answer depends on the computer's speed. That one filter serves all VMs does not.
        let shared = ["WaitForUpdatesEx", "ModifyListView", "CreateFilter", "CreateListView"];
        let is_own = |name: &str| !shared.contains(&name) && name != "CreatePropertyCollector";
        let own: u64 = calls.iter().filter(|(name, _)| is_own(name)).map(|(_, count)| count).sum();
        assert_eq!(own, 20 * 6, "{calls:?}");
        assert_eq!((calls.get("CreateFilter"), calls.get("Login")), (Some(&1), None), "{calls:?}");
        client.close().await;
        Ok(())
    });
}

#[test]
fn expired_session_is_renewed_once_for_all_callers() {
    run(&[], |vcsim| async move {
        let client = client(&credentials(&vcsim)).await?;
        let site = client.site(&site_spec()).await?;
        let mut machines = client.machines(&site);
        machines.wait_for(|m| m.is_current).await?;
        vcsim.reset()?;
        vcsim.expire_sessions()?;
        let wanted = Wanted { name: "absent".into(), ..Wanted::default() };
        for found in join_all((0..10).map(|_| client.find(&site, &wanted))).await {
            assert!(found?.is_empty());
        }
        assert_eq!(vcsim.calls()?.get("Login"), Some(&1), "ten callers log in once");
        // The watch is created again in the new session.
        let spec = vm_spec("after", 1);
        let store = client.place(&site, &spec).await?;
        let task = client.create(&site, &store, &spec).await?;
        assert!(client.wait_task(&task).await?.is_some());
        machines.wait_for(|m| m.is_current && !m.vms.is_empty()).await?;
        client.close().await;
        Ok(())
    });
}

#[test]
fn refused_user_is_not_tried_again_at_once() {
    run(&["-username", "root", "-password", "right"], |vcsim| async move {
        let wrong = client(&credentials(&vcsim)).await.unwrap_err();
        assert_eq!(wrong.class(), FaultClass::Auth);
        let mut data = secret(&vcsim);
        data.insert("username".into(), b"root".to_vec());
        data.insert("password".into(), b"right\n".to_vec());
        let client = client(&Credentials::parse(&data)?).await?;
        client.site(&site_spec()).await?;
        client.forget();
        // The password changes on the server while the client is logged in: it tries once, then no more.
        vcsim.rules(&[Rule::always("Login", Act::Fault("InvalidLogin".into(), String::new()))])?;
        vcsim.expire_sessions()?;
        vcsim.reset()?;
        for _ in 0..5 {
            let error = client.site(&site_spec()).await.unwrap_err();
            assert_eq!(error.class(), FaultClass::Auth, "{error}");
        }
        assert_eq!(vcsim.calls()?.get("Login"), Some(&1));
        client.close().await;
        Ok(())
    });
}

#[test]
fn certificate_is_verified_by_thumbprint_or_authority() {
    run(&[], |vcsim| async move {
        let with = |change: &[(&str, &str)]| {
            let mut data = secret(&vcsim);
            data.remove("thumbprint");
            data.extend(change.iter().map(|(k, v)| ((*k).to_owned(), v.as_bytes().to_vec())));
            Credentials::parse(&data).unwrap()
        };
        let error = client(&with(&[])).await.unwrap_err();
        assert_eq!(error.class(), FaultClass::Config, "the system does not know it: {error:?}");
        let other = "00".repeat(32);
        let error = client(&with(&[("thumbprint", &other)])).await.unwrap_err();
        assert_eq!(error.class(), FaultClass::Config, "{error:?}");
        let error = client(&with(&[("ca.crt", "nonsense")])).await.unwrap_err();
        assert_eq!(error.class(), FaultClass::Config, "{error:?}");
        client(&with(&[("insecure", "true")])).await?.close().await;
        client(&with(&[("thumbprint", vcsim.thumbprint())])).await?.close().await;
        Ok(())
    });
}

#[test]
fn missing_inventory_object_is_reported_with_the_field() {
    run(&[], |vcsim| async move {
        let client = client(&credentials(&vcsim)).await?;
        type Change = fn(&mut SiteSpec);
        let cases: [(Change, &str); 5] = [
            (|s| s.datacenter = "DC9".into(), "vsphere.datacenter: no datacenter \"DC9\""),
            (
                |s| s.resource_pool = "DC0_C0/No".into(),
                "vsphere.resourcePool: no resource pool below the host folder \"DC0_C0/No\"",
            ),
            (|s| s.network = "No Network".into(), "vsphere.network: no network \"No Network\""),
            (|s| s.iso_datastore = "no".into(), "vsphere.isoDatastore: no datastore \"no\""),
            (
                |s| s.datastore_cluster = "no".into(),
                "vsphere.datastoreCluster: no datastore cluster or datastore \"no\"",
            ),
        ];
        for (change, want) in cases {
            let mut spec = site_spec();
            change(&mut spec);
            spec.folder = "must/not/appear".into();
            let error = client.site(&spec).await.unwrap_err();
            assert_eq!((error.to_string().as_str(), error.class()), (want, FaultClass::Config));
        }
        assert_eq!(vcsim.calls()?.get("CreateFolder"), None, "nothing was made for a site that cannot be");
        // A name may also be that of a cluster, a port group or a single datastore.
        let mut spec = site_spec();
        spec.resource_pool = "DC0_C0".into();
        spec.network = "DC0_DVPG0".into();
        spec.datastore_cluster = "LocalDS_0".into();
        let site = client.site(&spec).await?;
        assert_eq!(site.pool.kind, "ResourcePool");
        // The same by absolute inventory paths, as `govc ls` prints them.
        let mut paths = spec.clone();
        paths.resource_pool = "/DC0/host/DC0_C0/Resources".into();
        paths.network = "/DC0/network/DC0_DVPG0".into();
        paths.datastore_cluster = "/DC0/datastore/LocalDS_0".into();
        paths.iso_datastore = "/DC0/datastore/LocalDS_0".into();
        paths.folder = "/DC0/vm/clusters/demo".into();
        let by_path = client.site(&paths).await?;
        assert_eq!((&by_path.pool, &by_path.network, &by_path.iso), (&site.pool, &site.network, &site.iso));
        assert_eq!((&by_path.storage, &by_path.folder), (&site.storage, &site.folder));
        let vm = vm_spec("on-dvs", 1);
        let store = client.place(&site, &vm).await?;
        let task = client.create(&site, &store, &vm).await?;
        assert!(client.wait_task(&task).await?.is_some());
        client.close().await;
        Ok(())
    });
}

#[test]
fn lost_answers_and_503_are_session_errors() {
    run(&[], |vcsim| async move {
        let client = client(&credentials(&vcsim)).await?;
        let site = client.site(&site_spec()).await?;
        let spec = vm_spec("one", 1);
        let store = client.place(&site, &spec).await?;
        for act in [Act::Status(503), Act::Cut] {
            vcsim.rules(&[Rule::next("FindByInventoryPath", 2, act)])?;
            let wanted = Wanted { name: "x".into(), ..Wanted::default() };
            let error = loop {
                match client.find(&site, &wanted).await {
                    Err(error) => break error,
                    Ok(_) => continue,
                }
            };
            assert_eq!(error.class(), FaultClass::Session, "{error}");
        }
        // The VM is created and the answer lost: a search finds it by the UUID that the client chose.
        vcsim.rules(&[Rule::next("CreateVM_Task", 1, Act::CutAfter)])?;
        assert!(client.create(&site, &store, &spec).await.is_err());
        vcsim.rules(&[])?;
        let wanted = Wanted { instance_uuid: spec.instance_uuid.clone(), ..Wanted::default() };
        let mut machines = client.machines(&site);
        tokio::time::timeout(Duration::from_secs(5), machines.wait_for(|m| m.vms.len() == 1)).await??;
        assert_eq!(client.find(&site, &wanted).await?.len(), 1);
        client.close().await;
        Ok(())
    });
}

#[test]
fn pod_without_recommendations_uses_largest_member() {
    run(&[], |vcsim| async move {
        let client = client(&credentials(&vcsim)).await?;
        let site = client.site(&site_spec()).await?;
        vcsim.rules(&[Rule::always(
            "RecommendDatastores",
            Act::Fault("InvalidArgument".into(), String::new()),
        )])?;
        let mut names = Vec::new();
        for n in 0..3 {
            names.push(client.place(&site, &vm_spec(&format!("w{n}"), n)).await?.name);
        }
        names.sort();
        names.dedup();
        assert!(names.len() > 1, "promised space counts, so they spread: {names:?}");
        assert!(names.iter().all(|n| n != "LocalDS_0"), "only members: {names:?}");
        client.close().await;
        Ok(())
    });
}

#[test]
fn tags_are_attached_by_name() {
    run(&[], |vcsim| async move {
        let client = client(&credentials(&vcsim)).await?;
        let site = client.site(&site_spec()).await?;
        let spec = vm_spec("tagged", 1);
        let store = client.place(&site, &spec).await?;
        let task = client.create(&site, &store, &spec).await?;
        let vm = client.wait_task(&task).await?.unwrap();
        let error = client.attach_tags(&vm, &["absent-tag".into()]).await.unwrap_err();
        assert_eq!(error.to_string(), "vsphere.vmTags: no tag \"absent-tag\"");
        client.close().await;
        Ok(())
    });
}
