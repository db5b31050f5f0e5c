//! Mounts of containers. Directories of the host are shared with the VM, and the container mounts from the shared directory.

use std::io;
use std::path::{Path, PathBuf};

use coracle_host::{
    ContainerMount, ContainerMountSource, Submounts, Tmpfs, Volume, VolumeKind, VolumeRequest,
};
use coracle_oci::Digest;
use coracle_proto::cri::{Mount, MountPropagation};
use coracle_types::IdMapping;

use super::memory_volume::{self, MemoryVolume};
use super::user_namespace;
use crate::refusal::Refusal;

/// Number of digits of a directory's digest in the name of its volume.
const NAME_DIGITS: usize = 24;

/// Mounts of this thread, which equal those of the process if the process has one mount namespace.
const MOUNTS: &str = "/proc/thread-self/mountinfo";

/// Resolved source of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MountSource {
    Directory {
        dir: PathBuf,
        /// A file system is mounted below the directory.
        has_submounts: bool,
    },
    File {
        dir: PathBuf,
        name: String,
    },
    /// A volume of the pod in memory, which exists in the guest instead of on the node.
    Memory(MemoryVolume),
    /// An image, by the digest of its manifest.
    Image(String),
}

/// Directory of the host that is shared with a VM.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Share {
    pub(crate) name: String,
    pub(crate) dir: PathBuf,
    pub(crate) read_only: bool,
    /// Submounts are those at the time of the attachment (private propagation).
    private: bool,
    /// Submounts are writable, although the directory is read-only.
    writable_submounts: bool,
    /// User namespace of the pod, whose ids are the owners in the directory.
    ids: Option<IdMapping>,
    /// tmpfs in the guest instead of the directory.
    memory: Option<Tmpfs>,
}

impl Share {
    /// `has_submounts`: a file system is mounted below the directory. A read-only mount of Linux leaves it writable.
    fn new(dir: PathBuf, mount: &Mount, has_submounts: bool, ids: Option<IdMapping>) -> Self {
        let read_only = mount.readonly;
        let private = mount.propagation() == MountPropagation::PropagationPrivate;
        let writable_submounts = read_only && !mount.recursive_read_only && has_submounts;
        let mapped = if ids.is_some() { " mapped" } else { "" };
        let text = format!("{}\n{read_only} {private} {writable_submounts}{mapped}", dir.display());
        let digest = Digest::of(text.as_bytes()).hex();
        let name = format!("cri-{}", digest.get(..NAME_DIGITS).unwrap_or_default());
        Self { name, dir, read_only, private, writable_submounts, ids, memory: None }
    }

    /// Returns a volume in memory, which all of its mounts share.
    fn in_memory(volume: &MemoryVolume, ids: Option<IdMapping>) -> Self {
        let share = Self::new(volume.dir.clone(), &Mount::default(), false, ids);
        let owner = |id| ids.map_or(id, |ids| ids.outside_or_overflow(id));
        let tmpfs = volume.tmpfs;
        Self { memory: Some(Tmpfs { uid: owner(tmpfs.uid), gid: owner(tmpfs.gid), ..tmpfs }), ..share }
    }

    /// Returns the request to the host core. The kubelet acts as root.
    pub(crate) fn request(&self) -> VolumeRequest {
        VolumeRequest {
            name: self.name.clone(),
            source: self.dir.display().to_string(),
            tmpfs: self.memory,
            read_only: self.read_only,
            submounts: Submounts { private: self.private, writable: self.writable_submounts },
            ids: self.ids,
            local_user: Some(0),
            ..VolumeRequest::default()
        }
    }
}

/// Returns whether this server attached the volume as a shared directory. A volume in memory belongs to its pod until the pod
/// ends.
pub(crate) fn is_share(volume: &Volume) -> bool {
    is_name_of_share(&volume.name) && !matches!(volume.kind, VolumeKind::Tmpfs(_))
}

fn is_name_of_share(name: &str) -> bool {
    name.strip_prefix("cri-").is_some_and(|rest| rest.len() == NAME_DIGITS)
}

/// Refuses mounts that are invalid regardless of the state of the host. Pure.
///
/// # Errors
/// The fault of the mount.
pub(crate) fn check(mount: &Mount) -> Result<(), Refusal> {
    if mount.propagation() == MountPropagation::PropagationBidirectional {
        let (what, why) = ("bidirectional mount propagation", "a VM's mounts cannot reach the host");
        return Err(Refusal::Unsupported { what, why });
    }
    let is_private = mount.propagation() == MountPropagation::PropagationPrivate;
    if mount.recursive_read_only && !(mount.readonly && is_private) {
        return Err(Refusal::RecursiveReadOnly);
    }
    if mount.image.is_some() {
        let wrong = match mount {
            _ if !mount.readonly => "an image can be mounted read-only alone",
            _ if !mount.host_path.is_empty() => "it has a path of the host and an image",
            _ => return Ok(()),
        };
        return Err(Refusal::invalid("mount", wrong));
    }
    if !Path::new(&mount.host_path).is_absolute() {
        return Err(Refusal::invalid(
            "mount",
            format!("source \"{}\" is not an absolute path", mount.host_path),
        ));
    }
    Ok(())
}

