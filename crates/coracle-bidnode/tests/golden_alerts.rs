//! The alerts use existing metrics and say what to do.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::path::Path;

#[test]
fn alert_metrics_are_in_the_reference() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let reference = std::fs::read_to_string(root.join("docs/reference/metrics.md")).unwrap();
    let rules = std::fs::read_to_string(root.join("deploy/alerts/bidnode.yaml")).unwrap();
    let rules: serde_json::Value = serde_saphyr::from_str(&rules).unwrap();
    let groups = rules["groups"].as_array().unwrap().iter();
    let alerts: Vec<_> = groups.flat_map(|group| group["rules"].as_array().unwrap()).collect();
    for alert in &alerts {
        let name = alert["alert"].as_str().unwrap();
        let words = alert["expr"].as_str().unwrap().split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let metrics: Vec<_> =
            words.filter(|w| ["bidnode_", "coracle_"].iter().any(|p| w.starts_with(p))).collect();
        assert!(!metrics.is_empty(), "{name} asks for nothing");
        for metric in metrics {
            let metric = metric.strip_suffix("_bucket").unwrap_or(metric);
            assert!(reference.contains(&format!("| `{metric}` |")), "{metric} of {name}");
        }
        assert!(matches!(alert["labels"]["severity"].as_str(), Some("warning" | "critical")), "{name}");
        for text in ["summary", "action"] {
            assert!(alert["annotations"][text].as_str().is_some_and(|t| !t.is_empty()), "{text} of {name}");
        }
    }
    // Alerts that the contract requires: a replay with another result, and price setters that are cancelled.
    for needed in ["CoracleMarketReplayMismatch", "CoracleMarketSettersCancelled"] {
        assert!(alerts.iter().any(|alert| alert["alert"] == needed), "{needed}");
    }
}
