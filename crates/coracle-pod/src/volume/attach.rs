//! Volumes that are attached to the VM of a pod. Pure.

use coracle_host::PullPolicy;
use k8s_openapi::api::core::v1::Volume;

use super::area::Area;
use super::{Place, VolumeError, is_in_memory, place, volumes};
use crate::objects::Objects;
use coracle_api::Amount;
use k8s_openapi::api::core::v1::Pod;

/// Volume that is attached to the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxVolume {
    /// Name of the volume in the VM.
    pub name: String,
    /// Source of the volume.
    pub source: SandboxVolumeSource,
    /// The volume is read-only for the guest.
    pub read_only: bool,
}

/// Source of a volume of the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SandboxVolumeSource {
    /// An area of the pod.
    Area(Area),
    /// A directory of the node that the pod's author chose. The node must allow it.
    HostPath {
        /// Absolute path.
        path: String,
        /// Whether the directory is created if it does not exist.
        create: bool,
    },
    /// A disk or directory that the node's storage chose.
    Claim(String),
    /// A file system in the guest's memory.
    Memory {
        /// Size limit in bytes; 0: half of the guest's memory.
        size_bytes: u64,
    },
}

/// Returns all volumes of the VM of a pod: the areas that it needs, then the volumes of the spec.
///
/// # Errors
/// [`VolumeError::Missing`] for a claim that is not bound, or a source without support.
pub fn sandbox_volumes(pod: &Pod, objects: &Objects) -> Result<Vec<SandboxVolume>, VolumeError> {
    let areas: Vec<Area> = volumes(pod)
        .filter_map(|(index, volume)| match place(index, volume) {
            Place::Area(area, _) => Some(area),
            Place::Image(_) | Place::Attached(_) => None,
        })
        .collect();
    let needed = [Area::Config, Area::Data].into_iter();
    let mut all: Vec<_> = needed
        .filter(|area| areas.contains(area))
        .map(|area| SandboxVolume {
            name: area.name().to_owned(),
            source: SandboxVolumeSource::Area(area),
            read_only: area == Area::Config,
        })
        .collect();
    for (index, volume) in volumes(pod) {
        if let Place::Attached(name) = place(index, volume) {
            let (source, read_only) = attached_source(volume, objects)
                .map_err(|why| VolumeError::Missing { volume: volume.name.clone(), why })?;
            all.push(SandboxVolume { name, source, read_only });
        }
    }
    Ok(all)
}

fn attached_source(volume: &Volume, objects: &Objects) -> Result<(SandboxVolumeSource, bool), String> {
    if let Some(source) = volume.empty_dir.as_ref().filter(|_| is_in_memory(volume)) {
        let size_bytes = source.size_limit.as_ref().map_or(0, |limit| Amount::of(limit).units());
        return Ok((SandboxVolumeSource::Memory { size_bytes }, false));
    }
    if let Some(source) = &volume.host_path {
        let create = source.type_.as_deref() == Some("DirectoryOrCreate");
        return Ok((SandboxVolumeSource::HostPath { path: source.path.clone(), create }, false));
    }
    if let Some(source) = &volume.persistent_volume_claim {
        let claim = objects.claims.get(&source.claim_name);
        let claim =
            claim.ok_or_else(|| format!("claim {:?} is not bound on this node", source.claim_name))?;
        let read_only = claim.read_only || source.read_only == Some(true);
        return Ok((SandboxVolumeSource::Claim(claim.source.clone()), read_only));
    }
    Err("its source is not supported".to_owned())
}

/// Returns the pull policy of an image: that of the spec, else `Always` for the tag `latest`.
pub(crate) fn pull_policy(policy: Option<&str>, reference: &str) -> PullPolicy {
    let file_name = reference.rsplit('/').next().unwrap_or_default();
    let is_latest = !reference.contains('@') && (!file_name.contains(':') || file_name.ends_with(":latest"));
    match policy {
        Some("Always") => PullPolicy::Always,
        Some("Never") => PullPolicy::Never,
        Some("IfNotPresent") => PullPolicy::IfNotPresent,
        _ if is_latest => PullPolicy::Always,
        _ => PullPolicy::IfNotPresent,
    }
}
