//! Parses request URLs (Kubernetes API, "API concepts").

use std::collections::HashMap;

use http::{Method, Uri};
use percent_encoding::percent_decode_str;

/// Object or collection that a request concerns.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Target {
    pub(super) group: String,
    /// API version. Empty for a list of groups or versions.
    pub(super) version: String,
    /// Resource. Empty for discovery.
    pub(super) plural: String,
    pub(super) namespace: String,
    /// Name of the object. Empty for collections.
    pub(super) name: String,
    pub(super) subresource: String,
}

/// Parsed URL.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Url {
    pub(super) target: Target,
    pub(super) query: HashMap<String, String>,
}

impl Url {
    /// Parses a URL. `None` when the path does not belong to the resource API.
    pub(super) fn parse(uri: &Uri) -> Option<Self> {
        let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        let parts: Vec<_> = uri.path().split('/').filter(|part| !part.is_empty()).map(decoded).collect();
        let parts: Vec<_> = parts.iter().map(String::as_str).collect();
        let (group, rest) = match parts.as_slice() {
            ["api", rest @ ..] => ("", rest),
            ["apis", group, rest @ ..] => (*group, rest),
            ["apis"] => ("", &[][..]),
            _ => return None,
        };
        let mut target = Target { group: group.to_owned(), ..Target::default() };
        let (version, rest) = rest.split_first().map_or(("", rest), |(version, rest)| (*version, rest));
        target.version = version.to_owned();
        // A namespace is a resource too: `namespaces/x` names it, `namespaces/x/pods` means the Pods in it.
        let rest = match rest {
            ["namespaces", namespace, plural, rest @ ..] if *plural != "status" && *plural != "finalize" => {
                target.namespace = (*namespace).to_owned();
                target.plural = (*plural).to_owned();
                rest
            }
            [plural, rest @ ..] => {
                target.plural = (*plural).to_owned();
                rest
            }
            [] => rest,
        };
        match rest {
            [] => {}
            [name] => target.name = (*name).to_owned(),
            [name, subresource, ..] => {
                target.name = (*name).to_owned();
                target.subresource = (*subresource).to_owned();
            }
        }
        let query = form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()).into_owned().collect();
        Some(Self { target, query })
    }

    pub(super) fn text(&self, key: &str) -> &str {
        self.query.get(key).map_or("", String::as_str)
    }

    pub(super) fn is_true(&self, key: &str) -> bool {
        matches!(self.text(key), "true" | "1")
    }

    pub(super) fn is_watch(&self) -> bool {
        self.is_true("watch")
    }
}

/// Label of a request for test logs, such as `PATCH /api/v1/nodes/n1`.
pub(super) fn label(method: &Method, uri: &Uri) -> String {
    format!("{method} {}", uri.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_table() {
        for (url, want) in [
            ("/api/v1/nodes/n1", ["", "v1", "nodes", "", "n1", ""]),
            ("/api/v1/namespaces/team", ["", "v1", "namespaces", "", "team", ""]),
            ("/api/v1/namespaces/team/pods/p/eviction?", ["", "v1", "pods", "team", "p", "eviction"]),
            ("/apis/g.io/v2/things?watch=true", ["g.io", "v2", "things", "", "", ""]),
            ("/apis/g.io/v2/namespaces/a/things/t/status", ["g.io", "v2", "things", "a", "t", "status"]),
            ("/apis/g.io/v2", ["g.io", "v2", "", "", "", ""]),
            ("/apis", ["", "", "", "", "", ""]),
        ] {
            let t = Url::parse(&url.parse().unwrap()).unwrap().target;
            let got = [&t.group, &t.version, &t.plural, &t.namespace, &t.name, &t.subresource];
            assert_eq!(got.map(String::as_str), want, "{url}");
        }
        assert_eq!(Url::parse(&"/healthz".parse().unwrap()), None);
    }
}
