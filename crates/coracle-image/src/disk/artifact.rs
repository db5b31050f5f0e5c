//! The manifest of a disk: written by us, read from anybody. Pure.

use std::ops::Range;

use serde_json::{Value, json};

use crate::{Digest, ImageError};

pub(super) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const ARTIFACT: &str = "application/vnd.coracle.image.v1+json";
const CONFIG: &str = "application/vnd.coracle.image.config.v1+json";
const WINDOW: &str = "application/vnd.coracle.disk.window.v1+zstd";
const EMPTY: &str = "application/vnd.oci.empty.v1+json";
const OFFSET: &str = "dev.coracle.window.offset";
const BYTES: &str = "dev.coracle.window.bytes";
const RAW_DIGEST: &str = "dev.coracle.window.digest";
/// What an empty descriptor names.
pub(super) const EMPTY_BLOB: &[u8] = b"{}";
/// Largest configuration, in bytes.
pub(super) const CONFIG_MAX: u64 = 1 << 20;
/// Largest disk that is read: 64 TiB.
pub(super) const DISK_MAX: u64 = 64 << 40;
/// Largest window that is read: the seed's.
pub(super) const WINDOW_MAX: u64 = 4 << 30;
pub(super) const TITLE: &str = "org.opencontainers.image.title";

/// One window that is not all zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Window {
    /// Its place on the disk.
    pub(super) part: Range<u64>,
    /// Of its raw bytes.
    pub(super) raw: Digest,
    /// Its blob.
    pub(super) blob: Digest,
    /// Bytes of the blob.
    pub(super) blob_bytes: u64,
}

/// A disk in a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Disk {
    pub(super) bytes: u64,
    pub(super) window_bytes: u64,
    /// In the order of the disk.
    pub(super) windows: Vec<Window>,
}

