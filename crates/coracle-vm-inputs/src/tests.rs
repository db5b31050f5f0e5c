//! Tables of specs and their resolved inputs.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolume, PersistentVolumeClaim, Secret};
use serde_json::{Value, json};

use super::*;

fn vm(spec: Value) -> MikromVM {
    let mut object = json!({
        "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM",
        "metadata": {"name": "web", "namespace": "team", "uid": "u1", "labels": {"app": "shop"}},
        "spec": {"image": "i:1", "vcpuCount": 2, "memoryMB": 256},
    });
    for (key, value) in spec.as_object().unwrap() {
        object["spec"][key] = value.clone();
    }
    serde_json::from_value(object).unwrap()
}

/// Objects of the tests. `aHVudGVyMg==` is `hunter2`.
fn objects() -> Objects {
    let secret = |object: Value| serde_json::from_value::<Secret>(object).unwrap();
    let map: ConfigMap = serde_json::from_value(json!({
        "data": {"greeting": "hello", "not=a name": "x"}, "binaryData": {"blob": "/w=="},
    }))
    .unwrap();
    Objects {
        config_maps: [("settings".to_owned(), map)].into(),
        secrets: [
            ("login".to_owned(), secret(json!({"data": {"password": "aHVudGVyMg==", "blob": "/w=="}}))),
            (
                "registry".to_owned(),
                secret(
                    json!({"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": "e30="}}),
                ),
            ),
            (
                "old".to_owned(),
                secret(json!({"type": "kubernetes.io/dockercfg", "data": {".dockercfg": "e30="}})),
            ),
        ]
        .into(),
        claims: [
            ("data".to_owned(), Ok(BoundClaim { path: "/disks/1".into(), ..BoundClaim::default() })),
            ("pending".to_owned(), Err("PersistentVolumeClaim \"pending\" is Pending".to_owned())),
        ]
        .into(),
    }
}

fn env(spec: Value) -> Result<Vec<String>, String> {
    resolve(&vm(spec), "n1", &objects()).map(|inputs| inputs.env).map_err(|error| error.to_string())
}

#[test]
fn environment_table() {
    let secret = |key: &str| json!({"secretKeyRef": {"name": "login", "key": key}});
    let field = |path: &str| json!({"fieldRef": {"fieldPath": path}});
    let one = |from: Value| json!({"env": [{"name": "X", "valueFrom": from}]});
    for (why, spec, want) in [
        ("nothing", json!({}), Ok(vec![])),
        ("a value", json!({"env": [{"name": "A", "value": "1"}]}), Ok(vec!["A=1"])),
        (
            "a value of an earlier one, not of a later one",
            json!({"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)$(C)"}, {"name": "C", "value": "2"}]}),
            Ok(vec!["A=1", "B=1$(C)", "C=2"]),
        ),
        ("a key of a Secret", one(secret("password")), Ok(vec!["X=hunter2"])),
        (
            "a key that is not there",
            one(secret("pin")),
            Err("variable X: Secret \"login\" has no key \"pin\""),
        ),
        (
            "a key that is not text",
            one(secret("blob")),
            Err("variable X: key \"blob\" of Secret \"login\" is not text"),
        ),
        (
            "a Secret that is not there",
            one(json!({"secretKeyRef": {"name": "none", "key": "k"}})),
            Err("variable X: Secret \"none\" not found"),
        ),
        (
            "optional",
            one(json!({"secretKeyRef": {"name": "none", "key": "k", "optional": true}})),
            Ok(vec![]),
        ),
        (
            "an optional key",
            one(json!({"secretKeyRef": {"name": "login", "key": "k", "optional": true}})),
            Ok(vec![]),
        ),
        (
            "a key of a ConfigMap",
            one(json!({"configMapKeyRef": {"name": "settings", "key": "greeting"}})),
            Ok(vec!["X=hello"]),
        ),
        (
            "a ConfigMap that is not there",
            one(json!({"configMapKeyRef": {"name": "none", "key": "k"}})),
            Err("variable X: ConfigMap \"none\" not found"),
        ),
        ("name", one(field("metadata.name")), Ok(vec!["X=web"])),
        ("uid", one(field("metadata.uid")), Ok(vec!["X=u1"])),
        ("label", one(field("metadata.labels['app']")), Ok(vec!["X=shop"])),
        ("no label", one(field("metadata.labels['none']")), Ok(vec!["X="])),
        ("memory", one(field("spec.memoryMB")), Ok(vec!["X=256"])),
        ("node", one(field("status.nodeName")), Ok(vec!["X=n1"])),
        (
            "whole ConfigMap, without what cannot be a name",
            json!({"envFrom": [{"configMapRef": {"name": "settings"}}]}),
            Ok(vec!["greeting=hello"]),
        ),
        (
            "whole Secret with a prefix, without what is not text",
            json!({"envFrom": [{"prefix": "DB_", "secretRef": {"name": "login"}}]}),
            Ok(vec!["DB_password=hunter2"]),
        ),
        (
            "whole Secret that is not there",
            json!({"envFrom": [{"secretRef": {"name": "none"}}]}),
            Err("Secret \"none\" not found"),
        ),
        (
            "optional whole Secret",
            json!({"envFrom": [{"secretRef": {"name": "none", "optional": true}}]}),
            Ok(vec![]),
        ),
        (
            "a single one replaces that of an object",
            json!({"envFrom": [{"configMapRef": {"name": "settings"}}], "env": [{"name": "greeting", "value": "bye"}]}),
            Ok(vec!["greeting=bye"]),
        ),
    ] {
        let want = want.map(|all| all.iter().map(|one| (*one).to_owned()).collect()).map_err(str::to_owned);
        assert_eq!(env(spec), want, "{why}");
    }
}

