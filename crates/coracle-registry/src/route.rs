//! Paths, parsed once. Pure.

use axum::http::Method;
use percent_encoding::percent_decode_str;

use crate::auth::Access;
use crate::digest::Digest;
use crate::error::{Code, Problem};
use crate::names::{Reference, RepositoryName, Tag, UploadId};

/// What a path names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Health,
    Base,
    Catalog,
    Token,
    Manifest(RepositoryName, Reference),
    TagNames(RepositoryName),
    Referrers(RepositoryName, Digest),
    Blob(RepositoryName, Digest),
    Uploads(RepositoryName),
    Upload(RepositoryName, UploadId),
    Download(RepositoryName),
    Stats,
    Repositories,
    Repository(RepositoryName),
    Tags(RepositoryName),
    Tag(RepositoryName, Tag),
    Sync,
    Garbage,
    Tokens,
    StoredToken(String),
    SingleSignOn,
    Page(PagePath),
}

/// Pages for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PagePath {
    Home,
    Repository(RepositoryName),
    Manifest(RepositoryName, Reference),
    Tokens,
    Style,
}

impl Route {
    /// The word for metrics.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Self::Health => "health",
            Self::Base => "base",
            Self::Catalog => "catalog",
            Self::Token => "token",
            Self::Manifest(..) => "manifest",
            Self::TagNames(_) => "tags",
            Self::Referrers(..) => "referrers",
            Self::Blob(..) => "blob",
            Self::Uploads(_) | Self::Upload(..) => "upload",
            Self::Download(_) => "download",
            Self::Page(_) => "page",
            _ => "api",
        }
    }

    /// What a request needs. `None`: nothing.
    pub(crate) fn access(&self, method: &Method) -> Option<Access> {
        let reads = matches!(*method, Method::GET | Method::HEAD);
        match self {
            Self::Health | Self::Token | Self::Base | Self::SingleSignOn | Self::Page(PagePath::Style) => {
                None
            }
            Self::Tokens | Self::StoredToken(_) | Self::Page(PagePath::Tokens) => Some(Access::Tokens),
            // Where an upload is belongs to who writes.
            Self::Uploads(_) | Self::Upload(..) => Some(Access::Write),
            Self::Stats | Self::Repositories | Self::Repository(_) | Self::Tags(_) | Self::Tag(..)
                if reads =>
            {
                Some(Access::Browse)
            }
            Self::Garbage | Self::Page(_) if reads => Some(Access::Browse),
            _ if reads => Some(Access::Read),
            _ => Some(Access::Write),
        }
    }
}

/// Reads a path. The error is what the client gets.
pub(crate) fn parse(method: &Method, path: &str) -> Result<Route, Problem> {
    let decoded = percent_decode_str(path).decode_utf8().map_err(|_| nothing())?;
    let path = decoded.as_ref();
    if let Some(rest) = path.strip_prefix("/v2/") {
        return distribution(method, rest);
    }
    if let Some(rest) = path.strip_prefix("/api/") {
        return api(rest);
    }
    match path {
        "/healthz" => Ok(Route::Health),
        "/v2" => Ok(Route::Base),
        "/" => Ok(Route::Page(PagePath::Home)),
        "/style.css" => Ok(Route::Page(PagePath::Style)),
        "/tokens" => Ok(Route::Page(PagePath::Tokens)),
        "/login" | "/login/callback" | "/logout" | "/auth/me" => Ok(Route::SingleSignOn),
        _ => match (path.strip_prefix("/dl/"), path.strip_prefix("/r/")) {
            (Some(name), _) => Ok(Route::Download(repository(name)?)),
            (_, Some(rest)) => page(rest),
            (None, None) => Err(nothing()),
        },
    }
}

fn nothing() -> Problem {
    Problem::new(Code::NameUnknown, "nothing is served here")
}

fn repository(text: &str) -> Result<RepositoryName, Problem> {
    text.parse().map_err(|e| Problem::new(Code::NameInvalid, format!("{e}")))
}

fn digest(text: &str) -> Result<Digest, Problem> {
    text.parse().map_err(|e| Problem::new(Code::DigestInvalid, format!("{e}")))
}

fn reference(method: &Method, text: &str) -> Result<Reference, Problem> {
    text.parse().map_err(|e| match *method {
        // What cannot exist is not there.
        Method::GET | Method::HEAD | Method::DELETE => Problem::new(Code::ManifestUnknown, format!("{e}")),
        _ => Problem::new(
            if text.contains(':') { Code::DigestInvalid } else { Code::TagInvalid },
            format!("{e}"),
        ),
    })
}

