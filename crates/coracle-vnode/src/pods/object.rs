//! Object of a pod at the API server.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use coracle_pod::events::PodEvent;
use coracle_pod::host::PodId;
use coracle_pod::probe::{ProbeKind, ProbeOutcome};
use coracle_pod::runtime::{PodObject, RuntimeError};
use coracle_pod::volume::{Token, TokenRequest};
use coracle_types::VmId;
use coracle_vm_pod::task::VmPodObject;
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::{
    BoundObjectReference, TokenRequest as ApiTokenRequest, TokenRequestSpec,
};
use k8s_openapi::api::core::v1::{Pod, PodCondition, PodStatus, ServiceAccount};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::admission::Ledger;
use super::row::Row;
use crate::FIELD_MANAGER;
use crate::pod_events::Recorder;

/// Conditions that this node writes; all others stay unchanged.
const OWN_CONDITIONS: [&str; 6] = [
    "PodScheduled",
    "PodReadyToStartContainers",
    "Initialized",
    "ContainersReady",
    "Ready",
    "DisruptionTarget",
];

/// Pod object at the API server.
#[derive(Clone)]
pub(super) struct ApiPod {
    pub(super) client: Client,
    pub(super) pod: PodId,
    /// Service account whose tokens the pod gets.
    pub(super) account: String,
    pub(super) events: Recorder,
    pub(super) ledger: Ledger,
    pub(super) row: Arc<Row>,
}

/// Object of a pod whose container is a VM.
pub(super) struct ApiVmPod {
    pub(super) api: ApiPod,
    /// Directory of the VM's output.
    pub(super) logs: PathBuf,
    /// Id of the pod's VM, as last observed.
    pub(super) vm: watch::Sender<Option<VmId>>,
}

impl ApiPod {
    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.pod.namespace)
    }

    /// Changes annotations; `null` removes one. Idempotent. Has no effect if the object is gone.
    pub(super) async fn annotate(&self, changes: &impl Serialize) -> Result<(), RuntimeError> {
        let patch = json!({"metadata": {"uid": self.pod.uid, "annotations": changes}});
        let params = PatchParams::default();
        match self.pods().patch_metadata(&self.pod.name, &params, &Patch::Merge(patch)).await {
            Ok(_) => Ok(()),
            Err(error) if is_gone(&error) => Ok(()),
            Err(error) => Err(api_error("annotate the pod", &error)),
        }
    }
}

/// Converts an error of the API server.
fn api_error(operation: &str, error: &kube::Error) -> RuntimeError {
    let causes = std::iter::successors(std::error::Error::source(error), |error| error.source());
    let causes = causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"));
    RuntimeError::other(format!("cannot {operation}: {causes}"))
}

/// Returns whether the object is gone, or another one has its name.
fn is_gone(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => {
            status.code == 404 || status.code == 409 && status.message.contains("UID")
        }
        _ => false,
    }
}

/// Returns the status patch, without fields of other components, for the object with this uid only.
fn status_patch(pod: &PodId, status: &PodStatus) -> Value {
    let own = |one: &PodCondition| OWN_CONDITIONS.contains(&one.type_.as_str());
    let conditions = status.conditions.clone().map(|all| all.into_iter().filter(own).collect());
    let status =
        PodStatus { conditions, nominated_node_name: None, resource_claim_statuses: None, ..status.clone() };
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid},
        "status": status,
    })
}

#[async_trait]
impl PodObject for ApiPod {
    fn observe(&self, status: &Arc<PodStatus>) {
        self.row.set_status(status);
    }

