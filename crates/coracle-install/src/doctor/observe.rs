//! Reads the objects of the cluster, and calls its nodes and webhooks.

use std::time::Duration;

use coracle_api::keys::certificates::{CA_CONFIG_MAP, CA_KEY};
use coracle_api::keys::{NODE_NAMESPACE, node as keys};
use coracle_api::subresources;
use futures_util::future::join_all;
use ipnet::IpNet;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::dial::{DialError, dial, end_of_bundle};
use super::judge::{Node, Observed, Webhook};
use crate::objects::{base_objects, definition_objects};

/// Time limit for dialing a webhook.
const LIMIT: Duration = Duration::from_secs(5);
/// Label selector of the installation's objects.
const OURS: &str = "app.kubernetes.io/part-of=coracle";

pub(super) async fn observe(client: &Client, namespace: &str, now: Timestamp) -> Observed {
    let server = server(client).await;
    let mut definitions = Vec::new();
    for ours in definition_objects() {
        let stored = stored(client, &ours).await.map(|object| object.map(|object| object["spec"].clone()));
        definitions.push((ours, stored));
    }
    let mut objects = Vec::new();
    for ours in base_objects(namespace) {
        let stored = stored(client, &ours).await;
        objects.push((ours, stored));
    }
    let authority = authority(client, namespace).await;
    let authority_end =
        authority.as_ref().ok().and_then(Option::as_ref).and_then(|pem| end_of_bundle(pem.as_bytes()));
    let leases = Api::<Lease>::namespaced(client.clone(), NODE_NAMESPACE).list(&ListParams::default()).await;
    let leases = leases.map(|list| list.items).map_err(|error| error_message(&error));
    let networks = leases.iter().flatten().filter(|lease| lease.name_any() == keys::GUEST_SUBNETS);
    let networks = networks.flat_map(leased_networks).collect();
    let pem = authority.as_ref().ok().and_then(Clone::clone).unwrap_or_default();
    let nodes = match leases {
        Ok(leases) => {
            let nodes = leases.iter().filter(|lease| lease.name_any() != keys::GUEST_SUBNETS);
            Ok(join_all(nodes.map(|lease| node(lease, &pem))).await)
        }
        Err(why) => Err(why),
    };
    let webhooks = webhooks(client).await;
    let extension_api = extension_api(client).await;
    let namespace = namespace.to_owned();
    Observed {
        now,
        namespace,
        server,
        definitions,
        objects,
        authority,
        authority_end,
        nodes,
        networks,
        webhooks,
        extension_api,
    }
}

fn error_message(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}

async fn server(client: &Client) -> Result<(u32, u32), String> {
    let info = client.apiserver_version().await.map_err(|error| error_message(&error))?;
    let number = |text: &str| text.trim_end_matches('+').parse().unwrap_or(0);
    Ok((number(&info.major), number(&info.minor)))
}

/// Reads the object of that kind and name.
async fn stored(client: &Client, ours: &Value) -> Result<Option<Value>, String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (version, kind) = (text(&ours["apiVersion"]), text(&ours["kind"]));
    let (group, version) = version.split_once('/').unwrap_or(("", &version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &kind));
    let api: Api<DynamicObject> = match ours["metadata"]["namespace"].as_str() {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    let found = api.get_opt(&text(&ours["metadata"]["name"])).await.map_err(|error| error_message(&error))?;
    found.map(|object| serde_json::to_value(object).map_err(|error| error.to_string())).transpose()
}

async fn authority(client: &Client, namespace: &str) -> Result<Option<String>, String> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map = maps.get_opt(CA_CONFIG_MAP).await.map_err(|error| error_message(&error))?;
    Ok(map.and_then(|map| map.data?.remove(CA_KEY)))
}

fn leased_networks(lease: &Lease) -> Vec<(IpNet, String)> {
    let entries = lease.annotations().iter();
    let network = |key: &str| key.strip_prefix(keys::GUEST_SUBNETS_PREFIX)?.replace('-', "/").parse().ok();
    entries.filter_map(|(key, node)| Some((network(key)?, node.clone()))).collect()
}

