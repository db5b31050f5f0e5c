//! Kills the controllers after each of their calls in turn. The next instance completes the work, with one VM and no leftovers.

use std::time::Duration;

use coracle_agentpool::iso::prefix;
use coracle_api::agentpool::{VsphereAgent, VsphereAgentPool};
use coracle_testkit::{
    sim::{Scenario, Sim, crash_after_each_call},
    world,
};
use futures_util::future::BoxFuture;
use kube::{Client, api::DeleteParams};
use serde_json::json;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::{
    sims::{Style, set},
    world::{POOL, World},
};

const SEED: u64 = 22;
/// Reconciles of each controller that must write nothing.
const QUIET: u64 = 5;

/// Pool and one VM, from demand to deletion.
struct Life {
    sim: Sim,
    w: World,
    /// Also wait until nothing changes, which takes most of the time.
    rests: bool,
}

impl Life {
    async fn new(sim: Sim, loses_new_vms: bool) -> anyhow::Result<Self> {
        let mut w = World::simulated(&sim).await?;
        w.simulate(Style::New);
        if loses_new_vms {
            w.vcenter.fake().lose_new_vms();
        }
        let pool = w
            .pool(|pool| {
                pool.spec.vsphere.vm_tags = vec!["forge".into()];
                pool.spec.iso.get_or_insert_default().check_interval = "1000h".into();
            })
            .await?;
        // Downloads need sockets, which simulations do not have.
        let image = format!("{}/{}.iso", prefix(&pool), "0".repeat(64));
        let iso = json!({"path": image, "sha256": "0".repeat(64), "checkedAt": "2026-01-01T00:00:00Z"});
        set(&w.pools(), POOL, json!({"status": {"iso": iso}}), true).await?;
        Ok(Self { sim, w, rests: false })
    }

    async fn at_rest(&self, controllers: &[&'static str]) -> anyhow::Result<()> {
        if !self.rests {
            return Ok(());
        }
        let passes = || controllers.iter().map(|c| self.w.metrics.reconciles(c)).min().unwrap_or_default();
        self.sim.stays_quiet(QUIET, passes).await
    }
}

impl Scenario for Life {
    fn controller(&self, client: Client) -> BoxFuture<'static, ()> {
        let mut config = self.w.config();
        let poll = Duration::from_millis(500);
        (config.times.machine, config.times.pool, config.times.steady) = (poll, poll, poll);
        Box::pin(
            async move { coracle_agentpool::run(client, config, CancellationToken::new()).await.unwrap() },
        )
    }

    async fn script(&self) -> anyhow::Result<()> {
        let w = &self.w;
        w.scale(1).await?;
        let is_bound = |pool: Option<&VsphereAgentPool>| {
            let rows = pool.and_then(|pool| pool.status.as_ref()).map(|status| &status.owned_vms);
            rows.is_some_and(|rows| rows.len() == 1 && rows[0].phase == "Bound")
        };
        world::until(&w.pools(), POOL, "bound to one VM", is_bound).await?;
        self.at_rest(&["agentmachine", "vsphereagent", "vsphereagentpool"]).await?;
        w.scale(0).await?;
        world::until(&w.requests(), "w-0", "gone", |request: Option<&VsphereAgent>| request.is_none())
            .await?;
        self.at_rest(&["vsphereagentpool"]).await?;
        w.pools().delete(POOL, &DeleteParams::default()).await?;
        world::until(&w.pools(), POOL, "gone", |pool: Option<&VsphereAgentPool>| pool.is_none()).await?;
        Ok(())
    }

    fn facts(&self) -> Vec<String> {
        let fake = self.w.vcenter.fake();
        let created = fake.calls().iter().filter(|call| **call == "CreateVM_Task").count();
        let left = fake.vms().into_iter().map(|vm| vm.name);
        [format!("VMs created: {created}")].into_iter().chain(left).collect()
    }
}

#[test]
fn pool_at_rest_writes_nothing() {
    Sim::run(SEED, |sim| async move {
        let life = Life { rests: true, ..Life::new(sim.clone(), false).await? };
        let mut controller = JoinSet::new();
        controller.spawn(life.controller(sim.client()));
        life.script().await
    });
}

#[test]
fn pool_converges_after_a_crash_at_any_call() {
    let calls = crash_after_each_call(SEED, |sim| Life::new(sim, false)).unwrap();
    eprintln!("crash points: {calls}");
    assert!(calls >= 40, "discovery, finalizers, Agents, VM, status, and reads between: {calls}");
}

/// Mutation test: with a vCenter that loses new VMs, a crash after CreateVM_Task must show as a second VM. Otherwise the test
/// above proves nothing. Three controllers call concurrently and in no fixed order, so the first failing run may also be the
/// one that ends at the next call, which records the VM.
#[test]
fn crash_test_finds_a_second_vm() {
    let error = crash_after_each_call(SEED, |sim| Life::new(sim, true)).unwrap_err();
    let error = format!("{error:#}");
    assert!(error.contains("VMs created: 2"), "{error}");
}
