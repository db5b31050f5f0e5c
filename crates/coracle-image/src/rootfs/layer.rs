//! One layer: its archive becomes a tree of its own, which then goes under the layers read before.

use std::{collections::BTreeSet, io::Read};

use super::{
    Unpacked,
    path::{self, Name},
    tree::{Child, Content, Dir, DirId, Found, Inode, InodeId, Tree},
};
use crate::{
    ImageError, Limits,
    erofs::{self, CopyError, DataWriter, INLINE_MAX, Meta, mode},
    limits::NAME_BYTES_MAX,
    tarball::{self, Kind, Member, read_error, shown},
};

/// Reads one archive.
pub(super) struct LayerReader<'a> {
    pub(super) tree: &'a mut Tree,
    /// What the layers above make of the tree.
    pub(super) upper: DirId,
    /// This layer's own root.
    pub(super) root: DirId,
    pub(super) data: &'a mut DataWriter,
    /// Bytes of small files that may still be held in memory.
    pub(super) inline_left: &'a mut u64,
    /// Members whose bytes are wanted although the layers above hide them: a hard link shows them elsewhere.
    pub(super) forced: &'a BTreeSet<u64>,
    /// Members that turned out to be wanted in this pass.
    pub(super) wanted: BTreeSet<u64>,
    pub(super) limits: &'a Limits,
}

impl LayerReader<'_> {
    /// Reads all members, then the rest of the stream.
    pub(super) fn read(&mut self, stream: &mut Unpacked<'_>) -> Result<(), ImageError> {
        let limits = self.limits;
        let mut archive = tarball::Reader::new(stream, limits);
        let mut number = 0;
        while let Some(member) = archive.next_member()? {
            archive.input_mut().count_entry()?;
            self.member(member, number, &mut archive)?;
            number += 1;
        }
        archive.drain()
    }

    fn member(&mut self, member: Member, number: u64, data: &mut impl Read) -> Result<(), ImageError> {
        let limits = self.limits;
        let path = member.path.clone();
        match path::judge(&path, limits)? {
            Name::Ignored => Ok(()),
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

    /// Whiteouts speak of lower layers only, wherever they stand in the archive.
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
                // It replaces a file of this layer or follows a whiteout: nothing of lower layers shows in
                // it.
                let child = if found.is_some() { Dir::in_place_of_another() } else { Dir::default() };
                let child = self.tree.new_dir(child)?;
                self.tree.dir_mut(dir).children.insert(name.into(), Child::Dir(child));
                Ok(child)
            }
        }
    }

    fn directory(&mut self, dir: DirId, member: Member) -> Result<(), ImageError> {
        if member.kind != Kind::Dir {
            return Err(ImageError::hostile("the root of the image is no directory"));
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
                    "{} is a directory in a place of a file",
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

    /// A link to what the archive has shown so far, else to what it or a lower layer will show.
    fn hard_link(&mut self, member: &Member, target: &[u8], hidden: bool) -> Result<Content, ImageError> {
        let parts = path::components(target, self.limits)?;
        match self.tree.find(self.root, &parts) {
            Found::Leaf(inode) => {
                let inode = self.tree.follow(inode);
                if !hidden {
                    want(self.tree, inode, &mut self.wanted);
                }
                Ok(Content::Alias(inode))
            }
            Found::Dir => Err(bad_link(&member.path, target, "is a directory")),
            Found::Hidden | Found::Nothing => Ok(Content::Pending(parts.join(&b'/').into())),
        }
    }
}

/// What became of waiting links.
pub(super) struct Bound {
    /// Those that wait for lower layers.
    pub(super) still: Vec<InodeId>,
    /// Those whose target was found: link and target.
    pub(super) bound: Vec<(InodeId, InodeId)>,
}

/// Joins waiting links with what the layer at `root` has, now that it is complete.
pub(super) fn bind(
    tree: &mut Tree,
    root: DirId,
    waiting: &[InodeId],
    wanted: &mut BTreeSet<u64>,
) -> Result<Bound, ImageError> {
    let (mut still, mut bound) = (Vec::new(), Vec::new());
    for &link in waiting {
        let Content::Pending(target) = &tree.inode(link).content else { continue };
        let parts: Vec<&[u8]> = target.split(|b| *b == b'/').collect();
        match tree.find(root, &parts) {
            Found::Nothing => still.push(link),
            Found::Leaf(inode) => {
                let inode = resolve(tree, inode, &bound);
                if inode == link {
                    return Err(bad_link(b"", target, "is the link itself"));
                }
                want(tree, inode, wanted);
                bound.push((link, inode));
            }
            Found::Dir => return Err(bad_link(b"", target, "is a directory")),
            Found::Hidden => return Err(bad_link(b"", target, "does not exist")),
        }
    }
    Ok(Bound { still, bound })
}

/// Follows aliases, those decided in this round included, so that two links never come to lead to each other.
fn resolve(tree: &Tree, start: InodeId, bound: &[(InodeId, InodeId)]) -> InodeId {
    let mut id = tree.follow(start);
    while let Some((_, to)) = bound.iter().find(|(link, _)| *link == id) {
        id = tree.follow(*to);
    }
    id
}

fn want(tree: &Tree, inode: InodeId, wanted: &mut BTreeSet<u64>) {
    if let Content::Skipped(number) = tree.inode(inode).content {
        wanted.insert(number);
    }
}

pub(super) fn bad_link(path: &[u8], target: &[u8], why: &str) -> ImageError {
    let name = if path.is_empty() { String::new() } else { format!("{} to ", shown(path)) };
    ImageError::hostile(format!("hard link {name}{}: the target {why}", shown(target)))
}

fn symlink(member: &Member, target: &[u8], limits: &Limits) -> Result<Content, ImageError> {
    // The kernel holds a target and its closing zero in one page.
    if target.is_empty() || target.contains(&0) || target.len() >= limits.path_bytes.min(4096) {
        return Err(ImageError::hostile(format!(
            "symbolic link {} has an impossible target",
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
