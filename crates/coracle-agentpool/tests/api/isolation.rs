//! Pools are isolated from each other: a vCenter that does not answer, Secrets that differ, a wrong password. The vCenter
//! simulator counts logins.

use std::time::{Duration, Instant};

use coracle_api::agentpool::{NameRef, SecretRef};
use coracle_testkit::{
    cluster,
    vcsim::{Act, Rule},
};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, ResourceExt as _,
    api::{ListParams, PostParams},
};
use serde_json::json;
use tokio::{io::AsyncReadExt as _, net::TcpListener, task::JoinSet};

use crate::{
    objects::pool_object,
    sims::{apis, create, set},
    world::{POOL, World, ready, within_limit},
};

/// Number of VMs that wait for the vCenter that does not answer.
const WAITING: usize = 20;
/// Number of VsphereAgents that use a wrong password.
const REFUSED: usize = 50;

/// Creates a second pool with its own Secret.
async fn second_pool(w: &World, secret: &[(&str, &str)]) -> anyhow::Result<()> {
    let data = secret.iter().map(|(k, v)| ((*k).to_owned(), ByteString(v.as_bytes().to_vec())));
    let mut object = Secret { data: Some(data.collect()), ..Secret::default() };
    object.metadata.name = Some("other-credentials".into());
    Api::<Secret>::namespaced(w.client.clone(), &w.ns).create(&PostParams::default(), &object).await?;
    let mut pool = pool_object(&w.ns);
    pool.metadata.name = Some("other".into());
    pool.spec.node_pool_ref = NameRef { name: "other".into() };
    pool.spec.vsphere.folder = "other".into();
    pool.spec.vsphere.credentials_secret_ref =
        SecretRef { name: "other-credentials".into(), namespace: String::new() };
    w.pools().create(&PostParams::default(), &pool).await?;
    Ok(())
}

/// Creates a waiting AgentMachine of a NodePool.
async fn create_waiting_machine(w: &World, node_pool: &str, name: &str) -> anyhow::Result<()> {
    use coracle_api::agentpool::{foreign::AGENT_MACHINE, names};
    let annotations = json!({names::NODEPOOL_ANNOTATION: format!("{}/{node_pool}", w.ns)});
    let object = json!({
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"agentLabelSelector": {"matchLabels": {"customer": "example"}}},
    });
    create(&w.client, &w.ns, &AGENT_MACHINE, object).await?;
    let condition = json!({"type": "Ready", "status": "False", "reason": "NoSuitableAgents"});
    set(&apis(&w.client, &w.ns).1, name, json!({"status": {"conditions": [condition]}}), true).await?;
    Ok(())
}

/// Waits until `n` VsphereAgents of a pool have the reason.
async fn until_reasons(w: &World, pool: &str, n: usize, reason: &str) -> anyhow::Result<Duration> {
    let began = Instant::now();
    let reasons = async || {
        let all = w.requests().list(&ListParams::default()).await.unwrap().items;
        let of_pool = all.iter().filter(|r| r.spec.pool_ref.name == pool);
        of_pool.map(|r| (r.name_any(), ready(r))).collect::<Vec<_>>()
    };
    let enough = async || {
        let fits = reasons().await.iter().filter(|(_, (r, _))| r == reason).count();
        (fits == n).then_some(())
    };
    if within_limit(enough).await.is_none() {
        anyhow::bail!("not {n} VsphereAgents {reason}: {:?}", reasons().await);
    }
    Ok(began.elapsed())
}

