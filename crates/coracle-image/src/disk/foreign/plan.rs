//! What a foreign manifest says of its disk. Pure.

mod mac;

use serde_json::Value;

use super::super::artifact::{DISK_MAX, TITLE, digest, number, wrong};
use crate::{Digest, ImageError, manifest};

const COCOON: &str = "application/vnd.cocoonstack.";
const CHUNK: [&str; 2] = ["cocoonstack.chunk.index", "cocoonstack.chunk.count"];
/// Most pieces of one disk.
const PIECES_MAX: usize = 65_536;

/// How a piece is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pack {
    Plain,
    Gzip,
    Zstd,
    Lz4,
}

/// A piece of a disk; they follow each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) blob: Digest,
    pub(super) blob_bytes: u64,
    pub(super) pack: Pack,
    /// Its length and digest as a part of the disk, where the manifest tells.
    pub(super) raw_bytes: Option<u64>,
    pub(super) raw: Option<Digest>,
}

/// What a manifest is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Found {
    /// Pieces that are the disk, one behind the other.
    Pieces(Pieces),
    /// Layers, from the lowest, the topmost of which with a file below `/disk/` has the disk.
    Container(Layers),
    /// None of these.
    Other,
}

/// See [`Found::Pieces`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Pieces(pub(super) Vec<Piece>);

/// See [`Found::Container`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Layers(pub(super) Vec<(String, Digest, u64)>);

/// Looks at a manifest.
///
/// # Errors
/// [`ImageError::Unsupported`], [`ImageError::Hostile`].
pub(in super::super) fn found(manifest: &Value) -> Result<Found, ImageError> {
    let artifact = manifest["artifactType"].as_str().unwrap_or_default();
    let config = manifest["config"]["mediaType"].as_str().unwrap_or_default();
    let layers = manifest["layers"].as_array().map(Vec::as_slice).unwrap_or_default();
    if layers.len() > PIECES_MAX {
        return Err(wrong("the number of layers"));
    }
    let kind = |l: &Value| l["mediaType"].as_str().unwrap_or_default().to_owned();
    let cloud = |t: &str| {
        t.strip_prefix(COCOON).is_some_and(|t| t.starts_with("os-image.") || t.starts_with("windows-image."))
    };
    if cloud(artifact) || cloud(config) {
        return cloud_image(layers).map(|pieces| Found::Pieces(Pieces(pieces)));
    }
    if let Some(pieces) = mac::found(manifest, layers)? {
        return Ok(Found::Pieces(Pieces(pieces)));
    }
    if artifact.is_empty() && (config == manifest::OCI_CONFIG || config.ends_with("container.image.v1+json"))
    {
        let layer = |l: &Value| Ok((kind(l), digest(&l["digest"])?, size(l)?));
        return Ok(Found::Container(Layers(layers.iter().map(layer).collect::<Result<_, _>>()?)));
    }
    Ok(Found::Other)
}

fn size(layer: &Value) -> Result<u64, ImageError> {
    number(&layer["size"]).filter(|n| *n <= DISK_MAX).ok_or_else(|| wrong("a layer's size"))
}

fn note<'a>(layer: &'a Value, key: &str) -> Option<&'a str> {
    layer["annotations"][key].as_str()
}

/// Its disk layers, sorted by title; a title's chunks in their order, none missing.
fn cloud_image(layers: &[Value]) -> Result<Vec<Piece>, ImageError> {
    let mut found = Vec::new();
    for layer in layers {
        let kind = layer["mediaType"].as_str().and_then(|t| t.strip_prefix(COCOON)).unwrap_or_default();
        if !kind.contains("disk.") {
            continue;
        }
        let title = note(layer, TITLE).ok_or_else(|| wrong("a layer without a title"))?;
        let index = note(layer, CHUNK[0]).map(|n| n.parse::<u64>().map_err(|_| wrong("a chunk's number")));
        let count = note(layer, CHUNK[1]).map(|n| n.parse::<u64>().map_err(|_| wrong("a count of chunks")));
        let (index, count) = (index.transpose()?.unwrap_or(0), count.transpose()?.unwrap_or(1));
        let pack = if kind.ends_with("+zstd") { Pack::Zstd } else { Pack::Plain };
        let blob_bytes = size(layer)?;
        let raw_bytes = (pack == Pack::Plain).then_some(blob_bytes);
        let piece = Piece { blob: digest(&layer["digest"])?, blob_bytes, pack, raw_bytes, raw: None };
        found.push(((title.to_owned(), index), count, piece));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    for title in found.chunk_by(|a, b| a.0.0 == b.0.0) {
        let whole = title.iter().enumerate().all(|(n, ((_, index), count, _))| {
            *index == n as u64 && usize::try_from(*count) == Ok(title.len())
        });
        if !whole {
            return Err(wrong("a file with a missing chunk"));
        }
    }
    match found.is_empty() {
        true => Err(ImageError::unsupported("a cloud image without a disk")),
        false => Ok(found.into_iter().map(|(_, _, piece)| piece).collect()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    pub(in super::super) fn layer(kind: &str, seed: u8, notes: Value) -> Value {
        json!({"mediaType": kind, "digest": Digest::of(&[seed]).to_string(), "size": 10, "annotations": notes})
    }

    pub(in super::super) fn order(found: Result<Found, ImageError>) -> Option<Vec<u8>> {
        let Ok(Found::Pieces(Pieces(pieces))) = found else { return None };
        let seed = |p: &Piece| (0..=255).find(|n| Digest::of(&[*n]) == p.blob).unwrap();
        Some(pieces.iter().map(seed).collect())
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
            assert_eq!(order(found(&manifest)), want, "{why}");
        }
        let legacy = layer("application/vnd.cocoonstack.windows.disk.qcow2", 4, json!({TITLE: "w.qcow2"}));
        let manifest =
            json!({"artifactType": "application/vnd.cocoonstack.windows-image.v1+json", "layers": [legacy]});
        assert_eq!(order(found(&manifest)), Some(vec![4]));
    }

    #[test]
    fn container_images_are_looked_into_and_the_rest_is_not() {
        let tar = layer("application/vnd.oci.image.layer.v1.tar+gzip", 1, json!({}));
        let of = |config: &str, artifact: &str| {
            found(&json!({"artifactType": artifact, "config": {"mediaType": config}, "layers": [tar]}))
                .unwrap()
        };
        assert!(matches!(of(manifest::OCI_CONFIG, ""), Found::Container(_)));
        assert_eq!(of("application/vnd.example.config", ""), Found::Other);
        assert_eq!(of(manifest::OCI_CONFIG, "application/vnd.example"), Found::Other);
    }
}
