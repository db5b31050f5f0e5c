//! Disks of the runtimes of macOS: tart, lume, macOS-vz. Pure.

use serde_json::Value;

use super::{DISK_MAX, Pack, Piece, digest, note, size, wrong};
use crate::{Digest, ImageError};

const TART: &str = "application/vnd.cirruslabs.tart.";
const TART_NOTES: Notes = Notes {
    bytes: "org.cirruslabs.tart.uncompressed-size",
    digest: "org.cirruslabs.tart.uncompressed-content-digest",
};
const VZ_DISK: &str = "application/vnd.agoda.macosvz.disk.image.v1";
const VZ_NOTES: Notes = Notes {
    bytes: "com.agoda.macosvz.content.uncompressed-size",
    digest: "com.agoda.macosvz.content.uncompressed-digest",
};
/// Of lume: chunks as they are made now, the first ones, and parts that say by a parameter that they are no archive.
const LUME_DISK: &str = "application/vnd.trycua.lume.disk.v1";
const LUME_FIRST: &str = "application/octet-stream+lz4";
const LUME_PART: &str = "application/vnd.oci.image.layer.v1.tar";
const LUME_NOTES: Notes = Notes {
    bytes: "org.trycua.lume.content.uncompressed-size",
    digest: "org.trycua.lume.content.uncompressed-digest",
};
const LUME_NUMBER: &str = "org.trycua.lume.part.number";
const LUME_OFFSET: &str = "org.trycua.lume.part.offset";
const LUME_TOTAL: &str = "org.trycua.lume.total-uncompressed-size";

/// Annotations that say what a piece unpacks to.
struct Notes {
    bytes: &'static str,
    digest: &'static str,
}

/// The pieces of a disk of one of these; `None` for what is another's.
pub(super) fn found(manifest: &Value, layers: &[Value]) -> Result<Option<Vec<Piece>>, ImageError> {
    let any = |test: fn(&str) -> bool| layers.iter().any(|l| test(kind(l)));
    if any(|kind| kind.starts_with(TART)) {
        return tart(layers).map(Some);
    }
    if any(|kind| kind == VZ_DISK) {
        return macos_vz(layers).map(Some);
    }
    if any(|kind| lume_pack(kind).is_some()) {
        return lume(manifest, layers).map(Some);
    }
    Ok(None)
}

fn kind(layer: &Value) -> &str {
    layer["mediaType"].as_str().unwrap_or_default()
}

/// A piece whose layer may say what it unpacks to.
fn piece(layer: &Value, pack: Pack, notes: &Notes) -> Result<Piece, ImageError> {
    let raw_bytes = note(layer, notes.bytes)
        .map(|n| n.parse::<u64>().ok().filter(|n| *n <= DISK_MAX).ok_or_else(|| wrong("a piece's length")));
    let raw: Option<Digest> =
        note(layer, notes.digest).map(|d| d.parse().map_err(|_| wrong("a digest"))).transpose()?;
    Ok(Piece {
        blob: digest(&layer["digest"])?,
        blob_bytes: size(layer)?,
        pack,
        raw_bytes: raw_bytes.transpose()?,
        raw,
    })
}

fn tart(layers: &[Value]) -> Result<Vec<Piece>, ImageError> {
    let of = |l: &Value, what: &str| kind(l).strip_prefix(TART).is_some_and(|t| t == what);
    if layers.iter().any(|l| of(l, "disk.v1")) {
        return Err(ImageError::unsupported(
            "a tart image of the first version (disk.v1), which is out of use; push it again with a current tart",
        ));
    }
    let disk = layers.iter().filter(|l| of(l, "disk.v2"));
    let pieces: Vec<_> = disk.map(|l| piece(l, Pack::Lz4, &TART_NOTES)).collect::<Result<_, ImageError>>()?;
    if pieces.iter().any(|p| p.raw_bytes.is_none()) {
        return Err(wrong("a piece's length"));
    }
    match pieces.is_empty() {
        true => Err(ImageError::unsupported("a tart image without a disk")),
        false => Ok(pieces),
    }
}

fn macos_vz(layers: &[Value]) -> Result<Vec<Piece>, ImageError> {
    let mut disks = layers.iter().filter(|l| kind(l) == VZ_DISK);
    match (disks.next(), disks.next()) {
        (Some(disk), None) => Ok(vec![piece(disk, Pack::Gzip, &VZ_NOTES)?]),
        _ => Err(ImageError::unsupported("a macOS-vz image with several disks")),
    }
}

/// How a layer of a lume image is packed; `None` for one that is no part of its disk.
fn lume_pack(kind: &str) -> Option<Pack> {
    match kind.split(';').next().unwrap_or_default() {
        LUME_DISK => Some(Pack::Gzip),
        LUME_FIRST => Some(Pack::Lz4),
        LUME_PART if parameter(kind, "part.number").is_some() => Some(Pack::Plain),
        _ => None,
    }
}

/// A parameter of a media type.
fn parameter<'a>(kind: &'a str, name: &str) -> Option<&'a str> {
    kind.split(';').skip(1).find_map(|p| p.trim().strip_prefix(name)?.strip_prefix('='))
}

