//! Reads one layer into a tree of its own, which is then merged under the layers above.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io::Read,
};

use super::tree::{Child, Content, Dir, DirId, Inode, InodeId, Lookup, Tree};
use crate::{
    DecompressReader, ImageError, Limits,
    erofs::{self, CopyError, DataWriter, INLINE_MAX, Meta, mode},
    limits::NAME_BYTES_MAX,
    tarball::{
        self, Kind, Member,
        path::{self, Name},
        read_error, shown,
    },
};

/// Memory charged for a directory and for an inode, in addition to names and attributes, bytes.
const DIR_BYTES: u64 = 256;
const INODE_BYTES: u64 = 192;

/// Bytes of memory that a member keeps.
pub(crate) fn kept_bytes(member: &Member) -> u64 {
    let xattrs: usize = member.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
    INODE_BYTES + (member.path.len() + xattrs) as u64
}

/// Reader of the archive of one layer.
pub(super) struct LayerReader<'a> {
    pub(super) tree: &'a mut Tree,
    /// Tree of the layers above.
    pub(super) upper: DirId,
    /// Root of this layer.
    pub(super) root: DirId,
    pub(super) data: &'a mut DataWriter,
    /// Bytes of small files that may still be held in memory.
    pub(super) inline_left: &'a mut u64,
    /// Hidden members whose bytes are needed by a hard link: found by the pass before.
    pub(super) forced: &'a BTreeSet<u64>,
    /// Hidden members that this pass found to be needed.
    pub(super) wanted: BTreeSet<u64>,
    /// AUFS hard-link targets by name. They are in no directory of the tree.
    pub(super) aufs: BTreeMap<Box<[u8]>, InodeId>,
    pub(super) limits: &'a Limits,
}

