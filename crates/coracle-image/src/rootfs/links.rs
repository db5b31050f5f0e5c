//! Members whose path leads through a symbolic link of a lower layer.
//!
//! A layer with `bin/tool` and no entry for `bin`, above a layer with `bin -> usr/bin`, means `usr/bin/tool`: unpackers follow
//! links within the root at the time of writing (containerd `archive.Apply`, umoci `unpack`). This crate reads layers from the
//! topmost to the lowest and moves names instead: entries below a directory without an entry of its own move to the target of
//! the link, before the lower layer is merged. Only names in memory are moved: no link leads out of the tree.

use super::tree::{Child, Content, Dir, DirId, Lookup, Tree};
use crate::{ImageError, limits::NAME_BYTES_MAX, tarball::shown};

/// Limit of links in one path, as in Linux (`MAXSYMLINKS`, path_resolution(7)).
const LINKS_MAX: usize = 40;
/// Limit of directories created for targets of links, per layer. Real images need a handful.
const DIRS_MAX: usize = 1 << 16;

/// Path as names from the root.
type Path = Vec<Box<[u8]>>;

/// Directory of the upper layers at the path of a symbolic link of the lower layer.
struct Crossing {
    /// Path of the parent directory.
    above: Path,
    name: Box<[u8]>,
    /// Target of the link.
    target: Box<[u8]>,
}

impl Tree {
    /// Moves entries of `upper` below directories without entries of their own to the targets of links of `lower`. Call it
    /// before `lower` is merged under `upper`.
    ///
    /// # Errors
    /// `OciError::Hostile` when links form a loop, or lead to too many directories.
    pub(super) fn follow_links(&mut self, upper: DirId, lower: DirId) -> Result<(), ImageError> {
        let mut dirs_left = DIRS_MAX;
        for _ in 0..=LINKS_MAX {
            let crossings = self.crossings(upper, lower);
            if crossings.is_empty() {
                return Ok(());
            }
            for crossing in crossings {
                self.cross(upper, crossing, &mut dirs_left)?;
            }
        }
        Err(ImageError::hostile("the path of a member leads through too many symbolic links"))
    }

    /// Finds directories without an entry of their own at the path of a link.
    fn crossings(&self, upper: DirId, lower: DirId) -> Vec<Crossing> {
        let mut found = Vec::new();
        let (upper_root, lower_root) = (upper, lower);
        let mut pairs = vec![(upper, lower, Path::new())];
        while let Some((upper, lower, path)) = pairs.pop() {
            if self.dir(upper).opaque {
                continue; // hides the whole lower layer
            }
            for (name, child) in &self.dir(upper).children {
                let Child::Dir(above) = *child else { continue };
                match self.dir(lower).children.get(name) {
                    Some(Child::Dir(below)) => {
                        let path = path.iter().chain([name]).cloned().collect();
                        pairs.push((above, *below, path));
                    }
                    Some(Child::Leaf(inode)) if self.dir(above).meta.is_none() => {
                        if let Content::Symlink(target) = &self.inode(*inode).content
                            && !self.ends_at_file((upper_root, lower_root), &path, target)
                        {
                            let (name, target) = (name.clone(), target.clone());
                            found.push(Crossing { above: path.clone(), name, target });
                        }
                    }
                    _ => {}
                }
            }
        }
        found
    }

    /// True when a link in the directory `above` leads to or through a file in these two layers. The directory then replaces
    /// the link.
    fn ends_at_file(&self, layers: (DirId, DirId), above: &Path, target: &[u8]) -> bool {
        let (mut at, mut todo, mut links_left) = (above.clone(), Path::new(), LINKS_MAX);
        push(&mut todo, &mut at, target, 0);
        while let Some(name) = todo.pop() {
            match &*name {
                b"" | b"." => continue,
                b".." => {
                    at.pop();
                    continue;
                }
                _ => at.push(name),
            }
            let names: Vec<&[u8]> = at.iter().map(|name| &**name).collect();
            let found = match self.find(layers.0, &names) {
                Lookup::Nothing => self.find(layers.1, &names),
                found => found,
            };
            let Lookup::Leaf(inode) = found else { continue };
            let Content::Symlink(target) = &self.inode(self.follow(inode)).content else { return true };
            // The move itself reports too many links.
            let Some(left) = links_left.checked_sub(1) else { return false };
            links_left = left;
            at.pop();
            push(&mut todo, &mut at, target, 0);
        }
        false
    }

