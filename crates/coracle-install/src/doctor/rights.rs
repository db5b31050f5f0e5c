//! Compares the permissions of a stored object with those of this release. Pure.

use serde_json::Value;

/// Returns what `found` lacks of `wanted`, for kinds with permissions; `None` when it lacks nothing. Objects of other kinds
/// lack nothing.
pub(super) fn missing_part(wanted: &Value, found: &Value) -> Option<String> {
    match wanted["kind"].as_str() {
        Some("Role" | "ClusterRole") => missing_rule(&wanted["rules"], &found["rules"]),
        Some("RoleBinding" | "ClusterRoleBinding") => missing_subject(wanted, found),
        Some("ValidatingAdmissionPolicy") => missing_validation(&wanted["spec"], &found["spec"]),
        Some("ValidatingAdmissionPolicyBinding") => {
            let denies = list(&found["spec"]["validationActions"]).any(|action| action == "Deny");
            (!denies).then(|| "the action Deny".to_owned())
        }
        _ => None,
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn missing_rule(wanted: &Value, found: &Value) -> Option<String> {
    for rule in list(wanted) {
        for group in list(&rule["apiGroups"]) {
            for resource in list(&rule["resources"]) {
                for verb in list(&rule["verbs"]) {
                    let allows = |theirs: &Value| {
                        has(&theirs["apiGroups"], group)
                            && has(&theirs["resources"], resource)
                            && has(&theirs["verbs"], verb)
                            && has_names(&theirs["resourceNames"], &rule["resourceNames"])
                    };
                    if !list(found).any(allows) {
                        let (verb, resource) = (verb.as_str()?, resource.as_str()?);
                        return Some(format!("the right to {verb} {resource}"));
                    }
                }
            }
        }
    }
    None
}

fn has(values: &Value, wanted: &Value) -> bool {
    list(values).any(|value| value == wanted || value == "*")
}

/// True when the names in `theirs` include those in `ours`. A rule without names applies to all objects.
fn has_names(theirs: &Value, ours: &Value) -> bool {
    list(theirs).next().is_none()
        || (list(ours).next().is_some() && list(ours).all(|name| list(theirs).any(|known| known == name)))
}

fn missing_subject(wanted: &Value, found: &Value) -> Option<String> {
    if found["roleRef"]["name"] != wanted["roleRef"]["name"] {
        return Some(format!("the role {}", wanted["roleRef"]["name"]));
    }
    let known = |subject: &&Value| {
        list(&found["subjects"])
            .any(|theirs| theirs["name"] == subject["name"] && theirs["namespace"] == subject["namespace"])
    };
    list(&wanted["subjects"])
        .find(|subject| !known(subject))
        .map(|subject| format!("the subject {}", subject["name"]))
}

fn missing_validation(wanted: &Value, found: &Value) -> Option<String> {
    if found["failurePolicy"] != wanted["failurePolicy"] {
        return Some(format!("the failure policy {}", wanted["failurePolicy"]));
    }
    let known =
        |rule: &&Value| list(&found["validations"]).any(|theirs| theirs["expression"] == rule["expression"]);
    list(&wanted["validations"]).find(|rule| !known(rule)).map(|rule| format!("the rule {}", rule["message"]))
}

/// Returns the path of the first property that a stored definition lacks; `None` when it has all.
pub(super) fn missing_property(ours: &Value, theirs: &Value) -> Option<String> {
    for version in list(&ours["versions"]) {
        let name = version["name"].as_str().unwrap_or_default();
        let Some(known) = list(&theirs["versions"]).find(|known| known["name"] == version["name"]) else {
            return Some(format!("version {name}"));
        };
        let schema = |version: &Value| version["schema"]["openAPIV3Schema"].clone();
        if let Some(path) = property(&schema(version), &schema(known), "") {
            return Some(path);
        }
    }
    None
}

fn property(ours: &Value, theirs: &Value, path: &str) -> Option<String> {
    for (name, ours) in ours["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        let theirs = &theirs["properties"][name];
        if theirs.is_null() {
            return Some(path);
        }
        if let Some(path) = property(ours, theirs, &path) {
            return Some(path);
        }
    }
    if ours["items"].is_object() {
        return property(&ours["items"], &theirs["items"], &format!("{path}[]"));
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rules_table() {
        let wanted = json!({"kind": "Role", "rules": [
            {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"], "resourceNames": ["ca"]},
        ]});
        let rules = |names: Value, verbs: Value| json!({"rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": verbs, "resourceNames": names}]});
        for (why, found, want) in [
            ("the same", rules(json!(["ca"]), json!(["get"])), None),
            ("more names", rules(json!(["ca", "b"]), json!(["get"])), None),
            ("all names", rules(Value::Null, json!(["get"])), None),
            ("all verbs", rules(json!(["ca"]), json!(["*"])), None),
            ("another name", rules(json!(["b"]), json!(["get"])), Some("the right to get secrets")),
            ("another verb", rules(json!(["ca"]), json!(["list"])), Some("the right to get secrets")),
            ("none", json!({"rules": null}), Some("the right to get secrets")),
        ] {
            assert_eq!(missing_part(&wanted, &found).as_deref(), want, "{why}");
        }
        let all = json!({"kind": "Role", "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]});
        assert!(missing_part(&all, &rules(json!(["ca"]), json!(["get"]))).is_some(), "a name is not all");
    }

    #[test]
    fn bindings_and_policies_table() {
        let bound = |role: &str, account: &str| json!({"kind": "RoleBinding", "roleRef": {"name": role}, "subjects": [{"name": account, "namespace": "n"}]});
        assert_eq!(missing_part(&bound("a", "b"), &bound("a", "b")), None);
        assert_eq!(missing_part(&bound("a", "b"), &bound("c", "b")).as_deref(), Some("the role \"a\""));
        assert_eq!(missing_part(&bound("a", "b"), &bound("a", "c")).as_deref(), Some("the subject \"b\""));
        let policy = |fails: &str, rule: &str| {
            json!({"kind": "ValidatingAdmissionPolicy", "spec": {"failurePolicy": fails,
                "validations": [{"expression": rule, "message": rule}]}})
        };
        assert_eq!(missing_part(&policy("Fail", "x"), &policy("Fail", "x")), None);
        assert!(missing_part(&policy("Fail", "x"), &policy("Ignore", "x")).is_some());
        assert_eq!(
            missing_part(&policy("Fail", "x"), &policy("Fail", "y")).as_deref(),
            Some("the rule \"x\"")
        );
    }

    #[test]
    fn definitions_table() {
        let spec = |properties: Value| json!({"versions": [{"name": "v1", "schema": {"openAPIV3Schema": {"properties": {"spec": {"properties": properties}}}}}]});
        let ours = spec(json!({"image": {}, "ports": {"items": {"properties": {"port": {}}}}}));
        assert_eq!(missing_property(&ours, &ours), None);
        let old = spec(json!({"ports": {"items": {"properties": {"port": {}}}}}));
        assert_eq!(missing_property(&ours, &old).as_deref(), Some(".spec.image"));
        let old = spec(json!({"image": {}, "ports": {"items": {"properties": {}}}}));
        assert_eq!(missing_property(&ours, &old).as_deref(), Some(".spec.ports[].port"));
        assert_eq!(missing_property(&ours, &json!({"versions": []})).as_deref(), Some("version v1"));
    }
}
