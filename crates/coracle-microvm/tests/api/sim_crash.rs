//! Kills the controller after each of its calls in turn. The next controller finishes the job, with one VM and nothing left
//! over.

use std::sync::atomic::Ordering;

use coracle_api::{MikromVM, Phase};
use coracle_testkit::{
    cluster,
    sim::{Fuse, Scenario, Sim, crash_after_each_call},
};
use futures_util::future::BoxFuture;
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::{
    fake_agent::Fault,
    world::{Operator, World, eventually},
};

const SEED: u64 = 20;

/// Lifecycle of one VM from creation to deletion.
struct Lifecycle(World);

impl Lifecycle {
    async fn new(sim: Sim, hides_new_vms: bool) -> anyhow::Result<Self> {
        Ok(Self::of(World::simulated(&sim).await?, hides_new_vms))
    }

    fn of(w: World, hides_new_vms: bool) -> Self {
        w.agent.shared.hides_new_vms.store(hides_new_vms, Ordering::SeqCst);
        Self(w)
    }
}

impl Scenario for Lifecycle {
    fn controller(&self, client: Client) -> BoxFuture<'static, ()> {
        let config = self.0.config();
        Box::pin(async move { coracle_microvm::run(client, config, CancellationToken::new()).await.unwrap() })
    }

    async fn script(&self) -> anyhow::Result<()> {
        let w = &self.0;
        w.create("web", w.spec()).await?;
        w.until_running("web").await?;
        w.delete("web").await?;
        w.until_gone("web").await
    }

    fn facts(&self) -> Vec<String> {
        let created = self.0.agent.shared.created.load(Ordering::SeqCst);
        [vec![format!("VMs created: {created}")], self.0.agent.machines()].concat()
    }
}

#[test]
fn vm_converges_after_a_crash_at_any_call() {
    let calls = crash_after_each_call(SEED, |sim| Lifecycle::new(sim, false)).unwrap();
    println!("crash points: {calls}");
    assert!(
        calls >= 15,
        "lists, finalizer, binding, create, start, status, stop, delete, and reads between: {calls}"
    );
}

#[test]
fn vm_of_a_host_service_converges_after_a_crash() {
    let start = |sim: Sim| async move {
        anyhow::Ok(Lifecycle::of(World::simulated(&sim).await?.announced_host().await?, false))
    };
    let calls = crash_after_each_call(SEED, start).unwrap();
    assert!(calls >= 15, "as over the agent service: {calls}");
}

/// Writes that check the version of the object need no read before them, and neither does a stale cache.
#[test]
fn start_of_a_vm_reads_no_object() {
    Sim::run(SEED, |sim| async move {
        let w = World::simulated(&sim).await?;
        let calls = Fuse::default();
        let operator = Operator::start(sim.api().client_with(calls.clone()), w.config());
        for name in ["a", "b", "c"] {
            w.create(name, w.spec()).await?;
            w.until_running(name).await?;
        }
        w.until_reconciled(20).await?;
        let calls = calls.calls();
        let (reads, writes): (Vec<_>, Vec<_>) = calls
            .iter()
            .filter(|call| call.contains("/mikromvms/"))
            .partition(|call| call.starts_with("GET"));
        assert_eq!((reads.len(), writes.len()), (0, 9), "{calls:?}");
        operator.stop().await
    });
}

/// The object changes under a controller that has only a cached version.
#[test]
fn edits_during_the_start_end_in_one_vm_of_the_last_spec() {
    for seed in 0..20 {
        Sim::run(seed, |sim| async move {
            let w = World::simulated(&sim).await?;
            let operator = w.operator();
            w.create("web", w.spec()).await?;
            for n in 0..10 {
                let labels = json!({"n": n.to_string()});
                w.patch("web", json!({"metadata": {"labels": labels}, "spec": {"memoryMB": 128 + n}}))
                    .await?;
            }
            let is_current = |vm: Option<&MikromVM>| {
                let (vm, status) = (vm.unwrap(), vm.unwrap().status.clone().unwrap_or_default());
                status.phase == Some(Phase::Running) && status.observed_generation == vm.metadata.generation
            };
            let vm = w.until("web", "of its last spec", is_current).await?.unwrap();
            assert_eq!(vm.labels()["n"], "9");
            assert_eq!(w.agent.machines().len(), 1, "{:?}", w.agent.machines());
            operator.stop().await
        });
    }
}

/// Negative test: with an agent that hides a VM until it was started, a crash after CreateVM must result in a second VM. If
/// this test did not find it, the test above would prove nothing.
#[test]
fn crash_test_finds_a_second_vm() {
    let error = crash_after_each_call(SEED, |sim| Lifecycle::new(sim, true)).unwrap_err();
    let error = format!("{error:#}");
    assert!(error.contains("CreateVM") && error.contains("VMs created: 2"), "{error}");
}

/// Smoke test of the same on a real API server.
#[test]
fn killed_operator_is_succeeded_on_a_cluster() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        w.agent.fail("CreateVM", Fault::HangAfter);
        let first = w.operator();
        w.create("web", w.spec()).await?;
        let created = || w.agent.shared.created.load(Ordering::SeqCst);
        eventually("the VM is created", async || (created() == 1).then_some(())).await?;
        first.kill().await;
        let second = Operator::start(w.client.clone(), w.config());
        w.until_running("web").await?;
        assert_eq!(created(), 1);
        second.stop().await
    });
}
