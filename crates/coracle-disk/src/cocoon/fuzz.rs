//! Fuzz targets of cocoon's formats, see [`crate::fuzz`].

use serde_json::Value;

use super::{archive, wire};

/// Parses manifest and configuration of a snapshot.
pub(in super::super) fn remote(manifest: &Value, config: &Value) {
    if let Ok(remote) = wire::read(manifest, config) {
        assert!(remote.files.iter().all(|file| wire::is_name(&file.title)), "a name that leads out");
        let _head = coracle_oci::cocoon::snapshot_json(&remote.config, "x");
    }
}

/// Parses an archive. An accepted archive has plain names and can be written as an artifact.
pub(in super::super) fn archive(bytes: &[u8], version: super::CocoonVersion) {
    if let Ok(spooled) = archive::spool(bytes, version, 1, &std::env::temp_dir()) {
        assert!(spooled.files.iter().all(|file| wire::is_name(&file.title)), "a name that leads out");
        let (config, manifest) = wire::write(&spooled, version);
        let parse = |bytes: &[u8]| serde_json::from_slice(bytes).unwrap_or_default();
        assert!(wire::read(&parse(&manifest), &parse(&config)).is_ok(), "what is written is read");
    }
}
