//! HTTP paths of the webhook: reviews in, responses out.

use std::time::Duration;

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, State},
    routing::{get, post},
};
use coracle_api::{CocoonHibernation, CocoonSet};
use k8s_openapi::{ByteString, api::core::v1::Pod};
use kube::{Api, core::ApiResource, core::DynamicObject};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::time::timeout;
use tracing::{info, warn};

use super::{
    Webhook,
    mutate::{Creation, Decision, decide},
    validate,
};
use crate::error::{Error, api};
use crate::set::chain;

/// Largest review, in bytes: two objects of the API server's size limit.
const BODY_BYTES_MAX: usize = 4 << 20;
/// Time limit of one response; the API server waits for five seconds.
const ANSWER: Duration = Duration::from_secs(4);

/// Path for the creation of pods.
pub(super) const MUTATE: &str = "/mutate";
/// Path for changes of Deployments and StatefulSets.
pub(super) const VALIDATE: &str = "/validate";
/// Path for sets.
pub(super) const VALIDATE_SET: &str = "/validate-cocoonset";
/// Path for hibernations.
pub(super) const VALIDATE_HIBERNATION: &str = "/validate-cocoonhibernation";

/// Fields of an admission review that are used.
#[derive(Deserialize, Debug)]
struct Review {
    request: Request,
}

#[derive(Deserialize, Debug)]
#[serde(rename_all = "camelCase")]
struct Request {
    uid: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    operation: String,
    #[serde(default)]
    resource: Resource,
    #[serde(default)]
    sub_resource: String,
    #[serde(default)]
    user_info: UserInfo,
    #[serde(default)]
    object: Value,
    #[serde(default)]
    old_object: Value,
    #[serde(default)]
    dry_run: bool,
}

#[derive(Deserialize, Debug, Default)]
struct Resource {
    #[serde(default)]
    group: String,
    #[serde(default)]
    version: String,
    #[serde(default)]
    resource: String,
}

#[derive(Deserialize, Debug, Default)]
struct UserInfo {
    #[serde(default)]
    username: String,
}

/// Returns the webhook's paths, and `/healthz` and `/readyz`.
pub fn router(hook: Webhook) -> Router {
    Router::new()
        .route(MUTATE, post(mutate))
        .route(VALIDATE, post(validate_workload))
        .route(VALIDATE_SET, post(validate_set))
        .route(VALIDATE_HIBERNATION, post(validate_hibernation))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(|| async { "ok" }))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(hook)
}

fn answer(uid: &str, decision: &Decision) -> Json<Value> {
    let mut response = json!({"uid": uid, "allowed": true});
    match decision {
        Decision::Unchanged => {}
        Decision::Patched(operations) => {
            response["patchType"] = json!("JSONPatch");
            response["patch"] = json!(ByteString(json!(operations).to_string().into_bytes()));
        }
        Decision::Denied(why) => {
            response["allowed"] = json!(false);
            response["status"] = json!({"code": 403, "message": why});
        }
    }
    Json(json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}))
}

/// Admits the pod unchanged when the mutation fails: no pod may depend on this webhook.
async fn mutate(State(hook): State<Webhook>, Json(review): Json<Review>) -> Json<Value> {
    let request = &review.request;
    let decision = match timeout(ANSWER, decide_mutation(&hook, request)).await {
        Ok(Ok(decision)) => decision,
        Ok(Err(error)) => {
            warn!(
                ns = request.namespace,
                name = request.name,
                error = chain(&error),
                "reserve a slot failed"
            );
            hook.metrics.count_admission("mutate", "affinity_failed");
            return answer(&request.uid, &Decision::Unchanged);
        }
        Err(_) => {
            warn!(ns = request.namespace, name = request.name, "reserve a slot timed out");
            hook.metrics.count_admission("mutate", "affinity_failed");
            return answer(&request.uid, &Decision::Unchanged);
        }
    };
    finish(&hook, "mutate", request, &decision)
}

async fn decide_mutation(hook: &Webhook, request: &Request) -> Result<Decision, Error> {
    if request.operation != "CREATE" {
        return Ok(Decision::Unchanged);
    }
    let pod: Pod = match serde_json::from_value(request.object.clone()) {
        Ok(pod) => pod,
        Err(error) => {
            warn!(ns = request.namespace, %error, "decode pod failed");
            return Ok(Decision::Unchanged);
        }
    };
    let creation = Creation {
        pod: &pod,
        namespace: &request.namespace,
        uid: &request.uid,
        user: &request.user_info.username,
        is_dry_run: request.dry_run,
    };
    decide(hook, &creation).await
}

