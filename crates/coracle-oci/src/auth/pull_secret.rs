//! Credentials of Kubernetes Secrets for pulling images (Kubernetes documentation, "Images", "Interpretation of
//! config.json"). Pure.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::docker::{Auth, HUB_KEYS};
use super::{Credentials, Login};
use crate::Reference;

/// Image pull Secret that cannot be parsed. The message contains the position only: the text holds passwords.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid docker configuration at line {line}, column {column}")]
pub struct InvalidPullSecret {
    /// Line of the JSON text, from 1.
    pub line: usize,
    /// Column, from 1.
    pub column: usize,
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    auths: BTreeMap<String, Auth>,
}

/// Credentials of registries and repositories.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct PullSecret(Vec<(String, Credentials)>);

impl PullSecret {
    /// Reads the key `.dockerconfigjson` of a Secret of type `kubernetes.io/dockerconfigjson`. Entries without credentials
    /// are left out.
    ///
    /// # Errors
    /// [`InvalidPullSecret`] for text that is not such a configuration.
    pub fn parse(json: &[u8]) -> Result<Self, InvalidPullSecret> {
        let config: Config = serde_json::from_slice(json).map_err(|error| invalid(&error))?;
        Ok(Self::of(&config.auths))
    }

    /// Reads the key `.dockercfg` of a Secret of the older type `kubernetes.io/dockercfg`.
    ///
    /// # Errors
    /// Like [`PullSecret::parse`].
    pub fn parse_legacy(json: &[u8]) -> Result<Self, InvalidPullSecret> {
        serde_json::from_slice(json).map(|auths| Self::of(&auths)).map_err(|error| invalid(&error))
    }

    fn of(auths: &BTreeMap<String, Auth>) -> Self {
        let login = |(key, auth): (&String, &Auth)| {
            let credentials = match auth.login(key).ok()? {
                Login::Anonymous => return None,
                Login::Basic { user, password } => Credentials::Basic { user, password },
                Login::Bearer(token) => Credentials::Bearer(token),
                Login::Identity(token) => Credentials::Identity(token),
            };
            Some((pattern(key), credentials))
        };
        Self(auths.iter().filter_map(login).collect())
    }

    /// Credentials to try for an image, the entry with the longest path first.
    #[must_use]
    pub fn credentials(&self, image: &Reference) -> Vec<Credentials> {
        let mut found: Vec<_> = self.0.iter().filter(|(pattern, _)| is_match(pattern, image)).collect();
        found.sort_by_key(|(pattern, _)| std::cmp::Reverse(pattern.len()));
        found.into_iter().map(|(_, credentials)| credentials.clone()).collect()
    }
}

fn invalid(error: &serde_json::Error) -> InvalidPullSecret {
    InvalidPullSecret { line: error.line(), column: error.column() }
}

/// Host and path of a key, without scheme and API version.
fn pattern(key: &str) -> String {
    if HUB_KEYS.contains(&key.trim_end_matches('/')) {
        return "docker.io".to_owned();
    }
    let bare = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let (host, path) = bare.split_once('/').unwrap_or((bare, ""));
    let path = format!("{path}/");
    let path = path.strip_prefix("v1/").or_else(|| path.strip_prefix("v2/")).unwrap_or(&path);
    format!("{host}/{path}").trim_end_matches('/').to_owned()
}

/// True when the hosts match label by label and the path of the pattern is a prefix of the image's path.
fn is_match(pattern: &str, image: &Reference) -> bool {
    let (host, path) = pattern.split_once('/').unwrap_or((pattern, ""));
    let (host, port) = host.split_once(':').map_or((host, None), |(host, port)| (host, Some(port)));
    let registry = image.registry();
    let (name, wanted) = registry.split_once(':').map_or((registry, None), |(name, port)| (name, Some(port)));
    let (parts, names): (Vec<_>, Vec<_>) = (host.split('.').collect(), name.split('.').collect());
    port == wanted
        && parts.len() == names.len()
        && parts.iter().zip(&names).all(|(part, name)| is_glob_match(part.as_bytes(), name.as_bytes()))
        && image.repository().starts_with(path)
}

/// Matches `text` against a pattern in which `*` stands for any text without a dot.
fn is_glob_match(glob: &[u8], text: &[u8]) -> bool {
    match glob {
        [] => text.is_empty(),
        [b'*', rest @ ..] => (0..=text.len()).any(|at| is_glob_match(rest, &text[at..])),
        [first, rest @ ..] => text.first() == Some(first) && is_glob_match(rest, &text[1..]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users(json: &str, image: &str) -> Vec<String> {
        let secret = PullSecret::parse(json.as_bytes()).unwrap();
        let user = |one: Credentials| match one {
            Credentials::Basic { user, .. } => user,
            other => format!("{other:?}"),
        };
        secret.credentials(&image.parse().unwrap()).into_iter().map(user).collect()
    }

    #[test]
    fn entries_match_by_host_and_path() {
        for (key, image, want) in [
            ("reg.example.org", "reg.example.org/a/b:1", true),
            ("https://reg.example.org/", "reg.example.org/a/b:1", true),
            ("https://reg.example.org/v2/", "reg.example.org/a/b:1", true),
            ("reg.example.org/a", "reg.example.org/a/b:1", true),
            ("reg.example.org/c", "reg.example.org/a/b:1", false),
            ("*.example.org", "reg.example.org/a/b:1", true),
            ("r*g.example.org", "reg.example.org/a/b:1", true),
            ("*.org", "reg.example.org/a/b:1", false),
            ("reg.example.org:5000", "reg.example.org:5000/a", true),
            ("reg.example.org", "reg.example.org:5000/a", false),
            ("https://index.docker.io/v1/", "busybox", true),
            ("docker.io", "busybox", true),
            ("docker.io/team", "busybox", false),
        ] {
            let json = format!(r#"{{"auths":{{"{key}":{{"username":"u","password":"p"}}}}}}"#);
            assert_eq!(users(&json, image), vec!["u"; usize::from(want)], "{key} {image}");
        }
    }

    #[test]
    fn longest_path_is_tried_first() {
        let json = r#"{"auths":{"r.io":{"username":"all","password":"p"},"r.io/team":{"auth":"dGVhbTpw"},
            "r.io/none":{}}}"#;
        assert_eq!(users(json, "r.io/team/app"), ["team", "all"]);
        assert_eq!(users(json, "r.io/none/app"), ["all"]);
    }

    #[test]
    fn errors_do_not_quote_the_secret() {
        let error = PullSecret::parse(br#"{"auths": "hunter2"}"#).map(drop).unwrap_err();
        assert!(!error.to_string().contains("hunter2"), "{error}");
        let legacy = PullSecret::parse_legacy(br#"{"r.io":{"auth":"dTpw"}}"#).unwrap();
        assert_eq!(legacy.credentials(&"r.io/a".parse().unwrap()).len(), 1);
    }
}