    async fn report(&self, status: &PodStatus) -> Result<(), RuntimeError> {
        if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
            self.ledger.release(&self.pod.uid);
        }
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let patch = Patch::Apply(status_patch(&self.pod, status));
        match self.pods().patch_status(&self.pod.name, &params, &patch).await {
            Ok(_) => Ok(()),
            // The watch reports the deletion as well, and ends the pod.
            Err(error) if is_gone(&error) => Ok(()),
            Err(error) => Err(api_error("report the status of the pod", &error)),
        }
    }

    async fn remove(&self) -> Result<(), RuntimeError> {
        let preconditions = Some(Preconditions { uid: Some(self.pod.uid.clone()), resource_version: None });
        let params = DeleteParams { grace_period_seconds: Some(0), preconditions, ..DeleteParams::default() };
        match self.pods().delete(&self.pod.name, &params).await {
            Ok(_) => Ok(()),
            Err(error) if is_gone(&error) => Ok(()),
            Err(error) => Err(api_error("remove the pod", &error)),
        }
    }

    async fn request_token(&self, request: &TokenRequest, now: Timestamp) -> Result<Token, RuntimeError> {
        let operation = "request a token of the service account";
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &self.pod.namespace);
        let audiences = Some(request.audience.clone()).filter(|audience| !audience.is_empty());
        let asked = ApiTokenRequest {
            spec: Some(TokenRequestSpec {
                audiences: audiences.map(|audience| vec![audience]),
                expiration_seconds: i64::try_from(request.lifetime.as_secs()).ok(),
                bound_object_ref: Some(BoundObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Pod".to_owned()),
                    name: Some(self.pod.name.clone()),
                    uid: Some(self.pod.uid.clone()),
                }),
            }),
            ..ApiTokenRequest::default()
        };
        let issued = accounts.create_token_request(&self.account, &PostParams::default(), &asked).await;
        let issued = issued.map_err(|error| api_error(operation, &error))?.status;
        let found = issued.and_then(|issued| Some((issued.token?, issued.expiration_timestamp?.0)));
        let (value, expires_at) =
            found.ok_or_else(|| RuntimeError::other(format!("cannot {operation}: the answer has none")))?;
        Ok(Token { value, issued_at: now, expires_at })
    }

    fn event(&self, event: PodEvent) {
        self.events.take(&self.pod, event);
    }

    fn probed(&self, container: &str, kind: ProbeKind, outcome: &ProbeOutcome) {
        // Names and values as in the metric of the kubelet (`pkg/kubelet/prober`).
        let result = match outcome {
            ProbeOutcome::Success | ProbeOutcome::Warning(_) => "successful",
            ProbeOutcome::Failure(_) => "failed",
            ProbeOutcome::Unknown(_) => "unknown",
        };
        self.row.probed(container, kind.name(), result);
    }
}

#[async_trait]
impl VmPodObject for ApiVmPod {
    async fn annotate(&self, changes: BTreeMap<String, Option<String>>) -> Result<(), RuntimeError> {
        self.api.annotate(&changes).await
    }

    fn show(&self, vm: Option<&VmId>) {
        self.vm.send_if_modified(|shown| {
            let changed = shown.as_ref() != vm;
            *shown = vm.cloned();
            changed
        });
        self.api.row.update_from_vm(vm, &self.logs);
    }
}

#[async_trait]
impl PodObject for ApiVmPod {
    fn observe(&self, status: &Arc<PodStatus>) {
        self.api.observe(status);
    }

    async fn report(&self, status: &PodStatus) -> Result<(), RuntimeError> {
        self.api.report(status).await
    }

    async fn remove(&self) -> Result<(), RuntimeError> {
        self.api.remove().await
    }

    async fn request_token(&self, request: &TokenRequest, now: Timestamp) -> Result<Token, RuntimeError> {
        self.api.request_token(request, now).await
    }

    fn event(&self, event: PodEvent) {
        self.api.event(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_patch_leaves_alone_what_others_write() {
        let pod = PodId { namespace: "shop".into(), name: "web".into(), uid: "u".into() };
        let status = json!({
            "phase": "Running",
            "nominatedNodeName": "n",
            "conditions": [{"type": "Ready", "status": "True"}, {"type": "example.org/gate", "status": "True"}],
        });
        let patch = status_patch(&pod, &serde_json::from_value(status).unwrap());
        assert_eq!(patch["metadata"]["uid"], "u");
        assert_eq!(patch["status"]["phase"], "Running");
        assert_eq!(patch["status"]["conditions"].as_array().unwrap().len(), 1);
        assert_eq!(patch["status"]["nominatedNodeName"], Value::Null);
    }

    #[test]
    fn object_of_another_uid_counts_as_gone() {
        let error = |code: u16, message: &str| {
            let status = kube::core::Status::failure(message, "").with_code(code);
            kube::Error::Api(Box::new(status))
        };
        assert!(is_gone(&error(404, "not found")));
        assert!(is_gone(&error(409, "Precondition failed: UID in precondition: a, UID in object meta: b")));
        assert!(!is_gone(&error(409, "the object has been modified")));
        assert!(!is_gone(&error(500, "UID")));
    }
}
