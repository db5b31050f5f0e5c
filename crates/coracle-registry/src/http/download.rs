//! `/dl/{name}`: the content of the tag `latest` as one file. For a cloud image the raw disk, for a snapshot the import
//! archive.

use axum::body::Body;
use axum::http::{Method, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use http_body_util::BodyExt;
use serde_json::{Value, json};

use super::{DIGEST_HEADER, manifests, value};
use crate::error::{Code, ErrorResponse};
use crate::registry::Registry;
use coracle_oci::{Digest, RepositoryName, TagOrDigest};

const TITLE: &str = "org.opencontainers.image.title";
const CHUNK: &str = "cocoonstack.chunk.index";
/// Largest configuration of a snapshot that is read for a page or an archive, bytes. The map of a fragmented disk is long.
const SHOWN_MAX: i64 = 1 << 20;
const CONFIG_MAX: i64 = 8 << 20;
const TAR_BLOCK: u64 = 512;
/// Longest file name in a plain tar header, bytes.
const NAME_MAX: usize = 100;

/// Layer that holds one file.
struct File {
    title: String,
    digest: Digest,
    size: u64,
}

/// Part of a response.
enum Piece {
    Bytes(Bytes),
    Blob(Digest, u64),
}

impl Piece {
    fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Blob(_, size) => *size,
        }
    }
}

pub(super) async fn download(
    registry: &std::sync::Arc<Registry>,
    repo: &RepositoryName,
    method: &Method,
) -> Result<Response, ErrorResponse> {
    let latest =
        "latest".parse().map(TagOrDigest::Tag).map_err(|_| ErrorResponse::new(Code::TagInvalid, "no tag"))?;
    let row = manifests::find(registry, repo, &latest).await?.ok_or_else(|| manifests::unknown(&latest))?;
    let bytes =
        manifests::bytes(registry, repo, &row.digest).await?.ok_or_else(|| manifests::unknown(&latest))?;
    let manifest: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    let (pieces, media_type) = match row.kind.as_str() {
        "cloud-image" => (disk(&manifest)?, "application/octet-stream"),
        "snapshot" => (archive(registry, repo, &manifest).await?, "application/x-tar"),
        _ => {
            return Err(ErrorResponse::new(
                Code::Unsupported,
                "only VM images and snapshots can be downloaded as a file",
            ));
        }
    };
    let length: u64 = pieces.iter().map(Piece::len).sum();
    let mut response = Response::new(Body::empty());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, value(media_type));
    headers.insert(header::CONTENT_LENGTH, length.into());
    headers.insert(DIGEST_HEADER, value(&row.digest));
    if *method == Method::GET {
        registry.metrics.count_downloaded(length);
        *response.body_mut() = send(std::sync::Arc::clone(registry), pieces);
    }
    Ok(response)
}

/// Sends the parts in order. A missing blob ends the response early; the client detects this by the length.
fn send(registry: std::sync::Arc<Registry>, pieces: Vec<Piece>) -> Body {
    let each = stream::iter(pieces).then(move |piece| {
        let registry = std::sync::Arc::clone(&registry);
        async move {
            match piece {
                Piece::Bytes(bytes) => Ok(Body::from(bytes).into_data_stream()),
                Piece::Blob(digest, size) => match registry.storage.read(&digest, 0..size).await {
                    Ok(Some(body)) => Ok(body.into_data_stream()),
                    Ok(None) => Err(axum::Error::new(std::io::Error::from(std::io::ErrorKind::NotFound))),
                    Err(error) => Err(axum::Error::new(error)),
                },
            }
        }
    });
    Body::from_stream(each.try_flatten())
}

fn refuse(why: &str) -> ErrorResponse {
    ErrorResponse::new(Code::Unsupported, why).status(StatusCode::NOT_IMPLEMENTED)
}

/// Layers of a kind, each with the title of its file.
fn files(manifest: &Value, wanted: &str) -> Result<Vec<File>, ErrorResponse> {
    let mut found = Vec::new();
    for layer in manifest["layers"].as_array().into_iter().flatten() {
        let kind = layer["mediaType"].as_str().unwrap_or_default();
        if !kind.contains(wanted) {
            continue;
        }
        if kind.ends_with("+zstd") || kind.ends_with("+gzip") || !layer["annotations"][CHUNK].is_null() {
            return Err(refuse(
                "compressed or chunked content cannot be downloaded as a file; pull it with a client",
            ));
        }
        let title = layer["annotations"][TITLE].as_str().unwrap_or_default();
        let plain = !title.is_empty() && title.len() <= NAME_MAX && title != "." && title != "..";
        if !plain || title.contains(['/', '\\']) || title.chars().any(char::is_control) {
            return Err(refuse("a layer has no title that is a file name"));
        }
        let digest = layer["digest"].as_str().unwrap_or_default().parse();
        let digest = digest.map_err(|_| refuse("a layer has no digest"))?;
        let size = layer["size"].as_u64().unwrap_or(0);
        found.push(File { title: title.to_owned(), digest, size });
    }
    Ok(found)
}

/// Disk layers of a cloud image, sorted by title.
fn disk(manifest: &Value) -> Result<Vec<Piece>, ErrorResponse> {
    let mut files = files(manifest, "disk.")?;
    files.sort_by(|a, b| a.title.cmp(&b.title));
    match files.is_empty() {
        true => Err(refuse("the image has no disk that can be sent as a file")),
        false => Ok(files.into_iter().map(|f| Piece::Blob(f.digest, f.size)).collect()),
    }
}

