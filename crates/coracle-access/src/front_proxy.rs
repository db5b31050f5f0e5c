//! Requests that the API server forwards for a user (Kubernetes documentation, "Configure the Aggregation Layer",
//! authentication flow; ConfigMap `kube-system/extension-apiserver-authentication`).

use std::collections::BTreeMap;

use coracle_types::Clock;
use http::{HeaderMap, HeaderName};
use percent_encoding::percent_decode_str;
use rustls::pki_types::CertificateDer;

use crate::certificate::{ClientCa, InvalidClientCa};
use crate::user::User;

/// Invalid front proxy configuration in the ConfigMap.
#[derive(Debug, thiserror::Error)]
pub enum FrontProxyError {
    /// A key is missing: the API server has no front proxy.
    #[error("key {key} not found: the API server runs without --requestheader-client-ca-file")]
    Missing {
        /// Missing key.
        key: &'static str,
    },
    /// A value is not a JSON list of strings.
    #[error("cannot read key {key}")]
    List {
        /// Key of the value.
        key: &'static str,
        /// JSON error.
        source: serde_json::Error,
    },
    /// A value is a list with an invalid header name.
    #[error("invalid header name in key {key}")]
    Header {
        /// Key of the value.
        key: &'static str,
    },
    /// The client authority is invalid.
    #[error(transparent)]
    ClientCa(#[from] InvalidClientCa),
}

/// Identifies the API server as the sender of a forwarded request, and the user of the request.
#[derive(Clone, Debug)]
pub struct FrontProxy {
    authority: ClientCa,
    /// Allowed common names of the API server's certificate; empty: any that the authority signed.
    names: Vec<String>,
    user: Vec<HeaderName>,
    uid: Vec<HeaderName>,
    groups: Vec<HeaderName>,
    /// Header prefixes, in lower case.
    extra_prefixes: Vec<String>,
}

impl FrontProxy {
    /// Namespace and name of the ConfigMap.
    pub const CONFIG_MAP: (&'static str, &'static str) =
        ("kube-system", "extension-apiserver-authentication");

    /// Parses the data of the ConfigMap.
    ///
    /// # Errors
    /// [`FrontProxyError`].
    pub fn new(data: &BTreeMap<String, String>, clock: Clock) -> Result<Self, FrontProxyError> {
        const CA: &str = "requestheader-client-ca-file";
        let pem = data.get(CA).ok_or(FrontProxyError::Missing { key: CA })?;
        Ok(Self {
            authority: ClientCa::new(pem.as_bytes(), clock)?,
            names: list(data, "requestheader-allowed-names")?,
            user: headers(data, "requestheader-username-headers")?,
            uid: headers(data, "requestheader-uid-headers")?,
            groups: headers(data, "requestheader-group-headers")?,
            extra_prefixes: list(data, "requestheader-extra-headers-prefix")?
                .iter()
                .map(|prefix| prefix.to_ascii_lowercase())
                .collect(),
        })
    }

