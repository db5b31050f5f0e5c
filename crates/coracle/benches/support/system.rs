//! A whole `coracle up` in release mode, driven as by users: through the node's socket and the API server.
#![allow(dead_code, reason = "each benchmark uses its part")]

use std::path::Path;
use std::time::{Duration, Instant};

use coracle_api::MikromVM;
use coracle_testkit::figures::{Writes, api_writes};
use k8s_openapi::api::core::v1;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::wait::await_condition;
use kube::{Api, Client, Config};
use tokio::time::{sleep, timeout};

use super::node::{IMAGE, LIMIT, MEMORY_MIB, Node, command, run, to_f64};

const GROUP: &str = "mikromvms.vm.mikrom.es";

/// The local system. Its node is driven by [`Node`].
pub(crate) struct System {
    pub(crate) node: Node,
    client: Client,
    config: Config,
}

impl System {
    /// Starts the system and imports an image whose workload sleeps.
    pub(crate) async fn up(dir: &Path, settings: &[(&str, &str)]) -> Self {
        Self::up_with(dir, &[], settings).await
    }

    /// Like [`System::up`], with additional arguments.
    pub(crate) async fn up_with(dir: &Path, args: &[&str], settings: &[(&str, &str)]) -> Self {
        let state = dir.join("state");
        let mut up = command(&state, &[&["up", "--detach", "--no-demo"], args].concat());
        up.envs(settings.iter().copied());
        run(up).await;
        let kubeconfig = Kubeconfig::read_from(state.join("kubeconfig")).expect("a kubeconfig");
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(kubeconfig, &options).await.expect("a configuration");
        let client = Client::try_from(config.clone()).expect("a client");
        Self { node: Node::of(dir, state).await, client, config }
    }

    pub(crate) async fn down(self) {
        self.node.down().await;
    }

    /// Returns a client of the API server, with the rights of its administrator.
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// Returns a client of the virtual node's kubelet API, with the same rights. Does not verify the certificate.
    pub(crate) async fn kubelet(&self) -> Client {
        let nodes: Api<v1::Node> = Api::all(self.client.clone());
        let all = nodes.list(&ListParams::default()).await.expect("the nodes").items;
        let url = all.into_iter().find_map(|node| {
            let status = node.status?;
            let port = status.daemon_endpoints?.kubelet_endpoint?.port;
            let addresses = status.addresses.unwrap_or_default();
            let internal = addresses.into_iter().find(|address| address.type_ == "InternalIP")?;
            Some(format!("https://{}:{port}", internal.address))
        });
        let mut config = self.config.clone();
        config.cluster_url = url.and_then(|url| url.parse().ok()).expect("a node with a kubelet API");
        config.accept_invalid_certs = true;
        Client::try_from(config).expect("a client")
    }

    pub(crate) async fn writes(&self) -> Writes {
        api_writes(&self.client).await.expect("the API server's metrics")
    }

    /// Applies an object, waits and deletes it. Returns the milliseconds from apply to phase Running.
    pub(crate) async fn apply_until_running(&self, n: usize) -> f64 {
        let name = format!("apply-{n}");
        let elapsed = self.apply(&name).await;
        self.delete(&name).await;
        elapsed.as_secs_f64() * 1000.0
    }

    /// Returns the number of writes to a MikromVM on its way to Running, without the apply itself; a mean of `count`.
    pub(crate) async fn writes_of_one(&self, count: usize) -> f64 {
        let mut sum = 0.0;
        for n in 0..count {
            let name = format!("count-{n}");
            let before = self.writes().await;
            self.apply(&name).await;
            // Waits for late writes, which also count.
            sleep(Duration::from_secs(1)).await;
            let grown = self.writes().await.since(&before);
            sum += grown.objects.get(GROUP).copied().unwrap_or_default() - 1.0;
            self.delete(&name).await;
        }
        sum / to_f64(count)
    }

    async fn apply(&self, name: &str) -> Duration {
        let vms: Api<MikromVM> = Api::default_namespaced(self.client.clone());
        let object = serde_json::json!({
            "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM", "metadata": {"name": name},
            "spec": {"image": IMAGE, "vcpuCount": 1, "memoryMB": MEMORY_MIB},
        });
        let began = Instant::now();
        vms.patch(name, &PatchParams::apply("bench"), &Patch::Apply(&object)).await.expect("apply");
        let running = await_condition(vms, name, |vm: Option<&MikromVM>| {
            let phase = vm.and_then(|vm| vm.status.as_ref()).and_then(|status| status.phase.as_ref());
            phase.is_some_and(|phase| serde_json::to_value(phase).is_ok_and(|p| p == "Running"))
        });
        timeout(LIMIT, running).await.expect("Running in time").expect("a watch");
        began.elapsed()
    }

    async fn delete(&self, name: &str) {
        let vms: Api<MikromVM> = Api::default_namespaced(self.client.clone());
        let uid = vms.get(name).await.expect("the object").metadata.uid.expect("a uid");
        vms.delete(name, &DeleteParams::default()).await.expect("delete");
        let gone = await_condition(vms, name, kube::runtime::conditions::is_deleted(&uid));
        timeout(LIMIT, gone).await.expect("gone in time").expect("a watch");
    }
}
