//! Inputs of a VM: the Secrets, ConfigMaps and claims that the spec of a MikromVM refers to, read when the VM is created and
//! resolved to the values that its node receives; and the nodes that its [`constraints`] allow.
//!
//! ```text
//! spec ─▶ references (pure) ─▶ read (GET, nothing is watched) ─▶ resolve (pure) ─▶ Inputs ─▶ CreateVm
//! ```
//! Only [`Inputs`] contains values of Secrets, and its `Debug` shows none of them, so that they appear in no status, Event or
//! log. No value is kept between two creations.

pub mod constraints;
mod env;
mod files;
mod objects;
mod read;

use std::fmt;

use coracle_api::{MikromVM, MikromVMSpec, NodeSelectorTerm};
use coracle_types::expand;
use kube::ResourceExt as _;

pub use files::InputFile;
pub use objects::{BoundClaim, Objects, References, references};
pub use read::{ReadError, read};

/// Largest size of all inputs of one VM, in bytes; a message to a node has at most 4 MiB.
const BYTES_MAX: usize = 3 << 20;

/// Input that cannot be resolved: a user must change an object, which is then read again. The text contains no value of an
/// object.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InputError(pub(crate) String);

impl InputError {
    /// Creates an error that names what is missing or invalid.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

/// Inputs of a VM's guest, as sent to its node. `Debug` shows only sizes.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Inputs {
    /// Command that replaces the entrypoint of the image.
    pub command: Vec<String>,
    /// Arguments that replace those of the image.
    pub args: Vec<String>,
    /// Environment variables, as `NAME=value`.
    pub env: Vec<String>,
    /// User data for cloud-init; may be empty.
    pub user_data: String,
    /// Host name; empty: derived from the object's name.
    pub hostname: String,
    /// SSH public keys.
    pub ssh_keys: Vec<String>,
    /// Disks and directories, in the order of the spec.
    pub volumes: Vec<InputVolume>,
    /// Docker configurations with credentials for registries.
    pub pull_secrets: Vec<PullSecret>,
    /// Public keys (PEM) of which one must have signed the image, from the policy of the namespace. Empty: no signature is
    /// required.
    pub image_keys: String,
}

/// Volume of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputVolume {
    /// Name of the volume.
    pub name: String,
    /// Absolute path in the guest; empty: derived from the volume's name.
    pub target: String,
    /// True when the guest must not write to the volume.
    pub read_only: bool,
    /// Source of the volume.
    pub source: InputSource,
}

/// Source of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InputSource {
    /// Disk that belongs to the VM.
    Disk {
        /// Size of the disk in MiB.
        size_mib: u64,
        /// Disk class; empty: the node's default.
        class: String,
    },
    /// Path on the node.
    Path(String),
    /// Files that belong to the VM.
    Files(Vec<InputFile>),
}

/// Docker configuration from an image pull Secret.
#[derive(Clone, PartialEq, Eq)]
pub struct PullSecret {
    /// Docker configuration as JSON.
    pub docker_config: Vec<u8>,
    /// True for the type `kubernetes.io/dockercfg`.
    pub legacy: bool,
}

impl fmt::Debug for PullSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.docker_config.len())
    }
}

impl fmt::Debug for Inputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inputs")
            .field("command", &self.command.len())
            .field("args", &self.args.len())
            .field("env", &self.env.len())
            .field("volumes", &self.volumes)
            .field("pull_secrets", &self.pull_secrets)
            .field("image_keys", &self.image_keys)
            .finish_non_exhaustive()
    }
}

impl Inputs {
    /// True when the VM has no inputs. Only such VMs can run on nodes without a host service.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn bytes(&self) -> usize {
        let texts = [&self.command, &self.args, &self.env, &self.ssh_keys];
        let texts: usize = texts.into_iter().flatten().map(String::len).sum();
        let files = |volume: &InputVolume| match &volume.source {
            InputSource::Files(files) => files.iter().map(|file| file.path.len() + file.bytes.len()).sum(),
            InputSource::Disk { .. } | InputSource::Path(_) => 0_usize,
        };
        let volumes: usize = self.volumes.iter().map(files).sum();
        let secrets: usize = self.pull_secrets.iter().map(|secret| secret.docker_config.len()).sum();
        texts + self.user_data.len() + volumes + secrets
    }
}

