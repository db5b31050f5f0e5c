//! Tree of names while layers are merged. Holds metadata only.

use std::collections::BTreeMap;

use crate::{
    ImageError,
    erofs::{Meta, mode},
    tarball::shown,
};

/// Metadata of a directory that no layer describes: like root's `mkdir`, at time 0.
pub(super) static IMPLIED: Meta =
    Meta { mode: mode::DIR | 0o755, uid: 0, gid: 0, mtime: (0, 0), xattrs: Vec::new() };

/// Index of a directory in [`Tree::dirs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DirId(pub(super) u32);

/// Index of an inode in [`Tree::inodes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct InodeId(pub(super) u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Child {
    Dir(DirId),
    Leaf(InodeId),
    /// Whiteout: hides the name in lower layers.
    Whiteout,
}

#[derive(Debug, Default)]
pub(super) struct Dir {
    /// Metadata; `None` when the layers have no entry for the directory, only for members below it.
    pub(super) meta: Option<Meta>,
    pub(super) children: BTreeMap<Box<[u8]>, Child>,
    /// True when the entries of lower layers in this directory are hidden.
    pub(super) opaque: bool,
}

impl Dir {
    /// Empty directory that replaces another kind of file. It merges nothing from lower layers, not even attributes.
    pub(super) fn opaque_replacement() -> Self {
        let mut dir = Self::default();
        dir.cover();
        dir
    }

    /// Hides everything that lower layers have under the name of this directory.
    pub(super) fn cover(&mut self) {
        self.opaque = true;
        self.meta.get_or_insert_with(|| IMPLIED.clone());
    }
}

/// File of any kind other than a directory.
#[derive(Debug)]
pub(super) struct Inode {
    pub(super) meta: Meta,
    pub(super) content: Content,
}

#[derive(Debug)]
pub(super) enum Content {
    /// Small file.
    Inline(Box<[u8]>),
    Blocks {
        block: u32,
        size: u64,
    },
    /// Hidden file whose bytes were skipped. Holds the number of its member in the archive.
    Skipped(u64),
    Symlink(Box<[u8]>),
    Device {
        major: u32,
        minor: u32,
    },
    Fifo,
    /// Hard link to another inode.
    Alias(InodeId),
    /// Hard link to a path not read yet: later in this layer, or in a lower layer.
    Pending(Box<[u8]>),
    /// Invalid hard link and the reason. An error if visible, ignored if upper layers hide it.
    Broken(Box<[u8]>, &'static str),
}

/// Arena of the layers read so far and the layer being read: a merge does not move names.
#[derive(Debug, Default)]
pub(super) struct Tree {
    pub(super) dirs: Vec<Dir>,
    pub(super) inodes: Vec<Inode>,
}

/// Position to which [`Tree::rewind`] returns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark(usize, usize);

/// Result of a lookup within one layer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    Leaf(InodeId),
    Dir,
    /// The layer hides the path of lower layers.
    Hidden,
    /// The layer has no entry for the path.
    Nothing,
}

impl Tree {
    pub(super) fn mark(&self) -> Mark {
        Mark(self.dirs.len(), self.inodes.len())
    }

    /// Drops everything added since `mark`. Older entries must not refer to dropped ones.
    pub(super) fn rewind(&mut self, mark: Mark) {
        self.dirs.truncate(mark.0);
        self.inodes.truncate(mark.1);
    }

    pub(super) fn dir(&self, id: DirId) -> &Dir {
        &self.dirs[id.0 as usize]
    }

    pub(super) fn dir_mut(&mut self, id: DirId) -> &mut Dir {
        &mut self.dirs[id.0 as usize]
    }

    pub(super) fn inode(&self, id: InodeId) -> &Inode {
        &self.inodes[id.0 as usize]
    }

    pub(super) fn new_dir(&mut self, dir: Dir) -> Result<DirId, ImageError> {
        let id = u32::try_from(self.dirs.len())
            .map_err(|_| ImageError::hostile("more directories than can be counted"))?;
        self.dirs.push(dir);
        Ok(DirId(id))
    }

