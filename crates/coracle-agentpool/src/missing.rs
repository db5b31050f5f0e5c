//! Detects that the cluster does not serve the kinds of other projects, or that the operator may not list them. Without those
//! kinds nothing can be planned, and a condition of each pool reports that.

use std::convert::Infallible;

use futures_util::FutureExt;
use tracing::warn;

use crate::{
    Context,
    status::{new_condition, report_pool},
    watches::Caches,
};

/// Repeats until dropped: while objects of a kind have never been listed, reports this once in the log, in the condition
/// `Ready` of every pool, and in [`crate::Config::blocked`]. Cancel-safe.
pub(crate) async fn report(cx: &Context) -> Infallible {
    let mut logged = Vec::new();
    loop {
        tokio::time::sleep(cx.config.times.unlisted).await;
        let unlisted = unlisted(&cx.caches);
        if unlisted != logged {
            warn!(kinds = unlisted.join(","), "kinds cannot be listed, pools wait for them");
            logged.clone_from(&unlisted);
        }
        cx.config.blocked.send_replace(!unlisted.is_empty());
        if unlisted.is_empty() {
            continue;
        }
        let condition = new_condition("Ready", false, "KindsUnavailable", message(&unlisted));
        for pool in cx.caches.pools.state() {
            let status = pool.status.clone().unwrap_or_default();
            if let Err(error) = report_pool(cx, &pool, status, std::slice::from_ref(&condition)).await {
                warn!(%error, "write condition of pool failed");
            }
        }
    }
}

/// Kinds of other projects whose objects have never been listed.
fn unlisted(caches: &Caches) -> Vec<&'static str> {
    let kinds = [
        ("AgentMachine", caches.agent_machines.wait_until_ready().now_or_never().is_some()),
        ("Machine", caches.machines.wait_until_ready().now_or_never().is_some()),
        ("Agent", caches.agents.wait_until_ready().now_or_never().is_some()),
        ("InfraEnv", caches.infra_envs.wait_until_ready().now_or_never().is_some()),
    ];
    kinds.into_iter().filter(|(_, is_listed)| !is_listed).map(|(kind, _)| kind).collect()
}

/// Message about missing kinds. Pure.
fn message(kinds: &[&str]) -> String {
    format!(
        "cannot list {}: install the custom resources of Cluster API and of the Agent provider, and let the operator \
         list them",
        kinds.join(", ")
    )
}
