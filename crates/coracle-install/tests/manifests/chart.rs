//! The chart, rendered by Helm: the same objects as those of kustomize.

use std::collections::BTreeMap;
use std::process::Command;

use coracle_testkit::tools;
use serde_json::Value;

use crate::deploy;

fn run(program: &std::path::Path, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} {args:?}: {said}", program.display());
    String::from_utf8(output.stdout).unwrap()
}

/// Converts integral floats to integers: kubectl writes 1.0 as 1.
fn with_integers(value: Value) -> Value {
    match value {
        Value::Number(n) => {
            let written = n.to_string();
            written
                .strip_suffix(".0")
                .and_then(|whole| whole.parse::<i64>().ok())
                .map_or(Value::Number(n), Value::from)
        }
        Value::Array(items) => items.into_iter().map(with_integers).collect(),
        Value::Object(fields) => fields.into_iter().map(|(key, value)| (key, with_integers(value))).collect(),
        other => other,
    }
}

/// Returns the objects by kind, namespace and name.
fn objects(text: &str) -> BTreeMap<String, Value> {
    let mut all = BTreeMap::new();
    for document in text.split("\n---\n") {
        let object: Value = serde_saphyr::from_str(document.trim_start_matches("---\n")).unwrap();
        let object = with_integers(object);
        if object.is_null() {
            continue;
        }
        let meta = &object["metadata"];
        let name = format!("{} {}/{}", object["kind"], meta["namespace"], meta["name"]);
        assert!(all.insert(name.clone(), object).is_none(), "{name} twice");
    }
    all
}

fn assert_same(chart: &str, kustomize: &str) {
    let (chart, kustomize) = (objects(chart), objects(kustomize));
    assert_eq!(chart.keys().collect::<Vec<_>>(), kustomize.keys().collect::<Vec<_>>());
    for (name, object) in &kustomize {
        assert_eq!(&chart[name], object, "{name}");
    }
}

/// Values that enable every option.
const OPTIONS: [&str; 7] =
    ["webhook", "market", "bidnode", "registry", "agentForge", "cocoon", "virtualNode"];

#[test]
fn chart_renders_the_objects_of_kustomize() {
    let Some([helm, kubectl]) = tools::require(["helm", "kubectl"]) else { return };
    let chart = deploy().join("helm/coracle");
    let kustomize =
        |dir: &str| run(&kubectl, &["kustomize", deploy().join("kustomize").join(dir).to_str().unwrap()]);
    let template = |args: &[&str]| {
        run(
            &helm,
            &[&["template", "coracle", chart.to_str().unwrap(), "--kube-version=1.36.0", "--no-hooks"], args]
                .concat(),
        )
    };
    assert_same(&template(&[]), &kustomize("default"));
    let on: Vec<_> = OPTIONS.iter().map(|option| format!("--set={option}.enabled=true")).collect();
    let on: Vec<_> = on.iter().map(String::as_str).collect();
    assert_same(&template(&on), &kustomize("everything"));
    let monitoring: std::collections::BTreeSet<_> =
        objects(&template(&["--set=monitoring.enabled=true"])).into_keys().collect();
    let default: std::collections::BTreeSet<_> = objects(&template(&[])).into_keys().collect();
    let added: Vec<_> = monitoring.difference(&default).collect();
    let of = |kind: &str| added.iter().filter(|name| name.starts_with(&format!("{kind:?}"))).count();
    assert_eq!((of("PodMonitor"), of("PrometheusRule"), added.len()), (5, 5, 10), "{added:?}");
}

#[test]
fn chart_passes_lint() {
    let Some([helm]) = tools::require(["helm"]) else { return };
    let chart = deploy().join("helm/coracle");
    let said = run(&helm, &["lint", "--strict", "--kube-version=1.36.0", chart.to_str().unwrap()]);
    assert!(said.contains("0 chart(s) failed"), "{said}");
}

#[test]
fn chart_values_reach_the_objects() {
    let Some([helm]) = tools::require(["helm"]) else { return };
    let chart = deploy().join("helm/coracle");
    let values = serde_json::json!({
        "image": "registry.example/coracle:2", "namespace": "vms", "crds": {"enabled": false},
        "operator": {"replicas": 3, "nodeSelector": {"pool": "system"}},
        "node": {"tolerations": [{"key": "vms", "operator": "Exists"}], "resources": {"limits": {"memory": "1Gi"}}},
        "market": {"enabled": true},
    });
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), values.to_string()).unwrap();
    let values = file.path().to_str().unwrap();
    let text = run(&helm, &["template", "c", chart.to_str().unwrap(), "--kube-version=1.36.0", "-f", values]);
    let all = objects(&text);
    assert!(!all.keys().any(|name| name.contains("CustomResourceDefinition")));
    assert!(!text.contains("coracle-system"), "{text}");
    assert!(!text.contains("localhost/coracle"), "{text}");
    let operator = &all[r#""Deployment" "vms"/"coracle-operator""#]["spec"];
    assert_eq!(operator["replicas"], 3);
    let pod = &operator["template"]["spec"];
    assert_eq!(pod["nodeSelector"]["pool"], "system");
    assert_eq!(pod["containers"][0]["image"], "registry.example/coracle:2");
    let serving = "--serving-certificate=coracle-market-tls=coracle-market.vms.svc";
    assert!(pod["containers"][0]["args"].as_array().unwrap().contains(&serving.into()));
    let node = &all[r#""DaemonSet" "vms"/"coracle-node""#]["spec"]["template"]["spec"];
    assert_eq!(node["tolerations"].as_array().unwrap().len(), 1);
    assert_eq!(node["containers"][0]["resources"]["limits"]["memory"], "1Gi");
    let before_removal = &all[r#""Job" "vms"/"coracle-uninstall""#];
    assert_eq!(before_removal["metadata"]["annotations"]["helm.sh/hook"], "pre-delete");
    let args = &before_removal["spec"]["template"]["spec"]["containers"][0]["args"];
    let args = args.as_array().unwrap();
    assert!(
        args.contains(&"--namespace=vms".into()) && !args.contains(&"--delete-objects".into()),
        "{args:?}"
    );
    let policy = &all[r#""ValidatingAdmissionPolicy" null/"coracle-node-leases""#];
    assert!(policy.to_string().contains("system:serviceaccount:vms:coracle-node"));
}
