//! Disks of VM runtimes on macOS: tart, lume, macOS-vz. Pure.

use serde_json::Value;

use super::{DISK_MAX, Part, PartCompression, Parts, annotation, digest, invalid, size};
use coracle_image::ImageError;
use coracle_oci::{Digest, media_types::OCI_CONFIG};

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
/// Media types of lume: current chunks, chunks of its first releases, and uncompressed parts.
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

/// Names of annotations with length and digest of the raw bytes.
struct Notes {
    bytes: &'static str,
    digest: &'static str,
}

/// Parts of a disk in one of these formats. `None` for other formats.
pub(super) fn detect(manifest: &Value, layers: &[Value]) -> Result<Option<Parts>, ImageError> {
    let any = |test: fn(&str) -> bool| layers.iter().any(|l| test(kind(l)));
    if any(|kind| kind.starts_with(TART)) {
        return tart(manifest, layers).map(Some);
    }
    if any(|kind| kind == VZ_DISK) {
        return macos_vz(layers).map(|parts| Some(parts.into()));
    }
    if any(|kind| lume_pack(kind).is_some()) {
        return lume(manifest, layers).map(|parts| Some(parts.into()));
    }
    Ok(None)
}

fn kind(layer: &Value) -> &str {
    layer["mediaType"].as_str().unwrap_or_default()
}

/// Part of a layer, with length and digest of its raw bytes if annotated.
fn part(layer: &Value, pack: PartCompression, notes: &Notes) -> Result<Part, ImageError> {
    let raw_bytes = annotation(layer, notes.bytes)
        .map(|n| n.parse::<u64>().ok().filter(|n| *n <= DISK_MAX).ok_or_else(|| invalid("length of a part")));
    let raw: Option<Digest> =
        annotation(layer, notes.digest).map(|d| d.parse().map_err(|_| invalid("digest"))).transpose()?;
    Ok(Part {
        blob: digest(&layer["digest"])?,
        blob_bytes: size(layer)?,
        pack,
        raw_bytes: raw_bytes.transpose()?,
        raw,
    })
}

fn tart(manifest: &Value, layers: &[Value]) -> Result<Parts, ImageError> {
    let of = |l: &Value, what: &str| kind(l).strip_prefix(TART).is_some_and(|t| t == what);
    if layers.iter().any(|l| of(l, "disk.v1")) {
        return Err(ImageError::unsupported(
            "tart image of the first version (disk.v1); push it again with a current tart",
        ));
    }
    let disk = layers.iter().filter(|l| of(l, "disk.v2"));
    let parts: Vec<_> =
        disk.map(|l| part(l, PartCompression::Lz4, &TART_NOTES)).collect::<Result<_, ImageError>>()?;
    if parts.iter().any(|p| p.raw_bytes.is_none()) {
        return Err(invalid("length of a part"));
    }
    match parts.is_empty() {
        true => Err(ImageError::unsupported("tart image without a disk")),
        false => {
            let config = &manifest["config"];
            let labels = (config["mediaType"] == OCI_CONFIG)
                .then(|| Ok::<_, ImageError>((digest(&config["digest"])?, size(config)?)));
            Ok(Parts { parts, labels: labels.transpose()? })
        }
    }
}

fn macos_vz(layers: &[Value]) -> Result<Vec<Part>, ImageError> {
    let mut disks = layers.iter().filter(|l| kind(l) == VZ_DISK);
    match (disks.next(), disks.next()) {
        (Some(disk), None) => Ok(vec![part(disk, PartCompression::Gzip, &VZ_NOTES)?]),
        _ => Err(ImageError::unsupported("macOS-vz image with several disks")),
    }
}

/// Compression of a layer of lume. `None` for a layer that does not belong to the disk.
fn lume_pack(kind: &str) -> Option<PartCompression> {
    match kind.split(';').next().unwrap_or_default() {
        LUME_DISK => Some(PartCompression::Gzip),
        LUME_FIRST => Some(PartCompression::Lz4),
        LUME_PART if parameter(kind, "part.number").is_some() => Some(PartCompression::Plain),
        _ => None,
    }
}

/// Parameter of a media type.
fn parameter<'a>(kind: &'a str, name: &str) -> Option<&'a str> {
    kind.split(';').skip(1).find_map(|p| p.trim().strip_prefix(name)?.strip_prefix('='))
}

