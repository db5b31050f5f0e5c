//! Entry points of the fuzz targets; not part of the API. Each accepts any bytes, keeps no files, and panics when an invariant
//! is broken.

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};

use crate::auth;
use crate::http::ranges::{self, Wanted};
use crate::manifest;
use crate::route::{self, Route};

/// Parses a request: method and path, headers line by line, an empty line, a manifest.
pub fn request(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\n\n").unwrap_or((&text, ""));
    let mut lines = head.lines();
    let (method, path) = lines.next().unwrap_or_default().split_once(' ').unwrap_or_default();
    let headers: HeaderMap = lines.filter_map(header).collect();
    let method = Method::from_bytes(method.as_bytes()).unwrap_or(Method::GET);
    // Only valid URIs reach the server.
    if let Ok(uri) = path.parse::<Uri>()
        && let Ok(route) = route::parse(&method, uri.path())
    {
        check(&route, &method);
    }
    let size = body.len() as u64;
    if let Wanted::Part(part) = ranges::requested_range(&headers, size, "\"x\"") {
        assert!(part.start < part.end && part.end <= size, "a range that is not there");
    }
    let _either = ranges::content_range(&headers);
    let _either = ranges::is_known(&headers, "\"x\"");
    if let Some(token) = auth::request_token(&headers) {
        assert!(!token.is_empty());
    }
    manifest(body.as_bytes());
}

/// Parses the manifest of a push.
pub fn manifest(bytes: &[u8]) {
    for said in
        [None, Some(coracle_oci::media_types::OCI_MANIFEST), Some(coracle_oci::media_types::OCI_INDEX)]
    {
        if let Ok(parsed) = manifest::parse(bytes, said) {
            assert!(parsed.blobs.iter().chain(&parsed.manifests).all(|child| child.size >= 0));
        }
    }
}

fn header(line: &str) -> Option<(HeaderName, HeaderValue)> {
    let (name, value) = line.split_once(": ")?;
    Some((name.parse().ok()?, HeaderValue::from_str(value).ok()?))
}

/// Asserts that names are not paths, and that rights do not depend on the spelling of a path.
fn check(route: &Route, method: &Method) {
    let name = match route {
        Route::Manifest(name, _)
        | Route::TagNames(name)
        | Route::Referrers(name, _)
        | Route::Blob(name, _)
        | Route::Uploads(name)
        | Route::Upload(name, _)
        | Route::Download(name)
        | Route::Repository(name)
        | Route::Tags(name)
        | Route::Tag(name, _) => name.as_str(),
        _ => "a",
    };
    let plain = |part: &str| part.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
    assert!(name.split('/').all(plain), "{name:?}");
    let writes = !matches!(*method, Method::GET | Method::HEAD);
    let open =
        matches!(route, Route::Health | Route::Base | Route::Token | Route::SingleSignOn | Route::Page(_));
    assert!(
        open || !writes || route.need(method).is_some_and(|n| n.access != auth::Access::Read),
        "{route:?}"
    );
}
