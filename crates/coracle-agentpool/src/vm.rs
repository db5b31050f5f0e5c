//! Next step for a VM, from the state that vSphere shows (pure).

use coracle_api::agentpool::{
    OwnedVm, VsphereAgent, VsphereAgentPool,
    foreign::{InfraEnv, condition},
    names,
};
use coracle_vsphere::{Change, Object, Question, SiteSpec, SiteVms, Vm, VmConfigSpec, Wanted, bios_uuid};
use kube::ResourceExt as _;

use crate::identity::{instance_uuid, owner_note, vm_name, vm_uuid};

/// Identity of a VsphereAgent's VM: all UUIDs and names by which it can be found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmIdentity {
    /// UID of the VsphereAgent.
    pub owner: String,
    /// Name of the VM.
    pub name: String,
    /// Recorded BIOS UUID; empty: none.
    pub recorded: String,
    /// BIOS UUID from an annotation that a user set; empty: none.
    pub claimed: String,
    /// Whether the VM is older than its VsphereAgent, so that its notes may be those of a user.
    pub is_adopted: bool,
}

impl VmIdentity {
    /// Identity of a VsphereAgent's VM. Reports of an Agent are not part of it.
    #[must_use]
    pub fn of(agent: &VsphereAgent) -> Self {
        let uuid = |text: &str| bios_uuid(text).unwrap_or_default();
        Self {
            owner: agent.uid().unwrap_or_default(),
            name: agent.vm().map_or_else(|| vm_name(agent), |vm| vm.name.clone()),
            recorded: agent.vm().map(|vm| uuid(&vm.bios_uuid)).unwrap_or_default(),
            claimed: agent.annotations().get(names::CLAIM_VM).map(|c| uuid(c)).unwrap_or_default(),
            is_adopted: agent.labels().get(names::CREATED_FOR).is_some_and(|v| v == names::FOR_ADOPTED),
        }
    }

    /// Search criteria for the VM.
    #[must_use]
    pub fn wanted(&self) -> Wanted {
        let mut uuids = vec![vm_uuid(&self.owner)];
        uuids.extend([&self.recorded, &self.claimed].into_iter().filter(|u| !u.is_empty()).cloned());
        uuids.dedup();
        Wanted { instance_uuid: instance_uuid(&self.owner), uuids, name: self.name.clone() }
    }

    /// Whether the VM belongs to the VsphereAgent. Either its notes say so; or they name no owner, and UUID, name and folder
    /// are those of the record or of a user's claim. Other notes are allowed only in an adopted or claimed VM.
    fn owns(&self, vm: &Vm, folder: &Object) -> bool {
        let named = (!self.recorded.is_empty() && vm.uuid == self.recorded)
            || (!self.claimed.is_empty() && vm.uuid == self.claimed);
        let is_free = vm.annotation.is_empty()
            || ((self.is_adopted || !self.claimed.is_empty())
                && !vm.annotation.starts_with(names::OWNER_NOTE));
        let is_in_folder = vm.folder.as_ref() == Some(folder);
        vm.annotation == owner_note(&self.owner) || (is_free && named && vm.name == self.name && is_in_folder)
    }

    /// Note to write into a VM of this VsphereAgent that has none.
    #[must_use]
    pub fn missing_note(&self, vm: &Vm, folder: &Object) -> Option<Change> {
        let is_due = vm.annotation.is_empty() && self.owns(vm, folder);
        is_due.then(|| Change::Annotation(owner_note(&self.owner)))
    }

    /// Why the recorded VM may still exist although a search did not find it: a VM of the folder whose configuration is not
    /// known could be this one.
    #[must_use]
    pub fn hidden(&self, seen: &SiteVms) -> Option<String> {
        if self.recorded.is_empty() {
            return None;
        }
        let could_be = |vm: &&std::sync::Arc<Vm>| {
            !vm.unreadable.is_empty() && (vm.uuid.is_empty() || vm.uuid == self.recorded)
        };
        seen.vms.values().find(could_be).map(|vm| unreadable(vm))
    }
}

/// Next step towards a running VM.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// There is no VM: create one.
    Create,
    /// Change the VM first.
    Change(Object, Change),
    /// Power on the VM.
    PowerOn(Object),
    /// The start of the VM waits for an answer to this question.
    Ask(Object, Question),
    /// The VM runs.
    Done(Box<Vm>),
    /// vCenter does not know the VM's configuration at present, so nothing is decided.
    Unreadable(String),
    /// The VM belongs to another owner, or several VMs match.
    Mismatch(String),
}

