//! CertificateSigningRequest of a node (Kubernetes documentation, "Certificates and Certificate Signing Requests", signer
//! kubernetes.io/kubelet-serving).

use futures_util::StreamExt as _;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec, CertificateSigningRequestStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::watch_object;
use kube::{Api, Client};
use rcgen::{KeyPair, PublicKeyData as _};
use sha2::{Digest as _, Sha256};

use crate::pair::{CertificateError, Signer, Subject};

/// Key usages of the certificate; the key is an elliptic curve key.
const USAGES: [&str; 2] = ["digital signature", "server auth"];

/// Request for one key. Sending it again refers to the same object, because its name is derived from the key.
pub(crate) struct Request {
    name: String,
    pem: String,
    signer: Signer,
}

impl Request {
    /// Returns the request for a key.
    pub(crate) fn new(subject: &Subject, key: &KeyPair) -> Result<Self, CertificateError> {
        let failed = |source| CertificateError::Make { source };
        let request = subject.params()?.serialize_request(key).map_err(failed)?;
        let digest = hex::encode(&Sha256::digest(key.subject_public_key_info())[..8]);
        let (name, signer) = (format!("coracle-{}-{digest}", subject.node), subject.signer);
        Ok(Self { name, pem: request.pem().map_err(failed)?, signer })
    }

    fn object(&self) -> CertificateSigningRequest {
        CertificateSigningRequest {
            metadata: ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
            spec: CertificateSigningRequestSpec {
                request: ByteString(self.pem.clone().into_bytes()),
                signer_name: self.signer.name().to_owned(),
                usages: Some(USAGES.map(str::to_owned).to_vec()),
                ..CertificateSigningRequestSpec::default()
            },
            status: None,
        }
    }

    /// Sends the request and waits for the certificate, PEM. Cancel-safe: a later call waits for the same request.
    pub(crate) async fn wait(&self, client: &Client) -> Result<String, CertificateError> {
        let requests: Api<CertificateSigningRequest> = Api::all(client.clone());
        match requests.create(&PostParams::default(), &self.object()).await {
            Ok(_) => match self.signer {
                Signer::KubeletServing => tracing::warn!(
                    "the API shows a certificate that the node signed itself until its request is approved: \
                     kubectl certificate approve {}",
                    self.name
                ),
                Signer::Node => {
                    tracing::info!(request = self.name, "operator asked for the certificate of the node")
                }
            },
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(source) => {
                let (operation, name, source) = ("create", self.name.clone(), Box::new(source));
                return Err(CertificateError::Api { operation, name, source });
            }
        }
        let mut seen = std::pin::pin!(watch_object(requests, &self.name).default_backoff());
        while let Some(seen) = seen.next().await {
            match seen {
                Ok(Some(request)) => match outcome(request.status.as_ref()) {
                    SigningState::Pending => {}
                    SigningState::Issued(pem) => return Ok(pem),
                    SigningState::Denied(reason) => {
                        return Err(CertificateError::Denied { name: self.name.clone(), reason });
                    }
                },
                Ok(None) => break,
                Err(error) => tracing::debug!(%error, "watch the certificate signing request failed"),
            }
        }
        Err(CertificateError::Gone { name: self.name.clone() })
    }
}

#[derive(Debug, PartialEq, Eq)]
enum SigningState {
    Pending,
    Issued(String),
    Denied(String),
}

/// Returns the state of a request.
fn outcome(status: Option<&CertificateSigningRequestStatus>) -> SigningState {
    let conditions = status.iter().flat_map(|status| status.conditions.iter().flatten());
    if let Some(end) = conditions.into_iter().find(|one| ["Denied", "Failed"].contains(&one.type_.as_str())) {
        let why = [&end.reason, &end.message].into_iter().flatten().cloned().collect::<Vec<_>>().join(": ");
        return SigningState::Denied(if why.is_empty() { end.type_.clone() } else { why });
    }
    let certificate = status.and_then(|status| status.certificate.as_ref()).filter(|pem| !pem.0.is_empty());
    match certificate {
        Some(pem) => SigningState::Issued(String::from_utf8_lossy(&pem.0).into_owned()),
        None => SigningState::Pending,
    }
}

#[cfg(test)]
mod tests {
    use rcgen::CertificateSigningRequestParams;
    use serde_json::json;

    use super::*;

    #[test]
    fn request_has_the_subject_of_a_node() {
        let subject = Subject {
            signer: Signer::KubeletServing,
            node: "vm-1".into(),
            hostname: "vm-1".into(),
            address: "192.0.2.1".parse().unwrap(),
        };
        let key = KeyPair::generate().unwrap();
        let request = Request::new(&subject, &key).unwrap();
        let parsed = CertificateSigningRequestParams::from_pem(&request.pem).unwrap().params;
        let name = |kind| match parsed.distinguished_name.get(&kind) {
            Some(rcgen::DnValue::Utf8String(text)) => text.clone(),
            other => format!("{other:?}"),
        };
        assert_eq!(name(rcgen::DnType::CommonName), "system:node:vm-1");
        assert_eq!(name(rcgen::DnType::OrganizationName), "system:nodes");
        assert_eq!(parsed.subject_alt_names.len(), 2);
        assert_eq!(Request::new(&subject, &key).unwrap().name, request.name, "one name for one key");
    }

    #[test]
    fn signing_state_follows_the_csr_conditions() {
        let of = |value| outcome(Some(&serde_json::from_value(value).unwrap()));
        assert_eq!(outcome(None), SigningState::Pending);
        assert_eq!(
            of(json!({"conditions": [{"type": "Approved", "status": "True"}]})),
            SigningState::Pending
        );
        assert_eq!(
            of(json!({"conditions": [{"type": "Approved", "status": "True"}], "certificate": "cGVt"})),
            SigningState::Issued("pem".into())
        );
        assert_eq!(
            of(
                json!({"conditions": [{"type": "Denied", "status": "True", "reason": "No", "message": "never"}]})
            ),
            SigningState::Denied("No: never".into())
        );
    }
}
