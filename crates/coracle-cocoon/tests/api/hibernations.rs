//! Hibernations on a real API server.

use coracle_api::cocoon::{HibernationPhase, SetPhase};
use coracle_testkit::{cluster, eventually, world::until_event};
use kube::{Api, api::DeleteParams};
use serde_json::json;

use crate::node::Faults;
use crate::world::World;

#[test]
fn bare_pod_is_hibernated_and_woken() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        // The node keeps the tag: the operator removes it.
        w.node.set_faults(Faults { keeps_tag: true, ..Faults::default() });
        let _operator = w.operator();
        w.create_pod("web").await?;
        w.hibernate("web", "web", "Hibernate").await?;
        let done = w.until_hibernation("web", HibernationPhase::Hibernated).await?;
        assert_eq!(done.status.unwrap().vm_name, w.vm("web"));
        assert!(w.node.vms().is_empty());
        w.hibernate("web", "web", "Wake").await?;
        w.until_hibernation("web", HibernationPhase::Active).await?;
        eventually("the saved state is removed", async || w.tags.all().is_empty().then_some(())).await?;
        until_event(&w.client, &w.ns, "web", "Hibernated").await?;
        until_event(&w.client, &w.ns, "web", "WokenActive").await?;
        anyhow::Ok(())
    });
}

/// Naive implementation: a running container counts as a VM that is awake, and its saved state is removed.
#[test]
fn interrupted_wake_keeps_the_saved_state() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let operator = w.operator();
        w.create_pod("web").await?;
        w.hibernate("web", "web", "Hibernate").await?;
        w.until_hibernation("web", HibernationPhase::Hibernated).await?;
        w.node.set_faults(Faults { interrupts_wakes: true, ..Faults::default() });
        w.hibernate("web", "web", "Wake").await?;
        w.until_hibernation("web", HibernationPhase::Waking).await?;
        let running = |pod: &k8s_openapi::api::core::v1::Pod| {
            let status = pod.status.clone().unwrap_or_default();
            status
                .container_statuses
                .into_iter()
                .flatten()
                .any(|s| s.state.is_some_and(|s| s.running.is_some()))
        };
        eventually("the container runs", async || w.pods().get("web").await.ok().filter(running).map(drop))
            .await?;
        let seen = w.metrics.reconciles(coracle_cocoon::HIBERNATIONS);
        let more = || (w.metrics.reconciles(coracle_cocoon::HIBERNATIONS) >= seen + 3).then_some(());
        eventually("more passes", async || more()).await?;
        assert!(w.tags.contains(&w.vm("web"), "hibernate"), "the only copy of the VM");
        operator.stop().await
    });
}

#[test]
fn set_leaves_the_pod_of_a_hibernation_alone() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        w.create_set("demo", json!({"agent": {"image": "u", "replicas": 1}})).await?;
        w.until_phase("demo", SetPhase::Running).await?;
        w.hibernate("demo-1", "demo-1", "Hibernate").await?;
        w.until_hibernation("demo-1", HibernationPhase::Hibernated).await?;
        w.until_phase("demo", SetPhase::Scaling).await?;
        let seen = w.metrics.reconciles(coracle_cocoon::SETS);
        let more = || (w.metrics.reconciles(coracle_cocoon::SETS) >= seen + 2).then_some(());
        eventually("more passes", async || more()).await?;
        assert_eq!(w.node.vms(), [w.vm("demo-0")], "still hibernated");
        // A hibernation that is being deleted no longer keeps its pod hibernated.
        w.hibernations().delete("demo-1", &DeleteParams::default()).await?;
        w.until_phase("demo", SetPhase::Running).await?;
        assert!(w.node.begun().last().unwrap().ends_with(" restored"));
        anyhow::Ok(())
    });
}

#[test]
fn hibernation_without_a_pod_recovers() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        w.hibernate("late", "late", "Hibernate").await?;
        w.until_hibernation("late", HibernationPhase::Failed).await?;
        w.create_pod("late").await?;
        w.until_hibernation("late", HibernationPhase::Hibernated).await?;
        anyhow::Ok(())
    });
}

#[test]
fn second_hibernation_of_a_pod_is_refused() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        w.create_pod("web").await?;
        w.hibernate("a", "web", "Hibernate").await?;
        w.until_hibernation("a", HibernationPhase::Hibernated).await?;
        w.hibernate("b", "web", "Wake").await?;
        let refused = w.until_hibernation("b", HibernationPhase::Failed).await?;
        let message = refused.status.unwrap().conditions[0].message.clone();
        assert!(message.contains("CocoonHibernation \"a\""), "{message}");
        assert!(w.node.vms().is_empty() && w.tags.contains(&w.vm("web"), "hibernate"));
        anyhow::Ok(())
    });
}

/// A node of the first release reports neither states nor generations.
#[test]
fn pod_on_an_early_node_is_hibernated_by_its_tag() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        w.node.set_faults(Faults { is_early: true, ..Faults::default() });
        let _operator = w.operator();
        w.create_pod("web").await?;
        w.hibernate("web", "web", "Hibernate").await?;
        w.until_hibernation("web", HibernationPhase::Hibernated).await?;
        w.hibernate("web", "web", "Wake").await?;
        w.until_hibernation("web", HibernationPhase::Active).await?;
        let api: Api<coracle_api::CocoonHibernation> = w.hibernations();
        assert!(api.get("web").await?.status.unwrap().conditions[0].reason == "Done");
        anyhow::Ok(())
    });
}
