//! Inodes behind the guest's node ids: pure state, changed by [`Change`]s that a log can hold.
//!
//! An id stands for one inode of the host. Its names (parent id and file name) say where to look for the inode. If no name
//! leads to that inode any more, the id is stale. An id is never reused. It exists as long as the guest counts look-ups on it,
//! or on a file below it.

use std::collections::HashMap;
use std::sync::Arc;

use super::wire::ROOT;

/// Maximum number of ids of one directory: some 60 MB here with names of usual length. A guest's kernel needs over 256 MiB for
/// them.
pub(super) const NODES_MAX: usize = 256 * 1024;
/// Maximum number of names (hard links) remembered per inode, and the maximum when there are as many names as ids may exist.
/// The oldest name is dropped.
const NAMES_MAX: usize = 16;
const NAMES_MAX_CROWDED: usize = 1;
/// Maximum depth of a path. Stale names can form a cycle only if the host moves directories while a guest reads them.
const DEPTH_MAX: usize = 2048;
/// Number of latest requests that are known to be done (see [`Nodes::was_done`]).
const DONE_MAX: usize = 256;

/// Identity of a host inode. The time of birth (0 if unknown) distinguishes it from a later inode with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ident {
    pub(super) device: u64,
    pub(super) inode: u64,
    /// Time of birth, nanoseconds.
    pub(super) born: u64,
}

pub(super) type FileName = Arc<[u8]>;

/// Change of the state, and one line of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Adds an id.
    Node {
        id: u64,
        ident: Ident,
        directory: bool,
    },
    /// Adds a name to an id. Another id that had the name loses it.
    NameAdded {
        id: u64,
        parent: u64,
        name: FileName,
    },
    Unnamed {
        parent: u64,
        name: FileName,
    },
    /// Raises the guest's look-up count of an id; `Forgotten` lowers it.
    LookupAdded {
        id: u64,
        count: u64,
    },
    Forgotten {
        id: u64,
        count: u64,
    },
    /// Changes the inode of an id: an overlay file system copied the file up.
    InodeChanged {
        id: u64,
        ident: Ident,
    },
    /// Marks ids below this one as given out.
    Next {
        id: u64,
    },
    /// Sets the number of processes that have opened this table so far.
    Epoch {
        count: u64,
    },
    /// Marks a request as done, whether or not its reply arrived.
    Done {
        unique: u64,
    },
}

#[derive(Debug)]
struct Node {
    ident: Ident,
    directory: bool,
    names: Vec<(u64, FileName)>,
    lookups: u64,
    children: u64,
}

/// Paths at which to look for an id's inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) ident: Ident,
    /// Paths beneath the root, in order of trying.
    pub(super) paths: Vec<Vec<u8>>,
}

/// Node ids of one directory.
#[derive(Debug)]
pub(super) struct Nodes {
    nodes: HashMap<u64, Node>,
    by_ident: HashMap<Ident, u64>,
    by_name: HashMap<(u64, FileName), u64>,
    done: Vec<u64>,
    next: u64,
    epoch: u64,
}

impl Default for Nodes {
    fn default() -> Self {
        let (nodes, by_ident, by_name) = Default::default();
        Self { nodes, by_ident, by_name, done: Vec::new(), next: ROOT + 1, epoch: 0 }
    }
}

impl Nodes {
    /// Changes for a look-up that found `ident` in directory `parent` as `name`, and the id for the reply. `None` if the parent
    /// is unknown or the table is full.
    pub(super) fn look_up(
        &self,
        parent: u64,
        name: &[u8],
        ident: Ident,
        directory: bool,
    ) -> Option<(u64, Vec<Change>)> {
        self.contains(parent).then_some(())?;
        let mut changes = Vec::new();
        let id = match self.by_ident.get(&ident) {
            Some(id) => *id,
            None if self.nodes.len() >= NODES_MAX => return None,
            None => {
                changes.push(Change::Node { id: self.next, ident, directory });
                self.next
            }
        };
        let name = FileName::from(name);
        if id == parent {
            return None;
        }
        if self.named(parent, &name) != Some(id) {
            changes.push(Change::NameAdded { id, parent, name });
        }
        changes.push(Change::LookupAdded { id, count: 1 });
        Some((id, changes))
    }

