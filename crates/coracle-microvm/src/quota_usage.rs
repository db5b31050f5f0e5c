//! Writes the usage of the VMs of a namespace into the statuses of its ResourceQuotas, for `kubectl describe quota`.

use std::time::Duration;

use k8s_openapi::api::core::v1::ResourceQuota;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{context::Context, quota::StaleUsage};

/// Time during which changes are collected and written together.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// Delay before an amount that could not be written is written again.
const RETRY: Duration = Duration::from_secs(30);

/// Keeps the statuses up to date until `stop`. A status is written only when it differs.
pub(crate) async fn report(cx: &Context, stop: &CancellationToken) {
    let work = async {
        loop {
            sleep(DEBOUNCE).await;
            let mut failed = false;
            for usage in cx.fleet.stale_usage() {
                failed |= !write(cx, &usage).await;
            }
            tokio::select! {
                () = cx.fleet.usage_changed() => {}
                () = sleep(RETRY), if failed => {}
            }
        }
    };
    stop.run_until_cancelled(work).await;
}

/// Writes the amounts. A merge patch keeps the amounts of others, and the quota controller of Kubernetes keeps these amounts,
/// too.
async fn write(cx: &Context, usage: &StaleUsage) -> bool {
    let quotas: Api<ResourceQuota> = Api::namespaced(cx.client.clone(), &usage.namespace);
    let patch = Patch::Merge(json!({"status": {"used": usage.used}}));
    match quotas.patch_status(&usage.name, &PatchParams::default(), &patch).await {
        Ok(_) => true,
        // The quota was deleted: the watch reports it, too.
        Err(kube::Error::Api(status)) if status.is_not_found() => true,
        Err(error) => {
            let (namespace, name) = (&usage.namespace, &usage.name);
            warn!(
                namespace,
                name,
                error = &error as &dyn std::error::Error,
                "write the used amounts of a ResourceQuota"
            );
            false
        }
    }
}
