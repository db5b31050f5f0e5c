//! Ejection of the ISO from the CD-ROM drive of a VM whose node is installed: choice of the next step (pure). Each step is
//! recorded before it is executed, so that the ejection continues after a crash. Each step first checks that VM and drive are
//! still those of the record.

use coracle_api::agentpool::{IsoEjection, names::OWNER_NOTE};
use coracle_vsphere::{Cdrom, Object, Vm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// Only question that is answered automatically: the guest has locked the drive.
const LOCKED: &str = "msg.cdromdisconnect.locked";

/// State that the next step depends on.
#[derive(Clone, Debug)]
pub struct Eject<'a> {
    /// Whether the pool requests the ejection.
    pub is_wanted: bool,
    /// Whether the ejection is complete.
    pub is_done: bool,
    /// Whether the Agent is known by UUID or MAC address, stays, and is installed.
    pub is_installed: bool,
    /// UID of the VsphereAgent.
    pub owner: &'a str,
    /// Datacenter of the pool.
    pub datacenter: &'a str,
    /// Recorded progress; `None` before the start.
    pub record: Option<&'a IsoEjection>,
    /// VM, read now.
    pub vm: Option<&'a Vm>,
    /// Current time.
    pub now: Time,
}

/// Next step of an ejection.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// The ejection is not requested.
    Disabled,
    /// The node is not installed yet.
    Wait,
    /// Write the record.
    Record(IsoEjection),
    /// Disconnect the drive.
    Disconnect(Object, Cdrom),
    /// Answer the question of vCenter.
    Answer {
        /// VM that asks.
        object: Object,
        /// Id of the question.
        question: String,
        /// Key of the choice.
        choice: String,
    },
    /// Remove the image from the drive.
    Empty(Object, Cdrom),
    /// The drive is empty: the ejection is complete.
    Done,
    /// The VM is gone, so there is nothing to finish.
    Gone(String),
    /// The ejection cannot continue, and nothing is changed.
    Failed(String),
}

/// Chooses the next step.
#[must_use]
pub fn next(e: &Eject<'_>) -> Step {
    let Some(record) = e.record else { return begin(e) };
    let Some(vm) = e.vm else { return Step::Gone(format!("VM {} is gone", record.vm_name)) };
    if let Some(why) = record_mismatch(record, vm) {
        return Step::Failed(why);
    }
    let drive = vm.cdrom.clone().unwrap_or_default();
    if drive.iso.is_none() {
        return Step::Done;
    }
    if let Some(question) = &vm.question {
        return answer(record, vm, question);
    }
    match (drive.connected, record.disconnect_started) {
        (true, Some(true)) => Step::Disconnect(vm.object.clone(), drive),
        (true, _) => Step::Record(IsoEjection { disconnect_started: Some(true), ..record.clone() }),
        (false, _) => Step::Empty(vm.object.clone(), drive),
    }
}

fn begin(e: &Eject<'_>) -> Step {
    if !e.is_wanted {
        return Step::Disabled;
    }
    if e.is_done {
        return Step::Done;
    }
    let Some((vm, drive)) = e.vm.and_then(|vm| Some((vm, vm.cdrom.as_ref()?))).filter(|_| e.is_installed)
    else {
        return Step::Wait;
    };
    let Some(iso) = &drive.iso else { return Step::Done };
    Step::Record(IsoEjection {
        vm_name: vm.name.clone(),
        bios_uuid: vm.uuid.clone(),
        owner_uid: e.owner.to_owned(),
        datacenter: e.datacenter.to_owned(),
        device_key: drive.key,
        iso_path: iso.clone(),
        started_at: e.now.clone(),
        disconnect_started: None,
        question_id: String::new(),
    })
}

/// Why VM, drive or image differ from the record.
fn record_mismatch(record: &IsoEjection, vm: &Vm) -> Option<String> {
    let drive = vm.cdrom.clone().unwrap_or_default();
    let owner = format!("{OWNER_NOTE}{}", record.owner_uid);
    if vm.uuid != record.bios_uuid || (!record.owner_uid.is_empty() && vm.annotation != owner) {
        return Some(format!("VM {} is not the one whose drive was to be emptied", vm.name));
    }
    if drive.key != record.device_key {
        return Some(format!("VM {} has another drive than the one to be emptied", vm.name));
    }
    let other = drive.iso.as_ref().filter(|iso| **iso != record.iso_path)?;
    Some(format!("the drive of VM {} holds {other} by now", vm.name))
}

fn answer(record: &IsoEjection, vm: &Vm, question: &coracle_vsphere::Question) -> Step {
    let yes = question.choices.iter().find(|(_, label)| label == "Yes" || label == "button.yes");
    let is_ours = question.message_ids.iter().any(|id| id == LOCKED);
    match yes.filter(|_| is_ours) {
        None => Step::Failed(format!("VM {} asks something else; a person must answer", vm.name)),
        Some(_) if record.question_id != question.id => {
            Step::Record(IsoEjection { question_id: question.id.clone(), ..record.clone() })
        }
        Some((choice, _)) => {
            Step::Answer { object: vm.object.clone(), question: question.id.clone(), choice: choice.clone() }
        }
    }
}

