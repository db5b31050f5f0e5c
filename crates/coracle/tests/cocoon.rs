//! `cocoon-operator`, `cocoon-webhook` and `vk-cocoon`: the binary under the names of the originals, with their variables. The
//! first two have only the permissions of the manifests.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    dead_code,
    reason = "a test reports by panicking, and uses its part"
)]

#[path = "cocoon/provider.rs"]
mod provider;
#[path = "system/support.rs"]
mod support;

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use coracle_api::cocoon::keys;
use coracle_api::{CocoonHibernation, CocoonSet};
use coracle_testkit::{cluster, tools, world};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, ServiceAccount};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::{Client, CustomResourceExt as _, ResourceExt as _, config::Kubeconfig};
use serde_json::json;
use tokio::process::{Child, Command};

use support::{CORACLE, text, until};

const SYSTEM: &str = keys::SYSTEM_NAMESPACE;
const ACCOUNT: &str = "cocoon-operator";
const LIMIT: Duration = Duration::from_secs(60);

/// Writes a kubeconfig of the cluster with the token of the operator's service account.
async fn kubeconfig(client: &Client, of: &Path, to: &Path) -> anyhow::Result<()> {
    let api: Api<ServiceAccount> = Api::namespaced(client.clone(), SYSTEM);
    let spec = TokenRequestSpec { expiration_seconds: Some(3600), ..TokenRequestSpec::default() };
    let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
    let made = api.create_token_request(ACCOUNT, &PostParams::default(), &request).await?;
    let mut file = serde_json::to_value(Kubeconfig::read_from(of)?)?;
    let token = made.status.unwrap().token;
    file["users"] = json!([{"name": file["users"][0]["name"], "user": {"token": token}}]);
    Ok(std::fs::write(to, file.to_string())?)
}

/// Starts the binary under that name; the log is `NAME.log`.
fn start(dir: &Path, name: &str, variables: &[(&str, String)]) -> anyhow::Result<Child> {
    let program = dir.join(name);
    std::os::unix::fs::symlink(CORACLE, &program)?;
    let log = std::fs::File::create(dir.join(format!("{name}.log")))?;
    let mut command = Command::new(program);
    command.env("KUBECONFIG", dir.join("kubeconfig")).env("POD_NAMESPACE", SYSTEM);
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    Ok(command.stdout(Stdio::null()).stderr(log).kill_on_drop(true).spawn()?)
}

async fn stop(mut child: Child, log: &str) -> anyhow::Result<()> {
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id().unwrap())?).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
    let ended = tokio::time::timeout(Duration::from_secs(10), child.wait()).await??;
    assert!(ended.success(), "{ended}: {log}");
    assert!(!log.contains("forbidden"), "{log}");
    Ok(())
}

/// Returns free ports of this machine.
fn ports() -> anyhow::Result<[u16; 4]> {
    let bind = || std::net::TcpListener::bind("127.0.0.1:0");
    let all = [bind()?, bind()?, bind()?, bind()?];
    let mut ports = [0; 4];
    for (port, listener) in ports.iter_mut().zip(&all) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

async fn get(url: &str) -> Result<String, String> {
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let answer = client.get(url).send().await.map_err(|e| format!("{e:?}"))?;
    match answer.status().as_u16() {
        200 => answer.text().await.map_err(|e| e.to_string()),
        other => Err(format!("{other}")),
    }
}

#[test]
fn cocoon_runs_with_original_names_variables_lease_and_rbac() {
    let Some([kubectl]) = tools::require(["kubectl"]) else { return };
    cluster::run_within(Duration::from_secs(150), |cluster| async move {
        let client = cluster.client();
        let dir = tempfile::tempdir()?;
        world::install(&client, &[CocoonSet::crd(), CocoonHibernation::crd()]).await?;
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kustomize/cocoon");
        let mut apply = Command::new(&kubectl);
        let applied = apply
            .arg("--kubeconfig")
            .arg(cluster.kubeconfig())
            .args(["apply", "-k"])
            .arg(&deploy)
            .output()
            .await?;
        assert!(applied.status.success(), "{}", text(&applied.stderr));
        kubeconfig(&client, cluster.kubeconfig(), &dir.path().join("kubeconfig")).await?;
        let ns = cluster.namespace().await?;
        let ports = ports()?;
        operator(&client, dir.path(), &ns, ports).await?;
        webhook(&client, dir.path(), &ns, ports).await
    });
}

async fn operator(client: &Client, dir: &Path, ns: &str, ports: [u16; 4]) -> anyhow::Result<()> {
    let [metrics, health, ..] = ports.map(|port| format!("127.0.0.1:{port}"));
    // Address without a registry: the test does not need one.
    let epoch = ("EPOCH_URL", "http://127.0.0.1:1".to_owned());
    let variables = [("METRICS_ADDR", metrics.clone()), ("PROBE_ADDR", health.clone()), epoch];
    let child = start(dir, "cocoon-operator", &variables)?;
    let log = || std::fs::read_to_string(dir.join("cocoon-operator.log")).unwrap_or_default();
    for path in ["healthz", "readyz"] {
        until(path, LIMIT, async || get(&format!("http://{health}/{path}")).await.map(drop)).await;
    }
    let set = json!({"apiVersion": "cocoonset.cocoonstack.io/v1", "kind": "CocoonSet", "metadata": {"name": "demo"},
        "spec": {"agent": {"image": "u"}}});
    let sets: Api<CocoonSet> = Api::namespaced(client.clone(), ns);
    sets.create(&PostParams::default(), &serde_json::from_value(set)?).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), ns);
    let pod = until("the main agent's pod", LIMIT, async || {
        pods.get_opt("demo-0").await.map_err(|e| e.to_string())?.ok_or_else(log)
    })
    .await;
    assert_eq!(pod.annotations()[keys::VM_NAME], format!("vk-{ns}-demo-0"));
    let leases: Api<Lease> = Api::namespaced(client.clone(), SYSTEM);
    assert!(leases.get(keys::LEASE).await?.spec.unwrap().holder_identity.is_some(), "the original's Lease");
    let scrape = get(&format!("http://{metrics}/metrics")).await.unwrap();
    for line in [
        "coracle_controller_reconcile_total{controller=\"cocoonset\"}",
        "cocoon_operator_slot_release_pods_deleted_total 0",
    ] {
        assert!(scrape.contains(line), "{line} is not in\n{scrape}");
    }
    stop(child, &log()).await?;
    pods.delete_collection(&DeleteParams::default().grace_period(0), &ListParams::default()).await?;
    Ok(())
}

