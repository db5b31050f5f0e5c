//! Decides about a certificate signing request. Pure.

use coracle_api::keys::certificates::{NODE_ACCOUNT, NODE_SIGNER, node_common_name};
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec};
use rcgen::{CertificateSigningRequestParams, DnType, DnValue, SanType};

use crate::Holder;

/// Extra key with the name of the node that a token is bound to (Kubernetes documentation, "Managing Service Accounts", "Bound
/// service account tokens": JWT claims of node-bound and pod-bound tokens).
pub const TOKEN_NODE: &str = "authentication.kubernetes.io/node-name";
/// Key usages that a node's certificate may have. Client authentication is excluded: a stolen key gives access to no other
/// node.
const USAGES: [&str; 3] = ["digital signature", "key encipherment", "server auth"];

/// Decision about a request.
#[derive(Debug)]
pub enum Decision {
    /// Do nothing: the request is for another signer, or complete.
    Leave,
    /// Add the condition Approved, which is missing.
    Approve,
    /// Deny the request permanently.
    Deny {
        /// Reason, in one sentence.
        why: String,
    },
    /// Fail the request: it was approved, but cannot be signed.
    Fail {
        /// Reason, in one sentence.
        why: String,
    },
    /// Sign the key of the request for this holder.
    Sign {
        /// Parsed request with the key.
        request: Box<CertificateSigningRequestParams>,
        /// Subject of the certificate.
        holder: Holder,
    },
}

/// Decides about a request. The API server has authenticated the requester (`spec.username`, `spec.extra`); the text of the
/// request is not trusted.
#[must_use]
pub fn decide(object: &CertificateSigningRequest, namespace: &str) -> Decision {
    let has = |kind: &str| {
        object
            .status
            .iter()
            .flat_map(|status| status.conditions.iter().flatten())
            .any(|one| one.type_ == kind)
    };
    let has_certificate = object
        .status
        .as_ref()
        .and_then(|status| status.certificate.as_ref())
        .is_some_and(|pem| !pem.0.is_empty());
    if object.spec.signer_name != NODE_SIGNER || has_certificate || has("Denied") || has("Failed") {
        return Decision::Leave;
    }
    match judge(&object.spec, namespace) {
        // The conditions Approved and Denied exclude each other.
        Err(why) if has("Approved") => Decision::Fail { why },
        Err(why) => Decision::Deny { why },
        Ok(_) if !has("Approved") => Decision::Approve,
        Ok((request, holder)) => Decision::Sign { request: Box::new(request), holder },
    }
}

