//! Reconcile of one VM: observe, plan, execute.

use std::{sync::Arc, time::Duration};

use coracle_api::MikromVM;
use coracle_reconcile::{Action, ApiError, Reconciler, object};
use k8s_openapi::api::{core::v1::Service, discovery::v1::EndpointSlice};
use kube::ResourceExt as _;

use crate::{
    execute::execute,
    observe::Context,
    plan::{Observed, Step, plan},
};

/// Time until the next attempt when a name is taken.
const TRY_AGAIN: Duration = Duration::from_secs(60);

/// Controller of Services.
pub(crate) struct Services(pub(crate) Arc<Context>);

impl Reconciler for Services {
    type Object = MikromVM;
    type Error = ApiError;

    async fn reconcile(&self, vm: Arc<MikromVM>) -> Result<Action, ApiError> {
        let cx = &self.0;
        let (service, slice) = cx.cached(&vm);
        let cached = Observed { vm: &vm, service: service.as_deref(), slice: slice.as_deref() };
        if plan(&cached).is_empty() {
            return Ok(Action::await_change());
        }
        // Objects without this controller's label are in no cache, and writes are planned on reads from the API server.
        let (namespace, name) = (vm.namespace().unwrap_or_default(), vm.name_any());
        let Some(fresh) = object::read::<MikromVM>(&cx.client, &namespace, &name)
            .await?
            .filter(|fresh| fresh.uid() == vm.uid())
        else {
            return Ok(Action::await_change());
        };
        let service = object::read::<Service>(&cx.client, &namespace, &name).await?;
        let slice = object::read::<EndpointSlice>(&cx.client, &namespace, &name).await?;
        let observed = Observed { vm: &fresh, service: service.as_ref(), slice: slice.as_ref() };
        let steps = plan(&observed);
        for step in &steps {
            execute(cx, &fresh, step).await?;
        }
        let taken = steps.iter().any(|step| matches!(step, Step::ReportConflict(_)));
        Ok(if taken { Action::requeue(TRY_AGAIN) } else { Action::await_change() })
    }

    fn is_expected(&self, error: &ApiError) -> bool {
        error.is_conflict()
    }
}
