//! Objects for kustomize: a directory of the base, a component for each option, and the default.

use coracle_reconcile::manifest::{files as directory, kustomization, yaml};
use serde_json::{Value, json};

use crate::options::{Addition, Component, components};
use crate::{IMAGE, base, definitions};

/// Returns the files for kustomize: path below `deploy/` and YAML.
pub(crate) fn files() -> Vec<(String, String)> {
    let definitions = definitions();
    let names: Vec<Value> = definitions.iter().map(|(name, _)| json!(name)).collect();
    let mut files: Vec<_> =
        definitions.into_iter().map(|(name, text)| (format!("kustomize/crds/{name}"), text)).collect();
    files.push(("kustomize/crds/kustomization.yaml".into(), yaml(&[kustomization(&names)])));
    files.extend(directory("kustomize/base", &base::parts(IMAGE)));
    let default = kustomization(&[json!("../crds"), json!("../base")]);
    files.push(("kustomize/default/kustomization.yaml".into(), yaml(&[default])));
    let components = components(IMAGE);
    for component in &components {
        files.extend(component_files(component));
    }
    let mut everything = kustomization(&[json!("../default")]);
    // The component `monitoring` has kinds of another operator.
    let all = components.iter().filter(|component| component.name != "monitoring");
    let all: Vec<_> = all.map(|component| format!("../components/{}", component.name)).collect();
    everything["components"] = json!(all);
    files.push(("kustomize/everything/kustomization.yaml".into(), yaml(&[everything])));
    files
}

fn component_files(component: &Component) -> Vec<(String, String)> {
    let dir = format!("kustomize/components/{}", component.name);
    let (mut files, resources) = match component.shared {
        Some(shared) => (
            directory(&format!("kustomize/{shared}"), &component.parts),
            vec![json!(format!("../../{shared}"))],
        ),
        None => {
            let own = component.parts.iter().map(|(name, objects)| (format!("{dir}/{name}"), yaml(objects)));
            (own.collect(), component.parts.iter().map(|(name, _)| json!(name)).collect())
        }
    };
    let mut page = kustomization(&resources);
    page["apiVersion"] = json!("kustomize.config.k8s.io/v1alpha1");
    page["kind"] = json!("Component");
    if !component.additions.is_empty() {
        page["patches"] = component.additions.iter().map(patch).collect();
    }
    files.push((format!("{dir}/kustomization.yaml"), yaml(&[page])));
    files
}

fn patch(addition: &Addition) -> Value {
    let operations: Vec<_> = addition
        .items
        .iter()
        .map(|item| json!({"op": "add", "path": format!("{}/-", addition.list), "value": item}))
        .collect();
    let mut target = json!({"kind": addition.kind, "name": addition.name});
    if let Some(namespace) = addition.namespace {
        target["namespace"] = json!(namespace);
    }
    json!({"target": target, "patch": yaml(&[json!(operations)])})
}
