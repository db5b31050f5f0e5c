//! Controller of Services in simulations, and its objects on a real API server.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]

use coracle_api::{MikromVM, MikromVMSpec, VmPort, keys};
use coracle_reconcile::{Clock, ControllerConfig};
use coracle_testkit::{
    cluster,
    sim::{Scenario, Sim, crash_after_each_call},
    world::{self, Process, until, until_event},
};
use futures_util::future::BoxFuture;
use k8s_openapi::api::{core::v1::Service, discovery::v1::EndpointSlice};
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const SEED: u64 = 31;

/// VM with ports, whose status the script writes.
struct Life {
    client: Client,
    ns: String,
    sim: Option<Sim>,
}

impl Life {
    fn simulated(sim: Sim) -> Self {
        let mut crds = coracle_api::crds();
        crds.retain(|crd| crd.spec.names.kind == "MikromVM");
        sim.prepare(&crds, "team");
        Self { client: sim.client(), ns: "team".into(), sim: Some(sim) }
    }

    fn vms(&self) -> Api<MikromVM> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    fn services(&self) -> Api<Service> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    fn slices(&self) -> Api<EndpointSlice> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    fn config(&self) -> coracle_vm_service::Config {
        let clock = self.sim.as_ref().map_or_else(Clock::system, Sim::clock);
        let common = ControllerConfig { namespace: Some(self.ns.clone()), clock, ..Default::default() };
        coracle_vm_service::Config { common, identity: "test".into() }
    }

    async fn create(&self, name: &str) -> anyhow::Result<()> {
        let ports = vec![VmPort { port: 80, target_port: Some(8080), ..VmPort::default() }];
        let spec =
            MikromVMSpec { image: "i:1".into(), vcpu_count: 1, memory_mib: 128, ports, ..Default::default() };
        self.vms().create(&Default::default(), &MikromVM::new(name, spec)).await?;
        Ok(())
    }

    async fn patch(&self, name: &str, patch: Value) -> anyhow::Result<()> {
        self.vms().patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    async fn status(&self, name: &str, ip: &str, ready: &str) -> anyhow::Result<()> {
        let ready = json!({"type": "Ready", "status": ready, "reason": "R", "message": "",
            "lastTransitionTime": "2026-01-02T03:04:05Z"});
        let patch = json!({"status": {"ipAddress": ip, "nodeName": "n1", "conditions": [ready]}});
        self.vms().patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    /// Waits until the slice has exactly this endpoint.
    async fn until_endpoint(&self, name: &str, want: Option<(&str, bool)>) -> anyhow::Result<()> {
        until(&self.slices(), name, "endpoint", |slice| {
            let endpoints = slice.and_then(|slice| slice.endpoints.clone()).unwrap_or_default();
            let found = endpoints.first().map(|e| {
                (e.addresses[0].clone(), e.conditions.as_ref().and_then(|c| c.ready).unwrap_or_default())
            });
            slice.is_some() && found == want.map(|(ip, ready)| (ip.to_owned(), ready))
        })
        .await
        .map(drop)
    }

    async fn until_gone(&self, name: &str) -> anyhow::Result<()> {
        until(&self.services(), name, "no Service", |found| found.is_none()).await?;
        until(&self.slices(), name, "no EndpointSlice", |found| found.is_none()).await.map(drop)
    }
}

impl Scenario for Life {
    fn controller(&self, client: Client) -> BoxFuture<'static, ()> {
        let config = self.config();
        Box::pin(async move {
            coracle_vm_service::run(client, config, CancellationToken::new()).await.unwrap();
        })
    }

    async fn script(&self) -> anyhow::Result<()> {
        self.create("web").await?;
        self.until_endpoint("web", None).await?;
        self.status("web", "10.0.0.2", "True").await?;
        self.until_endpoint("web", Some(("10.0.0.2", true))).await?;
        self.status("web", "10.0.0.2", "False").await?;
        self.until_endpoint("web", Some(("10.0.0.2", false))).await?;
        self.patch("web", json!({"spec": {"ports": null}})).await?;
        self.until_gone("web").await?;
        self.patch("web", json!({"spec": {"ports": [{"port": 81}]}})).await?;
        until(&self.services(), "web", "port 81", |found| {
            found.is_some_and(|found| found.spec.as_ref().unwrap().ports.as_ref().unwrap()[0].port == 81)
        })
        .await?;
        self.until_endpoint("web", Some(("10.0.0.2", false))).await?;
        // No finalizer delays the deletion, as after a restart that missed it.
        self.vms().delete("web", &DeleteParams::default()).await?;
        self.until_gone("web").await
    }

    fn facts(&self) -> Vec<String> {
        vec![]
    }
}

#[test]
fn service_follows_its_vm_after_a_crash_at_any_call() {
    let calls = crash_after_each_call(SEED, |sim| async move { Ok(Life::simulated(sim)) }).unwrap();
    println!("crash points: {calls}");
    assert!(calls >= 20, "lists, creations, updates, deletions, and reads between: {calls}");
}

#[test]
fn service_of_a_user_is_left_alone() {
    Sim::run(SEED, |sim| async move {
        let life = Life::simulated(sim);
        let own: Service = serde_json::from_value(json!({
            "metadata": {"name": "web", "labels": {"coracle.dev/vm": "web"}}, "spec": {"ports": [{"port": 1}]},
        }))?;
        life.services().create(&Default::default(), &own).await?;
        let config = life.config();
        let client = life.client.clone();
        let _controller = Process::start(|stop| coracle_vm_service::run(client, config, stop));
        life.create("web").await?;
        let note = until_event(&life.client, &life.ns, "web", "ServiceConflict").await?;
        assert!(note.contains("Service web exists and is not the VM's"), "{note}");
        let kept = life.services().get("web").await?;
        assert_eq!(kept.spec.unwrap().ports.unwrap()[0].port, 1);
        assert!(life.slices().get_opt("web").await?.is_none(), "it gets no endpoints");
        life.services().delete("web", &DeleteParams::default()).await?;
        life.until_endpoint("web", None).await?;
        life.vms().delete("web", &DeleteParams::default()).await?;
        life.until_gone("web").await?;
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn real_api_server_takes_service_and_slice() {
    cluster::run(|cluster| async move {
        let client = cluster.client();
        world::install(&client, &coracle_api::crds()).await?;
        let life = Life { client: client.clone(), ns: cluster.namespace().await?, sim: None };
        let config = life.config();
        let controller = Process::start(|stop| coracle_vm_service::run(client, config, stop));
        life.create("web").await?;
        life.status("web", "10.0.0.2", "True").await?;
        life.until_endpoint("web", Some(("10.0.0.2", true))).await?;
        let service = life.services().get("web").await?.spec.unwrap();
        assert!(service.cluster_ip.is_some_and(|ip| ip.contains('.')) && service.selector.is_none());
        let slice = life.slices().get("web").await?;
        assert_eq!(slice.metadata.labels.unwrap()["kubernetes.io/service-name"], "web");
        let managed = slice.metadata.managed_fields.unwrap();
        assert!(managed.iter().all(|one| one.manager.as_deref() == Some(keys::VM_SERVICE_MANAGER)));
        life.patch("web", json!({"spec": {"ports": [{"name": "a", "port": 80}, {"name": "b", "port": 81}]}}))
            .await?;
        until(&life.services(), "web", "two ports", |found| {
            found.is_some_and(|found| found.spec.as_ref().unwrap().ports.as_ref().unwrap().len() == 2)
        })
        .await?;
        life.vms().delete("web", &DeleteParams::default()).await?;
        life.until_gone("web").await?;
        controller.stop().await
    });
}