fn finish(hook: &Webhook, handler: &'static str, request: &Request, decision: &Decision) -> Json<Value> {
    match decision {
        Decision::Denied(why) => {
            info!(handler, ns = request.namespace, name = request.name, why, "refused");
            hook.metrics.count_admission(handler, "deny");
        }
        Decision::Unchanged | Decision::Patched(_) => hook.metrics.count_admission(handler, "allow"),
    }
    answer(&request.uid, decision)
}

fn decision_of(outcome: Result<(), String>) -> Decision {
    outcome.map_or_else(Decision::Denied, |()| Decision::Unchanged)
}

async fn validate_workload(State(hook): State<Webhook>, Json(review): Json<Review>) -> Json<Value> {
    let request = &review.request;
    let checked = timeout(ANSWER, workload(&hook, request)).await;
    let decision = match checked {
        Ok(Ok(outcome)) => decision_of(outcome),
        failed => {
            // Without the workload it is unknown whether VMs would be lost.
            let why = match failed {
                Ok(Err(error)) => chain(&error),
                _ => "the API server does not answer".to_owned(),
            };
            hook.metrics.count_admission("validate", "error");
            let decision = Decision::Denied(format!("cannot check {:?}: {why}", request.name));
            return answer(&request.uid, &decision);
        }
    };
    finish(&hook, "validate", request, &decision)
}

/// Validates a scale. The request names only its workload, so the workload is read to see whether its pods are VMs.
async fn workload(hook: &Webhook, request: &Request) -> Result<Result<(), String>, Error> {
    let scaled = validate::scale(&request.old_object, &request.object);
    if request.operation != "UPDATE" || scaled.is_ok() {
        return Ok(Ok(()));
    }
    let every_pod = hook.settings.every_pod;
    let is_ours = if request.sub_resource == "scale" {
        let Resource { group, version, resource } = &request.resource;
        let kind = if resource == "statefulsets" { "StatefulSet" } else { "Deployment" };
        let resource = ApiResource {
            group: group.clone(),
            version: version.clone(),
            api_version: format!("{group}/{version}"),
            kind: kind.into(),
            plural: resource.clone(),
        };
        let all: Api<DynamicObject> =
            Api::namespaced_with(hook.client.clone(), &request.namespace, &resource);
        let found = all.get_opt(&request.name).await.map_err(api("read workload", &request.name))?;
        found.is_some_and(|found| validate::runs_vms(&found.data, every_pod))
    } else {
        validate::runs_vms(&request.old_object, every_pod) || validate::runs_vms(&request.object, every_pod)
    };
    Ok(if is_ours { scaled } else { Ok(()) })
}

/// Returns the object before and after the change. A stored object that cannot be decoded may be replaced; otherwise it could
/// not be repaired.
fn objects<K: DeserializeOwned>(request: &Request) -> Result<(Option<K>, Option<K>), String> {
    let read = |object: &Value| (!object.is_null()).then(|| serde_json::from_value::<K>(object.clone()));
    let new =
        read(&request.object).transpose().map_err(|error| format!("cannot read the object: {error}"))?;
    Ok((read(&request.old_object).and_then(Result::ok), new))
}

async fn validate_set(State(hook): State<Webhook>, Json(review): Json<Review>) -> Json<Value> {
    let request = &review.request;
    let outcome = objects::<CocoonSet>(request).and_then(|(old, new)| match new {
        Some(mut new) => {
            new.metadata.namespace = Some(request.namespace.clone());
            validate::set(&new, old.as_ref())
        }
        None => Ok(()),
    });
    finish(&hook, "validate_cocoonset", request, &decision_of(outcome))
}

async fn validate_hibernation(State(hook): State<Webhook>, Json(review): Json<Review>) -> Json<Value> {
    let request = &review.request;
    let outcome = objects::<CocoonHibernation>(request).and_then(|(_, new)| match new {
        Some(new) if hook.settings.strict && request.operation == "CREATE" => {
            validate::hibernation(&request.name, &new.spec)
        }
        _ => Ok(()),
    });
    finish(&hook, "validate_cocoonhibernation", request, &decision_of(outcome))
}
