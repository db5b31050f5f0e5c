//! Pods of the benchmark.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::conditions::is_deleted;
use kube::runtime::wait::await_condition;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::ms_since;

/// Time limit of every step of one pod.
const LIMIT: Duration = Duration::from_secs(120);

/// Returns a pod with one container; `spec` overrides fields of its spec.
pub(super) fn pod(name: &str, image: &str, command: &[&str], spec: Value) -> Pod {
    let mut pod = json!({
        "metadata": {"name": name, "labels": {"app": "bench"}},
        "spec": {
            "tolerations": [{"key": "virtual-kubelet.io/provider", "operator": "Exists"}],
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": false,
            "containers": [{
                "name": "main",
                "image": image,
                "imagePullPolicy": "Never",
                "command": command,
                // Together with the guest's own need the memory equals the size class of the VMs that boot cold.
                "resources": {"limits": {"cpu": "1", "memory": "64Mi"}, "requests": {"cpu": "10m"}},
            }],
        },
    });
    let own = pod["spec"].as_object_mut().expect("an object");
    own.extend(spec.as_object().expect("an object").clone());
    serde_json::from_value(pod).expect("a pod")
}

/// Creates a pod and returns the milliseconds from create to Ready.
pub(super) async fn until_ready(pods: Api<Pod>, pod: &Pod) -> f64 {
    let name = pod.metadata.name.clone().expect("a name");
    let began = Instant::now();
    pods.create(&PostParams::default(), pod).await.expect("create a pod");
    let ready = await_condition(pods, &name, |pod: Option<&Pod>| pod.is_some_and(is_ready));
    timeout(LIMIT, ready).await.expect("Ready in time").expect("a watch");
    ms_since(began)
}

pub(super) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True")
}

/// Deletes a pod and waits until it is gone.
pub(super) async fn remove(pods: Api<Pod>, name: &str) {
    let uid = pods.get(name).await.expect("the pod").metadata.uid.expect("a uid");
    pods.delete(name, &DeleteParams::default()).await.expect("delete");
    let gone = await_condition(pods, name, is_deleted(&uid));
    timeout(LIMIT, gone).await.expect("gone in time").expect("a watch");
}
