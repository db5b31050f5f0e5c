//! Hosts and ports of URLs.

use reqwest::Url;

/// Host and, where it is written, port.
pub(super) fn authority_of(url: &Url) -> Option<String> {
    let host = url.host_str().filter(|_| matches!(url.scheme(), "http" | "https"))?;
    Some(url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}")))
}

/// Host and port; the scheme's port where none is written.
pub(crate) fn origin_of(url: &Url) -> Option<(String, u16)> {
    Some((url.host_str()?.to_owned(), url.port_or_known_default()?))
}
