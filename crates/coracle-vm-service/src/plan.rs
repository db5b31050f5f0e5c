//! Decides the Service and the EndpointSlice of a VM. Pure.

use coracle_api::{MikromVM, condition, keys};
use coracle_reconcile::is_true;
use k8s_openapi::{
    api::{
        core::v1::{ObjectReference, Service, ServicePort, ServiceSpec},
        discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice},
    },
    apimachinery::pkg::{
        apis::meta::v1::{ObjectMeta, OwnerReference},
        util::intstr::IntOrString,
    },
};
use kube::{Resource, ResourceExt as _};

/// Label of the objects of this controller: name of the VM.
pub(crate) const VM_LABEL: &str = "coracle.dev/vm";
/// Labels of EndpointSlices (API reference of EndpointSlice).
const SERVICE_NAME: &str = "kubernetes.io/service-name";
const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";

/// VM, and the existing objects with its name.
#[derive(Clone, Debug)]
pub(crate) struct Observed<'a> {
    pub(crate) vm: &'a MikromVM,
    pub(crate) service: Option<&'a Service>,
    pub(crate) slice: Option<&'a EndpointSlice>,
}

/// One effect with everything that it needs. Each step is safe to repeat.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    CreateService(Box<Service>),
    /// Applies over the Service that the VM owns.
    UpdateService(Box<Service>),
    DeleteService(String),
    CreateSlice(Box<EndpointSlice>),
    UpdateSlice(Box<EndpointSlice>),
    DeleteSlice(String),
    /// Reports by an Event that an object of another owner has the name.
    ReportConflict(&'static str),
}

impl Step {
    /// Returns the name for tables and logs.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::CreateService(_) => "create-service",
            Self::UpdateService(_) => "update-service",
            Self::DeleteService(_) => "delete-service",
            Self::CreateSlice(_) => "create-slice",
            Self::UpdateSlice(_) => "update-slice",
            Self::DeleteSlice(_) => "delete-slice",
            Self::ReportConflict(_) => "report-conflict",
        }
    }
}

/// Plans the next steps.
pub(crate) fn plan(o: &Observed<'_>) -> Vec<Step> {
    let wanted = !o.vm.spec.ports.is_empty() && o.vm.metadata.deletion_timestamp.is_none();
    let own_service = o.service.filter(|service| is_owned(*service, o.vm));
    let own_slice = o.slice.filter(|slice| is_owned(*slice, o.vm));
    if !wanted {
        let service = own_service.and_then(|found| found.uid()).map(Step::DeleteService);
        let slice = own_slice.and_then(|found| found.uid()).map(Step::DeleteSlice);
        return slice.into_iter().chain(service).collect();
    }
    if o.service.is_some() && own_service.is_none() {
        // Endpoints under the Service of another owner would receive its traffic.
        let slice = own_slice.and_then(|found| found.uid()).map(Step::DeleteSlice);
        return slice.into_iter().chain([Step::ReportConflict("Service")]).collect();
    }
    let (service, slice) = (desired_service(o.vm), desired_slice(o.vm));
    let service = match own_service {
        None => Some(Step::CreateService(Box::new(service))),
        Some(found) if !same_service(found, &service) => {
            Some(Step::UpdateService(Box::new(with_uid(service, found))))
        }
        Some(_) => None,
    };
    let slice = match (own_slice, o.slice) {
        (None, Some(_)) => Some(Step::ReportConflict("EndpointSlice")),
        (None, None) => Some(Step::CreateSlice(Box::new(slice))),
        (Some(found), _) if !same_slice(found, &slice) => {
            Some(Step::UpdateSlice(Box::new(with_uid(slice, found))))
        }
        (Some(_), _) => None,
    };
    service.into_iter().chain(slice).collect()
}

/// Sets the UID, so that an apply does not create an object that is gone.
fn with_uid<K: Resource<DynamicType = ()>>(mut object: K, found: &K) -> K {
    object.meta_mut().uid.clone_from(&found.meta().uid);
    object
}

/// True for an object that the VM owns.
pub(crate) fn is_owned<K: Resource<DynamicType = ()>>(object: &K, vm: &MikromVM) -> bool {
    let owners = object.meta().owner_references.iter().flatten();
    vm.metadata.uid.as_ref().is_some_and(|uid| owners.into_iter().any(|owner| owner.uid == *uid))
}

