//! Resolves the name that a caller gives to a VM. Pure.

use coracle_types::{VmId, VmName};

use crate::HostError;

/// Kind of access to the named VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only reads: a unique prefix of a name or an id suffices.
    Read,
    /// Changes the VM, enters its guest, or waits for it: needs an exact name or a whole id. A prefix would match another VM
    /// once the intended one is gone.
    Change,
}

/// Returns `exact`, the VM found by whole id or name. Otherwise, for [`Access::Read`], returns the only one of the `known` VMs
/// whose name or id has the prefix. The known VMs are thousands, and are only searched in that case.
pub(super) fn resolve<'a, T>(
    access: Access,
    wanted: &str,
    exact: Option<T>,
    known: impl Iterator<Item = (T, &'a VmId, &'a VmName)>,
) -> Result<T, HostError> {
    let not_found = || HostError::NotFound { name: wanted.to_owned() };
    if let Some(vm) = exact {
        return Ok(vm);
    }
    if access == Access::Change || wanted.is_empty() {
        return Err(not_found());
    }
    let fits =
        |name: &VmName, id: &VmId| name.as_str().starts_with(wanted) || id.as_str().starts_with(wanted);
    let mut matches: Vec<_> =
        known.filter(|(_, id, name)| fits(name, id)).map(|(vm, _, name)| (name, vm)).collect();
    if matches.len() > 1 {
        let mut matches: Vec<_> = matches.iter().map(|(name, _)| name.to_string()).collect();
        matches.sort();
        return Err(HostError::Ambiguous { name: wanted.to_owned(), matches });
    }
    matches.pop().map(|(_, vm)| vm).ok_or_else(not_found)
}

#[cfg(test)]
mod tests {
    use Access::{Change, Read};

    use super::*;

    /// Result for VMs of these names: the name that is found, `?` for ambiguous, `-` for not found.
    fn resolve_name(access: Access, wanted: &str, names: &[&str]) -> String {
        let names: Vec<VmName> = names.iter().map(|name| name.parse().unwrap()).collect();
        let ids: Vec<VmId> = names.iter().map(VmId::of_name).collect();
        let known = names.iter().zip(&ids).map(|(name, id)| (name.to_string(), id, name));
        let with_id = ids.iter().position(|id| id.as_str() == wanted);
        let exact = with_id.or_else(|| names.iter().position(|name| name.as_str() == wanted));
        match resolve(access, wanted, exact.map(|at| names[at].to_string()), known) {
            Ok(name) => name,
            Err(HostError::Ambiguous { .. }) => "?".to_owned(),
            Err(HostError::NotFound { .. }) => "-".to_owned(),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn resolve_table() {
        let id = VmId::of_name(&"web".parse().unwrap()).to_string();
        let half = &id[..6];
        for (why, access, wanted, names, want) in [
            ("exact name", Change, "web", &["web", "web-1"][..], "web"),
            ("the named VM is gone: its neighbour is not meant", Change, "web", &["web-1"], "-"),
            ("a prefix of several is not found either", Change, "web", &["web-1", "web-2"], "-"),
            ("whole id", Change, &id, &["web", "other"], "web"),
            ("part of an id", Change, half, &["web"], "-"),
            ("an id wins over a name that imitates it", Change, &id, &[&id, "web"], "web"),
            ("empty", Change, "", &["web"], "-"),
            ("reading: exact name before prefixes", Read, "web", &["web-1", "web"], "web"),
            ("reading: unique prefix", Read, "web", &["web-1", "db"], "web-1"),
            ("reading: prefix of several", Read, "web", &["web-1", "web-2"], "?"),
            ("reading: part of an id", Read, half, &["web", "db"], "web"),
            ("reading: empty", Read, "", &["web"], "-"),
            ("reading: no match", Read, "x", &["web"], "-"),
        ] {
            assert_eq!(resolve_name(access, wanted, names), want, "{why}");
        }
    }
}
