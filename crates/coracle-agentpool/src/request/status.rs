//! Status of a VsphereAgent after its steps, and the time of the next reconcile.

use coracle_api::agentpool::VsphereAgent;
use coracle_reconcile::{Action, find};
use kube::ResourceExt as _;

use tracing::warn;

use super::Done;
use crate::{
    Context, Error,
    status::{new_condition, report_request},
};

/// Whether the last reconcile reported the VM as gone or failed.
pub(super) fn was_lost(request: &VsphereAgent) -> bool {
    let conditions = request.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
    let lost = ["VMNotFound", "VMStatusFailed", "VMOwnershipMismatch"];
    find(conditions, "Ready").is_some_and(|c| c.status == "False" && lost.contains(&c.reason.as_str()))
}

/// Reports a failure, and converts the result of an execution to the next reconcile.
pub(super) async fn settle(cx: &Context, request: &VsphereAgent, done: Done) -> Result<Action, Error> {
    let uid = request.uid().unwrap_or_default();
    match done {
        Done::Settled(again) => {
            cx.backoffs.reset(&uid);
            cx.capacity.reset(&uid);
            Ok(Action::requeue(again))
        }
        Done::Waits(again) => Ok(Action::requeue(again)),
        Done::Gone => Ok(Action::await_change()),
        Done::Failed(trouble) => {
            let wait = trouble.retry(cx, &uid);
            let (ns, name) = (request.namespace().unwrap_or_default(), request.name_any());
            warn!(
                ns,
                name,
                reason = trouble.reason,
                error = trouble.message,
                ?wait,
                "VsphereAgent has no VM as specified"
            );
            let ready = new_condition("Ready", false, trouble.reason, trouble.message);
            report_request(cx, request, request.status.as_ref().and_then(|s| s.vm.clone()), ready).await?;
            Ok(Action::requeue(wait))
        }
    }
}
