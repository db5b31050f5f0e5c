//! Web pages: repositories, tags, content and source of a manifest, tokens. Rendered on the server, without scripts.

use std::fmt::Write;

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use super::{manifests, time};
use crate::auth::Caller;
use crate::error::{Code, ErrorResponse};
use crate::registry::Registry;
use crate::route::PagePath;
use coracle_oci::{RepositoryName, TagOrDigest};

const POLICY: &str = "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'";
/// Limit of properties shown per object.
const FACTS_MAX: usize = 100;
const STYLE: &str = include_str!("style.css");

/// Style sheet of all pages.
pub(super) fn style() -> Response {
    let headers = [(header::CONTENT_TYPE, "text/css"), (header::CACHE_CONTROL, "max-age=3600")];
    add_security_headers((headers, STYLE).into_response())
}

pub(super) async fn page(
    registry: &Registry,
    caller: &Caller,
    page: PagePath,
) -> Result<Response, ErrorResponse> {
    let (title, body) = match page {
        PagePath::Style => return Ok(style()),
        PagePath::Home => ("Repositories".to_owned(), home(registry, caller).await?),
        PagePath::Tokens => ("Tokens".to_owned(), tokens(registry).await?),
        PagePath::Repository(repo) => (repo.to_string(), repository(registry, &repo).await?),
        PagePath::Manifest(repo, reference) => {
            (format!("{repo} {reference}"), manifest(registry, &repo, &reference).await?)
        }
    };
    let html = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{0} · registry</title>\
         <meta name=\"viewport\" content=\"width=device-width\"><link rel=\"stylesheet\" href=\"/style.css\"></head>\
         <body><a class=\"skip\" href=\"#main\">Skip to content</a><header><nav aria-label=\"Main\">\
         <a href=\"/\">Repositories</a> <a href=\"/tokens\">Tokens</a></nav></header>\
         <main id=\"main\" tabindex=\"-1\"><h1>{0}</h1>\n{body}</main></body></html>\n",
        escape(&title)
    );
    Ok(add_security_headers(
        ([(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CACHE_CONTROL, "no-store")], html)
            .into_response(),
    ))
}

fn add_security_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    for (name, value) in [
        ("content-security-policy", POLICY),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
    ] {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    response
}

/// Escapes untrusted text for HTML.
fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe += "&amp;",
            '<' => safe += "&lt;",
            '>' => safe += "&gt;",
            '"' => safe += "&quot;",
            '\'' => safe += "&#39;",
            c if c.is_control() => safe.push(' '),
            c => safe.push(c),
        }
    }
    safe
}

fn bytes(n: i64) -> String {
    let (mut scaled, mut unit) = (u64::try_from(n).unwrap_or(0), "B");
    let mut tenths = 0;
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if scaled < 1024 {
            break;
        }
        tenths = (scaled % 1024) * 10 / 1024;
        (scaled, unit) = (scaled / 1024, next);
    }
    if unit == "B" { format!("{scaled} B") } else { format!("{scaled}.{tenths} {unit}") }
}

/// Renders a table. Cells of the first column are row headers. The caller escapes the cells.
fn table(caption: &str, head: &[&str], rows: &[Vec<String>]) -> String {
    if rows.is_empty() {
        return format!("<p>{}: none.</p>", escape(caption));
    }
    let mut html = format!("<table><caption>{}</caption><thead><tr>", escape(caption));
    for cell in head {
        put(&mut html, format_args!("<th scope=\"col\">{cell}</th>"));
    }
    html += "</tr></thead><tbody>\n";
    for row in rows {
        html += "<tr>";
        for (n, cell) in row.iter().enumerate() {
            let (open, close) = if n == 0 { ("th scope=\"row\"", "th") } else { ("td", "td") };
            put(&mut html, format_args!("<{open}>{cell}</{close}>"));
        }
        html += "</tr>\n";
    }
    html + "</tbody></table>\n"
}

fn put(html: &mut String, what: std::fmt::Arguments<'_>) {
    let _strings_take_everything = html.write_fmt(what);
}

fn link(repo: &str, reference: Option<&str>, text: &str) -> String {
    let at = reference.map(|r| format!("@{}", escape(r))).unwrap_or_default();
    format!("<a href=\"/r/{}{at}\">{}</a>", escape(repo), escape(text))
}

async fn home(registry: &Registry, caller: &Caller) -> Result<String, ErrorResponse> {
    let rows: Vec<_> = registry
        .meta
        .repositories(None)
        .await?
        .iter()
        .filter(|r| caller.can_read(&r.name))
        .map(|r| {
            let kind = escape(r.kind.as_deref().unwrap_or_default());
            vec![link(&r.name, None, &r.name), kind, r.tag_count.to_string(), bytes(r.total), time(r.updated)]
        })
        .collect();
    let list = table("Repositories", &["Name", "Kind", "Tags", "Size", "Updated"], &rows);
    if !caller.can_read_all() {
        return Ok(list);
    }
    let stats = registry.meta.stats().await?;
    let sums = format!(
        "<p>{} repositories, {} tags, {} in {} blobs.</p>",
        stats.repositories,
        stats.tags,
        bytes(stats.bytes),
        stats.blobs
    );
    Ok(sums + &list)
}

