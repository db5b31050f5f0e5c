//! vCenter credentials from a Secret whose keys are the variables of `govc` in lower case.

use std::{
    collections::BTreeMap,
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
};

/// Secret string that is neither printed nor logged.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Secret(String);

impl Secret {
    /// Wraps `text`.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the plain text.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// Address of a vCenter, its user, and how to verify its certificate.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Credentials {
    /// URL of the SDK: `https://host[:port]/sdk`.
    pub url: String,
    /// User name.
    pub username: String,
    /// Password.
    pub password: Secret,
    /// Accept any server certificate.
    pub insecure: bool,
    /// Trusted certificate authorities in PEM; empty: those of the system.
    pub ca_pem: String,
    /// SHA-256 of the server's certificate, lower-case hex without colons; empty: the certificate is verified by its authority.
    /// A thumbprint from a file of known hosts may be a SHA-1, which `govc` writes by default.
    pub thumbprint: String,
}

/// Error of a Secret that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialsError {
    /// The key is missing or empty.
    #[error("key {0:?} is missing or empty")]
    Missing(&'static str),
    /// The value of the key is invalid.
    #[error("key {key:?} is not {want}")]
    Bad {
        /// Key of the Secret.
        key: &'static str,
        /// Expected value.
        want: &'static str,
    },
}

impl Credentials {
    /// Reads the keys of a Secret and ignores unknown ones.
    ///
    /// # Errors
    /// [`CredentialsError`], which holds no value of the Secret.
    pub fn parse(data: &BTreeMap<String, Vec<u8>>) -> Result<Self, CredentialsError> {
        let text = |key: &'static str, want: &'static str| {
            let bytes = data.get(key).map(Vec::as_slice).unwrap_or_default();
            let text = std::str::from_utf8(bytes).map_err(|_| CredentialsError::Bad { key, want })?;
            // `echo` and files end with one newline; more newlines would be part of the value.
            Ok(text.strip_suffix('\n').unwrap_or(text).to_owned())
        };
        let required = |key: &'static str| match text(key, "text")? {
            empty if empty.is_empty() => Err(CredentialsError::Missing(key)),
            found => Ok(found),
        };
        let insecure = match text("insecure", "true or false")?.as_str() {
            "" | "false" => false,
            "true" => true,
            _ => return Err(CredentialsError::Bad { key: "insecure", want: "true or false" }),
        };
        let thumbprint = text("thumbprint", "a SHA-256")?.trim().replace(':', "").to_ascii_lowercase();
        let is_digest = thumbprint.len() == 64 && thumbprint.bytes().all(|b| b.is_ascii_hexdigit());
        if !thumbprint.is_empty() && !is_digest {
            return Err(CredentialsError::Bad { key: "thumbprint", want: "64 hex digits of a SHA-256" });
        }
        let server = required("server")?;
        Ok(Self {
            url: url_of(&server)
                .ok_or(CredentialsError::Bad { key: "server", want: "a host or an https URL" })?,
            username: required("username")?,
            password: Secret::new(required("password")?),
            insecure,
            ca_pem: text("ca.crt", "PEM")?,
            thumbprint,
        })
    }

    /// Host and port of the server, for messages.
    #[must_use]
    pub fn server(&self) -> &str {
        let rest = self.url.split_once("://").map_or(self.url.as_str(), |(_, rest)| rest);
        rest.split('/').next().unwrap_or(rest)
    }

    /// Digest that is equal for equal credentials. A changed digest shows that the Secret changed, without keeping its content.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }
}

/// Converts `host`, `host:port` or a URL to a URL. The default scheme is https and the default path `/sdk`. User information in
/// the URL is refused.
fn url_of(server: &str) -> Option<String> {
    let server = server.trim().trim_end_matches('/');
    let (scheme, rest) = server.split_once("://").unwrap_or(("https", server));
    let (host, path) = rest.split_once('/').map_or((rest, ""), |(host, path)| (host, path));
    let fits = !host.is_empty() && !host.contains('@') && !host.contains(char::is_whitespace);
    if !fits || !matches!(scheme, "https" | "http") {
        return None;
    }
    let path = if path.is_empty() { "sdk" } else { path };
    Some(format!("{scheme}://{host}/{path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(pairs: &[(&str, &str)]) -> BTreeMap<String, Vec<u8>> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), v.as_bytes().to_vec())).collect()
    }

    const FULL: [(&str, &str); 3] = [("server", "vc.example"), ("username", "u"), ("password", "p\n")];

    #[test]
    fn server_is_a_host_or_a_url() {
        for (server, want) in [
            ("vc.example", "https://vc.example/sdk"),
            ("vc.example:8443\n", "https://vc.example:8443/sdk"),
            ("https://vc.example", "https://vc.example/sdk"),
            ("https://vc.example/sdk/", "https://vc.example/sdk"),
        ] {
            let mut data = secret(&FULL);
            data.insert("server".into(), server.into());
            let parsed = Credentials::parse(&data).unwrap();
            assert_eq!(parsed.url, want);
            assert_eq!(parsed.password.reveal(), "p", "one newline is trimmed");
            assert!(!format!("{parsed:?}").contains('p') || !format!("{parsed:?}").contains("\"p\""));
        }
    }

    #[test]
    fn invalid_credentials_name_the_key_without_the_value() {
        for (change, want) in [
            (("server", ""), "key \"server\" is missing or empty"),
            (("username", ""), "key \"username\" is missing or empty"),
            (("password", "\n"), "key \"password\" is missing or empty"),
            (("insecure", "yes"), "key \"insecure\" is not true or false"),
            (("thumbprint", "ab:cd"), "key \"thumbprint\" is not 64 hex digits of a SHA-256"),
            (("server", "ftp://x"), "key \"server\" is not a host or an https URL"),
            (("server", "https://u:p@x"), "key \"server\" is not a host or an https URL"),
        ] {
            let mut data = secret(&FULL);
            data.insert(change.0.into(), change.1.into());
            assert_eq!(Credentials::parse(&data).unwrap_err().to_string(), want);
        }
    }
}
