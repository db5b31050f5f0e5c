//! Manifests and indexes as serialised: one type for both, validated by its users. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Digest, InvalidDigest, OciError, Platform};

/// Content that a manifest refers to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// Media type; empty when unknown.
    pub media_type: String,
    /// Digest of the content.
    pub digest: Digest,
    /// Bytes of the content.
    #[serde(rename = "size")]
    pub size_bytes: u64,
}

/// Descriptor as serialised in a manifest. Its values are not validated.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RawDescriptor {
    /// Media type; empty when missing.
    #[serde(default)]
    pub media_type: String,
    /// Text of the digest.
    pub digest: String,
    /// Bytes of the content; negative values are invalid.
    pub size: i64,
    #[serde(default)]
    platform: Value,
    #[serde(default)]
    annotations: Value,
}

/// Reason why a [`RawDescriptor`] is not a [`Descriptor`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidDescriptor {
    /// The digest is not supported.
    #[error("descriptor {text:?}: {reason}")]
    Digest {
        /// Digest as written.
        text: String,
        /// Broken rule.
        reason: InvalidDigest,
    },
    /// The size is negative.
    #[error("descriptor {0:?} has a negative size")]
    Size(String),
}

impl RawDescriptor {
    /// Value of an annotation.
    #[must_use]
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations.get(key)?.as_str()
    }

    fn platform(&self, field: &str) -> String {
        self.platform.get(field).and_then(Value::as_str).unwrap_or_default().to_owned()
    }
}

impl TryFrom<&RawDescriptor> for Descriptor {
    type Error = InvalidDescriptor;

    fn try_from(raw: &RawDescriptor) -> Result<Self, InvalidDescriptor> {
        let text = || raw.digest.chars().take(200).collect::<String>();
        let digest = raw.digest.parse();
        let digest = digest.map_err(|reason| InvalidDescriptor::Digest { text: text(), reason })?;
        let size_bytes = u64::try_from(raw.size).map_err(|_| InvalidDescriptor::Size(text()))?;
        Ok(Self { media_type: raw.media_type.clone(), digest, size_bytes })
    }
}

impl From<InvalidDescriptor> for OciError {
    fn from(error: InvalidDescriptor) -> Self {
        Self::unsupported(error.to_string())
    }
}

/// Image manifest or index as serialised. Unknown fields are ignored, and the combination of fields is not validated.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Schema version: 2 in every format still in use.
    pub schema_version: u32,
    /// Media type of the document itself.
    pub media_type: Option<String>,
    /// Type of an artifact that is not a container image.
    pub artifact_type: Option<String>,
    /// Configuration; image manifests only.
    pub config: Option<RawDescriptor>,
    /// Layers, lowest first; image manifests only.
    pub layers: Option<Vec<RawDescriptor>>,
    /// Manifests for platforms; indexes only.
    pub manifests: Option<Vec<RawDescriptor>>,
    /// Manifest that this one refers to (referrers API).
    pub subject: Option<RawDescriptor>,
    /// Annotations.
    pub annotations: Option<BTreeMap<String, String>>,
}

impl Manifest {
    /// Parses the JSON of a manifest or index.
    ///
    /// # Errors
    /// Errors of the parser, for a document of another form.
    pub fn parse(bytes: &[u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(bytes)
    }

    /// Manifests of an index with their platforms. Empty for an image manifest.
    ///
    /// # Errors
    /// [`OciError::Unsupported`] for an invalid descriptor.
    pub fn index_entries(&self) -> Result<Vec<IndexEntry>, OciError> {
        let entry = |raw: &RawDescriptor| {
            Ok(IndexEntry {
                descriptor: Descriptor::try_from(raw)?,
                os: raw.platform("os"),
                architecture: raw.platform("architecture"),
                name: raw.annotation("org.opencontainers.image.ref.name").map(str::to_owned),
            })
        };
        self.manifests.iter().flatten().map(entry).collect()
    }
}

/// Manifest for one platform of an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexEntry {
    /// Descriptor of the manifest.
    pub descriptor: Descriptor,
    /// Operating system; empty when not specified.
    pub os: String,
    /// Processor architecture; empty when not specified.
    pub architecture: String,
    /// Name within an OCI layout.
    pub name: Option<String>,
}