/// Resolves the source of a mount. Creates a directory if nothing exists. Symbolic links are followed. Blocking.
///
/// # Errors
/// Errors of the file system, or the source is neither a directory nor a file.
pub(crate) fn resolve_source(mount: &Mount) -> io::Result<MountSource> {
    let path = Path::new(&mount.host_path);
    let real = match path.canonicalize() {
        Err(e) if e.kind() == io::ErrorKind::NotFound && path.symlink_metadata().is_err() => {
            std::fs::create_dir_all(path)?;
            path.canonicalize()?
        }
        found => found?,
    };
    let kind = real.metadata()?.file_type();
    if kind.is_dir() {
        let mounts = std::fs::read_to_string(MOUNTS)?;
        if let Some(volume) = memory_volume::resolve_source(&real, &mounts)? {
            return Ok(MountSource::Memory(volume));
        }
        // Submounts only matter for a read-only mount that is not recursive.
        let matters = mount.readonly && !mount.recursive_read_only;
        let has_submounts = matters && has_submounts(&mounts, &real);
        return Ok(MountSource::Directory { dir: real, has_submounts });
    }
    let name = real.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    match (real.parent(), name) {
        (Some(dir), Some(name)) if kind.is_file() => Ok(MountSource::File { dir: dir.to_owned(), name }),
        _ => Err(io::Error::other("it is neither a directory nor a file")),
    }
}

/// Returns whether a file system is mounted below a directory, by proc_pid_mountinfo(5). Pure.
fn has_submounts(mounts: &str, dir: &Path) -> bool {
    let places = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(unescape_path);
    places.into_iter().any(|place| Path::new(&place) != dir && Path::new(&place).starts_with(dir))
}

/// Decodes a path of that file, which contains octal escapes for blanks and other characters.
pub(super) fn unescape_path(place: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(place.to_owned(), |text, (escape, plain)| text.replace(escape, plain))
}

/// Plans the mounts of a container and the shared directories that they need. A mount below another one comes after it. `pod`:
/// ids of the pod's user namespace. Pure.
///
/// # Errors
/// Ids of a mount that are not the pod's.
pub(crate) fn plan(
    mounts: &[Mount],
    found: &[MountSource],
    pod: Option<IdMapping>,
) -> Result<(Vec<ContainerMount>, Vec<Share>), Refusal> {
    let mut planned = Vec::new();
    let mut shares = Vec::new();
    for (mount, found) in mounts.iter().zip(found) {
        let ids = user_namespace::ids_of_mount(mount, pod)?;
        let mut read_only = mount.readonly;
        let mut shared = |share: Share, sub_path: &str| {
            // The shared directory is one writable mount in the guest; the node refuses writes to its read-only part.
            read_only &= !share.writable_submounts;
            let (name, sub_path) = (share.name.clone(), sub_path.to_owned());
            shares.push(share);
            ContainerMountSource::Volume { name, sub_path }
        };
        let source = match found {
            MountSource::Directory { dir, has_submounts } => {
                shared(Share::new(dir.clone(), mount, *has_submounts, ids), "")
            }
            MountSource::File { dir, name } => shared(Share::new(dir.clone(), mount, false, ids), name),
            MountSource::Memory(volume) => shared(Share::in_memory(volume, ids), &volume.sub_path),
            MountSource::Image(digest) => ContainerMountSource::Image {
                digest: digest.clone(),
                sub_path: mount.image_sub_path.trim_matches('/').to_owned(),
            },
        };
        let target = absolute(&mount.container_path);
        planned.push(ContainerMount { target, read_only, source });
    }
    planned.sort_by_key(|mount| Path::new(&mount.target).components().count());
    shares.sort();
    shares.dedup();
    Ok((planned, shares))
}

fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::ImageSpec;

    use super::*;

    fn mount(container_path: &str, host_path: &str, readonly: bool) -> Mount {
        let (container_path, host_path) = (container_path.to_owned(), host_path.to_owned());
        Mount { container_path, host_path, readonly, ..Mount::default() }
    }

    #[test]
    fn checks_table() {
        let image = |readonly, host_path: &str| Mount {
            image: Some(ImageSpec::default()),
            ..mount("/model", host_path, readonly)
        };
        let propagation = |propagation: MountPropagation| Mount {
            propagation: propagation.into(),
            ..mount("/a", "/a", false)
        };
        for (why, mount, good) in [
            ("a directory", mount("/a", "/b", false), true),
            ("a slave", propagation(MountPropagation::PropagationHostToContainer), true),
            ("shared", propagation(MountPropagation::PropagationBidirectional), false),
            ("a relative source", mount("/a", "b", false), false),
            ("no source", mount("/a", "", false), false),
            ("recursive", Mount { recursive_read_only: true, ..mount("/a", "/b", true) }, true),
            (
                "recursive and writable",
                Mount { recursive_read_only: true, ..mount("/a", "/b", false) },
                false,
            ),
            (
                "recursive and a slave",
                Mount {
                    recursive_read_only: true,
                    readonly: true,
                    ..propagation(MountPropagation::PropagationHostToContainer)
                },
                false,
            ),
            ("an image", image(true, ""), true),
            ("a writable image", image(false, ""), false),
            ("an image and a path", image(true, "/b"), false),
        ] {
            assert_eq!(check(&mount).is_ok(), good, "{why}");
        }
    }

    #[test]
    fn plan_shares_each_directory_once() {
        let mounts = [
            mount("/etc/hosts", "/pod/hosts", false),
            mount("/data/deep", "/data", true),
            mount("dev/log", "/pod/log", false),
            mount("/data", "/data", true),
            Mount { image_sub_path: "/en/".into(), ..mount("/model", "", true) },
        ];
        let file = |name: &str| MountSource::File { dir: "/pod".into(), name: name.into() };
        let directory = |has_submounts| MountSource::Directory { dir: "/data".into(), has_submounts };
        let data = directory(false);
        let found =
            [file("hosts"), data.clone(), file("log"), data.clone(), MountSource::Image("sha256:1".into())];
        let (planned, shares) = plan(&mounts, &found, None).unwrap();
        let targets: Vec<_> = planned.iter().map(|mount| mount.target.as_str()).collect();
        assert_eq!(targets, ["/data", "/model", "/etc/hosts", "/data/deep", "/dev/log"]);
        assert_eq!(shares.len(), 2);
        assert!(shares.iter().all(|share| is_name_of_share(&share.name)));
        let image = ContainerMountSource::Image { digest: "sha256:1".into(), sub_path: "en".into() };
        assert_eq!(planned[1].source, image);
        let alone = |mount: Mount, found| {
            let (planned, shares) = plan(&[mount], &[found], None).unwrap();
            (planned[0].read_only, shares[0].request().submounts, shares[0].clone())
        };
        let submounts = |private, writable| Submounts { private, writable };
        let writable = alone(mount("/data", "/data", false), data.clone());
        assert!(!shares.contains(&writable.2), "read-only and writable are two shares");
        let slave = |readonly| Mount {
            propagation: MountPropagation::PropagationHostToContainer.into(),
            ..mount("/data", "/data", readonly)
        };
        let recursive = Mount { recursive_read_only: true, ..mount("/data", "/data", true) };
        for (why, mount, found, want) in [
            ("nothing below", mount("/data", "/data", true), data, (true, submounts(true, false))),
            (
                "what is below stays writable",
                mount("/data", "/data", true),
                directory(true),
                (false, submounts(true, true)),
            ),
            ("unless it is said", recursive, directory(true), (true, submounts(true, false))),
            ("later mounts are seen", slave(false), directory(true), (false, submounts(false, false))),
            ("and written", slave(true), directory(true), (false, submounts(false, true))),
        ] {
            let (read_only, submounts, _) = alone(mount, found);
            assert_eq!((read_only, submounts), want, "{why}");
        }
    }

    #[test]
    fn source_resolution_follows_links_and_makes_directories() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        std::fs::write(dir.join("file"), "").unwrap();
        std::os::unix::fs::symlink("file", dir.join("link")).unwrap();
        std::os::unix::fs::symlink("nowhere", dir.join("dangling")).unwrap();
        let resolve_source =
            |name: &str| resolve_source(&mount("/data", dir.join(name).to_str().unwrap(), true));
        assert_eq!(
            resolve_source("link").unwrap(),
            MountSource::File { dir: dir.clone(), name: "file".into() }
        );
        let new = MountSource::Directory { dir: dir.join("new/deep"), has_submounts: false };
        assert_eq!(resolve_source("new/deep").unwrap(), new);
        assert!(resolve_source("dangling").is_err());
    }

    #[test]
    fn submounts_are_found_below_a_directory_alone() {
        let line = |place: &str| format!("36 35 98:0 /x {place} rw,noatime master:1 - ext4 /dev/root rw\n");
        let mounts = ["/", "/a", "/a/b\\040c", "/ab"].map(line).concat();
        for (dir, want) in
            [("/", true), ("/a", true), ("/a/b c", false), ("/a/b", false), ("/ab", false), ("/c", false)]
        {
            assert_eq!(has_submounts(&mounts, Path::new(dir)), want, "{dir}");
        }
    }
}
