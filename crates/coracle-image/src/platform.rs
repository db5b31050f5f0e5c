//! Which operating system and processor an image must be for.

use std::fmt;

/// Operating system and processor in the words of the OCI specification (`GOOS`/`GOARCH`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Platform {
    /// Always `linux` on the platforms we run.
    pub os: String,
    /// `amd64`, `arm64`, …
    pub architecture: String,
}

impl Platform {
    /// What this process runs on. VMs run the same architecture as their host.
    pub fn host() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            "x86" => "386",
            "powerpc64" => "ppc64le",
            "loongarch64" => "loong64",
            same => same,
        };
        Self { os: "linux".to_owned(), architecture: architecture.to_owned() }
    }

    /// True when an image with these words runs here. Empty words are taken as "does not say", which old
    /// builders write.
    pub(crate) fn accepts(&self, os: &str, architecture: &str) -> bool {
        (os.is_empty() || os == self.os) && (architecture.is_empty() || architecture == self.architecture)
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)
    }
}
