//! Controller of certificate signing requests of nodes.

use std::sync::Arc;
use std::time::Duration;

use coracle_api::keys::certificates::NODE_SIGNER;
use coracle_reconcile::{
    Action, Backoff, Backoffs, Group, Reconciler, Runner, WallTime as _, WorkQueue, follow, watch_config,
};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::api::{Patch, PatchParams};
use kube::runtime::reflector::{ObjectRef, store::Writer};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::authority::api_error;
use crate::{AuthorityError, CONTROLLER, Config, Decision, NODES, authority, decide};

/// Requests processed concurrently.
const WORKERS: u16 = 4;
/// Delays after failures.
const BACKOFF: Backoff = Backoff { base: Duration::from_millis(500), max: Duration::from_secs(60) };
const STEADY: u32 = 2;

pub(crate) async fn run(
    client: &Client,
    config: &Config,
    stop: &CancellationToken,
) -> Result<(), AuthorityError> {
    let group = Group {
        name: CONTROLLER,
        election: config.election.clone(),
        client: client.clone(),
        clock: config.clock.clone(),
        metrics: config.metrics.clone(),
    };
    group.run_with(config, stop.clone(), work).await
}

async fn work(client: Client, config: Config, stop: CancellationToken) -> Result<(), AuthorityError> {
    let queue = WorkQueue::<CertificateSigningRequest>::default();
    let writer = Writer::new(());
    let objects = writer.as_reader();
    let runner = Runner {
        name: CONTROLLER,
        workers: WORKERS,
        debounce: Duration::ZERO,
        backoffs: Arc::new(Backoffs::steady_for(STEADY, BACKOFF)),
        metrics: config.metrics.clone(),
        clock: config.clock.clone(),
    };
    let requests: Api<CertificateSigningRequest> = Api::all(client.clone());
    let ours = watch_config().fields(&format!("spec.signerName={NODE_SIGNER}"));
    let signer = Arc::new(Signer { client, config });
    let seen = queue.clone();
    tokio::select! {
        () = runner.run(signer, objects, queue, stop) => {}
        () = follow(requests, ours, writer, |change| seen.add(ObjectRef::from_obj(change.object()))) => {}
    }
    Ok(())
}

struct Signer {
    client: Client,
    config: Config,
}

impl Reconciler for Signer {
    type Object = CertificateSigningRequest;
    type Error = AuthorityError;

    async fn reconcile(&self, cached: Arc<CertificateSigningRequest>) -> Result<Action, AuthorityError> {
        let name = cached.name_any();
        match decide(&cached, &self.config.namespace) {
            Decision::Leave => {}
            Decision::Approve => self.approval(&cached, "Approved", "a node asks for itself").await?,
            Decision::Deny { why } => {
                tracing::warn!(request = name, why, "certificate denied");
                self.approval(&cached, "Denied", &why).await?;
            }
            Decision::Fail { why } => {
                tracing::warn!(request = name, why, "approved request cannot be signed");
                let status = json!({"status": {"conditions": self.with_condition(&cached, "Failed", &why)}});
                self.patch("status", &cached, status).await?;
            }
            Decision::Sign { request, holder } => {
                let (config, now) = (&self.config, self.config.clock.timestamp());
                let authority =
                    authority(&self.client, &config.namespace, NODES, now, config.authority_life).await?;
                let pem = authority.sign(&request, &holder, now, config.certificate_life)?;
                let certificate = k8s_openapi::ByteString(pem.into_bytes());
                self.patch("status", &cached, json!({"status": {"certificate": certificate}})).await?;
                tracing::info!(request = name, node = holder.names.join(","), "certificate signed");
            }
        }
        Ok(Action::await_change())
    }

    /// True for conflicts: when two replicas decide concurrently, one of them meets the other's change.
    fn is_expected(&self, error: &AuthorityError) -> bool {
        matches!(error, AuthorityError::Api { source, .. } if matches!(&**source, kube::Error::Api(status) if status.code == 409))
    }
}

impl Signer {
    async fn approval(
        &self,
        object: &CertificateSigningRequest,
        kind: &str,
        message: &str,
    ) -> Result<(), AuthorityError> {
        let status = json!({"status": {"conditions": self.with_condition(object, kind, message)}});
        self.patch("approval", object, status).await
    }

    /// Returns the conditions with an additional one.
    fn with_condition(&self, object: &CertificateSigningRequest, kind: &str, message: &str) -> Vec<Value> {
        let known = object.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let mut conditions: Vec<Value> = known.map(|one| json!(one)).collect();
        let now = format!("{:.0}", self.config.clock.timestamp());
        conditions.push(json!({
            "type": kind, "status": "True", "reason": "CoracleAuthority", "message": message,
            "lastUpdateTime": now, "lastTransitionTime": now,
        }));
        conditions
    }

    /// Patches a subresource, under the resource version that the decision was based on.
    async fn patch(
        &self,
        subresource: &str,
        object: &CertificateSigningRequest,
        mut change: Value,
    ) -> Result<(), AuthorityError> {
        let requests: Api<CertificateSigningRequest> = Api::all(self.client.clone());
        change["metadata"] = json!({"resourceVersion": object.resource_version()});
        let (name, params) = (object.name_any(), PatchParams::default());
        requests
            .patch_subresource(subresource, &name, &params, &Patch::Merge(&change))
            .await
            .map_err(api_error("answer a certificate signing request"))?;
        Ok(())
    }
}
