//! Translates the configuration of a container into types of the host core. Pure.

use std::path::Path;

use coracle_host::{ContainerSpec, Security, Workload};
use coracle_image::Image;
use coracle_proto::cri::{ContainerConfig, KeyValue, LinuxContainerSecurityContext, PodSandboxConfig};

use super::mounts::{self, MountSource, Share};
use super::security::{self, refuse_host_labels};
use super::{resources, sandbox, signals, user_namespace};
use crate::CriOptions;
use crate::facts::ContainerFacts;
use crate::refusal::Refusal;

/// Input of a container's specification.
#[derive(Debug)]
pub(crate) struct Inputs<'a> {
    pub(crate) facts: &'a ContainerFacts,
    pub(crate) sandbox: &'a PodSandboxConfig,
    pub(crate) image: &'a Image,
    /// Resolved sources of the container's mounts, in their order.
    pub(crate) found: &'a [MountSource],
    /// Filter of the seccomp profile; empty: none.
    pub(crate) seccomp: Vec<u8>,
}

/// Refuses requests that are invalid regardless of the state of the host.
///
/// # Errors
/// The fault of the request.
pub(crate) fn check(
    config: &ContainerConfig,
    pod: &PodSandboxConfig,
    options: &CriOptions,
) -> Result<(), Refusal> {
    if config.metadata.as_ref().is_none_or(|metadata| metadata.name.is_empty()) {
        return Err(Refusal::invalid("container metadata", "the name is missing"));
    }
    if !config.devices.is_empty() || !config.cdi_devices.is_empty() {
        let (what, why) = ("a device of the host", "it cannot be passed to a VM that runs");
        return Err(Refusal::Unsupported { what, why });
    }
    let context = context(config);
    #[expect(deprecated, reason = "older kubelets send it")]
    refuse_host_labels(context.apparmor.as_ref(), &context.apparmor_profile)?;
    let namespaces = context.namespace_options.clone().unwrap_or_default();
    sandbox::check_namespaces(&namespaces, options)?;
    if user_namespace::ids(&namespaces)? != sandbox::ids(pod)? {
        return Err(Refusal::invalid("container", "its user namespace is not the pod's"));
    }
    config.mounts.iter().try_for_each(mounts::check)
}

/// Returns the security context, or an empty one.
pub(crate) fn context(config: &ContainerConfig) -> LinuxContainerSecurityContext {
    config.linux.as_ref().and_then(|linux| linux.security_context.clone()).unwrap_or_default()
}

/// Returns the specification of a container, and the directories that its VM must share.
///
/// # Errors
/// The fault of the request.
pub(crate) fn spec(inputs: Inputs<'_>) -> Result<(ContainerSpec, Vec<Share>), Refusal> {
    let Inputs { facts, sandbox: pod, image, found, seccomp } = inputs;
    let config = &facts.config;
    let context = context(config);
    let limits = config.linux.as_ref().and_then(|linux| linux.resources.clone()).unwrap_or_default();
    let ids = sandbox::ids(pod)?;
    let (mounts, shares) = mounts::plan(&config.mounts, found, ids)?;
    let run_as = security::run_as(&context)?;
    let process = Workload {
        argv: argv(config, image)?,
        env: config.envs.iter().map(env).collect::<Result<_, _>>()?,
        user: run_as.user,
        cwd: config.working_dir.clone(),
    };
    let of_image = || image.config.stop_signal.as_deref().and_then(signals::parse);
    let log_path = [&pod.log_directory, &config.log_path];
    let has_log = log_path.iter().all(|part| !part.is_empty());
    Ok((
        ContainerSpec {
            image: facts.image_ref.clone(),
            process,
            tty: config.tty,
            stdin: config.stdin,
            stdin_once: config.stdin_once,
            groups_policy: run_as.policy,
            groups: run_as.groups,
            read_only_root: context.readonly_rootfs,
            mounts,
            security: Security { user_namespace: ids, ..security::security(&context, &limits, seccomp)? },
            resources: resources::limits(&limits),
            pid_namespace: security::pid_namespace(&context)?,
            stop_signal: signals::number(config.stop_signal()).or_else(of_image).unwrap_or(0),
            attempt: config.metadata.as_ref().map_or(0, |metadata| metadata.attempt),
            // The kubelet mounts a file of its own for the termination message.
            termination_message_path: String::new(),
            log_path: has_log.then(|| Path::new(&pod.log_directory).join(&config.log_path)),
            metadata: facts.to_metadata(),
        },
        shares,
    ))
}

/// Returns the arguments, as in Kubernetes: a command replaces the image's entrypoint and arguments, `args` replace the image's
/// arguments.
fn argv(config: &ContainerConfig, image: &Image) -> Result<Vec<String>, Refusal> {
    let image = &image.config;
    let argv = match (config.command.is_empty(), config.args.is_empty()) {
        (false, _) => [config.command.clone(), config.args.clone()].concat(),
        (true, false) => [image.entrypoint.clone(), config.args.clone()].concat(),
        (true, true) => [image.entrypoint.clone(), image.cmd.clone()].concat(),
    };
    match argv.is_empty() {
        true => Err(Refusal::invalid("container", "neither the pod nor the image names a command")),
        false => Ok(argv),
    }
}

