//! Volumes of a pod: the files that the node writes, the volumes that are attached to the VM, and their mounts in containers.
//!
//! ```text
//! configMap, secret, downwardAPI, projected ─▶ area config  volumes/<name>/..data ─▶ a directory per version
//! emptyDir                                  ─▶ area data    volumes/<name>
//! emptyDir in memory, hostPath,
//! persistentVolumeClaim                     ─▶ a volume of the VM, v<index>
//! image                                     ─▶ a mount of the container
//! ```

mod area;
mod attach;
pub mod beneath;
mod files;
mod limit;
mod mounts;
mod tokens;
pub mod writer;

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::api::core::v1::{Pod, Volume};
use sha2::{Digest, Sha256};

pub use area::Area;
pub(crate) use attach::pull_policy;
pub use attach::{SandboxVolume, SandboxVolumeSource, sandbox_volumes};
pub use files::{VolumeError, desired};
pub use limit::MeasuredVolume;
pub(crate) use limit::size_limits;
pub use mounts::{MountsError, container_mounts};
pub(crate) use tokens::due;
pub use tokens::{Token, TokenRequest, token_requests};

/// Desired content of a volume on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeContent {
    /// Name of the volume.
    pub name: String,
    /// Area that contains the volume.
    pub area: Area,
    /// Path of the volume in the area.
    pub path: String,
    /// Files of the volume.
    pub layout: Layout,
}

/// Layout of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// A directory that the containers write.
    Directory,
    /// Files by relative path, which are replaced all at once.
    Files(BTreeMap<String, FileContent>),
}

/// File of a volume.
#[derive(Clone, PartialEq, Eq)]
pub struct FileContent {
    /// Content of the file.
    pub bytes: Vec<u8>,
    /// Permission bits.
    pub mode: u32,
}

impl fmt::Debug for FileContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes, mode {:o}", self.bytes.len(), self.mode)
    }
}

impl VolumeContent {
    /// Returns the digest of the whole content.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hash.update(bytes.len().to_be_bytes());
            hash.update(bytes);
        };
        part(self.path.as_bytes());
        match &self.layout {
            Layout::Directory => part(b"directory"),
            Layout::Files(files) => {
                for (path, file) in files {
                    part(path.as_bytes());
                    part(&file.mode.to_be_bytes());
                    part(&file.bytes);
                }
            }
        }
        hex::encode(hash.finalize())
    }
}

/// Place of a volume, from which containers mount it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A path in an area.
    Area(Area, String),
    /// An image, by reference.
    Image(String),
    /// A volume of the VM, by name.
    Attached(String),
}

/// Returns the volumes of a pod with their indexes.
pub(crate) fn volumes(pod: &Pod) -> impl Iterator<Item = (usize, &Volume)> {
    pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()).enumerate()
}

/// Returns the place of a volume.
pub(crate) fn place(index: usize, volume: &Volume) -> Place {
    let path = format!("volumes/{}", volume.name);
    if volume.empty_dir.is_some() && !is_in_memory(volume) {
        Place::Area(Area::Data, path)
    } else if is_config(volume) {
        Place::Area(Area::Config, path)
    } else if let Some(image) = &volume.image {
        Place::Image(image.reference.clone().unwrap_or_default())
    } else {
        Place::Attached(format!("v{index}"))
    }
}

/// Returns whether a volume is an emptyDir in the memory of the guest.
fn is_in_memory(volume: &Volume) -> bool {
    volume.empty_dir.as_ref().is_some_and(|empty| empty.medium.as_deref() == Some("Memory"))
}

/// Returns whether the node writes the files of a volume from API objects.
pub(crate) fn is_config(volume: &Volume) -> bool {
    volume.config_map.is_some()
        || volume.secret.is_some()
        || volume.downward_api.is_some()
        || volume.projected.is_some()
}

/// Returns whether a path stays below its directory: parts of 1 to 255 bytes other than `.` and `..`, at most 4096 bytes.
pub(crate) fn is_plain_path(path: &str) -> bool {
    path.len() <= 4096
        && !path.contains('\0')
        && path.split('/').all(|part| (1..=255).contains(&part.len()) && part != "." && part != "..")
}
