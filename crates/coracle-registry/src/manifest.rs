//! Kind and dependencies of pushed manifests and indexes. Pure.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use coracle_oci::{
    Descriptor, Digest, InvalidDescriptor, Manifest, RawDescriptor,
    media_types::{DOCKER_LIST, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST},
};
use serde_json::json;

use crate::error::{Code, ErrorResponse};

/// Limit of descriptors in one manifest.
const CHILDREN_MAX: usize = 65_536;

/// Longest artifact type, bytes. Limited because lists of referrers repeat it; RFC 6838 allows 255 bytes.
const TYPE_MAX: usize = 1024;

/// Kind of content, by artifact type or by media type of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    ContainerImage,
    CloudImage,
    Snapshot,
    ImageIndex,
}

impl Kind {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::ContainerImage => "container-image",
            Self::CloudImage => "cloud-image",
            Self::Snapshot => "snapshot",
            Self::ImageIndex => "image-index",
        }
    }

    fn of(artifact: &str, config: &str) -> Self {
        let either = |test: fn(&str) -> bool| test(artifact) || test(config);
        let ours = |t: &str, what: &str| {
            t.strip_prefix("application/vnd.coracle.").is_some_and(|rest| rest.starts_with(what))
        };
        let epoch = |t: &str, what: &str| {
            t.strip_prefix("application/vnd.cocoonstack.").is_some_and(|rest| rest.starts_with(what))
        };
        if epoch(artifact, "snapshot.") || epoch(config, "snapshot.") || ours(artifact, "snapshot.") {
            return Self::Snapshot;
        }
        let tart = |t: &str| t.starts_with("application/vnd.cirruslabs.tart.");
        let image = ["os-image.", "windows-image."].iter().any(|what| epoch(artifact, what));
        if image || ours(artifact, "image.") || either(tart) {
            return Self::CloudImage;
        }
        Self::ContainerImage
    }
}

/// Content that a manifest refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Child {
    pub(crate) digest: Digest,
    pub(crate) size: i64,
    /// True when the content must be in the repository before the manifest is stored.
    pub(crate) required: bool,
}

/// Validated manifest.
#[derive(Clone, Debug)]
pub(crate) struct PushedManifest {
    pub(crate) media_type: String,
    pub(crate) kind: Kind,
    /// Artifact type in the referrers API: that of the manifest, or else the media type of the configuration.
    pub(crate) artifact_type: String,
    pub(crate) annotations: BTreeMap<String, String>,
    pub(crate) blobs: Vec<Child>,
    pub(crate) manifests: Vec<Child>,
    pub(crate) layers: i64,
    pub(crate) subject: Option<Digest>,
}

/// Content that a descriptor refers to.
fn child(raw: &RawDescriptor) -> Result<Child, ErrorResponse> {
    let descriptor = Descriptor::try_from(raw).map_err(|reason| match reason {
        InvalidDescriptor::Digest { text, .. } => {
            ErrorResponse::new(Code::DigestInvalid, "invalid digest in the manifest")
                .detail(json!({"digest": text}))
        }
        InvalidDescriptor::Size(_) => invalid("a size in the manifest is negative"),
    })?;
    // Content that may not be redistributed is fetched from elsewhere, so the repository need not have it.
    let media_type = &descriptor.media_type;
    let is_foreign = media_type.contains(".foreign.") || media_type.contains("nondistributable");
    Ok(Child { digest: descriptor.digest, size: raw.size, required: !is_foreign })
}

fn invalid(message: impl Into<String>) -> ErrorResponse {
    ErrorResponse::new(Code::ManifestInvalid, message)
}

