//! VMs of cluster objects: finds the VM of a call, and creates VMs. Both services use it.
//!
//! A caller of the host service names its object in the message; a caller of the agent service names it in the metadata of the
//! call.

mod identity;

use std::sync::Arc;
use std::time::Duration;

use coracle_api::keys::{fence, vm as keys};
use coracle_host::{Fence, Host, HostError, RestoreSpec, View, VmSpec};
use coracle_image::PullOptions;
use coracle_oci::{Credentials, NoProgress, OciError};
use coracle_types::VmName;
use tonic::metadata::MetadataMap;

pub(crate) use self::identity::{Caller, Known};

/// VM to create, and its power state afterwards.
pub(crate) struct Creation {
    pub(crate) spec: VmSpec,
    /// Snapshot to restore the VM from.
    pub(crate) snapshot: Option<String>,
    /// Whether the VM stays powered off.
    pub(crate) stays_off: bool,
    pub(crate) caller: Caller,
    pub(crate) fence: Option<Fence>,
}

/// Fence of a call to the agent service; `None` for old clients, which send none.
pub(crate) fn fence_of(metadata: &MetadataMap) -> Option<Fence> {
    let text = |key| metadata.get(key).and_then(|v| v.to_str().ok());
    let uid = text(fence::UID)?.to_owned();
    let generation = text(fence::GENERATION).and_then(|g| g.parse().ok()).unwrap_or(0);
    Some(Fence { uid, generation })
}

/// Object on whose behalf a call to the agent service is made; empty for old clients, which send none.
pub(crate) fn caller_of(metadata: &MetadataMap) -> Caller {
    let text = |key| metadata.get(key).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
    Caller { uid: text(fence::UID), object: text(fence::OBJECT) }
}

/// Parses the name that a caller gives a VM.
pub(crate) fn vm_name(vm_id: &str) -> Result<VmName, HostError> {
    vm_id.parse().map_err(|e: coracle_types::InvalidVmName| HostError::Invalid { message: e.to_string() })
}

/// Finds the VM of a call.
///
/// # Errors
/// [`HostError::NotFound`], [`HostError::Invalid`], [`HostError::SharedName`].
pub(crate) fn find_vm(host: &Host, vm_id: &str, caller: &Caller) -> Result<Arc<View>, HostError> {
    let id = vm_name(vm_id)?;
    let all = match caller.uid.as_str() {
        "" => host.list_where(|view| Known::from(&*view.record).wire_id() == id.as_str()),
        uid => candidates(host, &id, uid),
    };
    let found = identity::find(all.iter().map(known), id.as_str(), caller)?;
    let view = found.and_then(|vm| all.iter().find(|view| view.record.name.as_str() == vm.name));
    view.cloned().ok_or_else(|| HostError::NotFound { name: vm_id.to_owned() })
}

/// VMs that `id` may mean for the object `uid`: the one of that name, and the one with the distinct name that is used if the
/// name was taken. Only these are looked up, because a node has thousands of VMs, and each creation looks for one that does not
/// exist.
fn candidates(host: &Host, id: &VmName, uid: &str) -> Vec<Arc<View>> {
    let distinct = identity::distinct_name(id, uid).ok();
    [Some(id), distinct.as_ref()].into_iter().flatten().filter_map(|name| host.named(name)).collect()
}

/// Creates a VM and starts it, or leaves it powered off; `created` is called in between. A VM that could not be started is
/// deleted, unless it has run or is fenced.
///
/// # Errors
/// Errors of the host core.
pub(crate) async fn create(
    host: &Host,
    creation: Creation,
    created: impl Fn(),
) -> Result<Arc<View>, HostError> {
    let Creation { spec, snapshot, stays_off, caller, fence } = creation;
    let spec = with_host_name(host, spec, &caller)?;
    if let Some(snapshot) = snapshot {
        return restore(host, &snapshot, spec, created).await;
    }
    let record = host.create(spec, Arc::new(NoProgress)).await?;
    created();
    let id = record.id.to_string();
    let powered = match stays_off {
        true => host.stop(&id, Duration::ZERO, fence).await,
        false => host.start(&id, fence).await,
    };
    if let Err(error) = powered {
        // Undo the creation, unless the VM has run already, or a newer caller owns it by now.
        if record.boots == 0
            && !matches!(error, HostError::Fenced { .. })
            && let Err(undo) = host.delete(&id, true, None).await
        {
            tracing::warn!(vm = id, error = %undo, "failed creation not undone");
        }
        return Err(error);
    }
    host.get(&id)
}

