//! End-to-end suite for providers of the virtual-kubelet library. The tests have the names of that suite.

use std::time::Duration;

use anyhow::Result;
use coracle_testkit::cluster::{self, Cluster};
use coracle_testkit::eventually;
use coracle_vnode::CertificateSource;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::world::{Daemon, IMAGE, World};

/// Time limit of a test that calls the API of the node.
const LIMIT: Duration = Duration::from_secs(120);
/// Address of the nodes. The API server does not forward requests to loopback addresses.
const ADDRESS: &str = "10.98.0.3";

/// Starts a node whose API the API server reaches without credentials, because that of the tests has none.
async fn reachable(cluster: &Cluster) -> Result<(World, Daemon)> {
    let world = reachable_world(cluster).await?;
    let daemon = world.start().await?;
    Ok((world, daemon))
}

/// Returns the world of such a node.
pub(crate) async fn reachable_world(cluster: &Cluster) -> Result<World> {
    let (name, group) = ("provider-suite", "rbac.authorization.k8s.io");
    let params = PatchParams::apply("test");
    let role = json!({
        "apiVersion": format!("{group}/v1"), "kind": "ClusterRole", "metadata": {"name": name},
        "rules": [{"apiGroups": [""], "resources": ["nodes/proxy", "nodes/stats", "nodes/metrics"], "verbs": ["*"]}],
    });
    let binding = json!({
        "apiVersion": format!("{group}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": name},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
        "subjects": [{"apiGroup": group, "kind": "User", "name": "system:anonymous"}],
    });
    let roles: Api<ClusterRole> = Api::all(cluster.client());
    let bindings: Api<ClusterRoleBinding> = Api::all(cluster.client());
    roles.patch(name, &params, &Patch::Apply(role)).await?;
    bindings.patch(name, &params, &Patch::Apply(binding)).await?;
    // The address exists already after the first test.
    let mut ip = Command::new("busybox");
    ip.args(["ip", "address", "add", &format!("{ADDRESS}/32"), "dev", "lo"]).output().await?;
    let mut world = World::new(cluster).await?;
    (world.options.listen, world.options.address) = ("0.0.0.0:0".parse()?, Some(ADDRESS.parse()?));
    // The API server of the tests prefers host names, and resolves only addresses.
    world.options.hostname = Some(ADDRESS.to_owned());
    (world.options.certificate, world.options.anonymous) = (CertificateSource::SelfSigned, true);
    Ok(world)
}

/// Returns the response of the node, through the API server.
async fn query_node(world: &World, path: &str) -> Option<String> {
    let uri = format!("/api/v1/nodes/{}/proxy/{path}", world.options.name);
    world.client.request_text(http::Request::get(uri).body(vec![]).ok()?).await.ok()
}

/// Waits until the response of the node passes `test`.
async fn until_answer(world: &World, path: &str, test: impl Fn(&str) -> bool) -> Result<String> {
    eventually(path, async || query_node(world, path).await.filter(|answer| test(answer))).await
}

/// Creates a pod with three containers and waits until it runs.
async fn run_three_containers(world: &World, name: &str) -> Result<()> {
    let container =
        |name: &str| json!({"name": name, "image": IMAGE, "imagePullPolicy": "Never", "command": ["serve"]});
    let containers = ["foo", "bar", "baz"].map(container);
    world.create(name, &[], json!({"containers": containers})).await?;
    world.until_ready(name).await.map(drop)
}

/// Returns the names of the pods in a list or a summary, each with the names of its containers.
fn pods_of(answer: &str) -> Vec<(String, Vec<String>)> {
    let parsed: Value = serde_json::from_str(answer).unwrap_or_default();
    let pods = parsed["items"].as_array().or(parsed["pods"].as_array()).cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let of = |pod: &Value| {
        let name = [&pod["metadata"]["name"], &pod["podRef"]["name"]].map(text).concat();
        let containers = pod["spec"]["containers"].as_array().or(pod["containers"].as_array());
        let mut names: Vec<_> = containers.into_iter().flatten().map(|one| text(&one["name"])).collect();
        names.sort();
        (name, names)
    };
    pods.iter().map(of).collect()
}

fn has_pod(answer: &str, pod: &str) -> bool {
    pods_of(answer).iter().any(|(name, _)| name == pod)
}

/// `TestGetPods`
#[test]
fn get_pods() {
    cluster::run_within(LIMIT, async |cluster| -> Result<()> {
        let (world, daemon) = reachable(cluster).await?;
        run_three_containers(&world, "nginx").await?;
        let want = vec![("nginx".to_owned(), ["bar", "baz", "foo"].map(str::to_owned).to_vec())];
        for path in ["runningpods/", "pods"] {
            until_answer(&world, path, |answer| pods_of(answer) == want).await?;
        }
        daemon.stop().await
    });
}

/// `TestGetStatsSummary`
#[test]
fn get_stats_summary() {
    cluster::run_within(LIMIT, async |cluster| -> Result<()> {
        let (world, daemon) = reachable(cluster).await?;
        run_three_containers(&world, "nginx").await?;
        let want = vec![("nginx".to_owned(), ["bar", "baz", "foo"].map(str::to_owned).to_vec())];
        until_answer(&world, "stats/summary", |answer| pods_of(answer) == want).await?;
        daemon.stop().await
    });
}

