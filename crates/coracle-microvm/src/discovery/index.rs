//! Objects by UID and by VM id, so that an event needs no scan of all objects.

use std::collections::{HashMap, HashSet};

use coracle_api::MikromVM;
use kube::{ResourceExt as _, runtime::reflector::ObjectRef};

type Ref = ObjectRef<MikromVM>;

/// Index of the objects, kept up to date by their watch.
#[derive(Debug, Default)]
pub(super) struct Index {
    by_uid: HashMap<String, Ref>,
    /// Objects by VM id. Several objects can have one id: `c` in `a-b` and `b-c` in `a`.
    by_vm_id: HashMap<String, HashSet<Ref>>,
}

impl Index {
    pub(super) fn insert(&mut self, vm: &MikromVM) {
        let object = ObjectRef::from_obj(vm);
        self.by_uid.insert(vm.uid().unwrap_or_default(), object.clone());
        self.by_vm_id.entry(vm.vm_id()).or_default().insert(object);
    }

    pub(super) fn remove(&mut self, vm: &MikromVM) {
        self.by_uid.remove(&vm.uid().unwrap_or_default());
        let id = vm.vm_id();
        if let Some(all) = self.by_vm_id.get_mut(&id) {
            all.remove(&ObjectRef::from_obj(vm));
            if all.is_empty() {
                self.by_vm_id.remove(&id);
            }
        }
    }

    pub(super) fn uid(&self, uid: &str) -> Option<Ref> {
        self.by_uid.get(uid).cloned()
    }

    pub(super) fn vm_id(&self, id: &str) -> Vec<Ref> {
        self.by_vm_id.get(id).into_iter().flatten().cloned().collect()
    }
}

impl<'a> FromIterator<&'a MikromVM> for Index {
    fn from_iter<T: IntoIterator<Item = &'a MikromVM>>(all: T) -> Self {
        let mut index = Self::default();
        all.into_iter().for_each(|vm| index.insert(vm));
        index
    }
}

#[cfg(test)]
mod tests {
    use coracle_api::MikromVMSpec;

    use super::*;

    fn vm(namespace: &str, name: &str, uid: &str) -> MikromVM {
        let mut vm = MikromVM::new(name, MikromVMSpec::default());
        vm.metadata.namespace = Some(namespace.into());
        vm.metadata.uid = Some(uid.into());
        vm
    }

    #[test]
    fn vm_id_of_two_objects_finds_both() {
        let (first, second) = (vm("a-b", "c", "1"), vm("a", "b-c", "2"));
        let mut index: Index = [&first, &second].into_iter().collect();
        let found: HashSet<Ref> = index.vm_id("a-b-c").into_iter().collect();
        assert_eq!(found, [ObjectRef::from_obj(&first), ObjectRef::from_obj(&second)].into());
        assert_eq!(index.uid("2"), Some(ObjectRef::from_obj(&second)));
        index.remove(&first);
        assert_eq!(index.vm_id("a-b-c"), [ObjectRef::from_obj(&second)]);
        index.remove(&second);
        assert_eq!((index.vm_id("a-b-c"), index.uid("2")), (vec![], None));
    }
}
