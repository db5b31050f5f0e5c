//! Manifest and configuration of cocoon's snapshot artifact. Pure.

use serde_json::{Map, Value, json};

use super::super::artifact::{DISK_MAX, MANIFEST, TITLE, digest, invalid, number};
use super::archive::{Spooled, SpooledFile};
use coracle_image::ImageError;
use coracle_oci::{
    Digest,
    cocoon::{MEDIA_TYPE_PREFIX as PREFIX, SNAPSHOT_FIELDS},
};

const CHUNK_INDEX: &str = "cocoonstack.chunk.index";
const CHUNK_COUNT: &str = "cocoonstack.chunk.count";
/// Limit of files in a snapshot, and of chunks in a file.
const FILES_MAX: usize = 256;
const CHUNKS_MAX: usize = 65_536;
/// Version of cocoon's snapshot artifact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CocoonVersion {
    /// One blob per file.
    #[default]
    V1,
    /// Large files are split into compressed chunks.
    V2,
}

impl CocoonVersion {
    fn word(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
        }
    }
}

/// Snapshot in a registry.
#[derive(Debug)]
pub(super) struct Remote {
    /// Configuration of the artifact.
    pub(super) config: Value,
    pub(super) files: Vec<RemoteFile>,
}

#[derive(Debug)]
pub(super) struct RemoteFile {
    pub(super) title: String,
    pub(super) mode: u32,
    /// Map and length of a sparse file.
    pub(super) sparse: Option<(String, u64)>,
    /// Length of the body, if the configuration contains it.
    pub(super) body_bytes: Option<u64>,
    pub(super) packed: bool,
    pub(super) blobs: Vec<RemoteBlob>,
}

#[derive(Debug)]
pub(super) struct RemoteBlob {
    pub(super) digest: Digest,
    pub(super) bytes: u64,
}

fn kind(title: &str) -> String {
    let own = match title {
        "config.json" => "vm.config+json",
        "state.json" => "vm.state+json",
        "memory-ranges" => "vm.memory",
        "cidata.img" => "vm.cidata",
        _ if title.ends_with(".qcow2") => "disk.qcow2",
        _ if title.ends_with(".raw") => "disk.raw",
        _ => return "application/octet-stream".to_owned(),
    };
    format!("{PREFIX}{own}")
}

/// Writes configuration and manifest.
pub(super) fn write(spooled: &Spooled, version: CocoonVersion) -> (Vec<u8>, Vec<u8>) {
    let mut config = Map::new();
    config.insert("schemaVersion".into(), version.word().into());
    for (from, to) in SNAPSHOT_FIELDS {
        config.insert(to.into(), spooled.config[from].clone());
    }
    let files: Map<String, Value> =
        spooled.files.iter().map(|f| (f.title.clone(), file_properties(f, version))).collect();
    config.insert("files".into(), files.into());
    config.insert("createdAt".into(), spooled.config["created_at"].clone());
    let config = Value::Object(config).to_string().into_bytes();
    let layers: Vec<Value> = spooled.files.iter().flat_map(layers).collect();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": format!("{PREFIX}snapshot.{}+json", version.word()),
        "config": {
            "mediaType": format!("{PREFIX}snapshot.config.v1+json"),
            "digest": Digest::of(&config).to_string(),
            "size": config.len(),
        },
        "layers": layers,
        "annotations": {
            "cocoonstack.snapshot.baseimage": spooled.config["image"].as_str().unwrap_or_default(),
            "cocoonstack.snapshot.id": spooled.config["id"].as_str().unwrap_or_default(),
        },
    });
    (config, manifest.to_string().into_bytes())
}

fn file_properties(file: &SpooledFile, version: CocoonVersion) -> Value {
    let mut about = json!({"mode": file.mode});
    if let Some((map, size)) = &file.sparse {
        about["sparseMap"] = serde_json::from_str(map).unwrap_or_default();
        about["sparseSize"] = (*size).into();
    }
    if version == CocoonVersion::V2 {
        about["size"] = file.body_bytes.into();
        let chunk =
            |b: &super::archive::SpooledBlob| json!({"digest": b.digest.to_string(), "size": b.bytes});
        about["chunks"] = file.blobs.iter().map(chunk).collect();
    }
    about
}