/// Chooses the next step towards a running VM from the result of a search.
#[must_use]
pub fn next(id: &VmIdentity, found: &[Vm], folder: &Object, iso: &str) -> Next {
    if let Some(vm) = found.iter().find(|vm| !vm.unreadable.is_empty()) {
        return Next::Unreadable(unreadable(vm));
    }
    let vm = match found {
        [] => return Next::Create,
        [vm] => vm,
        several => {
            let list: Vec<_> = several.iter().map(|vm| format!("{} ({})", vm.name, vm.object.id)).collect();
            return Next::Mismatch(format!("several VMs fit and none is picked: {}", list.join(", ")));
        }
    };
    if !id.owns(vm, folder) {
        let note = if vm.annotation.is_empty() { "empty notes" } else { "the notes of another" };
        return Next::Mismatch(format!("VM {} ({}) has {note}; it is left alone", vm.name, vm.object.id));
    }
    if vm.annotation.is_empty() {
        return Next::Change(vm.object.clone(), Change::Annotation(owner_note(&id.owner)));
    }
    // Only before the first start: an installed node does not use the present ISO.
    let drive = vm.cdrom.clone().unwrap_or_default();
    if !vm.powered_on && id.recorded.is_empty() && drive.key != 0 && drive.iso.as_deref() != Some(iso) {
        return Next::Change(vm.object.clone(), Change::InsertIso { cdrom: drive, iso: iso.to_owned() });
    }
    if !vm.powered_on {
        let object = vm.object.clone();
        return match &vm.question {
            Some(question) => Next::Ask(object, question.clone()),
            None => Next::PowerOn(object),
        };
    }
    Next::Done(Box::new(vm.clone()))
}

/// Next step towards the removal of a VM.
#[derive(Clone, Debug, PartialEq)]
pub enum Undo {
    /// There is no VM.
    Gone,
    /// Power off the VM first.
    PowerOff(Object),
    /// Destroy the VM.
    Destroy(Object),
    /// The VM belongs to another owner: nothing is done.
    Mismatch(String),
    /// vCenter does not know the VM's configuration at present, so nothing is decided.
    Unreadable(String),
}

fn unreadable(vm: &Vm) -> String {
    format!("VM {} ({}) cannot be read: {}", vm.name, vm.object.id, vm.unreadable)
}

/// Chooses the next step towards removal from the result of a search.
#[must_use]
pub fn undo(id: &VmIdentity, found: &[Vm], folder: &Object) -> Undo {
    if let Some(vm) = found.iter().find(|vm| !vm.unreadable.is_empty()) {
        return Undo::Unreadable(unreadable(vm));
    }
    let ours: Vec<_> = found.iter().filter(|vm| id.owns(vm, folder)).collect();
    match (ours.as_slice(), found) {
        (_, []) => Undo::Gone,
        // The VMs found only share the name. Without a record, the VM of this VsphereAgent was never created.
        ([], _) if id.recorded.is_empty() => Undo::Gone,
        ([], [vm, ..]) => Undo::Mismatch(format!(
            "VM {} ({}) is not this object's; it is left alone",
            vm.name, vm.object.id
        )),
        ([vm], _) if vm.powered_on => Undo::PowerOff(vm.object.clone()),
        ([vm], _) => Undo::Destroy(vm.object.clone()),
        _ => Undo::Mismatch("several VMs carry this object's notes; remove all but one".into()),
    }
}

/// Site of a pool's VMs. The default folder is the name of the hosted cluster.
#[must_use]
pub fn site_spec(pool: &VsphereAgentPool) -> SiteSpec {
    let (v, or) = (
        &pool.spec.vsphere,
        |text: &str, default: &str| {
            if text.is_empty() { default.to_owned() } else { text.to_owned() }
        },
    );
    SiteSpec {
        datacenter: or(&v.datacenter, "dc1"),
        datastore_cluster: v.datastore_cluster.clone(),
        iso_datastore: v.iso_datastore.clone(),
        resource_pool: v.resource_pool.clone(),
        folder: or(&v.folder, &pool.spec.hosted_cluster_ref.name),
        network: v.network.clone(),
    }
}

