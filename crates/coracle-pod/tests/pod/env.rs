use crate::support::node;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, Service};
use serde_json::{Value, json};

use coracle_pod::env::*;
use coracle_pod::objects::Objects;

fn objects() -> Objects {
    let map: ConfigMap =
        serde_json::from_value(json!({"data": {"K": "v", "bad=key": "x", "ref": "$(K)"}})).unwrap();
    let secret: Secret = serde_json::from_value(json!({"data": {"S": "c2VjcmV0"}})).unwrap();
    let service = |namespace: &str, name: &str, ip: &str| -> Arc<Service> {
        Arc::new(
            serde_json::from_value(json!({
                "metadata": {"name": name, "namespace": namespace},
                "spec": {"clusterIP": ip, "ports": [{"name": "http-x", "port": 80}, {"port": 53, "protocol": "UDP"}]},
            }))
            .unwrap(),
        )
    };
    Objects {
        config_maps: [("m".to_owned(), Arc::new(map))].into(),
        secrets: [("s".to_owned(), Arc::new(secret))].into(),
        services: vec![
            service("default", "kubernetes", "10.0.0.1"),
            service("web", "my-db", "10.0.0.2"),
            service("web", "headless", "None"),
            service("other", "far", "10.0.0.3"),
        ],
        ..Objects::default()
    }
}

fn pod(container: Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {
            "name": "p", "namespace": "web", "uid": "u", "labels": {"app": "a", "tier": "x\"y"},
        },
        "spec": {"containers": [container], "serviceAccountName": "robot"},
    }))
    .unwrap()
}

fn of(container: Value) -> Result<Environment, ConfigError> {
    let pod = pod(container);
    let (node, addresses) = (node(), ["10.1.0.9".parse().unwrap()]);
    let context = FieldContext { pod: &pod, node: &node, addresses: &addresses };
    environment(&pod.spec.as_ref().unwrap().containers[0], &context, &objects())
}

fn value(env: Value) -> Result<String, ConfigError> {
    let all = of(json!({
        "name": "c",
        "env": [{"name": "A", "value": "1"}, env],
        "resources": {"limits": {"cpu": "1500m", "memory": "64Mi"}, "requests": {"cpu": "250m"}},
    }))?;
    Ok(all.variables.get("X").cloned().unwrap_or_else(|| "unset".to_owned()))
}

#[test]
fn env_variables_follow_their_sources() {
    let field = |path: &str| json!({"name": "X", "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let amount = |resource: &str, divisor: &str| json!({"name": "X", "valueFrom": {"resourceFieldRef": {"resource": resource, "divisor": divisor}}});
    let key = |kind: &str, name: &str, key: &str, optional: bool| json!({"name": "X", "valueFrom": {kind: {"name": name, "key": key, "optional": optional}}});
    for (env, want) in [
        (json!({"name": "X", "value": "a$(A)$$(A)$(MY_DB_SERVICE_HOST)$(NO)"}), Ok("a1$(A)10.0.0.2$(NO)")),
        (json!({"name": "X"}), Ok("")),
        (key("configMapKeyRef", "m", "ref", false), Ok("$(K)")),
        (key("configMapKeyRef", "m", "no", true), Ok("unset")),
        (key("configMapKeyRef", "no", "k", true), Ok("unset")),
        (key("configMapKeyRef", "m", "no", false), Err("MandatoryConfigMapKeyNotFound")),
        (key("configMapKeyRef", "no", "k", false), Err("MandatoryConfigMapNotFound")),
        (key("secretKeyRef", "s", "S", false), Ok("secret")),
        (key("secretKeyRef", "s", "no", false), Err("MandatorySecretKeyNotFound")),
        (key("secretKeyRef", "no", "k", false), Err("MandatorySecretNotFound")),
        (field("metadata.name"), Ok("p")),
        (field("metadata.namespace"), Ok("web")),
        (field("metadata.uid"), Ok("u")),
        (field("metadata.labels['app']"), Ok("a")),
        (field("metadata.annotations['none']"), Ok("")),
        (field("spec.nodeName"), Ok("node-1")),
        (field("spec.serviceAccountName"), Ok("robot")),
        (field("status.hostIP"), Ok("192.0.2.1")),
        (field("status.podIP"), Ok("10.1.0.9")),
        (field("status.podIPs"), Ok("10.1.0.9")),
        (field("spec.containers"), Err("Failed")),
        (amount("limits.cpu", "1"), Ok("2")),
        (amount("limits.cpu", "1m"), Ok("1500")),
        (amount("limits.memory", "1Mi"), Ok("64")),
        (amount("requests.cpu", "1m"), Ok("250")),
        (amount("requests.memory", "1"), Ok("0")),
        (amount("limits.disk", "1"), Err("Failed")),
    ] {
        let got = value(env.clone()).map_err(|error| error.event);
        assert_eq!(got, want.map(str::to_owned), "{env}");
    }
}

#[test]
fn optional_objects_leave_notes_with_their_reasons() {
    let env = of(json!({"name": "c",
        "env": [
            {"name": "X", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "no", "optional": true}}},
            {"name": "Y", "valueFrom": {"secretKeyRef": {"name": "s", "key": "no", "optional": true}}},
        ],
        "envFrom": [
            {"configMapRef": {"name": "no", "optional": true}},
            {"secretRef": {"name": "no", "optional": true}},
        ],
    }));
    let reasons: Vec<_> = env.unwrap().notes.iter().map(|note| note.reason).collect();
    assert_eq!(
        reasons,
        [
            "OptionalConfigMapNotFound",
            "OptionalSecretNotFound",
            "OptionalConfigMapKeyNotFound",
            "OptionalSecretKeyNotFound"
        ]
    );
}

