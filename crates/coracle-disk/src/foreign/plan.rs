//! Layout of a disk in the format of another tool, from its manifest. Pure.

mod mac;

use serde_json::Value;

use super::super::artifact::{DISK_MAX, TITLE, digest, invalid, number};
use coracle_image::ImageError;
use coracle_oci::{Digest, media_types::OCI_CONFIG};

const COCOON: &str = "application/vnd.cocoonstack.";
const CHUNK: [&str; 2] = ["cocoonstack.chunk.index", "cocoonstack.chunk.count"];
/// Limit of parts in one disk.
const PARTS_MAX: usize = 65_536;

/// Compression of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartCompression {
    Plain,
    Gzip,
    Zstd,
    Lz4,
}

/// Part of a disk. Parts are contiguous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) blob: Digest,
    pub(super) blob_bytes: u64,
    pub(super) pack: PartCompression,
    /// Length and digest of the raw bytes, if the manifest contains them.
    pub(super) raw_bytes: Option<u64>,
    pub(super) raw: Option<Digest>,
}

/// Format of an artifact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum ForeignDisk {
    /// The disk as contiguous parts.
    Parts(Parts),
    /// Container image whose topmost layer with a file below `/disk/` contains the disk.
    Container(ContainerLayers),
    /// Format of no known tool.
    Other,
}

/// Parts of a disk, see [`ForeignDisk::Parts`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Parts {
    pub(super) parts: Vec<Part>,
    /// Blob of the image's configuration. Its labels may state that the parts are not those of a raw disk.
    pub(super) labels: Option<(Digest, u64)>,
}

impl From<Vec<Part>> for Parts {
    fn from(parts: Vec<Part>) -> Self {
        Self { parts, labels: None }
    }
}

/// Layers of a container image, see [`ForeignDisk::Container`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct ContainerLayers(pub(super) Vec<(String, Digest, u64)>);

/// Detects the format.
///
/// # Errors
/// `OciError::Unsupported`, `OciError::Hostile`.
pub(in super::super) fn detect(manifest: &Value) -> Result<ForeignDisk, ImageError> {
    let artifact = manifest["artifactType"].as_str().unwrap_or_default();
    let config = manifest["config"]["mediaType"].as_str().unwrap_or_default();
    let layers = manifest["layers"].as_array().map(Vec::as_slice).unwrap_or_default();
    if layers.len() > PARTS_MAX {
        return Err(invalid("number of layers"));
    }
    let kind = |l: &Value| l["mediaType"].as_str().unwrap_or_default().to_owned();
    let cloud = |t: &str| {
        t.strip_prefix(COCOON).is_some_and(|t| t.starts_with("os-image.") || t.starts_with("windows-image."))
    };
    if cloud(artifact) || cloud(config) {
        return cloud_image(layers).map(|parts| ForeignDisk::Parts(parts.into()));
    }
    if let Some(parts) = mac::detect(manifest, layers)? {
        return Ok(ForeignDisk::Parts(parts));
    }
    if artifact.is_empty() && (config == OCI_CONFIG || config.ends_with("container.image.v1+json")) {
        let layer = |l: &Value| Ok::<_, ImageError>((kind(l), digest(&l["digest"])?, size(l)?));
        return Ok(ForeignDisk::Container(ContainerLayers(
            layers.iter().map(layer).collect::<Result<_, _>>()?,
        )));
    }
    Ok(ForeignDisk::Other)
}

fn size(layer: &Value) -> Result<u64, ImageError> {
    number(&layer["size"]).filter(|n| *n <= DISK_MAX).ok_or_else(|| invalid("size of a layer"))
}

fn annotation<'a>(layer: &'a Value, key: &str) -> Option<&'a str> {
    layer["annotations"][key].as_str()
}