/// Configuration of a snapshot for a page. `None` when it is missing or too large.
pub(super) async fn shown_config(
    registry: &Registry,
    repo: &RepositoryName,
    manifest: &Value,
) -> Result<Option<Value>, ErrorResponse> {
    let bytes = small_blob(registry, repo, &manifest["config"], SHOWN_MAX).await?;
    Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
}

/// Small blob of a repository. `bytes_max` limits its size in the storage, not the size in the descriptor.
async fn small_blob(
    registry: &Registry,
    repo: &RepositoryName,
    descriptor: &Value,
    bytes_max: i64,
) -> Result<Option<Bytes>, ErrorResponse> {
    let Ok(digest) = descriptor["digest"].as_str().unwrap_or_default().parse::<Digest>() else {
        return Ok(None);
    };
    if !registry.meta.has_link(repo, &digest).await? {
        return Ok(None);
    }
    let size = registry.storage.size(&digest).await?;
    let Some(size) = size.filter(|size| i64::try_from(*size).is_ok_and(|size| size <= bytes_max)) else {
        return Ok(None);
    };
    let Some(body) = registry.storage.read(&digest, 0..size).await? else { return Ok(None) };
    Ok(body.collect().await.ok().map(http_body_util::Collected::to_bytes))
}

/// Import archive: `snapshot.json`, then each file. Sparse files come with their maps.
async fn archive(
    registry: &Registry,
    repo: &RepositoryName,
    manifest: &Value,
) -> Result<Vec<Piece>, ErrorResponse> {
    // Fails without the configuration: it has the properties of the VM and the maps of sparse files.
    let config = small_blob(registry, repo, &manifest["config"], CONFIG_MAX).await?;
    let config = config.and_then(|config| serde_json::from_slice::<Value>(&config).ok());
    let config = config.filter(Value::is_object);
    let config = config
        .ok_or_else(|| refuse("the configuration of the snapshot is missing or too large for a file"))?;
    let name = repo.as_str().rsplit('/').next().unwrap_or_default();
    let head = coracle_oci::cocoon::snapshot_json(&config, name).to_string().into_bytes();
    let mut pieces = Vec::new();
    entry(&mut pieces, "snapshot.json", 0o640, None, Piece::Bytes(head.into()));
    for file in files(manifest, "")? {
        let about = &config["files"][&file.title];
        let mode = about["mode"].as_u64().and_then(|m| u32::try_from(m).ok()).unwrap_or(0o640) & 0o7777;
        let sparse = about["sparseMap"].as_array().filter(|map| !map.is_empty());
        let sparse = sparse.map(|map| (json!(map).to_string(), about["sparseSize"].as_u64().unwrap_or(0)));
        entry(&mut pieces, &file.title, mode, sparse, Piece::Blob(file.digest, file.size));
    }
    pieces.push(Piece::Bytes(Bytes::from_static(&[0; 1024])));
    Ok(pieces)
}

/// Adds a file to a tar archive: PAX records of a sparse file, header, body, padding.
fn entry(pieces: &mut Vec<Piece>, name: &str, mode: u32, sparse: Option<(String, u64)>, body: Piece) {
    if let Some((map, size)) = sparse {
        let records = format!(
            "{}{}",
            record("COCOON.sparse.map", &map),
            record("COCOON.sparse.size", &size.to_string())
        );
        member(pieces, "PaxHeader", 0o640, tar::EntryType::XHeader, Piece::Bytes(records.into()));
    }
    member(pieces, name, mode, tar::EntryType::Regular, body);
}

fn member(pieces: &mut Vec<Piece>, name: &str, mode: u32, kind: tar::EntryType, body: Piece) {
    let mut header = tar::Header::new_ustar();
    header.as_old_mut().name[..name.len().min(NAME_MAX)]
        .copy_from_slice(&name.as_bytes()[..name.len().min(NAME_MAX)]);
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(body.len());
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header.set_cksum();
    let padding = body.len().next_multiple_of(TAR_BLOCK) - body.len();
    pieces.push(Piece::Bytes(Bytes::copy_from_slice(header.as_bytes())));
    pieces.push(body);
    pieces.push(Piece::Bytes(vec![0; usize::try_from(padding).unwrap_or(0)].into()));
}

/// PAX record. Its length includes the digits of the length.
fn record(key: &str, text: &str) -> String {
    let rest = key.len() + text.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    format!("{length} {key}={text}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pax_record_length_includes_itself() {
        for text in ["", "x", &"y".repeat(80), &"z".repeat(989)] {
            let record = record("K", text);
            let said: usize = record.split(' ').next().unwrap().parse().unwrap();
            assert_eq!(said, record.len());
        }
    }

    #[test]
    fn invalid_title_is_refused() {
        for (title, good) in [("disk.raw", true), ("../x", false), ("a/b", false), ("..", false), ("", false)]
        {
            let layer =
                json!({"digest": Digest::of(b"").to_string(), "size": 0, "annotations": {TITLE: title}});
            assert_eq!(files(&json!({"layers": [layer]}), "").is_ok(), good, "{title}");
        }
    }
}
