//! See [`crate::fuzz`].

use serde_json::Value;

use super::{archive, wire};

/// What a registry says of a snapshot.
pub(in super::super) fn remote(manifest: &Value, config: &Value) {
    if let Ok(remote) = wire::read(manifest, config) {
        assert!(remote.files.iter().all(|file| wire::is_name(&file.title)), "a name that leads out");
        let _head = super::cocoon_head(&remote.config, "x");
    }
}

/// An archive: taken or refused; what is taken has plain names and no more bytes than the archive can have.
pub(in super::super) fn archive(bytes: &[u8], version: super::CocoonVersion) {
    if let Ok(spooled) = archive::spool(bytes, version, 1) {
        assert!(spooled.files.iter().all(|file| wire::is_name(&file.title)), "a name that leads out");
        let (config, manifest) = wire::write(&spooled, version);
        let parse = |bytes: &[u8]| serde_json::from_slice(bytes).unwrap_or_default();
        assert!(wire::read(&parse(&manifest), &parse(&config)).is_ok(), "what is written is read");
    }
}
