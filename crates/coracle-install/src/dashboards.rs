//! Grafana dashboards, each a list of panels with their queries.

use serde_json::{Value, json};

/// Panel: title, Grafana unit, and queries with their legends.
type Panel = (&'static str, &'static str, &'static [(&'static str, &'static str)]);

const NODE: &[Panel] = &[
    ("Daemons that answer", "short", &[("up{job=~\".*coracle-node\"}", "{{instance}}")]),
    ("VMs that run", "short", &[("firecracker_vms_running", "{{instance}}")]),
    (
        "Calls by method",
        "reqps",
        &[("sum by (method) (rate(firecracker_grpc_requests_total[$__rate_interval]))", "{{method}}")],
    ),
    (
        "Calls that fail",
        "reqps",
        &[(
            "sum by (instance, method) (rate(firecracker_grpc_requests_total{status=\"error\"}[$__rate_interval]))",
            "{{instance}} {{method}}",
        )],
    ),
    (
        "Duration of operations, p95",
        "s",
        &[(
            "histogram_quantile(0.95, sum by (operation, le) (rate(firecracker_vm_operation_duration_seconds_bucket[$__rate_interval])))",
            "{{operation}}",
        )],
    ),
    (
        "VMs created",
        "short",
        &[("sum by (instance) (increase(firecracker_vms_created_total[1h]))", "{{instance}}")],
    ),
    (
        "Pods that are VMs: operations by result",
        "ops",
        &[(
            "sum by (op, result) (rate(vk_cocoon_pod_lifecycle_total[$__rate_interval]))",
            "{{op}} {{result}}",
        )],
    ),
    (
        "States saved, pushed and pulled",
        "ops",
        &[
            ("sum by (result) (rate(vk_cocoon_snapshot_save_total[$__rate_interval]))", "saved {{result}}"),
            ("sum by (result) (rate(vk_cocoon_snapshot_push_total[$__rate_interval]))", "pushed {{result}}"),
            ("sum by (result) (rate(vk_cocoon_snapshot_pull_total[$__rate_interval]))", "pulled {{result}}"),
        ],
    ),
];

const VMS: &[Panel] = &[
    ("VMs by phase", "short", &[("sum by (phase) (coracle_mikromvms)", "{{phase}}")]),
    ("VMs by namespace", "short", &[("sum by (namespace) (coracle_mikromvms)", "{{namespace}}")]),
    (
        "VMs that failed, or that no node takes",
        "short",
        &[
            ("sum by (namespace) (coracle_mikromvms{phase=\"Failed\"})", "{{namespace}} failed"),
            ("sum by (namespace) (coracle_mikromvms_unschedulable)", "{{namespace}} unschedulable"),
        ],
    ),
    (
        "Restarts in the last hour",
        "short",
        &[("sum by (namespace) (delta(coracle_mikromvm_restarts[1h]))", "{{namespace}}")],
    ),
    (
        "Calls to nodes, p95",
        "s",
        &[(
            "histogram_quantile(0.95, sum by (operation, le) (rate(coracle_agent_call_duration_seconds_bucket[$__rate_interval])))",
            "{{operation}}",
        )],
    ),
    (
        "Calls to nodes that fail",
        "reqps",
        &[(
            "sum by (operation) (rate(coracle_agent_call_duration_seconds_count{result=\"error\"}[$__rate_interval]))",
            "{{operation}}",
        )],
    ),
];

const OPERATOR: &[Panel] = &[
    ("Leaders", "short", &[("sum by (controller) (coracle_controller_leading)", "{{controller}}")]),
    (
        "Reconciles",
        "ops",
        &[(
            "sum by (controller) (rate(coracle_controller_reconcile_total[$__rate_interval]))",
            "{{controller}}",
        )],
    ),
    (
        "Reconciles that fail",
        "ops",
        &[(
            "sum by (controller) (rate(coracle_controller_reconcile_errors_total[$__rate_interval]))",
            "{{controller}}",
        )],
    ),
    (
        "Duration of reconciles, p99",
        "s",
        &[(
            "histogram_quantile(0.99, sum by (controller, le) (rate(coracle_controller_reconcile_duration_seconds_bucket[$__rate_interval])))",
            "{{controller}}",
        )],
    ),
    (
        "Triggers that wait",
        "short",
        &[("max by (controller) (coracle_controller_queue_depth)", "{{controller}}")],
    ),
    (
        "Time since the last success",
        "s",
        &[(
            "time() - max by (controller) (coracle_controller_last_success_timestamp_seconds)",
            "{{controller}}",
        )],
    ),
];

const REGISTRY: &[Panel] = &[
    (
        "Requests by route",
        "reqps",
        &[("sum by (route) (rate(coracle_registry_requests_total[$__rate_interval]))", "{{route}}")],
    ),
    (
        "Answers by status",
        "reqps",
        &[("sum by (status) (rate(coracle_registry_requests_total[$__rate_interval]))", "{{status}}")],
    ),
    (
        "Time to the head of the answer, p99",
        "s",
        &[(
            "histogram_quantile(0.99, sum by (route, le) (rate(coracle_registry_request_duration_seconds_bucket[$__rate_interval])))",
            "{{route}}",
        )],
    ),
    (
        "Bytes",
        "Bps",
        &[
            ("sum(rate(coracle_registry_uploaded_bytes_total[$__rate_interval]))", "uploaded"),
            ("sum(rate(coracle_registry_downloaded_bytes_total[$__rate_interval]))", "downloaded"),
            ("sum(rate(coracle_registry_swept_bytes_total[$__rate_interval]))", "swept"),
        ],
    ),
    ("Connections", "short", &[("sum(coracle_registry_connections)", "open")]),
];

/// Returns the files of the dashboards: path below `deploy/` and JSON.
pub(crate) fn files() -> Vec<(String, String)> {
    let all = [
        ("node", "Nodes", NODE),
        ("vms", "MikromVMs", VMS),
        ("operator", "Operators", OPERATOR),
        ("registry", "Registry", REGISTRY),
    ];
    all.into_iter()
        .map(|(name, title, panels)| {
            let text = serde_json::to_string_pretty(&dashboard(name, title, panels)).unwrap_or_default();
            (format!("dashboards/{name}.json"), text + "\n")
        })
        .collect()
}

fn dashboard(name: &str, title: &str, panels: &[Panel]) -> Value {
    let panels: Vec<_> = panels.iter().enumerate().map(|(index, panel)| self::panel(index, panel)).collect();
    json!({
        "title": format!("Coracle: {title}"), "uid": format!("coracle-{name}"), "schemaVersion": 39,
        "editable": true, "refresh": "30s", "time": {"from": "now-6h", "to": "now"}, "tags": ["coracle"],
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": panels,
    })
}

/// Returns a panel. Each row has two panels.
fn panel(index: usize, (title, unit, queries): &Panel) -> Value {
    let source = json!({"type": "prometheus", "uid": "${datasource}"});
    let target = |(at, (expr, legend)): (usize, &(&str, &str))| {
        let name = char::from(b'A' + u8::try_from(at).unwrap_or_default()).to_string();
        json!({"refId": name, "datasource": source, "expr": expr, "legendFormat": legend})
    };
    json!({
        "id": index + 1, "title": title, "type": "timeseries", "datasource": source,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (index % 2), "y": 8 * (index / 2)},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": queries.iter().enumerate().map(target).collect::<Vec<_>>(),
    })
}
