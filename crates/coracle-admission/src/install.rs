//! Renews certificates, and updates the webhook's configuration in the API server with them.

use coracle_reconcile::WallTime as _;
use std::{net::SocketAddr, time::Duration};

use coracle_authority::{Holder, authority};
use coracle_microvm::Fleet;
use k8s_openapi::{ByteString, api::rbac::v1::ClusterRole};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams},
};
use serde_json::{Value, json};
use tracing::{info, warn};

use crate::{Config, Endpoint, Error, Reach, SERVICE, serve::Tls};

/// Field manager of the configuration.
const MANAGER: &str = "coracle-webhook";
/// Delay between two attempts.
const RETRY: Duration = Duration::from_secs(2);
/// Interval between checks for an authority that another replica has renewed.
const LOOK: Duration = Duration::from_secs(60);
/// Path of the webhook.
pub(crate) const PATH: &str = "/validate/mikromvm";

/// Time after which API servers have seen a changed webhook configuration.
const PROPAGATION: Duration = Duration::from_secs(10);

/// Runs forever: issues the certificate, installs the configuration, and waits until one of them must be renewed.
pub(crate) async fn keep(
    client: &Client,
    config: &Config,
    address: SocketAddr,
    fleet: Option<&Fleet>,
    tls: &Tls,
) {
    if let Some(fleet) = fleet {
        fleet.ready().await; // before that every review would be refused
    }
    let has_fleet = fleet.is_some();
    let mut installed = None;
    loop {
        let wait = match renew_due(client, config, address, tls, has_fleet, &mut installed).await {
            Ok(wait) => {
                config.ready.send_replace(true);
                wait.min(LOOK)
            }
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                warn!(error, "install webhook failed");
                RETRY
            }
        };
        tokio::time::sleep(wait).await;
    }
}

/// Renews what is due, and returns the time until the next action.
async fn renew_due(
    client: &Client,
    config: &Config,
    address: SocketAddr,
    tls: &Tls,
    has_fleet: bool,
    installed: &mut Option<String>,
) -> Result<Duration, Error> {
    let now = config.clock.timestamp();
    let authority =
        authority(client, &config.system_namespace, config.authority, now, config.authority_life).await?;
    let bundle = authority.bundle();
    let renewed = installed.as_ref() != Some(&bundle);
    let holder = Holder { names: names(config), ..Holder::default() };
    let sign = || authority.issue(&holder, now, config.certificate_life);
    let served = tls.renew_after();
    if served.is_none() {
        tls.set(sign()?)?;
    }
    if renewed {
        install(client, config, address, &bundle, has_fleet).await?;
        info!(name = config.name, "webhook installed");
        *installed = Some(bundle);
    }
    if served.is_some_and(|at| renewed || now >= at) {
        if renewed {
            // Until the API server has the new bundle, it trusts only certificates of the previous authority.
            tokio::time::sleep(PROPAGATION.min(config.certificate_life / 12)).await;
        }
        tls.set(sign()?)?;
    }
    let next = tls.renew_after().map_or(authority.renew_after(), |leaf| leaf.min(authority.renew_after()));
    Ok(Duration::try_from(next.duration_since(now)).unwrap_or(RETRY).max(Duration::from_millis(100)))
}

/// Returns the names in the certificate, which the API server verifies. For extension APIs it knows only the name of their
/// Service.
fn names(config: &Config) -> Vec<String> {
    let of_service = |namespace: &str, name: &str| format!("{name}.{namespace}.svc");
    match &config.reach {
        Reach::Url { host } => {
            vec![host.trim_matches(['[', ']']).to_owned(), of_service(&config.system_namespace, SERVICE)]
        }
        Reach::Service { namespace, name, .. } => vec![of_service(namespace, name)],
    }
}

async fn install(
    client: &Client,
    config: &Config,
    address: SocketAddr,
    bundle: &str,
    has_fleet: bool,
) -> Result<(), Error> {
    let owner = owner(client, &config.owner).await;
    let ca_bundle = ByteString(bundle.as_bytes().to_vec());
    let endpoint = Endpoint { reach: config.reach.clone(), port: address.port(), ca_bundle };
    let own = has_fleet.then(|| configuration(config, endpoint.client_config(PATH)));
    let more = config.extensions.iter().flat_map(|more| (more.objects)(&endpoint));
    // The own configuration comes last: when it answers, all others are installed.
    for mut wanted in more.chain(own) {
        if let Some(owner) = &owner {
            wanted["metadata"]["ownerReferences"] = json!([owner]);
        }
        apply(client, wanted).await?;
    }
    Ok(())
}

async fn apply(client: &Client, wanted: Value) -> Result<(), Error> {
    let unreadable = |source| Error::Api { operation: "read an object of ours", source: Box::new(source) };
    let object: DynamicObject =
        serde_json::from_value(wanted).map_err(kube::Error::SerdeError).map_err(unreadable)?;
    let kind = object.types.clone().unwrap_or_default();
    let kind = GroupVersionKind::try_from(&kind);
    let kind = kind.map_err(|error| unreadable(kube::Error::Service(error.into())))?;
    let resource = ApiResource::from_gvk(&kind);
    let api: Api<DynamicObject> = match object.metadata.namespace.as_deref() {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    let (name, params) = (object.name_any(), PatchParams::apply(MANAGER).force());
    let applied = api.patch(&name, &params, &Patch::Apply(&object)).await;
    applied
        .map(drop)
        .map_err(|source| Error::Api { operation: "install the webhook", source: Box::new(source) })
}

/// Returns the ClusterRole as an owner, if it exists and may be read. Then removing the operator removes its webhook, which
/// would otherwise refuse every creation.
async fn owner(client: &Client, name: &str) -> Option<Value> {
    let roles: Api<ClusterRole> = Api::all(client.clone());
    let role = roles.get_metadata_opt(name).await.ok().flatten()?;
    let (api_version, kind) = ("rbac.authorization.k8s.io/v1", "ClusterRole");
    Some(json!({"apiVersion": api_version, "kind": kind, "name": name, "uid": role.metadata.uid?}))
}

fn configuration(config: &Config, client_config: Value) -> Value {
    let selector =
        config.namespace.as_ref().map(|ns| json!({"matchLabels": {"kubernetes.io/metadata.name": ns}}));
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": config.name, "labels": {
            "app.kubernetes.io/name": "coracle", "app.kubernetes.io/part-of": "coracle",
            "app.kubernetes.io/component": "webhook", "app.kubernetes.io/managed-by": "coracle-operator",
        }},
        "webhooks": [{
            "name": "capacity.vm.mikrom.es",
            "clientConfig": client_config,
            "rules": [{
                "apiGroups": ["vm.mikrom.es"], "apiVersions": ["v1alpha1"], "resources": ["mikromvms"],
                "operations": ["CREATE", "UPDATE"], "scope": "Namespaced",
            }],
            // Finalizers and labels stay writable when the webhook is down: deletion must not depend on it.
            "matchConditions": [{
                "name": "spec-changes",
                "expression": "request.operation == 'CREATE' || object.spec != oldObject.spec",
            }],
            "namespaceSelector": selector.unwrap_or_else(|| json!({})),
            "failurePolicy": if config.fail_open { "Ignore" } else { "Fail" },
            "sideEffects": "None",
            "timeoutSeconds": 5,
            "admissionReviewVersions": ["v1"],
        }],
    })
}