/// `TestGetMetricsResource`: the second label of a sample is the name of its pod.
#[test]
fn get_metrics_resource() {
    cluster::run_within(LIMIT, async |cluster| -> Result<()> {
        let (world, daemon) = reachable(cluster).await?;
        run_three_containers(&world, "nginx").await?;
        let answer = until_answer(&world, "metrics/resource", |answer| {
            answer.contains("pod_memory_working_set_bytes{")
        })
        .await?;
        let samples =
            answer.lines().filter(|line| line.starts_with("container_") || line.starts_with("pod_"));
        for sample in samples {
            let second = sample.split_once('{').and_then(|(_, labels)| labels.split(',').nth(1));
            assert!(second.is_some_and(|label| label.starts_with("pod=\"nginx\"")), "{sample}");
        }
        daemon.stop().await
    });
}

/// `TestPodLifecycleGracefulDelete`
#[test]
fn pod_lifecycle_graceful_delete() {
    cluster::run_within(LIMIT, async |cluster| -> Result<()> {
        let (world, daemon) = reachable(cluster).await?;
        run_three_containers(&world, "nginx").await?;
        until_answer(&world, "stats/summary", |answer| has_pod(answer, "nginx")).await?;
        world.delete("nginx").await?;
        let pod = world.pods().get_opt("nginx").await?;
        assert!(
            pod.is_none_or(|pod| pod.metadata.deletion_timestamp.is_some()),
            "it ends before its object does"
        );
        world.until_gone("nginx").await?;
        until_answer(&world, "stats/summary", |answer| !has_pod(answer, "nginx")).await?;
        daemon.stop().await
    });
}

/// `TestPodLifecycleForceDelete`
#[test]
fn pod_lifecycle_force_delete() {
    cluster::run_within(LIMIT, async |cluster| -> Result<()> {
        let (world, daemon) = reachable(cluster).await?;
        run_three_containers(&world, "nginx").await?;
        until_answer(&world, "stats/summary", |answer| has_pod(answer, "nginx")).await?;
        world.force_delete("nginx").await?;
        assert!(world.pods().get_opt("nginx").await?.is_none());
        until_answer(&world, "stats/summary", |answer| !has_pod(answer, "nginx")).await?;
        daemon.until_vms(0).await?;
        daemon.stop().await
    });
}

/// Returns a container with a variable from an object that does not exist.
fn container_with(source: &str, optional: bool) -> serde_json::Value {
    let from = json!({"name": "missing", "key": "key", "optional": optional});
    json!({"containers": [{
        "name": "foo", "image": IMAGE, "imagePullPolicy": "Never", "command": ["serve"],
        "env": [{"name": "VALUE", "valueFrom": {source: from}}],
    }]})
}

async fn optional(world: &World, source: &str, reason: &str) -> Result<()> {
    let daemon = world.start().await?;
    world.create("foo", &["serve"], container_with(source, true)).await?;
    world.until_ready("foo").await?;
    let message = world.until_event("foo", reason).await?;
    assert!(message.contains("missing"), "{message}");
    daemon.stop().await
}

async fn check_missing_object(world: &World, source: &str, reason: &str) -> Result<()> {
    let daemon = world.start().await?;
    world.create("foo", &["serve"], container_with(source, false)).await?;
    let message = world.until_event("foo", reason).await?;
    assert!(message.contains("missing"), "{message}");
    let pod = world
        .until("foo", "waiting for its object", |pod| {
            let status =
                pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten()).next();
            let waiting =
                status.and_then(|status| status.state.as_ref()?.waiting.as_ref()?.reason.as_deref());
            waiting == Some("CreateContainerConfigError")
        })
        .await?;
    assert_eq!(crate::world::phase_of(&pod), "Pending");
    daemon.stop().await
}

/// `TestCreatePodWithOptionalInexistentSecrets`
#[test]
fn create_pod_with_optional_inexistent_secrets() {
    cluster::run(async |cluster| -> Result<()> {
        optional(&World::new(cluster).await?, "secretKeyRef", "OptionalSecretNotFound").await
    });
}

/// `TestCreatePodWithMandatoryInexistentSecrets`
#[test]
fn create_pod_with_mandatory_inexistent_secrets() {
    cluster::run(async |cluster| -> Result<()> {
        check_missing_object(&World::new(cluster).await?, "secretKeyRef", "MandatorySecretNotFound").await
    });
}

/// `TestCreatePodWithOptionalInexistentConfigMap`
#[test]
fn create_pod_with_optional_inexistent_config_map() {
    cluster::run(async |cluster| -> Result<()> {
        optional(&World::new(cluster).await?, "configMapKeyRef", "OptionalConfigMapNotFound").await
    });
}

/// `TestCreatePodWithMandatoryInexistentConfigMap`
#[test]
fn create_pod_with_mandatory_inexistent_config_map() {
    cluster::run(async |cluster| -> Result<()> {
        check_missing_object(&World::new(cluster).await?, "configMapKeyRef", "MandatoryConfigMapNotFound")
            .await
    });
}
