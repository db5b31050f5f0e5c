//! Parsing and judging manifests, indexes and configurations. Pure: bytes in, decisions out.

use std::collections::BTreeMap;

use oci_spec::image::{Descriptor, ImageIndex, ImageManifest};
use serde::Deserialize;

use crate::{Digest, Image, ImageConfig, ImageError, Layer, Limits, Platform, Reference, digest::Hasher};

pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub(crate) const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";

/// What the registry is asked for.
pub(crate) const ACCEPT: &str = "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json, \
     application/vnd.docker.distribution.manifest.v2+json, application/vnd.docker.distribution.manifest.list.v2+json";

/// How a layer's bytes are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    Plain,
    Gzip,
    Zstd,
}

impl Packing {
    /// Finds the packing from the media type; what we cannot read is refused by its name.
    pub(crate) fn of_media_type(media_type: &str) -> Result<Self, ImageError> {
        let encrypted = media_type.contains("+encrypted");
        match media_type {
            "application/vnd.oci.image.layer.v1.tar" | "application/vnd.docker.image.rootfs.diff.tar" => {
                Ok(Self::Plain)
            }
            "application/vnd.oci.image.layer.v1.tar+gzip"
            | "application/vnd.docker.image.rootfs.diff.tar.gzip" => Ok(Self::Gzip),
            "application/vnd.oci.image.layer.v1.tar+zstd"
            | "application/vnd.docker.image.rootfs.diff.tar.zstd" => Ok(Self::Zstd),
            _ if encrypted => Err(ImageError::unsupported(format!("layer is encrypted ({media_type})"))),
            _ if media_type.contains("foreign") || media_type.contains("nondistributable") => {
                Err(ImageError::unsupported(format!("layer is not distributable ({media_type})")))
            }
            _ => Err(ImageError::unsupported(format!("layer has the unknown media type {media_type:?}"))),
        }
    }

    pub(crate) fn oci_media_type(self) -> &'static str {
        match self {
            Self::Plain => "application/vnd.oci.image.layer.v1.tar",
            Self::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
            Self::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
        }
    }

    /// Guesses from the first bytes, for archives that do not say.
    pub(crate) fn of_magic(head: &[u8]) -> Self {
        match head {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            _ => Self::Plain,
        }
    }
}

/// A verified blob that something points to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Blob {
    pub(crate) media_type: String,
    pub(crate) digest: Digest,
    pub(crate) size_bytes: u64,
}

impl Blob {
    pub(crate) fn of(descriptor: &Descriptor) -> Result<Self, ImageError> {
        let text = descriptor.digest().to_string();
        let digest =
            text.parse().map_err(|e| ImageError::unsupported(format!("descriptor {text:?}: {e}")))?;
        Ok(Self { media_type: descriptor.media_type().to_string(), digest, size_bytes: descriptor.size() })
    }
}

/// A manifest, as far as we care.
#[derive(Clone, Debug)]
pub(crate) struct Manifest {
    pub(crate) digest: Digest,
    pub(crate) media_type: &'static str,
    pub(crate) size_bytes: u64,
    pub(crate) config: Blob,
    pub(crate) layers: Vec<Blob>,
}

/// What the bytes behind a reference turned out to be.
pub(crate) enum Document {
    Manifest(Manifest),
    Index(Vec<Entry>),
}

/// One platform of an index.
pub(crate) struct Entry {
    pub(crate) blob: Blob,
    pub(crate) os: String,
    pub(crate) architecture: String,
    pub(crate) name: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    schema_version: u64,
    media_type: Option<String>,
    manifests: Option<serde::de::IgnoredAny>,
}

