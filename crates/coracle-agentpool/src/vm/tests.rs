use std::sync::Arc;

use coracle_vsphere::{Cdrom, SiteVms};

use super::*;

const UUID: &str = "42000000-0000-0000-0000-000000000001";
const OTHER: &str = "42000000-0000-0000-0000-000000000002";

fn folder() -> Object {
    Object::new("Folder", "group-v1")
}

fn id() -> VmIdentity {
    VmIdentity {
        owner: "u-1".into(),
        name: "w-0".into(),
        recorded: UUID.into(),
        claimed: String::new(),
        is_adopted: false,
    }
}

fn vm(change: impl FnOnce(&mut Vm)) -> Vm {
    let mut vm = Vm {
        object: Object::new("VirtualMachine", "vm-1"),
        name: "w-0".into(),
        folder: Some(folder()),
        uuid: UUID.into(),
        instance_uuid: String::new(),
        annotation: owner_note("u-1"),
        powered_on: true,
        mac: "00-50-56-00-00-01".into(),
        cdrom: Some(Cdrom { key: 3000, ..Cdrom::default() }),
        question: None,
        unreadable: String::new(),
    };
    change(&mut vm);
    vm
}

fn verb(undo: &Undo) -> &'static str {
    match undo {
        Undo::Gone => "gone",
        Undo::PowerOff(_) => "power-off",
        Undo::Destroy(_) => "destroy",
        Undo::Mismatch(_) => "mismatch",
        Undo::Unreadable(_) => "unreadable",
    }
}

#[test]
fn undo_table() {
    let adopted = || VmIdentity { is_adopted: true, ..id() };
    let unrecorded = || VmIdentity { recorded: String::new(), ..id() };
    let elsewhere = |vm: &mut Vm| {
        (vm.annotation, vm.folder) = (String::new(), Some(Object::new("Folder", "group-v9")));
    };
    for (why, id, found, want) in [
        ("nothing is there", id(), vec![], "gone"),
        ("our notes", id(), vec![vm(|_| {})], "power-off"),
        ("our notes, off", id(), vec![vm(|vm| vm.powered_on = false)], "destroy"),
        ("no notes, and the record agrees", id(), vec![vm(|vm| vm.annotation.clear())], "power-off"),
        ("no notes, in another folder", id(), vec![vm(elsewhere)], "mismatch"),
        ("notes of a person", id(), vec![vm(|vm| vm.annotation = "rack 7".into())], "mismatch"),
        (
            "adopted with notes of a person",
            adopted(),
            vec![vm(|vm| vm.annotation = "rack 7".into())],
            "power-off",
        ),
        ("adopted, another owner", adopted(), vec![vm(|vm| vm.annotation = owner_note("u-9"))], "mismatch"),
        (
            "adopted with notes, but not the recorded UUID",
            adopted(),
            vec![vm(|vm| (vm.annotation, vm.uuid) = ("rack 7".into(), OTHER.into()))],
            "mismatch",
        ),
        ("our name only, nothing recorded", unrecorded(), vec![vm(|vm| vm.annotation.clear())], "gone"),
        (
            "inaccessible",
            id(),
            vec![vm(|vm| (vm.uuid, vm.unreadable) = (String::new(), "inaccessible".into()))],
            "unreadable",
        ),
        (
            "inaccessible, nothing recorded",
            unrecorded(),
            vec![vm(|vm| (vm.uuid, vm.unreadable) = (String::new(), "inaccessible".into()))],
            "unreadable",
        ),
        ("two with our notes", id(), vec![vm(|_| {}), vm(|vm| vm.object.id = "vm-2".into())], "mismatch"),
    ] {
        assert_eq!(verb(&undo(&id, &found, &folder())), want, "{why}");
    }
}

#[test]
fn next_table() {
    let question = Question { id: "1".into(), ..Question::default() };
    let asks = |vm: &mut Vm| (vm.powered_on, vm.question) = (false, Some(question.clone()));
    for (why, found, want) in [
        ("nothing is there", vec![], "Create"),
        ("no notes: they are written first", vec![vm(|vm| vm.annotation.clear())], "Change"),
        ("off", vec![vm(|vm| vm.powered_on = false)], "PowerOn"),
        ("off, and vCenter has a question", vec![vm(asks)], "Ask"),
        ("it runs", vec![vm(|_| {})], "Done"),
        ("another owner", vec![vm(|vm| vm.annotation = owner_note("u-9"))], "Mismatch"),
        ("inaccessible", vec![vm(|vm| vm.unreadable = "inaccessible".into())], "Unreadable"),
    ] {
        let next = format!("{:?}", next(&id(), &found, &folder(), "[ds] a.iso"));
        assert!(next.starts_with(want), "{why}: {next}");
    }
}

#[test]
fn unreadable_vm_may_be_the_recorded_one() {
    let unread = |uuid: &str| vm(|vm| (vm.uuid, vm.unreadable) = (uuid.into(), "orphaned".into()));
    let seen = |vm: Vm| SiteVms { is_current: true, vms: [("vm-1".into(), Arc::new(vm))].into() };
    assert!(id().hidden(&seen(unread(""))).is_some(), "of unknown identity");
    assert!(id().hidden(&seen(unread(UUID))).is_some(), "known from before");
    assert_eq!(id().hidden(&seen(unread(OTHER))), None, "known to be another");
    assert_eq!(id().hidden(&seen(vm(|vm| vm.uuid = OTHER.into()))), None, "readable");
    let unrecorded = VmIdentity { recorded: String::new(), ..id() };
    assert_eq!(unrecorded.hidden(&seen(unread(""))), None, "there is nothing to lose");
}

#[test]
fn owner_note_is_added_only_to_an_empty_annotation() {
    assert!(id().missing_note(&vm(|vm| vm.annotation.clear()), &folder()).is_some());
    assert_eq!(id().missing_note(&vm(|_| {}), &folder()), None);
    let adopted = VmIdentity { is_adopted: true, ..id() };
    assert_eq!(adopted.missing_note(&vm(|vm| vm.annotation = "rack 7".into()), &folder()), None);
}

#[test]
fn questions_are_answered_by_policy_only() {
    let question = |id: &str| Question {
        id: "1".into(),
        text: "?".into(),
        message_ids: vec![id.into()],
        choices: vec![
            ("0".into(), "Cancel".into()),
            ("1".into(), "I _moved it".into()),
            ("2".into(), "Yes".into()),
        ],
    };
    for (why, id, answers, want) in [
        ("moved files keep the UUID", UUID_ALTERED, "", Some("1")),
        ("the pool says otherwise", UUID_ALTERED, "msg.uuid.altered=0", Some("0")),
        ("a person has to answer", "msg.disk.x", "", None),
        ("the pool has an answer, by label", "msg.disk.x", "a=b, msg.disk.x = yes", Some("2")),
        ("an answer that is not a choice", "msg.disk.x", "msg.disk.x=no", None),
    ] {
        assert_eq!(choice(&question(id), answers).as_deref(), want, "{why}");
    }
}
