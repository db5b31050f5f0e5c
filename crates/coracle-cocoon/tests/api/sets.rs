//! Sets on a real API server.

use coracle_api::cocoon::{SetPhase, VmSpecAnnotations, keys};
use coracle_testkit::{cluster, eventually, world::until_event};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use crate::node::NODE;
use crate::world::{World, message};

#[test]
fn set_is_created_scaled_and_deleted() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let operator = w.operator();
        let win = json!({"name": "win", "mode": "static", "staticIP": "10.0.0.9", "staticVMID": "vm-9"});
        w.create_set("demo", json!({"agent": {"image": "u", "replicas": 2}, "toolboxes": [win]})).await?;
        let set = w.until_phase("demo", SetPhase::Running).await?;
        assert_eq!(w.pod_names().await?, ["demo-0", "demo-1", "demo-2", "demo-win"]);
        let status = set.status.clone().unwrap();
        assert_eq!((status.ready_agents, status.desired_agents), (3, 3));
        assert_eq!(message(&set), "3/3 agents ready, 1/1 toolboxes ready");
        assert_eq!(status.agents[1].forked_from, w.vm("demo-0"));
        assert_eq!(status.agents[0].ip, "10.88.0.2");
        assert_eq!(status.toolboxes[0].vm_id, "vm-9", "of the spec");
        let sub = w.pods().get("demo-1").await?;
        assert_eq!(sub.spec.unwrap().node_name.as_deref(), Some(NODE), "bound to the node of its source");
        w.patch_set("demo", json!({"agent": {"replicas": 0}})).await?;
        w.until_phase("demo", SetPhase::Running).await?;
        eventually("sub-agents are gone", async || {
            (w.pod_names().await.ok()? == ["demo-0", "demo-win"]).then_some(())
        })
        .await?;
        assert!(w.tags.contains(&w.vm("demo-1"), "latest"), "saved when its pod was deleted");
        w.delete_set("demo").await?;
        w.until_gone("demo").await?;
        assert_eq!(
            w.tags.all(),
            [format!("{}:latest", w.vm("demo-1")), format!("{}:latest", w.vm("demo-2"))]
        );
        operator.stop().await
    });
}

#[test]
fn suspended_set_is_saved_and_resumed() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        w.create_set("demo", json!({"agent": {"image": "u", "replicas": 1}})).await?;
        w.until_phase("demo", SetPhase::Running).await?;
        w.patch_set("demo", json!({"suspend": true})).await?;
        w.until_phase("demo", SetPhase::Suspended).await?;
        assert!(w.node.vms().is_empty() && w.tags.contains(&w.vm("demo-0"), "hibernate"));
        assert_eq!(w.pod_names().await?, ["demo-0", "demo-1"], "the pods stay");
        w.patch_set("demo", json!({"suspend": false})).await?;
        w.until_phase("demo", SetPhase::Running).await?;
        assert_eq!(w.node.begun()[2..].len(), 2);
        assert!(w.node.begun()[2..].iter().all(|begun| begun.ends_with(" restored")), "{:?}", w.node.begun());
        anyhow::Ok(())
    });
}

/// Naive implementation: tags are removed before pods; the node pushes while a pod ends, and the tag returns.
#[test]
fn deleted_set_leaves_no_saved_state() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        w.create_set("demo", json!({"agent": {"image": "u"}})).await?;
        w.until_phase("demo", SetPhase::Running).await?;
        w.tags.push(&w.vm("demo-0"), "hibernate");
        w.delete_set("demo").await?;
        w.until_gone("demo").await?;
        assert_eq!(w.tags.all(), [""; 0], "neither the old state nor what the node saved at the end");
        anyhow::Ok(())
    });
}

