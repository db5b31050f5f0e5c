//! Steps of a plan. Each step carries every decision that its execution needs.

use std::net::IpAddr;
use std::time::Duration;

use coracle_host::{ContainerId, PullPolicy};
use coracle_net::Bandwidth;
use coracle_oci::Credentials;
use coracle_record::Sandbox;
use coracle_types::{MemoryMib, Vcpus};
use jiff::Timestamp;

use crate::container_spec::NewContainer;
use crate::probe::http::HttpRequest;
use crate::probe::{ProbeCheck, ProbeKind};
use crate::volume::{MeasuredVolume, SandboxVolume, TokenRequest, VolumeContent};

/// Target of a step. At most one step works on a target at a time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// The VM.
    Sandbox,
    /// Files of a volume.
    Volume(String),
    /// A token, by volume and path.
    Token(String, String),
    /// A container of the spec, by name.
    Container(String),
    /// A container of an earlier attempt, which is being removed.
    Old(ContainerId),
    /// A probe of a container.
    Probe(ContainerId, ProbeKind),
    /// Usage of volumes.
    Usage,
}

/// Step of a plan: one effect.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Creates the VM, if it does not exist, and starts it.
    StartSandbox(Box<SandboxSpec>),
    /// Powers the VM off. Its containers end with it.
    StopSandbox {
        /// Grace period before the VM is killed.
        grace: Duration,
    },
    /// Removes the VM, its containers and the pod's files.
    RemoveSandbox,
    /// Writes the files of a volume.
    WriteVolume(Box<VolumeContent>),
    /// Requests a service account token.
    RequestToken(TokenRequest),
    /// Pulls the image of a container to the node.
    PullImage {
        /// Container that the image is for.
        id: ContainerId,
        /// Name of the container.
        name: String,
        /// Reference.
        image: String,
        /// Pull policy.
        policy: PullPolicy,
        /// Credentials of the pod, in the order in which they are tried; none: those of the node.
        credentials: Vec<Credentials>,
    },
    /// Creates a container; its image is on the node.
    CreateContainer {
        /// Id of the container.
        id: ContainerId,
        /// Name of the container.
        name: String,
        /// Content of the container.
        container: Box<NewContainer>,
    },
    /// Starts a container.
    StartContainer {
        /// Id of the container.
        id: ContainerId,
        /// Name of the container.
        name: String,
    },
    /// Runs a hook of a container.
    RunHook {
        /// Id of the container.
        id: ContainerId,
        /// Name of the container.
        name: String,
        /// Kind of the hook.
        kind: HookKind,
        /// Action of the hook.
        action: HookAction,
        /// Time at which the hook is cut off.
        deadline: Timestamp,
    },
    /// Stops a container.
    StopContainer {
        /// Id of the container.
        id: ContainerId,
        /// Name of the container.
        name: String,
        /// Grace period before the container is killed.
        grace: Duration,
        /// Time of the kill; a second step with an earlier deadline replaces the first.
        deadline: Timestamp,
        /// Reason, for the event.
        why: String,
    },
    /// Removes a container that has ended.
    RemoveContainer {
        /// Id of the container.
        id: ContainerId,
        /// Name of the container.
        name: String,
    },
    /// Checks a container once.
    Probe {
        /// Id of the container.
        id: ContainerId,
        /// Name of the container.
        name: String,
        /// Kind of the probe.
        kind: ProbeKind,
        /// Check to carry out.
        check: ProbeCheck,
        /// Limit of one try.
        limit: Duration,
    },
    /// Measures the usage of volumes.
    MeasureVolumes {
        /// Volumes to measure.
        volumes: Vec<MeasuredVolume>,
    },
    /// Cuts off the step that works on a target. That step can be repeated later.
    Cancel(Target),
}

/// Kind of a container's hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HookKind {
    /// Hook after the start.
    PostStart,
    /// Hook before the stop.
    PreStop,
}