fn meta(vm: &MikromVM) -> ObjectMeta {
    let owner = OwnerReference {
        api_version: MikromVM::api_version(&()).into_owned(),
        kind: MikromVM::kind(&()).into_owned(),
        name: vm.name_any(),
        uid: vm.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(false),
    };
    ObjectMeta {
        name: Some(vm.name_any()),
        namespace: vm.namespace(),
        labels: Some([(VM_LABEL.to_owned(), vm.name_any())].into()),
        owner_references: Some(vec![owner]),
        ..ObjectMeta::default()
    }
}

fn desired_service(vm: &MikromVM) -> Service {
    let port = |port: &coracle_api::VmPort| ServicePort {
        name: Some(port.name.clone()).filter(|name| !name.is_empty()),
        port: port.port,
        target_port: Some(IntOrString::Int(port.target_port.unwrap_or(port.port))),
        protocol: Some(port.protocol.as_str().to_owned()),
        ..ServicePort::default()
    };
    let ports = vm.spec.ports.iter().map(port).collect();
    // The Service has no selector: this controller manages its endpoints.
    let spec = ServiceSpec { ports: Some(ports), ..ServiceSpec::default() };
    Service { metadata: meta(vm), spec: Some(spec), ..Service::default() }
}

fn desired_slice(vm: &MikromVM) -> EndpointSlice {
    let mut metadata = meta(vm);
    let more =
        [(SERVICE_NAME.to_owned(), vm.name_any()), (MANAGED_BY.to_owned(), keys::VM_SERVICE_MANAGER.into())];
    metadata.labels.get_or_insert_default().extend(more);
    let port = |port: &coracle_api::VmPort| EndpointPort {
        name: Some(port.name.clone()),
        port: Some(port.target_port.unwrap_or(port.port)),
        protocol: Some(port.protocol.as_str().to_owned()),
        ..EndpointPort::default()
    };
    EndpointSlice {
        metadata,
        address_type: "IPv4".to_owned(),
        endpoints: Some(endpoint(vm).into_iter().collect()),
        ports: Some(vm.spec.ports.iter().map(port).collect()),
    }
}

/// Returns the VM's endpoint; `None` when the guest has confirmed no address.
fn endpoint(vm: &MikromVM) -> Option<Endpoint> {
    let status = vm.status.as_ref().filter(|status| !status.ip_address.is_empty())?;
    let ready = is_true(&status.conditions, condition::READY);
    Some(Endpoint {
        addresses: vec![status.ip_address.clone()],
        conditions: Some(EndpointConditions {
            ready: Some(ready),
            serving: Some(ready),
            terminating: Some(false),
        }),
        node_name: Some(status.node_name.clone()).filter(|name| !name.is_empty()),
        target_ref: Some(ObjectReference {
            kind: Some(MikromVM::kind(&()).into_owned()),
            namespace: vm.namespace(),
            name: Some(vm.name_any()),
            uid: vm.uid(),
            ..ObjectReference::default()
        }),
        ..Endpoint::default()
    })
}

/// Compares the fields that this controller sets; users may add other fields.
fn same_service(found: &Service, desired: &Service) -> bool {
    let ports = |service: &Service| {
        let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten()).cloned();
        let ours = |port: ServicePort| (port.name, port.port, port.target_port, port.protocol);
        ports.map(ours).collect::<Vec<_>>()
    };
    has_labels(&found.metadata, &desired.metadata) && ports(found) == ports(desired)
}

fn same_slice(found: &EndpointSlice, desired: &EndpointSlice) -> bool {
    has_labels(&found.metadata, &desired.metadata)
        && found.endpoints.as_deref().unwrap_or_default() == desired.endpoints.as_deref().unwrap_or_default()
        && found.ports == desired.ports
}

