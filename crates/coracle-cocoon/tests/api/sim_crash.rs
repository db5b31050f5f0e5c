//! Kills the controllers after each of their calls in turn. The next controllers finish the job: each VM is created once, no
//! saved state is lost, and nothing is left over.

use coracle_api::cocoon::{HibernationPhase, SetPhase};
use coracle_testkit::sim::{Scenario, Sim, crash_after_each_call};
use futures_util::future::BoxFuture;
use kube::{Client, api::DeleteParams};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::world::World;

const SEED: u64 = 31;

/// Operations of users on one set.
#[derive(Clone, Copy)]
enum Story {
    /// Scale, suspend, resume, delete.
    Suspend,
    /// Release the place, continue, delete.
    Release,
    /// Hibernate and wake one pod.
    Hibernation,
}

struct Life {
    world: World,
    story: Story,
}

impl Life {
    fn new(sim: &Sim, story: Story) -> Self {
        Self { world: World::simulated(sim), story }
    }

    async fn suspend(&self) -> anyhow::Result<()> {
        let (w, spec) = (&self.world, spec_with_members());
        w.create_set("demo", spec).await?;
        w.until_phase("demo", SetPhase::Running).await?;
        w.patch_set("demo", json!({"suspend": true})).await?;
        w.until_phase("demo", SetPhase::Suspended).await?;
        w.patch_set("demo", json!({"suspend": false, "agent": {"replicas": 1}})).await?;
        w.until_phase("demo", SetPhase::Running).await?;
        w.delete_set("demo").await?;
        w.until_gone("demo").await
    }

    async fn release(&self) -> anyhow::Result<()> {
        let w = &self.world;
        w.create_set("demo", json!({"agent": {"image": "u"}, "hibernatePolicy": "release"})).await?;
        w.until_phase("demo", SetPhase::Running).await?;
        w.patch_set("demo", json!({"suspend": true})).await?;
        w.until_phase("demo", SetPhase::Suspended).await?;
        w.patch_set("demo", json!({"suspend": false})).await?;
        w.until_phase("demo", SetPhase::Running).await?;
        w.delete_set("demo").await?;
        w.until_gone("demo").await
    }

    async fn hibernation(&self) -> anyhow::Result<()> {
        let w = &self.world;
        w.create_pod("web").await?;
        w.hibernate("web", "web", "Hibernate").await?;
        w.until_hibernation("web", HibernationPhase::Hibernated).await?;
        w.hibernate("web", "web", "Wake").await?;
        w.until_hibernation("web", HibernationPhase::Active).await?;
        w.hibernations().delete("web", &DeleteParams::default()).await?;
        Ok(())
    }
}

fn spec_with_members() -> Value {
    let tools = json!([{"name": "db", "image": "t"},
        {"name": "win", "mode": "static", "staticIP": "10.0.0.9", "staticVMID": "vm-9"}]);
    json!({"agent": {"image": "u", "replicas": 2}, "toolboxes": tools})
}

impl Scenario for Life {
    fn controller(&self, client: Client) -> BoxFuture<'static, ()> {
        let config = self.world.config();
        Box::pin(async move { coracle_cocoon::run(client, config, CancellationToken::new()).await.unwrap() })
    }

    async fn script(&self) -> anyhow::Result<()> {
        match self.story {
            Story::Suspend => self.suspend().await,
            Story::Release => self.release().await,
            Story::Hibernation => self.hibernation().await,
        }
    }

    fn facts(&self) -> Vec<String> {
        let mut begun = self.world.node.begun();
        begun.sort();
        [begun, self.world.node.vms(), self.world.tags.all()].concat()
    }
}

fn crash_everywhere(story: Story, at_least: usize) {
    let calls = crash_after_each_call(SEED, |sim| async move { Ok(Life::new(&sim, story)) }).unwrap();
    println!("crash points: {calls}");
    assert!(calls >= at_least, "{calls} calls");
}

#[test]
fn set_converges_after_a_crash_at_any_call() {
    crash_everywhere(Story::Suspend, 60);
}

#[test]
fn released_set_converges_after_a_crash_at_any_call() {
    crash_everywhere(Story::Release, 30);
}

#[test]
fn hibernation_converges_after_a_crash_at_any_call() {
    crash_everywhere(Story::Hibernation, 20);
}

#[test]
fn set_at_rest_writes_nothing() {
    Sim::run(SEED, |sim| async move {
        let w = World::simulated(&sim);
        let _operator = w.operator();
        w.create_set("demo", spec_with_members()).await?;
        w.until_phase("demo", SetPhase::Running).await?;
        sim.stays_quiet(3, || w.metrics.reconciles(coracle_cocoon::SETS)).await
    });
}
