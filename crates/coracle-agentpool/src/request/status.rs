//! Status of a VsphereAgent after its steps, and the time of the next reconcile.

use coracle_api::agentpool::VsphereAgent;
use kube::{ResourceExt as _, runtime::controller::Action};

use super::Done;
use crate::{
    Context, Error,
    status::{report_request, say},
};

/// Reports a failure, and converts the result into the next reconcile.
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
            let ready = say("Ready", false, trouble.reason, trouble.message);
            report_request(cx, request, request.status.as_ref().and_then(|s| s.vm.clone()), ready).await?;
            Ok(Action::requeue(wait))
        }
    }
}
