//! Metrics of MikromVMs, counted from the operator's cached objects at each scrape.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use coracle_api::MikromVM;
use coracle_api::{Phase, reason};
use kube::ResourceExt as _;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

/// Source of the objects.
type Objects = dyn Fn() -> Vec<Arc<MikromVM>> + Send + Sync;

/// Gauges by namespace, counted at each scrape.
struct VmMetrics {
    objects: Box<Objects>,
}

impl fmt::Debug for VmMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VmMetrics").finish_non_exhaustive()
    }
}

/// Registers the gauges.
pub(crate) fn register(
    registry: &mut Registry,
    objects: impl Fn() -> Vec<Arc<MikromVM>> + Send + Sync + 'static,
) {
    registry.register_collector(Box::new(VmMetrics { objects: Box::new(objects) }));
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
struct OfPhase {
    namespace: String,
    phase: String,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
struct OfNamespace {
    namespace: String,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    phases: BTreeMap<OfPhase, i64>,
    unschedulable: BTreeMap<OfNamespace, i64>,
    restarts: BTreeMap<OfNamespace, i64>,
}

/// Counts VMs by namespace and state. Pure.
fn count<'a>(objects: impl Iterator<Item = &'a MikromVM>) -> Counts {
    let mut counts = Counts::default();
    for vm in objects {
        let namespace = vm.namespace().unwrap_or_default();
        let status = vm.status.as_ref();
        let phase = status.and_then(|status| status.phase).unwrap_or(Phase::Pending);
        let of_phase = OfPhase { namespace: namespace.clone(), phase: format!("{phase:?}") };
        *counts.phases.entry(of_phase).or_default() += 1;
        let conditions = status.iter().flat_map(|status| &status.conditions);
        let is_unschedulable = conditions.into_iter().any(|is| is.reason == reason::UNSCHEDULABLE);
        let of = OfNamespace { namespace };
        *counts.unschedulable.entry(of.clone()).or_default() += i64::from(is_unschedulable);
        *counts.restarts.entry(of).or_default() += status.map_or(0, |status| i64::from(status.restarts));
    }
    counts
}

impl Collector for VmMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let objects = (self.objects)();
        let counts = count(objects.iter().map(AsRef::as_ref));
        gauges(&mut encoder, "coracle_mikromvms", "MikromVMs by phase", &counts.phases)?;
        let help = "MikromVMs that no node takes";
        gauges(&mut encoder, "coracle_mikromvms_unschedulable", help, &counts.unschedulable)?;
        let help = "Restarts of the MikromVMs that there are, together";
        gauges(&mut encoder, "coracle_mikromvm_restarts", help, &counts.restarts)
    }
}

fn gauges<L: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: &BTreeMap<L, i64>,
) -> Result<(), fmt::Error> {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in values {
        ConstGauge::new(*value).encode(family.encode_family(labels)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vm(namespace: &str, status: serde_json::Value) -> Arc<MikromVM> {
        let object = json!({
            "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM",
            "metadata": {"name": "a", "namespace": namespace},
            "spec": {"image": "i", "vcpuCount": 1, "memoryMB": 128}, "status": status,
        });
        Arc::new(serde_json::from_value(object).unwrap())
    }

    #[test]
    fn scrape_counts_phases_restarts_and_unschedulable() {
        let condition = json!({"type": "Ready", "status": "False", "reason": "Unschedulable", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let all = vec![
            vm("a", json!({"phase": "Running", "restarts": 2})),
            vm("a", json!({"phase": "Running", "restarts": 1})),
            vm("a", json!({"phase": "Pending", "conditions": [condition.clone(), condition]})),
            vm("b", json!(null)),
        ];
        let mut registry = Registry::default();
        register(&mut registry, move || all.clone());
        let mut scrape = String::new();
        prometheus_client::encoding::text::encode(&mut scrape, &registry).unwrap();
        for line in [
            r#"coracle_mikromvms{namespace="a",phase="Running"} 2"#,
            r#"coracle_mikromvms{namespace="a",phase="Pending"} 1"#,
            r#"coracle_mikromvms{namespace="b",phase="Pending"} 1"#,
            r#"coracle_mikromvms_unschedulable{namespace="a"} 1"#,
            r#"coracle_mikromvms_unschedulable{namespace="b"} 0"#,
            r#"coracle_mikromvm_restarts{namespace="a"} 3"#,
        ] {
            assert!(scrape.lines().any(|known| known == line), "{line} is not in\n{scrape}");
        }
    }
}
