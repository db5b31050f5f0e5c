//! Certificate with its key.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use coracle_api::keys::certificates::{NODE_SIGNER, node_common_name};
use jiff::{SignedDuration, Timestamp};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

/// Organization of all nodes.
const NODES: &str = "system:nodes";
/// Lifetime of a self-signed certificate.
const SELF_SIGNED_LIFE: SignedDuration = SignedDuration::from_hours(365 * 24);

/// Error of a certificate, key or request.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file cannot be read or written.
    #[error("cannot {operation} {}", .path.display())]
    File {
        /// Failed operation.
        operation: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Operating system error.
        source: std::io::Error,
    },
    /// A certificate or key is invalid.
    #[error("invalid certificate: {reason}")]
    Invalid {
        /// Reason.
        reason: String,
    },
    /// Certificate and key cannot be used together.
    #[error("cannot use the certificate with its key")]
    Use {
        /// TLS error.
        source: rustls::Error,
    },
    /// A key or a request cannot be generated.
    #[error("cannot make a certificate")]
    Make {
        /// Generation error.
        source: rcgen::Error,
    },
    /// A call to the API server failed.
    #[error("cannot {operation} certificate signing request {name:?}")]
    Api {
        /// Failed operation.
        operation: &'static str,
        /// Name of the request.
        name: String,
        /// Error of the API server.
        source: Box<kube::Error>,
    },
    /// The request was denied or failed.
    #[error("certificate signing request {name:?} was not granted: {reason}")]
    Denied {
        /// Name of the request.
        name: String,
        /// Reason.
        reason: String,
    },
    /// The request was removed before it was approved.
    #[error("certificate signing request {name:?} not found")]
    Gone {
        /// Name of the request.
        name: String,
    },
}

/// Signer of certificates, which also determines the server on the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Signer {
    /// The cluster, for the API of a kubelet: `kubernetes.io/kubelet-serving`.
    #[default]
    KubeletServing,
    /// The operator, for the host service and the agent service.
    Node,
}

impl Signer {
    /// Returns `spec.signerName` of its requests.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::KubeletServing => "kubernetes.io/kubelet-serving",
            Self::Node => NODE_SIGNER,
        }
    }

    /// Returns the stem of the pair's file names.
    pub(crate) fn file_stem(self) -> &'static str {
        match self {
            Self::KubeletServing => "kubelet-server",
            Self::Node => "node",
        }
    }
}

/// Subject of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// Signer of the certificate.
    pub signer: Signer,
    /// Name of the Node object.
    pub node: String,
    /// Host name; not in the certificate if it is an address, or with [`Signer::Node`].
    pub hostname: String,
    /// Listening address; not in the certificate of [`Signer::Node`].
    pub address: IpAddr,
}

impl Subject {
    /// Returns the parameters of the certificate, with the names that the signer requires.
    pub(crate) fn params(&self) -> Result<CertificateParams, CertificateError> {
        let dns = |name: &str| {
            let name = name.try_into().map_err(|source| CertificateError::Make { source })?;
            Ok(SanType::DnsName(name))
        };
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        match self.signer {
            Signer::KubeletServing => {
                params.distinguished_name.push(DnType::OrganizationName, NODES);
                params.distinguished_name.push(DnType::CommonName, format!("system:node:{}", self.node));
                params.subject_alt_names = vec![SanType::IpAddress(self.address)];
                if self.hostname.parse::<IpAddr>().is_err() {
                    params.subject_alt_names.push(dns(&self.hostname)?);
                }
            }
            Signer::Node => {
                params.distinguished_name.push(DnType::CommonName, node_common_name(&self.node));
                params.subject_alt_names = vec![dns(&self.node)?];
            }
        }
        Ok(params)
    }

    fn names(&self) -> Vec<String> {
        match self.signer {
            Signer::KubeletServing => vec![self.hostname.clone(), self.address.to_string()],
            Signer::Node => vec![self.node.clone()],
        }
    }
}

/// Certificate chain with the key of its first certificate.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Pair {
    certificate: String,
    key: String,
    pub(crate) not_before: Timestamp,
    pub(crate) not_after: Timestamp,
    names: Vec<String>,
}

impl Pair {
    /// Parses PEM texts. Either may also contain the other part.
    pub(crate) fn parse(certificate: &str, key: &str) -> Result<Self, CertificateError> {
        let invalid = |reason: String| CertificateError::Invalid { reason };
        let first = CertificateDer::from_pem_slice(certificate.as_bytes());
        let first = first.map_err(|error| invalid(format!("not a PEM certificate: {error}")))?;
        let (_, parsed) = X509Certificate::from_der(&first).map_err(|error| invalid(error.to_string()))?;
        let time =
            |at: x509_parser::time::ASN1Time| Timestamp::from_second(at.timestamp()).unwrap_or_default();
        let names = parsed.subject_alternative_name().ok().flatten();
        let names = names.iter().flat_map(|names| &names.value.general_names).filter_map(name);
        Ok(Self {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            not_before: time(parsed.validity().not_before),
            not_after: time(parsed.validity().not_after),
            names: names.collect(),
        })
    }