impl LayerReader<'_> {
    /// Reads all members, then the rest of the stream.
    pub(super) fn read(&mut self, stream: &mut DecompressReader<'_>) -> Result<(), ImageError> {
        let limits = self.limits;
        let mut archive = tarball::Reader::new(stream, limits);
        let mut number = 0;
        while let Some(member) = archive.next_member()? {
            archive.input_mut().count_entry()?;
            archive.input_mut().charge_metadata(kept_bytes(&member))?;
            let dirs = self.tree.dirs.len();
            self.member(member, number, &mut archive)?;
            // Parent directories that have no entry of their own are not counted as entries.
            let made = self.tree.dirs.len().saturating_sub(dirs) as u64;
            archive.input_mut().charge_metadata(made * DIR_BYTES)?;
            number += 1;
        }
        archive.drain()
    }

    fn member(&mut self, member: Member, number: u64, data: &mut impl Read) -> Result<(), ImageError> {
        let limits = self.limits;
        let path = member.path.clone();
        match path::classify(&path, limits)? {
            Name::Ignored => self.aufs_link(member, number, data),
            Name::Root => self.directory(self.root, member),
            Name::Opaque { dir } => {
                let dir = self.tree.ensure_dir(self.root, &dir)?;
                self.tree.dir_mut(dir).opaque = true;
                Ok(())
            }
            Name::Whiteout { above, name } => {
                let dir = self.tree.ensure_dir(self.root, &above)?;
                self.whiteout(dir, name);
                Ok(())
            }
            Name::Entry { above, name } => {
                let dir = self.tree.ensure_dir(self.root, &above)?;
                if member.kind == Kind::Dir {
                    let child = self.ensure_child(dir, name)?;
                    return self.directory(child, member);
                }
                let hidden = self.tree.hides(self.upper, &above, name);
                let inode = self.inode(member, number, hidden, data)?;
                self.tree.dir_mut(dir).children.insert(name.into(), Child::Leaf(inode));
                Ok(())
            }
        }
    }

    /// Keeps a file that hard links of this layer may name, as docker does. Skips other AUFS metadata.
    fn aufs_link(&mut self, member: Member, number: u64, data: &mut impl Read) -> Result<(), ImageError> {
        let path = member.path.clone();
        if let (Some(name), Kind::File) =
            (path::aufs_link(&path::components(&path, self.limits)?), &member.kind)
        {
            let inode = self.inode(member, number, true, data)?;
            self.aufs.insert(name.into(), inode);
        }
        Ok(())
    }

    /// Adds a whiteout. It hides names of lower layers only, wherever it is in the archive.
    fn whiteout(&mut self, dir: DirId, name: &[u8]) {
        match self.tree.dir(dir).children.get(name).copied() {
            None => drop(self.tree.dir_mut(dir).children.insert(name.into(), Child::Whiteout)),
            Some(Child::Dir(child)) => self.tree.dir_mut(child).cover(),
            Some(Child::Leaf(_) | Child::Whiteout) => {}
        }
    }

    fn ensure_child(&mut self, dir: DirId, name: &[u8]) -> Result<DirId, ImageError> {
        match self.tree.dir(dir).children.get(name).copied() {
            Some(Child::Dir(child)) => Ok(child),
            found => {
                // The directory replaces a file of this layer or follows a whiteout: it hides the entries of lower layers.
                let child = if found.is_some() { Dir::opaque_replacement() } else { Dir::default() };
                let child = self.tree.new_dir(child)?;
                self.tree.dir_mut(dir).children.insert(name.into(), Child::Dir(child));
                Ok(child)
            }
        }
    }

    fn directory(&mut self, dir: DirId, member: Member) -> Result<(), ImageError> {
        if member.kind != Kind::Dir {
            return Err(ImageError::hostile("the root of the image is not a directory"));
        }
        self.tree.dir_mut(dir).meta = Some(meta(&member, mode::DIR, self.limits)?);
        Ok(())
    }

    fn inode(
        &mut self,
        member: Member,
        number: u64,
        hidden: bool,
        data: &mut impl Read,
    ) -> Result<InodeId, ImageError> {
        let (kind, content) = match &member.kind {
            Kind::File => (mode::FILE, self.file(&member, number, hidden, data)?),
            Kind::Symlink(target) => (mode::SYMLINK, symlink(&member, target, self.limits)?),
            Kind::HardLink(target) => (mode::FILE, self.hard_link(&member, target, hidden)?),
            Kind::Char { major, minor } => (mode::CHAR, Content::Device { major: *major, minor: *minor }),
            Kind::Block { major, minor } => (mode::BLOCK, Content::Device { major: *major, minor: *minor }),
            Kind::Fifo => (mode::FIFO, Content::Fifo),
            Kind::Dir => {
                return Err(ImageError::hostile(format!(
                    "{} is a directory and a file",
                    shown(&member.path)
                )));
            }
        };
        let meta = meta(&member, kind, self.limits)?;
        self.tree.new_inode(Inode { meta, content })
    }

    fn file(
        &mut self,
        member: &Member,
        number: u64,
        hidden: bool,
        data: &mut impl Read,
    ) -> Result<Content, ImageError> {
        let size = member.size_bytes;
        if hidden && !self.forced.contains(&number) {
            return Ok(Content::Skipped(number));
        }
        if size <= INLINE_MAX as u64 && size <= *self.inline_left {
            let mut bytes = Vec::new();
            data.read_to_end(&mut bytes).map_err(read_error)?;
            *self.inline_left -= size;
            return Ok(Content::Inline(bytes.into()));
        }
        match self.data.copy(data, size) {
            Ok(block) => Ok(Content::Blocks { block, size }),
            Err(CopyError::Read(e)) => Err(read_error(e)),
            Err(CopyError::Write(e)) => Err(ImageError::io("write", "a root file system", e)),
        }
    }

    /// Resolves a hard link to a member that was read already. Otherwise the target may come later, or be in a lower layer.
    fn hard_link(&mut self, member: &Member, target: &[u8], hidden: bool) -> Result<Content, ImageError> {
        let broken = |why| Ok(Content::Broken(target.into(), why));
        let parts = match path::components(target, self.limits) {
            Err(_) if hidden => return broken("is not in the image"),
            parts => parts?,
        };
        let found = match path::aufs_link(&parts) {
            Some(name) => self.aufs.get(name).map_or(Lookup::Hidden, |inode| Lookup::Leaf(*inode)),
            None => self.tree.find(self.root, &parts),
        };
        match found {
            Lookup::Leaf(inode) => {
                let inode = self.tree.follow(inode);
                if !hidden {
                    add_wanted(self.tree, inode, &mut self.wanted);
                }
                Ok(Content::Alias(inode))
            }
            Lookup::Dir if hidden => broken("is a directory"),
            Lookup::Dir => Err(bad_link(&member.path, target, "is a directory")),
            Lookup::Hidden | Lookup::Nothing => Ok(Content::Pending(parts.join(&b'/').into())),
        }
    }
}

/// State of pending links after a layer.
pub(super) struct Bound {
    /// Links that still wait for lower layers.
    pub(super) still: Vec<InodeId>,
    /// Resolved links.
    pub(super) bound: Vec<(InodeId, Content)>,
}