fn layers(file: &SpooledFile) -> impl Iterator<Item = Value> {
    let count = file.blobs.len();
    file.blobs.iter().enumerate().map(move |(n, blob)| {
        let suffix = if file.packed { "+zstd" } else { "" };
        let mut layer = json!({
            "mediaType": format!("{}{suffix}", kind(&file.title)),
            "digest": blob.digest.to_string(),
            "size": blob.bytes,
            "annotations": {TITLE: file.title},
        });
        if file.packed {
            layer["annotations"][CHUNK_INDEX] = n.to_string().into();
            layer["annotations"][CHUNK_COUNT] = count.to_string().into();
        }
        layer
    })
}

/// Parses an artifact of either version.
pub(super) fn read(manifest: &Value, config: &Value) -> Result<Remote, ImageError> {
    let artifact = manifest["artifactType"].as_str().or(manifest["config"]["mediaType"].as_str());
    if !artifact.is_some_and(|t| t.strip_prefix(PREFIX).is_some_and(|t| t.starts_with("snapshot."))) {
        return Err(ImageError::unsupported("the artifact is not a snapshot of cocoon"));
    }
    if !matches!(config["schemaVersion"].as_str(), Some("v1" | "v2")) {
        return Err(ImageError::unsupported("snapshot of cocoon of a newer version"));
    }
    let mut files = Vec::<RemoteFile>::new();
    for layer in manifest["layers"].as_array().into_iter().flatten() {
        let title = layer["annotations"][TITLE].as_str().filter(|t| is_name(t));
        let title = title.ok_or_else(|| invalid("title of a layer"))?;
        let bytes =
            number(&layer["size"]).filter(|n| *n <= DISK_MAX).ok_or_else(|| invalid("size of a layer"))?;
        let blob = RemoteBlob { digest: digest(&layer["digest"])?, bytes };
        let packed = layer["mediaType"].as_str().is_some_and(|t| t.ends_with("+zstd"));
        let note = |key: &str| layer["annotations"][key].as_str().map(|n| n.parse::<usize>());
        let index = note(CHUNK_INDEX).transpose().map_err(|_| invalid("number of a chunk"))?.unwrap_or(0);
        let at = match files.iter().position(|f| f.title == title) {
            Some(at) => at,
            None => {
                files.push(file(title, packed, &config["files"][title])?);
                files.len() - 1
            }
        };
        let file = &files[at];
        // Requires chunks in order, and one title per file.
        if index != file.blobs.len()
            || file.packed != packed
            || index >= CHUNKS_MAX
            || files.len() > FILES_MAX
        {
            return Err(invalid("order of chunks"));
        }
        files[at].blobs.push(blob);
    }
    check_complete(manifest, config, &files)?;
    Ok(Remote { config: config.clone(), files })
}

/// Fails when a file or a chunk is missing.
fn check_complete(manifest: &Value, config: &Value, files: &[RemoteFile]) -> Result<(), ImageError> {
    let named = config["files"].as_object().into_iter().flat_map(|all| all.keys());
    if named.into_iter().any(|name| files.iter().all(|f| f.title != *name)) {
        return Err(invalid("list of files: a file has no layer"));
    }
    for layer in manifest["layers"].as_array().into_iter().flatten() {
        let Some(count) = layer["annotations"][CHUNK_COUNT].as_str() else { continue };
        let own = files.iter().find(|f| layer["annotations"][TITLE] == f.title.as_str());
        if own.is_none_or(|f| count.parse() != Ok(f.blobs.len())) {
            return Err(invalid("list of chunks: a chunk is missing"));
        }
    }
    Ok(())
}

fn file(title: &str, packed: bool, about: &Value) -> Result<RemoteFile, ImageError> {
    let mode = about["mode"].as_u64().and_then(|m| u32::try_from(m).ok()).unwrap_or(0o640) & 0o7777;
    let sparse = about["sparseMap"].as_array().filter(|map| !map.is_empty());
    let sparse = sparse.map(|map| (json!(map).to_string(), about["sparseSize"].as_u64().unwrap_or(0)));
    if sparse.as_ref().is_some_and(|(_, size)| *size > DISK_MAX) {
        return Err(invalid("size of a sparse file"));
    }
    let body_bytes = about["size"].as_u64();
    Ok(RemoteFile { title: title.to_owned(), mode, sparse, body_bytes, packed, blobs: Vec::new() })
}

/// True for a plain file name that fits into a tar header.
pub(super) fn is_name(name: &str) -> bool {
    let plain = |c: char| !c.is_control() && c != '/' && c != '\\';
    !name.is_empty() && name.len() <= 100 && name != "." && name != ".." && name.chars().all(plain)
}
