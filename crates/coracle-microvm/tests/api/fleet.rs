//! Discovery of agents, placement with reasons for refusals, leader election, TLS.

use std::{sync::Arc, time::Duration};

use coracle_api::{MikromVM, MikromVMSpec, Phase, keys};
use coracle_microvm::{AgentTls, Config};
use coracle_reconcile::Election;
use coracle_testkit::{cluster, eventually};
use k8s_openapi::api::{coordination::v1::Lease, core::v1::ResourceQuota};
use kube::{
    Api, ResourceExt as _,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;

use crate::{
    fake_agent::FakeAgent,
    pki::Pki,
    world::{Operator, World, message},
};

#[test]
fn announced_agent_gets_waiting_vms() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        let spec = MikromVMSpec { agent_address: String::new(), ..w.spec() };
        w.create("web", spec.clone()).await?;
        let vm = w.until_reason("web", "Unschedulable").await?;
        assert_eq!(vm.status.as_ref().unwrap().phase, Some(Phase::Pending));
        assert_eq!(message(&vm), "no node with an agent is known");
        w.until_event("web", "Unschedulable").await?;
        w.announce("small", "127.0.0.1:1", 1, 512, 600).await?;
        let refused = |vm: Option<&coracle_api::MikromVM>| {
            message(vm.unwrap()).contains("node small has 1 vCPUs, 2 requested")
        };
        w.until("web", "refused by the small node", refused).await?;
        w.announce("large", &w.agent.address, 8, 8192, 600).await?;
        let vm = w.until_running("web").await?;
        let status = vm.status.unwrap();
        assert_eq!((status.node_name.as_str(), &status.agent_address), ("large", &w.agent.address));
        w.until_event("web", "Scheduled").await?;
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn vms_placed_at_once_share_the_memory() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let other = FakeAgent::start(&w.net).await;
        w.announce("a", &w.agent.address, 8, 2048, 600).await?;
        w.announce("b", &other.address, 8, 2048, 600).await?;
        let _operator = w.operator();
        for n in 0..4 {
            w.create(&format!("vm-{n}"), MikromVMSpec { agent_address: String::new(), ..w.spec() }).await?;
        }
        for n in 0..4 {
            w.until_running(&format!("vm-{n}")).await?;
        }
        assert_eq!((w.agent.machines().len(), other.machines().len()), (2, 2));
        w.create("fifth", MikromVMSpec { agent_address: String::new(), ..w.spec() }).await?;
        let vm = w.until_reason("fifth", "Unschedulable").await?;
        assert!(message(&vm).contains("node a has 0 MiB unreserved"), "{}", message(&vm));
        w.delete("vm-0").await?;
        w.until_running("fifth").await?;
        Ok::<_, anyhow::Error>(())
    });
}

