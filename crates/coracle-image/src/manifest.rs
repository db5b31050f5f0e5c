//! Parser and validation of image manifests, indexes and configurations. Pure.

use std::collections::BTreeMap;

use coracle_oci::{
    Descriptor, Digest, Hasher, IndexEntry, Manifest, OciError, Platform, RawDescriptor, Reference,
    media_types::{DOCKER_CONFIG, DOCKER_LIST, DOCKER_MANIFEST, OCI_CONFIG, OCI_INDEX, OCI_MANIFEST},
};
use serde::Deserialize;

use crate::{Compression, Image, ImageConfig, ImageError, Layer, Limits};

/// Validated manifest of a container image.
#[derive(Clone, Debug)]
pub(crate) struct ImageManifest {
    pub(crate) digest: Digest,
    pub(crate) media_type: &'static str,
    pub(crate) size_bytes: u64,
    pub(crate) config: Descriptor,
    pub(crate) layers: Vec<Descriptor>,
}

/// Document that a reference names.
pub(crate) enum Document {
    Manifest(ImageManifest),
    Index(Vec<IndexEntry>),
}

/// Fields that determine the kind of a document.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    schema_version: u64,
    media_type: Option<String>,
    manifests: Option<serde::de::IgnoredAny>,
}

/// Parses a manifest or an index. `content_type` comes from the header of the response; the media type in the document takes
/// precedence.
pub(crate) fn parse(
    bytes: &[u8],
    content_type: Option<&str>,
    limits: &Limits,
) -> Result<Document, ImageError> {
    check_size(bytes.len(), limits.manifest_bytes, "manifest")?;
    let head: Head = json("manifest", bytes)?;
    if head.schema_version == 1 {
        return Err(ImageError::unsupported(
            "the manifest is docker schema 1, a format retired in 2017; push the image again with a current tool",
        ));
    }
    if head.schema_version != 2 {
        return Err(ImageError::unsupported(format!("manifest schema version {}", head.schema_version)));
    }
    let said = head.media_type.as_deref().or(content_type.filter(|t| t.starts_with("application/vnd.")));
    match (said, head.manifests.is_some()) {
        (Some(OCI_INDEX | DOCKER_LIST), _) | (None, true) => parse_index(bytes).map(Document::Index),
        (Some(OCI_MANIFEST) | None, _) => parse_manifest(bytes, OCI_MANIFEST, limits).map(Document::Manifest),
        (Some(DOCKER_MANIFEST), _) => parse_manifest(bytes, DOCKER_MANIFEST, limits).map(Document::Manifest),
        (Some(other), _) => {
            Err(ImageError::unsupported(format!("manifest has the unknown media type {other:?}")))
        }
    }
}

fn parse_index(bytes: &[u8]) -> Result<Vec<IndexEntry>, ImageError> {
    Ok(json::<Manifest>("index", bytes)?.index_entries()?)
}

fn parse_manifest(
    bytes: &[u8],
    media_type: &'static str,
    limits: &Limits,
) -> Result<ImageManifest, ImageError> {
    let manifest: Manifest = json("manifest", bytes)?;
    let descriptor = |raw: &RawDescriptor| Descriptor::try_from(raw).map_err(OciError::from);
    let config =
        manifest.config.as_ref().ok_or_else(|| ImageError::hostile("manifest without a configuration"))?;
    let config = descriptor(config)?;
    if !matches!(config.media_type.as_str(), OCI_CONFIG | DOCKER_CONFIG) {
        return Err(ImageError::unsupported(format!(
            "not a container image: the configuration has the media type {:?}",
            config.media_type
        )));
    }
    check_size(
        usize::try_from(config.size_bytes).unwrap_or(usize::MAX),
        limits.config_bytes,
        "configuration",
    )?;
    let layers = manifest.layers.iter().flatten().map(descriptor).collect::<Result<Vec<_>, _>>()?;
    if layers.len() > limits.layers {
        return Err(ImageError::hostile(format!(
            "{} layers, at most {} are allowed",
            layers.len(),
            limits.layers
        )));
    }
    for layer in &layers {
        Compression::of_media_type(&layer.media_type)?;
    }
    let total = layers.iter().fold(0u64, |sum, layer| sum.saturating_add(layer.size_bytes));
    if total > limits.download_bytes {
        return Err(ImageError::hostile(format!(
            "layers of {total} bytes, at most {} are allowed",
            limits.download_bytes
        )));
    }
    Ok(ImageManifest {
        digest: Digest::of(bytes),
        media_type,
        size_bytes: bytes.len() as u64,
        config,
        layers,
    })
}