/// Selects the manifest for `platform`. Attestations and other entries of an unknown platform are skipped.
///
/// # Errors
/// [`OciError::WrongArchitecture`], naming the platforms of `image`.
pub fn select<'a>(
    entries: &'a [IndexEntry],
    platform: &Platform,
    image: &str,
) -> Result<&'a IndexEntry, OciError> {
    let is_stated = |e: &&IndexEntry| e.os == platform.os && e.architecture == platform.architecture;
    let is_unspecified = |e: &&IndexEntry| e.os.is_empty() && e.architecture.is_empty();
    entries.iter().find(is_stated).or_else(|| entries.iter().find(is_unspecified)).ok_or_else(|| {
        OciError::WrongArchitecture {
            image: image.to_owned(),
            have: platforms(entries),
            need: platform.to_string(),
        }
    })
}

fn platforms(entries: &[IndexEntry]) -> Vec<String> {
    let all = entries.iter().map(|e| format!("{}/{}", e.os, e.architecture));
    let mut all: Vec<_> = all.filter(|platform| !platform.contains("unknown")).collect();
    all.sort();
    all.dedup();
    if all.is_empty() { vec!["no platform at all".to_owned()] } else { all }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::media_types::{OCI_INDEX, OCI_MANIFEST};

    fn parse(value: &Value) -> Manifest {
        Manifest::parse(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn index_entries_carry_platform_and_name() {
        let digest = Digest::of(b"x").to_string();
        let index = parse(&json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [
            {"mediaType": OCI_MANIFEST, "digest": digest, "size": 7, "platform": {"os": "linux", "architecture": "arm64"},
             "annotations": {"org.opencontainers.image.ref.name": "v1"}},
            {"digest": digest, "size": 7, "platform": null, "annotations": 1},
        ]}));
        let entries = index.index_entries().unwrap();
        let shown = |e: &IndexEntry| (e.os.clone(), e.architecture.clone(), e.name.clone());
        assert_eq!(shown(&entries[0]), ("linux".into(), "arm64".into(), Some("v1".into())));
        assert_eq!(shown(&entries[1]), (String::new(), String::new(), None));
        assert_eq!(entries[0].descriptor.size_bytes, 7);
    }

    #[test]
    fn invalid_descriptor_names_the_digest() {
        for (digest, size, want) in [
            ("sha256:12".to_owned(), 1, "descriptor \"sha256:12\": a digest is"),
            ("md5:12".to_owned(), 1, "\"md5\" is not supported"),
            (Digest::of(b"").to_string(), -1, "has a negative size"),
        ] {
            let raw = RawDescriptor { digest, size, ..RawDescriptor::default() };
            let error = Descriptor::try_from(&raw).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
    }

    #[test]
    fn select_names_platforms_of_the_index() {
        let entry = |os: &str, architecture: &str| IndexEntry {
            descriptor: Descriptor {
                media_type: OCI_MANIFEST.into(),
                digest: Digest::of(architecture.as_bytes()),
                size_bytes: 1,
            },
            os: os.into(),
            architecture: architecture.into(),
            name: None,
        };
        let entries = [entry("linux", "arm64"), entry("unknown", "unknown"), entry("windows", "amd64")];
        let need = Platform { os: "linux".into(), architecture: "amd64".into() };
        let error = select(&entries, &need, "x").err().unwrap();
        let want = "image x is for linux/arm64, windows/amd64, this host needs linux/amd64";
        assert_eq!(error.to_string(), want);
        let arm = Platform { os: "linux".into(), architecture: "arm64".into() };
        assert_eq!(select(&entries, &arm, "x").unwrap().descriptor.digest, Digest::of(b"arm64"));
    }
}