/// Naive implementation: the failure is logged and the finalizer removed; guest memory stays in the registry forever.
#[test]
fn deletion_waits_for_the_registry() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        w.create_set("demo", json!({"agent": {"image": "u"}})).await?;
        w.until_phase("demo", SetPhase::Running).await?;
        w.tags.set_broken(true);
        w.delete_set("demo").await?;
        eventually("the pods are gone", async || w.pod_names().await.ok()?.is_empty().then_some(())).await?;
        let seen = w.metrics.reconciles(coracle_cocoon::SETS);
        let more = || (w.metrics.reconciles(coracle_cocoon::SETS) >= seen + 2).then_some(());
        eventually("more passes", async || more()).await?;
        assert!(w.sets().get_opt("demo").await?.is_some(), "the finalizer holds the object");
        w.tags.set_broken(false);
        w.until_gone("demo").await?;
        assert_eq!(w.tags.all(), [""; 0]);
        anyhow::Ok(())
    });
}

/// Namespace `a` with set `b-c`, and namespace `a-b` with set `c`, have the same VM names.
#[test]
fn vm_name_of_another_namespace_is_refused() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        let namespaces: Api<k8s_openapi::api::core::v1::Namespace> = Api::all(w.client.clone());
        let other = format!("{}-b", w.ns);
        let object = json!({"metadata": {"name": other}});
        namespaces.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
        let mut config = w.config();
        config.namespace = None;
        let client = w.client.clone();
        let _operator =
            coracle_testkit::world::Process::start(|stop| coracle_cocoon::run(client, config, stop));
        w.create_set("b-c", json!({"agent": {"image": "u"}})).await?;
        w.until_phase("b-c", SetPhase::Running).await?;
        let own = std::mem::replace(&mut w.ns, other);
        w.create_set("c", json!({"agent": {"image": "u"}})).await?;
        let set = w.until_phase("c", SetPhase::Failed).await?;
        assert!(message(&set).contains(&format!("belongs to pod {own}/b-c-0")), "{}", message(&set));
        assert!(w.pod_names().await?.is_empty());
        until_event(&w.client, &w.ns, "c", "VMNameTaken").await?;
        w.tags.push(&format!("vk-{own}-b-c-0"), "hibernate");
        w.delete_set("c").await?;
        w.until_gone("c").await?;
        assert!(w.tags.contains(&format!("vk-{own}-b-c-0"), "hibernate"), "it is the other's state");
        anyhow::Ok(())
    });
}

#[test]
fn pod_of_another_owner_is_not_taken_over() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let pod = w.create_pod("demo-0").await?;
        let _operator = w.operator();
        w.create_set("demo", json!({"agent": {"image": "u"}})).await?;
        let set = w.until_phase("demo", SetPhase::Failed).await?;
        assert!(message(&set).contains("does not belong to the CocoonSet"), "{}", message(&set));
        assert_eq!(w.pods().get("demo-0").await?.uid(), pod.uid());
        anyhow::Ok(())
    });
}

#[test]
fn released_set_continues_from_its_saved_state() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        w.create_set("demo", json!({"agent": {"image": "u"}, "hibernatePolicy": "release"})).await?;
        w.until_phase("demo", SetPhase::Running).await?;
        w.patch_set("demo", json!({"suspend": true})).await?;
        w.until_phase("demo", SetPhase::Suspended).await?;
        eventually("the pod is gone", async || w.pod_names().await.ok()?.is_empty().then_some(())).await?;
        assert_eq!(w.tags.all(), [format!("{}:hibernate", w.vm("demo-0"))]);
        w.patch_set("demo", json!({"suspend": false})).await?;
        w.until_phase("demo", SetPhase::Running).await?;
        assert_eq!(
            w.node.begun(),
            [format!("{} image", w.vm("demo-0")), format!("{} restored", w.vm("demo-0"))]
        );
        eventually("the saved state is removed", async || w.tags.all().is_empty().then_some(())).await?;
        anyhow::Ok(())
    });
}

#[test]
fn drifted_pod_is_replaced_when_enabled() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.settings.drift = true;
        let _operator = w.operator();
        w.create_set("demo", json!({"agent": {"image": "old", "resources": {"limits": {"cpu": "1000m"}}}}))
            .await?;
        w.until_phase("demo", SetPhase::Running).await?;
        let before = w.pods().get("demo-0").await?.uid();
        w.patch_set("demo", json!({"agent": {"resources": {"limits": {"cpu": 1}}}})).await?;
        w.until_phase("demo", SetPhase::Running).await?;
        assert_eq!(w.pods().get("demo-0").await?.uid(), before, "the same amount in other words");
        w.patch_set("demo", json!({"agent": {"image": "new"}})).await?;
        eventually("a new pod", async || {
            let pod = w.pods().get_opt("demo-0").await.ok()??;
            let is_new = pod.uid() != before && VmSpecAnnotations::from_pod(&pod).image == "new";
            is_new.then_some(())
        })
        .await
    });
}