/// Configuration of an image. Docker writes `null` for empty values: each field may be absent or null.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Config {
    #[serde(default)]
    architecture: Option<String>,
    #[serde(default)]
    os: Option<String>,
    #[serde(default)]
    created: Option<String>,
    #[serde(default)]
    config: Option<RunConfig>,
    #[serde(default)]
    rootfs: Option<RootFs>,
}

#[derive(Debug, Default, Deserialize)]
struct RootFs {
    #[serde(default)]
    diff_ids: Option<Vec<Digest>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct RunConfig {
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    env: Option<Vec<String>>,
    user: Option<String>,
    working_dir: Option<String>,
    exposed_ports: Option<BTreeMap<String, serde::de::IgnoredAny>>,
    volumes: Option<BTreeMap<String, serde::de::IgnoredAny>>,
    labels: Option<BTreeMap<String, String>>,
    stop_signal: Option<String>,
}

impl Config {
    pub(crate) fn parse(bytes: &[u8], limits: &Limits) -> Result<Self, ImageError> {
        check_size(bytes.len(), limits.config_bytes, "configuration")?;
        json("configuration", bytes)
    }

    pub(crate) fn diff_ids(&self) -> &[Digest] {
        self.rootfs.as_ref().and_then(|r| r.diff_ids.as_deref()).unwrap_or_default()
    }

    /// Fails unless the configuration has `layers` layers and is for `platform`.
    pub(crate) fn check(&self, layers: usize, platform: &Platform, image: &str) -> Result<(), ImageError> {
        let (os, architecture) =
            (self.os.as_deref().unwrap_or_default(), self.architecture.as_deref().unwrap_or_default());
        if !platform.accepts(os, architecture) {
            let have = vec![format!("{os}/{architecture}")];
            let (image, need) = (image.to_owned(), platform.to_string());
            return Err(OciError::WrongArchitecture { image, have, need }.into());
        }
        let diff_ids = self.diff_ids().len();
        if diff_ids != layers {
            return Err(ImageError::hostile(format!(
                "the manifest has {layers} layers, the configuration {diff_ids}"
            )));
        }
        Ok(())
    }

