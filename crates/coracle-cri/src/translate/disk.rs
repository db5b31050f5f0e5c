//! Translates the configuration of a disk pod's container into a VM. Pure.

use coracle_host::{
    COMMIT_ANNOTATION, ContainerMount, ContainerMountSource, OwnContent, OwnVolume, Resolver, VmSpec,
    VolumeRequest,
};
use coracle_hypervisor::Display;
use coracle_net::Reach;
use coracle_proto::cri::ContainerConfig;

use super::mounts::{self, MountSource, Share};
use super::{container, sandbox, security};
use crate::CriOptions;
use crate::facts::{ContainerFacts, SandboxFacts};
use crate::refusal::Refusal;

/// Pod annotation: size of the display in pixels, e.g. `1920x1080`.
pub(crate) const DISPLAY_ANNOTATION: &str = "coracle.dev/display";
/// Pod annotation: size of an empty disk for each container, in addition to its image's disk, e.g. `20Gi`.
const EXTRA_DISK_ANNOTATION: &str = "coracle.dev/extra-disk";
/// Name of the extra disk, which the guest mounts at `/mnt/<name>`.
const EXTRA_DISK: &str = "extra";
/// Largest extra disk in MiB: that of an ext4 file system with small blocks.
const EXTRA_DISK_MAX_MIB: u64 = 16 << 20;

/// Directory in which a guest mounts shared directories.
const SHARES: &str = "/run/coracle/volumes";
/// Files that every guest manages itself.
const OF_SYSTEM: [&str; 3] = ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"];
/// Script that bind-mounts the container's mounts and executes its command. Arguments: the number of mounts; source, target and
/// `ro` or `rw` of each; the command.
const BIND: &str = r#"set -e
n=$1; shift
while [ "$n" -gt 0 ]; do
  if [ -d "$1" ]; then mkdir -p "$2"; else mkdir -p "$(dirname "$2")"; [ -e "$2" ] || : > "$2"; fi
  mount --bind "$1" "$2"
  if [ "$3" = ro ]; then mount -o remount,bind,ro "$2"; fi
  shift 3; n=$((n - 1))
done
exec "$@""#;

/// Input of a container's VM.
#[derive(Debug)]
pub(crate) struct Inputs<'a> {
    /// Id of the container, which is the name of its VM.
    pub(crate) id: &'a str,
    /// Id of the sandbox.
    pub(crate) pod: &'a str,
    pub(crate) facts: &'a ContainerFacts,
    pub(crate) sandbox: &'a SandboxFacts,
    /// Name of the disk image.
    pub(crate) image: &'a str,
    /// Resolved sources of the container's mounts, in their order.
    pub(crate) found: &'a [MountSource],
}

/// Returns the VM of a container.
///
/// # Errors
/// Unsupported properties, or the fault of the request.
pub(crate) fn vm_spec(inputs: &Inputs<'_>, options: &CriOptions) -> Result<VmSpec, Refusal> {
    let Inputs { facts, sandbox: pod, .. } = inputs;
    let config = &facts.config;
    check(config)?;
    let invalid = |_| Refusal::invalid("id", inputs.id);
    let (mounts, shares) = plan_mounts(config, inputs.found)?;
    let run_as = security::run_as(&container::context(config))?;
    let command = [config.command.clone(), config.args.clone()].concat();
    let (command, user) = wrap_with_mounts(&mounts, command, run_as.user);
    let linux = sandbox_linux(pod, config);
    let (vcpus, memory) = sandbox::size(&linux, options);
    let dns = pod.config.dns_config.clone();
    let mut metadata = facts.to_metadata();
    metadata.extend(crate::facts::pod_to_metadata(inputs.pod));
    if let Some(image) = pod.config.annotations.get(COMMIT_ANNOTATION) {
        metadata.insert(COMMIT_ANNOTATION.to_owned(), image.clone());
    }
    Ok(VmSpec {
        vcpus,
        memory,
        hostname: sandbox::hostname(&pod.config),
        command,
        env: config.envs.iter().map(container::env).collect::<Result<_, _>>()?,
        user,
        workdir: config.working_dir.clone(),
        metadata,
        ports: sandbox::forwards(&pod.config)?,
        reach: Reach { guests: true, node: true },
        cgroup_parent: sandbox::cgroup_of(pod.config.linux.as_ref(), options),
        volumes: shares.iter().map(request).collect(),
        resolver: dns.map(|dns| Resolver {
            nameservers: dns.servers,
            search_domains: dns.searches,
            options: dns.options,
        }),
        display: Some(display(pod.config.annotations.get(DISPLAY_ANNOTATION))?),
        own_volumes: extra_disk(pod.config.annotations.get(EXTRA_DISK_ANNOTATION))?.into_iter().collect(),
        address_of: Some(inputs.pod.parse().map_err(invalid)?),
        ..VmSpec::of(inputs.id.parse().map_err(invalid)?, inputs.image)
    })
}

