//! Certificate authority that replicas share in a Secret.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ObjectMeta, PostParams},
};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::AuthorityError;

/// Annotation with the time when the authority must be replaced.
const RENEW_AFTER: &str = "coracle.dev/renew-after";
const CERTIFICATE: &str = "ca.crt";
const KEY: &str = "ca.key";
/// Key of the previous authority's certificate, which is still trusted while certificates that it signed are in use.
const PREVIOUS: &str = "previous.crt";
/// Allowance for clock differences: certificates are valid from a little before now.
const SKEW: Duration = Duration::from_secs(300);

/// Names of one authority of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuthorityName {
    /// Name of the authority's Secret.
    pub secret: &'static str,
    /// Common name of the authority's certificate.
    pub common_name: &'static str,
}

/// Certificate authority.
pub struct Authority {
    certificate_pem: String,
    key_pem: String,
    previous_pem: String,
    renew_after: Timestamp,
}

/// Certificate with its key, and the time of its renewal.
#[derive(Debug)]
pub struct Leaf {
    /// Certificate, DER.
    pub certificate: CertificateDer<'static>,
    /// Certificate, PEM.
    pub certificate_pem: String,
    /// Private key, DER.
    pub key: PrivateKeyDer<'static>,
    /// Private key, PEM.
    pub key_pem: String,
    /// Time when two thirds of the certificate's life are over.
    pub renew_after: Timestamp,
}

/// Subject of a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holder {
    /// Common name; empty: none.
    pub common_name: String,
    /// DNS names and addresses.
    pub names: Vec<String>,
    /// True for a client certificate, false for a server certificate.
    pub is_client: bool,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").field("renew_after", &self.renew_after).finish_non_exhaustive()
    }
}

impl Authority {
    /// Returns the certificates to trust, PEM.
    #[must_use]
    pub fn bundle(&self) -> String {
        format!("{}{}", self.certificate_pem, self.previous_pem)
    }

    /// Returns the time when two thirds of the authority's life are over.
    #[must_use]
    pub fn renew_after(&self) -> Timestamp {
        self.renew_after
    }

    fn new(
        name: AuthorityName,
        now: Timestamp,
        life: Duration,
        previous_pem: String,
    ) -> Result<Self, AuthorityError> {
        let failed = certificate_error("make the authority");
        let make = || {
            let mut params = CertificateParams::new(vec![])?;
            params.distinguished_name.push(DnType::CommonName, name.common_name);
            params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
            set_validity(&mut params, now, life);
            let key = KeyPair::generate()?;
            Ok((params.self_signed(&key)?.pem(), key.serialize_pem()))
        };
        let (certificate_pem, key_pem) = make().map_err(failed)?;
        Ok(Self { certificate_pem, key_pem, previous_pem, renew_after: add_duration(now, life * 2 / 3) })
    }

    /// Generates a key and issues a certificate for it.
    ///
    /// # Errors
    /// [`AuthorityError::Certificate`] for names that no certificate can have.
    pub fn issue(&self, holder: &Holder, now: Timestamp, life: Duration) -> Result<Leaf, AuthorityError> {
        let issue = || {
            let key = KeyPair::generate()?;
            let certificate = params(holder, now, life)?.signed_by(&key, &self.issuer()?)?;
            Ok((certificate, key))
        };
        let (certificate, key) = issue().map_err(certificate_error("sign a certificate"))?;
        Ok(Leaf {
            certificate: certificate.der().clone(),
            certificate_pem: certificate.pem(),
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            key_pem: key.serialize_pem(),
            renew_after: add_duration(now, life * 2 / 3),
        })
    }

    /// Signs a certificate for the key of a request, and returns it as PEM. Attributes of the request are not copied.
    ///
    /// # Errors
    /// [`AuthorityError::Certificate`] when the certificate cannot be signed.
    pub fn sign(
        &self,
        request: &CertificateSigningRequestParams,
        holder: &Holder,
        now: Timestamp,
        life: Duration,
    ) -> Result<String, AuthorityError> {
        let sign = || params(holder, now, life)?.signed_by(&request.public_key, &self.issuer()?);
        Ok(sign().map_err(certificate_error("sign the certificate of a request"))?.pem())
    }