impl Disk {
    /// Bytes of configuration and of manifest.
    pub(super) fn write(&self, title: &str) -> (Vec<u8>, Vec<u8>) {
        let config = json!({"schemaVersion": 1, "diskBytes": self.bytes, "windowBytes": self.window_bytes, "format": "raw"});
        let config = config.to_string().into_bytes();
        let mut layers: Vec<Value> = self.windows.iter().map(layer).collect();
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

    /// The descriptor of the configuration, from a manifest.
    pub(super) fn config_of(manifest: &[u8]) -> Result<(Digest, u64), ImageError> {
        let manifest = parse(manifest, "manifest")?;
        if manifest["artifactType"] != ARTIFACT || manifest["config"]["mediaType"] != CONFIG {
            return Err(ImageError::unsupported("what is no disk of ours"));
        }
        let size = number(&manifest["config"]["size"]).filter(|n| *n <= CONFIG_MAX);
        Ok((digest(&manifest["config"]["digest"])?, size.ok_or_else(|| wrong("the configuration's size"))?))
    }

    /// A disk from its manifest and configuration. Windows overlap nowhere and lie on the disk.
    pub(super) fn read(manifest: &[u8], config: &[u8]) -> Result<Self, ImageError> {
        let (manifest, config) = (parse(manifest, "manifest")?, parse(config, "configuration")?);
        if config["schemaVersion"] != 1 || config["format"] != "raw" {
            return Err(ImageError::unsupported("a disk of a newer version"));
        }
        let bytes = number(&config["diskBytes"])
            .filter(|n| *n <= DISK_MAX)
            .ok_or_else(|| wrong("the disk's size"))?;
        let window_bytes = number(&config["windowBytes"]).filter(|n| (1..=WINDOW_MAX).contains(n));
        let window_bytes = window_bytes.ok_or_else(|| wrong("the window's size"))?;
        let windows = windows_of(&manifest, |_| true)?;
        Self { bytes, window_bytes, windows }.checked()
    }

    /// Its windows in the order of the disk; they overlap nowhere and lie on it.
    pub(super) fn checked(mut self) -> Result<Self, ImageError> {
        self.windows.sort_by_key(|w| w.part.start);
        let mut end = 0;
        for window in &self.windows {
            let length = window.part.end - window.part.start;
            if window.part.start < end || window.part.end > self.bytes || length > self.window_bytes {
                return Err(wrong("a window's place"));
            }
            end = window.part.end;
        }
        Ok(self)
    }
}

/// The windows among a manifest's layers that are `wanted`.
pub(super) fn windows_of(
    manifest: &Value,
    wanted: impl Fn(&Value) -> bool,
) -> Result<Vec<Window>, ImageError> {
    let layers = manifest["layers"].as_array().into_iter().flatten();
    layers.filter(|l| l["mediaType"] == WINDOW && wanted(l)).map(window).collect()
}

/// The layer of an artifact that has no other.
pub(super) fn empty_layer() -> Value {
    json!({"mediaType": EMPTY, "digest": Digest::of(EMPTY_BLOB).to_string(), "size": EMPTY_BLOB.len()})
}

pub(super) fn layer(window: &Window) -> Value {
    json!({
        "mediaType": WINDOW,
        "digest": window.blob.to_string(),
        "size": window.blob_bytes,
        "annotations": {
            OFFSET: window.part.start.to_string(),
            BYTES: (window.part.end - window.part.start).to_string(),
            RAW_DIGEST: window.raw.to_string(),
        },
    })
}

fn window(layer: &Value) -> Result<Window, ImageError> {
    let said = |key: &str| layer["annotations"][key].as_str().and_then(|text| text.parse::<u64>().ok());
    let (offset, bytes) = (said(OFFSET), said(BYTES));
    let part = offset.zip(bytes).and_then(|(at, n)| Some(at..at.checked_add(n).filter(|_| n > 0)?));
    let blob_bytes = number(&layer["size"]).ok_or_else(|| wrong("a window's size"))?;
    let part = part.ok_or_else(|| wrong("a window's place"))?;
    // Frames that do not compress grow by a few bytes each.
    if blob_bytes > (part.end - part.start) + (part.end - part.start) / 64 + 4096 {
        return Err(wrong("a window that is larger than its raw bytes"));
    }
    Ok(Window {
        part,
        raw: digest(&layer["annotations"][RAW_DIGEST])?,
        blob: digest(&layer["digest"])?,
        blob_bytes,
    })
}

pub(super) fn parse(bytes: &[u8], what: &str) -> Result<Value, ImageError> {
    serde_json::from_slice(bytes)
        .map_err(|e| ImageError::hostile(format!("a disk's {what} that does not parse: {e}")))
}

pub(super) fn number(value: &Value) -> Option<u64> {
    value.as_u64()
}

pub(super) fn digest(value: &Value) -> Result<Digest, ImageError> {
    value.as_str().and_then(|text| text.parse().ok()).ok_or_else(|| wrong("a digest"))
}

pub(super) fn wrong(what: &str) -> ImageError {
    ImageError::hostile(format!("a disk's manifest where {what} is impossible"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> Disk {
        let window = |n: u64| Window {
            part: n * 100..n * 100 + 100,
            raw: Digest::of(&[1]),
            blob: Digest::of(&[2]),
            blob_bytes: 50,
        };
        Disk { bytes: 1000, window_bytes: 100, windows: vec![window(0), window(3), window(9)] }
    }

    #[test]
    fn what_is_written_is_read() {
        for disk in [disk(), Disk { windows: vec![], ..disk() }] {
            let (config, manifest) = disk.write("disk.raw");
            assert_eq!(Disk::config_of(&manifest).unwrap(), (Digest::of(&config), config.len() as u64));
            assert_eq!(Disk::read(&manifest, &config).unwrap(), disk);
        }
    }

    #[test]
    fn hostile_manifests_are_refused() {
        let (config, manifest) = disk().write("x");
        let text = String::from_utf8(manifest).unwrap();
        for (why, from, to) in [
            ("behind the end", "\"900\"", "\"901\""),
            ("overlap", "\"300\"", "\"50\""),
            ("no number", "\"300\"", "\"-1\""),
            ("overflow", "\"300\"", "\"18446744073709551615\""),
            ("huge blob", "\"size\":50", "\"size\":50000000"),
            ("empty window", "\"dev.coracle.window.bytes\":\"100\"", "\"dev.coracle.window.bytes\":\"0\""),
            (
                "longer than a window",
                "\"dev.coracle.window.bytes\":\"100\"",
                "\"dev.coracle.window.bytes\":\"101\"",
            ),
        ] {
            assert!(text.contains(from), "{why}");
            assert!(Disk::read(text.replace(from, to).as_bytes(), &config).is_err(), "{why}");
        }
        assert!(Disk::config_of(text.replace(ARTIFACT, "x").as_bytes()).is_err());
    }
}
