//! The webhook's own authority, kept in a Secret that all replicas share, and the certificates that it signs.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ObjectMeta, PostParams},
};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::Error;

/// Name of the Secret.
const SECRET: &str = "coracle-webhook-ca";
/// When the authority is to be replaced.
const RENEW_AFTER: &str = "coracle.dev/renew-after";
const CERTIFICATE: &str = "ca.crt";
const KEY: &str = "ca.key";
/// The one before, still trusted while replicas show certificates that it signed.
const PREVIOUS: &str = "previous.crt";
/// Clocks differ: certificates are valid from a little before now.
const SKEW: Duration = Duration::from_secs(300);

/// Signs the webhook's certificates.
pub(crate) struct Authority {
    pub(crate) certificate_pem: String,
    key_pem: String,
    previous_pem: String,
    pub(crate) renew_after: Timestamp,
}

/// A certificate, and when to make the next one.
pub(crate) struct Leaf {
    pub(crate) certificate: CertificateDer<'static>,
    pub(crate) key: PrivateKeyDer<'static>,
    pub(crate) renew_after: Timestamp,
}

impl Authority {
    /// Certificate that the API server trusts.
    pub(crate) fn bundle(&self) -> String {
        format!("{}{}", self.certificate_pem, self.previous_pem)
    }

    fn new(now: Timestamp, life: Duration, previous_pem: String) -> Result<Self, Error> {
        let mut params = params(vec![], now, life)?;
        params.distinguished_name.push(DnType::CommonName, "coracle webhook authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().map_err(failed("make the webhook's authority"))?;
        let certificate = params.self_signed(&key).map_err(failed("make the webhook's authority"))?;
        let renew_after = later(now, life * 2 / 3);
        Ok(Self {
            certificate_pem: certificate.pem(),
            key_pem: key.serialize_pem(),
            previous_pem,
            renew_after,
        })
    }

    /// Signs a certificate for `names`.
    pub(crate) fn sign(&self, names: Vec<String>, now: Timestamp, life: Duration) -> Result<Leaf, Error> {
        let sign = || {
            let issuer = Issuer::from_ca_cert_pem(&self.certificate_pem, KeyPair::from_pem(&self.key_pem)?)?;
            let key = KeyPair::generate()?;
            Ok((CertificateParams::new(names.clone())?, issuer, key))
        };
        let (_, issuer, key) = sign().map_err(failed("sign the webhook's certificate"))?;
        let certificate = params(names, now, life)?
            .signed_by(&key, &issuer)
            .map_err(failed("sign the webhook's certificate"))?;
        Ok(Leaf {
            certificate: certificate.der().clone(),
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            renew_after: later(now, life * 2 / 3),
        })
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

    fn into_secret(self, metadata: ObjectMeta) -> Secret {
        let data = [(CERTIFICATE, self.certificate_pem), (KEY, self.key_pem), (PREVIOUS, self.previous_pem)];
        let data =
            data.into_iter().map(|(key, text)| (key.to_owned(), ByteString(text.into_bytes()))).collect();
        let annotations = BTreeMap::from([(RENEW_AFTER.to_owned(), self.renew_after.to_string())]);
        let metadata = ObjectMeta { name: Some(SECRET.into()), annotations: Some(annotations), ..metadata };
        Secret { metadata, data: Some(data), ..Secret::default() }
    }
}

/// The authority that all replicas share: the stored one, or a new one stored now. Compare-and-swap, so that of two
/// replicas that make one at once both use the same.
pub(crate) async fn authority(
    client: &Client,
    namespace: &str,
    now: Timestamp,
    life: Duration,
) -> Result<Authority, Error> {
    let api: Api<Secret> = Api::namespaced(client.clone(), namespace);
    loop {
        let stored = api.get_opt(SECRET).await.map_err(api_failed("read the webhook's authority"))?;
        let written = match stored {
            None => {
                let secret = Authority::new(now, life, String::new())?.into_secret(ObjectMeta::default());
                api.create(&PostParams::default(), &secret).await
            }
            Some(secret) => {
                let known =
                    Authority::from_secret(&secret).ok_or_else(|| Error::Secret { name: SECRET.into() })?;
                if now < known.renew_after {
                    return Ok(known);
                }
                let metadata =
                    ObjectMeta { resource_version: secret.resource_version(), ..ObjectMeta::default() };
                let secret = Authority::new(now, life, known.certificate_pem)?.into_secret(metadata);
                api.replace(SECRET, &PostParams::default(), &secret).await
            }
        };
        match written {
            Ok(secret) => {
                return Authority::from_secret(&secret).ok_or_else(|| Error::Secret { name: SECRET.into() });
            }
            Err(kube::Error::Api(status)) if status.code == 409 => {} // another replica was faster: use its
            Err(error) => return Err(api_failed("store the webhook's authority")(error)),
        }
    }
}

fn params(names: Vec<String>, now: Timestamp, life: Duration) -> Result<CertificateParams, Error> {
    let mut params = CertificateParams::new(names).map_err(failed("name the webhook's certificate"))?;
    let unix = |t: Timestamp| {
        let seconds = u64::try_from(t.as_second()).unwrap_or(0);
        rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds)
    };
    params.not_before = unix(now.saturating_sub(SKEW).unwrap_or(now));
    params.not_after = unix(later(now, life));
    Ok(params)
}

fn later(now: Timestamp, by: Duration) -> Timestamp {
    now.saturating_add(by).unwrap_or(Timestamp::MAX)
}

fn failed(operation: &'static str) -> impl FnOnce(rcgen::Error) -> Error {
    move |source| Error::Certificate { operation, source }
}

pub(crate) fn api_failed(operation: &'static str) -> impl FnOnce(kube::Error) -> Error {
    move |source| Error::Api { operation, source: Box::new(source) }
}
