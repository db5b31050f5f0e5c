//! Helm chart with the same objects, and a template expression in each place that a value controls. The places are marked in
//! the objects, and the marks are replaced in their YAML.

use std::collections::BTreeMap;

use coracle_api::keys::SYSTEM_NAMESPACE;
use coracle_reconcile::manifest::yaml;
use serde_json::{Map, Value, json};

use crate::options::{Component, components};
use crate::{IMAGE, base, definitions, hook};

/// Prefix of a mark; objects do not contain it otherwise.
const MARK: &str = "MARK.";
/// Mark for the image.
const IMAGE_MARK: &str = "MARK.image";
/// Mark for an argument of the Job before `helm uninstall` that a value adds.
const DELETE_OBJECTS_MARK: &str = "MARK.deleteObjects";
/// Pod templates whose placement and size are values: kind, name and key of the values.
const WORKLOADS: [(&str, &str, &str); 7] = [
    ("Deployment", "coracle-operator", "operator"),
    ("DaemonSet", "coracle-node", "node"),
    ("Deployment", coracle_bidnode::manifests::MARKET, "market"),
    ("Deployment", coracle_bidnode::manifests::NAME, "bidnode"),
    ("Deployment", "coracle-registry", "registry"),
    ("Deployment", "agent-forge-operator-controller-manager", "agentForge"),
    ("Deployment", "cocoon-operator", "cocoon"),
];

/// Returns the files of the chart: path below `deploy/` and text.
pub(crate) fn files() -> Vec<(String, String)> {
    let components = components(IMAGE_MARK);
    let mut chart = Chart::new(&components);
    let mut files = Vec::new();
    let definitions: Vec<_> = definitions().into_iter().map(|(_, text)| escape_template(&text)).collect();
    let definitions =
        format!("{{{{- if .Values.crds.enabled }}}}\n{}{{{{- end }}}}\n", definitions.join("---\n"));
    files.push(("crds.yaml".to_owned(), definitions));
    for (name, objects) in base::parts(IMAGE_MARK) {
        files.push((format!("base-{name}"), chart.template(objects, &components)));
    }
    for component in &components {
        let objects = component.parts.iter().flat_map(|(_, objects)| objects.clone()).collect();
        let text = chart.template(objects, &components);
        let text = format!("{{{{- if .Values.{}.enabled }}}}\n{text}{{{{- end }}}}\n", component.key);
        files.push((format!("{}.yaml", component.name), text));
    }
    let hook = chart.template(hook::before_uninstall(IMAGE_MARK, DELETE_OBJECTS_MARK), &[]);
    files.push((
        "uninstall.yaml".to_owned(),
        format!("{{{{- if .Values.uninstall.enabled }}}}\n{hook}{{{{- end }}}}\n"),
    ));
    let path = |name: &str| format!("helm/coracle/{name}");
    let mut all: Vec<_> =
        files.into_iter().map(|(name, text)| (path(&format!("templates/{name}")), text)).collect();
    all.push((path("templates/NOTES.txt"), NOTES.to_owned()));
    all.push((path("Chart.yaml"), yaml(&[chart_metadata()])));
    all.push((path("values.yaml"), chart.values_file(&components)));
    all
}

/// Message that `helm install` prints.
const NOTES: &str = "Coracle {{ .Chart.AppVersion }} is in {{ .Values.namespace }}. What may be wrong with it:\n\n  \
    coracle doctor --cluster\n\n{{- if .Values.uninstall.enabled }}\n\n`helm uninstall` \
    {{ if .Values.uninstall.deleteObjects }}ends all VMs first{{ else }}is refused while there are VMs, pools or sets{{ end }}.\
    \n{{- else }}\n\nBefore `helm uninstall`, while the operator runs:\n\n  coracle uninstall --cluster\n{{- end }}\n";

fn chart_metadata() -> Value {
    let version = env!("CARGO_PKG_VERSION");
    json!({
        "apiVersion": "v2", "name": "coracle", "type": "application", "version": version, "appVersion": version,
        "description": "MicroVMs as Kubernetes objects: operator, node daemons, and options",
        "kubeVersion": ">=1.32.0-0", "home": "https://github.com/coracle-dev/coracle",
        "icon": "https://github.com/coracle-dev/coracle/raw/main/docs/coracle.svg",
    })
}

/// Values of the chart, collected while its objects are marked.
struct Chart {
    values: BTreeMap<&'static str, Map<String, Value>>,
    /// Items that the options add, by the number in their mark.
    items: Vec<(&'static str, Value)>,
}

impl Chart {
    fn new(components: &[Component]) -> Self {
        let mut values: BTreeMap<_, Map<_, _>> = BTreeMap::new();
        for component in components {
            values.entry(component.key).or_default().insert("enabled".to_owned(), json!(false));
        }
        Self { values, items: Vec::new() }
    }

