//! Own volumes of a VM: disks and directories that are created and deleted with it.
//!
//! ```text
//! <state>/vms/<id>/files/<volume>/      files that the guest reads, below a private directory
//! <state>/vms/<id>/disks/own/<volume>.ext4
//! <class>/<id>/<volume>.ext4            disk of a disk class of the node
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};

use coracle_disk::blank;
use coracle_types::VmId;

use crate::vmm_config::VmPaths;
use crate::volumes::VolumeSource;
use crate::{HostConfig, HostError, VolumeRequest, files};

/// Maximum size of all files of one VM, bytes.
const BYTES_MAX: usize = 16 << 20;
/// Maximum number of files of one VM.
const FILES_MAX: usize = 4096;

/// Volume that belongs to its VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnVolume {
    /// Name of the volume in the VM.
    pub name: String,
    /// Absolute mount point in the guest; empty: derived from the name.
    pub target: String,
    /// Whether the guest mounts the volume read-only. Volumes of files are always read-only.
    pub read_only: bool,
    /// Content of the volume.
    pub content: OwnContent,
}

/// Content of a volume that belongs to its VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnContent {
    /// Directory with these files, by relative path.
    Files(BTreeMap<String, OwnFile>),
    /// Empty disk.
    Disk {
        /// Size of the disk.
        size_mib: u64,
        /// Disk class of the node; empty: the VM's own directory.
        class: String,
    },
}

/// File that the guest reads. `Debug` does not show its content.
#[derive(Clone, PartialEq, Eq)]
pub struct OwnFile {
    /// Content of the file.
    pub bytes: Vec<u8>,
    /// Permission bits in the guest.
    pub mode: u32,
}

impl fmt::Debug for OwnFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes, mode {:o}", self.bytes.len(), self.mode)
    }
}

/// Directory of a disk class for the disks of VM `id`.
pub(crate) fn class_dir(class: &Path, id: &VmId) -> PathBuf {
    class.join(id.as_str())
}

/// Directories of a VM outside of its own state directory.
pub(crate) fn class_dirs(config: &HostConfig, id: &VmId) -> Vec<PathBuf> {
    config.disk_classes.values().map(|class| class_dir(class, id)).collect()
}

/// Checks the volumes before anything is made. Pure.
pub(crate) fn check(config: &HostConfig, volumes: &[OwnVolume]) -> Result<(), HostError> {
    let invalid = |message: String| Err(HostError::Invalid { message });
    let (mut bytes, mut count) = (0_usize, 0_usize);
    for volume in volumes {
        let name = &volume.name;
        if !coracle_lifecycle::volume::is_name(name) {
            return invalid(format!("invalid volume name {name:?}: a-z, 0-9 and -"));
        }
        match &volume.content {
            OwnContent::Disk { size_mib: 0, .. } => {
                return invalid(format!("volume {name}: a disk needs a size"));
            }
            OwnContent::Disk { class, .. }
                if !class.is_empty() && !config.disk_classes.contains_key(class) =>
            {
                let known = config.disk_classes.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
                let known = if known.is_empty() { "none".to_owned() } else { known };
                return invalid(format!(
                    "volume {name}: this node has no disk class {class}; there is: {known}"
                ));
            }
            OwnContent::Disk { .. } => {}
            OwnContent::Files(files) => {
                if let Some(path) = files.keys().find(|path| !is_plain(path)) {
                    return invalid(format!("volume {name}: invalid path {path:?}"));
                }
                count = count.saturating_add(files.len());
                bytes = files.values().fold(bytes, |sum, file| sum.saturating_add(file.bytes.len()));
            }
        }
    }
    if bytes > BYTES_MAX || count > FILES_MAX {
        return invalid(format!(
            "{count} files of {bytes} bytes: at most {FILES_MAX} of {BYTES_MAX} together"
        ));
    }
    Ok(())
}

fn is_plain(path: &str) -> bool {
    let normal = |part: Component<'_>| matches!(part, Component::Normal(_));
    !path.is_empty() && !path.contains('\0') && path.len() <= 512 && Path::new(path).components().all(normal)
}

/// Makes the own volumes of a new VM, and inspects them like any other volume. Blocking. If the creation fails later, they are
/// removed with the VM's directory.
pub(crate) fn lay_out(
    config: &HostConfig,
    id: &VmId,
    volumes: &[OwnVolume],
) -> Result<Vec<(VolumeRequest, VolumeSource)>, String> {
    let paths = VmPaths::of(config, id);
    let one = |volume: &OwnVolume| {
        let failed = |e: io::Error| format!("make volume {}: {e}", volume.name);
        let (path, read_only) = match &volume.content {
            OwnContent::Files(content) => (write(&paths, &volume.name, content).map_err(failed)?, true),
            OwnContent::Disk { size_mib, class } => {
                let dir = match config.disk_classes.get(class) {
                    Some(class) => class_dir(class, id),
                    None => paths.state.join("disks/own"),
                };
                private_dir(&dir).map_err(failed)?;
                let path = dir.join(format!("{}.ext4", volume.name));
                blank::ensure_overlay(&config.state_dir.join("cache"), &path, *size_mib).map_err(failed)?;
                (path, volume.read_only)
            }
        };
        let request = VolumeRequest {
            name: volume.name.clone(),
            target: volume.target.clone(),
            read_only,
            ..VolumeRequest::default()
        };
        Ok((request, VolumeSource::at(path)?))
    };
    volumes.iter().map(one).collect()
}

