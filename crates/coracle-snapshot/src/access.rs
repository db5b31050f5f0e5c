//! Access to snapshots: who may create VMs from the memory of a guest, which includes its secrets.
//!
//! Callers without a namespace are administrators of the node and may use every snapshot. A namespace of a cluster may use the
//! snapshots of its own VMs, and those that are shared with it.

use std::collections::BTreeSet;
use std::io;
use std::sync::PoisonError;

use crate::{MANIFEST_FILE, SnapshotInfo, SnapshotStore};
use coracle_files as files;
use coracle_record::{Owner, SnapshotName};

/// Maximum number of namespaces that one snapshot is shared with.
const SHARES_MAX: usize = 256;

impl SnapshotInfo {
    /// Returns whether `caller` may create a VM from the snapshot.
    #[must_use]
    pub fn admits(&self, caller: &Owner) -> bool {
        if caller.namespace.is_empty() && caller.uid.is_empty() {
            return true;
        }
        // VMs of older operators have no cluster name.
        let same_cluster = self.owner.cluster.is_empty() || self.owner.cluster == caller.cluster;
        let owned = !self.owner.namespace.is_empty() && self.owner.namespace == caller.namespace;
        (owned && same_cluster) || self.shared_with.contains(&caller.namespace)
    }

    /// Removes owner and grants, which are valid only on this node.
    pub fn without_access(self) -> Self {
        Self { owner: Owner::default(), shared_with: BTreeSet::new(), ..self }
    }
}

impl SnapshotStore {
    /// Grants the VMs of `namespace` the use of the snapshot, or revokes it. Idempotent; synced to disk before this returns.
    /// `None`: not found. Blocking.
    ///
    /// # Errors
    /// `InvalidInput` for an invalid namespace, or too many; when the manifest cannot be read or written.
    pub fn share(
        &self,
        name: &SnapshotName,
        namespace: &str,
        granted: bool,
    ) -> io::Result<Option<SnapshotInfo>> {
        let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidInput, why);
        if !is_namespace(namespace) {
            return Err(invalid(format!("invalid namespace {namespace:?}: it is a label of RFC 1123")));
        }
        let _one_at_a_time = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut info) = self.get(name)? else { return Ok(None) };
        let changed = match granted {
            true => info.shared_with.insert(namespace.to_owned()),
            false => info.shared_with.remove(namespace),
        };
        if info.shared_with.len() > SHARES_MAX {
            return Err(invalid(format!("cannot share with more than {SHARES_MAX} namespaces")));
        }
        if changed {
            let manifest = self.place(name).join(MANIFEST_FILE);
            files::write_atomic(&manifest, &serde_json::to_vec_pretty(&info)?)?;
        }
        Ok(Some(info))
    }
}

/// Returns whether the text is a label of RFC 1123, as Kubernetes requires for namespaces.
fn is_namespace(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=63).contains(&text.len())
        && text.chars().all(plain)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

#[cfg(test)]
mod tests {
    use coracle_types::UnixMillis;

    use super::*;
    use crate::tests::{fill, info};

    fn owner(cluster: &str, namespace: &str) -> Owner {
        let uid = if namespace.is_empty() { "" } else { "u-1" };
        Owner { cluster: cluster.into(), namespace: namespace.into(), uid: uid.into(), ..Owner::default() }
    }

    #[test]
    fn snapshot_admits_its_namespace_and_those_it_is_shared_with() {
        let local = owner("", "");
        for (why, of, shared, caller, want) in [
            ("its own namespace", owner("c", "team"), "", owner("c", "team"), true),
            ("another namespace", owner("c", "team"), "", owner("c", "else"), false),
            (
                "another namespace that it is shared with",
                owner("c", "team"),
                "else",
                owner("c", "else"),
                true,
            ),
            ("the same name in another cluster", owner("c", "team"), "", owner("d", "team"), false),
            ("of an operator that named no cluster", owner("", "team"), "", owner("c", "team"), true),
            ("a local VM's, to the cluster", local.clone(), "", owner("c", "team"), false),
            ("a local VM's that is shared", local.clone(), "team", owner("c", "team"), true),
            ("an administrator of the node", owner("c", "team"), "", local.clone(), true),
            (
                "a uid without a namespace is none",
                local,
                "",
                Owner { uid: "u".into(), ..owner("", "") },
                false,
            ),
        ] {
            let shared_with = [shared].into_iter().filter(|ns| !ns.is_empty()).map(str::to_owned).collect();
            let snapshot = SnapshotInfo { owner: of, shared_with, ..info("first") };
            assert_eq!(snapshot.admits(&caller), want, "{why}");
        }
    }

    #[test]
    fn grant_is_kept_in_the_manifest() {
        let state = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(state.path(), UnixMillis(0)).unwrap();
        fill(&store, "first");
        let name: SnapshotName = "first".parse().unwrap();
        for _ in 0..2 {
            store.share(&name, "team", true).unwrap().unwrap();
        }
        let reopened = SnapshotStore::open(state.path(), UnixMillis(0)).unwrap();
        let shares = |store: &SnapshotStore| store.get(&name).unwrap().unwrap().shared_with;
        assert_eq!(shares(&reopened), ["team".to_owned()].into());
        store.share(&name, "team", false).unwrap().unwrap();
        assert_eq!(shares(&store), BTreeSet::new());
        assert!(store.share(&"other".parse().unwrap(), "team", true).unwrap().is_none());
        for wrong in ["", "Team", "a b", "-a", "../x"] {
            assert!(store.share(&name, wrong, true).is_err(), "{wrong:?}");
        }
    }
}
