//! Limits of images.

/// Limits of one image. An image above them fails with `OciError::Hostile`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one manifest or index. Default 4 MiB.
    pub manifest_bytes: u64,
    /// Bytes of one image configuration. Default 4 MiB.
    pub config_bytes: u64,
    /// Number of layers. Default 127, the common limit of container runtimes.
    pub layers: usize,
    /// Bytes of all compressed layers together. Default 64 GiB.
    pub download_bytes: u64,
    /// Bytes of all decompressed layers together, which also bounds one file. Default 64 GiB.
    pub unpacked_bytes: u64,
    /// Archive entries of all layers together. Default 4 million.
    pub entries: u64,
    /// Bytes of memory for names, directories and attributes of all layers together. Default 1 GiB; an image with a
    /// million files needs a third of it.
    pub metadata_bytes: u64,
    /// Bytes of one path. Default 4096, the kernel's limit.
    pub path_bytes: usize,
    /// Number of directories above one entry. Default 256.
    pub depth: usize,
    /// Bytes of all extended attributes of one file, names included. Default 64 KiB.
    pub xattr_bytes: usize,
    /// Bytes of one extended tar header (long names, PAX records). Default 1 MiB.
    pub header_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            manifest_bytes: 4 << 20,
            config_bytes: 4 << 20,
            layers: 127,
            download_bytes: 64 << 30,
            unpacked_bytes: 64 << 30,
            entries: 4_000_000,
            metadata_bytes: 1 << 30,
            path_bytes: 4096,
            depth: 256,
            xattr_bytes: 64 << 10,
            header_bytes: 1 << 20,
        }
    }
}

/// Limit of one path component in every Linux file system, bytes.
pub(crate) const NAME_BYTES_MAX: usize = 255;
