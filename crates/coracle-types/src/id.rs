//! VM names, which callers choose, VM ids, which are derived from them, and ids of VMM instances.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Name of a VM, chosen by a caller: 1 to 253 bytes of printable ASCII without `/` and spaces.
///
/// Any such name maps to one [`VmId`]; only the id reaches paths and devices.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VmName(String);

/// Reason why a VM name is invalid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum InvalidVmName {
    /// The name is empty.
    #[error("vm_id is required")]
    Empty,
    /// More than 253 bytes.
    #[error("VM name has {0} bytes; at most 253 are allowed")]
    TooLong(usize),
    /// A byte outside the printable range, a space or a slash.
    #[error("VM name contains {0:?}; printable ASCII without spaces and slashes is allowed")]
    Character(char),
}

impl VmName {
    /// Returns the name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for VmName {
    type Err = InvalidVmName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() {
            return Err(InvalidVmName::Empty);
        }
        if text.len() > 253 {
            return Err(InvalidVmName::TooLong(text.len()));
        }
        match text.chars().find(|c| !c.is_ascii_graphic() || *c == '/') {
            Some(bad) => Err(InvalidVmName::Character(bad)),
            None => Ok(Self(text.to_owned())),
        }
    }
}

impl TryFrom<String> for VmName {
    type Error = InvalidVmName;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<VmName> for String {
    fn from(name: VmName) -> Self {
        name.0
    }
}

impl fmt::Display for VmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Owner of a VM. The uid distinguishes an object from a later one with the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity<'a> {
    /// Name of the cluster, empty when there is only one.
    pub cluster: &'a str,
    /// Namespace of the object.
    pub namespace: &'a str,
    /// Name of the object.
    pub name: &'a str,
    /// Uid of the object.
    pub uid: &'a str,
}

/// Internal id of a VM: `<slug>-<12 hex>`, at most 53 bytes of `[a-z0-9-]`.
///
/// Safe as a file name, a host name and a process argument. Two names that
/// differ anywhere have different ids.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VmId(String);

const SLUG_LEN_MAX: usize = 40;
const HASH_LEN: usize = 12;

impl VmId {
    /// Returns the id of a VM that belongs to no cluster object.
    #[must_use]
    pub fn of_name(name: &VmName) -> Self {
        Self::hashed(name.as_str(), &[name.as_str()])
    }

    /// Returns the id of a cluster object's VM; without a uid, the id of the name.
    #[must_use]
    pub fn of_object(name: &VmName, identity: Identity<'_>) -> Self {
        if identity.uid.is_empty() {
            return Self::of_name(name);
        }
        let Identity { cluster, namespace, name: object, uid } = identity;
        Self::hashed(name.as_str(), &[cluster, namespace, object, uid])
    }

    /// Hashes the parts, each preceded by its length, so that `("a-b", "c")` differs from `("a", "b-c")`.
    fn hashed(name: &str, parts: &[&str]) -> Self {
        let mut hash = Sha256::new();
        for part in parts {
            hash.update(part.len().to_be_bytes());
            hash.update(part.as_bytes());
        }
        let mut hex = hex::encode(hash.finalize());
        hex.truncate(HASH_LEN);
        Self(format!("{}-{hex}", slug(name)))
    }

    /// Returns the id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the twelve hex digits at the end, unique on a host.
    #[must_use]
    pub fn short(&self) -> &str {
        short(&self.0)
    }
}

/// Id of a VMM instance: `<slug>-<12 hex>` like that of a VM, with random digits. The directories, sockets and tap of the
/// instance have this id from launch to end, whichever VM the instance is assigned to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct InstanceId(String);

impl InstanceId {
    /// Returns a new id from the lower 48 bits of `number`, which is random. `purpose` is for people who read the id.
    #[must_use]
    pub fn new(purpose: &str, number: u64) -> Self {
        let slug = if purpose.is_empty() { "vmm".to_owned() } else { slug(purpose) };
        Self(format!("{slug}-{:012x}", number & 0xffff_ffff_ffff))
    }

    /// Returns the id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the twelve hex digits at the end: unique on a host, short enough for socket paths (107 bytes) and interface
    /// names (15).
    #[must_use]
    pub fn short(&self) -> &str {
        short(&self.0)
    }

    /// Returns the name of the tap device, 14 bytes.
    #[must_use]
    pub fn tap_name(&self) -> String {
        format!("ct{}", self.short())
    }
}

