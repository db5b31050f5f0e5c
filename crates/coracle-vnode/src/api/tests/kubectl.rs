//! kubectl through the API server, which forwards its requests to the node.

use coracle_testkit::cluster::{self, Cluster};
use coracle_testkit::tools;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::time::timeout;

use super::clients::{finish, spawn};
use super::rights::allow;
use super::world::{DEADLINE, World};

/// Address of the node. The API server refuses to forward raw requests to loopback addresses.
const ADDRESS: &str = "10.98.0.1";

/// Adds the node's address to the network namespace of the test.
async fn add_address() -> anyhow::Result<()> {
    let added = Command::new("busybox")
        .args(["ip", "address", "add", &format!("{ADDRESS}/32"), "dev", "lo"])
        .status()
        .await?;
    anyhow::ensure!(added.success(), "ip address add: {added}");
    Ok(())
}

/// Registers a Node whose API is that of `world`, and a pod on it.
async fn register(cluster: &Cluster, world: &World, node: &str, namespace: &str) -> anyhow::Result<()> {
    let client = cluster.client();
    let how = PostParams::default();
    let nodes: Api<Node> = Api::all(client.clone());
    nodes.create(&how, &serde_json::from_value(json!({"metadata": {"name": node}}))?).await?;
    let status = json!({"status": {
        "addresses": [{"type": "InternalIP", "address": ADDRESS}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": world.address.port()}},
    }});
    nodes.patch_status(node, &PatchParams::default(), &Patch::Merge(&status)).await?;
    let pod = json!({
        "metadata": {"name": "web"},
        "spec": {"nodeName": node, "containers": [{"name": "main", "image": "a", "stdin": true}, {"name": "later", "image": "a"}]},
    });
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    pods.create(&how, &serde_json::from_value(pod)?).await?;
    let running = json!({"status": {"phase": "Running"}});
    pods.patch_status("web", &PatchParams::default(), &Patch::Merge(&running)).await?;
    // The API server of the tests has no client certificate for nodes.
    for (verb, subresource) in [("get", "proxy"), ("create", "proxy"), ("get", "stats"), ("get", "metrics")] {
        allow(&client, "system:anonymous", verb, subresource).await?;
    }
    Ok(())
}

#[test]
fn kubectl_reaches_pods_through_the_api_server() {
    cluster::run(async |cluster| {
        let Some([kubectl]) = tools::require(["kubectl"]) else { return Ok(()) };
        let (node, namespace) = ("kubectl-node", cluster.namespace().await?);
        let world = World::new(cluster.client(), node, true).await;
        world.run(&namespace, "web", &["serve"], true).await;
        add_address().await?;
        register(cluster, &world, node, &namespace).await?;
        let log = world.pods.find(&namespace, "web", None).unwrap().containers[0].log.clone();
        std::fs::write(
            log,
            "2026-08-01T10:00:00.000000000Z stdout F one\n2026-08-01T10:00:01.000000000Z stdout F two\n",
        )?;
        let run = async |args: &[&str], input: &[u8], websockets: &str| {
            let mut command = Command::new(&kubectl);
            command.arg("--kubeconfig").arg(cluster.kubeconfig()).args(["-n", &namespace]).args(args);
            command.env("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", websockets);
            finish(spawn(&mut command), input).await
        };
        // In the second round, the API server forwards WebSockets to the node unchanged.
        for websockets in ["true", "passed on", "false"] {
            if websockets == "passed on" {
                declare(cluster, node).await?;
            }
            let (code, stdout, stderr) =
                run(&["exec", "web", "-c", "main", "--", "say", "two words"], b"", websockets).await;
            assert_eq!((code, stdout.as_str()), (Some(0), "say two words\n"), "{websockets}: {stderr}");
            let (code, stdout, stderr) =
                run(&["attach", "web", "-c", "main", "-i", "-q"], b"hello\n", websockets).await;
            assert_eq!((code, stdout.as_str()), (Some(0), "hello\n"), "{websockets}: {stderr}");
        }
        let (code, stdout, stderr) = run(&["logs", "web", "-c", "main", "--tail=1"], b"", "true").await;
        assert_eq!((code, stdout.as_str()), (Some(0), "two\n"), "{stderr}");
        let (code, _, stderr) = run(&["logs", "web", "-c", "later"], b"", "true").await;
        assert!(code == Some(1) && stderr.contains("is waiting to start"), "{stderr}");
        let (code, _, stderr) = run(&["exec", "web", "-c", "later", "--", "ls"], b"", "true").await;
        assert!(code == Some(1) && stderr.contains("waiting to start"), "{stderr}");
        let raw = format!("/api/v1/nodes/{node}/proxy");
        let (code, stdout, stderr) =
            run(&["get", "--raw", &format!("{raw}/stats/summary")], b"", "true").await;
        assert!(code == Some(0) && stdout.contains("\"nodeName\":\"kubectl-node\""), "{stdout} {stderr}");
        let (code, stdout, stderr) =
            run(&["get", "--raw", &format!("{raw}/runningpods/")], b"", "true").await;
        assert!(code == Some(0) && stdout.contains("\"name\":\"web\""), "{stdout} {stderr}");
        for websockets in ["true", "false"] {
            let mut command = Command::new(&kubectl);
            command.arg("--kubeconfig").arg(cluster.kubeconfig()).args([
                "-n",
                &namespace,
                "port-forward",
                "web",
                ":7",
            ]);
            let mut client = spawn(command.env("KUBECTL_PORT_FORWARD_WEBSOCKETS", websockets));
            let mut lines = BufReader::new(client.stdout.as_mut().unwrap()).lines();
            let line = timeout(DEADLINE, lines.next_line()).await??.unwrap_or_default();
            let port = line.split("127.0.0.1:").nth(1).and_then(|rest| rest.split(' ').next());
            let port: u16 = port.unwrap_or_else(|| panic!("{websockets}: {line}")).parse()?;
            let mut connection = TcpStream::connect(("127.0.0.1", port)).await?;
            connection.write_all(b"ping").await?;
            let mut answer = [0; 4];
            timeout(DEADLINE, connection.read_exact(&mut answer)).await??;
            assert_eq!(&answer, b"ping", "{websockets}");
            client.kill().await?;
        }
        world.end().await;
        anyhow::Ok(())
    });
}

/// Declares that the node supports WebSockets.
async fn declare(cluster: &Cluster, node: &str) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(cluster.client());
    let status = json!({"status": {"declaredFeatures": ["ExtendWebSocketsToKubelet"]}});
    let node = nodes.patch_status(node, &PatchParams::default(), &Patch::Merge(&status)).await?;
    let declared = node.status.and_then(|status| status.declared_features).unwrap_or_default();
    anyhow::ensure!(declared == ["ExtendWebSocketsToKubelet"], "{declared:?}");
    Ok(())
}