    /// Returns the template of some objects.
    fn template(&mut self, mut objects: Vec<Value>, components: &[Component]) -> String {
        for object in &mut objects {
            self.mark_workload(object);
            for component in components {
                self.mark_additions(object, component);
            }
        }
        let text = escape_template(&yaml(&objects)).replace(SYSTEM_NAMESPACE, "{{ .Values.namespace }}");
        text.lines().map(|line| self.line(line)).collect()
    }

    /// Turns size and placement of a Pod template into values, with the present content as defaults.
    fn mark_workload(&mut self, object: &mut Value) {
        let is = |kind: &str, name: &str| object["kind"] == kind && object["metadata"]["name"] == name;
        let Some((.., key)) = WORKLOADS.iter().find(|(kind, name, _)| is(kind, name)) else { return };
        let values = self.values.entry(key).or_default();
        let mut take = |place: &mut Value, field: &str, default: Value| {
            let had = std::mem::replace(&mut place[field], json!(format!("{MARK}value.{key}.{field}")));
            values.insert(field.to_owned(), if had.is_null() { default } else { had });
        };
        let is_scaled = object["spec"]["replicas"].as_u64().is_some_and(|replicas| replicas > 1);
        if is_scaled {
            take(&mut object["spec"], "replicas", json!(1));
        }
        let pod = &mut object["spec"]["template"]["spec"];
        take(pod, "nodeSelector", json!({}));
        take(pod, "tolerations", json!([]));
        take(&mut pod["containers"][0], "resources", json!({}));
    }

    fn mark_additions(&mut self, object: &mut Value, component: &Component) {
        for addition in &component.additions {
            let is_target = object["kind"] == addition.kind
                && object["metadata"]["name"] == addition.name
                && addition.namespace.is_none_or(|namespace| object["metadata"]["namespace"] == namespace);
            let list = object.pointer_mut(addition.list).and_then(Value::as_array_mut);
            let Some(list) = list.filter(|_| is_target) else { continue };
            for item in &addition.items {
                list.push(json!(format!("{MARK}item.{}", self.items.len())));
                self.items.push((component.key, item.clone()));
            }
        }
    }

    /// Returns a line of YAML with the expression for its mark. A mark is the whole value of its line.
    fn line(&self, line: &str) -> String {
        let Some((before, mark)) = line.split_once(MARK) else { return format!("{line}\n") };
        let indent = before.len() - before.trim_start().len();
        let parts: Vec<_> = mark.split('.').collect();
        match parts[..] {
            ["image"] => format!("{before}{{{{ .Values.image | quote }}}}\n"),
            ["deleteObjects"] => format!(
                "{{{{- if .Values.uninstall.deleteObjects }}}}\n{before}--delete-objects\n{{{{- end }}}}\n"
            ),
            ["value", key, field @ "replicas"] => format!("{before}{{{{ .Values.{key}.{field} }}}}\n"),
            ["value", key, field] => {
                let name = before.trim_end();
                format!(
                    "{{{{- with .Values.{key}.{field} }}}}\n{name}\n{{{{- toYaml . | nindent {} }}}}\n{{{{- end }}}}\n",
                    indent + 2
                )
            }
            ["item", number] => {
                let (key, item) = &self.items[number.parse::<usize>().unwrap_or_default()];
                let item = escape_template(&yaml(&[json!([item])]))
                    .replace(SYSTEM_NAMESPACE, "{{ .Values.namespace }}");
                let item: String =
                    item.lines().map(|line| format!("{}{line}\n", " ".repeat(indent))).collect();
                format!("{{{{- if .Values.{key}.enabled }}}}\n{item}{{{{- end }}}}\n")
            }
            _ => format!("{line}\n"),
        }
    }

    /// Returns `values.yaml`, with a comment about each value.
    fn values_file(&self, components: &[Component]) -> String {
        let mut text = format!(
            "# Image of all containers.\nimage: {IMAGE}\n\n# Namespace of operator and nodes; the chart makes it.\n\
             namespace: {SYSTEM_NAMESPACE}\n\n# Definitions of all kinds. They go with the release, and so do their objects.\n\
             crds:\n  enabled: true\n\n# A Job before `helm uninstall` that removes webhooks, and is refused while there are objects of users, or ends them\n\
             # first. Without it they must be gone before.\nuninstall:\n  enabled: true\n  deleteObjects: false\n"
        );
        let mut sections = vec![
            ("operator", "Controllers of MikromVMs, and the authority of nodes."),
            ("node", "The daemon of each node."),
        ];
        sections.extend(components.iter().map(|component| (component.key, component.description)));
        for (key, about) in sections {
            let section = json!({key: self.values.get(key)});
            text += &format!("\n# {}.\n{}", about.trim_end_matches('.'), yaml(&[section]));
        }
        text
    }
}

/// Escapes text that Helm must not interpret.
fn escape_template(text: &str) -> String {
    text.replace("{{", "{{ \"{{\" }}")
}