#[test]
fn vcenter_that_does_not_answer_delays_no_other() {
    cluster::run_within(Duration::from_secs(170), |cluster| async move {
        let Some(w) = World::real(cluster, &[]).await? else { return anyhow::Ok(()) };
        // The server accepts connections and reads for ever.
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let server = format!("http://{}/sdk", listener.local_addr()?);
        let mut hole = JoinSet::new();
        hole.spawn(async move {
            let mut all = JoinSet::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                all.spawn(async move { while stream.read(&mut [0; 1024]).await.is_ok_and(|n| n > 0) {} });
            }
        });
        second_pool(&w, &[("server", &server), ("username", "u"), ("password", "p")]).await?;
        w.pool(|_| {}).await?;
        for i in 0..WAITING {
            create_waiting_machine(&w, "other", &format!("o-{i}")).await?;
        }
        let operator = w.operator();
        until_reasons(&w, "other", WAITING, "ProviderUnavailable").await?;
        for i in 0..5 {
            create_waiting_machine(&w, POOL, &format!("w-{i}")).await?;
        }
        let took = until_reasons(&w, POOL, 5, "VMCreated").await?;
        eprintln!("5 VMs beside {WAITING} that wait for a vCenter that does not answer: {took:?}");
        assert!(took < Duration::from_secs(40), "{took:?}");
        let message = w.until_reason("o-0", "ProviderUnavailable").await?;
        assert!(message.contains("has not answered the login"), "{message}");
        operator.stop().await
    });
}

#[test]
fn differing_secrets_of_one_user_keep_separate_sessions() {
    cluster::run_within(Duration::from_secs(170), |cluster| async move {
        let Some(w) = World::real(cluster, &[]).await? else { return anyhow::Ok(()) };
        let vcsim = w.vcenter.vcsim();
        let other =
            [("server", vcsim.url()), ("username", "user"), ("password", "pass"), ("insecure", "true")];
        second_pool(&w, &other).await?;
        w.pool(|_| {}).await?;
        vcsim.reset()?;
        let operator = w.operator();
        for i in 0..5 {
            create_waiting_machine(&w, POOL, &format!("w-{i}")).await?;
            create_waiting_machine(&w, "other", &format!("o-{i}")).await?;
        }
        until_reasons(&w, POOL, 5, "VMCreated").await?;
        until_reasons(&w, "other", 5, "VMCreated").await?;
        operator.reconciles(&["vsphereagent", "vsphereagentpool"], 10).await?;
        let calls = vcsim.calls()?;
        assert_eq!(calls.get("Login"), Some(&2), "one for each content of a Secret: {calls:?}");
        assert_eq!(calls.get("Logout"), None, "no session was closed by the other: {calls:?}");
        operator.stop().await?;
        assert_eq!(vcsim.calls()?.get("Logout"), Some(&2), "both at the end");
        Ok(())
    });
}

#[test]
fn wrong_password_costs_one_login_for_each_pause() {
    cluster::run_within(Duration::from_secs(170), |cluster| async move {
        let Some(w) = World::real(cluster, &[]).await? else { return anyhow::Ok(()) };
        let vcsim = w.vcenter.vcsim();
        vcsim.rules(&[Rule::always("Login", Act::Fault("InvalidLogin".into(), String::new()))])?;
        vcsim.reset()?;
        w.pool(|_| {}).await?;
        for i in 0..REFUSED {
            create_waiting_machine(&w, POOL, &format!("w-{i}")).await?;
        }
        let mut config = w.config();
        config.times.refused = Duration::from_secs(3600);
        let operator = crate::world::Operator::start(w.operators.clone(), config);
        until_reasons(&w, POOL, REFUSED, "ProviderUnavailable").await?;
        operator.reconciles(&["vsphereagent"], u64::try_from(2 * REFUSED)?).await?;
        assert_eq!(vcsim.calls()?.get("Login"), Some(&1), "one for all {REFUSED}");
        let message = w.until_reason("w-0", "ProviderUnavailable").await?;
        assert!(
            message.contains("InvalidLogin") && message.contains("the next try is after a pause"),
            "{message}"
        );
        w.until_condition("VsphereReady", "False", "Error").await?;
        // A changed Secret is tried at once, although the pause is an hour.
        vcsim.rules(&[])?;
        let secrets: Api<Secret> = Api::namespaced(w.client.clone(), &w.ns);
        set(&secrets, "vsphere-credentials", json!({"stringData": {"password": "right"}}), false).await?;
        until_reasons(&w, POOL, REFUSED, "VMCreated").await?;
        assert_eq!(vcsim.calls()?.get("Login"), Some(&2), "one more for all");
        operator.stop().await
    });
}
