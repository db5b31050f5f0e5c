//! Kubernetes permission with which a service account may trade for its namespace.

use coracle_api::bidnode::BidNode;
use k8s_openapi::api::authorization::v1::ResourceAttributes;
use kube::Resource as _;

/// Permission to create BidNodes in a namespace. Permission to run a pod there does not suffice: such a user has a token of the
/// namespace, but must not spend its money for that reason alone.
#[must_use]
pub fn trade_access(namespace: &str) -> ResourceAttributes {
    ResourceAttributes {
        namespace: Some(namespace.to_owned()),
        verb: Some("create".to_owned()),
        group: Some(BidNode::group(&()).into_owned()),
        resource: Some(BidNode::plural(&()).into_owned()),
        ..ResourceAttributes::default()
    }
}