/// Parses a manifest that a client sends as `content_type`.
pub(crate) fn parse(bytes: &[u8], content_type: Option<&str>) -> Result<PushedManifest, ErrorResponse> {
    let said = content_type.map(|t| t.split(';').next().unwrap_or_default().trim()).filter(|t| !t.is_empty());
    if let Some(said) = said.filter(|t| ![OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST, DOCKER_LIST].contains(t))
    {
        let said: String = said.chars().take(200).collect();
        let message = "the registry stores no manifest of this media type";
        return Err(invalid(message)
            .status(StatusCode::UNSUPPORTED_MEDIA_TYPE)
            .detail(json!({"mediaType": said})));
    }
    let document = Manifest::parse(bytes).map_err(|e| {
        invalid(format!("cannot parse the manifest at line {} column {}", e.line(), e.column()))
    })?;
    let media_type = match (said, document.media_type.as_deref()) {
        (Some(said), Some(own)) if said != own => {
            return Err(invalid("Content-Type and the manifest's mediaType differ").detail(
                json!({"contentType": said, "mediaType": own.chars().take(200).collect::<String>()}),
            ));
        }
        (Some(known), _) => known.to_owned(),
        (None, Some(own)) => return parse(bytes, Some(own)),
        (None, None) => return Err(invalid("Content-Type and mediaType are missing")),
    };
    if document.schema_version != 2 {
        return Err(invalid("schemaVersion is not 2"));
    }
    let index = matches!(media_type.as_str(), OCI_INDEX | DOCKER_LIST);
    check_shape(&document, index)?;
    let children = |list: &Option<Vec<RawDescriptor>>| -> Result<Vec<Child>, ErrorResponse> {
        list.iter().flatten().map(child).collect()
    };
    let layers = children(&document.layers)?;
    let count = i64::try_from(layers.len()).unwrap_or(i64::MAX);
    let config = document.config.as_ref();
    let config_type = config.map(|c| c.media_type.clone()).unwrap_or_default();
    let artifact = document.artifact_type.clone().filter(|t| !t.is_empty());
    let kind = match index {
        true => Kind::ImageIndex,
        false => Kind::of(artifact.as_deref().unwrap_or_default(), &config_type),
    };
    if artifact.as_ref().is_some_and(|t| t.len() > TYPE_MAX) || config_type.len() > TYPE_MAX {
        return Err(invalid(format!("a media type in the manifest has more than {TYPE_MAX} bytes")));
    }
    Ok(PushedManifest {
        kind,
        artifact_type: artifact.unwrap_or(config_type),
        annotations: document.annotations.unwrap_or_default(),
        blobs: distinct(config.map(child).transpose()?.into_iter().chain(layers)),
        manifests: distinct(children(&document.manifests)?.into_iter()),
        layers: count,
        subject: document.subject.as_ref().map(child).transpose()?.map(|c| c.digest),
        media_type,
    })
}

fn check_shape(document: &Manifest, index: bool) -> Result<(), ErrorResponse> {
    let length = |list: &Option<Vec<RawDescriptor>>| list.as_ref().map_or(0, Vec::len);
    if length(&document.layers) + length(&document.manifests) > CHILDREN_MAX {
        return Err(invalid(format!("the manifest has more than {CHILDREN_MAX} descriptors")));
    }
    match index {
        true if document.config.is_some() || document.layers.is_some() => {
            Err(invalid("an index has no config and no layers"))
        }
        true if document.manifests.is_none() => Err(invalid("the index has no manifests")),
        false if document.manifests.is_some() => Err(invalid("an image manifest has no manifests")),
        false if document.config.is_none() => Err(invalid("the manifest has no config")),
        _ => Ok(()),
    }
}