/// Disk layers, sorted by title. Checks that the chunks of each title are in order and complete.
fn cloud_image(layers: &[Value]) -> Result<Vec<Part>, ImageError> {
    let mut found = Vec::new();
    for layer in layers {
        let kind = layer["mediaType"].as_str().and_then(|t| t.strip_prefix(COCOON)).unwrap_or_default();
        if !kind.contains("disk.") {
            continue;
        }
        let title = annotation(layer, TITLE).ok_or_else(|| invalid("title of a layer"))?;
        let index =
            annotation(layer, CHUNK[0]).map(|n| n.parse::<u64>().map_err(|_| invalid("number of a chunk")));
        let count =
            annotation(layer, CHUNK[1]).map(|n| n.parse::<u64>().map_err(|_| invalid("count of chunks")));
        let (index, count) = (index.transpose()?.unwrap_or(0), count.transpose()?.unwrap_or(1));
        let pack = if kind.ends_with("+zstd") { PartCompression::Zstd } else { PartCompression::Plain };
        let blob_bytes = size(layer)?;
        let raw_bytes = (pack == PartCompression::Plain).then_some(blob_bytes);
        let part = Part { blob: digest(&layer["digest"])?, blob_bytes, pack, raw_bytes, raw: None };
        found.push(((title.to_owned(), index), count, part));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    for title in found.chunk_by(|a, b| a.0.0 == b.0.0) {
        let whole = title.iter().enumerate().all(|(n, ((_, index), count, _))| {
            *index == n as u64 && usize::try_from(*count) == Ok(title.len())
        });
        if !whole {
            return Err(invalid("list of chunks: a chunk is missing"));
        }
    }
    match found.is_empty() {
        true => Err(ImageError::unsupported("cloud image without a disk")),
        false => Ok(found.into_iter().map(|(_, _, part)| part).collect()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    pub(in super::super) fn layer(kind: &str, seed: u8, notes: Value) -> Value {
        json!({"mediaType": kind, "digest": Digest::of(&[seed]).to_string(), "size": 10, "annotations": notes})
    }

    pub(in super::super) fn order(found: Result<ForeignDisk, ImageError>) -> Option<Vec<u8>> {
        let Ok(ForeignDisk::Parts(Parts { parts, .. })) = found else { return None };
        let seed = |p: &Part| (0..=255).find(|n| Digest::of(&[*n]) == p.blob).unwrap();
        Some(parts.iter().map(seed).collect())
    }

    #[test]
    fn cloud_image_table() {
        let part =
            |n: u8, title: &str| layer("application/vnd.cocoonstack.disk.raw.part", n, json!({TITLE: title}));
        let chunk = |n: u8, index: &str, count: &str| {
            let notes = json!({TITLE: "disk.raw", CHUNK[0]: index, CHUNK[1]: count});
            layer("application/vnd.cocoonstack.disk.raw+zstd", n, notes)
        };
        let other = layer("application/vnd.cocoonstack.vm.config+json", 9, json!({TITLE: "config.json"}));
        for (why, layers, want) in [
            ("by title", vec![part(2, "d.part.001"), other, part(1, "d.part.000")], Some(vec![1, 2])),
            ("chunks in order", vec![chunk(2, "1", "2"), chunk(1, "0", "2")], Some(vec![1, 2])),
            (
                "more than nine",
                (0..12).rev().map(|n| chunk(n, &n.to_string(), "12")).collect(),
                Some((0..12).collect()),
            ),
            ("a gap", vec![chunk(1, "0", "3"), chunk(3, "2", "3")], None),
            ("the last one missing", vec![chunk(1, "0", "2")], None),
            ("one twice", vec![chunk(1, "0", "2"), chunk(1, "0", "2")], None),
            ("no number", vec![chunk(1, "x", "1")], None),
            ("no disk", vec![], None),
        ] {
            let manifest =
                json!({"artifactType": "application/vnd.cocoonstack.os-image.v1+json", "layers": layers});
            assert_eq!(order(detect(&manifest)), want, "{why}");
        }
        let legacy = layer("application/vnd.cocoonstack.windows.disk.qcow2", 4, json!({TITLE: "w.qcow2"}));
        let manifest =
            json!({"artifactType": "application/vnd.cocoonstack.windows-image.v1+json", "layers": [legacy]});
        assert_eq!(order(detect(&manifest)), Some(vec![4]));
    }

    #[test]
    fn detect_distinguishes_container_images_from_artifacts() {
        let tar = layer("application/vnd.oci.image.layer.v1.tar+gzip", 1, json!({}));
        let of = |config: &str, artifact: &str| {
            detect(&json!({"artifactType": artifact, "config": {"mediaType": config}, "layers": [tar]}))
                .unwrap()
        };
        assert!(matches!(of(OCI_CONFIG, ""), ForeignDisk::Container(_)));
        assert_eq!(of("application/vnd.example.config", ""), ForeignDisk::Other);
        assert_eq!(of(OCI_CONFIG, "application/vnd.example"), ForeignDisk::Other);
    }
}
