//! What a plan asks for. Each step carries every choice that its execution needs.

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

/// What a step works on. At most one step works on a target at a time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// The VM.
    Sandbox,
    /// Files of a volume.
    Volume(String),
    /// A token, by volume and path.
    Token(String, String),
    /// A container, by name.
    Container(String),
    /// A container of an earlier attempt, which is removed.
    Old(ContainerId),
    /// A probe of a container.
    Probe(ContainerId, ProbeKind),
    /// What volumes hold.
    Usage,
}

/// One effect.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Makes the VM, if it does not exist, and starts it.
    StartSandbox(Box<SandboxSpec>),
    /// Powers the VM off. Its containers end with it.
    StopSandbox {
        /// Time before it is killed.
        grace: Duration,
    },
    /// Removes the VM, its containers and the pod's files.
    RemoveSandbox,
    /// Writes files of a volume.
    WriteVolume(Box<VolumeContent>),
    /// Asks for a token.
    RequestToken(TokenRequest),
    /// Brings the image of a container to the node.
    PullImage {
        /// The container that it is for.
        id: ContainerId,
        /// Name of the container.
        name: String,
        /// Reference.
        image: String,
        /// When to ask the registry.
        policy: PullPolicy,
        /// What the pod brings, to be tried in this order; none: the node's own.
        credentials: Vec<Credentials>,
    },
    /// Makes a container; its image is on the node.
    CreateContainer {
        /// Its id.
        id: ContainerId,
        /// Name of the container.
        name: String,
        /// What it is.
        container: Box<NewContainer>,
    },
    /// Starts a container.
    StartContainer {
        /// Its id.
        id: ContainerId,
        /// Its name.
        name: String,
    },
    /// Runs a hook of a container.
    RunHook {
        /// Its id.
        id: ContainerId,
        /// Its name.
        name: String,
        /// Which.
        kind: HookKind,
        /// What to do.
        action: HookAction,
        /// It is cut off then.
        deadline: Timestamp,
    },
    /// Ends a container.
    StopContainer {
        /// Its id.
        id: ContainerId,
        /// Its name.
        name: String,
        /// Time before it is killed.
        grace: Duration,
        /// When it is killed; a second request with an earlier one replaces the first.
        deadline: Timestamp,
        /// Why, for the event.
        why: String,
    },
    /// Removes a container that has ended.
    RemoveContainer {
        /// Its id.
        id: ContainerId,
        /// Its name.
        name: String,
    },
    /// Checks a container once.
    Probe {
        /// Its id.
        id: ContainerId,
        /// Its name.
        name: String,
        /// Which probe.
        kind: ProbeKind,
        /// What to check.
        check: ProbeCheck,
        /// Limit of one try.
        limit: Duration,
    },
    /// Measures what volumes hold.
    MeasureVolumes {
        /// Which.
        volumes: Vec<MeasuredVolume>,
    },
    /// Cuts off the step that works on a target, which can be repeated later.
    Cancel(Target),
}

/// Which hook of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HookKind {
    /// After its start.
    PostStart,
    /// Before its stop.
    PreStop,
}

/// What a hook does.
#[derive(Clone, Debug, PartialEq)]
pub enum HookAction {
    /// Runs a command in the container.
    Exec(Vec<String>),
    /// Sends a request, whose answer does not matter as long as there is one.
    Http(Box<HttpRequest>),
    /// Waits.
    Sleep(Duration),
    /// It cannot be done: what is wrong with it.
    Invalid(String),
}

/// The VM of a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct SandboxSpec {
    /// Number of CPUs.
    pub vcpus: Vcpus,
    /// Memory.
    pub memory: MemoryMib,
    /// Host name of the guest.
    pub hostname: String,
    /// Resolver and kernel settings.
    pub sandbox: Sandbox,
    /// Volumes, beside the pod's own directories.
    pub volumes: Vec<SandboxVolume>,
    /// Ports of the node that lead in.
    pub ports: Vec<HostPort>,
    /// Limits of its traffic.
    pub bandwidth: Option<Bandwidth>,
}

/// A port of the node that leads to one of the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostPort {
    /// UDP instead of TCP.
    pub udp: bool,
    /// Address of the node that listens; `None`: all.
    pub host_address: Option<IpAddr>,
    /// Port of the node.
    pub host_port: u16,
    /// Port of the pod.
    pub container_port: u16,
}

impl Step {
    /// What it works on.
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

    /// Short form, for logs and tables of tests.
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

    /// Name of the container that it is about.
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
