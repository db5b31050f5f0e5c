//! Public form of a stored image.

use std::{collections::BTreeMap, str::FromStr};

use jiff::Timestamp;
use serde::Serialize;

use coracle_oci::{Digest, Reference};

/// Stored image, from its manifest and configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Image {
    /// Digest of the image manifest for this platform: the identity of the image.
    pub digest: Digest,
    /// Digest of the configuration. It is the same in every registry and for every compression of the layers.
    pub config_digest: Digest,
    /// Names of the image, sorted. Empty for an untagged image.
    pub references: Vec<Reference>,
    /// Processor architecture: `amd64`, `arm64`, …; empty when not specified.
    pub architecture: String,
    /// Operating system: `linux`; empty when not specified.
    pub os: String,
    /// Settings of the containers of the image.
    pub config: ImageConfig,
    /// Layers from the lowest to the topmost.
    pub layers: Vec<Layer>,
    /// Bytes of manifest, configuration and layers as stored (compressed).
    pub size_bytes: u64,
    /// Identity of the flattened content: equal chain ids share one root file system.
    pub chain_id: Digest,
    /// Time of creation, if specified.
    pub created: Option<Timestamp>,
}

/// Name of a stored image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageName {
    /// Reference.
    pub reference: Reference,
    /// Digest of the manifest with this name.
    pub digest: Digest,
    /// Digest of the multi-platform index through which the manifest was found, if there was one.
    pub index: Option<Digest>,
}

/// Layer of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Layer {
    /// Digest of the stored (compressed) bytes.
    pub digest: Digest,
    /// Digest of the decompressed archive.
    pub diff_id: Digest,
    /// Media type of the stored bytes.
    pub media_type: String,
    /// Length of the stored bytes.
    pub size_bytes: u64,
}

/// Settings of containers of an image. Missing values are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ImageConfig {
    /// Program and leading arguments.
    pub entrypoint: Vec<String>,
    /// Default arguments, or the whole command if the entrypoint is empty.
    pub cmd: Vec<String>,
    /// `KEY=value` pairs.
    pub env: Vec<String>,
    /// `user`, `uid`, `user:group` or `uid:gid`; empty means root.
    pub user: String,
    /// Working directory; empty means `/`.
    pub workdir: String,
    /// Exposed ports.
    pub exposed_ports: Vec<ExposedPort>,
    /// Directories declared as volumes.
    pub volumes: Vec<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Signal that asks the process to stop, such as `SIGQUIT`.
    pub stop_signal: Option<String>,
}

/// Transport protocol of an exposed port.
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

/// Exposed port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ExposedPort {
    /// Port number.
    pub port: u16,
    /// Transport protocol.
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
