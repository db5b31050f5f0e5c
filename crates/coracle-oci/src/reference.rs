//! Image references in docker's notation.
//!
//! The grammar is that of the distribution project. Names without a registry mean Docker Hub.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{Digest, OciError, names};

const DOCKER_HUB: &str = "docker.io";
const NAME_BYTES_MAX: usize = 255;

/// `registry/repository[:tag][@digest]`, complete: the parser fills in defaults. A reference without a digest has a tag.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Reference {
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

impl Reference {
    /// Host and optional port, `docker.io` for Docker Hub.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// Path below the registry, such as `library/nginx`.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Tag; `latest` when neither tag nor digest was given.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// Digest of a pinned reference. It takes precedence over the tag.
    pub fn digest(&self) -> Option<&Digest> {
        self.digest.as_ref()
    }

    /// True for a reference whose content is expected to change: the tag `latest`, not pinned by a digest.
    pub fn is_floating(&self) -> bool {
        self.digest.is_none() && self.tag.as_deref() == Some("latest")
    }

    /// The same repository, pinned to `digest`, without a tag.
    pub fn with_digest(&self, digest: Digest) -> Self {
        Self { tag: None, digest: Some(digest), ..self.clone() }
    }

    /// Short form, without `docker.io/library/`.
    pub fn familiar(&self) -> String {
        let full = self.to_string();
        let short = full.strip_prefix("docker.io/").unwrap_or(&full);
        short.strip_prefix("library/").filter(|_| self.registry == DOCKER_HUB).unwrap_or(short).to_owned()
    }

    /// Name of the manifest in the API of the registry: the digest if there is one, else the tag.
    #[must_use]
    pub fn api_name(&self) -> String {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => digest.to_string(),
            (None, Some(tag)) => tag.clone(),
            (None, None) => "latest".to_owned(),
        }
    }
}

impl FromStr for Reference {
    type Err = OciError;

    /// Parses and completes a reference. Pure.
    ///
    /// # Errors
    /// [`OciError::InvalidReference`], naming the rule.
    fn from_str(text: &str) -> Result<Self, OciError> {
        parse(text)
            .map_err(|reason| OciError::InvalidReference { text: text.chars().take(300).collect(), reason })
    }
}

fn parse(text: &str) -> Result<Reference, String> {
    if text.is_empty() {
        return Err("it is empty".to_owned());
    }
    let (rest, digest) = match text.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest.parse::<Digest>().map_err(|e| e.to_string())?)),
        None => (text, None),
    };
    // A colon before the last slash belongs to the registry's port.
    let (name, tag) = match rest.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
        _ => (rest, None),
    };
    if let Some(tag) = tag {
        check_tag(tag)?;
    }
    let (registry, path) = split_registry(name);
    check_registry(registry)?;
    check_path(path)?;
    let (registry, repository) = complete(registry, path);
    if registry.len() + 1 + repository.len() > NAME_BYTES_MAX {
        return Err(format!("the name is longer than {NAME_BYTES_MAX} bytes"));
    }
    let tag = match (tag, &digest) {
        (Some(tag), _) => Some(tag.to_owned()),
        (None, Some(_)) => None,
        (None, None) => Some("latest".to_owned()),
    };
    Ok(Reference { registry, repository, tag, digest })
}

/// Splits off the registry. The first component is a registry if it cannot be part of a path: it has a dot, a port or an
/// upper-case letter, or is `localhost`.
fn split_registry(name: &str) -> (&str, &str) {
    match name.split_once('/') {
        Some((first, rest))
            if first == "localhost"
                || first.contains(['.', ':'])
                || first.contains(|c: char| c.is_ascii_uppercase()) =>
        {
            (first, rest)
        }
        _ => (DOCKER_HUB, name),
    }
}

fn complete(registry: &str, path: &str) -> (String, String) {
    let registry = if registry == "index.docker.io" || registry == "registry-1.docker.io" {
        DOCKER_HUB
    } else {
        registry
    };
    let official = registry == DOCKER_HUB && !path.contains('/');
    let repository = if official { format!("library/{path}") } else { path.to_owned() };
    (registry.to_owned(), repository)
}

fn check_registry(registry: &str) -> Result<(), String> {
    let bad = |why: &str| Err(format!("registry {registry:?} {why}"));
    let (host, port) = match registry.strip_prefix('[') {
        Some(v6) => match v6.split_once(']') {
            Some((host, "")) => (host, None),
            Some((host, port)) => (host, Some(port.strip_prefix(':').unwrap_or("x"))),
            None => return bad("has an unclosed bracket"),
        },
        None => registry.split_once(':').map_or((registry, None), |(host, port)| (host, Some(port))),
    };
    if registry.starts_with('[') {
        if host.parse::<std::net::Ipv6Addr>().is_err() {
            return bad("is not an IPv6 address");
        }
    } else if !host.split('.').all(is_host_label) {
        return bad("is not a host name");
    }
    match port.map(str::parse::<u16>) {
        Some(Err(_) | Ok(0)) => bad("has no valid port"),
        _ => Ok(()),
    }
}

fn is_host_label(label: &str) -> bool {
    !label.is_empty()
        && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        && !label.starts_with('-')
        && !label.ends_with('-')
}

fn check_path(path: &str) -> Result<(), String> {
    if path.is_empty() {
        return Err("the repository is empty".to_owned());
    }
    if path.len() == 64 && path.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return Err("64 hex digits are an identifier, not a name; write repository@sha256:…".to_owned());
    }
    match path.split('/').find(|part| !names::is_component(part)) {
        Some(part) => Err(format!(
            "path component {part:?} is not lower-case letters and digits, joined by single dots, one or two underscores, or dashes"
        )),
        None => Ok(()),
    }
}