/// Pulls the image of a VM with the first of the caller's credentials that its registry accepts. The registry is asked for an
/// image that is present, too. Returns false without credentials: the creation then pulls with those of the node.
///
/// # Errors
/// [`HostError::Image`] of the last credentials.
pub(crate) async fn pull(host: &Host, spec: &VmSpec, credentials: &[Credentials]) -> Result<bool, HostError> {
    let mut failed = None;
    for credentials in credentials {
        let reference = spec.image.parse().map_err(|source: OciError| HostError::Image {
            reference: spec.image.clone(),
            source: source.into(),
        })?;
        let options = PullOptions {
            policy: spec.pull,
            origin: spec.origin,
            credentials: credentials.clone(),
            ..PullOptions::default()
        };
        match host.ensure_image_as(&reference, &options, Arc::new(NoProgress)).await {
            Ok(image) => {
                if let Some(keys) = &spec.image_keys {
                    host.verify_image(&reference, &image, keys, &options).await?;
                }
                return Ok(true);
            }
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(false), Err)
}

/// Changes the spec to the name of the VM on the host: a VM of another object, or a local one, may have the id.
fn with_host_name(host: &Host, spec: VmSpec, caller: &Caller) -> Result<VmSpec, HostError> {
    if spec.owner.uid.is_empty() {
        return Ok(spec);
    }
    let who = Caller { uid: spec.owner.uid.clone(), ..caller.clone() };
    let id = spec.name.clone();
    let all = candidates(host, &id, &who.uid);
    let exists = |uid: &str| {
        let (name, uid) = (id.to_string(), uid.to_owned());
        Err(HostError::AlreadyExists { name, uid })
    };
    match identity::find(all.iter().map(known), id.as_str(), &who)? {
        Some(vm) if vm.uid.is_empty() => exists(vm.uid),
        // A VM that was created from an older spec of the same object must not be reused.
        Some(vm) if is_outdated(&spec, vm) => exists(vm.uid),
        Some(vm) => Ok(VmSpec { name: vm_name(vm.name)?, ..spec }),
        None if all.iter().any(|view| view.record.name == id) => {
            let name = identity::distinct_name(&id, &spec.owner.uid)?;
            let mut metadata = spec.metadata;
            metadata.insert(keys::VM_ID.to_owned(), id.to_string());
            Ok(VmSpec { name, metadata, ..spec })
        }
        None => Ok(spec),
    }
}

/// Restores a snapshot. Returns an existing VM if an earlier try has made it.
async fn restore(
    host: &Host,
    snapshot: &str,
    spec: VmSpec,
    created: impl Fn(),
) -> Result<Arc<View>, HostError> {
    if let Some(view) = host.named(&spec.name)
        && spec.idempotent
        && view.record.owner.uid == spec.owner.uid
    {
        return Ok(view);
    }
    let wanted = RestoreSpec {
        name: Some(spec.name),
        owner: spec.owner,
        shape: Some((spec.vcpus, spec.memory)),
        metadata: spec.metadata,
        origin: spec.origin,
        reach: spec.reach,
        ..RestoreSpec::default()
    };
    let record = host.restore(snapshot, wanted).await?;
    created();
    host.get(record.id.as_str())
}

/// Whether a VM was created from another spec than the requested one. Old operators send no digest of the spec.
fn is_outdated(spec: &VmSpec, made: Known<'_>) -> bool {
    let wanted = spec.metadata.get(keys::SPEC);
    wanted.is_some() && made.spec() != wanted
}

fn known(view: &Arc<View>) -> Known<'_> {
    Known::from(&*view.record)
}
