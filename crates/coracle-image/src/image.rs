//! What callers see of an image.

use std::{collections::BTreeMap, str::FromStr};

use jiff::Timestamp;
use serde::Serialize;

use crate::{Digest, Reference};

/// One image in the store, as its manifest and configuration describe it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Image {
    /// Digest of the image manifest for this platform: the image's identity.
    pub digest: Digest,
    /// Every name that points here, sorted. Empty for an untagged image.
    pub references: Vec<Reference>,
    /// `amd64`, `arm64`, …; empty when the image does not say.
    pub architecture: String,
    /// `linux`; empty when the image does not say.
    pub os: String,
    /// How a container of this image is started.
    pub config: ImageConfig,
    /// Layers from the lowest to the topmost.
    pub layers: Vec<Layer>,
    /// Bytes of manifest, configuration and layers as stored (compressed).
    pub size_bytes: u64,
    /// Identity of the flattened content: equal chain ids share one root file system.
    pub chain_id: Digest,
    /// When the image says it was built.
    pub created: Option<Timestamp>,
}

/// A manifest, as other manifests name it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What it is.
    pub media_type: String,
    /// Digest of its bytes.
    pub digest: Digest,
    /// How many there are.
    pub size: u64,
}

/// One layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Layer {
    /// Digest of the stored (compressed) bytes.
    pub digest: Digest,
    /// Digest of the decompressed archive.
    pub diff_id: Digest,
    /// Media type of the stored bytes.
    pub media_type: String,
    /// Stored bytes.
    pub size_bytes: u64,
}

/// How the image wants to be run. Missing values are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ImageConfig {
    /// Program and leading arguments.
    pub entrypoint: Vec<String>,
    /// Default arguments, or the whole command when there is no entrypoint.
    pub cmd: Vec<String>,
    /// `KEY=value` pairs.
    pub env: Vec<String>,
    /// `user`, `uid`, `user:group` or `uid:gid`; empty means root.
    pub user: String,
    /// Working directory; empty means `/`.
    pub workdir: String,
    /// Ports the image says it listens on.
    pub exposed_ports: Vec<ExposedPort>,
    /// Directories the image declares as volumes.
    pub volumes: Vec<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Signal that asks the workload to stop, such as `SIGQUIT`.
    pub stop_signal: Option<String>,
}

/// Transport of an exposed port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP, the default.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

/// A port the image says it listens on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ExposedPort {
    /// Port number.
    pub port: u16,
    /// Transport.
    pub protocol: Protocol,
}

impl FromStr for ExposedPort {
    type Err = ();

    /// Parses `80` or `80/tcp`.
    fn from_str(text: &str) -> Result<Self, ()> {
        let (port, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
        let protocol = match protocol {
            "tcp" => Protocol::Tcp,
            "udp" => Protocol::Udp,
            "sctp" => Protocol::Sctp,
            _ => return Err(()),
        };
        Ok(Self { port: port.parse().map_err(|_| ())?, protocol })
    }
}
