//! Constraints on the placement of a VM, by labels and taints of nodes and by labels of other VMs. Pure.
//!
//! As in the scheduler of Kubernetes, constraints must hold when the VM is placed, and not afterwards.

use std::collections::BTreeMap;

use coracle_api::{
    LabelSelector, MikromVMSpec, NodeSelectorTerm, Operator, Requirement, TaintEffect, Toleration,
    TolerationOperator, VmAffinityTerm,
};
use k8s_openapi::api::core::v1::Taint;

/// Labels by key.
pub type Labels = BTreeMap<String, String>;

/// Prefix of taints that keep Pods away from virtual nodes. These taints do not apply to VMs.
const VIRTUAL_NODES: &str = "virtual-kubelet.io/";
/// Reduction of a node's preference by each soft taint; a preferred term adds at most 100.
const SOFT_TAINT: i64 = 100;

/// Labels and taints of a node.
#[derive(Clone, Copy, Debug)]
pub struct NodeView<'a> {
    /// Labels of the node.
    pub labels: &'a Labels,
    /// Taints of the node.
    pub taints: &'a [Taint],
}

/// A VM of the same namespace that is bound to a node.
#[derive(Clone, Copy, Debug)]
pub struct Neighbour<'a> {
    /// Labels of the VM's object.
    pub labels: &'a Labels,
    /// Labels of the VM's node.
    pub node: &'a Labels,
}

/// Checks whether a VM may be placed on a node. `claims` are the node selector terms of each of its claims.
///
/// # Errors
/// The reason, as a phrase that follows the name of the node.
pub fn allows(
    spec: &MikromVMSpec,
    claims: &[Vec<NodeSelectorTerm>],
    node: &NodeView<'_>,
) -> Result<(), String> {
    if let Some((key, value)) =
        spec.node_selector.iter().find(|(key, value)| node.labels.get(*key) != Some(*value))
    {
        return Err(format!("does not have the label {key}={value} of nodeSelector"));
    }
    let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required =
        affinity.and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.as_ref());
    if required.is_some_and(|required| !matches_any(&required.node_selector_terms, node.labels)) {
        return Err("does not match the node affinity".to_owned());
    }
    if claims.iter().any(|terms| !matches_any(terms, node.labels)) {
        return Err("does not have the volume of a PersistentVolumeClaim".to_owned());
    }
    let hard = node.taints.iter().filter(|taint| taint.effect != TaintEffect::PreferNoSchedule.as_str());
    match hard.into_iter().find(|taint| !is_tolerated(taint, &spec.tolerations)) {
        Some(Taint { key, value, effect, .. }) => {
            Err(format!("has the taint {key}={}:{effect}", value.as_deref().unwrap_or_default()))
        }
        None => Ok(()),
    }
}

/// Returns the preference of a VM for a node: the weights of the matching terms, less the soft taints of the node.
#[must_use]
pub fn preference(spec: &MikromVMSpec, node: &NodeView<'_>) -> i64 {
    let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let preferred = affinity
        .map(|affinity| affinity.preferred_during_scheduling_ignored_during_execution.as_slice())
        .unwrap_or_default();
    let holding = preferred.iter().filter(|term| matches_term(&term.preference, node.labels));
    let weights: i64 = holding.map(|term| i64::from(term.weight)).sum();
    let soft = node.taints.iter().filter(|taint| taint.effect == TaintEffect::PreferNoSchedule.as_str());
    let unwanted = soft.filter(|taint| !is_tolerated(taint, &spec.tolerations)).count();
    weights - i64::try_from(unwanted).unwrap_or(i64::MAX).saturating_mul(SOFT_TAINT)
}

/// True when [`allows_neighbours`] needs to know other VMs.
#[must_use]
pub fn has_neighbour_terms(spec: &MikromVMSpec) -> bool {
    spec.affinity.as_ref().is_some_and(|affinity| {
        let any = |terms: &Option<coracle_api::VmAffinity>| {
            terms.as_ref().is_some_and(|a| !a.required_during_scheduling_ignored_during_execution.is_empty())
        };
        any(&affinity.vm_affinity) || any(&affinity.vm_anti_affinity)
    })
}

