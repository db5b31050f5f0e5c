//! Snapshot artifacts of cocoon, a runtime whose registry clients are served too: field names. Pure.

use serde_json::{Map, Value, json};

/// Prefix of every media type of cocoon.
pub const MEDIA_TYPE_PREFIX: &str = "application/vnd.cocoonstack.";

/// Fields of a snapshot: name in `snapshot.json` of the archive, name in the artifact's configuration.
pub const SNAPSHOT_FIELDS: [(&str, &str); 13] = [
    ("id", "snapshotId"),
    ("description", "description"),
    ("image", "image"),
    ("image_digest", "imageDigest"),
    ("image_type", "imageType"),
    ("image_blob_ids", "imageBlobIds"),
    ("hypervisor", "hypervisor"),
    ("cpu", "cpu"),
    ("memory", "memory"),
    ("storage", "storage"),
    ("nics", "nics"),
    ("network", "network"),
    ("windows", "windows"),
];

/// `snapshot.json` of the archive that cocoon imports as snapshot `name`, made from the artifact's configuration.
/// Fields that an artifact does not carry have cocoon's defaults.
#[must_use]
pub fn snapshot_json(config: &Value, name: &str) -> Value {
    let mut fields = Map::new();
    for (in_archive, in_config) in SNAPSHOT_FIELDS {
        fields.insert(in_archive.into(), config[in_config].clone());
    }
    fields.insert("name".into(), name.into());
    for (field, default) in
        [("queue_size", json!(0)), ("disk_queue_size", json!(0)), ("no_direct_io", json!(false))]
    {
        fields.insert(field.into(), default);
    }
    json!({"version": 1, "config": fields})
}
