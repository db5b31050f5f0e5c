//! Hosts and ports of URLs.

use reqwest::Url;

/// Host, and the port if the URL has one.
pub(super) fn authority_of(url: &Url) -> Option<String> {
    let host = url.host_str().filter(|_| matches!(url.scheme(), "http" | "https"))?;
    Some(url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}")))
}

/// Host and port, by default the port of the scheme.
pub(crate) fn origin_of(url: &Url) -> Option<(String, u16)> {
    Some((url.host_str()?.to_owned(), url.port_or_known_default()?))
}