fn judge(
    spec: &CertificateSigningRequestSpec,
    namespace: &str,
) -> Result<(CertificateSigningRequestParams, Holder), String> {
    let account = format!("system:serviceaccount:{namespace}:{NODE_ACCOUNT}");
    let user = spec.username.as_deref().unwrap_or_default();
    if user != account {
        return Err(format!("{user:?} asked, not {account:?}"));
    }
    let node = match spec.extra.as_ref().and_then(|extra| extra.get(TOKEN_NODE)).map(Vec::as_slice) {
        Some([node]) => node.clone(),
        _ => return Err(format!("the token of the request is not bound to a node ({TOKEN_NODE})")),
    };
    if let Some(other) = spec.usages.iter().flatten().find(|usage| !USAGES.contains(&usage.as_str())) {
        return Err(format!("usage {other:?} is not for servers"));
    }
    let pem = std::str::from_utf8(&spec.request.0).map_err(|_| "the request is not PEM".to_owned())?;
    // Parsing verifies the signature, too: the requester has the private key.
    let request = CertificateSigningRequestParams::from_pem(pem)
        .map_err(|error| format!("the request cannot be read: {error}"))?;
    let name = match request.params.distinguished_name.get(&DnType::CommonName) {
        Some(DnValue::Utf8String(name)) => name.clone(),
        Some(DnValue::PrintableString(name)) => name.as_str().to_owned(),
        _ => String::new(),
    };
    let own = node_common_name(&node);
    if name != own {
        return Err(format!("the token is of node {node:?}, but the common name is {name:?}, not {own:?}"));
    }
    let is_own = |name: &SanType| matches!(name, SanType::DnsName(name) if name.as_str() == node);
    if request.params.subject_alt_names.is_empty() || !request.params.subject_alt_names.iter().all(is_own) {
        return Err(format!("a certificate of node {node:?} has this one DNS name alone"));
    }
    let holder = Holder { common_name: own, names: vec![node], is_client: false };
    Ok((request, holder))
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};
    use serde_json::{Value, json};

    use super::*;

    fn pem(common_name: &str, names: &[&str]) -> String {
        let mut params =
            CertificateParams::new(names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>()).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, common_name);
        params.serialize_request(&KeyPair::generate().unwrap()).unwrap().pem().unwrap()
    }

    fn object(change: impl FnOnce(&mut Value)) -> CertificateSigningRequest {
        let mut value = json!({
            "metadata": {"name": "coracle-n1"},
            "spec": {
                "signerName": NODE_SIGNER,
                "request": k8s_openapi::ByteString(pem("coracle.dev:node:n1", &["n1"]).into_bytes()),
                "usages": ["digital signature", "server auth"],
                "username": "system:serviceaccount:coracle-system:coracle-node",
                "extra": {TOKEN_NODE: ["n1"]},
            },
        });
        change(&mut value);
        serde_json::from_value(value).unwrap()
    }

    fn request(pem: String) -> Value {
        serde_json::to_value(k8s_openapi::ByteString(pem.into_bytes())).unwrap()
    }

    fn word(decision: &Decision) -> &'static str {
        match decision {
            Decision::Leave => "leave",
            Decision::Approve => "approve",
            Decision::Deny { .. } => "deny",
            Decision::Fail { .. } => "fail",
            Decision::Sign { .. } => "sign",
        }
    }

    #[test]
    fn requests_table() {
        let condition = |kind: &str| json!({"conditions": [{"type": kind, "status": "True"}]});
        type Change = Box<dyn FnOnce(&mut Value)>;
        let cases: Vec<(&str, Change, &str)> = vec![
            ("a node for itself", Box::new(|_| {}), "approve"),
            ("approved", Box::new(move |o| o["status"] = condition("Approved")), "sign"),
            (
                "denied",
                Box::new(move |o| {
                    o["status"] = json!({"conditions": [{"type": "Denied", "status": "True"}]})
                }),
                "leave",
            ),
            ("issued", Box::new(|o| o["status"] = json!({"certificate": "YQ=="})), "leave"),
            (
                "another signer",
                Box::new(|o| o["spec"]["signerName"] = json!("kubernetes.io/kubelet-serving")),
                "leave",
            ),
            (
                "another account",
                Box::new(|o| o["spec"]["username"] = json!("system:serviceaccount:default:x")),
                "deny",
            ),
            ("a token of no node", Box::new(|o| o["spec"]["extra"] = json!({})), "deny"),
            ("a token of another node", Box::new(|o| o["spec"]["extra"][TOKEN_NODE] = json!(["n2"])), "deny"),
            (
                "a token of two nodes",
                Box::new(|o| o["spec"]["extra"][TOKEN_NODE] = json!(["n1", "n2"])),
                "deny",
            ),
            ("a client's", Box::new(|o| o["spec"]["usages"] = json!(["client auth"])), "deny"),
            ("not PEM", Box::new(|o| o["spec"]["request"] = json!("/////w==")), "deny"),
            (
                "another node's DNS name",
                Box::new(|o| o["spec"]["request"] = request(pem("coracle.dev:node:n1", &["n2"]))),
                "deny",
            ),
            (
                "one name more",
                Box::new(|o| o["spec"]["request"] = request(pem("coracle.dev:node:n1", &["n1", "n2"]))),
                "deny",
            ),
            (
                "an address",
                Box::new(|o| {
                    o["spec"]["request"] = request(pem("coracle.dev:node:n1", &["n1", "192.0.2.1"]))
                }),
                "deny",
            ),
            (
                "no name",
                Box::new(|o| o["spec"]["request"] = request(pem("coracle.dev:node:n1", &[]))),
                "deny",
            ),
            (
                "another common name",
                Box::new(|o| o["spec"]["request"] = request(pem("coracle.dev:node:n2", &["n1"]))),
                "deny",
            ),
            (
                "approved, but another's",
                Box::new(|o| {
                    o["status"] = json!({"conditions": [{"type": "Approved", "status": "True"}]});
                    o["spec"]["extra"][TOKEN_NODE] = json!(["n2"]);
                }),
                "fail",
            ),
        ];
        for (why, change, want) in cases {
            let decision = decide(&object(change), "coracle-system");
            assert_eq!(word(&decision), want, "{why}: {decision:?}");
        }
    }
}