async fn webhook(client: &Client, dir: &Path, ns: &str, ports: [u16; 4]) -> anyhow::Result<()> {
    let [_, _, listen, metrics] = ports.map(|port| format!("127.0.0.1:{port}"));
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()])?;
    let (certificate, key) = (dir.join("tls.crt"), dir.join("tls.key"));
    std::fs::write(&certificate, made.cert.pem())?;
    std::fs::write(&key, made.signing_key.serialize_pem())?;
    let path = |path: &Path| path.display().to_string();
    let files = [("TLS_CERT", path(&certificate)), ("TLS_KEY", path(&key))];
    let addresses = [("LISTEN_ADDR", listen.clone()), ("METRICS_ADDR", metrics.clone())];
    let child = start(dir, "cocoon-webhook", &[files, addresses].concat())?;
    let log = || std::fs::read_to_string(dir.join("cocoon-webhook.log")).unwrap_or_default();
    let configuration = json!({"metadata": {"name": format!("own-{ns}")}, "webhooks": [{
        "name": "pods.cocoon.example", "sideEffects": "NoneOnDryRun", "admissionReviewVersions": ["v1"],
        "failurePolicy": "Fail", "timeoutSeconds": 5,
        "clientConfig": {"url": format!("https://{listen}/mutate"), "caBundle": ByteString(made.cert.pem().into_bytes())},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": ns}},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}]}]});
    let configurations: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    configurations.create(&PostParams::default(), &serde_json::from_value(configuration)?).await?;
    let toleration = json!({"key": keys::TAINT_KEY, "operator": "Exists"});
    let pod = json!({"metadata": {"generateName": "web-"}, "spec": {"containers": [{"name": "a", "image": "vm:1"}],
        "tolerations": [toleration], "automountServiceAccountToken": false}});
    let pod: Pod = serde_json::from_value(pod)?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), ns);
    let named = until("a VM name", LIMIT, async || {
        let made = pods.create(&PostParams::default(), &pod).await.map_err(|e| format!("{e}\n{}", log()))?;
        made.annotations().get(keys::VM_NAME).cloned().ok_or_else(log)
    })
    .await;
    assert!(named.starts_with(&format!("vk-{ns}-web-")), "{named}");
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), SYSTEM);
    let map = maps.get("cocoon-affinity-default").await?;
    assert_eq!(map.labels()["app.kubernetes.io/managed-by"], "cocoon-webhook");
    let scrape = get(&format!("http://{metrics}/metrics")).await.unwrap();
    let line = "cocoon_webhook_admission_total{handler=\"mutate\",decision=\"allow\"}";
    assert!(scrape.contains(line), "{scrape}");
    configurations.delete(&format!("own-{ns}"), &DeleteParams::default()).await?;
    stop(child, &log()).await
}
