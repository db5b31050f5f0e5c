//! Objects that `coracle up` creates in a cluster, waits for, and removes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_api::keys::{NODE_NAMESPACE, SYSTEM_NAMESPACE, node as keys};
use coracle_api::{MikromVM, MikromVMSpec, subresources};
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node, NodeCondition, Secret, Service, ServiceAccount};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use miette::{IntoDiagnostic, WrapErr};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use super::{cocoon, kubeconfig, pki};
use coracle_cli::error::Failure;

/// Time limit for each part to become Ready.
pub(crate) const READY_LIMIT: Duration = Duration::from_secs(180);

/// Time limit for a cluster that does not answer while the system is stopped.
const WITHDRAW_LIMIT: Duration = Duration::from_secs(10);

/// Field manager of the objects that are applied here.
const MANAGER: &str = "coracle-up";

/// Secret that earlier versions created.
const OLD_CLIENT_SECRET: &str = "coracle-client";

/// File that records the foreign cluster from which traces must be removed.
const RECORD: &str = "cluster.json";

/// Applies namespaces and custom resource definitions. Idempotent.
pub(crate) async fn install(client: &Client) -> miette::Result<()> {
    let params = PatchParams::apply(MANAGER).force();
    let namespaces: Api<Namespace> = Api::all(client.clone());
    for name in [SYSTEM_NAMESPACE, NODE_NAMESPACE] {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        let made = namespaces.patch(name, &params, &Patch::Apply(&namespace)).await;
        made.into_diagnostic().wrap_err_with(|| format!("make the namespace {name}"))?;
    }
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for crd in coracle_api::crds() {
        let name = crd.metadata.name.clone().unwrap_or_default();
        definitions
            .patch(&name, &params, &Patch::Apply(&crd))
            .await
            .into_diagnostic()
            .wrap_err_with(|| format!("apply {name}"))?;
        let established = kube::runtime::wait::await_condition(
            definitions.clone(),
            &name,
            kube::runtime::wait::conditions::is_crd_established(),
        );
        timeout(Duration::from_secs(20), established)
            .await
            .into_diagnostic()
            .wrap_err_with(|| format!("{name} is not established"))?
            .into_diagnostic()?;
    }
    Ok(())
}

/// Removes the Secret by which earlier versions gave the command line access to nodes: every user who could read it could use
/// every VM.
pub(crate) async fn remove_client(client: &Client) -> miette::Result<()> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    ignore_not_found(secrets.delete(OLD_CLIENT_SECRET, &DeleteParams::default()).await.map(drop))
        .wrap_err("remove the command line's certificate of an earlier version")
}

/// Treats the deletion of a missing object as success.
fn ignore_not_found(outcome: Result<(), kube::Error>) -> miette::Result<()> {
    match outcome {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => other.into_diagnostic(),
    }
}

/// Waits until the node is announced and an operator is leader.
pub(crate) async fn wait_leases(client: &Client) -> miette::Result<()> {
    let nodes: Api<Lease> = Api::namespaced(client.clone(), NODE_NAMESPACE);
    let elections: Api<Lease> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let held = |lease: &Lease| {
        lease.spec.as_ref().and_then(|s| s.holder_identity.as_ref()).is_some_and(|h| !h.is_empty())
    };
    let deadline = Instant::now() + READY_LIMIT;
    loop {
        let agents = ListParams::default().labels(keys::AGENT_LABEL);
        let has_node = !nodes.list(&agents).await.into_diagnostic()?.items.is_empty();
        let operator = elections.get_opt("coracle-mikromvm").await.into_diagnostic()?;
        if has_node && operator.is_some_and(|lease| held(&lease)) {
            return Ok(());
        }
        let help = "their logs are logs/node.log and logs/operator.log in the state directory";
        pause(deadline, || Failure::new("COR-UP-007", "node and operator did not become ready").help(help))
            .await?;
    }
}

/// Waits until admission answers: an object that is created with dry run gets a verdict, regardless of which.
pub(crate) async fn wait_admission(client: &Client) -> miette::Result<()> {
    let spec =
        MikromVMSpec { image: "check".into(), vcpu_count: 1, memory_mib: 128, ..MikromVMSpec::default() };
    let check = MikromVM::new("coracle-admission-check", spec);
    let vms: Api<MikromVM> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let hooks: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    let dry_run = PostParams { dry_run: true, field_manager: None };
    let deadline = Instant::now() + READY_LIMIT;
    loop {
        let installed = hooks.get_opt(&webhook_name()).await.into_diagnostic()?.is_some();
        let why = match vms.create(&dry_run, &check).await {
            _ if !installed => "it is not installed".to_owned(),
            Err(kube::Error::Api(status)) if status.message.contains("calling webhook") => status.message,
            Err(kube::Error::Api(_)) | Ok(_) => return Ok(()),
            Err(error) => error.to_string(),
        };
        let help = "its log is logs/operator.log in the state directory; the API server must be able to dial this machine";
        pause(deadline, || {
            Failure::new("COR-UP-010", format!("admission does not answer: {why}")).help(help)
        })
        .await?;
    }
}

/// Waits until the controller manager works: it has created the default ServiceAccount, which every Pod needs.
pub(crate) async fn wait_service_account(client: &Client) -> miette::Result<()> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "default");
    let deadline = Instant::now() + READY_LIMIT;
    while accounts.get_opt("default").await.into_diagnostic()?.is_none() {
        let help = "its log is logs/kube-controller-manager.log in the state directory";
        pause(deadline, || {
            Failure::new("COR-UP-011", "the controller manager did not become ready").help(help)
        })
        .await?;
    }
    Ok(())
}