/// Refuses options that a guest with its own users, devices and terminals does not support.
fn check(config: &ContainerConfig) -> Result<(), Refusal> {
    let unsupported = |what, why| Err(Refusal::Unsupported { what, why });
    if config.stdin {
        return unsupported("input of a disk pod", "its command has none: use exec");
    }
    if container::context(config).readonly_rootfs {
        return unsupported("a read-only root of a disk pod", "a system writes to its disk");
    }
    if config.mounts.iter().any(|mount| mount.image.is_some()) {
        return unsupported("an image volume of a disk pod", "its guest has no file systems of images");
    }
    Ok(())
}

/// Returns the display that an annotation requests.
fn display(annotation: Option<&String>) -> Result<Display, Refusal> {
    let invalid = |why| Refusal::invalid("annotation", format!("{DISPLAY_ANNOTATION}: {why}"));
    annotation.map_or(Ok(Display::DEFAULT), |text| text.parse().map_err(invalid))
}

/// Returns the empty disk that an annotation requests.
fn extra_disk(annotation: Option<&String>) -> Result<Option<OwnVolume>, Refusal> {
    let Some(text) = annotation else { return Ok(None) };
    let mib = |digits: &str, shift: u32| digits.parse::<u64>().ok()?.checked_mul(1 << shift);
    let size = [("Mi", 0), ("Gi", 10), ("Ti", 20)]
        .into_iter()
        .find_map(|(unit, shift)| mib(text.strip_suffix(unit)?, shift))
        .filter(|size| (1..=EXTRA_DISK_MAX_MIB).contains(size));
    let size_mib = size.ok_or_else(|| {
        let why = format!("{EXTRA_DISK_ANNOTATION}: \"{text}\" is not a size from 1Mi to 16Ti, like 20Gi");
        Refusal::invalid("annotation", why)
    })?;
    Ok(Some(OwnVolume {
        name: EXTRA_DISK.to_owned(),
        target: String::new(),
        read_only: false,
        content: OwnContent::Disk { size_mib, class: String::new() },
    }))
}

/// Returns the limits of the pod, or those of its only container if the kubelet sends none for the pod.
fn sandbox_linux(pod: &SandboxFacts, config: &ContainerConfig) -> coracle_proto::cri::LinuxPodSandboxConfig {
    let mut linux = pod.config.linux.clone().unwrap_or_default();
    if linux.resources.is_none() {
        linux.resources = config.linux.as_ref().and_then(|linux| linux.resources.clone());
    }
    linux
}

fn plan_mounts(
    config: &ContainerConfig,
    found: &[MountSource],
) -> Result<(Vec<ContainerMount>, Vec<Share>), Refusal> {
    let own = |path: &str| OF_SYSTEM.contains(&path);
    let wanted = config.mounts.iter().zip(found).filter(|(mount, _)| !own(&mount.container_path));
    let (mounts, found): (Vec<_>, Vec<_>) =
        wanted.map(|(mount, found)| (mount.clone(), found.clone())).unzip();
    mounts::plan(&mounts, &found, None)
}

fn request(share: &Share) -> VolumeRequest {
    VolumeRequest { target: format!("{SHARES}/{}", share.name), ..share.request() }
}

