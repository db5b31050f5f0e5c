//! Derives findings from what was observed. Pure.

use std::collections::BTreeMap;

use coracle_api::keys::{NODE_NAMESPACE, node::GUEST_SUBNETS};
use coracle_api::subresources;
use ipnet::IpNet;
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::dial::DialError;
use super::rights::{missing_part, missing_property};
use super::{Finding, State};

/// Remaining life below which a certificate should have been renewed long ago: nodes and operator renew at two thirds or later
/// of 30 days, the authority eight months before its end.
const SOON: SignedDuration = SignedDuration::from_hours(24 * 4);
const AUTHORITY_SOON: SignedDuration = SignedDuration::from_hours(24 * 60);
/// Minor version of the oldest API server that names the node in the token of a Pod.
const MINOR_MIN: u32 = 32;
const INSTALL: &str = "apply the manifests again: kubectl apply --server-side -k deploy/kustomize/default";

/// State of the installation. A text in the place of a value is the reason why it could not be read.
pub(super) struct Observed {
    pub(super) now: Timestamp,
    pub(super) namespace: String,
    /// Version of the API server, as `1.36`.
    pub(super) server: Result<(u32, u32), String>,
    /// Definitions of this release, and `spec` of the stored definitions.
    pub(super) definitions: Vec<(Value, Result<Option<Value>, String>)>,
    /// Objects of the base, and the stored objects with their names.
    pub(super) objects: Vec<(Value, Result<Option<Value>, String>)>,
    /// Certificate authority of nodes, PEM.
    pub(super) authority: Result<Option<String>, String>,
    /// Expiry of the authority.
    pub(super) authority_end: Option<Timestamp>,
    pub(super) nodes: Result<Vec<Node>, String>,
    /// Networks that nodes have leased, with the name of the node.
    pub(super) networks: Vec<(IpNet, String)>,
    pub(super) webhooks: Result<Vec<Webhook>, String>,
    /// Registration of the extension API: none, or the API server's report about its server.
    pub(super) extension_api: Result<Option<Result<(), String>>, String>,
}

/// Node, by its Lease.
pub(super) struct Node {
    pub(super) name: String,
    pub(super) renewed: Option<Timestamp>,
    pub(super) lease: SignedDuration,
    /// Address of the node's service.
    pub(super) address: Option<String>,
    /// Network of the node's guests.
    pub(super) network: Option<IpNet>,
    /// Expiry of the node's certificate.
    pub(super) dialed: Result<Timestamp, DialError>,
}

/// Webhook of the installation.
pub(super) struct Webhook {
    pub(super) configuration: String,
    /// Address or Service that the API server calls.
    pub(super) target: String,
    pub(super) refuses_without: bool,
    pub(super) bundle_end: Option<Timestamp>,
    /// `Ok` when the endpoints are ready or the dial succeeded; otherwise the reason.
    pub(super) answers: Result<(), String>,
}

fn good(check: impl Into<String>, detail: impl Into<String>) -> Finding {
    Finding { check: check.into(), state: State::Good, detail: detail.into(), help: String::new() }
}

fn problem(
    check: impl Into<String>,
    state: State,
    detail: impl Into<String>,
    help: impl Into<String>,
) -> Finding {
    Finding { check: check.into(), state, detail: detail.into(), help: help.into() }
}

fn unreadable(check: &str, why: &str) -> Finding {
    problem(check, State::Broken, why, "this command needs the rights of an administrator of the cluster")
}

pub(super) fn judge(seen: &Observed) -> Vec<Finding> {
    let mut all = vec![server(seen)];
    all.extend(definitions(seen));
    all.extend(rights(seen));
    all.extend(workloads(seen));
    all.push(authority(seen));
    all.extend(nodes(seen));
    all.extend(networks(seen));
    all.extend(webhooks(seen));
    all.extend(extension_api(seen));
    all
}

fn server(seen: &Observed) -> Finding {
    let check = "API server";
    match &seen.server {
        Ok((major, minor)) if (*major, *minor) >= (1, MINOR_MIN) => {
            good(check, format!("Kubernetes {major}.{minor}"))
        }
        Ok((major, minor)) => problem(
            check,
            State::Broken,
            format!("Kubernetes {major}.{minor} does not name the node in the token of a Pod"),
            format!("nodes get certificates from Kubernetes 1.{MINOR_MIN} or newer: upgrade the cluster"),
        ),
        Err(why) => problem(check, State::Broken, why, "name another cluster with --context or --kubeconfig"),
    }
}