/// Parts by number, or in the order of the manifest if none is numbered. Checks that the offsets match.
fn lume(manifest: &Value, layers: &[Value]) -> Result<Vec<Part>, ImageError> {
    let mut parts = Vec::new();
    for layer in layers {
        let Some(pack) = lume_pack(kind(layer)) else { continue };
        let mut part = part(layer, pack, &LUME_NOTES)?;
        if pack == PartCompression::Plain {
            part.raw_bytes = Some(part.blob_bytes);
        }
        let number = parameter(kind(layer), "part.number").or(annotation(layer, LUME_NUMBER));
        let number = number.map(|n| n.parse::<u32>().map_err(|_| invalid("number of a part"))).transpose()?;
        let offset =
            annotation(layer, LUME_OFFSET).map(|n| n.parse::<u64>().map_err(|_| invalid("offset of a part")));
        parts.push((number, offset.transpose()?, part));
    }
    parts.sort_by_key(|(number, _, _)| *number);
    let first = parts.first().and_then(|(number, _, _)| *number);
    let follows = |(n, (number, _, _)): (usize, &(Option<u32>, Option<u64>, Part))| match (first, number) {
        (None, None) => true,
        (Some(first @ 0..=1), Some(number)) => u32::try_from(n).is_ok_and(|n| *number == first + n),
        _ => false,
    };
    if !parts.iter().enumerate().all(follows) {
        return Err(invalid("numbers of parts"));
    }
    let mut end = Some(0u64);
    for (_, offset, part) in &parts {
        if offset.is_some_and(|offset| Some(offset) != end) {
            return Err(invalid("offset of a part"));
        }
        end = end.zip(part.raw_bytes).and_then(|(end, bytes)| end.checked_add(bytes));
    }
    let total = annotation(manifest, LUME_TOTAL).and_then(|n| n.parse::<u64>().ok());
    match total.zip(end).is_some_and(|(total, end)| total != end) {
        true => Err(invalid("length of all parts")),
        false => Ok(parts.into_iter().map(|(_, _, part)| part).collect()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::foreign::plan::tests::{layer, order};
    use crate::foreign::plan::{ForeignDisk, Parts, detect};

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
            assert_eq!(order(detect(&json!({"layers": layers}))), want, "{why}");
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
            ("uncompressed parts", vec![part(2, "2"), part(1, "1")], "20", Some(vec![1, 2])),
            ("in the manifest's order", vec![other, first(2), first(1)], "7", Some(vec![2, 1])),
            ("a gap", vec![chunk(1, "1", "0", "5"), chunk(2, "2", "6", "6")], "12", None),
            ("a number missing", vec![chunk(1, "1", "0", "5"), chunk(2, "3", "5", "6")], "11", None),
            ("one twice", vec![part(1, "1"), part(1, "1")], "20", None),
            ("one without", vec![first(1), part(2, "1")], "20", None),
            ("no number", vec![part(1, "x")], "10", None),
            ("less than all", vec![part(1, "1")], "20", None),
        ] {
            let manifest = json!({"layers": layers, "annotations": {LUME_TOTAL: total}});
            assert_eq!(order(detect(&manifest)), want, "{why}");
        }
    }

    #[test]
    fn macos_vz_has_one_disk() {
        let disk = |n: u8| {
            layer(VZ_DISK, n, json!({VZ_NOTES.bytes: "100", VZ_NOTES.digest: Digest::of(b"x").to_string()}))
        };
        let aux = layer("application/vnd.agoda.macosvz.aux.image.v1", 9, json!({}));
        let of = |layers: Vec<Value>| {
            detect(&json!({"artifactType": "application/vnd.agoda.macosvz.artifact", "layers": layers}))
        };
        let Ok(ForeignDisk::Parts(Parts { parts, .. })) = of(vec![aux, disk(3)]) else { panic!("a disk") };
        let found = (parts.len(), parts[0].pack, parts[0].raw_bytes, parts[0].raw);
        assert_eq!(found, (1, PartCompression::Gzip, Some(100), Some(Digest::of(b"x"))));
        assert!(of(vec![disk(1), disk(2)]).is_err());
    }
}
