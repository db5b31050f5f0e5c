//! Tree of names while layers are merged. Metadata only.

use std::collections::BTreeMap;

use crate::{
    ImageError,
    erofs::{Meta, mode},
    tarball::shown,
};

/// Metadata of a directory that no layer describes: as root's `mkdir` creates it, at time 0.
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
    /// Hides the name in lower layers.
    Whiteout,
}

#[derive(Debug, Default)]
pub(super) struct Dir {
    /// `None` while only members below it were read.
    pub(super) meta: Option<Meta>,
    pub(super) children: BTreeMap<Box<[u8]>, Child>,
    /// Hides the entries of lower layers in this directory.
    pub(super) opaque: bool,
}

impl Dir {
    /// Empty directory at the path of another kind of file: merges nothing from lower layers, attributes
    /// included.
    pub(super) fn in_place_of_another() -> Self {
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
    /// Hidden file whose bytes were skipped, with the number of its member in the archive.
    Skipped(u64),
    Symlink(Box<[u8]>),
    Device {
        major: u32,
        minor: u32,
    },
    Fifo,
    /// Hard link to another inode.
    Alias(InodeId),
    /// Hard link to a path that was not read yet: later in this layer, or in a lower one.
    Pending(Box<[u8]>),
    /// Invalid hard link and its reason: an error if visible, ignored if upper layers hide it.
    Broken(Box<[u8]>, &'static str),
}

/// Layers read so far and the one being read, in one arena: a merge moves no names.
#[derive(Debug, Default)]
pub(super) struct Tree {
    pub(super) dirs: Vec<Dir>,
    pub(super) inodes: Vec<Inode>,
}

/// State to which [`Tree::rewind`] returns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark(usize, usize);

/// Result of a lookup within one layer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    Leaf(InodeId),
    Dir,
    /// The layer hides the path in lower layers.
    Hidden,
    /// The layer has no entry for it.
    Nothing,
}

impl Tree {
    pub(super) fn mark(&self) -> Mark {
        Mark(self.dirs.len(), self.inodes.len())
    }

    /// Drops everything added since `mark`. Older entries must not refer to it.
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

    /// Directory at `path`, created if missing. Fails for a path through a file of this layer.
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
                    // A whiteout of the same name concerns lower layers; the new directory keeps hiding them.
                    let dir = if found.is_some() { Dir::in_place_of_another() } else { Dir::default() };
                    let dir = self.new_dir(dir)?;
                    self.dir_mut(at).children.insert((*name).into(), Child::Dir(dir));
                    dir
                }
            };
        }
        Ok(at)
    }

    /// True when a file at `path` of a lower layer is hidden by the layers at `root`.
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

    /// Inode at the end of a chain of links.
    pub(super) fn follow(&self, mut id: InodeId) -> InodeId {
        // No chain is a loop: an alias is only created to an inode that does not lead back (see
        // `layer::bind`).
        while let Content::Alias(to) = self.inode(id).content {
            id = to;
        }
        id
    }

    /// Merges the layer at `lower` under everything at `upper`.
    pub(super) fn lay_under(&mut self, upper: DirId, lower: DirId) {
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
                    // A file or a whiteout hides still lower layers in this directory.
                    (Some(Child::Dir(a)), Child::Leaf(_) | Child::Whiteout) => self.dir_mut(a).cover(),
                    (Some(Child::Leaf(_) | Child::Whiteout), _) => {}
                }
            }
        }
    }
}
