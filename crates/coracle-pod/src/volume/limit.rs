//! Size limits of emptyDir volumes. Pure.

use k8s_openapi::api::core::v1::Pod;

use super::{Area, Place, place, volumes};
use coracle_api::Amount;

/// Volume whose usage is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasuredVolume {
    /// Name of the volume.
    pub name: String,
    /// Area that contains the volume.
    pub area: Area,
    /// Path of the volume in the area.
    pub path: String,
}

/// Size limit of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SizeLimit {
    pub(crate) volume: MeasuredVolume,
    pub(crate) bytes: u64,
    /// Limit in the spelling of the spec.
    pub(crate) text: String,
}

/// Returns the volumes on the node's disk with a limit, in the order of the spec. A limit of 0 counts as none. A file system in
/// memory is limited by its own size.
pub(crate) fn size_limits(pod: &Pod) -> Vec<SizeLimit> {
    let limit = |(index, volume)| {
        let volume: &k8s_openapi::api::core::v1::Volume = volume;
        let quantity = volume.empty_dir.as_ref()?.size_limit.as_ref()?;
        let bytes = Amount::of(quantity).units();
        match place(index, volume) {
            Place::Area(area, path) if bytes > 0 => {
                let volume = MeasuredVolume { name: volume.name.clone(), area, path };
                Some(SizeLimit { volume, bytes, text: quantity.0.clone() })
            }
            _ => None,
        }
    };
    volumes(pod).filter_map(limit).collect()
}
