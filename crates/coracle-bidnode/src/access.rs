//! Right that lets a service account trade for its namespace.

use coracle_api::bidnode::BidNode;
use k8s_openapi::api::authorization::v1::ResourceAttributes;
use kube::Resource as _;

/// Creation of BidNodes in a namespace. Who may run a pod there has a token of the namespace, and must not spend its money
/// by that alone.
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