/// Action of a hook.
#[derive(Clone, Debug, PartialEq)]
pub enum HookAction {
    /// Runs a command in the container.
    Exec(Vec<String>),
    /// Sends a request. Any response counts as success.
    Http(Box<HttpRequest>),
    /// Waits.
    Sleep(Duration),
    /// The action is invalid, for this reason.
    Invalid(String),
}

/// Specification of the VM of a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct SandboxSpec {
    /// Number of CPUs.
    pub vcpus: Vcpus,
    /// Memory size.
    pub memory: MemoryMib,
    /// Host name of the guest.
    pub hostname: String,
    /// Resolver and kernel parameters.
    pub sandbox: Sandbox,
    /// Volumes, in addition to the pod's own directories.
    pub volumes: Vec<SandboxVolume>,
    /// Ports of the node that are forwarded to the VM.
    pub ports: Vec<HostPort>,
    /// Bandwidth limits.
    pub bandwidth: Option<Bandwidth>,
}

/// Port of the node that is forwarded to a port of the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostPort {
    /// Protocol UDP instead of TCP.
    pub udp: bool,
    /// Address of the node to listen on; `None`: all.
    pub host_address: Option<IpAddr>,
    /// Port of the node.
    pub host_port: u16,
    /// Port of the pod.
    pub container_port: u16,
}

impl Step {
    /// Returns the target of the step.
    #[must_use]
    pub fn target(&self) -> Target {
        match self {
            Self::StartSandbox(_) | Self::StopSandbox { .. } | Self::RemoveSandbox => Target::Sandbox,
            Self::WriteVolume(content) => Target::Volume(content.name.clone()),
            Self::RequestToken(request) => Target::Token(request.volume.clone(), request.path.clone()),
            Self::PullImage { name, .. }
            | Self::CreateContainer { name, .. }
            | Self::StartContainer { name, .. }
            | Self::RunHook { name, .. }
            | Self::StopContainer { name, .. } => Target::Container(name.clone()),
            Self::RemoveContainer { id, .. } => Target::Old(id.clone()),
            Self::Probe { id, kind, .. } => Target::Probe(id.clone(), *kind),
            Self::MeasureVolumes { .. } => Target::Usage,
            Self::Cancel(target) => target.clone(),
        }
    }

    /// Returns a short name, for logs and tables of tests.
    #[must_use]
    pub fn verb(&self) -> &'static str {
        match self {
            Self::StartSandbox(_) => "start-sandbox",
            Self::StopSandbox { .. } => "stop-sandbox",
            Self::RemoveSandbox => "remove-sandbox",
            Self::WriteVolume(_) => "write",
            Self::RequestToken(_) => "token",
            Self::PullImage { .. } => "pull",
            Self::CreateContainer { .. } => "create",
            Self::StartContainer { .. } => "start",
            Self::RunHook { kind: HookKind::PostStart, .. } => "post-start",
            Self::RunHook { kind: HookKind::PreStop, .. } => "pre-stop",
            Self::StopContainer { .. } => "stop",
            Self::RemoveContainer { .. } => "remove",
            Self::Probe { .. } => "probe",
            Self::MeasureVolumes { .. } => "measure",
            Self::Cancel(_) => "cancel",
        }
    }

    /// Returns the name of the container that the step works on.
    #[must_use]
    pub fn container(&self) -> Option<&str> {
        match self {
            Self::PullImage { name, .. }
            | Self::CreateContainer { name, .. }
            | Self::StartContainer { name, .. }
            | Self::RunHook { name, .. }
            | Self::StopContainer { name, .. }
            | Self::RemoveContainer { name, .. }
            | Self::Probe { name, .. } => Some(name),
            Self::Cancel(Target::Container(name)) => Some(name),
            Self::StartSandbox(_)
            | Self::StopSandbox { .. }
            | Self::RemoveSandbox
            | Self::WriteVolume(_)
            | Self::RequestToken(_)
            | Self::MeasureVolumes { .. }
            | Self::Cancel(_) => None,
        }
    }
}
