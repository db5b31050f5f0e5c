//! Volumes of a pod in memory (`emptyDir` with `medium: Memory`). The kubelet creates a tmpfs on the node for each and never
//! writes to it. The pod gets a tmpfs in its guest instead, whose pages count for the container that writes them.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use coracle_host::Tmpfs;

use super::mounts::unescape_path;

/// File system type of a tmpfs (statfs(2), `TMPFS_MAGIC`).
const TMPFS_MAGIC: i64 = 0x0102_1994;
/// Directory of a pod for emptyDir volumes, in `volumes`.
const EMPTY_DIR: &str = "kubernetes.io~empty-dir";
/// Directory of a pod in which the kubelet mounts sub-paths of volumes: `<volume>/<container>/<number>`.
const SUB_PATHS: &str = "volume-subpaths";

/// Volume in memory, or a sub-path of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryVolume {
    /// tmpfs of the kubelet.
    pub(crate) dir: PathBuf,
    /// tmpfs in the guest, with the same size, owner and mode.
    pub(crate) tmpfs: Tmpfs,
    /// Directory in the volume; empty: the whole volume.
    pub(crate) sub_path: String,
}

/// Checks whether a directory is a volume in memory, or a sub-path of one. Blocking.
///
/// # Errors
/// Errors of the file system.
pub(crate) fn resolve_source(dir: &Path, mounts: &str) -> io::Result<Option<MemoryVolume>> {
    let Some((volume, sub_path)) = locate_volume(dir, mounts) else { return Ok(None) };
    let (metadata, of_part) = match (volume.metadata(), dir.metadata()) {
        (Ok(metadata), Ok(part)) => (metadata, part),
        _ => return Ok(None),
    };
    let filesystem = rustix::fs::statfs(&volume)?;
    if filesystem.f_type != TMPFS_MAGIC || metadata.dev() != of_part.dev() {
        return Ok(None);
    }
    let block = u64::try_from(filesystem.f_bsize).unwrap_or(0);
    let tmpfs = Tmpfs {
        size_bytes: filesystem.f_blocks.saturating_mul(block),
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        gid: metadata.gid(),
    };
    Ok(Some(MemoryVolume { dir: volume, tmpfs, sub_path }))
}

/// Returns the volume and the sub-path of a directory, by the naming scheme of the kubelet. Pure.
fn locate_volume(dir: &Path, mounts: &str) -> Option<(PathBuf, String)> {
    let parent = dir.parent()?;
    if parent.file_name()? == EMPTY_DIR {
        return Some((dir.to_owned(), String::new()));
    }
    let volume = parent.parent()?;
    let sub_paths = volume.parent().filter(|sub_paths| sub_paths.ends_with(SUB_PATHS))?;
    let of_pod = sub_paths.parent()?.join("volumes").join(EMPTY_DIR).join(volume.file_name()?);
    let mut roots = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(3);
        let (root, place) = (fields.next()?, fields.next()?);
        (Path::new(&unescape_path(place)) == dir).then(|| unescape_path(root))
    });
    Some((of_pod, roots.next_back()?.trim_matches('/').to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_table() {
        let mount = "9 8 0:7 /a\\040b /k/pods/u/volume-subpaths/cache/web/0 rw - tmpfs tmpfs rw\n";
        let volume = PathBuf::from("/k/pods/u/volumes/kubernetes.io~empty-dir/cache");
        for (dir, want) in [
            ("/k/pods/u/volumes/kubernetes.io~empty-dir/cache", Some((volume.clone(), ""))),
            ("/k/pods/u/volume-subpaths/cache/web/0", Some((volume, "a b"))),
            ("/k/pods/u/volume-subpaths/cache/web/1", None),
            ("/k/pods/u/volumes/kubernetes.io~secret/cache", None),
            ("/k/pods/u/volumes/kubernetes.io~empty-dir/cache/below", None),
            ("/", None),
        ] {
            let got = locate_volume(Path::new(dir), mount);
            let got = got.as_ref().map(|(volume, part)| (volume.clone(), part.as_str()));
            assert_eq!(got, want, "{dir}");
        }
    }
}
