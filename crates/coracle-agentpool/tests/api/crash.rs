//! Kills the operator at each of its vCenter calls, before or after the effect. The next instance completes the work and leaves
//! neither a lost VM nor a second one.

use std::time::Duration;

use coracle_testkit::cluster;
use futures_util::future::try_join_all;
use kube::api::ListParams;

use crate::{
    sims::Style,
    world::{World, within_limit},
};

/// Complete life of one VM: demand, VM, Agent, bound, released, deleted.
async fn run_life(w: &World, crash: Option<(usize, bool)>) -> anyhow::Result<usize> {
    let fake = w.vcenter.fake();
    if let Some((call, before)) = crash {
        fake.halt_at(call, before);
    }
    let mut operator = w.operator();
    w.scale(1).await?;
    let life = async {
        w.until_rows(1, "Bound").await?;
        assert_eq!(w.vcenter.vms().await.len(), 1, "crash {crash:?}");
        w.scale(0).await?;
        let gone = async || {
            let requests = w.requests().list(&ListParams::default()).await.unwrap().items;
            (requests.is_empty() && w.vcenter.vms().await.is_empty()).then_some(())
        };
        if within_limit(gone).await.is_none() {
            anyhow::bail!("crash {crash:?}: not all is gone: {}", w.dump_objects().await?);
        }
        anyhow::Ok(())
    };
    let mut life = std::pin::pin!(life);
    tokio::select! {
        ended = &mut life => {
            ended?;
            let calls = fake.calls().len();
            operator.stop().await?;
            return Ok(calls);
        }
        () = fake.until_halted() => {}
    }
    operator.kill().await;
    fake.resume();
    operator = w.operator();
    life.await?;
    let creates = fake.calls().iter().filter(|c| **c == "CreateVM_Task").count();
    assert!(creates <= 1, "crash {crash:?}: {creates} VMs were made after it");
    operator.stop().await?;
    Ok(0)
}

async fn world(cluster: &'static coracle_testkit::cluster::Cluster) -> anyhow::Result<World> {
    let mut w = World::fake(cluster).await?;
    w.simulate(Style::Old);
    w.pool(|p| p.spec.vsphere.vm_tags = vec!["forge".into()]).await?;
    Ok(w)
}

/// Number of times that each point is tried: once in tests, `CORACLE_ROUNDS` in soak.
fn rounds() -> u32 {
    std::env::var("CORACLE_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(1)
}

#[test]
fn operator_converges_to_one_vm_after_a_crash_at_any_call() {
    cluster::run_within(Duration::from_secs(170) * rounds(), |cluster| async move {
        let whole = world(cluster).await?;
        let calls = run_life(&whole, None).await?;
        let points: Vec<_> = (0..calls).flat_map(|k| [(k, true), (k, false)]).collect();
        eprintln!("{} crash points of {calls} calls: {:?}", points.len(), whole.vcenter.fake().calls());
        assert!(calls >= 12, "a life makes more calls than {calls}");
        let all = points.repeat(usize::try_from(rounds())?);
        for some in all.chunks(6) {
            try_join_all(some.iter().map(|at| async move {
                let w = world(cluster).await?;
                run_life(&w, Some(*at)).await
            }))
            .await?;
        }
        anyhow::Ok(())
    });
}

#[test]
fn create_task_that_outlives_the_operator_is_adopted() {
    cluster::run(|cluster| async move {
        let w = world(cluster).await?;
        let fake = w.vcenter.fake();
        fake.slow_tasks(Duration::from_secs(2));
        let operator = w.operator();
        w.scale(1).await?;
        let noted = async || {
            let request = w.requests().get_opt("w-0").await.unwrap()?;
            request.metadata.annotations?.get("coracle.dev/pending-task").cloned()
        };
        assert!(within_limit(noted).await.expect("the task is stored").starts_with("fake-vcenter/task-"));
        operator.kill().await;
        assert!(fake.vms().is_empty(), "the task still runs");
        let operator = w.operator();
        w.until_rows(1, "Bound").await?;
        assert_eq!(fake.calls().iter().filter(|c| **c == "CreateVM_Task").count(), 1);
        assert_eq!(
            within_limit(async || noted().await.is_none().then_some(())).await,
            Some(()),
            "and forgotten"
        );
        operator.stop().await
    });
}

#[test]
fn slow_create_task_survives_kills_with_one_vm() {
    cluster::run_within(Duration::from_secs(120), |cluster| async move {
        let Some(mut w) = World::real(cluster, &["-method-delay", "CreateVm:5000"]).await? else {
            return Ok(());
        };
        w.simulate(Style::Old);
        w.pool(|_| {}).await?;
        let mut operator = w.operator();
        w.scale(1).await?;
        let noted = async || {
            let request = w.requests().get_opt("w-0").await.unwrap()?;
            request.metadata.annotations?.get("coracle.dev/pending-task").cloned()
        };
        let task = within_limit(noted).await.expect("the task is stored");
        let logins = || w.vcenter.vcsim().calls().ok().and_then(|calls| calls.get("Login").copied());
        // Each instance finds the task of the first one, and is killed while it waits for the task.
        for life in 0..3 {
            operator.kill().await;
            assert_eq!(noted().await.as_ref(), Some(&task), "life {life} started no other");
            let before = logins();
            operator = w.operator();
            let at_work = async || (logins() > before).then_some(());
            assert!(within_limit(at_work).await.is_some(), "life {life} logs in");
        }
        w.until_rows(1, "Bound").await?;
        let calls = w.vcenter.vcsim().calls()?;
        assert_eq!(calls.get("CreateVM_Task"), Some(&1), "{calls:?}");
        assert_eq!(w.until_vms(1).await?.len(), 1);
        operator.stop().await
    });
}