    /// Returns a self-signed pair.
    pub(crate) fn self_signed(subject: &Subject, now: Timestamp) -> Result<Self, CertificateError> {
        let failed = |source| CertificateError::Make { source };
        let key = KeyPair::generate().map_err(failed)?;
        let mut params = subject.params()?;
        let day = |at: Timestamp| {
            let date = at.to_zoned(jiff::tz::TimeZone::UTC).date();
            let part = |number: i8| u8::try_from(number).unwrap_or(1);
            rcgen::date_time_ymd(date.year().into(), part(date.month()), part(date.day()))
        };
        // Valid from the day before, because clocks differ.
        params.not_before = day(now.checked_sub(SignedDuration::from_hours(24)).unwrap_or(now));
        params.not_after = day(now.checked_add(SELF_SIGNED_LIFE).unwrap_or(Timestamp::MAX));
        let certificate = params.self_signed(&key).map_err(failed)?;
        Self::parse(&certificate.pem(), &key.serialize_pem())
    }

    /// Returns when the certificate is renewed: after 80 % of its lifetime.
    pub(crate) fn renew_at(&self) -> Timestamp {
        let life = self.not_after.duration_since(self.not_before);
        self.not_before.checked_add(life / 5 * 4).unwrap_or(Timestamp::MAX)
    }

    /// Returns whether the certificate has the names of the subject.
    pub(crate) fn is_of(&self, subject: &Subject) -> bool {
        subject.names().iter().all(|name| self.names.contains(name))
    }

    /// Returns certificate and key in one PEM text.
    pub(crate) fn pem(&self) -> String {
        format!("{}{}", self.certificate, self.key)
    }

    /// Returns the TLS configuration of a server with this pair.
    pub(crate) fn config(&self) -> Result<Arc<ServerConfig>, CertificateError> {
        let invalid =
            |error: rustls::pki_types::pem::Error| CertificateError::Invalid { reason: error.to_string() };
        let chain: Vec<_> = CertificateDer::pem_slice_iter(self.certificate.as_bytes())
            .collect::<Result<_, _>>()
            .map_err(invalid)?;
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes()).map_err(invalid)?;
        let failed = |source| CertificateError::Use { source };
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(failed)?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(failed)?;
        Ok(Arc::new(config))
    }
}

fn name(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match *bytes {
            [a, b, c, d] => Some(IpAddr::from([*a, *b, *c, *d]).to_string()),
            _ => <[u8; 16]>::try_from(*bytes).ok().map(|bytes| IpAddr::from(bytes).to_string()),
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn subject() -> Subject {
        Subject {
            signer: Signer::KubeletServing,
            node: "vm-1".into(),
            hostname: "vm-1".into(),
            address: "192.0.2.1".parse().unwrap(),
        }
    }

    #[test]
    fn self_signed_pair_serves_its_subject() {
        let now: Timestamp = "2026-11-24T12:00:00Z".parse().unwrap();
        let pair = Pair::self_signed(&subject(), now).unwrap();
        pair.config().unwrap();
        assert!(pair.is_of(&subject()) && pair.not_before < now && now < pair.renew_at());
        let moved = Subject { address: "192.0.2.2".parse().unwrap(), ..subject() };
        assert!(!pair.is_of(&moved), "a node with another address needs another certificate");
        assert!(Pair::parse(&pair.pem(), &pair.pem()).is_ok_and(|both| both.config().is_ok()));
    }

    #[test]
    fn certificate_of_a_node_has_its_name_alone() {
        let subject = Subject { signer: Signer::Node, ..subject() };
        let pair = Pair::self_signed(&subject, "2026-11-24T12:00:00Z".parse().unwrap()).unwrap();
        assert_eq!(pair.names, ["vm-1"], "no address: a node that moves keeps its certificate");
        assert!(pair.is_of(&Subject { address: "192.0.2.2".parse().unwrap(), ..subject }));
    }

    #[test]
    fn pair_is_renewed_at_80_percent_of_its_life() {
        let now: Timestamp = "2026-11-24T12:00:00Z".parse().unwrap();
        let mut pair = Pair::self_signed(&subject(), now).unwrap();
        (pair.not_before, pair.not_after) =
            (Timestamp::from_second(1000).unwrap(), Timestamp::from_second(2000).unwrap());
        assert_eq!(pair.renew_at().as_second(), 1800);
    }

    #[test]
    fn key_of_another_certificate_is_refused() {
        let now = Timestamp::UNIX_EPOCH;
        let [one, two] = [(); 2].map(|()| Pair::self_signed(&subject(), now).unwrap());
        let mixed = Pair::parse(&one.certificate, &two.key).unwrap();
        assert!(matches!(mixed.config(), Err(CertificateError::Use { .. })));
        assert!(Pair::parse("text", "text").is_err());
    }
}
