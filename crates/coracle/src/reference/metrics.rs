//! Reference of the metrics, from the registries of the daemons.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use coracle_frontends::{AgentMetrics, AgentOptions, AgentService};
use coracle_host::{Host, HostConfig};
use coracle_image::{Store, StoreOptions};
use coracle_net::UserNetwork;
use coracle_proto::firecracker::HealthCheckRequest;
use coracle_proto::firecracker::firecracker_agent_server::FirecrackerAgent;
use coracle_qemu::{QemuConfig, QemuDriver};
use coracle_reconcile::{ControllerMetrics, ReconcileResult};
use coracle_types::Clock;
use miette::IntoDiagnostic;
use prometheus_client::registry::Registry;

use super::GENERATED;

/// Returns the whole page: writes every metric once, then reads the scrape.
pub(super) async fn page() -> miette::Result<String> {
    let mut text =
        format!("{GENERATED}\n# Metrics\n\nServed at `/metrics` of `--admin-listen`, as OpenMetrics text.\n");
    for (title, registry) in [
        ("Node: `coracle node`", node().await?),
        ("Operator: `coracle operator`", operator()),
        ("Registry: `coracle registry serve`", images()),
        ("Market: `coracle market serve`", market()),
    ] {
        let mut scrape = String::new();
        prometheus_client::encoding::text::encode(&mut scrape, &registry).into_diagnostic()?;
        let _strings_take_everything = write!(text, "\n## {title}\n\n{}", table(&scrape));
    }
    Ok(text)
}

/// Returns the registry of a node without VMs, after one call.
async fn node() -> miette::Result<Registry> {
    let dir = std::env::temp_dir().join(format!("coracle-reference-{}", std::process::id()));
    std::fs::create_dir_all(&dir).into_diagnostic()?;
    let images = Store::open(dir.join("images"), StoreOptions::default()).into_diagnostic()?;
    let mut config = HostConfig::new(dir.clone(), "/nowhere".into(), "/nowhere".into());
    config.run_dir = dir.join("run");
    let driver = Arc::new(QemuDriver::new(QemuConfig { program: "/nowhere".into(), kvm: None }));
    let network = Arc::new(UserNetwork);
    let host =
        Host::open(config, driver, network, Arc::new(images), Clock::system()).await.into_diagnostic()?;
    let mut registry = Registry::default();
    coracle_vm_pod::metrics::Metrics::registered(&mut registry);
    let metrics = AgentMetrics::new(&mut registry, &host);
    let service = AgentService::new(host.clone(), AgentOptions::default(), metrics);
    service.health_check(tonic::Request::new(HealthCheckRequest {})).await.into_diagnostic()?;
    host.shutdown().await;
    std::fs::remove_dir_all(&dir).into_diagnostic()?;
    Ok(registry)
}

/// Returns the registry of an operator, after one reconcile.
fn operator() -> Registry {
    let mut registry = Registry::default();
    let metrics = ControllerMetrics::register(&mut registry);
    let name = coracle_microvm::CONTROLLER;
    drop(metrics.begin(name));
    for outcome in [ReconcileResult::Ok, ReconcileResult::Error] {
        metrics.ended(name, outcome, Duration::ZERO, jiff::Timestamp::UNIX_EPOCH);
    }
    metrics.queue_depth(name, 0);
    metrics.leads(name, false);
    metrics.record_call("GetVM", ReconcileResult::Ok, Duration::ZERO);
    coracle_vsphere::VsphereMetrics::register(&mut registry).touch();
    coracle_agentpool::PoolMetrics::register(&mut registry).touch();
    coracle_bidnode::BidMetrics::register(&mut registry).touch();
    coracle_cocoon::CocoonMetrics::register(&mut registry).touch();
    coracle_cocoon::WebhookMetrics::register(&mut registry).touch();
    let mut vm = coracle_api::MikromVM::new("reference", coracle_api::MikromVMSpec::default());
    vm.metadata.namespace = Some("reference".to_owned());
    let vm = Arc::new(vm);
    crate::daemon::vm_metrics::register(&mut registry, move || vec![vm.clone()]);
    registry
}

/// Returns the registry of an image registry, after one request.
fn images() -> Registry {
    let mut registry = Registry::default();
    coracle_registry::Metrics::register(&mut registry).answered("base", 200, Duration::ZERO);
    registry
}

/// Returns the registry of a market, with every metric touched once.
fn market() -> Registry {
    let mut registry = Registry::default();
    coracle_market::register_metrics(&mut registry);
    registry
}

/// Description of one metric in a scrape.
#[derive(Default)]
struct Metric {
    kind: String,
    help: String,
    labels: BTreeSet<String>,
}

/// Converts a scrape to a table of its metrics. Pure.
fn table(scrape: &str) -> String {
    let mut metrics: BTreeMap<String, Metric> = BTreeMap::new();
    for line in scrape.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("HELP"), Some(name), Some(help)) => {
                metrics.entry(name.to_owned()).or_default().help = help.trim_end_matches('.').to_owned();
            }
            (Some("#"), Some("TYPE"), Some(name), Some(kind)) => {
                metrics.entry(name.to_owned()).or_default().kind = kind.to_owned();
            }
            (Some(first), ..) if first != "#" => note_labels(line, &mut metrics),
            _ => {}
        }
    }
    let mut text = "| metric | type | labels | meaning |\n|---|---|---|---|\n".to_owned();
    for (name, metric) in metrics {
        let name = if metric.kind == "counter" { format!("{name}_total") } else { name };
        let labels: Vec<_> = metric.labels.iter().map(|l| format!("`{l}`")).collect();
        let (kind, labels) = (&metric.kind, labels.join(", "));
        let _strings_take_everything = writeln!(text, "| `{name}` | {kind} | {labels} | {} |", metric.help);
    }
    text
}

/// Collects the labels of a line: `name_count{a="x",b="y"} 1` has the labels a and b.
fn note_labels(line: &str, metrics: &mut BTreeMap<String, Metric>) {
    let Some((name, rest)) = line.split_once('{') else { return };
    let Some((_, metric)) = metrics
        .iter_mut()
        .filter(|(known, _)| name.starts_with(known.as_str()))
        .max_by_key(|(known, _)| known.len())
    else {
        return;
    };
    let labels = rest.split('}').next().unwrap_or_default().split(',');
    let names = labels.filter_map(|l| l.split_once('=')).map(|(name, _)| name.to_owned());
    metric.labels.extend(names.filter(|name| name != "le"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn metrics_page_lists_all_metric_kinds_with_labels() {
        let page = page().await.unwrap();
        for line in [
            "| `firecracker_vms_created_total` | counter |  | VMs created |",
            "| `firecracker_vms_running` | gauge |  | VMs that run |",
            "| `firecracker_vm_operation_duration_seconds` | histogram | `operation` |",
            "| `firecracker_grpc_requests_total` | counter | `method`, `status` |",
            "| `coracle_controller_reconcile_total` | counter | `controller` | Reconciles that ended |",
            "| `coracle_agent_call_duration_seconds` | histogram | `operation`, `result` |",
        ] {
            assert!(page.contains(line), "{line} is not in\n{page}");
        }
    }
}
