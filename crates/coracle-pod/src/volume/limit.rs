//! Limits of emptyDir volumes. Pure.

use k8s_openapi::api::core::v1::Pod;

use super::{Area, Place, place, volumes};
use coracle_api::Amount;

/// A volume whose content is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasuredVolume {
    /// Its name.
    pub name: String,
    /// The directory that it lies in.
    pub area: Area,
    /// Where it lies in it.
    pub path: String,
}

/// The most that a volume may hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SizeLimit {
    pub(crate) volume: MeasuredVolume,
    pub(crate) bytes: u64,
    /// As the spec says it.
    pub(crate) text: String,
}

/// Volumes on the node's disk with a limit, in the order of the spec. A limit of 0 is none. A file system in memory has its limit
/// as its size.
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