#[cfg(test)]
mod tests {
    use coracle_vsphere::Question;

    use super::*;

    fn time() -> Time {
        Time("2026-06-01T10:00:00Z".parse().unwrap())
    }

    fn vm(iso: Option<&str>, connected: bool) -> Vm {
        let cdrom = Cdrom { key: 3000, iso: iso.map(str::to_owned), connected, ..Cdrom::default() };
        Vm {
            object: Object::new("VirtualMachine", "vm-1"),
            name: "w-0".into(),
            folder: None,
            uuid: "u".into(),
            instance_uuid: "i".into(),
            annotation: format!("{OWNER_NOTE}owner"),
            powered_on: true,
            mac: "m".into(),
            cdrom: Some(cdrom),
            question: None,
            unreadable: String::new(),
        }
    }

    fn verb(step: &Step) -> String {
        match step {
            Step::Record(r) => {
                let disconnect = if r.disconnect_started == Some(true) { " disconnect" } else { "" };
                let question = if r.question_id.is_empty() { "" } else { " question" };
                format!("record{disconnect}{question}")
            }
            Step::Answer { choice, .. } => format!("answer {choice}"),
            Step::Gone(why) => format!("gone: {why}"),
            Step::Failed(why) => format!("failed: {why}"),
            other => format!("{other:?}").split(['(', ' ']).next().unwrap_or_default().to_lowercase(),
        }
    }

    #[test]
    fn iso_is_ejected_from_installed_node_step_by_step() {
        let iso = Some("[ds] a.iso");
        let begun = IsoEjection {
            vm_name: "w-0".into(),
            bios_uuid: "u".into(),
            owner_uid: "owner".into(),
            datacenter: "dc".into(),
            device_key: 3000,
            iso_path: "[ds] a.iso".into(),
            started_at: time(),
            disconnect_started: None,
            question_id: String::new(),
        };
        let going = IsoEjection { disconnect_started: Some(true), ..begun.clone() };
        let asked = IsoEjection { question_id: "q".into(), ..going.clone() };
        let asks = |message: &str| {
            let choices = vec![("0".into(), "No".into()), ("1".into(), "Yes".into())];
            let question =
                Question { id: "q".into(), text: "?".into(), message_ids: vec![message.into()], choices };
            Vm { question: Some(question), ..vm(iso, true) }
        };
        let foreign = Vm { annotation: "another owner".into(), ..vm(iso, true) };
        for (why, wanted, done, installed, record, vm, want) in [
            ("opt-in", false, false, true, None, Some(vm(iso, true)), "disabled"),
            ("not before it is installed", true, false, false, None, Some(vm(iso, true)), "wait"),
            ("no VM yet", true, false, true, None, None, "wait"),
            ("the record comes first", true, false, true, None, Some(vm(iso, true)), "record"),
            ("nothing in it", true, false, true, None, Some(vm(None, false)), "done"),
            ("done stays done", true, true, true, None, Some(vm(iso, true)), "done"),
            ("then the intent", true, false, true, Some(&begun), Some(vm(iso, true)), "record disconnect"),
            ("then the effect", true, false, true, Some(&going), Some(vm(iso, true)), "disconnect"),
            ("off: it is emptied", true, false, true, Some(&going), Some(vm(iso, false)), "empty"),
            ("verified", true, false, true, Some(&going), Some(vm(None, false)), "done"),
            (
                "finished even if no longer requested",
                false,
                false,
                false,
                Some(&going),
                Some(vm(iso, false)),
                "empty",
            ),
            (
                "the question is noted",
                true,
                false,
                true,
                Some(&going),
                Some(asks(LOCKED)),
                "record disconnect question",
            ),
            ("then answered Yes", true, false, true, Some(&asked), Some(asks(LOCKED)), "answer 1"),
            (
                "any other is left alone",
                true,
                false,
                true,
                Some(&going),
                Some(asks("msg.other")),
                "failed: VM w-0 asks something else; a person must answer",
            ),
            (
                "another VM",
                true,
                false,
                true,
                Some(&going),
                Some(foreign),
                "failed: VM w-0 is not the one whose drive was to be emptied",
            ),
            (
                "another image",
                true,
                false,
                true,
                Some(&going),
                Some(vm(Some("[ds] b.iso"), true)),
                "failed: the drive of VM w-0 holds [ds] b.iso by now",
            ),
            ("no VM any more", true, false, true, Some(&going), None, "gone: VM w-0 is gone"),
        ] {
            let e = Eject {
                is_wanted: wanted,
                is_done: done,
                is_installed: installed,
                owner: "owner",
                datacenter: "dc",
                record,
                vm: vm.as_ref(),
                now: time(),
            };
            assert_eq!(verb(&next(&e)), want, "{why}");
        }
    }
}