async fn node(lease: &Lease, authority: &str) -> Node {
    let said = |key: &str| lease.annotations().get(key).cloned();
    let spec = lease.spec.clone().unwrap_or_default();
    let name = said(keys::NODE).unwrap_or_else(|| lease.name_any());
    let address = said(keys::HOST_ADDRESS).or_else(|| said(keys::AGENT_ADDRESS));
    let dialed = match &address {
        Some(address) => {
            let host = address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host);
            let server = said(keys::TLS_SERVER_NAME);
            dial(address, server.as_deref().unwrap_or(host.trim_matches(['[', ']'])), authority).await
        }
        None => Err(DialError::Unreachable("no address".to_owned())),
    };
    Node {
        renewed: spec.renew_time.map(|at| at.0),
        lease: SignedDuration::from_secs(spec.lease_duration_seconds.unwrap_or(0).into()),
        network: said(keys::GUEST_SUBNET).and_then(|text| text.parse().ok()),
        name,
        address,
        dialed,
    }
}

/// Returns the webhooks of the installation, each with the answer of its server.
async fn webhooks(client: &Client) -> Result<Vec<Webhook>, String> {
    let mut all = Vec::new();
    for kind in ["ValidatingWebhookConfiguration", "MutatingWebhookConfiguration"] {
        let resource =
            ApiResource::from_gvk(&GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", kind));
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
        let found =
            api.list(&ListParams::default().labels(OURS)).await.map_err(|error| error_message(&error))?;
        for configuration in found {
            for webhook in configuration.data["webhooks"].as_array().into_iter().flatten() {
                all.push(one_webhook(client, &configuration.name_any(), webhook).await);
            }
        }
    }
    Ok(all)
}

async fn one_webhook(client: &Client, configuration: &str, webhook: &Value) -> Webhook {
    let called = &webhook["clientConfig"];
    let bundle: Option<k8s_openapi::ByteString> = serde_json::from_value(called["caBundle"].clone()).ok();
    let (target, answers) = match called["url"].as_str() {
        Some(url) => (url.to_owned(), check_reachable(url).await),
        None => {
            let text = |key: &str| called["service"][key].as_str().unwrap_or_default().to_owned();
            let (namespace, name) = (text("namespace"), text("name"));
            (format!("Service {namespace}/{name}"), has_endpoints(client, &namespace, &name).await)
        }
    };
    Webhook {
        configuration: configuration.to_owned(),
        target,
        refuses_without: webhook["failurePolicy"] != "Ignore",
        bundle_end: bundle.and_then(|pem| end_of_bundle(&pem.0)),
        answers,
    }
}

/// Returns the API server's report about the server of the extension API, if that is registered.
async fn extension_api(client: &Client) -> Result<Option<Result<(), String>>, String> {
    let apis: Api<APIService> = Api::all(client.clone());
    let Some(found) = apis.get_opt(subresources::API_SERVICE).await.map_err(|error| error_message(&error))?
    else {
        return Ok(None);
    };
    let conditions = found.status.and_then(|status| status.conditions).unwrap_or_default();
    Ok(Some(match conditions.into_iter().find(|condition| condition.type_ == "Available") {
        Some(condition) if condition.status == "True" => Ok(()),
        Some(condition) => Err(condition.message.unwrap_or_default()),
        None => Err("the API server has not checked it yet".to_owned()),
    }))
}

async fn check_reachable(url: &str) -> Result<(), String> {
    let address = url.trim_start_matches("https://").split('/').next().unwrap_or_default();
    match timeout(LIMIT, TcpStream::connect(address)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {} s", LIMIT.as_secs())),
    }
}

/// Checks the endpoints of a Service inside the cluster, which reflect the readiness probes of its Pods.
async fn has_endpoints(client: &Client, namespace: &str, name: &str) -> Result<(), String> {
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), namespace);
    let of_service = ListParams::default().labels(&format!("kubernetes.io/service-name={name}"));
    let slices = slices.list(&of_service).await.map_err(|error| error_message(&error))?;
    let ready = slices.items.iter().flat_map(|slice| slice.endpoints.iter().flatten());
    let ready = ready.filter(|end| end.conditions.as_ref().is_none_or(|is| is.ready != Some(false)));
    if ready.count() == 0 { Err("no endpoint of it is ready".to_owned()) } else { Ok(()) }
}
