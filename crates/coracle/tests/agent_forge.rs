//! `agent-forge-operator`: the binary under the name of the original, with its flags and only the permissions of the manifests,
//! creates a VM on a vCenter. Metrics require permission, and the command line shows the pool.
//!
//! A test program of its own, because it shares modules with the tests of pools, which refer to each other from the crate root.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    dead_code,
    reason = "a test reports by panicking, and uses its part"
)]

#[path = "../../coracle-agentpool/tests/api/image.rs"]
mod image;
#[path = "../../coracle-agentpool/tests/api/objects.rs"]
mod objects;
#[path = "../../coracle-agentpool/tests/api/sims.rs"]
mod sims;
#[path = "system/support.rs"]
mod support;

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use coracle_api::agentpool::foreign::{INFRA_ENV, InfraEnv};
use coracle_api::{VsphereAgent, VsphereAgentPool};
use coracle_testkit::{cluster, tools, vcsim::Vcsim, world};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Secret, ServiceAccount};
use kube::api::{Api, PostParams};
use kube::{Client, config::Kubeconfig};
use serde_json::json;
use tokio::process::{Child, Command};

use self::image::ImageService;
use self::objects::{POOL, definitions, machine, pool_object, secret};
use self::sims::{apis, create, set};
use support::{CORACLE, text, until};

const SYSTEM: &str = "agent-forge-operator-system";
const ACCOUNT: &str = "agent-forge-operator-controller-manager";
const LIMIT: Duration = Duration::from_secs(60);

/// Returns a token of a ServiceAccount in the operator's namespace.
async fn token(client: &Client, account: &str) -> anyhow::Result<String> {
    let api: Api<ServiceAccount> = Api::namespaced(client.clone(), SYSTEM);
    let spec = TokenRequestSpec { expiration_seconds: Some(3600), ..TokenRequestSpec::default() };
    let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
    let made = api.create_token_request(account, &PostParams::default(), &request).await?;
    Ok(made.status.unwrap().token.unwrap_or_default())
}

/// Writes the kubeconfig of the cluster with another token.
fn kubeconfig(of: &Path, token: &str, to: &Path) -> anyhow::Result<()> {
    let file = Kubeconfig::read_from(of)?;
    let mut file = serde_json::to_value(&file)?;
    file["users"] = json!([{"name": file["users"][0]["name"], "user": {"token": token}}]);
    Ok(std::fs::write(to, file.to_string())?)
}

fn start(dir: &Path, port: u16) -> anyhow::Result<Child> {
    let program = dir.join("agent-forge-operator");
    std::os::unix::fs::symlink(CORACLE, &program)?;
    let log = std::fs::File::create(dir.join("operator.log"))?;
    let mut command = Command::new(program);
    command
        .args(["-leader-elect", "--metrics-bind-address", &format!("127.0.0.1:{port}")])
        .arg(format!("-health-probe-bind-address=127.0.0.1:{}", port + 1))
        .args(["--zap-devel=false", "--zap-log-level=info", "--webhook-cert-path=/nowhere", "-enable-http2"])
        .arg("--kubeconfig")
        .arg(dir.join("kubeconfig"))
        .env("POD_NAMESPACE", SYSTEM)
        .env("GOVC_PATH", "/usr/local/bin/govc");
    Ok(command.stdout(Stdio::null()).stderr(log).kill_on_drop(true).spawn()?)
}

async fn create_objects(
    client: &Client,
    ns: &str,
    vcsim: &Vcsim,
    image: &ImageService,
) -> anyhow::Result<()> {
    let data = Some(secret(vcsim.url(), vcsim.thumbprint()));
    let mut object = Secret { string_data: data, ..Secret::default() };
    object.metadata.name = Some("vsphere-credentials".into());
    Api::<Secret>::namespaced(client.clone(), ns).create(&PostParams::default(), &object).await?;
    create(client, ns, &INFRA_ENV, json!({"metadata": {"name": "demo"}, "spec": {}})).await?;
    let envs: Api<InfraEnv> = Api::namespaced_with(client.clone(), ns, &INFRA_ENV.resource("v1beta1"));
    set(&envs, "demo", json!({"status": {"isoDownloadURL": image.url()}}), true).await?;
    let pools: Api<VsphereAgentPool> = Api::namespaced(client.clone(), ns);
    pools.create(&PostParams::default(), &pool_object(ns)).await?;
    machine(client, ns, "w-0").await?;
    let waits = json!({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "NoSuitableAgents"}]}});
    Ok(set(&apis(client, ns).1, "w-0", waits, true).await?)
}