/// Resolves pending links in the complete layer at `root`.
pub(super) fn bind(tree: &Tree, root: DirId, waiting: &[InodeId], wanted: &mut BTreeSet<u64>) -> Bound {
    let (mut still, mut aliases, mut broken) = (Vec::new(), HashMap::new(), Vec::new());
    for &link in waiting {
        let Content::Pending(target) = &tree.inode(link).content else { continue };
        let parts: Vec<&[u8]> = target.split(|b| *b == b'/').collect();
        let why = match tree.find(root, &parts) {
            Lookup::Nothing => {
                still.push(link);
                continue;
            }
            Lookup::Leaf(inode) => match resolve(tree, inode, &mut aliases) {
                inode if inode == link => "is the link itself",
                inode => {
                    add_wanted(tree, inode, wanted);
                    aliases.insert(link, inode);
                    continue;
                }
            },
            Lookup::Dir => "is a directory",
            Lookup::Hidden => "does not exist",
        };
        broken.push((link, Content::Broken(target.clone(), why)));
    }
    let links: Vec<InodeId> = aliases.keys().copied().collect();
    let bound = links.into_iter().map(|link| (link, Content::Alias(resolve(tree, link, &mut aliases))));
    let bound = bound.chain(broken).collect();
    Bound { still, bound }
}

/// Follows aliases, including those resolved in this round, so that no two links refer to each other. Shortens the path for
/// later calls.
fn resolve(tree: &Tree, start: InodeId, aliases: &mut HashMap<InodeId, InodeId>) -> InodeId {
    let (mut id, mut passed) = (tree.follow(start), Vec::new());
    while let Some(to) = aliases.get(&id) {
        passed.push(id);
        id = tree.follow(*to);
    }
    for link in passed {
        aliases.insert(link, id);
    }
    id
}

fn add_wanted(tree: &Tree, inode: InodeId, wanted: &mut BTreeSet<u64>) {
    if let Content::Skipped(number) = tree.inode(inode).content {
        wanted.insert(number);
    }
}

pub(super) fn bad_link(path: &[u8], target: &[u8], why: &str) -> ImageError {
    let name = if path.is_empty() { String::new() } else { format!("{} to ", shown(path)) };
    ImageError::hostile(format!("hard link {name}{}: the target {why}", shown(target)))
}

fn symlink(member: &Member, target: &[u8], limits: &Limits) -> Result<Content, ImageError> {
    // The kernel stores a target and its terminating zero in one page.
    if target.is_empty() || target.contains(&0) || target.len() >= limits.path_bytes.min(4096) {
        return Err(ImageError::hostile(format!(
            "symbolic link {} has an invalid target",
            shown(&member.path)
        )));
    }
    Ok(Content::Symlink(target.into()))
}

fn meta(member: &Member, kind: u16, limits: &Limits) -> Result<Meta, ImageError> {
    let bytes: usize = member.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
    if bytes > limits.xattr_bytes || member.xattrs.keys().any(|name| name.len() > NAME_BYTES_MAX) {
        return Err(ImageError::hostile(format!(
            "{} has extended attributes of {bytes} bytes",
            shown(&member.path)
        )));
    }
    let xattrs = erofs::encode_xattrs(&member.xattrs);
    Ok(Meta { mode: kind | member.mode, uid: member.uid, gid: member.gid, mtime: member.mtime, xattrs })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds a long chain of links that is resolved front to back, and as many links to its first link. Quadratic time would
    /// take hours.
    #[test]
    fn pending_hard_links_take_linear_time() {
        const LINKS: u32 = 150_000;
        let mut tree = Tree::default();
        let root = tree.new_dir(Dir::default()).unwrap();
        let mut add = |name: String, content| {
            let meta = Meta { mode: mode::FILE, uid: 0, gid: 0, mtime: (0, 0), xattrs: Vec::new() };
            let inode = tree.new_inode(Inode { meta, content }).unwrap();
            tree.dir_mut(root).children.insert(name.as_bytes().into(), Child::Leaf(inode));
            inode
        };
        let pending = |target: String| Content::Pending(target.into_bytes().into());
        let chain: Vec<InodeId> =
            (0..LINKS).map(|n| add(n.to_string(), pending((n + 1).to_string()))).collect();
        let file = add(LINKS.to_string(), Content::Skipped(7));
        let fan: Vec<InodeId> = (0..LINKS).map(|n| add(format!("f{n}"), pending("0".to_owned()))).collect();
        let (even, odd): (Vec<_>, Vec<_>) = chain.into_iter().partition(|link| link.0 % 2 == 0);
        let waiting = [even, odd, fan].concat();
        let mut wanted = BTreeSet::new();
        let bound = bind(&tree, root, &waiting, &mut wanted).bound;
        assert_eq!((bound.len(), wanted), (waiting.len(), BTreeSet::from([7])));
        let leads_to_file = |content: &Content| matches!(content, Content::Alias(to) if *to == file);
        assert!(bound.iter().all(|(_, content)| leads_to_file(content)), "none leads through another");
    }
}
