//! Orphans: VMs whose pods are gone.

use std::fmt;
use std::str::FromStr;

use coracle_host::{Host, HostError};
use coracle_record::Record;

use crate::execute::key;
use crate::metrics::Metrics;

/// Policy for a VM whose pod is gone and did not remove it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OrphanPolicy {
    /// Log and count the VM, and keep it.
    #[default]
    Alert,
    /// Remove the VM, unless it is hibernated: its saved state would be lost.
    Destroy,
    /// Keep the VM.
    Keep,
}

/// Invalid orphan policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid orphan policy {0:?}: not alert, destroy or keep")]
pub struct InvalidOrphanPolicy(String);

impl FromStr for OrphanPolicy {
    type Err = InvalidOrphanPolicy;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.to_ascii_lowercase().as_str() {
            "alert" => Ok(Self::Alert),
            "destroy" => Ok(Self::Destroy),
            "keep" => Ok(Self::Keep),
            _ => Err(InvalidOrphanPolicy(text.to_owned())),
        }
    }
}

impl fmt::Display for OrphanPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Alert => "alert",
            Self::Destroy => "destroy",
            Self::Keep => "keep",
        })
    }
}

/// Returns the uid of the pod that a VM was created for; `None`: the VM was not created for a pod of this kind.
#[must_use]
pub fn pod_uid(record: &Record) -> Option<&str> {
    record.metadata.get(key::UID).map(String::as_str)
}

/// Applies the policy to the VMs of pods that `is_known` does not contain. Idempotent.
///
/// # Errors
/// When a VM cannot be removed; the others are removed all the same.
pub async fn apply_policy(
    host: &Host,
    policy: OrphanPolicy,
    metrics: &Metrics,
    is_known: impl Fn(&str) -> bool,
) -> Result<(), HostError> {
    let views = host.list();
    let orphans = views.iter().filter(|view| pod_uid(&view.record).is_some_and(|uid| !is_known(uid)));
    let mut failed = None;
    for view in orphans {
        let record = &view.record;
        match policy {
            OrphanPolicy::Keep => {}
            OrphanPolicy::Destroy if record.saved.is_none() => {
                tracing::warn!(vm = %record.name, "remove a VM whose pod is gone");
                failed = host.delete(record.id.as_str(), true, None).await.err().or(failed);
            }
            OrphanPolicy::Alert | OrphanPolicy::Destroy => {
                metrics.count_orphans(1);
                let (ns, pod) = (&record.owner.namespace, &record.owner.name);
                tracing::warn!(vm = %record.name, ns, pod, "VM of a pod that is gone: it stays");
            }
        }
    }
    failed.map_or(Ok(()), Err)
}
