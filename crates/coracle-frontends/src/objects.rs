//! VMs of objects of a cluster: which VM a call means, and how one is created. Both services use it.
//!
//! A caller of the host service names its object in the message, one of the agent service in the metadata of the call.

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

/// A creation, and what becomes of the VM.
pub(crate) struct Creation {
    pub(crate) spec: VmSpec,
    /// Snapshot that the VM continues from.
    pub(crate) snapshot: Option<String>,
    /// Leave it powered off.
    pub(crate) stays_off: bool,
    pub(crate) caller: Caller,
    pub(crate) fence: Option<Fence>,
}

/// For whom a caller of the agent service speaks; old clients say nothing.
pub(crate) fn fence_of(metadata: &MetadataMap) -> Option<Fence> {
    let text = |key| metadata.get(key).and_then(|v| v.to_str().ok());
    let uid = text(fence::UID)?.to_owned();
    let generation = text(fence::GENERATION).and_then(|g| g.parse().ok()).unwrap_or(0);
    Some(Fence { uid, generation })
}

/// The object that a caller of the agent service speaks for; old clients say nothing.
pub(crate) fn caller_of(metadata: &MetadataMap) -> Caller {
    let text = |key| metadata.get(key).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
    Caller { uid: text(fence::UID), object: text(fence::OBJECT) }
}

/// A name that a caller gives a VM.
pub(crate) fn vm_name(vm_id: &str) -> Result<VmName, HostError> {
    vm_id.parse().map_err(|e: coracle_types::InvalidVmName| HostError::Invalid { message: e.to_string() })
}

/// The VM that the caller means.
///
/// # Errors
/// [`HostError::NotFound`], [`HostError::Invalid`], [`HostError::SharedName`].
pub(crate) fn exact(host: &Host, vm_id: &str, caller: &Caller) -> Result<Arc<View>, HostError> {
    let id = vm_name(vm_id)?;
    let all = match caller.uid.as_str() {
        "" => host.list_where(|view| Known::from(&*view.record).wire_id() == id.as_str()),
        uid => candidates(host, &id, uid),
    };
    let found = identity::find(all.iter().map(known), id.as_str(), caller)?;
    let view = found.and_then(|vm| all.iter().find(|view| view.record.name.as_str() == vm.name));
    view.cloned().ok_or_else(|| HostError::NotFound { name: vm_id.to_owned() })
}

/// The VMs that the object `uid` may mean by `id`: of that name, and of the one that it has where the name was taken. A node
/// has thousands, and each creation asks for one that is not there.
fn candidates(host: &Host, id: &VmName, uid: &str) -> Vec<Arc<View>> {
    let distinct = identity::distinct_name(id, uid).ok();
    [Some(id), distinct.as_ref()].into_iter().flatten().filter_map(|name| host.named(name)).collect()
}

/// Creates a VM and brings it into its power state; `created` is called in between. A failure leaves no VM.
///
/// # Errors
/// Those of the host core.
pub(crate) async fn create(
    host: &Host,
    creation: Creation,
    created: impl Fn(),
) -> Result<Arc<View>, HostError> {
    let Creation { spec, snapshot, stays_off, caller, fence } = creation;
    let spec = named(host, spec, &caller)?;
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
        // A creation that fails undoes everything; one that others already run stays, and so does one that they speak
        // for by now.
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

/// Brings the image of a VM here with the first of the caller's credentials that its registry accepts, which is asked
/// for an image that is here, too. False: there are none, and the creation pulls with the node's own.
///
/// # Errors
/// [`HostError::Image`] of the last try.
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

/// The creation under the name that the VM has on the host: another object's VM, or a local one, may have the id.
fn named(host: &Host, spec: VmSpec, caller: &Caller) -> Result<VmSpec, HostError> {
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
        // A VM that was made from an older spec of the same object is not what is asked for.
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

/// A VM that is there already is what an earlier try made.
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

/// Made from another spec than the one that is asked for now. Old operators say of none what it is.
fn is_outdated(spec: &VmSpec, made: Known<'_>) -> bool {
    let wanted = spec.metadata.get(keys::SPEC);
    wanted.is_some() && made.spec() != wanted
}

fn known(view: &Arc<View>) -> Known<'_> {
    Known::from(&*view.record)
}