    /// Returns the user of a request with these headers, forwarded by a client with this certificate chain. `None`: the client
    /// is not the API server, or names no user.
    #[must_use]
    pub fn user(&self, chain: &[CertificateDer<'_>], headers: &HeaderMap) -> Option<User> {
        let client = self.authority.user(chain)?;
        let is_allowed = self.names.is_empty() || self.names.contains(&client.name);
        if is_allowed { self.user_from_headers(headers) } else { None }
    }

    fn user_from_headers(&self, headers: &HeaderMap) -> Option<User> {
        let values = |names: &[HeaderName]| {
            let all = names.iter().flat_map(|name| headers.get_all(name));
            let texts = all.filter_map(|value| value.to_str().ok().map(str::to_owned));
            texts.filter(|value| !value.is_empty()).collect::<Vec<_>>()
        };
        let name = values(&self.user).into_iter().next()?;
        let mut extra = BTreeMap::<_, Vec<_>>::new();
        for (header, value) in headers {
            let key = self.extra_prefixes.iter().find_map(|prefix| header.as_str().strip_prefix(prefix));
            if let (Some(key), Ok(value)) = (key, value.to_str()) {
                let key = percent_decode_str(key).decode_utf8_lossy().into_owned();
                extra.entry(key).or_default().push(value.to_owned());
            }
        }
        Some(User { name, uid: values(&self.uid).into_iter().next(), groups: values(&self.groups), extra })
    }
}

/// Parses a JSON list; an absent key counts as an empty list.
fn list(data: &BTreeMap<String, String>, key: &'static str) -> Result<Vec<String>, FrontProxyError> {
    let Some(text) = data.get(key) else { return Ok(Vec::new()) };
    serde_json::from_str(text).map_err(|source| FrontProxyError::List { key, source })
}

fn headers(data: &BTreeMap<String, String>, key: &'static str) -> Result<Vec<HeaderName>, FrontProxyError> {
    let name = |text: String| text.parse().map_err(|_| FrontProxyError::Header { key });
    list(data, key)?.into_iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use rcgen::{
        BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose,
    };

    use super::*;

    struct Pki {
        pem: String,
        issuer: CertifiedIssuer<'static, KeyPair>,
    }

    fn authority() -> Pki {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Pki { pem: issuer.pem(), issuer }
    }

    fn leaf(pki: &Pki, name: &str) -> Vec<CertificateDer<'static>> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        vec![params.signed_by(&KeyPair::generate().unwrap(), &pki.issuer).unwrap().der().clone()]
    }

    fn data(pki: &Pki, names: &str) -> BTreeMap<String, String> {
        [
            ("requestheader-client-ca-file", pki.pem.as_str()),
            ("requestheader-allowed-names", names),
            ("requestheader-username-headers", r#"["X-Remote-User"]"#),
            ("requestheader-uid-headers", r#"["X-Remote-Uid"]"#),
            ("requestheader-group-headers", r#"["X-Remote-Group"]"#),
            ("requestheader-extra-headers-prefix", r#"["X-Remote-Extra-"]"#),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into()
    }

    fn request(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn user_headers_are_accepted_only_from_the_front_proxy() {
        let (pki, other) = (authority(), authority());
        let named = request(&[("x-remote-user", "anna")]);
        for (why, names, chain, headers, want) in [
            ("the front proxy", r#"["proxy"]"#, leaf(&pki, "proxy"), &named, true),
            ("any name of the authority", "[]", leaf(&pki, "x"), &named, true),
            ("another name", r#"["proxy"]"#, leaf(&pki, "x"), &named, false),
            ("another authority", r#"["proxy"]"#, leaf(&other, "proxy"), &named, false),
            ("no certificate", "[]", vec![], &named, false),
            ("no user", "[]", leaf(&pki, "proxy"), &request(&[("x-remote-group", "g")]), false),
        ] {
            let proxy = FrontProxy::new(&data(&pki, names), Clock::system()).unwrap();
            assert_eq!(proxy.user(&chain, headers).is_some(), want, "{why}");
        }
    }

    #[test]
    fn user_is_read_from_the_front_proxy_headers() {
        let pki = authority();
        let proxy = FrontProxy::new(&data(&pki, "[]"), Clock::system()).unwrap();
        let headers = request(&[
            ("x-remote-user", "anna"),
            ("x-remote-uid", "7"),
            ("x-remote-group", "team-a"),
            ("x-remote-group", "system:authenticated"),
            ("x-remote-extra-acme.example%2fscope", "read"),
            ("x-remote-extra-acme.example%2fscope", "write"),
        ]);
        let user = proxy.user(&leaf(&pki, "proxy"), &headers).unwrap();
        assert_eq!((user.name.as_str(), user.uid.as_deref()), ("anna", Some("7")));
        assert_eq!(user.groups, ["team-a", "system:authenticated"]);
        assert_eq!(user.extra["acme.example/scope"], ["read", "write"]);
    }

    #[test]
    fn incomplete_or_malformed_config_map_is_an_error() {
        assert!(matches!(
            FrontProxy::new(&BTreeMap::new(), Clock::system()),
            Err(FrontProxyError::Missing { .. })
        ));
        let mut wrong = data(&authority(), "[]");
        wrong.insert("requestheader-group-headers".to_owned(), "X-Remote-Group".to_owned());
        assert!(matches!(FrontProxy::new(&wrong, Clock::system()), Err(FrontProxyError::List { .. })));
    }
}