#[test]
fn schema_refuses_invalid_sets() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let agent = || json!({"image": "u"});
        for (spec, part) in [
            (json!({"agent": {"image": ""}}), "spec.agent.image"),
            (json!({"agent": {"image": "u", "replicas": -1}}), "spec.agent.replicas"),
            (json!({"agent": {"image": "u", "mode": "static"}}), "spec.agent.mode"),
            (json!({"agent": agent(), "toolboxes": [{"name": "T", "image": "t"}]}), "spec.toolboxes[0].name"),
            (json!({"agent": agent(), "toolboxes": [{"name": "7", "image": "t"}]}), "digits only"),
            (json!({"agent": agent(), "toolboxes": [{"name": "a"}]}), "needs an image"),
            (
                json!({"agent": agent(), "toolboxes": [{"name": "a", "mode": "static"}]}),
                "staticIP and staticVMID",
            ),
            (
                json!({"agent": agent(), "toolboxes": [{"name": "a", "image": "t"}, {"name": "a", "image": "t"}]}),
                "Duplicate",
            ),
            (
                json!({"agent": {"image": "u", "replicas": 1}, "hibernatePolicy": "release"}),
                "needs agent.replicas 0",
            ),
        ] {
            let error = format!("{:#}", w.create_set("bad", spec.clone()).await.unwrap_err());
            assert!(error.contains(part), "{spec}: {error}");
        }
        let class = |class: &str| json!({"agent": {"image": "u"}, "snapshotCompatibilityClass": class});
        w.create_set("class", class("a")).await?;
        let error = format!("{:#}", w.patch_set("class", class("b")).await.unwrap_err());
        assert!(error.contains("cannot change once it is set"), "{error}");
        anyhow::Ok(())
    });
}

/// Numbers as quantities, unknown fields, and every field of the two releases.
#[test]
fn manifests_of_existing_users_apply() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let spec: Value = json!({
            "suspend": false, "snapshotPolicy": "main-only", "nodePool": "default",
            "agent": {"replicas": 1, "image": "ubuntu-dev:latest", "mode": "clone", "os": "linux", "network": "dnsmasq-dhcp",
                "storage": "20Gi", "resources": {"requests": {"cpu": 2, "memory": "4Gi"}, "limits": {"cpu": "2"}},
                "envFrom": [{"configMapRef": {"name": "env"}}], "serviceAccountName": "agent",
                "backend": "cloud-hypervisor", "connType": "ssh", "forcePull": true, "noDirectIO": true, "probePort": 22},
            "toolboxes": [
                {"name": "db", "image": "https://images.example/db.qcow2", "mode": "run", "os": "windows", "vncPort": 0},
                {"name": "desk", "mode": "static", "staticIP": "10.0.0.9", "staticVMID": "vm-9", "vncPort": 5901}],
        });
        let set = json!({"apiVersion": "cocoonset.cocoonstack.io/v1", "kind": "CocoonSet", "metadata": {"name": "full"},
            "spec": spec});
        let api: Api<kube::core::DynamicObject> = Api::namespaced_with(
            w.client.clone(),
            &w.ns,
            &kube::core::ApiResource::erase::<coracle_api::CocoonSet>(&()),
        );
        api.patch("full", &PatchParams::apply("kubectl"), &Patch::Apply(set)).await?;
        let read = w.sets().get("full").await?;
        assert_eq!(read.spec.agent.resources.unwrap().requests["cpu"].0, "2");
        assert!(read.spec.agent.no_direct_io && read.spec.agent.force_pull);
        api.delete("full", &DeleteParams::default()).await?;
        assert_eq!(keys::SET_FINALIZER, "cocoonset.cocoonstack.io/finalizer");
        anyhow::Ok(())
    });
}