/// Checks whether a VM may be placed on a node beside these VMs. `own` are its own labels: the first VM of a group with
/// affinity to itself matches itself.
///
/// # Errors
/// The reason, as a phrase that follows the name of the node.
pub fn allows_neighbours(
    spec: &MikromVMSpec,
    own: &Labels,
    node: &Labels,
    others: &[Neighbour<'_>],
) -> Result<(), String> {
    let Some(affinity) = &spec.affinity else { return Ok(()) };
    let terms = |of: &Option<coracle_api::VmAffinity>| {
        of.clone().map(|of| of.required_during_scheduling_ignored_during_execution).unwrap_or_default()
    };
    let beside = |term: &VmAffinityTerm, other: &Neighbour<'_>| {
        let place = node.get(&term.topology_key);
        place.is_some() && other.node.get(&term.topology_key) == place
    };
    let matches = |term: &VmAffinityTerm, labels: &Labels| selects(&term.label_selector, labels);
    for term in terms(&affinity.vm_affinity) {
        let somewhere = others.iter().any(|other| matches(&term, other.labels));
        let here = others.iter().any(|other| matches(&term, other.labels) && beside(&term, other));
        let first = !somewhere && matches(&term, own) && node.contains_key(&term.topology_key);
        if !here && !first {
            return Err("has no VM of the VM affinity".to_owned());
        }
    }
    for term in terms(&affinity.vm_anti_affinity) {
        if others.iter().any(|other| matches(&term, other.labels) && beside(&term, other)) {
            return Err("has a VM of the VM anti-affinity".to_owned());
        }
    }
    Ok(())
}

fn matches_any(terms: &[NodeSelectorTerm], labels: &Labels) -> bool {
    terms.iter().any(|term| matches_term(term, labels))
}

/// True when the term matches. A term without expressions never matches (API reference of NodeSelectorTerm).
fn matches_term(term: &NodeSelectorTerm, labels: &Labels) -> bool {
    !term.match_expressions.is_empty()
        && term.match_expressions.iter().all(|one| matches_requirement(one, labels))
}

/// True when the selector matches. A selector without expressions matches everything (API reference of LabelSelector).
fn selects(selector: &LabelSelector, labels: &Labels) -> bool {
    let expressions = &selector.match_expressions;
    selector.match_labels.iter().all(|(key, value)| labels.get(key) == Some(value))
        && expressions.iter().all(|one| {
            !matches!(one.operator, Operator::Gt | Operator::Lt) && matches_requirement(one, labels)
        })
}

fn matches_requirement(one: &Requirement, labels: &Labels) -> bool {
    let value = labels.get(&one.key);
    let number = |text: &str| text.parse::<i64>().ok();
    let compared = |is: fn(&i64, &i64) -> bool| {
        let (have, want) = (value.and_then(|v| number(v)), one.values.first().and_then(|v| number(v)));
        have.zip(want).is_some_and(|(have, want)| is(&have, &want))
    };
    match one.operator {
        Operator::In => value.is_some_and(|value| one.values.contains(value)),
        Operator::NotIn => value.is_none_or(|value| !one.values.contains(value)),
        Operator::Exists => value.is_some(),
        Operator::DoesNotExist => value.is_none(),
        Operator::Gt => compared(i64::gt),
        Operator::Lt => compared(i64::lt),
    }
}