/// Specification of a VsphereAgent's VM.
#[must_use]
pub fn vm_spec(pool: &VsphereAgentPool, agent: &VsphereAgent, iso: &str) -> VmConfigSpec {
    let (v, t) = (&pool.spec.vsphere, &pool.spec.template);
    let owner = agent.uid().unwrap_or_default();
    VmConfigSpec {
        name: vm_name(agent),
        uuid: vm_uuid(&owner),
        instance_uuid: instance_uuid(&owner),
        guest_id: v.guest_id.clone(),
        annotation: owner_note(&owner),
        cpus: t.num_cpus,
        memory_mib: t.memory_mib,
        disk_gib: t.disk_gib,
        eager_disk: v.disk_eagerly_scrub,
        firmware: v.firmware.as_str().to_owned(),
        controller: v.scsi_type.clone(),
        adapter: v.network_adapter_type.clone(),
        iso: iso.to_owned(),
        directory: String::new(),
        names_host: false,
    }
}

/// Record of a running VM for the status.
#[must_use]
pub fn record(agent: &VsphereAgent, vm: &Vm) -> OwnedVm {
    OwnedVm {
        name: vm.name.clone(),
        owner_uid: agent.uid().unwrap_or_default(),
        source: names::source::VSPHERE_AGENT.into(),
        bios_uuid: vm.uuid.clone(),
        mac_address: vm.mac.clone(),
        phase: names::phase::PROVISIONING.into(),
        reason: names::phase_reason::CREATE_REQUESTED.into(),
        ..OwnedVm::default()
    }
}

/// Returns the URL of the discovery ISO.
///
/// # Errors
/// Why the InfraEnv cannot be used.
pub fn iso_url(infra_env: Option<&InfraEnv>) -> Result<String, String> {
    let infra_env = infra_env.ok_or("the InfraEnv does not exist")?;
    let conditions = infra_env.view.status.conditions.as_deref().unwrap_or_default();
    if let Some((status, reason)) =
        condition(conditions, "ImageCreated").filter(|(status, _)| *status != "True")
    {
        return Err(format!("its image is not created: ImageCreated={status} {reason}"));
    }
    let url = infra_env.view.status.iso_download_url.clone().filter(|u| !u.is_empty());
    let url = url.ok_or("it has no isoDownloadURL yet")?;
    let wanted = infra_env.view.spec.os_image_version.as_deref().and_then(major_minor);
    let shown = url_version(&url);
    match (wanted, shown) {
        (Some(wanted), Some(shown)) if wanted != shown => {
            Err(format!("its image is still of version {shown} and {wanted} is asked for"))
        }
        _ => Ok(url),
    }
}

fn major_minor(text: &str) -> Option<String> {
    let mut parts = text.split('.');
    let (major, minor) = (parts.next()?, parts.next()?);
    let minor: String = minor.chars().take_while(char::is_ascii_digit).collect();
    let plain = !major.is_empty() && major.bytes().all(|b| b.is_ascii_digit()) && !minor.is_empty();
    plain.then(|| format!("{major}.{minor}"))
}

/// Version in the query of a URL, or in a segment of its path.
fn url_version(url: &str) -> Option<String> {
    let (path, query) = url.split_once('?').unwrap_or((url, ""));
    let of_query = query.split('&').find_map(|pair| pair.strip_prefix("version=")).and_then(major_minor);
    let path = path.split_once("://").map_or(path, |(_, rest)| rest);
    of_query.or_else(|| path.split('/').skip(1).find_map(major_minor))
}

/// Question that vCenter asks after the files of a VM were moved. The VM's UUIDs identify it and must stay.
const UUID_ALTERED: &str = "msg.uuid.altered";

/// Chooses the answer to a question of vCenter. The pool's `answers` come first (`message id=choice`, separated by commas; a
/// choice is given by key or label). Otherwise, if vCenter asks whether the VM was moved, the answer is yes. `None`: a user
/// must answer. Pure.
#[must_use]
pub fn choice(question: &Question, answers: &str) -> Option<String> {
    let asks = |id: &str| question.message_ids.iter().any(|m| m == id);
    let key = |wanted: &str| {
        let fits = |(key, label): &&(String, String)| key == wanted || label.eq_ignore_ascii_case(wanted);
        question.choices.iter().find(fits).map(|(key, _)| key.clone())
    };
    let mut pairs = answers.split(',').filter_map(|pair| pair.trim().split_once('='));
    if let Some((_, wanted)) = pairs.find(|(id, _)| asks(id.trim())) {
        return key(wanted.trim());
    }
    let moved = |(_, label): &&(String, String)| label.to_ascii_lowercase().contains("moved");
    question.choices.iter().find(moved).filter(|_| asks(UUID_ALTERED)).map(|(key, _)| key.clone())
}

#[cfg(test)]
mod tests;
