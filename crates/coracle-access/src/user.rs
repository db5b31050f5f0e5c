//! User of a request.

use std::collections::BTreeMap;

use k8s_openapi::api::authentication::v1::UserInfo;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// Name and group of requests without credentials.
const ANONYMOUS: (&str, &str) = ("system:anonymous", "system:unauthenticated");
/// Group of all authenticated users.
const AUTHENTICATED: &str = "system:authenticated";

/// Identity of a user, as in access reviews.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct User {
    /// Name, as in role bindings.
    pub name: String,
    /// UID, if the authenticator provides one.
    pub uid: Option<String>,
    /// Groups.
    pub groups: Vec<String>,
    /// Further attributes from the authenticator, such as the scopes of a token.
    pub extra: BTreeMap<String, Vec<String>>,
}

impl User {
    /// Returns the user of requests without credentials.
    #[must_use]
    pub fn anonymous() -> Self {
        let (name, group) = ANONYMOUS;
        Self { name: name.to_owned(), groups: vec![group.to_owned()], ..Self::default() }
    }

    /// Returns the user that a token review found.
    #[must_use]
    pub fn of_review(info: UserInfo) -> Self {
        Self {
            name: info.username.unwrap_or_default(),
            uid: info.uid,
            groups: with_authenticated(info.groups.unwrap_or_default()),
            extra: info.extra.unwrap_or_default(),
        }
    }

    /// Returns the user of a certificate (DER): the common name of its subject, with its organizations as groups. `None`: it
    /// has no common name.
    #[must_use]
    pub fn of_certificate(der: &[u8]) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(der).ok()?;
        let subject = certificate.subject();
        let name = subject.iter_common_name().next()?.as_str().ok()?.to_owned();
        let groups = subject.iter_organization().filter_map(|o| o.as_str().ok()).map(str::to_owned);
        let groups = with_authenticated(groups.collect());
        Some(Self { name, groups, ..Self::default() }).filter(|user| !user.name.is_empty())
    }
}

fn with_authenticated(mut groups: Vec<String>) -> Vec<String> {
    if !groups.iter().any(|group| group == AUTHENTICATED) {
        groups.push(AUTHENTICATED.to_owned());
    }
    groups
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair};

    use super::*;

    fn certificate(subject: &[(DnType, &str)]) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.distinguished_name = Default::default();
        for (kind, value) in subject {
            params.distinguished_name.push(kind.clone(), *value);
        }
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    #[test]
    fn subject_of_a_certificate_is_the_user() {
        let der = certificate(&[
            (DnType::CommonName, "kube-apiserver-kubelet-client"),
            (DnType::OrganizationName, "system:masters"),
        ]);
        let user = User::of_certificate(&der).unwrap();
        assert_eq!(user.name, "kube-apiserver-kubelet-client");
        assert_eq!(user.groups, ["system:masters", "system:authenticated"]);
        assert_eq!(User::of_certificate(&certificate(&[(DnType::OrganizationName, "o")])), None);
        assert_eq!(User::of_certificate(b"not a certificate"), None);
    }
}