/// Writes the files below a directory that only the daemon's user may enter.
fn write(paths: &VmPaths, name: &str, content: &BTreeMap<String, OwnFile>) -> io::Result<PathBuf> {
    let private = paths.state.join("files");
    private_dir(&private)?;
    let dir = private.join(name);
    files::remove_tree(&dir)?;
    make_dir(&dir)?;
    for (path, file) in content {
        let target = dir.join(path);
        let parents = Path::new(path).parent().into_iter().flat_map(Path::ancestors);
        let mut parents: Vec<_> = parents.filter(|parent| !parent.as_os_str().is_empty()).collect();
        parents.reverse();
        for parent in parents {
            make_dir(&dir.join(parent))?;
        }
        let mut open = fs::File::options();
        let mut written = open.write(true).create_new(true).mode(0o600).open(&target)?;
        written.write_all(&file.bytes)?;
        // The mode is set after the creation, so that the daemon's umask does not change it.
        written.set_permissions(fs::Permissions::from_mode(file.mode & 0o777))?;
    }
    Ok(dir)
}

/// Makes a directory that every user of the guest may read.
fn make_dir(dir: &Path) -> io::Result<()> {
    match fs::create_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made.and_then(|()| fs::set_permissions(dir, fs::Permissions::from_mode(0o755))),
    }
}

fn private_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Removes disks of VMs without a record on this node, whose creation was interrupted. Blocking.
pub(crate) fn sweep(config: &HostConfig, is_known: impl Fn(&str) -> bool) -> io::Result<()> {
    for class in config.disk_classes.values() {
        let entries = match fs::read_dir(class) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let is_ours = name.to_str().is_some_and(|name| name.parse::<VmId>().is_ok() && !is_known(name));
            if is_ours && entry.file_type()?.is_dir() {
                files::remove_tree(&entry.path())?;
            }
        }
    }
    Ok(())
}

/// Removes the directories outside of the VM's own state directory. Idempotent, blocking.
pub(crate) fn remove_class_dirs(dirs: &[PathBuf]) -> io::Result<()> {
    dirs.iter().try_for_each(|dir| files::remove_tree(dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(mode: u32) -> OwnFile {
        OwnFile { bytes: b"hunter2".to_vec(), mode }
    }

    fn volume(name: &str, content: OwnContent) -> OwnVolume {
        OwnVolume { name: name.into(), target: String::new(), read_only: false, content }
    }

    fn of_files(paths: &[&str]) -> OwnContent {
        OwnContent::Files(paths.iter().map(|path| ((*path).to_owned(), file(0o640))).collect())
    }

    #[test]
    fn volume_files_keep_modes_below_a_private_directory() {
        let dir = tempfile::tempdir().unwrap();
        let config = HostConfig::new(dir.path().to_owned(), "/k".into(), "/i".into());
        let id = VmId::of_name(&"web".parse().unwrap());
        let volumes = [volume("conf", of_files(&["a", "sub/dir/b"]))];
        check(&config, &volumes).unwrap();
        for _ in 0..2 {
            let made = lay_out(&config, &id, &volumes).unwrap();
            assert!(made[0].0.read_only);
        }
        let private = VmPaths::of(&config, &id).state.join("files");
        let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(private.clone()), 0o700);
        assert_eq!(mode(private.join("conf")), 0o755);
        assert_eq!(mode(private.join("conf/sub/dir/b")), 0o640);
        assert_eq!(fs::read(private.join("conf/sub/dir/b")).unwrap(), b"hunter2");
    }

    #[test]
    fn impossible_volumes_are_refused_with_the_reason() {
        let mut config = HostConfig::new("/s".into(), "/k".into(), "/i".into());
        config.disk_classes = [("fast".to_owned(), PathBuf::from("/nvme"))].into();
        let disk = |size_mib, class: &str| OwnContent::Disk { size_mib, class: class.into() };
        for (volume, want) in [
            (volume("Bad", disk(1, "")), "invalid volume name"),
            (volume("d", disk(0, "")), "needs a size"),
            (volume("d", disk(1, "slow")), "no disk class slow; there is: fast"),
            (volume("f", of_files(&["../x"])), "invalid path"),
            (volume("f", of_files(&["/x"])), "invalid path"),
            (volume("f", of_files(&[""])), "invalid path"),
        ] {
            let error = check(&config, &[volume]).unwrap_err().to_string();
            assert!(error.contains(want), "{want}: {error}");
        }
        let large = OwnFile { bytes: vec![0; BYTES_MAX + 1], mode: 0 };
        let large = OwnContent::Files([("x".to_owned(), large)].into());
        assert!(check(&config, &[volume("f", large)]).unwrap_err().to_string().contains("at most"));
        check(&config, &[volume("d", disk(1, "fast"))]).unwrap();
    }

    #[test]
    fn volume_content_is_hidden_in_debug_output() {
        let shown = format!("{:?}", volume("f", of_files(&["x"])));
        assert!(!shown.contains("hunter2") && shown.contains("7 bytes"), "{shown}");
    }
}