fn check_tag(tag: &str) -> Result<(), String> {
    match names::is_tag(tag) {
        true => Ok(()),
        false => Err(format!("tag {tag:?} is not 1 to 128 letters, digits, underscores, dots and dashes")),
    }
}

impl TryFrom<String> for Reference {
    type Error = OciError;

    fn try_from(text: String) -> Result<Self, OciError> {
        text.parse()
    }
}

impl From<Reference> for String {
    fn from(reference: Reference) -> Self {
        reference.to_string()
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        match &self.digest {
            Some(digest) => write!(f, "@{digest}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parse_table() {
        let d = format!("sha256:{}", "ab".repeat(32));
        let long = format!("sha512:{}", "ab".repeat(64));
        for (text, want) in [
            ("nginx", "docker.io/library/nginx:latest".to_owned()),
            ("nginx:1.27", "docker.io/library/nginx:1.27".to_owned()),
            ("user/app", "docker.io/user/app:latest".to_owned()),
            ("docker.io/nginx", "docker.io/library/nginx:latest".to_owned()),
            ("index.docker.io/library/nginx", "docker.io/library/nginx:latest".to_owned()),
            ("ghcr.io/o/a/b:v1", "ghcr.io/o/a/b:v1".to_owned()),
            ("localhost/coracle/demo:1", "localhost/coracle/demo:1".to_owned()),
            ("localhost:5000/x", "localhost:5000/x:latest".to_owned()),
            ("localhost:5000", "docker.io/library/localhost:5000".to_owned()),
            ("[::1]:5000/x:y", "[::1]:5000/x:y".to_owned()),
            ("127.0.0.1:5000/a__b/c---d:T.1-_", "127.0.0.1:5000/a__b/c---d:T.1-_".to_owned()),
            ("Host/x", "Host/x:latest".to_owned()),
            (&format!("localhost:5000/x@{d}"), format!("localhost:5000/x@{d}")),
            (&format!("x:1@{d}"), format!("docker.io/library/x:1@{d}")),
            (&format!("x@{long}"), format!("docker.io/library/x@{long}")),
        ] {
            assert_eq!(text.parse::<Reference>().unwrap().to_string(), want, "{text}");
        }
    }

    #[test]
    fn refused_table() {
        let long = format!("a/{}", "b".repeat(254));
        let id = "ab".repeat(32);
        let tag = format!("x:{}", "t".repeat(129));
        for (why, text) in [
            ("empty", ""),
            ("upper-case repository", "docker.io/Nginx"),
            ("upper-case short name", "Nginx"),
            ("empty tag", "nginx:"),
            ("tag with a slash is a path", "a:b/c"),
            ("empty component", "a//b"),
            ("parent directory", "../x"),
            ("space", "a b"),
            ("shell", "a;rm"),
            ("three underscores", "a___b"),
            ("ends in a separator", "a-"),
            ("bad digest", "x@sha256:12"),
            ("other digest", "x@md5:d41d8cd98f00b204e9800998ecf8427e"),
            ("empty digest", "x@"),
            ("port out of range", "localhost:99999/x"),
            ("only a registry", "localhost:5000/"),
            ("unclosed bracket", "[::1/x:y"),
            ("name too long", &long),
            ("an image id", &id),
            ("tag too long", &tag),
            ("URL", "https://docker.io/x"),
            ("control characters", "x:\n"),
        ] {
            let got = text.parse::<Reference>();
            assert!(matches!(got, Err(OciError::InvalidReference { .. })), "{why}: {got:?}");
        }
    }

    #[test]
    fn familiar_is_short_and_parses_to_the_same() {
        for (text, want) in [
            ("nginx", "nginx:latest"),
            ("user/app:1", "user/app:1"),
            ("ghcr.io/library/a:1", "ghcr.io/library/a:1"),
        ] {
            let reference: Reference = text.parse().unwrap();
            assert_eq!(reference.familiar(), want);
            assert_eq!(reference.familiar().parse::<Reference>().unwrap(), reference);
        }
    }

    proptest! {
        #[test]
        fn display_parses_back(
            registry in "([a-z][a-z0-9]{0,8}\\.[a-z]{2,5}|localhost)(:[1-9][0-9]{0,3})?",
            path in "[a-z0-9]{1,8}((\\.|_|__|-{1,3})[a-z0-9]{1,4}){0,2}(/[a-z0-9]{1,8}){0,3}",
            tag in proptest::option::of("[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}"),
            digest in proptest::option::of("[0-9a-f]{64}"),
        ) {
            let tag = tag.map(|t| format!(":{t}")).unwrap_or_default();
            let digest = digest.map(|d| format!("@sha256:{d}")).unwrap_or_default();
            let first: Reference = format!("{registry}/{path}{tag}{digest}").parse().unwrap();
            let again: Reference = first.to_string().parse().unwrap();
            prop_assert_eq!(&first, &again);
            prop_assert_eq!(first.familiar().parse::<Reference>().unwrap(), first);
        }

        #[test]
        fn parsing_anything_never_panics(text in "\\PC{0,80}") {
            if let Ok(reference) = text.parse::<Reference>() {
                prop_assert_eq!(reference.to_string().parse::<Reference>().unwrap(), reference);
            }
        }
    }
}
