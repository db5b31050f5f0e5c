//! Objects that this version cannot parse, which must not block the others.
//!
//! A newer operator may have written unknown values. For such an object the last parsed version is used; an object that was
//! never parsed is skipped.

use coracle_api::MikromVM;
use kube::{
    ResourceExt as _,
    runtime::{reflector::ObjectRef, watcher::Event},
};
use tracing::warn;

/// A MikromVM, or its metadata and a parse error.
pub(super) type Guarded = coracle_reconcile::Guarded<MikromVM>;

/// Converts an event. `last_read` returns the last parsed version of an object.
pub(super) fn convert_event(
    event: Event<Guarded>,
    last_read: impl Fn(&ObjectRef<Guarded>) -> Option<MikromVM>,
) -> Option<Event<MikromVM>> {
    let read = |object: Guarded| {
        let name = ObjectRef::from_obj(&object);
        let (ns, name_any) = (object.namespace(), object.name_any());
        object.0.ok().or_else(|| {
            warn!(ns, name = name_any, "parse MikromVM failed");
            last_read(&name)
        })
    };
    match event {
        Event::Init => Some(Event::Init),
        Event::InitDone => Some(Event::InitDone),
        Event::Apply(object) => read(object).map(Event::Apply),
        Event::InitApply(object) => read(object).map(Event::InitApply),
        Event::Delete(object) => {
            // The name is enough to remove the object.
            let mut gone = MikromVM::new(&object.name_any(), Default::default());
            gone.metadata.clone_from(kube::Resource::meta(&object));
            Some(Event::Delete(object.0.unwrap_or(gone)))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(phase: &str) -> Guarded {
        let spec = json!({"image": "i", "vcpuCount": 1, "memoryMB": 128});
        let object = json!({
            "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM",
            "metadata": {"name": "web", "namespace": "team", "uid": "u-1"},
            "spec": spec, "status": {"phase": phase},
        });
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn unreadable_object_keeps_its_last_readable_state() {
        let known = object("Running").0.unwrap();
        let never = |_: &ObjectRef<Guarded>| None;
        let before = |_: &ObjectRef<Guarded>| Some(known.clone());
        let strange = || object("Levitating");
        assert!(strange().0.is_err());
        assert!(
            convert_event(Event::InitApply(strange()), never).is_none(),
            "skipped, and the list continues"
        );
        let kept = convert_event(Event::InitApply(strange()), before);
        assert!(matches!(kept, Some(Event::InitApply(vm)) if vm == known));
        let read = convert_event(Event::Apply(object("Running")), never);
        assert!(matches!(read, Some(Event::Apply(vm)) if vm == known));
        let gone = convert_event(Event::Delete(strange()), never);
        assert!(matches!(gone, Some(Event::Delete(vm)) if vm.uid().as_deref() == Some("u-1")));
    }
}