/// Below `/v2/`. The name has slashes, so the path is read from its end.
fn distribution(method: &Method, rest: &str) -> Result<Route, Problem> {
    match rest {
        "" => return Ok(Route::Base),
        "_catalog" => return Ok(Route::Catalog),
        "token" => return Ok(Route::Token),
        _ => {}
    }
    if let Some(name) = rest.strip_suffix("/tags/list") {
        return Ok(Route::TagNames(repository(name)?));
    }
    if let Some(name) = rest.strip_suffix("/blobs/uploads/").or_else(|| rest.strip_suffix("/blobs/uploads")) {
        return Ok(Route::Uploads(repository(name)?));
    }
    let (front, last) = rest.rsplit_once('/').ok_or_else(nothing)?;
    if let Some(name) = front.strip_suffix("/blobs/uploads") {
        let unknown = |_| Problem::new(Code::BlobUploadUnknown, "there is no such upload in this repository");
        return Ok(Route::Upload(repository(name)?, last.parse().map_err(unknown)?));
    }
    if let Some(name) = front.strip_suffix("/manifests") {
        return Ok(Route::Manifest(repository(name)?, reference(method, last)?));
    }
    if let Some(name) = front.strip_suffix("/blobs") {
        return Ok(Route::Blob(repository(name)?, digest(last)?));
    }
    if let Some(name) = front.strip_suffix("/referrers") {
        return Ok(Route::Referrers(repository(name)?, digest(last)?));
    }
    // A name that breaks the rules may hide where it ends.
    for end in ["/manifests/", "/blobs/", "/referrers/", "/tags/"] {
        if let Some((name, _)) = rest.split_once(end) {
            repository(name)?;
        }
    }
    Err(nothing())
}

fn api(rest: &str) -> Result<Route, Problem> {
    match rest {
        "stats" => return Ok(Route::Stats),
        "repositories" => return Ok(Route::Repositories),
        "catalog/sync" => return Ok(Route::Sync),
        "garbage" => return Ok(Route::Garbage),
        "tokens" => return Ok(Route::Tokens),
        _ => {}
    }
    if let Some(id) = rest.strip_prefix("tokens/") {
        return Ok(Route::StoredToken(id.to_owned()));
    }
    let name = rest.strip_prefix("repositories/").ok_or_else(nothing)?;
    if let Some(name) = name.strip_suffix("/tags") {
        return Ok(Route::Tags(repository(name)?));
    }
    match name.rsplit_once("/tags/") {
        Some((name, tag)) => {
            let invalid = |e| Problem::new(Code::ManifestUnknown, format!("{e}"));
            Ok(Route::Tag(repository(name)?, tag.parse().map_err(invalid)?))
        }
        None => Ok(Route::Repository(repository(name)?)),
    }
}

/// `<name>` or `<name>@<tag or digest>`.
fn page(rest: &str) -> Result<Route, Problem> {
    match rest.split_once('@') {
        Some((name, text)) => {
            Ok(Route::Page(PagePath::Manifest(repository(name)?, reference(&Method::GET, text)?)))
        }
        None => Ok(Route::Page(PagePath::Repository(repository(rest)?))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_table() {
        let digest = Digest::of(b"x");
        let upload = "0123456789abcdef0123456789abcdef";
        for (path, want) in [
            ("/v2/".to_owned(), "base"),
            ("/v2".to_owned(), "base"),
            ("/v2/_catalog".to_owned(), "catalog"),
            ("/v2/token".to_owned(), "token"),
            ("/v2/a/b/manifests/latest".to_owned(), "manifest"),
            (format!("/v2/a/manifests/{digest}"), "manifest"),
            (format!("/v2/a/manifests/sha256%3A{}", digest.hex()), "manifest"),
            ("/v2/a/tags/list".to_owned(), "tags"),
            ("/v2/tags/list/tags/list".to_owned(), "tags"),
            (format!("/v2/a/blobs/{digest}"), "blob"),
            ("/v2/a/blobs/uploads/".to_owned(), "upload"),
            ("/v2/a/blobs/uploads".to_owned(), "upload"),
            (format!("/v2/a/blobs/uploads/{upload}"), "upload"),
            (format!("/v2/a/referrers/{digest}"), "referrers"),
            ("/dl/a/b".to_owned(), "download"),
            ("/api/repositories/a/b/tags/t".to_owned(), "api"),
            ("/".to_owned(), "page"),
            ("/r/a/b@latest".to_owned(), "page"),
            ("/v2/../etc/manifests/x".to_owned(), "NameInvalid"),
            ("/v2/a/%2e%2e/b/manifests/x".to_owned(), "NameInvalid"),
            ("/v2/a%2F..%2Fb/tags/list".to_owned(), "NameInvalid"),
            ("/v2/A/tags/list".to_owned(), "NameInvalid"),
            ("/v2/a/manifests/../../x".to_owned(), "NameUnknown"),
            ("/v2/a/manifests/.hidden".to_owned(), "ManifestUnknown"),
            ("/v2/a/blobs/sha256:../../x".to_owned(), "NameUnknown"),
            ("/v2/a/blobs/sha256:12".to_owned(), "DigestInvalid"),
            ("/v2/a/blobs/uploads/../x".to_owned(), "NameUnknown"),
            ("/dl/../../etc/passwd".to_owned(), "NameInvalid"),
            ("/etc/passwd".to_owned(), "NameUnknown"),
            ("/v2/%ff/tags/list".to_owned(), "NameUnknown"),
        ] {
            let got = match parse(&Method::GET, &path) {
                Ok(route) => route.word().to_owned(),
                Err(problem) => format!("{problem:?}"),
            };
            assert!(got.contains(want), "{path}: {got}, not {want}");
        }
    }
}