/// Sends a GET and returns status and body.
async fn get(url: &str, token: Option<&str>) -> Result<(u16, String), String> {
    let client = reqwest::Client::builder().tls_danger_accept_invalid_certs(true).no_proxy().build().unwrap();
    let mut request = client.get(url);
    if let Some(token) = token {
        request = request.bearer_auth(token);
    }
    let response = request.send().await.map_err(|e| format!("{e:?}"))?;
    Ok((response.status().as_u16(), response.text().await.map_err(|e| e.to_string())?))
}

async fn coracle(kubeconfig: &Path, args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(CORACLE);
    let output = command.args(args).arg("--kubeconfig").arg(kubeconfig).output().await.unwrap();
    (output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr))
}

#[test]
fn agent_forge_runs_with_original_flags_ports_lease_and_rbac() {
    let Some([kubectl]) = tools::require(["kubectl"]) else { return };
    cluster::run_within(Duration::from_secs(150), |cluster| async move {
        let Some(vcsim) = Vcsim::start_or_skip(&[])? else { return anyhow::Ok(()) };
        let client = cluster.client();
        let dir = tempfile::tempdir()?;
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kustomize/agent-forge");
        let mut apply = Command::new(&kubectl);
        apply.arg("--kubeconfig").arg(cluster.kubeconfig()).args(["apply", "-k"]).arg(&deploy);
        let applied = apply.output().await?;
        assert!(applied.status.success(), "{}", text(&applied.stderr));
        kubeconfig(cluster.kubeconfig(), &token(&client, ACCOUNT).await?, &dir.path().join("kubeconfig"))?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut operator = start(dir.path(), port)?;
        let log = || std::fs::read_to_string(dir.path().join("operator.log")).unwrap_or_default();

        let health = format!("http://127.0.0.1:{}", port + 1);
        let answers = async |path: &str, want: u16| {
            until(path, LIMIT, async || match get(&format!("{health}{path}"), None).await? {
                (status, _) if status == want => Ok(()),
                other => Err(format!("{other:?}")),
            })
            .await;
        };
        // The process is alive, but not ready before the other projects are installed.
        answers("/readyz", 503).await;
        answers("/healthz", 200).await;
        world::install(&client, &definitions(&["v1beta2", "v1beta1"])).await?;
        answers("/readyz", 200).await;
        let (ns, image) = (cluster.namespace().await?, ImageService::start().await?);
        create_objects(&client, &ns, &vcsim, &image).await?;
        assert_eq!(get(&format!("{health}/metrics"), None).await.unwrap().0, 404, "not on the open port");
        let requests: Api<VsphereAgent> = Api::namespaced(client.clone(), &ns);
        let vm = until("a VM that is recorded", LIMIT, async || {
            let request = requests.get_opt("w-0").await.map_err(|e| e.to_string())?;
            let vm = request.as_ref().and_then(|r| r.vm().cloned());
            vm.ok_or_else(|| format!("{request:?}\n{}", log()))
        })
        .await;
        assert!(!vm.bios_uuid.is_empty() && !vm.mac_address.is_empty());
        let leases: Api<Lease> = Api::namespaced(client.clone(), SYSTEM);
        let lease = leases.get("agent-forge-operator.containeroo.ch").await?;
        assert!(lease.spec.unwrap().holder_identity.is_some(), "the original's Lease is held");
        assert!(!log().contains("forbidden"), "{}", log());
        assert!(log().contains("GOVC_PATH"), "one line says that govc's variables have no effect");

        metrics(&client, &kubectl, cluster.kubeconfig(), &format!("https://127.0.0.1:{port}/metrics"))
            .await?;
        check_commands(&dir.path().join("kubeconfig"), &ns).await;

        let pid = rustix::process::Pid::from_raw(i32::try_from(operator.id().unwrap())?).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let ended = tokio::time::timeout(Duration::from_secs(10), operator.wait()).await??;
        assert!(ended.success(), "{ended}: {}", log());
        assert!(vcsim.calls()?.contains_key("Logout"), "it logs out");
        Ok(())
    });
}