fn definitions(seen: &Observed) -> Vec<Finding> {
    let mut found = Vec::new();
    for (ours, stored) in &seen.definitions {
        let name = ours["metadata"]["name"].as_str().unwrap_or_default();
        let check = format!("definition {name}");
        let help = "apply the definitions: kubectl apply --server-side -k deploy/kustomize/crds";
        match stored {
            Ok(Some(spec)) => {
                if let Some(path) = missing_property(&ours["spec"], spec) {
                    found.push(problem(check, State::Broken, format!("old: it lacks {path}"), help));
                }
            }
            Ok(None) => found.push(problem(check, State::Broken, "not found", help)),
            Err(why) => found.push(unreadable(&check, why)),
        }
    }
    if found.is_empty() {
        found.push(good("definitions", format!("{} of this version", seen.definitions.len())));
    }
    found
}

fn label(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    format!("{} {}", text(&object["kind"]), text(&object["metadata"]["name"]))
}

/// Checks roles, bindings, accounts, namespaces, and the policy of nodes.
fn rights(seen: &Observed) -> Vec<Finding> {
    let mut found = Vec::new();
    for (ours, stored) in seen.objects.iter().filter(|(ours, _)| !is_workload(ours)) {
        let check = label(ours);
        let is_policy = check.starts_with("ValidatingAdmissionPolicy");
        let help = if is_policy {
            format!("without it a node may act for every other node; {INSTALL}")
        } else {
            INSTALL.to_owned()
        };
        match stored {
            Ok(Some(theirs)) => {
                if let Some(what) = missing_part(ours, theirs) {
                    found.push(problem(check, State::Broken, format!("it lacks {what}"), help));
                }
            }
            Ok(None) => found.push(problem(check, State::Broken, "not found", help)),
            Err(why) => found.push(unreadable(&check, why)),
        }
    }
    if found.is_empty() {
        found.push(good("rights and policy", "as in the manifests of this version"));
    }
    found
}

fn is_workload(object: &Value) -> bool {
    matches!(object["kind"].as_str(), Some("Deployment" | "DaemonSet"))
}

fn workloads(seen: &Observed) -> Vec<Finding> {
    let workloads = seen.objects.iter().filter(|(ours, _)| is_workload(ours));
    workloads.map(|(ours, stored)| workload(&seen.namespace, ours, stored)).collect()
}

fn workload(namespace: &str, ours: &Value, stored: &Result<Option<Value>, String>) -> Finding {
    let check = label(ours);
    let theirs = match stored {
        Ok(Some(theirs)) => theirs,
        Ok(None) => return problem(check, State::Broken, "not found", INSTALL),
        Err(why) => return unreadable(&check, why),
    };
    let number = |pointer: &str| theirs.pointer(pointer).and_then(Value::as_u64).unwrap_or(0);
    let (ready, wanted) = match ours["kind"].as_str() {
        Some("DaemonSet") => (number("/status/numberReady"), number("/status/desiredNumberScheduled")),
        _ => (number("/status/readyReplicas"), number("/spec/replicas")),
    };
    let detail = format!("{ready} of {wanted} Pods are ready");
    let help = format!("see why: kubectl -n {namespace} describe pods");
    match ready {
        _ if wanted == 0 => problem(check, State::Limited, "no Pod is wanted", help),
        0 => problem(check, State::Broken, detail, help),
        _ if ready < wanted => problem(check, State::Limited, detail, help),
        _ => good(check, detail),
    }
}

fn authority(seen: &Observed) -> Finding {
    let check = "authority of nodes";
    let help = "the operator makes and renews it: see its log";
    match (&seen.authority, seen.authority_end) {
        (Err(why), _) => unreadable(check, why),
        (Ok(None), _) => {
            let detail = format!("ConfigMap coracle-ca not found in {}", seen.namespace);
            problem(check, State::Broken, detail, help)
        }
        (Ok(Some(_)), None) => {
            problem(check, State::Broken, "ConfigMap coracle-ca holds no certificate", help)
        }
        (Ok(Some(_)), Some(end)) => expiry(check, seen.now, end, AUTHORITY_SOON, help),
    }
}

/// Checks how long a certificate remains valid.
fn expiry(check: &str, now: Timestamp, end: Timestamp, soon: SignedDuration, help: &str) -> Finding {
    let left = end.duration_since(now);
    let days = left.as_hours() / 24;
    if left <= SignedDuration::ZERO {
        problem(check, State::Broken, format!("its certificate expired {end:.0}"), help)
    } else if left < soon {
        problem(
            check,
            State::Limited,
            format!("its certificate expires in {days} days and was not renewed"),
            help,
        )
    } else {
        good(check, format!("its certificate is good for {days} days"))
    }
}

fn nodes(seen: &Observed) -> Vec<Finding> {
    match &seen.nodes {
        Err(why) => vec![unreadable("nodes", why)],
        Ok(nodes) if nodes.is_empty() => vec![problem(
            "nodes",
            State::Broken,
            format!("no Lease of a node in {NODE_NAMESPACE}"),
            "a node announces itself when it has a certificate: kubectl get csr, and the log of its Pod",
        )],
        Ok(nodes) => nodes.iter().map(|node| one_node(node, seen.now)).collect(),
    }
}