#[test]
fn commands_refer_to_variables() {
    let spec = json!({
        "command": ["sh", "-c"], "args": ["echo $(PASSWORD) $$(PASSWORD) $(NONE)"],
        "env": [{"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "login", "key": "password"}}}],
    });
    let inputs = resolve(&vm(spec), "n1", &objects()).unwrap();
    assert_eq!(inputs.args, ["echo hunter2 $(PASSWORD) $(NONE)"]);
    assert!(!format!("{inputs:?}").contains("hunter2"), "{inputs:?}");
}

#[test]
fn volume_table() {
    let one = |source: Value| {
        let mut volume = json!({"name": "v", "mountPath": "/data"});
        for (key, value) in source.as_object().unwrap() {
            volume[key] = value.clone();
        }
        resolve(&vm(json!({"volumes": [volume]})), "n1", &objects())
            .map(|mut inputs| inputs.volumes.remove(0))
    };
    let files = |source: Value| match one(source).map(|volume| volume.source) {
        Ok(InputSource::Files(files)) => {
            Ok(files.iter().map(|f| format!("{} {:o} {}", f.path, f.mode, f.bytes.len())).collect::<Vec<_>>())
        }
        other => Err(other.unwrap_err().to_string()),
    };
    for (why, source, want) in [
        (
            "every key",
            json!({"configMap": {"name": "settings"}}),
            Ok(vec!["blob 644 1", "greeting 644 5", "not=a name 644 1"]),
        ),
        (
            "items with modes",
            json!({"secret": {"secretName": "login", "defaultMode": 256, "items": [
                {"key": "password", "path": "sub/pw"}, {"key": "blob", "path": "b", "mode": 420}]}}),
            Ok(vec!["sub/pw 400 7", "b 644 1"]),
        ),
        (
            "a way out",
            json!({"secret": {"secretName": "login", "items": [{"key": "password", "path": "../pw"}]}}),
            Err("volume v: invalid path \"../pw\""),
        ),
        (
            "no key",
            json!({"secret": {"secretName": "login", "items": [{"key": "pin", "path": "pin"}]}}),
            Err("volume v: Secret \"login\" has no key \"pin\""),
        ),
        ("no object", json!({"configMap": {"name": "none"}}), Err("volume v: ConfigMap \"none\" not found")),
        ("optional", json!({"configMap": {"name": "none", "optional": true}}), Ok(vec![])),
    ] {
        let want = want.map(|all| all.iter().map(|one| (*one).to_owned()).collect()).map_err(str::to_owned);
        assert_eq!(files(source), want, "{why}");
    }
    let disk = one(json!({"disk": {"size": "2Gi", "class": "fast"}, "readOnly": true})).unwrap();
    assert_eq!(disk.source, InputSource::Disk { size_mib: 2048, class: "fast".into() });
    assert!(disk.read_only && disk.target == "/data");
    let claimed = one(json!({"persistentVolumeClaim": {"claimName": "data"}})).unwrap();
    assert_eq!((claimed.source, claimed.read_only), (InputSource::Path("/disks/1".into()), false));
    for (claim, want) in
        [("pending", "volume v: PersistentVolumeClaim \"pending\" is Pending"), ("none", "not found")]
    {
        let error = one(json!({"persistentVolumeClaim": {"claimName": claim}})).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
}

#[test]
fn user_data_and_pull_secrets_are_read_from_secrets() {
    let of = |spec| resolve(&vm(spec), "n1", &objects());
    let secret = json!({"userData": {"secretRef": {"name": "login", "key": "password"}}});
    assert_eq!(of(secret).unwrap().user_data, "hunter2");
    assert_eq!(of(json!({"userData": {"inline": "#cloud-config"}})).unwrap().user_data, "#cloud-config");
    let missing = of(json!({"userData": {"secretRef": {"name": "login"}}})).unwrap_err().to_string();
    assert_eq!(missing, "Secret \"login\" has no key \"userData\"");
    let both = of(json!({"imagePullSecrets": [{"name": "registry"}, {"name": "old"}]})).unwrap();
    assert_eq!(both.pull_secrets.iter().map(|secret| secret.legacy).collect::<Vec<_>>(), [false, true]);
    let wrong = of(json!({"imagePullSecrets": [{"name": "login"}]})).unwrap_err().to_string();
    assert!(wrong.contains("is not of type kubernetes.io/dockerconfigjson"), "{wrong}");
}

#[test]
fn inputs_have_a_limit_of_bytes() {
    let args = vec!["x".repeat(32768); 128];
    let error = resolve(&vm(json!({"args": args})), "n1", &objects()).unwrap_err().to_string();
    assert!(error.contains("at most 3145728 together"), "{error}");
}

#[test]
fn references_of_all_spec_fields_are_found() {
    let spec = json!({
        "env": [
            {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s1", "key": "k"}}},
            {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "c1", "key": "k"}}},
        ],
        "envFrom": [{"secretRef": {"name": "s2"}}, {"configMapRef": {"name": "c2"}}],
        "userData": {"secretRef": {"name": "s3"}},
        "volumes": [
            {"name": "a", "secret": {"secretName": "s4"}}, {"name": "b", "configMap": {"name": "c3"}},
            {"name": "c", "persistentVolumeClaim": {"claimName": "p"}},
        ],
        "imagePullSecrets": [{"name": "s5"}],
    });
    let found = references(&vm(spec).spec);
    let names = |of: &BTreeSet<String>| of.iter().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(names(&found.config_maps), "c1 c2 c3");
    assert_eq!(names(&found.secrets), "s1 s2 s3 s4 s5");
    assert_eq!(names(&found.claims), "p");
    assert_eq!(found.of_claims().secrets.len(), 0);
}

#[test]
fn claims_unbound_or_without_a_path_are_unusable() {
    let claim = |phase: &str, modes: Value| -> PersistentVolumeClaim {
        let spec = json!({"volumeName": "pv1", "accessModes": modes});
        serde_json::from_value(json!({"metadata": {"name": "c"}, "spec": spec, "status": {"phase": phase}}))
            .unwrap()
    };
    let volume = |spec: Value| -> PersistentVolume {
        serde_json::from_value(json!({"metadata": {"name": "pv1"}, "spec": spec})).unwrap()
    };
    let bound = claim("Bound", json!(["ReadWriteOnce"]));
    assert_eq!(objects::bound_to(&bound), Ok("pv1".into()));
    assert!(objects::bound_to(&claim("Pending", json!([]))).unwrap_err().contains("is Pending"));
    let affinity = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [
        {"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1"]}]}]}});
    let local = volume(json!({"local": {"path": "/disks/1"}, "nodeAffinity": affinity}));
    let usable = objects::to_bound_claim(&bound, &local).unwrap();
    assert_eq!((usable.path.as_str(), usable.read_only), ("/disks/1", false));
    assert_eq!(usable.node_terms[0].match_expressions[0].values, ["n1"]);
    let host_path = volume(json!({"hostPath": {"path": "/srv"}}));
    let read_only = claim("Bound", json!(["ReadOnlyMany"]));
    assert!(objects::to_bound_claim(&read_only, &host_path).unwrap().read_only);
    let error =
        objects::to_bound_claim(&bound, &volume(json!({"csi": {"driver": "d", "volumeHandle": "h"}})))
            .unwrap_err();
    assert!(error.contains("neither local nor hostPath"), "{error}");
}
