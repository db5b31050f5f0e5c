//! Suite of API behaviour that runs against kube-apiserver and against the API server in memory: results of simulations hold on
//! clusters.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]
#![cfg(all(feature = "cluster", feature = "sim"))]

mod scenarios;
mod watches;

use coracle_testkit::{cluster, eventually, sim::Sim};
use futures_util::future::BoxFuture;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
    core::GroupVersionKind,
};
use serde_json::{Value, json};

/// Test of one behaviour, with a client and a namespace of its own.
type Scenario = fn(Corner) -> BoxFuture<'static, anyhow::Result<()>>;

macro_rules! suite {
    ($($module:ident :: $name:ident),* $(,)?) => {
        const SUITE: &[(&str, Scenario)] = &[$((stringify!($name), |corner| Box::pin($module::$name(corner)))),*];
    };
}

suite![
    scenarios::create_sets_identity_and_defaults,
    scenarios::create_refuses_duplicates_and_unknown_namespaces,
    scenarios::replace_needs_the_latest_version,
    scenarios::generation_counts_changes_of_the_spec,
    scenarios::status_is_written_by_its_subresource,
    scenarios::merge_patch_honours_preconditions,
    scenarios::apply_removes_what_it_no_longer_sets,
    scenarios::apply_takes_an_atomic_object_as_one_value,
    scenarios::apply_of_anothers_field_needs_force,
    scenarios::apply_with_a_uid_creates_nothing,
    scenarios::conditions_of_two_managers_are_merged,
    scenarios::finalizer_delays_deletion,
    scenarios::delete_honours_preconditions,
    scenarios::lists_select_and_page,
    scenarios::metadata_is_read_alone,
    scenarios::lease_is_taken_by_one_of_two,
    scenarios::pod_of_a_node_ends_with_its_grace,
    scenarios::pod_is_evicted,
    scenarios::discovery_names_served_kinds,
    watches::watch_sees_changes_in_order,
    watches::watch_with_selector_sees_objects_come_and_go,
    watches::watcher_lists_and_follows,
];

/// Client and namespace of one scenario.
#[derive(Clone)]
struct Corner {
    client: Client,
    namespace: String,
}

impl Corner {
    async fn new(client: Client, namespace: String) -> anyhow::Result<Self> {
        let definition: CustomResourceDefinition = serde_json::from_value(definition())?;
        let api: Api<CustomResourceDefinition> = Api::all(client.clone());
        let params = PatchParams::apply("suite").force();
        api.patch(&definition.name_any(), &params, &Patch::Apply(&definition)).await?;
        let corner = Self { client, namespace };
        eventually("the definition is served", async || {
            corner.widgets().list(&Default::default()).await.ok()
        })
        .await?;
        Ok(corner)
    }

    fn widgets(&self) -> Api<DynamicObject> {
        let kind = GroupVersionKind::gvk("test.coracle.dev", "v1", "Widget");
        Api::namespaced_with(
            self.client.clone(),
            &self.namespace,
            &ApiResource::from_gvk_with_plural(&kind, "widgets"),
        )
    }

    async fn widget(&self, name: &str, spec: Value) -> kube::Result<DynamicObject> {
        self.widgets().create(&Default::default(), &widget(json!({"name": name}), spec)).await
    }
}

fn widget(metadata: Value, spec: Value) -> DynamicObject {
    let object =
        json!({"apiVersion": "test.coracle.dev/v1", "kind": "Widget", "metadata": metadata, "spec": spec});
    serde_json::from_value(object).unwrap()
}

fn definition() -> Value {
    let condition = json!({"type": "object", "required": ["type"], "properties": {
        "type": {"type": "string"}, "status": {"type": "string"}, "reason": {"type": "string"},
    }});
    let conditions = json!({"type": "array", "items": condition,
        "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]});
    let spec = json!({"type": "object", "properties": {
        "size": {"type": "integer", "default": 1}, "colour": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "place": {"type": "object", "x-kubernetes-map-type": "atomic", "properties": {
            "node": {"type": "string"}, "rack": {"type": "string"},
        }},
    }});
    let status =
        json!({"type": "object", "properties": {"phase": {"type": "string"}, "conditions": conditions}});
    let schema = json!({"type": "object", "properties": {"spec": spec, "status": status}});
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "widgets.test.coracle.dev"},
        "spec": {
            "group": "test.coracle.dev", "scope": "Namespaced",
            "names": {"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
            "versions": [{"name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": schema}}],
        },
    })
}

/// HTTP code and message of a call that the API server refused.
#[track_caller]
fn api_error<T: std::fmt::Debug>(result: kube::Result<T>) -> (u16, String) {
    match result {
        Err(kube::Error::Api(status)) => (status.code, status.message.clone()),
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn kube_apiserver_passes_the_suite() {
    cluster::run(|cluster| async move {
        let mut failed = Vec::new();
        for (name, scenario) in SUITE {
            let corner = Corner::new(cluster.client(), cluster.namespace().await?).await?;
            failed.extend(scenario(corner).await.err().map(|error| format!("{name}: {error:?}")));
        }
        anyhow::ensure!(failed.is_empty(), "{}", failed.join("\n"));
        Ok(())
    });
}

#[test]
fn api_server_in_memory_passes_the_suite() {
    for seed in 0..3 {
        for (name, scenario) in SUITE {
            Sim::run(seed, |sim| async move {
                sim.prepare(&[], "test");
                let corner = Corner::new(sim.client(), "test".into()).await?;
                scenario(corner).await.map_err(|error| error.context(format!("{name}, seed {seed}")))
            });
        }
    }
}
