//! Node selector and required node affinity of a pod. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm, Pod};

/// Field that selector terms may match.
const NAME_FIELD: &str = "metadata.name";

/// Returns whether the pod may run on a node with this name and these labels.
pub(super) fn may_run(pod: &Pod, node: &str, labels: &BTreeMap<String, String>) -> bool {
    let Some(spec) = &pod.spec else { return true };
    let selected = spec.node_selector.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required =
        affinity.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
    // Terms are alternatives; an empty list matches no node.
    let fits = required.is_none_or(|required| {
        required.node_selector_terms.iter().any(|term| matches_term(term, node, labels))
    });
    selected && fits
}

fn matches_term(term: &NodeSelectorTerm, node: &str, labels: &BTreeMap<String, String>) -> bool {
    let expressions: Vec<_> = term.match_expressions.iter().flatten().collect();
    let fields: Vec<_> = term.match_fields.iter().flatten().collect();
    let is_empty = expressions.is_empty() && fields.is_empty();
    let labels_fit = expressions.iter().all(|one| matches(one, labels.get(&one.key).map(String::as_str)));
    let fields_fit = fields.iter().all(|one| one.key == NAME_FIELD && matches(one, Some(node)));
    !is_empty && labels_fit && fields_fit
}

fn matches(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let listed = || value.is_some_and(|value| values.iter().any(|one| one == value));
    let numbers = || Some((value?.parse::<i64>().ok()?, values.first()?.parse::<i64>().ok()?));
    match requirement.operator.as_str() {
        "In" => listed(),
        "NotIn" => !listed(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => numbers().is_some_and(|(value, bound)| value > bound),
        "Lt" => numbers().is_some_and(|(value, bound)| value < bound),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn selector_and_affinity_decide_where_pods_run() {
        let labels =
            [("zone", "a"), ("cores", "8")].map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let affinity = |terms: Value| json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}});
        let label = |key: &str, operator: &str, values: &[&str]| {
            affinity(json!([{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]))
        };
        let field = |name: &str| {
            affinity(json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}]))
        };
        for (why, spec, want) in [
            ("no wish", json!({}), true),
            ("selector fits", json!({"nodeSelector": {"zone": "a"}}), true),
            ("selector differs", json!({"nodeSelector": {"zone": "b"}}), false),
            ("selector of a missing label", json!({"nodeSelector": {"disk": "fast"}}), false),
            ("in", label("zone", "In", &["b", "a"]), true),
            ("not in", label("zone", "NotIn", &["a"]), false),
            ("not in, missing label", label("disk", "NotIn", &["a"]), true),
            ("exists", label("zone", "Exists", &[]), true),
            ("does not exist", label("zone", "DoesNotExist", &[]), false),
            ("greater", label("cores", "Gt", &["4"]), true),
            ("less", label("cores", "Lt", &["4"]), false),
            ("greater than a text", label("zone", "Gt", &["4"]), false),
            ("an unknown operator", label("zone", "Like", &["a"]), false),
            ("this node", field("vm-1"), true),
            ("another node", field("vm-2"), false),
            ("no terms", affinity(json!([])), false),
            ("an empty term", affinity(json!([{}])), false),
            (
                "one of two terms",
                affinity(json!([
                    {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]},
                    {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
                ])),
                true,
            ),
        ] {
            let mut pod = json!({"spec": {"containers": []}});
            pod["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
            let pod = serde_json::from_value(pod).unwrap();
            assert_eq!(may_run(&pod, "vm-1", &labels), want, "{why}");
        }
    }
}