/// Reads a manifest or an index. `content_type` is what the transport said; the document's own word wins.
pub(crate) fn parse(
    bytes: &[u8],
    content_type: Option<&str>,
    limits: &Limits,
) -> Result<Document, ImageError> {
    within(bytes.len(), limits.manifest_bytes, "manifest")?;
    let head: Head = json("manifest", bytes)?;
    if head.schema_version == 1 {
        return Err(ImageError::unsupported(
            "its manifest is docker schema 1, a format retired in 2017; push the image again with a current tool",
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

fn parse_index(bytes: &[u8]) -> Result<Vec<Entry>, ImageError> {
    let index: ImageIndex = json("index", bytes)?;
    index.manifests().iter().map(entry).collect()
}

fn entry(descriptor: &Descriptor) -> Result<Entry, ImageError> {
    let platform = descriptor.platform().as_ref();
    Ok(Entry {
        blob: Blob::of(descriptor)?,
        os: platform.map(|p| p.os().to_string()).unwrap_or_default(),
        architecture: platform.map(|p| p.architecture().to_string()).unwrap_or_default(),
        name: descriptor
            .annotations()
            .as_ref()
            .and_then(|a| a.get("org.opencontainers.image.ref.name").cloned()),
    })
}

fn parse_manifest(bytes: &[u8], media_type: &'static str, limits: &Limits) -> Result<Manifest, ImageError> {
    let manifest: ImageManifest = json("manifest", bytes)?;
    let config = Blob::of(manifest.config())?;
    if !matches!(config.media_type.as_str(), OCI_CONFIG | DOCKER_CONFIG) {
        return Err(ImageError::unsupported(format!(
            "it is no container image: its configuration is {:?}",
            config.media_type
        )));
    }
    within(usize::try_from(config.size_bytes).unwrap_or(usize::MAX), limits.config_bytes, "configuration")?;
    let layers = manifest.layers().iter().map(Blob::of).collect::<Result<Vec<_>, _>>()?;
    if layers.len() > limits.layers {
        return Err(ImageError::hostile(format!(
            "{} layers, at most {} are allowed",
            layers.len(),
            limits.layers
        )));
    }
    for layer in &layers {
        Packing::of_media_type(&layer.media_type)?;
    }
    let total = layers.iter().fold(0u64, |sum, layer| sum.saturating_add(layer.size_bytes));
    if total > limits.download_bytes {
        return Err(ImageError::hostile(format!(
            "layers of {total} bytes, at most {} are allowed",
            limits.download_bytes
        )));
    }
    Ok(Manifest { digest: Digest::of(bytes), media_type, size_bytes: bytes.len() as u64, config, layers })
}

/// Chooses the manifest for `platform`. Attestations and other things without a platform word of their own
/// are passed over.
pub(crate) fn select<'a>(
    entries: &'a [Entry],
    platform: &Platform,
    image: &str,
) -> Result<&'a Entry, ImageError> {
    let stated = |e: &&Entry| e.os == platform.os && e.architecture == platform.architecture;
    let silent = |e: &&Entry| e.os.is_empty() && e.architecture.is_empty();
    entries.iter().find(stated).or_else(|| entries.iter().find(silent)).ok_or_else(|| {
        ImageError::WrongArchitecture {
            image: image.to_owned(),
            have: have(entries),
            need: platform.to_string(),
        }
    })
}

fn have(entries: &[Entry]) -> Vec<String> {
    let words =
        entries.iter().map(|e| format!("{}/{}", e.os, e.architecture)).filter(|w| !w.contains("unknown"));
    let mut words: Vec<_> = words.collect();
    words.sort();
    words.dedup();
    if words.is_empty() { vec!["no platform at all".to_owned()] } else { words }
}

/// An image configuration. Docker writes `null` for anything empty, so every field may be absent or null.
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
        within(bytes.len(), limits.config_bytes, "configuration")?;
        json("configuration", bytes)
    }

    pub(crate) fn diff_ids(&self) -> &[Digest] {
        self.rootfs.as_ref().and_then(|r| r.diff_ids.as_deref()).unwrap_or_default()
    }

    /// Refuses a configuration that does not belong to `layers` layers or to `platform`.
    pub(crate) fn check(&self, layers: usize, platform: &Platform, image: &str) -> Result<(), ImageError> {
        let (os, architecture) =
            (self.os.as_deref().unwrap_or_default(), self.architecture.as_deref().unwrap_or_default());
        if !platform.accepts(os, architecture) {
            let have = vec![format!("{os}/{architecture}")];
            return Err(ImageError::WrongArchitecture {
                image: image.to_owned(),
                have,
                need: platform.to_string(),
            });
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

/// Joins manifest, configuration and names into what callers see.
pub(crate) fn image(manifest: &Manifest, config: Config, references: Vec<Reference>) -> Image {
    let diff_ids = config.diff_ids().to_vec();
    let layer = |(blob, diff_id): (&Blob, &Digest)| Layer {
        digest: blob.digest,
        diff_id: *diff_id,
        media_type: blob.media_type.clone(),
        size_bytes: blob.size_bytes,
    };
    let layers: Vec<Layer> = manifest.layers.iter().zip(&diff_ids).map(layer).collect();
    Image {
        digest: manifest.digest,
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

/// Chain id of the OCI image specification ("Layer ChainID"); the digest of nothing for an image without
/// layers.
pub(crate) fn chain_id(diff_ids: &[Digest]) -> Digest {
    let join = |below: Digest, top: &Digest| Digest::of(format!("{below} {top}").as_bytes());
    match diff_ids {
        [] => Hasher::default().finish(),
        [first, rest @ ..] => rest.iter().fold(*first, join),
    }
}

fn json<'a, T: Deserialize<'a>>(what: &str, bytes: &'a [u8]) -> Result<T, ImageError> {
    serde_json::from_slice(bytes).map_err(|e| ImageError::hostile(format!("{what} does not parse: {e}")))
}

fn within(bytes: usize, max: u64, what: &str) -> Result<(), ImageError> {
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
    fn what_cannot_be_read_is_refused_by_name() {
        let gzip = "application/vnd.oci.image.layer.v1.tar+gzip";
        for (why, bytes, want) in [
            ("a good one", manifest_with(gzip, 127), "accepted"),
            ("too many layers", manifest_with(gzip, 128), "COR-IMG-008 refuse image content: 128 layers"),
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
    fn docker_nulls_are_read() {
        let text = br#"{"architecture":"amd64","os":"linux","created":"2020-01-01T00:00:00Z","config":{"Entrypoint":null,"Cmd":["sh"],
            "ExposedPorts":{"80/tcp":{},"53/udp":{},"junk":{}},"Volumes":null,"Labels":null,"OnBuild":null},"rootfs":{"type":"layers","diff_ids":null}}"#;
        let config = Config::parse(text, &Limits::default()).unwrap();
        config.check(0, &Platform { os: "linux".into(), architecture: "amd64".into() }, "x").unwrap();
        let run = config.run();
        assert_eq!(run.cmd, ["sh"]);
        assert_eq!(run.exposed_ports.len(), 2);
    }

    #[test]
    fn selection_names_what_there_is() {
        let entry = |os: &str, architecture: &str| Entry {
            blob: Blob {
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
        assert_eq!(
            error.to_string(),
            "image x is for linux/arm64, windows/amd64, this host needs linux/amd64"
        );
        let arm = Platform { os: "linux".into(), architecture: "arm64".into() };
        assert_eq!(select(&entries, &arm, "x").unwrap().blob.digest, Digest::of(b"arm64"));
    }

    #[test]
    fn chain_ids_follow_the_specification() {
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        assert_eq!(chain_id(&[a]), a);
        assert_eq!(chain_id(&[a, b]), Digest::of(format!("{a} {b}").as_bytes()));
    }
}