/// The VMs are stored without admission, as when they are stored at the same time.
#[test]
fn vms_stored_at_once_share_the_quota() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        w.announce("n", &w.agent.address, 16, 16_384, 600).await?;
        let quotas: Api<ResourceQuota> = Api::namespaced(w.client.clone(), &w.ns);
        let quota = json!({"metadata": {"name": "vms"}, "spec": {"hard": {"vm.mikrom.es/cpu": "4"}}});
        quotas.create(&PostParams::default(), &serde_json::from_value(quota)?).await?;
        for n in 0..3 {
            w.create(&format!("vm-{n}"), MikromVMSpec { agent_address: String::new(), ..w.spec() }).await?;
        }
        let _operator = w.operator();
        let api: Api<MikromVM> = Api::namespaced(w.client.clone(), &w.ns);
        let refused = async || {
            let all = api.list(&ListParams::default()).await.ok()?.items;
            let runs =
                all.iter().filter(|vm| vm.status.as_ref().and_then(|s| s.phase) == Some(Phase::Running));
            let waits = all.iter().find(|vm| message(vm).contains("exceeded quota: vms"));
            waits.filter(|_| runs.count() == 2).map(|vm| vm.name_any())
        };
        let waiting = eventually("two run and one waits", refused).await?;
        assert_eq!(w.agent.machines().len(), 2);
        let used = async |want: &str| {
            let quota = quotas.get("vms").await.ok()?;
            let used = quota.status?.used?;
            (used.get("vm.mikrom.es/cpu")?.0 == want).then_some(used.len())
        };
        assert_eq!(eventually("the used amount of three", async || used("6").await).await?, 1, "no other");
        let other = if waiting == "vm-0" { "vm-1" } else { "vm-0" };
        w.delete(other).await?;
        w.until_running(&waiting).await?;
        eventually("the used amount of two", async || used("4").await).await?;
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn node_with_a_new_address_keeps_its_vm() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.announce("n", &w.agent.address, 8, 8192, 600).await?;
        let _operator = w.operator();
        w.create("web", MikromVMSpec { agent_address: String::new(), ..w.spec() }).await?;
        w.until_running("web").await?;
        let (shared, old) = w.kill_agent().await;
        w.agent = FakeAgent::start_with(&w.net, shared, None).await;
        assert_ne!(old, w.agent.address);
        w.announce("n", &w.agent.address, 8, 8192, 600).await?;
        let address = w.agent.address.clone();
        w.until("web", "at the new address", move |vm| {
            vm.unwrap().status.as_ref().unwrap().agent_address == address
        })
        .await?;
        assert_eq!(w.agent.count("CreateVM"), 1, "it is the same VM");
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn second_operator_takes_over_from_a_killed_leader() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let config = |who: &str| {
            let ms = Duration::from_millis;
            let election = Election {
                lease: ms(1000),
                renew_deadline: ms(600),
                retry: ms(100),
                ..Election::new(w.ns.clone(), "coracle-mikromvm", who)
            };
            Config { election: Some(election), ..w.config() }
        };
        let first = Operator::start(w.client.clone(), config("first"));
        w.create("one", w.spec()).await?;
        w.until_running("one").await?;
        let second = Operator::start(w.client.clone(), config("second"));
        w.create("two", w.spec()).await?;
        w.until_running("two").await?;
        assert_eq!(w.agent.mutations().len(), 4, "two creates and two starts, by one of them");
        first.kill().await;
        w.create("three", w.spec()).await?;
        w.until_running("three").await?;
        assert_eq!(w.agent.mutations().len(), 6);
        second.stop().await
    });
}

#[test]
fn agents_are_called_with_mutual_tls() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        let (pki, dir, other_dir) = (Pki::new(), tempfile::tempdir()?, tempfile::tempdir()?);
        let tls = pki.server("node-1.coracle");
        w.agent = FakeAgent::start_tls(&w.net, Arc::default(), None, tls).await;
        let good = pki.client(dir.path());
        let AgentTls { ca, identity } = good.clone();
        let lease = json!({"metadata": {"annotations": {keys::node::TLS_SERVER_NAME: "node-1.coracle"}}});
        w.announce("n", &w.agent.address, 8, 8192, 600).await?;
        let leases: Api<Lease> = Api::namespaced(w.client.clone(), &w.ns);
        leases.patch("n", &PatchParams::default(), &Patch::Merge(lease)).await?;
        // Without the operator's certificate, or with another authority, the agent receives no call.
        let other = Pki::new().client(other_dir.path()).ca;
        for (n, bad) in
            [AgentTls { ca, identity: None }, AgentTls { ca: other, identity }].into_iter().enumerate()
        {
            let operator = Operator::start(w.client.clone(), Config { tls: Some(bad), ..w.config() });
            let name = format!("bad-{n}");
            w.create(&name, MikromVMSpec { agent_address: String::new(), ..w.spec() }).await?;
            w.until_reason(&name, "AgentUnreachable").await?;
            operator.stop().await?;
            w.delete(&name).await?;
        }
        assert_eq!(w.agent.mutations(), [] as [&str; 0]);
        let _operator = Operator::start(w.client.clone(), Config { tls: Some(good), ..w.config() });
        w.create("web", MikromVMSpec { agent_address: String::new(), ..w.spec() }).await?;
        w.until_running("web").await?;
        Ok::<_, anyhow::Error>(())
    });
}
