//! Certificates of servers in the cluster, each in a Secret that its server mounts.
//!
//! A certificate stays valid when the authority is replaced: the bundle beside it contains both authorities, and clients read
//! it again before the next certificate is issued.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client, ResourceExt};

use crate::authority::api_error;
use crate::{Authority, AuthorityError, Config, Holder};

/// Annotation with the time when the certificate of a Secret must be replaced.
const RENEW_AFTER: &str = "coracle.dev/renew-after";
/// Annotation with the names in the certificate.
const HOSTS: &str = "coracle.dev/hosts";
const TYPE: &str = "kubernetes.io/tls";
const CA: &str = "ca.crt";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";

/// Server in the cluster, with the names that its clients use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Serving {
    /// Secret with `ca.crt`, `tls.crt` and `tls.key`.
    pub secret: String,
    /// DNS names and addresses in the certificate.
    pub hosts: Vec<String>,
}

/// Text that does not describe a server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid certificate {text:?}: want SECRET=HOST[,HOST…]")]
pub struct InvalidServing {
    /// Rejected text.
    pub text: String,
}

impl std::str::FromStr for Serving {
    type Err = InvalidServing;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidServing { text: text.to_owned() };
        let (secret, hosts) = text.split_once('=').ok_or_else(invalid)?;
        let hosts: Vec<_> = hosts.split(',').map(str::to_owned).collect();
        if secret.is_empty() || hosts.iter().any(String::is_empty) {
            return Err(invalid());
        }
        Ok(Self { secret: secret.to_owned(), hosts })
    }
}

/// Change that a Secret needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    None,
    /// Replace the bundle: the authority has changed; the certificate stays.
    Bundle,
    /// Issue a new certificate.
    All,
}

/// Returns the change that a Secret needs. Pure.
fn change(stored: Option<&Secret>, hosts: &[String], bundle: &str, now: Timestamp) -> Change {
    let Some(secret) = stored else { return Change::All };
    let text = |key: &str| secret.data.as_ref()?.get(key).map(|bytes| bytes.0.as_slice());
    let is_complete =
        [CERTIFICATE, KEY].into_iter().all(|key| text(key).is_some_and(|bytes| !bytes.is_empty()));
    let has_hosts = secret.annotations().get(HOSTS) == Some(&hosts.join(","));
    let renew_after = secret.annotations().get(RENEW_AFTER).and_then(|at| at.parse::<Timestamp>().ok());
    if !is_complete || !has_hosts || renew_after.is_none_or(|at| now >= at) {
        Change::All
    } else if text(CA) == Some(bundle.as_bytes()) {
        Change::None
    } else {
        Change::Bundle
    }
}

/// Checks and updates one Secret. When replicas update it concurrently, one succeeds; the others check again later.
pub(crate) async fn keep(
    client: &Client,
    config: &Config,
    serving: &Serving,
    authority: &Authority,
    now: Timestamp,
) -> Result<(), AuthorityError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &config.namespace);
    let read = secrets.get_opt(&serving.secret).await;
    let stored = read.map_err(api_error("read the Secret of a server's certificate"))?;
    let bundle = authority.bundle();
    let wanted = match change(stored.as_ref(), &serving.hosts, &bundle, now) {
        Change::None => return Ok(()),
        Change::Bundle => {
            let mut secret = stored.clone().unwrap_or_default();
            secret.data.get_or_insert_default().insert(CA.to_owned(), ByteString(bundle.into_bytes()));
            secret
        }
        Change::All => {
            let holder = Holder { names: serving.hosts.clone(), ..Holder::default() };
            let leaf = authority.issue(&holder, now, config.certificate_life)?;
            let data = [(CA, bundle), (CERTIFICATE, leaf.certificate_pem), (KEY, leaf.key_pem)];
            let data = data.into_iter().map(|(key, text)| (key.to_owned(), ByteString(text.into_bytes())));
            let annotations = BTreeMap::from([
                (RENEW_AFTER.to_owned(), leaf.renew_after.to_string()),
                (HOSTS.to_owned(), serving.hosts.join(",")),
            ]);
            let metadata = ObjectMeta {
                name: Some(serving.secret.clone()),
                resource_version: stored.as_ref().and_then(ResourceExt::resource_version),
                annotations: Some(annotations),
                ..ObjectMeta::default()
            };
            // The type of a Secret is immutable.
            let type_ =
                stored.as_ref().and_then(|secret| secret.type_.clone()).unwrap_or_else(|| TYPE.to_owned());
            Secret { metadata, type_: Some(type_), data: Some(data.collect()), ..Secret::default() }
        }
    };
    let params = PostParams::default();
    let written = match stored {
        None => secrets.create(&params, &wanted).await,
        Some(_) => secrets.replace(&serving.secret, &params, &wanted).await,
    };
    match written {
        Ok(_) => tracing::info!(secret = serving.secret, "certificate of a server written"),
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        Err(error) => return Err(api_error("write the Secret of a server's certificate")(error)),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(change: impl Fn(&mut Secret)) -> Secret {
        let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
        let data = [(CA, "bundle"), (CERTIFICATE, "certificate"), (KEY, "key")];
        let annotations = [(RENEW_AFTER, "2026-01-20T00:00:00Z"), (HOSTS, "a,b")];
        let own = |(key, text): (&str, &str)| (key.to_owned(), text.to_owned());
        let mut secret = Secret {
            data: Some(data.into_iter().map(|(key, text)| (key.to_owned(), bytes(text))).collect()),
            ..Secret::default()
        };
        secret.metadata.annotations = Some(annotations.into_iter().map(own).collect());
        change(&mut secret);
        secret
    }

    #[test]
    fn change_table() {
        let hosts = ["a".to_owned(), "b".to_owned()];
        let (early, late) = ("2026-01-01T00:00:00Z", "2026-01-20T00:00:00Z");
        let without =
            |key: &'static str| move |secret: &mut Secret| drop(secret.data.as_mut().unwrap().remove(key));
        let cases: [(&str, Option<Secret>, &str, &str, Change); 8] = [
            ("no Secret", None, "bundle", early, Change::All),
            ("fresh", Some(secret(|_| ())), "bundle", early, Change::None),
            ("two thirds are over", Some(secret(|_| ())), "bundle", late, Change::All),
            ("another authority", Some(secret(|_| ())), "bundle of two", early, Change::Bundle),
            ("no key", Some(secret(without(KEY))), "bundle", early, Change::All),
            ("no bundle", Some(secret(without(CA))), "bundle", early, Change::Bundle),
            (
                "a user's Secret",
                Some(secret(|s| s.metadata.annotations = None)),
                "bundle",
                early,
                Change::All,
            ),
            (
                "other hosts",
                Some(secret(|s| {
                    s.metadata.annotations.as_mut().unwrap().insert(HOSTS.to_owned(), "a".to_owned());
                })),
                "bundle",
                early,
                Change::All,
            ),
        ];
        for (why, stored, bundle, now, want) in cases {
            assert_eq!(change(stored.as_ref(), &hosts, bundle, now.parse().unwrap()), want, "{why}");
        }
    }

    #[test]
    fn serving_option_is_parsed_as_secret_and_hosts() {
        let one: Serving = "market-tls=market.ns.svc,127.0.0.1".parse().unwrap();
        assert_eq!((one.secret.as_str(), one.hosts.len()), ("market-tls", 2));
        for text in ["", "market-tls", "=host", "market-tls=", "market-tls=a,"] {
            assert!(text.parse::<Serving>().is_err(), "{text}");
        }
    }
}
