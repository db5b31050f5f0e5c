//! Sources of images: registries and files of this host.

use std::{fmt, path::PathBuf, str::FromStr};

use crate::ImageError;
use coracle_oci::Reference;

/// Source of an image, in the notation of skopeo. The prefixes `oci:` and `docker-archive:` take precedence
/// over a reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Image in a registry; a prefix `docker://` is accepted.
    Registry(Reference),
    /// `oci:DIR[:TAG]`: an OCI image layout. Without a tag it must have exactly one image.
    OciDir {
        /// Directory of the layout. It cannot contain a colon.
        dir: PathBuf,
        /// Value of `org.opencontainers.image.ref.name` in the index.
        tag: Option<String>,
    },
    /// `docker-archive:FILE`: an archive of `docker save` or skopeo, uncompressed or compressed with gzip.
    DockerArchive(PathBuf),
}

impl FromStr for Source {
    type Err = ImageError;

    /// Parses a source without opening files. Pure.
    ///
    /// # Errors
    /// [`ImageError::InvalidSource`] for an empty path, [`ImageError::Oci`] for an invalid reference.
    fn from_str(text: &str) -> Result<Self, ImageError> {
        let invalid = |reason: &str| ImageError::InvalidSource {
            source_text: text.to_owned(),
            reason: reason.to_owned(),
        };
        if let Some(rest) = text.strip_prefix("oci:") {
            let (dir, tag) = match rest.split_once(':') {
                Some((_, "")) => return Err(invalid("the tag is empty")),
                Some((dir, tag)) => (dir, Some(tag.to_owned())),
                None => (rest, None),
            };
            if dir.is_empty() {
                return Err(invalid("the directory is empty"));
            }
            return Ok(Self::OciDir { dir: dir.into(), tag });
        }
        if let Some(file) = text.strip_prefix("docker-archive:") {
            if file.is_empty() {
                return Err(invalid("the file is empty"));
            }
            return Ok(Self::DockerArchive(file.into()));
        }
        Ok(Self::Registry(text.strip_prefix("docker://").unwrap_or(text).parse()?))
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registry(reference) => reference.fmt(f),
            Self::OciDir { dir, tag: None } => write!(f, "oci:{}", dir.display()),
            Self::OciDir { dir, tag: Some(tag) } => write!(f, "oci:{}:{tag}", dir.display()),
            Self::DockerArchive(file) => write!(f, "docker-archive:{}", file.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_table() {
        for (text, want) in [
            ("nginx", "docker.io/library/nginx:latest"),
            ("docker://nginx:1", "docker.io/library/nginx:1"),
            ("oci:/tmp/x", "oci:/tmp/x"),
            ("oci:x:v1", "oci:x:v1"),
            ("docker-archive:/tmp/a.tar", "docker-archive:/tmp/a.tar"),
        ] {
            assert_eq!(text.parse::<Source>().unwrap().to_string(), want, "{text}");
        }
        for text in ["oci:", "oci::x", "oci:x:", "docker-archive:", "", "UPPER"] {
            assert!(text.parse::<Source>().is_err(), "{text}");
        }
    }
}