/// Returns the current time in whole seconds, the precision of times in the API.
pub(crate) fn this_second() -> miette::Result<jiff::Timestamp> {
    jiff::Timestamp::from_second(coracle_types::Clock::system().now().seconds()).into_diagnostic()
}

/// Waits until the Node of a kubelet or of the virtual node is Ready, with a heartbeat since `began`: the Ready condition of an
/// earlier start stays for a while.
pub(crate) async fn wait_node(client: &Client, name: &str, began: jiff::Timestamp) -> miette::Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let deadline = Instant::now() + READY_LIMIT;
    loop {
        let node = nodes.get_opt(name).await.into_diagnostic()?;
        let conditions = node.and_then(|node| node.status?.conditions).unwrap_or_default();
        let is_ready = |condition: &NodeCondition| {
            // Times in the API have whole seconds.
            let fresh = condition.last_heartbeat_time.as_ref().is_some_and(|time| time.0 >= began);
            condition.type_ == "Ready" && condition.status == "True" && fresh
        };
        if conditions.iter().any(is_ready) {
            return Ok(());
        }
        let help = "read logs/kubelet.log and logs/node.log in the state directory";
        let failure = || Failure::new("COR-UP-013", format!("Node {name} did not become ready")).help(help);
        pause(deadline, failure).await?;
    }
}

/// Waits a moment, or fails after `deadline`.
async fn pause(deadline: Instant, failure: impl FnOnce() -> Failure) -> Result<(), Failure> {
    if Instant::now() > deadline {
        return Err(failure());
    }
    sleep(Duration::from_millis(100)).await;
    Ok(())
}

/// Waits until the API server reports that the extension API is available.
pub(crate) async fn wait_api(client: &Client, limit: Duration) -> miette::Result<()> {
    let apis: Api<APIService> = Api::all(client.clone());
    let deadline = Instant::now() + limit;
    loop {
        let found = apis.get_opt(subresources::API_SERVICE).await.into_diagnostic()?;
        let conditions = found.and_then(|api| api.status?.conditions).unwrap_or_default();
        let available = conditions.into_iter().find(|condition| condition.type_ == "Available");
        let why = match available {
            Some(condition) if condition.status == "True" => return Ok(()),
            Some(condition) => condition.message.unwrap_or_default(),
            None => "it is not installed".to_owned(),
        };
        let help = "its log is logs/operator.log in the state directory; the API server must be able to dial this machine";
        let failure = || Failure::new("COR-UP-010", format!("the extension API does not answer: {why}"));
        pause(deadline, || failure().help(help)).await?;
    }
}

fn webhook_name() -> String {
    coracle_admission::Config::default().name
}

/// Cluster of a system that does not run its own control plane.
#[derive(Serialize, Deserialize)]
struct Foreign {
    kubeconfig: PathBuf,
    node: String,
}

/// Records a foreign cluster before anything is created in it.
pub(crate) fn note_foreign(state: &Path, kubeconfig: Option<&Path>) -> miette::Result<()> {
    let path = state.join(RECORD);
    match kubeconfig {
        Some(kubeconfig) => {
            let foreign = Foreign { kubeconfig: kubeconfig.to_owned(), node: super::hostname() };
            pki::write(&path, &serde_json::to_vec(&foreign).into_diagnostic()?)
        }
        None => {
            let _absent = std::fs::remove_file(path);
            Ok(())
        }
    }
}

/// Removes objects that would harm a cluster without this system: webhooks without a server, a node that is gone. Objects of
/// users and their definitions stay. Idempotent; does nothing if no foreign cluster is recorded.
pub(crate) async fn withdraw(state: &Path) {
    let path = state.join(RECORD);
    let Some(foreign) =
        std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<Foreign>(&bytes).ok())
    else {
        return;
    };
    let outcome = match timeout(WITHDRAW_LIMIT, withdraw_from(&foreign)).await {
        Ok(outcome) => outcome.map_err(|e| format!("{e:?}")),
        Err(_) => Err("no answer".to_owned()),
    };
    match outcome {
        Ok(()) => {
            let _absent = std::fs::remove_file(path);
        }
        Err(why) => eprintln!(
            "the cluster of {} keeps our webhook configuration {} and Lease {}: {why}",
            foreign.kubeconfig.display(),
            webhook_name(),
            foreign.node
        ),
    }
}

async fn withdraw_from(foreign: &Foreign) -> miette::Result<()> {
    let client = kubeconfig::client(Some(&foreign.kubeconfig), false)
        .await?
        .ok_or_else(|| miette::miette!("no cluster"))?;
    let params = DeleteParams::default();
    let hooks: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    ignore_not_found(hooks.delete(&webhook_name(), &params).await.map(drop))?;
    ignore_not_found(hooks.delete(cocoon::WEBHOOKS, &params).await.map(drop))?;
    let mutating: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    ignore_not_found(mutating.delete(cocoon::WEBHOOKS, &params).await.map(drop))?;
    let leases: Api<Lease> = Api::namespaced(client.clone(), NODE_NAMESPACE);
    ignore_not_found(leases.delete(&foreign.node, &params).await.map(drop))?;
    // An APIService without a server would block the deletion of namespaces.
    let apis: Api<APIService> = Api::all(client.clone());
    ignore_not_found(apis.delete(subresources::API_SERVICE, &params).await.map(drop))?;
    let services: Api<Service> = Api::namespaced(client, SYSTEM_NAMESPACE);
    ignore_not_found(services.delete(coracle_admission::SERVICE, &params).await.map(drop))
}