/// By their numbers, none missing, where they have some; else in the manifest's order. Each where it says that it belongs.
fn lume(manifest: &Value, layers: &[Value]) -> Result<Vec<Piece>, ImageError> {
    let mut parts = Vec::new();
    for layer in layers {
        let Some(pack) = lume_pack(kind(layer)) else { continue };
        let mut piece = piece(layer, pack, &LUME_NOTES)?;
        if pack == Pack::Plain {
            piece.raw_bytes = Some(piece.blob_bytes);
        }
        let number = parameter(kind(layer), "part.number").or(note(layer, LUME_NUMBER));
        let number = number.map(|n| n.parse::<u32>().map_err(|_| wrong("a piece's number"))).transpose()?;
        let offset = note(layer, LUME_OFFSET).map(|n| n.parse::<u64>().map_err(|_| wrong("a piece's place")));
        parts.push((number, offset.transpose()?, piece));
    }
    parts.sort_by_key(|(number, _, _)| *number);
    let first = parts.first().and_then(|(number, _, _)| *number);
    let follows = |(n, (number, _, _)): (usize, &(Option<u32>, Option<u64>, Piece))| match (first, number) {
        (None, None) => true,
        (Some(first @ 0..=1), Some(number)) => u32::try_from(n).is_ok_and(|n| *number == first + n),
        _ => false,
    };
    if !parts.iter().enumerate().all(follows) {
        return Err(wrong("the numbers of pieces"));
    }
    let mut end = Some(0u64);
    for (_, offset, piece) in &parts {
        if offset.is_some_and(|offset| Some(offset) != end) {
            return Err(wrong("a piece's place"));
        }
        end = end.zip(piece.raw_bytes).and_then(|(end, bytes)| end.checked_add(bytes));
    }
    let total = note(manifest, LUME_TOTAL).and_then(|n| n.parse::<u64>().ok());
    match total.zip(end).is_some_and(|(total, end)| total != end) {
        true => Err(wrong("the length of all pieces")),
        false => Ok(parts.into_iter().map(|(_, _, piece)| piece).collect()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::disk::foreign::plan::tests::{layer, order};
    use crate::disk::foreign::plan::{Found, Pieces, found};

    #[test]
    fn tart_table() {
        let disk = |n: u8, bytes: &str| {
            layer("application/vnd.cirruslabs.tart.disk.v2", n, json!({TART_NOTES.bytes: bytes}))
        };
        let config = layer("application/vnd.cirruslabs.tart.config.v1", 0, json!({}));
        let old = layer("application/vnd.cirruslabs.tart.disk.v1", 1, json!({}));
        for (why, layers, want) in [
            ("in the manifest's order", vec![config.clone(), disk(2, "5"), disk(1, "6")], Some(vec![2, 1])),
            ("no length", vec![config.clone(), disk(2, "x")], None),
            ("the first version", vec![config.clone(), old], None),
            ("no disk", vec![config], None),
        ] {
            assert_eq!(order(found(&json!({"layers": layers}))), want, "{why}");
        }
    }

    #[test]
    fn lume_table() {
        let chunk = |n: u8, number: &str, offset: &str, bytes: &str| {
            let notes = json!({LUME_NUMBER: number, LUME_OFFSET: offset, LUME_NOTES.bytes: bytes});
            layer(LUME_DISK, n, notes)
        };
        let part = |n: u8, number: &str| {
            layer(&format!("{LUME_PART};part.number={number};part.total=2"), n, json!({}))
        };
        let first = |n: u8| layer(LUME_FIRST, n, json!({}));
        let other =
            layer("application/octet-stream", 9, json!({"org.opencontainers.image.title": "nvram.bin"}));
        for (why, layers, total, want) in [
            (
                "by number",
                vec![chunk(2, "2", "5", "6"), other.clone(), chunk(1, "1", "0", "5")],
                "11",
                Some(vec![1, 2]),
            ),
            ("parts that are no archives", vec![part(2, "2"), part(1, "1")], "20", Some(vec![1, 2])),
            ("in the manifest's order", vec![other, first(2), first(1)], "7", Some(vec![2, 1])),
            ("a gap", vec![chunk(1, "1", "0", "5"), chunk(2, "2", "6", "6")], "12", None),
            ("a number missing", vec![chunk(1, "1", "0", "5"), chunk(2, "3", "5", "6")], "11", None),
            ("one twice", vec![part(1, "1"), part(1, "1")], "20", None),
            ("one without", vec![first(1), part(2, "1")], "20", None),
            ("no number", vec![part(1, "x")], "10", None),
            ("less than all", vec![part(1, "1")], "20", None),
        ] {
            let manifest = json!({"layers": layers, "annotations": {LUME_TOTAL: total}});
            assert_eq!(order(found(&manifest)), want, "{why}");
        }
    }

    #[test]
    fn macos_vz_has_one_disk() {
        let disk = |n: u8| {
            layer(VZ_DISK, n, json!({VZ_NOTES.bytes: "100", VZ_NOTES.digest: Digest::of(b"x").to_string()}))
        };
        let aux = layer("application/vnd.agoda.macosvz.aux.image.v1", 9, json!({}));
        let of = |layers: Vec<Value>| {
            found(&json!({"artifactType": "application/vnd.agoda.macosvz.artifact", "layers": layers}))
        };
        let Ok(Found::Pieces(Pieces(pieces))) = of(vec![aux, disk(3)]) else { panic!("a disk") };
        let told = (pieces.len(), pieces[0].pack, pieces[0].raw_bytes, pieces[0].raw);
        assert_eq!(told, (1, Pack::Gzip, Some(100), Some(Digest::of(b"x"))));
        assert!(of(vec![disk(1), disk(2)]).is_err());
    }
}