/// Checks that metrics are served only to callers that the cluster permits.
async fn metrics(client: &Client, kubectl: &Path, kubeconfig: &Path, url: &str) -> anyhow::Result<()> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), SYSTEM);
    let scraper = serde_json::from_value(json!({"metadata": {"name": "scraper"}}))?;
    accounts.create(&PostParams::default(), &scraper).await?;
    let scraper = token(client, "scraper").await?;
    for (who, token, want) in [
        ("no token", None, 401),
        ("an invalid token", Some("junk"), 401),
        ("an account", Some(&*scraper), 403),
    ] {
        assert_eq!(get(url, token).await.unwrap().0, want, "{who}");
    }
    let mut bind = Command::new(kubectl);
    bind.arg("--kubeconfig").arg(kubeconfig);
    bind.args([
        "create",
        "clusterrolebinding",
        "scraper",
        "--clusterrole=agent-forge-operator-metrics-reader",
    ]);
    let bound = bind.arg(format!("--serviceaccount={SYSTEM}:scraper")).output().await?;
    assert!(bound.status.success(), "{}", text(&bound.stderr));
    let scrape = until("metrics", LIMIT, async || match get(url, Some(&scraper)).await? {
        (200, scrape) => Ok(scrape),
        other => Err(format!("{other:?}")),
    })
    .await;
    for line in [
        "agent_forge_vsphere_vm_operations_total{operation=\"create\",result=\"success\"} 1",
        "agent_forge_iso_operations_total{operation=\"ensure\",result=\"success\"} 1",
        "state=\"pending_owned_vms\"} 1",
        "controller_runtime_reconcile_total{controller=\"vsphereagent\",result=\"success\"}",
        "coracle_agentpool_stage_seconds_count{stage=\"powered\"} 1",
        "coracle_vsphere_sessions 1",
    ] {
        assert!(scrape.contains(line), "{line} is not in\n{scrape}");
    }
    Ok(())
}

/// Checks `coracle agentpool …` with the operator's own permissions.
async fn check_commands(kubeconfig: &Path, ns: &str) {
    let ask = async |command: &str, more: &[&str]| {
        coracle(kubeconfig, &[&["agentpool", command, POOL, "-n", ns], more].concat()).await
    };
    let status = until("a row of the VM", LIMIT, async || {
        let (code, out, err) = ask("status", &[]).await;
        let whole = code == 0 && out.contains("w-0") && out.contains("AgentNotDiscovered");
        if whole { Ok(out) } else { Err(format!("{code} {out}{err}")) }
    })
    .await;
    assert!(
        status.contains("1 AgentMachines: 1 waiting") && status.contains("CapacitySatisfied"),
        "{status}"
    );
    let rows: Vec<_> = status.lines().skip_while(|line| !line.starts_with("VM ")).collect();
    let at = |line: &str, word: &str| line.find(word);
    assert_eq!(at(rows[0], "PHASE"), at(rows[1], "Provisioning"), "columns line up:\n{status}");
    assert_eq!(at(rows[0], "REASON"), at(rows[1], "AgentNotDiscovered"), "columns line up:\n{status}");
    for (command, kind) in
        [("status", "AgentPoolStatus"), ("plan", "AgentPoolPlan"), ("explain", "AgentPoolExplanation")]
    {
        let (code, out, err) = ask(command, &["-o", "json"]).await;
        assert_eq!(code, 0, "{err}");
        let document: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(
            (document["kind"].as_str(), document["metadata"]["name"].as_str()),
            (Some(kind), Some(POOL))
        );
    }
    let (_, plan, _) = ask("plan", &[]).await;
    assert!(plan.contains("Noop"), "{plan}");
    let (_, explained, _) = ask("explain", &[]).await;
    assert!(explained.contains("vm/w-0") && explained.contains("no Agent has registered yet"), "{explained}");
    let (code, _, err) = coracle(kubeconfig, &["agentpool", "status", "demo-worke", "-n", ns]).await;
    assert_eq!(code, 3, "{err}");
    assert!(err.contains("VsphereAgentPool demo-worke not found") && err.contains("demo-worker"), "{err}");
    let (code, _, err) = coracle(kubeconfig, &["agentpool", "status", POOL, "-A"]).await;
    assert_eq!(code, 2, "{err}");
}