/// The VMM of a VM whose record predates instance ids has the id of the VM.
impl From<VmId> for InstanceId {
    fn from(vm: VmId) -> Self {
        Self(vm.0)
    }
}

impl FromStr for InstanceId {
    type Err = InvalidVmId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).map(Self)
    }
}

impl TryFrom<String> for InstanceId {
    type Error = InvalidVmId;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<InstanceId> for String {
    fn from(id: InstanceId) -> Self {
        id.0
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns the digits of an id.
fn short(id: &str) -> &str {
    id.rsplit('-').next().unwrap_or_default()
}

fn slug(name: &str) -> String {
    let mut slug: String = name
        .chars()
        .take(SLUG_LEN_MAX)
        .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' })
        .collect();
    if slug.starts_with('-') {
        slug.replace_range(..1, "v");
    }
    slug
}

/// Error for a text that is not an id.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("invalid id {0:?}: expected <slug>-<12 hex digits>")]
pub struct InvalidVmId(String);

fn parse(text: &str) -> Result<String, InvalidVmId> {
    let bad = || InvalidVmId(text.chars().take(80).collect());
    let (slug, hash) = text.rsplit_once('-').ok_or_else(bad)?;
    let slug_ok = !slug.is_empty()
        && slug.len() <= SLUG_LEN_MAX
        && !slug.starts_with('-')
        && slug.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    let hash_ok =
        hash.len() == HASH_LEN && hash.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if slug_ok && hash_ok { Ok(text.to_owned()) } else { Err(bad()) }
}

impl FromStr for VmId {
    type Err = InvalidVmId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).map(Self)
    }
}

impl TryFrom<String> for VmId {
    type Error = InvalidVmId;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<VmId> for String {
    fn from(id: VmId) -> Self {
        id.0
    }
}

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> VmName {
        text.parse().unwrap()
    }

    #[test]
    fn invalid_names_are_refused() {
        for (text, want) in [
            ("web", None),
            ("default-a", None),
            ("srv_0.1:x", None),
            ("", Some(InvalidVmName::Empty)),
            ("a/b", Some(InvalidVmName::Character('/'))),
            ("a b", Some(InvalidVmName::Character(' '))),
            ("ü", Some(InvalidVmName::Character('ü'))),
        ] {
            assert_eq!(text.parse::<VmName>().err(), want, "{text}");
        }
        assert_eq!("x".repeat(254).parse::<VmName>(), Err(InvalidVmName::TooLong(254)));
    }

    #[test]
    fn ids_of_one_namespace_differ_in_their_digits() {
        let (a, b) = (VmId::of_name(&name("default-a")), VmId::of_name(&name("default-b")));
        assert_ne!(a.short(), b.short());
    }

    #[test]
    fn instance_id_fits_an_interface_name_and_parses() {
        for (purpose, number) in [("web", 5), ("", u64::MAX), ("Größe/..", 0), (&"x".repeat(99), 1)] {
            let id = InstanceId::new(purpose, number);
            assert_eq!(id.as_str().parse::<InstanceId>(), Ok(id.clone()), "{purpose}");
            assert!(id.tap_name().len() <= 15, "{purpose}");
        }
        let vm = VmId::of_name(&name("web"));
        assert_eq!(InstanceId::from(vm.clone()).as_str(), vm.as_str());
    }

    #[test]
    fn same_name_with_another_uid_is_another_vm() {
        let object = |uid| Identity { namespace: "default", name: "web", uid, ..Identity::default() };
        let first = VmId::of_object(&name("default-web"), object("1"));
        assert_ne!(first, VmId::of_object(&name("default-web"), object("2")));
        assert_eq!(first, VmId::of_object(&name("default-web"), object("1")));
    }

    #[test]
    fn dash_between_namespace_and_name_is_unambiguous() {
        let object = |namespace, name| Identity { namespace, name, uid: "u", ..Identity::default() };
        let vm = name("a-b-c");
        assert_ne!(VmId::of_object(&vm, object("a-b", "c")), VmId::of_object(&vm, object("a", "b-c")));
    }

    proptest! {
        #[test]
        fn vm_id_of_any_name_parses(text in "[!-.0-~]{1,253}") {
            let id = VmId::of_name(&name(&text));
            prop_assert_eq!(id.as_str().parse::<VmId>(), Ok(id.clone()));
            prop_assert!(id.as_str().len() <= 53);
        }

        #[test]
        fn arbitrary_text_never_panics(text in ".*") {
            let _ = text.parse::<VmId>();
        }
    }
}
