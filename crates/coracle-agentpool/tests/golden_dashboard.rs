//! The dashboards use existing metrics.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::path::Path;

#[test]
fn dashboard_metrics_are_in_the_reference() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let reference = std::fs::read_to_string(root.join("docs/reference/metrics.md")).unwrap();
    for (file, least) in [("agentpool.json", 14), ("bidnode.json", 20)] {
        let text = std::fs::read_to_string(root.join("deploy/dashboards").join(file)).unwrap();
        let dashboard: serde_json::Value = serde_json::from_str(&text).unwrap();
        let mut asked = 0;
        for panel in dashboard["panels"].as_array().unwrap() {
            for target in panel["targets"].as_array().unwrap() {
                let expression = target["expr"].as_str().unwrap();
                let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                let prefixes = ["agent_forge_", "bidnode_", "coracle_", "controller_runtime_", "workqueue_"];
                for metric in words.filter(|word| prefixes.iter().any(|p| word.starts_with(p))) {
                    let name = metric.strip_suffix("_bucket").unwrap_or(metric);
                    assert!(reference.contains(&format!("| `{name}` |")), "{name} of {}", panel["title"]);
                    asked += 1;
                }
            }
        }
        assert!(asked >= least, "{file}: {asked}");
    }
}
