//! Mounts of a container. Pure.

use coracle_host::{ContainerMount, ContainerMountSource};
use k8s_openapi::api::core::v1::{Container, Pod, VolumeMount};

use super::{Place, is_plain_path, place, volumes};
use crate::env::expand;
use crate::volume::Area;

/// Invalid mount.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid mount {target:?}: {why}")]
pub struct MountsError {
    /// Path in the container.
    pub target: String,
    /// Reason why the mount is invalid.
    pub why: String,
}

/// Returns the mounts of a container.
///
/// # Errors
/// [`MountsError`].
pub fn container_mounts<'a>(
    pod: &Pod,
    container: &Container,
    variable: impl Fn(&str) -> Option<&'a str> + Copy,
) -> Result<Vec<ContainerMount>, MountsError> {
    container.volume_mounts.iter().flatten().map(|mount| container_mount(pod, mount, variable)).collect()
}

fn container_mount<'a>(
    pod: &Pod,
    mount: &VolumeMount,
    variable: impl Fn(&str) -> Option<&'a str>,
) -> Result<ContainerMount, MountsError> {
    let invalid = |why: String| MountsError { target: mount.mount_path.clone(), why };
    let found = volumes(pod).find(|(_, volume)| volume.name == mount.name);
    let (index, volume) = found.ok_or_else(|| invalid(format!("the pod has no volume {:?}", mount.name)))?;
    if mount.mount_propagation.as_deref() == Some("Bidirectional") {
        return Err(invalid("mounts of a guest do not reach the node".to_owned()));
    }
    let sub_path = match (&mount.sub_path, &mount.sub_path_expr) {
        (Some(path), _) if !path.is_empty() => path.clone(),
        (_, Some(expression)) if !expression.is_empty() => {
            let expanded = expand(expression, variable);
            match expanded.contains("$(") {
                true => return Err(invalid(format!("subPathExpr {expression:?} names an unknown variable"))),
                false => expanded,
            }
        }
        _ => String::new(),
    };
    let sub_path = sub_path.trim_end_matches('/');
    if !sub_path.is_empty() && !is_plain_path(sub_path) {
        return Err(invalid(format!("invalid subPath {sub_path:?}: it leads out of the volume")));
    }
    let read_only = mount.read_only == Some(true);
    let (source, always_read_only) = match place(index, volume) {
        Place::Area(area, path) => (in_volume(area.name(), &path, sub_path), area == Area::Config),
        Place::Attached(name) => (in_volume(&name, "", sub_path), false),
        // The runtime replaces the reference by the digest that it resolves to.
        Place::Image(digest) => (ContainerMountSource::Image { digest, sub_path: sub_path.to_owned() }, true),
    };
    Ok(ContainerMount { target: mount.mount_path.clone(), read_only: always_read_only || read_only, source })
}

fn in_volume(name: &str, base: &str, sub_path: &str) -> ContainerMountSource {
    let parts = [base, sub_path];
    let sub_path = parts.iter().filter(|part| !part.is_empty()).copied().collect::<Vec<_>>().join("/");
    ContainerMountSource::Volume { name: name.to_owned(), sub_path }
}
