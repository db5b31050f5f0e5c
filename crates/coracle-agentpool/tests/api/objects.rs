//! Objects that a pool needs: this operator's CRDs, minimal CRDs for the kinds of other projects, and one object of each.

use std::collections::BTreeMap;

use coracle_api::agentpool::{
    AgentSpec, NameRef, SecretRef, VsphereAgentPool, VsphereAgentPoolSpec, VsphereSpec,
    foreign::{AGENT_MACHINE, MACHINE},
    names,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;
use serde_json::json;

use crate::sims::{HOOK, create};

pub(crate) const POOL: &str = "demo-worker";

/// Creates a Machine and its AgentMachine, as the NodePool controller does.
pub(crate) async fn machine(client: &Client, ns: &str, name: &str) -> kube::Result<()> {
    let annotations = json!({names::NODEPOOL_ANNOTATION: format!("{ns}/{POOL}")});
    let machine =
        json!({"metadata": {"name": name, "annotations": annotations, "finalizers": [HOOK]}, "spec": {}});
    create(client, ns, &MACHINE, machine).await?;
    let am = json!({
        "metadata": {"name": name, "annotations": annotations, "ownerReferences": [
            {"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Machine", "name": name, "uid": "x"},
        ]},
        "spec": {"agentLabelSelector": {"matchLabels": {"customer": "example"}}},
    });
    create(client, ns, &AGENT_MACHINE, am).await
}

pub(crate) fn site_spec() -> coracle_vsphere::SiteSpec {
    coracle_agentpool::vm::site_spec(&pool_object("any"))
}

pub(crate) fn pool_object(ns: &str) -> VsphereAgentPool {
    let name = |name: &str| NameRef { name: name.into() };
    let mut pool = VsphereAgentPool::new(
        POOL,
        VsphereAgentPoolSpec {
            hosted_cluster_ref: name("demo"),
            node_pool_ref: name(POOL),
            infra_env_ref: name("demo"),
            control_plane_namespace: ns.into(),
            vsphere: VsphereSpec {
                credentials_secret_ref: SecretRef {
                    name: "vsphere-credentials".into(),
                    namespace: String::new(),
                },
                datacenter: "DC0".into(),
                datastore_cluster: "DC0_POD0".into(),
                iso_datastore: "LocalDS_0".into(),
                resource_pool: "DC0_C0/Resources".into(),
                network: "VM Network".into(),
                ..VsphereSpec::default()
            },
            agent: AgentSpec {
                labels: [("customer".into(), "example".into())].into(),
                ..AgentSpec::default()
            },
            ..VsphereAgentPoolSpec::default()
        },
    );
    pool.metadata.namespace = Some(ns.into());
    pool
}

pub(crate) fn secret(server: &str, thumbprint: &str) -> BTreeMap<String, String> {
    [("server", server), ("username", "user"), ("password", "pass"), ("thumbprint", thumbprint)]
        .map(|(k, v)| (k.to_owned(), v.to_owned()))
        .into()
}

/// CRDs of this operator, and minimal ones for the kinds of other projects, with Machines in these versions.
pub(crate) fn definitions(machine: &[&str]) -> Vec<CustomResourceDefinition> {
    let foreign = |group: &str, kind: &str, versions: &[&str]| -> CustomResourceDefinition {
        let plural = format!("{}s", kind.to_lowercase());
        let open = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        let versions: Vec<_> = versions
            .iter()
            .enumerate()
            .map(|(i, name)| {
                json!({
                    "name": name, "served": true, "storage": i == 0, "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": open},
                })
            })
            .collect();
        serde_json::from_value(json!({
            "metadata": {"name": format!("{plural}.{group}")},
            "spec": {
                "group": group, "scope": "Namespaced", "versions": versions,
                "names": {"kind": kind, "plural": plural, "singular": kind.to_lowercase()},
            },
        }))
        .unwrap()
    };
    let others = [
        foreign("cluster.x-k8s.io", "Machine", machine),
        foreign("capi-provider.agent-install.openshift.io", "AgentMachine", &["v1beta1"]),
        foreign("agent-install.openshift.io", "InfraEnv", &["v1beta1"]),
        foreign("agent-install.openshift.io", "Agent", &["v1beta1"]),
    ];
    let mut all: Vec<_> = coracle_api::crds().into_iter().chain(others).collect();
    for crd in &mut all {
        crd.metadata.annotations =
            Some([("api-approved.kubernetes.io".to_owned(), "unapproved, a test".to_owned())].into());
    }
    all
}