async fn repository(registry: &Registry, repo: &RepositoryName) -> Result<String, ErrorResponse> {
    if !registry.meta.has_repository(repo).await? {
        return Err(ErrorResponse::new(Code::NameUnknown, "repository not found"));
    }
    let rows: Vec<_> = registry
        .meta
        .tags(repo, None)
        .await?
        .iter()
        .map(|t| {
            let name = link(repo.as_str(), Some(&t.tag), &t.tag);
            vec![
                name,
                escape(&t.kind),
                bytes(t.total),
                t.layers.to_string(),
                time(t.pushed),
                format!("<code>{}</code>", escape(&t.digest)),
            ]
        })
        .collect();
    Ok(table("Tags", &["Tag", "Kind", "Size", "Layers", "Pushed", "Digest"], &rows))
}

async fn manifest(
    registry: &Registry,
    repo: &RepositoryName,
    reference: &TagOrDigest,
) -> Result<String, ErrorResponse> {
    let unknown = || manifests::unknown(reference);
    let row = manifests::find(registry, repo, reference).await?.ok_or_else(unknown)?;
    let body = manifests::bytes(registry, repo, &row.digest).await?.ok_or_else(unknown)?;
    let document: Value = serde_json::from_slice(&body).unwrap_or_default();
    let mut facts = vec![
        vec!["Digest".to_owned(), format!("<code>{}</code>", escape(&row.digest))],
        vec!["Kind".to_owned(), escape(&row.kind)],
        vec!["Type".to_owned(), escape(&row.media_type)],
        vec!["Artifact type".to_owned(), escape(&row.artifact_type)],
        vec!["Size".to_owned(), bytes(row.total)],
    ];
    if let Some(subject) = &row.subject {
        facts.push(vec!["Made from".to_owned(), link(repo.as_str(), Some(subject), subject)]);
    }
    for (key, said) in document["annotations"].as_object().into_iter().flatten().take(FACTS_MAX) {
        facts.push(vec![escape(key), escape(said.as_str().unwrap_or_default())]);
    }
    let mut html = table("Facts", &["What", "Value"], &facts);
    if row.kind == "snapshot" {
        html += &snapshot(registry, repo, &document).await?;
    }
    let parts: Vec<_> = ["config", "layers", "manifests"]
        .iter()
        .flat_map(|part| match &document[*part] {
            Value::Array(all) => all.clone(),
            Value::Null => Vec::new(),
            one => vec![one.clone()],
        })
        .take(1000)
        .map(|d| part(repo, &d))
        .collect();
    html += &table("Contents", &["Name", "Type", "Size", "Digest"], &parts);
    if let Ok(digest) = row.digest.parse() {
        let (children, _) = super::lists::referrers_page(registry, repo, &digest, None, "").await?;
        let rows: Vec<_> = children
            .iter()
            .map(|c| {
                vec![
                    link(repo.as_str(), Some(&c.digest), &c.digest),
                    escape(&c.artifact_type),
                    bytes(c.total),
                ]
            })
            .collect();
        html += &table("Made from this, or about it", &["Digest", "Type", "Size"], &rows);
    }
    Ok(html)
}

/// Renders the VM properties in the configuration of a snapshot.
async fn snapshot(
    registry: &Registry,
    repo: &RepositoryName,
    manifest: &Value,
) -> Result<String, ErrorResponse> {
    let config = super::download::shown_config(registry, repo, manifest).await?.unwrap_or_default();
    let said = |value: &Value| match value {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(yes) => Some(if *yes { "yes" } else { "no" }.to_owned()),
        _ => None,
    };
    let facts = config.as_object().into_iter().flatten();
    let facts = facts.filter_map(|(key, value)| Some(vec![escape(key), escape(&said(value)?)]));
    Ok(table("Snapshot", &["What", "Value"], &facts.take(FACTS_MAX).collect::<Vec<_>>()))
}

fn part(repo: &RepositoryName, d: &Value) -> Vec<String> {
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let digest = text(&d["digest"]);
    let title = text(&d["annotations"]["org.opencontainers.image.title"]);
    let platform = match &d["platform"] {
        Value::Null => String::new(),
        p => format!("{}/{}", text(&p["os"]), text(&p["architecture"])),
    };
    let shown = match d["mediaType"].as_str() {
        Some(kind) if kind.contains("manifest") => link(repo.as_str(), Some(&digest), &digest),
        _ => format!("<code>{}</code>", escape(&digest)),
    };
    vec![
        escape(&format!("{title}{platform}")),
        escape(&text(&d["mediaType"])),
        bytes(d["size"].as_i64().unwrap_or(0)),
        shown,
    ]
}

async fn tokens(registry: &Registry) -> Result<String, ErrorResponse> {
    let rows: Vec<_> = registry
        .meta
        .tokens()
        .await?
        .iter()
        .map(|t| {
            let (role, repositories) = match t.rights() {
                Ok(rights) => (rights.role().as_str(), escape(&rights.globs().join(" "))),
                Err(_) => ("none", String::new()),
            };
            let used = t.last_used.map_or("never".to_owned(), time);
            let ends = t.expires.map_or("never".to_owned(), time);
            vec![
                escape(&t.name),
                role.to_owned(),
                repositories,
                escape(&t.created_by),
                time(t.created),
                used,
                ends,
            ]
        })
        .collect();
    Ok(table("Tokens", &["Name", "Role", "Repositories", "Made by", "Made", "Last used", "Expires"], &rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        assert_eq!(escape("<a href='x'>&\u{1b}"), "&lt;a href=&#39;x&#39;&gt;&amp; ");
        assert_eq!(link("a", Some("\"><script>"), "t"), "<a href=\"/r/a@&quot;&gt;&lt;script&gt;\">t</a>");
    }

    #[test]
    fn size_text_table() {
        for (n, want) in [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (-1, "0 B")]
        {
            assert_eq!(bytes(n), want);
        }
    }
}