    pub(super) fn new_inode(&mut self, inode: Inode) -> Result<InodeId, ImageError> {
        let id = u32::try_from(self.inodes.len())
            .map_err(|_| ImageError::hostile("more files than can be counted"))?;
        self.inodes.push(inode);
        Ok(InodeId(id))
    }

    /// Directory at `path`, created if missing. Fails if the path leads through a file of this layer.
    pub(super) fn ensure_dir(&mut self, root: DirId, path: &[&[u8]]) -> Result<DirId, ImageError> {
        let mut at = root;
        for name in path {
            at = match self.dir(at).children.get(*name) {
                Some(Child::Dir(dir)) => *dir,
                Some(Child::Leaf(_)) => {
                    let path = path.join(&b'/');
                    return Err(ImageError::hostile(format!(
                        "path {} leads through {}, which is not a directory",
                        shown(&path),
                        shown(name)
                    )));
                }
                found => {
                    // A whiteout of the same name hides lower layers, and the new directory keeps hiding them.
                    let dir = if found.is_some() { Dir::opaque_replacement() } else { Dir::default() };
                    let dir = self.new_dir(dir)?;
                    self.dir_mut(at).children.insert((*name).into(), Child::Dir(dir));
                    dir
                }
            };
        }
        Ok(at)
    }

    /// True when the layers at `root` hide a file at `path` of a lower layer.
    pub(super) fn hides(&self, root: DirId, path: &[&[u8]], name: &[u8]) -> bool {
        let mut at = self.dir(root);
        for part in path {
            match at.children.get(*part) {
                Some(Child::Dir(dir)) => at = self.dir(*dir),
                Some(Child::Leaf(_) | Child::Whiteout) => return true,
                None => return at.opaque,
            }
        }
        at.opaque || at.children.contains_key(name)
    }

    /// Looks `path` up in one layer.
    pub(super) fn find(&self, root: DirId, path: &[&[u8]]) -> Lookup {
        let mut at = self.dir(root);
        for (place, part) in path.iter().enumerate() {
            let last = place + 1 == path.len();
            match at.children.get(*part) {
                Some(Child::Dir(dir)) => at = self.dir(*dir),
                Some(Child::Leaf(inode)) if last => return Lookup::Leaf(*inode),
                Some(Child::Leaf(_) | Child::Whiteout) => return Lookup::Hidden,
                None if at.opaque => return Lookup::Hidden,
                None => return Lookup::Nothing,
            }
        }
        Lookup::Dir
    }

    /// Inode at the end of a chain of aliases.
    pub(super) fn follow(&self, mut id: InodeId) -> InodeId {
        // Chains have no loops: an alias is only created to an inode that does not lead back (see `layer::bind`).
        while let Content::Alias(to) = self.inode(id).content {
            id = to;
        }
        id
    }

    /// Merges the layer at `lower` under everything at `upper`.
    pub(super) fn merge_lower(&mut self, upper: DirId, lower: DirId) {
        let mut pairs = vec![(upper, lower)];
        while let Some((upper, lower)) = pairs.pop() {
            let below = std::mem::take(self.dir_mut(lower));
            let here = self.dir_mut(upper);
            if here.opaque {
                here.meta = here.meta.take().or(below.meta);
                continue;
            }
            here.opaque = below.opaque;
            here.meta = here.meta.take().or(below.meta);
            for (name, child) in below.children {
                let above = self.dir(upper).children.get(&name).copied();
                match (above, child) {
                    (None, _) => drop(self.dir_mut(upper).children.insert(name, child)),
                    (Some(Child::Dir(a)), Child::Dir(b)) => pairs.push((a, b)),
                    // The file or whiteout hides all lower layers in this directory.
                    (Some(Child::Dir(a)), Child::Leaf(_) | Child::Whiteout) => self.dir_mut(a).cover(),
                    (Some(Child::Leaf(_) | Child::Whiteout), _) => {}
                }
            }
        }
    }
}
