//! Operating system and processor architecture of images.

use std::fmt;

/// Operating system and processor in the words of the OCI specification (`GOOS`/`GOARCH`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Platform {
    /// Operating system; `linux` for images that run here.
    pub os: String,
    /// Processor architecture: `amd64`, `arm64`, …
    pub architecture: String,
}

impl Platform {
    /// Platform of this process. VMs have the architecture of their host.
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

    /// True when an image of this platform runs here. Empty words, which old builders write, match.
    #[must_use]
    pub fn accepts(&self, os: &str, architecture: &str) -> bool {
        (os.is_empty() || os == self.os) && (architecture.is_empty() || architecture == self.architecture)
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)
    }
}
