//! One connection to each node: shared, replaced when it breaks, closed when the node leaves.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use coracle_api::MikromVMSpec;
use coracle_microvm::{Config, Deadlines};
use coracle_reconcile::Backoff;

use crate::{
    fake_agent::{FakeAgent, Net},
    pki::Pki,
    world::{Operator, World, eventually, simulate},
};

fn unpinned(w: &World) -> MikromVMSpec {
    MikromVMSpec { agent_address: String::new(), ..w.spec() }
}

async fn until_closed(agent: &FakeAgent) -> anyhow::Result<()> {
    let open = || agent.shared.open.load(Ordering::SeqCst);
    eventually("no connection is left", async || (open() == 0).then_some(())).await
}

#[test]
fn node_has_one_connection_and_none_after_it_leaves() {
    simulate(|w| async move {
        w.announce("n1", &w.agent.address, 64, 64 * 1024, 600).await?;
        let _operator = w.operator();
        for n in 0..20 {
            w.create(&format!("vm-{n}"), unpinned(&w)).await?;
        }
        for n in 0..20 {
            w.until_running(&format!("vm-{n}")).await?;
        }
        w.until_reconciled(200).await?;
        let counts =
            || (w.agent.shared.open.load(Ordering::SeqCst), w.agent.shared.accepted.load(Ordering::SeqCst));
        assert_eq!(counts(), (1, 1), "open, and opened so far");
        for n in 0..20 {
            w.delete(&format!("vm-{n}")).await?;
        }
        for n in 0..20 {
            w.until_gone(&format!("vm-{n}")).await?;
        }
        assert_eq!(counts(), (1, 1), "the node is still announced");
        w.withdraw("n1").await?;
        until_closed(&w.agent).await
    });
}

#[test]
fn connection_closes_when_the_address_changes() {
    simulate(|w| async move {
        let second = FakeAgent::start_with(&w.net, w.agent.shared.clone(), None).await;
        w.announce("n1", &w.agent.address, 4, 4096, 600).await?;
        let _operator = w.operator();
        w.create("web", unpinned(&w)).await?;
        w.until_running("web").await?;
        w.announce("n1", &second.address, 4, 4096, 600).await?;
        let moved = |vm: Option<&coracle_api::MikromVM>| {
            vm.unwrap().status.as_ref().unwrap().agent_address == second.address
        };
        w.until("web", "at the new address", moved).await?;
        let counts =
            || (w.agent.shared.open.load(Ordering::SeqCst), w.agent.shared.accepted.load(Ordering::SeqCst));
        eventually("only the new connection is left", async || (counts() == (1, 2)).then_some(())).await
    });
}

#[test]
fn connection_of_an_unannounced_agent_closes_with_its_object() {
    simulate(|w| async move {
        let _operator = w.operator();
        w.create("web", w.spec()).await?; // no node announces the agent
        w.until_running("web").await?;
        w.delete("web").await?;
        w.until_gone("web").await?;
        until_closed(&w.agent).await
    });
}

#[test]
fn restarted_node_gets_a_new_connection() {
    simulate(|mut w| async move {
        w.announce("n1", &w.agent.address, 8, 8192, 600).await?;
        let _operator = w.operator();
        w.create("one", unpinned(&w)).await?;
        w.until_running("one").await?;
        for name in ["two", "three"] {
            let (shared, address) = w.kill_agent().await;
            w.agent = FakeAgent::start_with(&w.net, shared, Some(&address)).await;
            w.create(name, unpinned(&w)).await?;
            w.until_running(name).await?;
        }
        let open = || w.agent.shared.open.load(Ordering::SeqCst);
        eventually("one connection", async || (open() == 1).then_some(())).await
    });
}

#[test]
fn node_that_hangs_does_not_delay_others() {
    simulate(|w| async move {
        let Net::Memory(sim) = &w.net else { unreachable!("a simulation") };
        let hanging = sim.network().listen(); // accepts, and says nothing
        let day = Duration::from_secs(24 * 3600);
        let deadlines = Deadlines { connect: day, ..w.config().deadlines };
        let _operator = Operator::start(w.client.clone(), Config { deadlines, ..w.config() });
        for n in 0..20 {
            let stuck = MikromVMSpec { agent_address: hanging.address().to_owned(), ..w.spec() };
            w.create(&format!("stuck-{n}"), stuck).await?;
        }
        let dialled = || w.vms();
        eventually("all are bound", async || {
            let all = dialled().list(&Default::default()).await.ok()?;
            all.iter().all(|vm| vm.status.is_some()).then_some(())
        })
        .await?;
        w.create("web", w.spec()).await?;
        w.until_running("web").await.map(drop)
    });
}

#[test]
fn rotated_certificates_are_used_for_new_connections() {
    simulate(|mut w| async move {
        let dir = tempfile::tempdir()?;
        let first = Pki::new();
        w.agent = FakeAgent::start_tls(&w.net, Arc::default(), None, first.server("127.0.0.1")).await;
        let tls = Some(first.client(dir.path()));
        let backoff = Backoff { base: Duration::from_secs(1), max: Duration::from_secs(5) };
        let _operator = Operator::start(w.client.clone(), Config { tls, backoff, ..w.config() });
        w.create("one", w.spec()).await?;
        w.until_running("one").await?;
        let second = Pki::new();
        second.client(dir.path());
        w.create("two", w.spec()).await?;
        w.until_running("two").await?;
        assert_eq!(w.agent.shared.accepted.load(Ordering::SeqCst), 1, "the open connection is kept");
        let (shared, address) = w.kill_agent().await;
        w.agent = FakeAgent::start_tls(&w.net, shared, Some(&address), second.server("127.0.0.1")).await;
        w.create("three", w.spec()).await?;
        w.until_running("three").await.map(drop)
    });
}
