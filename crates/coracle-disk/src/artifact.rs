//! Manifest of a disk artifact. Manifests are untrusted. Pure.

use std::ops::Range;

use serde_json::{Value, json};

use super::chunk;
use coracle_image::ImageError;
use coracle_oci::Digest;

pub(super) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const ARTIFACT: &str = "application/vnd.coracle.image.v1+json";
const CONFIG: &str = "application/vnd.coracle.image.config.v1+json";
const CHUNK: &str = "application/vnd.coracle.disk.window.v1+zstd";
const EMPTY: &str = "application/vnd.oci.empty.v1+json";
const OFFSET: &str = "dev.coracle.window.offset";
const BYTES: &str = "dev.coracle.window.bytes";
const RAW_DIGEST: &str = "dev.coracle.window.digest";
/// Content of an empty descriptor.
pub(super) const EMPTY_BLOB: &[u8] = b"{}";
/// Largest configuration, bytes.
pub(super) const CONFIG_MAX: u64 = 1 << 20;
/// Largest supported disk: 64 TiB.
pub(super) const DISK_MAX: u64 = 64 << 40;
pub(super) const TITLE: &str = "org.opencontainers.image.title";

/// Chunk whose bytes are not all zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// Range of the disk.
    pub(super) part: Range<u64>,
    /// Digest of the raw bytes.
    pub(super) raw: Digest,
    /// Blob with the compressed bytes.
    pub(super) blob: Digest,
    /// Bytes of the blob.
    pub(super) blob_bytes: u64,
}

/// Disk in a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Disk {
    pub(super) bytes: u64,
    pub(super) chunk_bytes: u64,
    /// Chunks, sorted by range.
    pub(super) chunks: Vec<Chunk>,
}

impl Disk {
    /// Writes configuration and manifest of the artifact.
    pub(super) fn write(&self, title: &str) -> (Vec<u8>, Vec<u8>) {
        let config = json!({"schemaVersion": 1, "diskBytes": self.bytes, "windowBytes": self.chunk_bytes, "format": "raw"});
        let config = config.to_string().into_bytes();
        let mut layers: Vec<Value> = self.chunks.iter().map(layer).collect();
        if layers.is_empty() {
            layers.push(empty_layer());
        }
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": ARTIFACT,
            "config": {"mediaType": CONFIG, "digest": Digest::of(&config).to_string(), "size": config.len()},
            "layers": layers,
            "annotations": {TITLE: title},
        });
        (config, manifest.to_string().into_bytes())
    }

    /// Digest and size of the configuration.
    pub(super) fn config_of(manifest: &[u8]) -> Result<(Digest, u64), ImageError> {
        let manifest = parse(manifest, "manifest")?;
        if manifest["artifactType"] != ARTIFACT || manifest["config"]["mediaType"] != CONFIG {
            return Err(ImageError::unsupported("the artifact is not a disk of Coracle"));
        }
        let size = number(&manifest["config"]["size"]).filter(|n| *n <= CONFIG_MAX);
        Ok((
            digest(&manifest["config"]["digest"])?,
            size.ok_or_else(|| invalid("size of the configuration"))?,
        ))
    }

    /// Parses manifest and configuration, and checks that the chunks do not overlap and lie within the disk.
    pub(super) fn read(manifest: &[u8], config: &[u8]) -> Result<Self, ImageError> {
        let (manifest, config) = (parse(manifest, "manifest")?, parse(config, "configuration")?);
        if config["schemaVersion"] != 1 || config["format"] != "raw" {
            return Err(ImageError::unsupported("disk of a newer version"));
        }
        let bytes = number(&config["diskBytes"])
            .filter(|n| *n <= DISK_MAX)
            .ok_or_else(|| invalid("size of the disk"))?;
        let chunk_bytes = number(&config["windowBytes"]).filter(|n| chunk::is_read(bytes, *n));
        let chunk_bytes = chunk_bytes.ok_or_else(|| invalid("size of chunks"))?;
        let chunks = chunks_of(&manifest, |_| true)?;
        Self { bytes, chunk_bytes, chunks }.sort_and_check()
    }

    /// Sorts the chunks. Fails when they overlap or lie outside of the disk.
    pub(super) fn sort_and_check(mut self) -> Result<Self, ImageError> {
        self.chunks.sort_by_key(|w| w.part.start);
        let mut end = 0;
        for chunk in &self.chunks {
            let length = chunk.part.end - chunk.part.start;
            if chunk.part.start < end || chunk.part.end > self.bytes || length > self.chunk_bytes {
                return Err(invalid("range of a chunk"));
            }
            end = chunk.part.end;
        }
        Ok(self)
    }
}

/// Chunks of the layers that satisfy `wanted`.
pub(super) fn chunks_of(manifest: &Value, wanted: impl Fn(&Value) -> bool) -> Result<Vec<Chunk>, ImageError> {
    let layers = manifest["layers"].as_array().into_iter().flatten();
    layers.filter(|l| l["mediaType"] == CHUNK && wanted(l)).map(chunk).collect()
}

/// Layer of an artifact without content.
pub(super) fn empty_layer() -> Value {
    json!({"mediaType": EMPTY, "digest": Digest::of(EMPTY_BLOB).to_string(), "size": EMPTY_BLOB.len()})
}

