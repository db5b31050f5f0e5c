//! Effects of tasks.

use coracle_vsphere::{Cdrom, Change, Fault, Object, Vm, VmConfigSpec, mac};

use super::State;

#[derive(Clone, Debug)]
pub(super) enum Effect {
    Create(Box<VmConfigSpec>, Object),
    Power(String, bool),
    Destroy(String),
    Change(String, Change),
    Fail(&'static str),
}

impl Effect {
    pub(super) fn apply(self, state: &mut State) -> Result<Option<Object>, Fault> {
        match self {
            Self::Create(spec, folder) => create(state, &spec, folder).map(Some),
            Self::Power(id, on) => {
                if on && state.looks_at_images && !has_image(state, &id) {
                    return Err(Fault::of("FileNotFound"));
                }
                let vm = find_vm(state, &id)?;
                if vm.powered_on == on {
                    return Err(Fault::of("InvalidPowerState"));
                }
                vm.powered_on = on;
                state.ran.insert(id);
                Ok(None)
            }
            Self::Destroy(id) => {
                if find_vm(state, &id)?.powered_on {
                    return Err(Fault::of("InvalidPowerState"));
                }
                state.vms.remove(&id);
                state.tags.remove(&id);
                Ok(None)
            }
            Self::Change(id, change) => {
                reconfigure(find_vm(state, &id)?, change);
                Ok(None)
            }
            Self::Fail(kind) => Err(Fault::of(kind)),
        }
    }
}

fn find_vm<'a>(state: &'a mut State, id: &str) -> Result<&'a mut Vm, Fault> {
    state.vms.get_mut(id).ok_or_else(|| Fault::of("ManagedObjectNotFound"))
}

/// Whether the image in the drive of a VM exists. True if the drive is empty.
fn has_image(state: &State, id: &str) -> bool {
    let iso = state.vms.get(id).and_then(|vm| vm.cdrom.as_ref()?.iso.as_deref());
    iso.is_none_or(|iso| state.files.keys().any(|file| iso.ends_with(&format!("] {file}"))))
}

fn create(state: &mut State, spec: &VmConfigSpec, folder: Object) -> Result<Object, Fault> {
    if state.vms.values().any(|vm| vm.name == spec.name && vm.folder.as_ref() == Some(&folder)) {
        return Err(Fault::of("DuplicateName"));
    }
    if state.needs_host && !spec.names_host {
        let fields = [("invalidProperty".to_owned(), "host".to_owned())].into();
        return Err(Fault { fields, ..Fault::of("InvalidArgument") });
    }
    state.next += 1;
    let n = state.next;
    let object = Object::new("VirtualMachine", format!("vm-{n}"));
    let cdrom =
        Cdrom { key: 3000, controller_key: 200, unit: 0, iso: Some(spec.iso.clone()), connected: true };
    let vm = Vm {
        object: object.clone(),
        name: spec.name.clone(),
        folder: Some(folder),
        uuid: spec.uuid.clone(),
        instance_uuid: spec.instance_uuid.clone(),
        annotation: spec.annotation.clone(),
        powered_on: false,
        mac: mac(&format!("00:50:56:00:{:02x}:{:02x}", (n >> 8) & 0xff, n & 0xff)),
        cdrom: Some(cdrom),
        question: None,
        unreadable: String::new(),
    };
    state.vms.insert(object.id.clone(), vm);
    Ok(object)
}

fn reconfigure(vm: &mut Vm, change: Change) {
    let running = vm.powered_on;
    match change {
        Change::Annotation(note) => vm.annotation = note,
        Change::InsertIso { cdrom, iso } => {
            vm.cdrom = Some(Cdrom { iso: Some(iso), connected: running, ..cdrom });
        }
        Change::Disconnect(cdrom) => vm.cdrom = Some(Cdrom { connected: false, ..cdrom }),
        Change::Empty(cdrom) => vm.cdrom = Some(Cdrom { iso: None, connected: false, ..cdrom }),
    }
}