#[test]
fn env_from_applies_prefix_and_yields_to_env() {
    let env = of(json!({"name": "c",
        "envFrom": [{"prefix": "P_", "configMapRef": {"name": "m"}}, {"secretRef": {"name": "s"}}],
        "env": [{"name": "S", "value": "own"}, {"name": "T", "value": "$(P_K)"}],
    }))
    .unwrap();
    let get = |name: &str| env.variables.get(name).map(String::as_str);
    assert_eq!((get("P_K"), get("S"), get("T"), get("P_bad=key")), (Some("v"), Some("own"), Some("v"), None));
    assert_eq!(env.notes[0].reason, "InvalidEnvironmentVariableNames");
    let missing = of(json!({"name": "c", "envFrom": [{"configMapRef": {"name": "no"}}]})).unwrap_err();
    assert_eq!(missing.event, "MandatoryConfigMapNotFound");
}

#[test]
fn services_are_those_of_the_namespace_and_the_api_server() {
    let env = of(json!({"name": "c"})).unwrap().variables;
    for (name, want) in [
        ("KUBERNETES_SERVICE_HOST", Some("10.0.0.1")),
        ("MY_DB_SERVICE_HOST", Some("10.0.0.2")),
        ("MY_DB_SERVICE_PORT", Some("80")),
        ("MY_DB_SERVICE_PORT_HTTP_X", Some("80")),
        ("MY_DB_PORT", Some("tcp://10.0.0.2:80")),
        ("MY_DB_PORT_53_UDP", Some("udp://10.0.0.2:53")),
        ("MY_DB_PORT_53_UDP_PROTO", Some("udp")),
        ("MY_DB_PORT_80_TCP_ADDR", Some("10.0.0.2")),
        ("HEADLESS_SERVICE_HOST", None),
        ("FAR_SERVICE_HOST", None),
    ] {
        assert_eq!(env.get(name).map(String::as_str), want, "{name}");
    }
    let mut pod = pod(json!({"name": "c"}));
    pod.spec.as_mut().unwrap().enable_service_links = Some(false);
    let few = service_variables(&pod, &objects().services);
    assert!(few.contains_key("KUBERNETES_SERVICE_PORT") && !few.contains_key("MY_DB_SERVICE_HOST"));
}

#[test]
fn labels_as_a_file_are_quoted_lines() {
    let (pod, node) = (pod(json!({"name": "c"})), node());
    let context = FieldContext { pod: &pod, node: &node, addresses: &[] };
    assert_eq!(field(&context, "metadata.labels").unwrap(), "app=\"a\"\ntier=\"x\\\"y\"");
    assert!(field(&context, "status.podIP").is_err(), "not known before the pod has an address");
}
