//! Validated request for a container. Pure.

use std::ffi::CString;
use std::path::{Component, Path, PathBuf};

use coracle_proto::guest::container_mount::Source;
use coracle_proto::guest::{
    CgroupLimits, ContainerMount, CreateContainerRequest, PidNamespace as WirePidNamespace, Process, Security,
};
use coracle_types::IdMapping;
use rustix::process::{Resource, Rlimit, Signal};

use crate::error::Error;
use crate::mounts;
use crate::rootfs::PATH_MAX;
use crate::volumes::tmpfs_options;

/// Maximum length of an id, bytes.
const ID_MAX: usize = 64;
/// Maximum number of mounts, paths and limits of one container.
const LIST_MAX: usize = 256;
/// Maximum length of a seccomp filter, instructions (BPF_MAXINSNS, linux/bpf_common.h).
const SECCOMP_MAX: usize = 4096;
/// Default capabilities, as in the OCI runtimes: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP,
/// NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, MKNOD, AUDIT_WRITE, SETFCAP (linux/capability.h).
const CAPABILITIES: u64 = 0xa80425fb;

/// Container to create.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Plan {
    pub(super) id: String,
    pub(super) image: PathBuf,
    pub(super) filesystem: &'static str,
    pub(super) read_only_root: bool,
    pub(super) process: Process,
    pub(super) mounts: Vec<Mount>,
    pub(super) security: SecurityPlan,
    pub(super) cgroup: CgroupLimits,
    pub(super) pid_namespace: PidMode,
    pub(super) stop_signal: Signal,
    pub(super) stdin_once: bool,
    /// Path of the termination message file, if the container has one that is not a mount of its own.
    pub(super) termination_message: Option<PathBuf>,
}

