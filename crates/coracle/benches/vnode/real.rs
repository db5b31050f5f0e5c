//! Pods on QEMU, compared with cold boots of VMs.

use std::path::Path;

use coracle_testkit::figures::{figure, percentile};
use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use serde_json::json;

use super::node::{IMAGE, Start};
use super::pods::{pod, remove, until_ready};
use super::streams;
use super::system::System;

/// Number of pods and of cold boots, alternating.
const SAMPLES: usize = 20;
const BURST: usize = 20;
const SLEEP: [&str; 2] = ["/bin/sleep", "100000"];

pub(super) async fn measure(dir: &Path) {
    std::fs::create_dir_all(dir).expect("a directory");
    let with = ["--with", "scheduler,controller-manager"];
    let system = System::up_with(dir, &with, &[]).await;
    let pods: Api<Pod> = Api::default_namespaced(system.client());
    // The first pod takes the template of its VM shape.
    start(&pods, "first").await;
    remove(pods.clone(), "first").await;
    let (mut cold, mut ready) = (Vec::new(), Vec::new());
    for n in 0..SAMPLES {
        cold.push(system.node.boot(n, Start::Cold).await.0);
        let name = format!("pod-{n}");
        ready.push(start(&pods, &name).await);
        remove(pods.clone(), &name).await;
    }
    eprintln!("samples: {SAMPLES} each, alternating\ncold ms: {cold:.0?}\nready ms: {ready:.0?}");
    let cold = percentile(&cold, 50);
    let p95 = percentile(&ready, 95);
    figure("pod.cold_ms", cold, "ms");
    figure("pod.ready_p50_ms", percentile(&ready, 50), "ms");
    figure("pod.ready_p95_ms", p95, "ms");
    figure("pod.ready_ratio", p95 / cold, "ratio");
    figure("pod.burst20_ratio", burst(&pods).await / cold, "ratio");
    // After this burst the node pools as many clones.
    system.node.until_pooled(BURST).await;
    figure("pod.burst20_pooled_ratio", burst(&pods).await / cold, "ratio");
    streams::measure(&pods, &system.kubelet().await, cold).await;
    system.down().await;
}

/// Starts a pod and returns the milliseconds from create to Ready.
async fn start(pods: &Api<Pod>, name: &str) -> f64 {
    until_ready(pods.clone(), &pod(name, IMAGE, &SLEEP, json!({}))).await
}

/// Starts many pods at once and returns the 95th percentile.
async fn burst(pods: &Api<Pod>) -> f64 {
    let names: Vec<_> = (0..BURST).map(|n| format!("burst-{n}")).collect();
    let times = join_all(names.iter().map(|name| start(pods, name))).await;
    eprintln!("burst ms: {times:.0?}");
    join_all(names.iter().map(|name| remove(pods.clone(), name))).await;
    percentile(&times, 95)
}
