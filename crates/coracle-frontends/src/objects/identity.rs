//! Which VM a call means. Pure.
//!
//! `<namespace>-<name>` stands for more than one object: `a-b` of `c`, `b-c` of `a`. A caller that says for which object
//! it speaks means that object's VM and no other; each has a name of its own on the host.

use std::collections::BTreeMap;

use coracle_api::keys::vm as keys;
use coracle_host::{HostError, Record};
use coracle_types::VmName;

/// Characters of a UID that tell VMs with one id apart on the host.
const UID_CHARS: usize = 8;
/// Longest name of a VM.
const NAME_MAX: usize = 253;

/// For which object a caller speaks. All empty: an old client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Caller {
    /// UID of the object.
    pub(crate) uid: String,
    /// Its `namespace/name`.
    pub(crate) object: String,
}

/// What tells a VM of the host from others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known<'a> {
    /// Its name, which no other has.
    pub(crate) name: &'a str,
    /// UID of its owner; empty: it was made for none.
    pub(crate) uid: &'a str,
    metadata: &'a BTreeMap<String, String>,
}

impl<'a> From<&'a Record> for Known<'a> {
    fn from(record: &'a Record) -> Self {
        Self { name: record.name.as_str(), uid: &record.owner.uid, metadata: &record.metadata }
    }
}

impl<'a> Known<'a> {
    /// Its id on the wire: that which it was created under.
    pub(crate) fn wire_id(self) -> &'a str {
        let id = self.metadata.get(keys::VM_ID).filter(|_| !self.uid.is_empty());
        id.map_or(self.name, String::as_str)
    }

    /// The digest of the spec that it was made from.
    pub(crate) fn spec(self) -> Option<&'a String> {
        self.metadata.get(keys::SPEC)
    }
}

/// The VM that `caller` means by `id`. One without an owner belongs to who made it: it is found for an object only with
/// its maker's mark.
///
/// # Errors
/// [`HostError::SharedName`] when a caller that names no object may mean more than one.
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

/// A name on the host for the VM of the object `uid` where another VM has the name `id`.
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