    /// Changes for a rename that was carried out. The target's name is lost; with `exchange` it moves to the source.
    pub(super) fn rename_changes(&self, from: (u64, &[u8]), to: (u64, &[u8]), exchange: bool) -> Vec<Change> {
        let [source, target] = [from, to].map(|(parent, name)| (parent, FileName::from(name)));
        if source == target {
            return Vec::new();
        }
        let [moved, met] = [&source, &target].map(|(parent, name)| self.named(*parent, name));
        if !exchange && moved.is_some() && moved == met {
            return Vec::new(); // two names of one inode: rename(2) does nothing
        }
        let gone = |(parent, name): &(u64, FileName)| Change::Unnamed { parent: *parent, name: name.clone() };
        let put = |id, (parent, name): &(u64, FileName)| Change::NameAdded {
            id,
            parent: *parent,
            name: name.clone(),
        };
        let mut changes = vec![gone(&target), gone(&source)];
        changes.extend(moved.map(|id| put(id, &target)));
        changes.extend(met.filter(|_| exchange).map(|id| put(id, &source)));
        changes
    }

    /// Paths of the id's inode. `None` for an unknown id, and for the root, which does not move.
    pub(super) fn place(&self, id: u64) -> Option<Place> {
        let node = self.nodes.get(&id)?;
        let paths = node.names.iter().rev().filter_map(|(parent, name)| self.path(*parent, name)).collect();
        Some(Place { ident: node.ident, paths })
    }

    pub(super) fn named(&self, parent: u64, name: &[u8]) -> Option<u64> {
        self.by_name.get(&(parent, FileName::from(name))).copied()
    }

    pub(super) fn contains(&self, id: u64) -> bool {
        id == ROOT || self.nodes.contains_key(&id)
    }

    /// Whether request `unique` was carried out, by this process or an earlier one. A mount never reuses request numbers.
    pub(super) fn was_done(&self, unique: u64) -> bool {
        self.done.contains(&unique)
    }

    /// Number of processes that have opened this table so far.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Applies a change. Total: a change that does not fit the state has no effect.
    pub(super) fn apply(&mut self, change: &Change) {
        match change {
            Change::Node { id, ident, directory } => self.insert(*id, *ident, *directory),
            Change::NameAdded { id, parent, name } => self.attach(*id, *parent, name),
            Change::Unnamed { parent, name } => self.detach(*parent, name),
            Change::LookupAdded { id, count } => {
                if let Some(node) = self.nodes.get_mut(id) {
                    node.lookups = node.lookups.saturating_add(*count);
                }
            }
            Change::Forgotten { id, count } => {
                if let Some(node) = self.nodes.get_mut(id) {
                    node.lookups = node.lookups.saturating_sub(*count);
                    self.sweep(*id);
                }
            }
            Change::InodeChanged { id, ident } => self.reidentify(*id, *ident),
            Change::Next { id } => self.next = self.next.max(*id),
            Change::Epoch { count } => self.epoch = self.epoch.max(*count),
            Change::Done { unique } => {
                if self.done.len() == DONE_MAX {
                    self.done.remove(0);
                }
                self.done.push(*unique);
            }
        }
    }

    /// Changes that build this state from an empty one.
    pub(super) fn snapshot(&self) -> Vec<Change> {
        let mut all = vec![Change::Next { id: self.next }, Change::Epoch { count: self.epoch }];
        for (id, node) in &self.nodes {
            all.push(Change::Node { id: *id, ident: node.ident, directory: node.directory });
            if node.lookups > 0 {
                all.push(Change::LookupAdded { id: *id, count: node.lookups });
            }
        }
        for (id, node) in &self.nodes {
            let named = |(parent, name): &(u64, FileName)| Change::NameAdded {
                id: *id,
                parent: *parent,
                name: name.clone(),
            };
            all.extend(node.names.iter().map(named));
        }
        all.extend(self.done.iter().map(|unique| Change::Done { unique: *unique }));
        all
    }

