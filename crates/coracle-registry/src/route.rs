//! Routes, parsed from paths once. Pure.

use axum::http::Method;
use percent_encoding::percent_decode_str;

use crate::auth::{Access, Need};
use crate::error::{Code, ErrorResponse};
use crate::rights::Target;
use crate::upload_id::UploadId;
use coracle_oci::{Digest, RepositoryName, Tag, TagOrDigest};

/// Route of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Health,
    Base,
    Catalog,
    Token,
    Manifest(RepositoryName, TagOrDigest),
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

/// Web page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PagePath {
    Home,
    Repository(RepositoryName),
    Manifest(RepositoryName, TagOrDigest),
    Tokens,
    Style,
}

impl Route {
    /// Label for metrics.
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

    /// Required access. `None` for public routes.
    pub(crate) fn need(&self, method: &Method) -> Option<Need<'_>> {
        let reads = matches!(*method, Method::GET | Method::HEAD);
        let writes = if *method == Method::DELETE { Access::Delete } else { Access::Push };
        let (access, target) = match self {
            Self::Health | Self::Token | Self::Base | Self::SingleSignOn | Self::Page(PagePath::Style) => {
                return None;
            }
            Self::Tokens | Self::StoredToken(_) | Self::Page(PagePath::Tokens) => {
                (Access::Admin, Target::Registry)
            }
            Self::Sync => (Access::Admin, Target::Registry),
            Self::Garbage | Self::Stats if !reads => (Access::Admin, Target::Registry),
            Self::Garbage | Self::Stats => (Access::Browse, Target::Registry),
            // The location of an upload is known to its writer only, who may also cancel the upload.
            Self::Uploads(repo) | Self::Upload(repo, _) => (Access::Push, Target::Repository(repo)),
            Self::Repositories | Self::Page(PagePath::Home) if reads => (Access::Browse, Target::Listed),
            Self::Repository(repo)
            | Self::Tags(repo)
            | Self::Tag(repo, _)
            | Self::Page(PagePath::Repository(repo) | PagePath::Manifest(repo, _))
                if reads =>
            {
                (Access::Browse, Target::Repository(repo))
            }
            Self::Catalog | Self::Repositories | Self::Page(PagePath::Home) => {
                (if reads { Access::Read } else { writes }, Target::Listed)
            }
            Self::Manifest(repo, _)
            | Self::TagNames(repo)
            | Self::Referrers(repo, _)
            | Self::Blob(repo, _)
            | Self::Download(repo)
            | Self::Repository(repo)
            | Self::Tags(repo)
            | Self::Tag(repo, _)
            | Self::Page(PagePath::Repository(repo) | PagePath::Manifest(repo, _)) => {
                (if reads { Access::Read } else { writes }, Target::Repository(repo))
            }
        };
        Some(Need { access, target })
    }
}

/// Parses a path. The error is the response to send.
pub(crate) fn parse(method: &Method, path: &str) -> Result<Route, ErrorResponse> {
    let decoded = percent_decode_str(path).decode_utf8().map_err(|_| not_found_error())?;
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
            (None, None) => Err(not_found_error()),
        },
    }
}

fn not_found_error() -> ErrorResponse {
    ErrorResponse::new(Code::NameUnknown, "path not found")
}

fn repository(text: &str) -> Result<RepositoryName, ErrorResponse> {
    text.parse().map_err(|e| ErrorResponse::new(Code::NameInvalid, format!("{e}")))
}

fn digest(text: &str) -> Result<Digest, ErrorResponse> {
    text.parse().map_err(|e| ErrorResponse::new(Code::DigestInvalid, format!("{e}")))
}

fn reference(method: &Method, text: &str) -> Result<TagOrDigest, ErrorResponse> {
    text.parse().map_err(|e| match *method {
        // An invalid reference cannot exist, so reading it reports "not found".
        Method::GET | Method::HEAD | Method::DELETE => {
            ErrorResponse::new(Code::ManifestUnknown, format!("{e}"))
        }
        _ => ErrorResponse::new(
            if text.contains(':') { Code::DigestInvalid } else { Code::TagInvalid },
            format!("{e}"),
        ),
    })
}

/// Parses a path below `/v2/` from its end, because repository names contain slashes.
fn distribution(method: &Method, rest: &str) -> Result<Route, ErrorResponse> {
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
    let (front, last) = rest.rsplit_once('/').ok_or_else(not_found_error)?;
    if let Some(name) = front.strip_suffix("/blobs/uploads") {
        let unknown = |_| ErrorResponse::new(Code::BlobUploadUnknown, "upload not found in this repository");
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
    // Checks the name at every possible end, so that an invalid name is reported as such.
    for end in ["/manifests/", "/blobs/", "/referrers/", "/tags/"] {
        if let Some((name, _)) = rest.split_once(end) {
            repository(name)?;
        }
    }
    Err(not_found_error())
}

fn api(rest: &str) -> Result<Route, ErrorResponse> {
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
    let name = rest.strip_prefix("repositories/").ok_or_else(not_found_error)?;
    if let Some(name) = name.strip_suffix("/tags") {
        return Ok(Route::Tags(repository(name)?));
    }
    match name.rsplit_once("/tags/") {
        Some((name, tag)) => {
            let invalid = |e| ErrorResponse::new(Code::ManifestUnknown, format!("{e}"));
            Ok(Route::Tag(repository(name)?, tag.parse().map_err(invalid)?))
        }
        None => Ok(Route::Repository(repository(name)?)),
    }
}

/// Parses `<name>` or `<name>@<tag or digest>`.
fn page(rest: &str) -> Result<Route, ErrorResponse> {
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