    fn run(self) -> ImageConfig {
        let c = self.config.unwrap_or_default();
        let keys = |map: Option<BTreeMap<String, serde::de::IgnoredAny>>| map.unwrap_or_default().into_keys();
        ImageConfig {
            entrypoint: c.entrypoint.unwrap_or_default(),
            cmd: c.cmd.unwrap_or_default(),
            env: c.env.unwrap_or_default(),
            user: c.user.unwrap_or_default(),
            workdir: c.working_dir.unwrap_or_default(),
            exposed_ports: keys(c.exposed_ports).filter_map(|p| p.parse().ok()).collect(),
            volumes: keys(c.volumes).collect(),
            labels: c.labels.unwrap_or_default(),
            stop_signal: c.stop_signal.filter(|s| !s.is_empty()),
        }
    }
}

/// Image for the public API, from a manifest, its configuration and its names.
pub(crate) fn image(manifest: &ImageManifest, config: Config, references: Vec<Reference>) -> Image {
    let diff_ids = config.diff_ids().to_vec();
    let layer = |(blob, diff_id): (&Descriptor, &Digest)| Layer {
        digest: blob.digest,
        diff_id: *diff_id,
        media_type: blob.media_type.clone(),
        size_bytes: blob.size_bytes,
    };
    let layers: Vec<Layer> = manifest.layers.iter().zip(&diff_ids).map(layer).collect();
    Image {
        digest: manifest.digest,
        config_digest: manifest.config.digest,
        references,
        architecture: config.architecture.clone().unwrap_or_default(),
        os: config.os.clone().unwrap_or_default(),
        size_bytes: layers.iter().map(|l| l.size_bytes).sum::<u64>()
            + manifest.size_bytes
            + manifest.config.size_bytes,
        layers,
        chain_id: chain_id(&diff_ids),
        created: config.created.as_deref().and_then(|t| t.parse().ok()),
        config: config.run(),
    }
}

/// Chain id (OCI image specification, "Layer ChainID"). Without layers, the digest of empty content.
pub(crate) fn chain_id(diff_ids: &[Digest]) -> Digest {
    let join = |below: Digest, top: &Digest| Digest::of(format!("{below} {top}").as_bytes());
    match diff_ids {
        [] => Hasher::default().finish(),
        [first, rest @ ..] => rest.iter().fold(*first, join),
    }
}

fn json<'a, T: Deserialize<'a>>(what: &str, bytes: &'a [u8]) -> Result<T, ImageError> {
    serde_json::from_slice(bytes).map_err(|e| ImageError::hostile(format!("cannot parse {what}: {e}")))
}

fn check_size(bytes: usize, max: u64, what: &str) -> Result<(), ImageError> {
    if bytes as u64 > max {
        return Err(ImageError::hostile(format!("{what} of {bytes} bytes, at most {max} are allowed")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(n: u8) -> String {
        Digest::of(&[n]).to_string()
    }

    fn manifest_with(layer_type: &str, layers: usize) -> Vec<u8> {
        let layer = serde_json::json!({"mediaType": layer_type, "digest": digest(1), "size": 10});
        let config = serde_json::json!({"mediaType": OCI_CONFIG, "digest": digest(2), "size": 10});
        serde_json::json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": vec![layer; layers]})
            .to_string()
            .into_bytes()
    }

    fn refusal(bytes: &[u8]) -> String {
        match parse(bytes, None, &Limits::default()) {
            Ok(_) => "accepted".to_owned(),
            Err(e) => format!("{} {e}", e.code()),
        }
    }

    #[test]
    fn parse_names_the_unsupported_property() {
        let gzip = "application/vnd.oci.image.layer.v1.tar+gzip";
        for (why, bytes, want) in [
            ("valid", manifest_with(gzip, 127), "accepted"),
            ("too many layers", manifest_with(gzip, 128), "COR-IMG-008 invalid image content: 128 layers"),
            (
                "foreign",
                manifest_with("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", 1),
                "not distributable",
            ),
            (
                "encrypted",
                manifest_with("application/vnd.oci.image.layer.v1.tar+gzip+encrypted", 1),
                "is encrypted",
            ),
            ("unknown", manifest_with("text/html", 1), "\"text/html\""),
            ("schema 1", br#"{"schemaVersion":1,"name":"x","fsLayers":[]}"#.to_vec(), "retired in 2017"),
            ("not json", b"<html>".to_vec(), "COR-IMG-008"),
            ("too large", vec![b' '; (4 << 20) + 1], "at most 4194304"),
        ] {
            let got = refusal(&bytes);
            assert!(got.contains(want), "{why}: {got}");
        }
    }

    #[test]
    fn config_accepts_null_fields_of_docker() {
        let text = br#"{"architecture":"amd64","os":"linux","created":"2020-01-01T00:00:00Z","config":{"Entrypoint":null,"Cmd":["sh"],
            "ExposedPorts":{"80/tcp":{},"53/udp":{},"junk":{}},"Volumes":null,"Labels":null,"OnBuild":null},"rootfs":{"type":"layers","diff_ids":null}}"#;
        let config = Config::parse(text, &Limits::default()).unwrap();
        config.check(0, &Platform { os: "linux".into(), architecture: "amd64".into() }, "x").unwrap();
        let run = config.run();
        assert_eq!(run.cmd, ["sh"]);
        assert_eq!(run.exposed_ports.len(), 2);
    }

    #[test]
    fn chain_id_follows_the_specification() {
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        assert_eq!(chain_id(&[a]), a);
        assert_eq!(chain_id(&[a, b]), Digest::of(format!("{a} {b}").as_bytes()));
    }
}
