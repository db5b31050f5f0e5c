//! Identity of VMs: which VM a call means. Pure.
//!
//! `<namespace>-<name>` is ambiguous: `a-b` of `c`, or `b-c` of `a`. A caller that names its object means the VM of that object
//! and no other; each VM has a unique name on the host.

use std::collections::BTreeMap;

use coracle_api::keys::vm as keys;
use coracle_host::{HostError, Record};
use coracle_types::VmName;

/// Number of UID characters that distinguish VMs with the same id on the host.
const UID_CHARS: usize = 8;
/// Maximum length of a VM name.
const NAME_MAX: usize = 253;

/// Object on whose behalf a caller acts. All fields are empty for an old client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Caller {
    /// UID of the object.
    pub(crate) uid: String,
    /// `namespace/name` of the object.
    pub(crate) object: String,
}

/// Properties that identify a VM of the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known<'a> {
    /// Unique name of the VM.
    pub(crate) name: &'a str,
    /// UID of the VM's owner; empty if it has none.
    pub(crate) uid: &'a str,
    metadata: &'a BTreeMap<String, String>,
}

impl<'a> From<&'a Record> for Known<'a> {
    fn from(record: &'a Record) -> Self {
        Self { name: record.name.as_str(), uid: &record.owner.uid, metadata: &record.metadata }
    }
}

impl<'a> Known<'a> {
    /// Id in messages: the one that the VM was created under.
    pub(crate) fn wire_id(self) -> &'a str {
        let id = self.metadata.get(keys::VM_ID).filter(|_| !self.uid.is_empty());
        id.map_or(self.name, String::as_str)
    }

    /// Digest of the spec that the VM was created from.
    pub(crate) fn spec(self) -> Option<&'a String> {
        self.metadata.get(keys::SPEC)
    }
}

/// Finds the VM that `caller` means by `id`. A VM without an owner belongs to its creator: an object gets it only if the VM is
/// marked for adoption by that object.
///
/// # Errors
/// [`HostError::SharedName`] if several VMs have the id and the caller names no object.
pub(crate) fn find<'a>(
    all: impl Iterator<Item = Known<'a>>,
    id: &str,
    caller: &Caller,
) -> Result<Option<Known<'a>>, HostError> {
    let mut called = all.filter(|vm| vm.wire_id() == id);
    if caller.uid.is_empty() {
        let (first, second) = (called.next(), called.next());
        return match second {
            None => Ok(first),
            Some(_) => Err(HostError::SharedName { name: id.to_owned() }),
        };
    }
    let mut marked = None;
    for vm in called {
        if vm.uid == caller.uid {
            return Ok(Some(vm));
        }
        let mark = vm.metadata.get(keys::ADOPT).filter(|mark| !mark.is_empty());
        if vm.uid.is_empty() && mark == Some(&caller.object) {
            marked = Some(vm);
        }
    }
    Ok(marked)
}

/// Name on the host for the VM of the object `uid`, if another VM has the name `id`.
pub(crate) fn distinct_name(id: &VmName, uid: &str) -> Result<VmName, HostError> {
    let tail: String = uid.chars().filter(char::is_ascii_alphanumeric).take(UID_CHARS).collect();
    let head: String = id.as_str().chars().take(NAME_MAX - UID_CHARS - 1).collect();
    let invalid = |e: coracle_types::InvalidVmName| HostError::Invalid { message: e.to_string() };
    format!("{head}-{tail}").parse().map_err(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::to_status;

    type Row = (&'static str, &'static str, BTreeMap<String, String>);

    fn row(name: &'static str, uid: &'static str, words: &[(&str, &str)]) -> Row {
        let metadata = words.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        (name, uid, metadata.collect())
    }

    fn known(row: &Row) -> Known<'_> {
        Known { name: row.0, uid: row.1, metadata: &row.2 }
    }

    #[test]
    fn caller_finds_the_vm_of_its_object_only() {
        let all = [
            row("a-b-c", "u-1", &[]),
            row("a-b-c-u2", "u-2", &[(keys::VM_ID, "a-b-c")]),
            row("team-web", "", &[]),
            row("team-old", "", &[(keys::ADOPT, "team/old")]),
            row("fake", "", &[(keys::VM_ID, "team-web")]),
        ];
        let caller = |uid: &str, object: &str| Caller { uid: uid.into(), object: object.into() };
        for (why, id, who, want) in [
            ("the first object of the id", "a-b-c", caller("u-1", "a-b/c"), Some("a-b-c")),
            ("the second", "a-b-c", caller("u-2", "a/b-c"), Some("a-b-c-u2")),
            ("a third that has none", "a-b-c", caller("u-3", "a/b-c"), None),
            ("a local VM of the same name", "team-web", caller("u-4", "team/web"), None),
            ("a marked one", "team-old", caller("u-5", "team/old"), Some("team-old")),
            ("a mark for another object", "team-old", caller("u-6", "tea/m-old"), None),
            ("an old client", "team-web", Caller::default(), Some("team-web")),
            ("an old client, by the name on the host", "a-b-c-u2", Caller::default(), None),
        ] {
            let found = find(all.iter().map(known), id, &who).unwrap();
            assert_eq!(found.map(|vm| vm.name), want, "{why}");
        }
        let several = find(all.iter().map(known), "a-b-c", &Caller::default()).unwrap_err();
        assert_eq!(to_status(&several).code(), tonic::Code::FailedPrecondition);
    }

    #[test]
    fn distinct_name_fits_and_differs() {
        let name = |id: &str| distinct_name(&id.parse().unwrap(), "0f3a-11bb-22cc").unwrap().to_string();
        assert_eq!(name("team-web"), "team-web-0f3a11bb");
        assert_eq!(name(&"a".repeat(253)).len(), 253);
    }
}
