//! Admission of pods that run as VMs, of their Deployments, and of sets: sticky scheduling and validation.
//!
//! ```text
//!  API server ──▶ review ─┬─▶ mutate ──▶ placement (pure) ◀── nodes, pods, reservations (ConfigMap)
//!                         └─▶ validate (pure)
//! ```
//! A pod receives the name of its VM and a node. The pods of a Deployment receive the slots 0, 1, …, and a pod that replaces
//! another pod receives its slot, VM name and node. When the mutation fails, the pod is admitted unchanged.

mod configuration;
mod mutate;
mod placement;
mod reaper;
mod review;
mod store;
mod validate;

use std::{fmt, time::Duration};

use coracle_reconcile::Clock;
use kube::Client;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

pub use configuration::configurations;
pub use reaper::reap;
pub use review::router;

/// Behaviour of the webhook.
#[derive(Clone, Debug)]
pub struct WebhookSettings {
    /// Namespace of the reservation ConfigMaps.
    pub namespace: String,
    /// Assign a slot and a node to pods.
    pub sticky: bool,
    /// Rules of later releases of the original: only sets create pods, and each pod has at most one hibernation, with the name
    /// of the pod.
    pub strict: bool,
    /// Treat every pod with the toleration as a VM, even when no annotation names a VM. Otherwise such pods run containers, and
    /// are left alone.
    pub every_pod: bool,
    /// Set the image annotation of a pod that has none to the image of its first container.
    pub image_annotation: bool,
    /// Users that may create pods of sets when `strict` is set.
    pub pod_creators: Vec<String>,
    /// Interval of the reaper.
    pub reaper_interval: Duration,
    /// Time that a reservation is kept after its pod is gone.
    pub reaper_grace: Duration,
}

impl Default for WebhookSettings {
    fn default() -> Self {
        Self {
            namespace: coracle_api::cocoon::keys::SYSTEM_NAMESPACE.into(),
            sticky: true,
            strict: false,
            every_pod: false,
            image_annotation: false,
            pod_creators: vec!["system:serviceaccount:cocoon-system:cocoon-operator".into()],
            reaper_interval: Duration::from_secs(300),
            reaper_grace: Duration::from_secs(1800),
        }
    }
}

/// Handler of admission reviews. Clones share the state.
#[derive(Clone)]
pub struct Webhook {
    pub(crate) client: Client,
    pub(crate) settings: WebhookSettings,
    pub(crate) metrics: WebhookMetrics,
    pub(crate) clock: Clock,
}

impl fmt::Debug for Webhook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Webhook").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Webhook {
    /// Creates a webhook that reads objects and keeps reservations by `client`.
    #[must_use]
    pub fn new(client: Client, settings: WebhookSettings, metrics: WebhookMetrics, clock: Clock) -> Self {
        Self { client, settings, metrics, clock }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Admission {
    handler: &'static str,
    decision: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Pool {
    pool: String,
}

/// Metrics of the webhook, under the names of the original. Clones write to the same metrics.
#[derive(Clone, Debug, Default)]
pub struct WebhookMetrics {
    admissions: Family<Admission, Counter>,
    reservations: Family<Pool, Counter>,
    releases: Family<Pool, Counter>,
}

impl WebhookMetrics {
    /// Creates the metrics and registers them. Call once per process.
    pub fn register(registry: &mut Registry) -> Self {
        let m = Self::default();
        registry.register("cocoon_webhook_admission", "Reviews that were answered", m.admissions.clone());
        let help = "Slots that were reserved for pods";
        registry.register("cocoon_webhook_affinity_reservations", help, m.reservations.clone());
        let help = "Reservations that were freed because their pods are gone";
        registry.register("cocoon_webhook_affinity_releases", help, m.releases.clone());
        m
    }

    /// Writes every series once, for the metrics reference.
    pub fn touch(&self) {
        self.count_admission("validate_cocoonset", "deny");
        self.count_reservation("default");
        self.count_release("default");
    }

    pub(crate) fn count_admission(&self, handler: &'static str, decision: &'static str) {
        self.admissions.get_or_create(&Admission { handler, decision }).inc();
    }

    pub(crate) fn count_reservation(&self, pool: &str) {
        self.reservations.get_or_create(&Pool { pool: pool.to_owned() }).inc();
    }

    pub(crate) fn count_release(&self, pool: &str) {
        self.releases.get_or_create(&Pool { pool: pool.to_owned() }).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_names_are_those_of_the_original() {
        let mut registry = Registry::default();
        let metrics = WebhookMetrics::register(&mut registry);
        metrics.touch();
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            r#"cocoon_webhook_admission_total{handler="validate_cocoonset",decision="deny"} 1"#,
            r#"cocoon_webhook_affinity_reservations_total{pool="default"} 1"#,
            r#"cocoon_webhook_affinity_releases_total{pool="default"} 1"#,
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
