//! Compression formats of layers.

use crate::ImageError;

/// Compression of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not compressed.
    None,
    /// gzip, RFC 1952.
    Gzip,
    /// Zstandard, RFC 8878.
    Zstd,
}

impl Compression {
    /// Compression of a layer with this media type.
    ///
    /// # Errors
    /// [`OciError::Unsupported`](coracle_oci::OciError::Unsupported) for media types that cannot be read.
    pub fn of_media_type(media_type: &str) -> Result<Self, ImageError> {
        let encrypted = media_type.contains("+encrypted");
        match media_type {
            "application/vnd.oci.image.layer.v1.tar" | "application/vnd.docker.image.rootfs.diff.tar" => {
                Ok(Self::None)
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

    /// Media type of an OCI layer.
    #[must_use]
    pub fn oci_media_type(self) -> &'static str {
        match self {
            Self::None => "application/vnd.oci.image.layer.v1.tar",
            Self::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
            Self::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
        }
    }

    /// Compression of a file by its first bytes.
    #[must_use]
    pub fn of_magic(head: &[u8]) -> Self {
        match head {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            _ => Self::None,
        }
    }
}