/// True when the spec has inputs for the guest, for which the agent service has no fields.
#[must_use]
pub fn has_inputs(spec: &MikromVMSpec) -> bool {
    !(spec.command.is_empty()
        && spec.args.is_empty()
        && spec.env.is_empty()
        && spec.env_from.is_empty()
        && spec.user_data.is_none()
        && spec.hostname.is_empty()
        && spec.ssh_authorized_keys.is_empty()
        && spec.volumes.is_empty()
        && spec.image_pull_secrets.is_empty())
}

/// Resolves the inputs of the VM. Pure. `node` is the node that the VM is bound to.
///
/// # Errors
/// [`InputError`], which names what is missing.
pub fn resolve(vm: &MikromVM, node: &str, objects: &Objects) -> Result<Inputs, InputError> {
    let spec = &vm.spec;
    let variables = env::environment(vm, node, objects)?;
    let known =
        |name: &str| variables.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
    let expanded = |texts: &[String]| texts.iter().map(|text| expand(text, known)).collect();
    let inputs = Inputs {
        command: expanded(&spec.command),
        args: expanded(&spec.args),
        env: variables.iter().map(|(name, value)| format!("{name}={value}")).collect(),
        user_data: user_data(spec, objects)?,
        hostname: spec.hostname.clone(),
        ssh_keys: spec.ssh_authorized_keys.clone(),
        volumes: spec
            .volumes
            .iter()
            .map(|volume| files::volume(volume, objects))
            .collect::<Result<_, _>>()?,
        pull_secrets: pull_secrets(spec, objects)?,
        image_keys: String::new(),
    };
    match inputs.bytes() {
        bytes if bytes > BYTES_MAX => {
            Err(InputError(format!("the VM is given {bytes} bytes: at most {BYTES_MAX} together")))
        }
        _ => Ok(inputs),
    }
}

/// Returns node selector terms, of which one must match, for each claim that is bound to a volume of specific nodes.
///
/// # Errors
/// [`InputError`] for a claim that is unbound, or bound to a volume that no VM can use.
pub fn node_terms(vm: &MikromVM, objects: &Objects) -> Result<Vec<Vec<NodeSelectorTerm>>, InputError> {
    let claims = vm.spec.volumes.iter().filter_map(|volume| volume.persistent_volume_claim.as_ref());
    let terms = claims.map(|claim| Ok(objects.claim(&claim.claim_name)?.node_terms.clone()));
    terms.filter(|terms| terms.as_ref().map_or(true, |terms| !terms.is_empty())).collect()
}

fn user_data(spec: &MikromVMSpec, objects: &Objects) -> Result<String, InputError> {
    let Some(user_data) = &spec.user_data else { return Ok(String::new()) };
    match &user_data.secret_ref {
        None => Ok(user_data.inline.clone()),
        Some(from) => {
            let text = objects.secret_key(&from.name, &from.key)?;
            text.ok_or_else(|| InputError(format!("Secret {:?} has no key {:?}", from.name, from.key)))
        }
    }
}

/// Types of image pull Secrets, and the key of each (API reference of Secret).
const CONFIG: (&str, &str) = ("kubernetes.io/dockerconfigjson", ".dockerconfigjson");
const LEGACY: (&str, &str) = ("kubernetes.io/dockercfg", ".dockercfg");

fn pull_secrets(spec: &MikromVMSpec, objects: &Objects) -> Result<Vec<PullSecret>, InputError> {
    let one = |name: &String| {
        let secret =
            objects.secrets.get(name).ok_or_else(|| InputError(format!("Secret {name:?} not found")))?;
        let value =
            |key: &str| secret.data.as_ref().and_then(|data| data.get(key)).map(|bytes| bytes.0.clone());
        let found = match secret.type_.as_deref() {
            Some(kind) if kind == CONFIG.0 => value(CONFIG.1).map(|json| (json, false)),
            Some(kind) if kind == LEGACY.0 => value(LEGACY.1).map(|json| (json, true)),
            _ => None,
        };
        let (docker_config, legacy) = found.ok_or_else(|| {
            InputError(format!("Secret {name:?} is not of type {} or {}, with its key", CONFIG.0, LEGACY.0))
        })?;
        Ok(PullSecret { docker_config, legacy })
    };
    spec.image_pull_secrets.iter().map(|secret| one(&secret.name)).collect()
}

/// Returns the namespace of the object.
pub(crate) fn namespace(vm: &MikromVM) -> String {
    vm.namespace().unwrap_or_default()
}

#[cfg(test)]
mod tests;