    fn issuer(&self) -> Result<Issuer<'static, KeyPair>, rcgen::Error> {
        Issuer::from_ca_cert_pem(&self.certificate_pem, KeyPair::from_pem(&self.key_pem)?)
    }

    fn from_secret(secret: &Secret) -> Option<Self> {
        let text = |key: &str| String::from_utf8(secret.data.as_ref()?.get(key)?.0.clone()).ok();
        Some(Self {
            certificate_pem: text(CERTIFICATE)?,
            key_pem: text(KEY)?,
            previous_pem: text(PREVIOUS).unwrap_or_default(),
            renew_after: secret.annotations().get(RENEW_AFTER)?.parse().ok()?,
        })
    }

    fn into_secret(self, name: AuthorityName, metadata: ObjectMeta) -> Secret {
        let data = [(CERTIFICATE, self.certificate_pem), (KEY, self.key_pem), (PREVIOUS, self.previous_pem)];
        let data =
            data.into_iter().map(|(key, text)| (key.to_owned(), ByteString(text.into_bytes()))).collect();
        let annotations = BTreeMap::from([(RENEW_AFTER.to_owned(), self.renew_after.to_string())]);
        let metadata =
            ObjectMeta { name: Some(name.secret.into()), annotations: Some(annotations), ..metadata };
        Secret { metadata, data: Some(data), ..Secret::default() }
    }
}

/// Returns the authority that all replicas share: the stored one, or a new one that is stored now. The write is a
/// compare-and-swap, so that two replicas that create an authority concurrently use the same.
///
/// # Errors
/// [`AuthorityError::Api`]; [`AuthorityError::Secret`] when the Secret does not contain an authority.
pub async fn authority(
    client: &Client,
    namespace: &str,
    name: AuthorityName,
    now: Timestamp,
    life: Duration,
) -> Result<Authority, AuthorityError> {
    let api: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let parsed = |secret: &Secret| {
        Authority::from_secret(secret).ok_or_else(|| AuthorityError::Secret { name: name.secret.into() })
    };
    loop {
        let stored = api.get_opt(name.secret).await.map_err(api_error("read the Secret of the authority"))?;
        let written = match stored {
            None => {
                let secret =
                    Authority::new(name, now, life, String::new())?.into_secret(name, ObjectMeta::default());
                api.create(&PostParams::default(), &secret).await
            }
            Some(secret) => {
                let known = parsed(&secret)?;
                if now < known.renew_after {
                    return Ok(known);
                }
                let metadata =
                    ObjectMeta { resource_version: secret.resource_version(), ..ObjectMeta::default() };
                let secret =
                    Authority::new(name, now, life, known.certificate_pem)?.into_secret(name, metadata);
                api.replace(name.secret, &PostParams::default(), &secret).await
            }
        };
        match written {
            Ok(secret) => return parsed(&secret),
            Err(kube::Error::Api(status)) if status.code == 409 => {} // another replica was faster: use its authority
            Err(error) => return Err(api_error("store the Secret of the authority")(error)),
        }
    }
}

fn params(holder: &Holder, now: Timestamp, life: Duration) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(holder.names.clone())?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    if !holder.common_name.is_empty() {
        params.distinguished_name.push(DnType::CommonName, &holder.common_name);
    }
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![match holder.is_client {
        true => ExtendedKeyUsagePurpose::ClientAuth,
        false => ExtendedKeyUsagePurpose::ServerAuth,
    }];
    set_validity(&mut params, now, life);
    Ok(params)
}

fn set_validity(params: &mut CertificateParams, now: Timestamp, life: Duration) {
    let unix = |t: Timestamp| {
        let seconds = u64::try_from(t.as_second()).unwrap_or(0);
        rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds)
    };
    params.not_before = unix(now.saturating_sub(SKEW).unwrap_or(now));
    params.not_after = unix(add_duration(now, life));
}

fn add_duration(now: Timestamp, by: Duration) -> Timestamp {
    now.saturating_add(by).unwrap_or(Timestamp::MAX)
}

fn certificate_error(operation: &'static str) -> impl FnOnce(rcgen::Error) -> AuthorityError {
    move |source| AuthorityError::Certificate { operation, source }
}

pub(crate) fn api_error(operation: &'static str) -> impl FnOnce(kube::Error) -> AuthorityError {
    move |source| AuthorityError::Api { operation, source: Box::new(source) }
}