/// An entry of the environment.
///
/// # Errors
/// An invalid name, or a value that is not text.
pub(crate) fn env(entry: &KeyValue) -> Result<String, Refusal> {
    let invalid = || Refusal::invalid("environment", format!("{} is not NAME=text", entry.key));
    let value = std::str::from_utf8(&entry.value).map_err(|_| invalid())?;
    if entry.key.is_empty() || entry.key.contains('=') || value.contains('\0') {
        return Err(invalid());
    }
    Ok(format!("{}={value}", entry.key))
}

#[cfg(test)]
mod tests {
    use coracle_host::PidNamespace;
    use coracle_image::ImageConfig;
    use coracle_oci::Digest;
    use coracle_proto::cri::{
        ContainerMetadata, Device, LinuxContainerConfig, LinuxContainerResources, NamespaceMode,
        NamespaceOption, Signal,
    };

    use super::*;

    fn image() -> Image {
        let digest = Digest::of(b"image");
        let config = ImageConfig {
            entrypoint: vec!["/entry".into()],
            cmd: vec!["arg".into()],
            stop_signal: Some("SIGQUIT".into()),
            ..ImageConfig::default()
        };
        Image {
            digest,
            config_digest: digest,
            references: vec![],
            architecture: "amd64".into(),
            os: "linux".into(),
            config,
            layers: vec![],
            size_bytes: 1,
            chain_id: digest,
            created: None,
        }
    }

    fn translate_config(config: ContainerConfig) -> Result<ContainerSpec, Refusal> {
        let facts = ContainerFacts { config, image_ref: "a@sha256:1".into(), ..ContainerFacts::default() };
        let sandbox = PodSandboxConfig { log_directory: "/logs".into(), ..PodSandboxConfig::default() };
        let image = image();
        let inputs = Inputs { facts: &facts, sandbox: &sandbox, image: &image, found: &[], seccomp: vec![] };
        spec(inputs).map(|(spec, _)| spec)
    }

    fn words(list: &[&str]) -> Vec<String> {
        list.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn commands_table() {
        for (why, command, args, want) in [
            ("the image's", &[][..], &[][..], &["/entry", "arg"][..]),
            ("arguments", &[], &["x"], &["/entry", "x"]),
            ("a command alone", &["/own"], &[], &["/own"]),
            ("both", &["/own"], &["x"], &["/own", "x"]),
        ] {
            let config =
                ContainerConfig { command: words(command), args: words(args), ..ContainerConfig::default() };
            assert_eq!(translate_config(config).unwrap().process.argv, words(want), "{why}");
        }
    }

    #[test]
    fn spec_reflects_the_container_config() {
        let namespaces =
            NamespaceOption { pid: NamespaceMode::Container.into(), ..NamespaceOption::default() };
        let security_context = LinuxContainerSecurityContext {
            readonly_rootfs: true,
            namespace_options: Some(namespaces),
            ..LinuxContainerSecurityContext::default()
        };
        let resources = LinuxContainerResources { oom_score_adj: 7, ..LinuxContainerResources::default() };
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata { name: "web".into(), attempt: 3 }),
            envs: vec![KeyValue { key: "A".into(), value: b"b=c".to_vec() }],
            log_path: "web/3.log".into(),
            stop_signal: Signal::Sigusr1.into(),
            linux: Some(LinuxContainerConfig {
                security_context: Some(security_context),
                resources: Some(resources),
            }),
            ..ContainerConfig::default()
        };
        let spec = translate_config(config).unwrap();
        assert_eq!(spec.process.env, ["A=b=c"]);
        assert_eq!(spec.log_path.as_deref(), Some(Path::new("/logs/web/3.log")));
        assert_eq!((spec.stop_signal, spec.attempt, spec.read_only_root), (10, 3, true));
        assert_eq!((spec.pid_namespace, spec.security.oom_score_adj), (PidNamespace::Container, 7));
        let plain = translate_config(ContainerConfig::default()).unwrap();
        assert_eq!((plain.stop_signal, plain.log_path), (3, None), "the image's signal, and no log");
        assert_eq!(plain.pid_namespace, PidNamespace::Pod);
        let bad = KeyValue { key: "A".into(), value: vec![0xff] };
        assert!(translate_config(ContainerConfig { envs: vec![bad], ..ContainerConfig::default() }).is_err());
    }

    #[test]
    fn devices_and_nameless_containers_are_refused() {
        let named = ContainerConfig {
            metadata: Some(ContainerMetadata { name: "web".into(), attempt: 0 }),
            ..ContainerConfig::default()
        };
        let (pod, options) = (PodSandboxConfig::default(), CriOptions::default());
        assert_eq!(check(&named, &pod, &options), Ok(()));
        assert!(check(&ContainerConfig::default(), &pod, &options).is_err());
        let devices = vec![Device::default()];
        assert!(check(&ContainerConfig { devices, ..named }, &pod, &options).is_err());
    }
}