fn one_node(node: &Node, now: Timestamp) -> Finding {
    let check = format!("node {}", node.name);
    let age = node.renewed.map(|at| now.duration_since(at));
    if age.is_none_or(|age| age > node.lease) {
        let age = age.map_or("never".to_owned(), |age| format!("{} s ago", age.as_secs()));
        let detail =
            format!("its Lease was renewed {age}: the node is off, or does not reach the API server");
        let help = "look at the machine; the operator ends what it ran elsewhere after --node-grace";
        return problem(check, State::Broken, detail, help);
    }
    let Some(address) = &node.address else {
        let detail = "it announces no service that this machine can dial";
        return problem(check, State::Limited, detail, "start it with --host-listen or --agent-listen");
    };
    match &node.dialed {
        Ok(end) => {
            let help = "it renews its certificate after 24 of 30 days: see its log, and kubectl get csr";
            let mut finding = expiry(&check, now, *end, SOON, help);
            finding.detail = format!("{address} answers; {}", finding.detail);
            finding
        }
        Err(DialError::Unreachable(why)) => problem(
            check,
            State::Broken,
            format!("{address} does not answer: {why}"),
            "this machine and the operator must reach that address: look at firewalls, and at --advertise of the node",
        ),
        Err(DialError::Untrusted(why)) => problem(
            check,
            State::Broken,
            format!("{address} shows a certificate that the operator does not take: {why}"),
            "remove certificates/node.pem in the state directory of the node and restart it",
        ),
    }
}

fn networks(seen: &Observed) -> Vec<Finding> {
    let mut known: BTreeMap<(IpNet, String), ()> =
        seen.networks.iter().map(|(network, node)| ((*network, node.clone()), ())).collect();
    let announced = seen.nodes.iter().flatten();
    known.extend(announced.filter_map(|node| Some(((node.network?, node.name.clone()), ()))));
    let known: Vec<_> = known.into_keys().collect();
    let mut found = Vec::new();
    for (index, (network, node)) in known.iter().enumerate() {
        for (other, of) in &known[index + 1..] {
            if node != of && (network.contains(other) || other.contains(network)) {
                let detail = format!("{network} of {node} overlaps with {other} of {of}");
                let help = format!(
                    "the operator places no VM on the younger node; start it with another --subnet, or remove its \
                     entry from the Lease {GUEST_SUBNETS} in {NODE_NAMESPACE} and restart it"
                );
                found.push(problem("networks of guests", State::Broken, detail, help));
            }
        }
    }
    if found.is_empty() {
        found.push(good("networks of guests", format!("{}, none overlaps", known.len())));
    }
    found
}

fn webhooks(seen: &Observed) -> Vec<Finding> {
    match &seen.webhooks {
        Err(why) => vec![unreadable("webhooks", why)],
        Ok(webhooks) => webhooks.iter().map(|webhook| one_webhook(webhook, seen.now)).collect(),
    }
}

fn one_webhook(webhook: &Webhook, now: Timestamp) -> Finding {
    let check = format!("webhook {}", webhook.configuration);
    if let Err(why) = &webhook.answers {
        let effect = if webhook.refuses_without {
            "every change that it is asked about is refused"
        } else {
            "its checks are left out"
        };
        let help = format!(
            "see the operator's log; where the operator was removed: kubectl delete \
             validatingwebhookconfigurations,mutatingwebhookconfigurations {} --ignore-not-found",
            webhook.configuration
        );
        let state = if webhook.refuses_without { State::Broken } else { State::Limited };
        return problem(check, state, format!("{} does not answer: {why}; {effect}", webhook.target), help);
    }
    match webhook.bundle_end {
        Some(end) => {
            expiry(&check, now, end, AUTHORITY_SOON, "the operator renews its caBundle: see its log")
        }
        None => problem(check, State::Broken, "its caBundle holds no certificate", "see the operator's log"),
    }
}

fn extension_api(seen: &Observed) -> Option<Finding> {
    const CHECK: &str = "extension API";
    let name = subresources::API_SERVICE;
    match &seen.extension_api {
        Err(why) => Some(unreadable(CHECK, why)),
        Ok(None) => None,
        Ok(Some(Ok(()))) => Some(good(CHECK, format!("{name} is available"))),
        Ok(Some(Err(why))) => {
            let detail = format!(
                "{name} is not available: {why}; exec, logs, cp and port-forward fail, and namespaces stay Terminating"
            );
            let help = format!(
                "see the operator's log; where the operator was removed: kubectl delete apiservice {name} --ignore-not-found"
            );
            Some(problem(CHECK, State::Broken, detail, help))
        }
    }
}

#[cfg(test)]
mod tests;