fn has_labels(found: &ObjectMeta, desired: &ObjectMeta) -> bool {
    let labels = found.labels.clone().unwrap_or_default();
    desired.labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vm(ports: &serde_json::Value, ip: &str, ready: bool) -> MikromVM {
        let status = if ready { "True" } else { "False" };
        let condition = json!({"type": "Ready", "status": status, "reason": "R", "message": "",
            "lastTransitionTime": "2026-01-02T03:04:05Z"});
        serde_json::from_value(json!({
            "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM",
            "metadata": {"name": "web", "namespace": "team", "uid": "u1"},
            "spec": {"image": "i", "vcpuCount": 1, "memoryMB": 128, "ports": ports},
            "status": {"ipAddress": ip, "nodeName": "n1", "conditions": [condition]},
        }))
        .unwrap()
    }

    fn set_uid<K: Resource<DynamicType = ()>>(mut object: K, uid: &str) -> K {
        object.meta_mut().uid = Some(uid.into());
        object
    }

    fn verbs(o: &Observed<'_>) -> String {
        plan(o).iter().map(Step::name).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn plan_table() {
        let ports = json!([{"port": 80, "targetPort": 8080}]);
        let (running, none) = (vm(&ports, "10.0.0.2", true), vm(&json!([]), "10.0.0.2", true));
        let stopped = vm(&ports, "", false);
        let more = vm(&json!([{"name": "a", "port": 80}, {"name": "b", "port": 81}]), "10.0.0.2", true);
        let mut deleted = running.clone();
        deleted.metadata.deletion_timestamp =
            Some(serde_json::from_value(json!("2026-01-02T03:04:05Z")).unwrap());
        let service = set_uid(desired_service(&running), "s1");
        let slice = set_uid(desired_slice(&running), "e1");
        let mut foreign = service.clone();
        foreign.metadata.owner_references = None;
        let mut foreign_slice = slice.clone();
        foreign_slice.metadata.owner_references = None;
        let mut replaced = running.clone();
        replaced.metadata.uid = Some("u2".into());
        for (why, vm, service, slice, want) in [
            ("nothing yet", &running, None, None, "create-service create-slice"),
            ("steady state is silent", &running, Some(&service), Some(&slice), ""),
            ("cut off between the two", &running, Some(&service), None, "create-slice"),
            ("the address is gone", &stopped, Some(&service), Some(&slice), "update-slice"),
            ("other ports", &more, Some(&service), Some(&slice), "update-service update-slice"),
            ("no ports any more", &none, Some(&service), Some(&slice), "delete-slice delete-service"),
            ("no ports, nothing there", &none, None, None, ""),
            ("no ports, and a Service of the user's", &none, Some(&foreign), None, ""),
            ("deleted", &deleted, Some(&service), Some(&slice), "delete-slice delete-service"),
            ("a Service of the user's", &running, Some(&foreign), None, "report-conflict"),
            (
                "whose VM had endpoints",
                &running,
                Some(&foreign),
                Some(&slice),
                "delete-slice report-conflict",
            ),
            ("a slice of the user's", &running, Some(&service), Some(&foreign_slice), "report-conflict"),
            ("of an earlier VM of the name", &replaced, Some(&service), Some(&slice), "report-conflict"),
        ] {
            assert_eq!(verbs(&Observed { vm, service, slice }), want, "{why}");
        }
    }

    #[test]
    fn endpoint_is_ready_with_its_vm() {
        let ports = json!([{"name": "dns", "port": 53, "targetPort": 5353, "protocol": "UDP"}]);
        for (ip, ready, want) in [
            ("10.0.0.2", true, Some((vec!["10.0.0.2".to_owned()], Some(true)))),
            ("10.0.0.2", false, Some((vec!["10.0.0.2".to_owned()], Some(false)))),
            ("", true, None),
        ] {
            let slice = desired_slice(&vm(&ports, ip, ready));
            let found = slice.endpoints.as_ref().and_then(|all| all.first());
            assert_eq!(
                found.map(|e| (e.addresses.clone(), e.conditions.clone().and_then(|c| c.ready))),
                want
            );
            let port = &slice.ports.as_ref().unwrap()[0];
            assert_eq!(
                (port.port, port.protocol.as_deref(), port.name.as_deref()),
                (Some(5353), Some("UDP"), Some("dns"))
            );
        }
    }

    #[test]
    fn fields_added_by_the_api_server_cause_no_update() {
        let vm = vm(&json!([{"port": 80}]), "10.0.0.2", true);
        let mut service = set_uid(desired_service(&vm), "s1");
        let spec = service.spec.as_mut().unwrap();
        (spec.cluster_ip, spec.session_affinity) = (Some("10.96.0.7".into()), Some("None".into()));
        service.metadata.annotations = Some([("user".to_owned(), "added".to_owned())].into());
        let slice = set_uid(desired_slice(&vm), "e1");
        assert_eq!(verbs(&Observed { vm: &vm, service: Some(&service), slice: Some(&slice) }), "");
    }
}
