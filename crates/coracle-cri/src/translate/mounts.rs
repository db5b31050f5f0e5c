//! Mounts of containers. Paths of the host are shared with the VM by directory, and the container mounts from there.

use std::io;
use std::path::{Path, PathBuf};

use coracle_host::{ContainerMount, ContainerMountSource, VolumeRequest};
use coracle_oci::Digest;
use coracle_proto::cri::{Mount, MountPropagation};

use crate::refusal::Refusal;

/// Digits of a directory's digest that name its volume.
const NAME_DIGITS: usize = 24;

/// What lies at the source of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Directory(PathBuf),
    File {
        dir: PathBuf,
        name: String,
    },
    /// Digest of an image's manifest.
    Image(String),
}

/// A directory of the host that a VM must have.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Share {
    pub(crate) name: String,
    pub(crate) dir: PathBuf,
    pub(crate) read_only: bool,
}

impl Share {
    fn new(dir: PathBuf, read_only: bool) -> Self {
        let text = format!("{}\n{read_only}", dir.display());
        let digest = Digest::of(text.as_bytes()).hex();
        let name = format!("cri-{}", digest.get(..NAME_DIGITS).unwrap_or_default());
        Self { name, dir, read_only }
    }

    /// Request to the host core. The kubelet speaks for root.
    pub(crate) fn request(&self) -> VolumeRequest {
        VolumeRequest {
            name: self.name.clone(),
            source: self.dir.display().to_string(),
            read_only: self.read_only,
            local_user: Some(0),
            ..VolumeRequest::default()
        }
    }
}

/// Is it a volume that this server attached?
pub(crate) fn is_share(name: &str) -> bool {
    name.strip_prefix("cri-").is_some_and(|rest| rest.len() == NAME_DIGITS)
}

/// Refuses what no look at the host could make right. Pure.
///
/// # Errors
/// What is wrong.
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

/// Looks at a path of the host; makes a directory where there is nothing. Links are followed. Blocking.
///
/// # Errors
/// As of the file system, or when it is neither a directory nor a file.
pub(crate) fn look(host_path: &str) -> io::Result<Found> {
    let path = Path::new(host_path);
    let real = match path.canonicalize() {
        Err(e) if e.kind() == io::ErrorKind::NotFound && path.symlink_metadata().is_err() => {
            std::fs::create_dir_all(path)?;
            path.canonicalize()?
        }
        found => found?,
    };
    let kind = real.metadata()?.file_type();
    if kind.is_dir() {
        return Ok(Found::Directory(real));
    }
    let name = real.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    match (real.parent(), name) {
        (Some(dir), Some(name)) if kind.is_file() => Ok(Found::File { dir: dir.to_owned(), name }),
        _ => Err(io::Error::other("it is neither a directory nor a file")),
    }
}

/// Mounts of a container and the directories that they need. A mount below another one comes after it. Pure.
pub(crate) fn plan(mounts: &[Mount], found: &[Found]) -> (Vec<ContainerMount>, Vec<Share>) {
    let mut planned = Vec::new();
    let mut shares = Vec::new();
    for (mount, found) in mounts.iter().zip(found) {
        let source = match found {
            Found::Directory(dir) => shared(&mut shares, dir, mount.readonly, String::new()),
            Found::File { dir, name } => shared(&mut shares, dir, mount.readonly, name.clone()),
            Found::Image(digest) => ContainerMountSource::Image {
                digest: digest.clone(),
                sub_path: mount.image_sub_path.trim_matches('/').to_owned(),
            },
        };
        let target = absolute(&mount.container_path);
        planned.push(ContainerMount { target, read_only: mount.readonly, source });
    }
    planned.sort_by_key(|mount| Path::new(&mount.target).components().count());
    shares.sort();
    shares.dedup();
    (planned, shares)
}

fn shared(shares: &mut Vec<Share>, dir: &Path, read_only: bool, sub_path: String) -> ContainerMountSource {
    let share = Share::new(dir.to_owned(), read_only);
    let name = share.name.clone();
    shares.push(share);
    ContainerMountSource::Volume { name, sub_path }
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
        let file = |name: &str| Found::File { dir: "/pod".into(), name: name.into() };
        let data = Found::Directory("/data".into());
        let found = [file("hosts"), data.clone(), file("log"), data, Found::Image("sha256:1".into())];
        let (planned, shares) = plan(&mounts, &found);
        let targets: Vec<_> = planned.iter().map(|mount| mount.target.as_str()).collect();
        assert_eq!(targets, ["/data", "/model", "/etc/hosts", "/data/deep", "/dev/log"]);
        assert_eq!(shares.len(), 2);
        assert!(shares.iter().all(|share| is_share(&share.name)));
        let image = ContainerMountSource::Image { digest: "sha256:1".into(), sub_path: "en".into() };
        assert_eq!(planned[1].source, image);
        let writable = plan(&[mount("/data", "/data", false)], &[Found::Directory("/data".into())]).1;
        assert!(!shares.contains(&writable[0]), "read-only and writable are two shares");
    }

    #[test]
    fn look_follows_links_and_makes_directories() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        std::fs::write(dir.join("file"), "").unwrap();
        std::os::unix::fs::symlink("file", dir.join("link")).unwrap();
        std::os::unix::fs::symlink("nowhere", dir.join("dangling")).unwrap();
        let look = |name: &str| look(dir.join(name).to_str().unwrap());
        assert_eq!(look("link").unwrap(), Found::File { dir: dir.clone(), name: "file".into() });
        assert_eq!(look("new/deep").unwrap(), Found::Directory(dir.join("new/deep")));
        assert!(look("dangling").is_err());
    }
}