/// Removes duplicates by digest and size. A digest with two sizes stays twice; the tables refuse the wrong size.
fn distinct(children: impl Iterator<Item = Child>) -> Vec<Child> {
    let mut seen: BTreeMap<(Digest, i64), Child> = BTreeMap::new();
    for child in children {
        let known = seen.entry((child.digest, child.size)).or_insert_with(|| child.clone());
        known.required |= child.required;
    }
    seen.into_values().collect()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn blob(n: u8) -> Value {
        json!({"mediaType": "application/octet-stream", "digest": Digest::of(&[n]).to_string(), "size": 1})
    }

    fn image(extra: Value) -> Value {
        let mut body = json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": blob(0), "layers": [blob(1), blob(1)]});
        for (key, value) in extra.as_object().unwrap() {
            body[key] = value.clone();
        }
        body
    }

    #[test]
    fn shape_table() {
        let foreign = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip";
        for (why, body, said, want) in [
            ("an image", image(json!({})), Some(OCI_MANIFEST), "ok"),
            ("its own word will do", image(json!({})), None, "ok"),
            (
                "parameters",
                image(json!({})),
                Some("application/vnd.oci.image.manifest.v1+json; charset=utf-8"),
                "ok",
            ),
            ("two words", image(json!({})), Some(DOCKER_MANIFEST), "MANIFEST_INVALID"),
            ("no config", image(json!({"config": null})), None, "MANIFEST_INVALID"),
            ("both", image(json!({"manifests": []})), None, "MANIFEST_INVALID"),
            ("schema 1", image(json!({"schemaVersion": 1})), None, "MANIFEST_INVALID"),
            ("unknown type", image(json!({})), Some("application/x-new"), "MANIFEST_INVALID"),
            (
                "negative",
                image(json!({"layers": [{"digest": blob(1)["digest"], "size": -1}]})),
                None,
                "MANIFEST_INVALID",
            ),
            (
                "a path",
                image(json!({"layers": [{"digest": "sha256:../x", "size": 1}]})),
                None,
                "DIGEST_INVALID",
            ),
            (
                "foreign",
                image(json!({"layers": [{"mediaType": foreign, "digest": blob(1)["digest"], "size": 1}]})),
                None,
                "ok",
            ),
            ("index", json!({"schemaVersion": 2, "manifests": []}), Some(OCI_INDEX), "ok"),
            (
                "index with layers",
                json!({"schemaVersion": 2, "manifests": [], "layers": []}),
                Some(OCI_INDEX),
                "MANIFEST_INVALID",
            ),
        ] {
            let got = match parse(&serde_json::to_vec(&body).unwrap(), said) {
                Ok(_) => "ok".to_owned(),
                Err(problem) => format!("{problem:?}"),
            };
            let short = got.contains("ManifestInvalid").then_some("MANIFEST_INVALID");
            let short = short.or(got.contains("DigestInvalid").then_some("DIGEST_INVALID")).unwrap_or(&got);
            assert_eq!(short, want, "{why}");
        }
        assert!(parse(b"{", Some(OCI_MANIFEST)).is_err());
        assert!(parse(&[b'['; 100_000], Some(OCI_MANIFEST)).is_err(), "depth is bounded");
    }

    #[test]
    fn manifest_kinds_and_blobs_are_parsed() {
        let parsed = |extra| parse(&serde_json::to_vec(&image(extra)).unwrap(), None).unwrap();
        let plain = parsed(json!({}));
        assert_eq!((plain.blobs.len(), plain.layers), (2, 2), "a blob that is named twice is needed once");
        for (artifact, kind) in [
            ("", Kind::ContainerImage),
            ("application/vnd.cocoonstack.snapshot.v2+json", Kind::Snapshot),
            ("application/vnd.cocoonstack.os-image.v1+json", Kind::CloudImage),
            ("application/vnd.cocoonstack.windows-image.v1+json", Kind::CloudImage),
            ("application/vnd.coracle.image.v1+json", Kind::CloudImage),
            ("application/vnd.coracle.snapshot.v1+json", Kind::Snapshot),
            ("application/spdx+json", Kind::ContainerImage),
        ] {
            assert_eq!(parsed(json!({"artifactType": artifact})).kind, kind, "{artifact}");
        }
        assert_eq!(plain.artifact_type, "application/octet-stream", "without one, the configuration's");
        let subject = parsed(json!({"subject": blob(9)})).subject;
        assert_eq!(subject, Some(Digest::of(&[9])));
    }
}