pub(super) fn layer(chunk: &Chunk) -> Value {
    json!({
        "mediaType": CHUNK,
        "digest": chunk.blob.to_string(),
        "size": chunk.blob_bytes,
        "annotations": {
            OFFSET: chunk.part.start.to_string(),
            BYTES: (chunk.part.end - chunk.part.start).to_string(),
            RAW_DIGEST: chunk.raw.to_string(),
        },
    })
}

fn chunk(layer: &Value) -> Result<Chunk, ImageError> {
    let said = |key: &str| layer["annotations"][key].as_str().and_then(|text| text.parse::<u64>().ok());
    let (offset, bytes) = (said(OFFSET), said(BYTES));
    let part = offset.zip(bytes).and_then(|(at, n)| Some(at..at.checked_add(n).filter(|_| n > 0)?));
    let blob_bytes = number(&layer["size"]).ok_or_else(|| invalid("size of a chunk"))?;
    let part = part.ok_or_else(|| invalid("range of a chunk"))?;
    // Frames that cannot be compressed grow by a few bytes.
    if blob_bytes > (part.end - part.start) + (part.end - part.start) / 64 + 4096 {
        return Err(invalid("size of a chunk: larger than its raw bytes"));
    }
    Ok(Chunk {
        part,
        raw: digest(&layer["annotations"][RAW_DIGEST])?,
        blob: digest(&layer["digest"])?,
        blob_bytes,
    })
}

pub(super) fn parse(bytes: &[u8], what: &str) -> Result<Value, ImageError> {
    serde_json::from_slice(bytes)
        .map_err(|e| ImageError::hostile(format!("cannot parse {what} of a disk: {e}")))
}

pub(super) fn number(value: &Value) -> Option<u64> {
    value.as_u64()
}

pub(super) fn digest(value: &Value) -> Result<Digest, ImageError> {
    value.as_str().and_then(|text| text.parse().ok()).ok_or_else(|| invalid("digest"))
}

pub(super) fn invalid(what: &str) -> ImageError {
    ImageError::hostile(format!("manifest of a disk: invalid {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn disk() -> Disk {
        let chunk = |n: u64| Chunk {
            part: n * MIB..(n + 1) * MIB,
            raw: Digest::of(&[1]),
            blob: Digest::of(&[2]),
            blob_bytes: 50,
        };
        Disk { bytes: 10 * MIB, chunk_bytes: MIB, chunks: vec![chunk(0), chunk(3), chunk(9)] }
    }

    #[test]
    fn disk_manifest_round_trip() {
        for disk in [disk(), Disk { chunks: vec![], ..disk() }] {
            let (config, manifest) = disk.write("disk.raw");
            assert_eq!(Disk::config_of(&manifest).unwrap(), (Digest::of(&config), config.len() as u64));
            assert_eq!(Disk::read(&manifest, &config).unwrap(), disk);
        }
    }

    #[test]
    fn invalid_manifest_table() {
        let (config, manifest) = disk().write("x");
        let text = String::from_utf8(manifest).unwrap();
        for (why, from, to) in [
            ("behind the end", "\"9437184\"", "\"9437185\""),
            ("overlap", "\"3145728\"", "\"50\""),
            ("no number", "\"3145728\"", "\"-1\""),
            ("overflow", "\"3145728\"", "\"18446744073709551615\""),
            ("huge blob", "\"size\":50", "\"size\":50000000"),
            ("empty chunk", "window.bytes\":\"1048576\"", "window.bytes\":\"0\""),
            ("longer than a chunk", "window.bytes\":\"1048576\"", "window.bytes\":\"1048577\""),
        ] {
            assert!(text.contains(from), "{why}");
            assert!(Disk::read(text.replace(from, to).as_bytes(), &config).is_err(), "{why}");
        }
        let said = |disk: u64, chunk: u64| {
            let config =
                json!({"schemaVersion": 1, "diskBytes": disk, "windowBytes": chunk, "format": "raw"});
            Disk::read(br#"{"layers":[]}"#, config.to_string().as_bytes()).is_ok()
        };
        const GIB: u64 = 1 << 30;
        for (why, disk, chunk, want) in [
            ("a byte", GIB, 1, false),
            ("nothing", GIB, 0, false),
            ("less than 1 MiB", GIB, MIB - 1, false),
            ("1 MiB", GIB, MIB, true),
            ("the whole disk, small", 1000, 1000, true),
            ("larger than the disk", 10 * MIB, 64 * MIB, true),
            ("as many as are read", 4 * GIB, MIB, true),
            ("more than are read", 4 * GIB + 1, MIB, false),
            ("no power of two", GIB, 3 * MIB, true),
            ("999 of 64 MiB", 999 * 64 * MIB, 64 * MIB, true),
            ("a terabyte as it was written", 1 << 40, 2 * GIB, true),
            ("the largest", 16 << 40, 4 * GIB, true),
            ("larger than the largest", 64 << 40, 8 * GIB, false),
        ] {
            assert_eq!(said(disk, chunk), want, "{why}");
        }
        assert!(Disk::config_of(text.replace(ARTIFACT, "x").as_bytes()).is_err());
    }
}