    /// Moves the entries of one directory. If the link leads through a file, the directory stays and replaces the link.
    fn cross(&mut self, root: DirId, crossing: Crossing, dirs_left: &mut usize) -> Result<(), ImageError> {
        let Crossing { above, name, target } = crossing;
        let Some(stack) = self.walk(root, &above) else { return Ok(()) };
        let Some(&parent) = stack.last() else { return Ok(()) };
        let Some(Child::Dir(moved)) = self.dir(parent).children.get(&name).copied() else { return Ok(()) };
        self.dir_mut(parent).children.remove(&name);
        match self.resolve_target(stack, &target, dirs_left)? {
            Some(to) => self.merge(to, moved),
            None => {
                self.dir_mut(moved).cover();
                self.dir_mut(parent).children.insert(name, Child::Dir(moved));
            }
        }
        Ok(())
    }

    /// Directories from the root to `path`. `None` when an earlier move removed one of them.
    fn walk(&self, root: DirId, path: &Path) -> Option<Vec<DirId>> {
        let mut stack = vec![root];
        for name in path {
            let Some(Child::Dir(dir)) = self.dir(*stack.last()?).children.get(name) else { return None };
            stack.push(*dir);
        }
        Some(stack)
    }

    /// Directory that `target` names for a link in the last directory of `stack`. Created if no layer read so far has it.
    /// `None` when a file is in the way.
    fn resolve_target(
        &mut self,
        mut stack: Vec<DirId>,
        target: &[u8],
        dirs_left: &mut usize,
    ) -> Result<Option<DirId>, ImageError> {
        let mut links_left = LINKS_MAX;
        let mut todo = Path::new();
        push(&mut todo, &mut stack, target, 1);
        while let Some(name) = todo.pop() {
            let Some(&at) = stack.last() else { return Ok(None) };
            match &*name {
                b"" | b"." => {}
                b".." if stack.len() == 1 => {}
                b".." => drop(stack.pop()),
                _ => match self.dir(at).children.get(&name).copied() {
                    Some(Child::Dir(dir)) => stack.push(dir),
                    Some(Child::Leaf(inode)) => {
                        let Content::Symlink(target) = &self.inode(self.follow(inode)).content else {
                            return Ok(None);
                        };
                        let target = target.clone();
                        links_left = links_left.checked_sub(1).ok_or_else(|| link_loop_error(&target))?;
                        push(&mut todo, &mut stack, &target, 1);
                    }
                    found => stack.push(self.create_dir(at, name, found.is_some(), dirs_left)?),
                },
            }
        }
        Ok(stack.last().copied())
    }

    /// Creates a directory that a link leads through. Where a whiteout had its name, the directory keeps hiding lower layers.
    fn create_dir(
        &mut self,
        at: DirId,
        name: Box<[u8]>,
        is_whiteout: bool,
        dirs_left: &mut usize,
    ) -> Result<DirId, ImageError> {
        if name.len() > NAME_BYTES_MAX {
            return Err(ImageError::hostile("a symbolic link leads through an invalid name"));
        }
        let too_many = || ImageError::hostile("symbolic links lead to too many directories");
        *dirs_left = dirs_left.checked_sub(1).ok_or_else(too_many)?;
        let dir = self.new_dir(if is_whiteout { Dir::opaque_replacement() } else { Dir::default() })?;
        self.dir_mut(at).children.insert(name, Child::Dir(dir));
        Ok(dir)
    }

    /// Moves the entries of `from` into `to`. Entries that `to` has already are kept.
    fn merge(&mut self, to: DirId, from: DirId) {
        let mut pairs = vec![(to, from)];
        while let Some((to, from)) = pairs.pop() {
            let moved = std::mem::take(self.dir_mut(from));
            let here = self.dir_mut(to);
            here.opaque |= moved.opaque;
            here.meta = here.meta.take().or(moved.meta);
            for (name, child) in moved.children {
                match (self.dir(to).children.get(&name).copied(), child) {
                    (None, _) => drop(self.dir_mut(to).children.insert(name, child)),
                    (Some(Child::Dir(a)), Child::Dir(b)) => pairs.push((a, b)),
                    (Some(_), _) => {}
                }
            }
        }
    }
}

/// Puts the target of a link before the rest of the path. An absolute target starts at the first `root` elements of `stack`.
fn push<T>(todo: &mut Path, stack: &mut Vec<T>, target: &[u8], root: usize) {
    if target.starts_with(b"/") {
        stack.truncate(root);
    }
    todo.extend(target.split(|byte| *byte == b'/').rev().map(Box::from));
}

fn link_loop_error(target: &[u8]) -> ImageError {
    ImageError::hostile(format!("symbolic link to {} leads through too many links", shown(target)))
}