/// PID namespace of a container, which decides what processes it sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PidMode {
    Own,
    Pod,
    /// Namespace of the container with this id.
    Target(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mount {
    pub(super) target: PathBuf,
    pub(super) read_only: bool,
    pub(super) source: MountSource,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum MountSource {
    /// Path below the volumes of the sandbox.
    Volume { name: String, sub_path: PathBuf },
    /// Tmpfs with these options.
    Tmpfs { options: CString },
    /// Path in another image.
    Image { device: PathBuf, filesystem: &'static str, sub_path: PathBuf },
}

/// Security settings of a container's processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SecurityPlan {
    pub(super) capabilities: u64,
    pub(super) no_new_privileges: bool,
    pub(super) masked_paths: Vec<CString>,
    pub(super) read_only_paths: Vec<CString>,
    pub(super) rlimits: Vec<(Resource, Rlimit)>,
    pub(super) oom_score_adj: i32,
    pub(super) seccomp: Vec<u8>,
    pub(super) privileged: bool,
    /// Id mapping, if the container has a user namespace.
    pub(super) ids: Option<IdMapping>,
}

impl Plan {
    pub(super) fn parse(wire: CreateContainerRequest) -> Result<Self, Error> {
        check_id(&wire.id)?;
        let image = coracle_proto::guest::RootMount {
            image_device: wire.image_device.clone(),
            image_fs: wire.image_fs.clone(),
            overlay_device: String::new(),
            root_first: false,
        };
        mounts::Plan::parse(&image)?;
        let filesystem = filesystem(&wire.image_fs);
        if wire.mounts.len() > LIST_MAX {
            return Err(Error::invalid(format!("more than {LIST_MAX} mounts")));
        }
        let pid_namespace = match wire.pid_namespace() {
            WirePidNamespace::Unspecified | WirePidNamespace::Container => PidMode::Own,
            WirePidNamespace::Pod => PidMode::Pod,
            WirePidNamespace::Target => {
                check_id(&wire.target_container)?;
                PidMode::Target(wire.target_container.clone())
            }
        };
        let mounts: Vec<_> = wire.mounts.iter().map(Mount::parse).collect::<Result<_, _>>()?;
        let termination_message = match PathBuf::from(&wire.termination_message_path) {
            path if path.as_os_str().is_empty() => None,
            path => Some(target(path)?).filter(|path| mounts.iter().all(|mount| mount.target != *path)),
        };
        let stop_signal = match wire.stop_signal {
            0 => Signal::TERM,
            number => signal(number)?,
        };
        Ok(Self {
            image: mounts::device(&wire.image_device)?,
            filesystem,
            read_only_root: wire.read_only_root,
            process: wire.process.ok_or_else(|| Error::invalid("no process"))?,
            mounts,
            security: SecurityPlan::parse(wire.security.unwrap_or_default())?,
            cgroup: wire.cgroup.unwrap_or_default(),
            pid_namespace,
            stop_signal,
            stdin_once: wire.stdin_once,
            termination_message,
            id: wire.id,
        })
    }
}

/// File system type of a validated request.
fn filesystem(name: &str) -> &'static str {
    if name == "ext4" { "ext4" } else { "erofs" }
}

/// Parses a signal number. Numbers above 31 are real-time signals, which `rustix` also identifies by number.
pub(super) fn signal(number: i32) -> Result<Signal, Error> {
    Signal::from_named_raw(number).ok_or_else(|| Error::invalid(format!("invalid signal {number}")))
}

/// Validates a container's id, which is also the name of a directory and of a cgroup.
pub(super) fn check_id(id: &str) -> Result<(), Error> {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    if (1..=ID_MAX).contains(&id.len()) && id.bytes().all(plain) && !id.starts_with('-') {
        return Ok(());
    }
    Err(Error::invalid(format!("invalid container id {id:?}: not 1 to {ID_MAX} of a-z, 0-9 and -")))
}

impl Mount {
    fn parse(wire: &ContainerMount) -> Result<Self, Error> {
        let target = target(PathBuf::from(&wire.target))?;
        let source = match &wire.source {
            Some(Source::Volume(volume)) => {
                let sub_path = PathBuf::from(&volume.sub_path);
                let named = !volume.name.is_empty()
                    && volume.name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
                if !named || sub_path.is_absolute() || !is_plain(&sub_path) {
                    return Err(Error::invalid(format!(
                        "invalid volume {:?} or sub path {:?} of a mount",
                        volume.name, volume.sub_path
                    )));
                }
                MountSource::Volume { name: volume.name.clone(), sub_path }
            }
            Some(Source::Tmpfs(tmpfs)) => MountSource::Tmpfs { options: tmpfs_options(tmpfs) },
            Some(Source::Image(image)) => {
                let sub_path = PathBuf::from(&image.sub_path);
                if sub_path.is_absolute() || !is_plain(&sub_path) {
                    return Err(Error::invalid(format!("invalid sub path {:?} of an image", image.sub_path)));
                }
                let of_image = coracle_proto::guest::RootMount {
                    image_device: image.device.clone(),
                    image_fs: image.fs.clone(),
                    overlay_device: String::new(),
                    root_first: false,
                };
                mounts::Plan::parse(&of_image)?;
                let device = mounts::device(&image.device)?;
                MountSource::Image { device, filesystem: filesystem(&image.fs), sub_path }
            }
            None => return Err(Error::invalid("a mount without a source")),
        };
        Ok(Self { target, read_only: wire.read_only, source })
    }
}

/// Validates a mount point in the container.
fn target(path: PathBuf) -> Result<PathBuf, Error> {
    if path.is_absolute() && path.file_name().is_some() && is_plain(&path) {
        return Ok(path);
    }
    Err(Error::invalid(format!("invalid target {path:?} of a mount")))
}

/// Whether the path is neither too long nor leads upwards.
fn is_plain(path: &Path) -> bool {
    path.as_os_str().len() <= PATH_MAX
        && !path.as_os_str().as_encoded_bytes().contains(&0)
        && path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
}

impl SecurityPlan {
    fn parse(wire: Security) -> Result<Self, Error> {
        let too_many = [wire.masked_paths.len(), wire.read_only_paths.len(), wire.rlimits.len()]
            .into_iter()
            .any(|count| count > LIST_MAX);
        if too_many {
            return Err(Error::invalid(format!("more than {LIST_MAX} paths or limits")));
        }
        if !wire.seccomp.len().is_multiple_of(8) || wire.seccomp.len() / 8 > SECCOMP_MAX {
            return Err(Error::invalid("invalid seccomp filter: not 0 to 4096 instructions of 8 bytes"));
        }
        if !(-1000..=1000).contains(&wire.oom_score_adj) {
            return Err(Error::invalid(format!("invalid oom_score_adj {}", wire.oom_score_adj)));
        }
        let paths = |paths: Vec<String>| -> Result<Vec<CString>, Error> {
            let path = |path: String| {
                let absolute = path.starts_with('/') && path.len() <= PATH_MAX;
                let path = CString::new(path).ok().filter(|_| absolute);
                path.ok_or_else(|| Error::invalid("invalid masked or read-only path"))
            };
            paths.into_iter().map(path).collect()
        };
        let rlimits = wire.rlimits.iter().map(|limit| {
            let resource = resource(limit.resource)
                .ok_or_else(|| Error::invalid(format!("invalid resource {}", limit.resource)))?;
            let bound = |value: u64| Some(value).filter(|value| *value != u64::MAX);
            Ok((resource, Rlimit { current: bound(limit.soft), maximum: bound(limit.hard) }))
        });
        let ids = wire.user_namespace.map(|ids| IdMapping::new(ids.first, ids.length)).transpose();
        Ok(Self {
            ids: ids.map_err(|error| Error::invalid(error.to_string()))?,
            capabilities: wire.capabilities.unwrap_or(CAPABILITIES),
            no_new_privileges: wire.no_new_privileges,
            masked_paths: paths(wire.masked_paths)?,
            read_only_paths: paths(wire.read_only_paths)?,
            rlimits: rlimits.collect::<Result<_, Error>>()?,
            oom_score_adj: wire.oom_score_adj,
            seccomp: wire.seccomp,
            privileged: wire.privileged,
        })
    }
}

/// Resource of a number (asm-generic/resource.h).
fn resource(number: u32) -> Option<Resource> {
    Some(match number {
        0 => Resource::Cpu,
        1 => Resource::Fsize,
        2 => Resource::Data,
        3 => Resource::Stack,
        4 => Resource::Core,
        5 => Resource::Rss,
        6 => Resource::Nproc,
        7 => Resource::Nofile,
        8 => Resource::Memlock,
        9 => Resource::As,
        10 => Resource::Locks,
        11 => Resource::Sigpending,
        12 => Resource::Msgqueue,
        13 => Resource::Nice,
        14 => Resource::Rtprio,
        15 => Resource::Rttime,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use coracle_proto::guest::{Rlimit as WireRlimit, TmpfsSource, UserNamespace, VolumeSource};

    use super::*;

    fn request() -> CreateContainerRequest {
        CreateContainerRequest {
            id: "web-1".into(),
            image_device: "/dev/disk/by-id/virtio-slot1".into(),
            image_fs: "erofs".into(),
            process: Some(Process { argv: vec!["/bin/true".into()], ..Process::default() }),
            ..CreateContainerRequest::default()
        }
    }

    fn mount(target: &str, source: Option<Source>) -> CreateContainerRequest {
        let mount = ContainerMount { target: target.into(), read_only: false, source };
        CreateContainerRequest { mounts: vec![mount], ..request() }
    }

    fn volume(name: &str, sub_path: &str) -> Option<Source> {
        Some(Source::Volume(VolumeSource { name: name.into(), sub_path: sub_path.into() }))
    }

    #[test]
    fn defaults_are_those_of_the_oci_runtimes() {
        let plan = Plan::parse(request()).unwrap();
        assert_eq!(plan.security.capabilities, 0xa80425fb);
        assert_eq!((plan.pid_namespace, plan.stop_signal), (PidMode::Own, Signal::TERM));
        let plan = Plan::parse(mount("/tmp", Some(Source::Tmpfs(TmpfsSource::default())))).unwrap();
        assert_eq!(plan.mounts[0].source, MountSource::Tmpfs { options: c"mode=1777".into() });
        let tmpfs = TmpfsSource { size_bytes: 4096, mode: 0o770, gid: 7, ..TmpfsSource::default() };
        let plan = Plan::parse(mount("/tmp", Some(Source::Tmpfs(tmpfs)))).unwrap();
        let options = c"mode=0770,uid=0,gid=7,size=4096".into();
        assert_eq!(plan.mounts[0].source, MountSource::Tmpfs { options });
    }

    #[test]
    fn bad_requests_are_refused() {
        let security = |security| CreateContainerRequest { security: Some(security), ..request() };
        for (why, bad) in [
            ("no id", CreateContainerRequest { id: String::new(), ..request() }),
            ("a path as an id", CreateContainerRequest { id: "../x".into(), ..request() }),
            ("upper case", CreateContainerRequest { id: "Web".into(), ..request() }),
            ("no process", CreateContainerRequest { process: None, ..request() }),
            ("no image", CreateContainerRequest { image_device: String::new(), ..request() }),
            ("unknown signal", CreateContainerRequest { stop_signal: 99, ..request() }),
            ("a mount on the root", mount("/", volume("data", ""))),
            (
                "a message upwards",
                CreateContainerRequest { termination_message_path: "/a/../b".into(), ..request() },
            ),
            (
                "a relative message",
                CreateContainerRequest { termination_message_path: "log".into(), ..request() },
            ),
            ("a mount that leads upwards", mount("/a/../b", volume("data", ""))),
            ("no source", mount("/data", None)),
            ("a sub path that leads upwards", mount("/data", volume("data", "../etc"))),
            ("an absolute sub path", mount("/data", volume("data", "/etc"))),
            ("a path as a volume", mount("/data", volume("a/b", ""))),
            ("a filter cut short", security(Security { seccomp: vec![0; 7], ..Security::default() })),
            ("oom_score_adj", security(Security { oom_score_adj: 1001, ..Security::default() })),
            (
                "a relative masked path",
                security(Security { masked_paths: vec!["proc".into()], ..Security::default() }),
            ),
            (
                "a user namespace whose root is the guest's",
                security(Security {
                    user_namespace: Some(UserNamespace { first: 0, length: 1 }),
                    ..Security::default()
                }),
            ),
            (
                "an unknown resource",
                security(Security {
                    rlimits: vec![WireRlimit { resource: 16, soft: 0, hard: 0 }],
                    ..Security::default()
                }),
            ),
        ] {
            assert!(matches!(Plan::parse(bad), Err(Error::Invalid(_))), "{why}");
        }
    }
}