    /// Drops ids that the guest never received: a log may end between two lines.
    pub(super) fn prune(&mut self) {
        let idle: Vec<u64> = self.nodes.keys().copied().collect();
        idle.into_iter().for_each(|id| self.sweep(id));
    }

    fn path(&self, mut parent: u64, name: &[u8]) -> Option<Vec<u8>> {
        let mut parts = vec![name];
        while parent != ROOT {
            let (above, name) = self.nodes.get(&parent)?.names.last()?;
            parts.push(name);
            parent = *above;
            (parts.len() <= DEPTH_MAX).then_some(())?;
        }
        parts.reverse();
        Some(parts.join(&b'/'))
    }

    fn insert(&mut self, id: u64, ident: Ident, directory: bool) {
        if self.contains(id) || self.by_ident.contains_key(&ident) {
            return;
        }
        self.nodes.insert(id, Node { ident, directory, names: Vec::new(), lookups: 0, children: 0 });
        self.by_ident.insert(ident, id);
        self.next = self.next.max(id.saturating_add(1));
    }

    fn attach(&mut self, id: u64, parent: u64, name: &FileName) {
        if id == parent || !self.contains(parent) || !self.nodes.contains_key(&id) {
            return;
        }
        // Held meanwhile, because an id without any other name would be swept.
        self.adjust_children(id, true);
        self.adjust_children(parent, true);
        self.detach(parent, name);
        let node = &self.nodes[&id];
        let most = match node.directory {
            true => 1,
            false if self.by_name.len() >= NODES_MAX => NAMES_MAX_CROWDED,
            false => NAMES_MAX,
        };
        let surplus = (node.names.len() + 1).saturating_sub(most);
        let lost: Vec<_> = node.names.iter().take(surplus).cloned().collect();
        for (parent, name) in lost {
            self.detach(parent, &name);
        }
        self.by_name.insert((parent, name.clone()), id);
        if let Some(node) = self.nodes.get_mut(&id) {
            node.names.push((parent, name.clone()));
        }
        self.adjust_children(parent, true); // for the name, until it is detached
        self.adjust_children(id, false);
        self.adjust_children(parent, false);
    }

    fn detach(&mut self, parent: u64, name: &FileName) {
        let Some(id) = self.by_name.remove(&(parent, name.clone())) else { return };
        if let Some(node) = self.nodes.get_mut(&id) {
            node.names.retain(|(p, n)| (*p, n) != (parent, name));
        }
        self.adjust_children(parent, false);
        self.sweep(parent);
        self.sweep(id);
    }

    fn adjust_children(&mut self, id: u64, more: bool) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.children = if more { node.children + 1 } else { node.children.saturating_sub(1) };
        }
    }

    /// Drops an id without look-ups and children, then its parents if they have none left.
    fn sweep(&mut self, id: u64) {
        let mut idle = vec![id];
        while let Some(id) = idle.pop() {
            if self.nodes.get(&id).is_none_or(|node| node.lookups > 0 || node.children > 0) {
                continue;
            }
            let Some(node) = self.nodes.remove(&id) else { continue };
            self.by_ident.remove(&node.ident);
            for (parent, name) in node.names {
                self.by_name.remove(&(parent, name));
                self.adjust_children(parent, false);
                idle.push(parent);
            }
        }
    }

    fn reidentify(&mut self, id: u64, ident: Ident) {
        if self.by_ident.contains_key(&ident) {
            return;
        }
        if let Some(node) = self.nodes.get_mut(&id) {
            self.by_ident.remove(&node.ident);
            node.ident = ident;
            self.by_ident.insert(ident, id);
        }
    }
}

#[cfg(test)]
impl Nodes {
    /// Number of ids, without the root.
    pub(super) fn count(&self) -> usize {
        self.nodes.len()
    }
}
