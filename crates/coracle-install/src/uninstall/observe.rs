//! Lists the objects to remove.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::Deployment;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams};
use kube::{Api, Client, ResourceExt as _};

use coracle_api::keys::certificates::NODE_SIGNER;

use super::UninstallError;
use super::plan::{Options, Seen, Stage, Target};

/// Label selector of all installed objects.
const OURS: &str = "app.kubernetes.io/part-of=coracle";
/// Kinds with that label: group, kind, stage.
const KINDS: [(&str, &str, Stage); 12] = [
    ("admissionregistration.k8s.io", "ValidatingWebhookConfiguration", Stage::Webhooks),
    ("admissionregistration.k8s.io", "MutatingWebhookConfiguration", Stage::Webhooks),
    ("apiregistration.k8s.io", "APIService", Stage::Webhooks),
    ("apps", "DaemonSet", Stage::Workloads),
    ("apps", "Deployment", Stage::Workloads),
    ("admissionregistration.k8s.io", "ValidatingAdmissionPolicyBinding", Stage::Rights),
    ("admissionregistration.k8s.io", "ValidatingAdmissionPolicy", Stage::Rights),
    ("rbac.authorization.k8s.io", "ClusterRoleBinding", Stage::Rights),
    ("rbac.authorization.k8s.io", "ClusterRole", Stage::Rights),
    ("rbac.authorization.k8s.io", "RoleBinding", Stage::Rights),
    ("rbac.authorization.k8s.io", "Role", Stage::Rights),
    ("", "Namespace", Stage::Namespaces),
];

pub(super) async fn observe(client: &Client, options: &Options) -> Result<Seen, UninstallError> {
    let mut seen = Seen { has_operator: has_operator(client, &options.namespace).await?, ..Seen::default() };
    for definition in coracle_api::crds() {
        let (spec, names) = (&definition.spec, &definition.spec.names);
        let Some(version) = spec.versions.first().map(|version| version.name.clone()) else { continue };
        let resource = ApiResource {
            api_version: format!("{}/{version}", spec.group),
            group: spec.group.clone(),
            version,
            kind: names.kind.clone(),
            plural: names.plural.clone(),
        };
        let found = list(client, &resource, &ListParams::default()).await?;
        let runs =
            |object: &&DynamicObject| names.kind == "MikromVM" && object.data["status"]["phase"] == "Running";
        seen.running += found.iter().filter(runs).count();
        seen.objects.extend(found.iter().map(|object| target(&resource, object)));
    }
    seen.installed = installed(client, options).await?;
    Ok(seen)
}

/// Lists the installed objects of the stages to remove. Other objects are not read, because there may be no permission for
/// them.
async fn installed(
    client: &Client,
    options: &Options,
) -> Result<BTreeMap<Stage, Vec<Target>>, UninstallError> {
    let mut all: BTreeMap<Stage, Vec<Target>> = BTreeMap::new();
    for (group, kind, stage) in KINDS.into_iter().filter(|(.., stage)| options.has(*stage)) {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
        let found = list(client, &resource, &ListParams::default().labels(OURS)).await?;
        all.entry(stage).or_default().extend(found.iter().map(|object| target(&resource, object)));
    }
    let gvk = GroupVersionKind::gvk("certificates.k8s.io", "v1", "CertificateSigningRequest");
    let requests = ApiResource::from_gvk(&gvk);
    let ours = ListParams::default().fields(&format!("spec.signerName={NODE_SIGNER}"));
    let found = list(client, &requests, &ours).await?;
    all.entry(options.stage_of_requests())
        .or_default()
        .extend(found.iter().map(|object| target(&requests, object)));
    if options.keep_workloads {
        return Ok(all);
    }
    let gvk = GroupVersionKind::gvk("apiextensions.k8s.io", "v1", "CustomResourceDefinition");
    let definitions = ApiResource::from_gvk(&gvk);
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &definitions);
    for definition in coracle_api::crds() {
        let found = api.get_opt(&definition.name_any()).await.map_err(api_error("read a definition"))?;
        all.entry(Stage::Definitions)
            .or_default()
            .extend(found.iter().map(|object| target(&definitions, object)));
    }
    Ok(all)
}

/// Lists objects of all namespaces; empty for a kind that is not defined.
async fn list(
    client: &Client,
    resource: &ApiResource,
    params: &ListParams,
) -> Result<Vec<DynamicObject>, UninstallError> {
    let api: Api<DynamicObject> = Api::all_with(client.clone(), resource);
    match api.list(params).await {
        Ok(list) => Ok(list.items),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(Vec::new()),
        Err(error) => Err(api_error(&format!("list {}", resource.plural))(error)),
    }
}

fn target(resource: &ApiResource, object: &DynamicObject) -> Target {
    Target {
        resource: resource.clone(),
        namespace: object.namespace(),
        name: object.name_any(),
        is_deleting: object.metadata.deletion_timestamp.is_some(),
    }
}

async fn has_operator(client: &Client, namespace: &str) -> Result<bool, UninstallError> {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    let operator = deployments.get_opt("coracle-operator").await.map_err(api_error("read the operator"))?;
    Ok(operator.and_then(|operator| operator.status?.ready_replicas).is_some_and(|ready| ready > 0))
}

pub(super) fn api_error(operation: &str) -> impl FnOnce(kube::Error) -> UninstallError {
    let operation = operation.to_owned();
    move |source| UninstallError::Api { operation, source: Box::new(source) }
}