/// Returns the command that sets up the mounts first, and its user. Mounting needs root, so that the command changes its user
/// itself.
fn wrap_with_mounts(mounts: &[ContainerMount], command: Vec<String>, user: String) -> (Vec<String>, String) {
    if mounts.is_empty() || command.is_empty() {
        return (command, user);
    }
    let mut argv: Vec<String> = ["/bin/sh", "-c", BIND, "coracle"].map(str::to_owned).to_vec();
    argv.push(mounts.len().to_string());
    for mount in mounts {
        let ContainerMountSource::Volume { name, sub_path } = &mount.source else { continue };
        let source = format!("{SHARES}/{name}/{sub_path}");
        let access = if mount.read_only { "ro" } else { "rw" };
        argv.extend([source.trim_end_matches('/').to_owned(), mount.target.clone(), access.to_owned()]);
    }
    if !user.is_empty() {
        let (uid, gid) = user.split_once(':').unwrap_or((&user, "0"));
        let change = ["setpriv".to_owned(), format!("--reuid={uid}"), format!("--regid={gid}")];
        argv.extend(change);
        argv.extend(["--clear-groups", "--"].map(str::to_owned));
    }
    argv.extend(command);
    (argv, String::new())
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::{
        ContainerMetadata, DnsConfig, KeyValue, LinuxContainerConfig, LinuxContainerResources,
        LinuxContainerSecurityContext, Mount, PodSandboxConfig,
    };

    use super::*;

    const POD: &str = "0123456789abcdef";

    fn spec(
        config: ContainerConfig,
        sandbox: PodSandboxConfig,
        found: &[MountSource],
    ) -> Result<VmSpec, Refusal> {
        let facts = ContainerFacts { config, ..ContainerFacts::default() };
        let sandbox = SandboxFacts { config: sandbox, handler: "macvm".into(), disk: true };
        let image = "localhost/debian:12";
        let inputs = Inputs { id: "ab", pod: POD, facts: &facts, sandbox: &sandbox, image, found };
        vm_spec(&inputs, &CriOptions::default())
    }

    fn words(list: &[&str]) -> Vec<String> {
        list.iter().map(|word| (*word).to_owned()).collect()
    }

    fn mount(container_path: &str, host_path: &str, readonly: bool) -> Mount {
        let (container_path, host_path) = (container_path.to_owned(), host_path.to_owned());
        Mount { container_path, host_path, readonly, ..Mount::default() }
    }

    #[test]
    fn command_env_and_resolver_are_taken_from_the_pod() {
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata { name: "macos".into(), attempt: 0 }),
            command: words(&["teamcity-agent"]),
            args: words(&["run"]),
            envs: vec![KeyValue { key: "TC_CLOUD_PROFILE_ID".into(), value: b"kube-7".to_vec() }],
            ..ContainerConfig::default()
        };
        let sandbox = PodSandboxConfig {
            hostname: "test".into(),
            dns_config: Some(DnsConfig { servers: words(&["10.96.0.10"]), ..DnsConfig::default() }),
            annotations: [(COMMIT_ANNOTATION.to_owned(), "a.example/xcode:26".to_owned())].into(),
            ..PodSandboxConfig::default()
        };
        let spec = spec(config, sandbox, &[]).unwrap();
        assert_eq!(
            (spec.command, spec.env),
            (words(&["teamcity-agent", "run"]), words(&["TC_CLOUD_PROFILE_ID=kube-7"]))
        );
        assert_eq!((spec.image.as_str(), spec.hostname.as_str()), ("localhost/debian:12", "test"));
        assert_eq!(spec.resolver.unwrap().nameservers, ["10.96.0.10"]);
        assert_eq!(spec.address_of.unwrap().as_str(), POD);
        assert_eq!(spec.metadata[COMMIT_ANNOTATION], "a.example/xcode:26");
    }

    #[test]
    fn mounts_are_made_before_the_command() {
        let config = ContainerConfig {
            command: words(&["make"]),
            mounts: vec![
                mount("/scripts", "/pod/scripts", true),
                mount("/dev/termination-log", "/pod/log", false),
                mount("/etc/hosts", "/pod/hosts", false),
            ],
            ..ContainerConfig::default()
        };
        let file = |name: &str| MountSource::File { dir: "/pod".into(), name: name.into() };
        let found = [
            MountSource::Directory { dir: "/pod/scripts".into(), has_submounts: false },
            file("log"),
            file("hosts"),
        ];
        let made = spec(config.clone(), PodSandboxConfig::default(), &found).unwrap();
        assert_eq!(made.volumes.len(), 2);
        assert!(made.volumes.iter().all(|volume| volume.target == format!("{SHARES}/{}", volume.name)));
        let argv: Vec<_> = made.command.iter().map(String::as_str).collect();
        assert_eq!((argv[0], argv[3], argv[4]), ("/bin/sh", "coracle", "2"));
        assert_eq!(&argv[6..8], ["/scripts", "ro"]);
        assert!(argv[8].ends_with("/log"), "{argv:?}");
        assert_eq!(&argv[9..], ["/dev/termination-log", "rw", "make"]);
        let security_context = LinuxContainerSecurityContext {
            run_as_user: Some(coracle_proto::cri::Int64Value { value: 1000 }),
            ..LinuxContainerSecurityContext::default()
        };
        let linux = LinuxContainerConfig { security_context: Some(security_context), resources: None };
        let of_user =
            spec(ContainerConfig { linux: Some(linux), ..config }, PodSandboxConfig::default(), &found);
        let of_user = of_user.unwrap();
        assert!(of_user.command.contains(&"--reuid=1000".to_owned()) && of_user.user.is_empty());
    }

    #[test]
    fn displays_table() {
        for (text, want) in [
            (None, Some((1024, 768))),
            (Some("1920x1080"), Some((1920, 1080))),
            (Some("1920"), None),
            (Some("1920x"), None),
            (Some("-1x600"), None),
            (Some("320x200"), None),
            (Some("99999x1080"), None),
        ] {
            let text = text.map(str::to_owned);
            let got = display(text.as_ref()).ok().map(|display| (display.width, display.height));
            assert_eq!(got, want, "{text:?}");
        }
    }

    #[test]
    fn extra_disks_table() {
        for (text, want) in [
            (None, Some(None)),
            (Some("20Gi"), Some(Some(20 << 10))),
            (Some("512Mi"), Some(Some(512))),
            (Some("1Ti"), Some(Some(1 << 20))),
            (Some("0Gi"), None),
            (Some("20"), None),
            (Some("20G"), None),
            (Some("-1Gi"), None),
            (Some("99999999999999999999Gi"), None),
            (Some("17Ti"), None),
        ] {
            let text = text.map(str::to_owned);
            let got = extra_disk(text.as_ref()).ok().map(|disk| disk.map(|disk| disk.content));
            let want =
                want.map(|size| size.map(|size_mib| OwnContent::Disk { size_mib, class: String::new() }));
            assert_eq!(got, want, "{text:?}");
        }
    }

    #[test]
    fn vm_size_follows_the_limits() {
        let resources = LinuxContainerResources {
            memory_limit_in_bytes: 1 << 30,
            cpu_quota: 150_000,
            ..Default::default()
        };
        let linux = LinuxContainerConfig { resources: Some(resources), security_context: None };
        let config = ContainerConfig { linux: Some(linux), ..ContainerConfig::default() };
        let spec = spec(config, PodSandboxConfig::default(), &[]).unwrap();
        assert_eq!((spec.vcpus.get(), spec.memory.get()), (2, 1024 + 64));
    }

    #[test]
    fn stdin_and_read_only_rootfs_are_refused() {
        let read_only = LinuxContainerSecurityContext { readonly_rootfs: true, ..Default::default() };
        let linux = LinuxContainerConfig { security_context: Some(read_only), resources: None };
        for (why, config) in [
            ("input", ContainerConfig { stdin: true, ..ContainerConfig::default() }),
            ("a read-only root", ContainerConfig { linux: Some(linux), ..ContainerConfig::default() }),
        ] {
            let refused = spec(config, PodSandboxConfig::default(), &[]).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{why}: {refused}");
        }
    }
}