fn is_tolerated(taint: &Taint, tolerations: &[Toleration]) -> bool {
    let tolerates = |one: &Toleration| {
        let effect = one.effect.is_none_or(|effect| effect.as_str() == taint.effect);
        let same = match one.operator {
            TolerationOperator::Exists => one.key.is_empty() || one.key == taint.key,
            TolerationOperator::Equal => {
                one.key == taint.key && one.value == taint.value.as_deref().unwrap_or_default()
            }
        };
        effect && same
    };
    taint.key.starts_with(VIRTUAL_NODES) || tolerations.iter().any(tolerates)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn spec(fields: &Value) -> MikromVMSpec {
        let mut spec = json!({"image": "i", "vcpuCount": 1, "memoryMB": 128});
        for (key, value) in fields.as_object().unwrap() {
            spec[key] = value.clone();
        }
        serde_json::from_value(spec).unwrap()
    }

    fn labels(all: &[(&str, &str)]) -> Labels {
        all.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn taint(key: &str, value: &str, effect: &str) -> Taint {
        Taint { key: key.into(), value: Some(value.into()), effect: effect.into(), time_added: None }
    }

    fn required(expressions: Value) -> Value {
        json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": expressions}]}}}})
    }

    #[test]
    fn constraint_table() {
        let node = labels(&[("zone", "a"), ("cpus", "8")]);
        let expression = |key: &str, operator: &str, values: Value| {
            required(json!([{"key": key, "operator": operator, "values": values}]))
        };
        let no_affinity = Err("does not match the node affinity");
        for (why, fields, taints, want) in [
            ("nothing asked", json!({}), vec![], Ok(())),
            ("a label", json!({"nodeSelector": {"zone": "a"}}), vec![], Ok(())),
            (
                "another value",
                json!({"nodeSelector": {"zone": "b"}}),
                vec![],
                Err("does not have the label zone=b of nodeSelector"),
            ),
            ("In", expression("zone", "In", json!(["b", "a"])), vec![], Ok(())),
            ("not In", expression("zone", "In", json!(["b"])), vec![], no_affinity),
            ("NotIn", expression("zone", "NotIn", json!(["a"])), vec![], no_affinity),
            ("NotIn of no label", expression("rack", "NotIn", json!(["a"])), vec![], Ok(())),
            ("Exists", expression("rack", "Exists", json!([])), vec![], no_affinity),
            ("DoesNotExist", expression("rack", "DoesNotExist", json!([])), vec![], Ok(())),
            ("Gt", expression("cpus", "Gt", json!(["4"])), vec![], Ok(())),
            ("not Gt", expression("cpus", "Gt", json!(["8"])), vec![], no_affinity),
            ("Lt", expression("cpus", "Lt", json!(["9"])), vec![], Ok(())),
            ("Lt of no number", expression("zone", "Lt", json!(["9"])), vec![], no_affinity),
            ("a term without expressions", required(json!([])), vec![], no_affinity),
            (
                "a taint",
                json!({}),
                vec![taint("gpu", "yes", "NoSchedule")],
                Err("has the taint gpu=yes:NoSchedule"),
            ),
            (
                "a taint that evicts",
                json!({}),
                vec![taint("gpu", "", "NoExecute")],
                Err("has the taint gpu=:NoExecute"),
            ),
            ("a soft taint", json!({}), vec![taint("gpu", "yes", "PreferNoSchedule")], Ok(())),
            (
                "of virtual nodes",
                json!({}),
                vec![taint("virtual-kubelet.io/provider", "cocoon", "NoSchedule")],
                Ok(()),
            ),
            (
                "tolerated",
                json!({"tolerations": [{"key": "gpu", "value": "yes"}]}),
                vec![taint("gpu", "yes", "NoSchedule")],
                Ok(()),
            ),
            (
                "tolerated with another value",
                json!({"tolerations": [{"key": "gpu", "value": "no"}]}),
                vec![taint("gpu", "yes", "NoSchedule")],
                Err("has the taint gpu=yes:NoSchedule"),
            ),
            (
                "tolerated with any value",
                json!({"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]}),
                vec![taint("gpu", "yes", "NoSchedule")],
                Ok(()),
            ),
            (
                "tolerated with another effect",
                json!({"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}]}),
                vec![taint("gpu", "yes", "NoSchedule")],
                Err("has the taint gpu=yes:NoSchedule"),
            ),
            (
                "everything tolerated",
                json!({"tolerations": [{"operator": "Exists"}]}),
                vec![taint("gpu", "yes", "NoSchedule"), taint("x", "", "NoExecute")],
                Ok(()),
            ),
        ] {
            let node = NodeView { labels: &node, taints: &taints };
            assert_eq!(allows(&spec(&fields), &[], &node), want.map_err(str::to_owned), "{why}");
        }
    }

    #[test]
    fn volume_of_a_claim_ties_the_vm_to_its_node() {
        let term = |host: &str| -> NodeSelectorTerm {
            let one = json!({"key": "kubernetes.io/hostname", "operator": "In", "values": [host]});
            serde_json::from_value(json!({"matchExpressions": [one]})).unwrap()
        };
        let node = labels(&[("kubernetes.io/hostname", "n1")]);
        let node = NodeView { labels: &node, taints: &[] };
        let any = spec(&json!({}));
        assert_eq!(allows(&any, &[vec![term("n2"), term("n1")]], &node), Ok(()));
        let error = allows(&any, &[vec![term("n1")], vec![term("n2")]], &node).unwrap_err();
        assert!(error.contains("PersistentVolumeClaim"), "{error}");
    }

    #[test]
    fn preference_is_the_sum_of_weights_less_soft_taints() {
        let term = |weight: i32, zone: &str| {
            let one = json!({"key": "zone", "operator": "In", "values": [zone]});
            json!({"weight": weight, "preference": {"matchExpressions": [one]}})
        };
        let terms = [term(10, "a"), term(5, "a"), term(80, "b")];
        let fields =
            json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}}});
        let node = labels(&[("zone", "a")]);
        assert_eq!(preference(&spec(&fields), &NodeView { labels: &node, taints: &[] }), 15);
        let taints = [taint("busy", "", "PreferNoSchedule"), taint("hard", "", "NoSchedule")];
        assert_eq!(preference(&spec(&fields), &NodeView { labels: &node, taints: &taints }), -85);
    }

    #[test]
    fn neighbour_table() {
        let [n1, n2] = ["1", "2"].map(|n| labels(&[("host", n), ("zone", "a")]));
        let bare = labels(&[]);
        let (db, web) = (labels(&[("app", "db")]), labels(&[("app", "web")]));
        let affinity = |kind: &str, key: &str| {
            let term = json!({"labelSelector": {"matchLabels": {"app": "db"}}, "topologyKey": key});
            spec(&json!({"affinity": {kind: {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}))
        };
        let with = |labels, node| Neighbour { labels, node };
        let (together, apart) = ("vmAffinity", "vmAntiAffinity");
        for (why, kind, key, own, node, others, want) in [
            ("beside it", together, "host", &web, &n1, vec![with(&db, &n1)], true),
            ("elsewhere", together, "host", &web, &n2, vec![with(&db, &n1)], false),
            ("in its zone", together, "zone", &web, &n2, vec![with(&db, &n1)], true),
            ("none there yet", together, "host", &web, &n1, vec![], false),
            ("the first of its group", together, "host", &db, &n1, vec![], true),
            ("the second of its group", together, "host", &db, &n2, vec![with(&db, &n1)], false),
            ("a node without the label", together, "host", &db, &bare, vec![], false),
            ("apart from it", apart, "host", &web, &n2, vec![with(&db, &n1)], true),
            ("not beside it", apart, "host", &web, &n1, vec![with(&db, &n1)], false),
            ("not in its zone", apart, "zone", &web, &n2, vec![with(&db, &n1)], false),
            ("beside another", apart, "host", &db, &n1, vec![with(&web, &n1)], true),
            ("nodes without the label are apart", apart, "host", &web, &bare, vec![with(&db, &bare)], true),
        ] {
            let spec = affinity(kind, key);
            assert!(has_neighbour_terms(&spec));
            assert_eq!(allows_neighbours(&spec, own, node, &others).is_ok(), want, "{why}");
        }
        assert!(!has_neighbour_terms(&spec(&json!({}))));
    }
}
