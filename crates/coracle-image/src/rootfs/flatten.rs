//! Lists the inodes of the finished tree for the EROFS writer.

use super::tree::{Child, Content, DirId, IMPLIED, InodeId, Tree};
use crate::{
    ImageError,
    erofs::{Body, Object},
};

/// Lists all inodes that can be reached from `root`, breadth first and sorted by name. Equal trees give equal lists.
pub(super) fn flatten(tree: &Tree, root: DirId) -> Result<Vec<Object<'_>>, ImageError> {
    let mut objects = vec![directory(tree, root, 0)];
    let mut sources = vec![Some(root)];
    let mut numbers = vec![None; tree.inodes.len()];
    let mut at = 0;
    while at < objects.len() {
        if let Some(dir) = sources[at] {
            let number = count(at)?;
            let mut children = Vec::with_capacity(tree.dir(dir).children.len());
            for (name, child) in &tree.dir(dir).children {
                let index = match child {
                    Child::Whiteout => continue,
                    Child::Dir(child) => {
                        objects[at].links += 1; // its entry `..`
                        sources.push(Some(*child));
                        objects.push(directory(tree, *child, number));
                        count(objects.len() - 1)?
                    }
                    Child::Leaf(inode) => leaf(tree, *inode, &mut objects, &mut sources, &mut numbers)?,
                };
                children.push((&**name, index));
            }
            objects[at].body = Body::Dir { parent: parent(&objects[at]), children };
        }
        at += 1;
    }
    Ok(objects)
}

/// Index of a file's inode. Several names may share it.
fn leaf<'t>(
    tree: &'t Tree,
    inode: InodeId,
    objects: &mut Vec<Object<'t>>,
    sources: &mut Vec<Option<DirId>>,
    numbers: &mut [Option<u32>],
) -> Result<u32, ImageError> {
    let inode = tree.follow(inode);
    if let Some(number) = numbers[inode.0 as usize] {
        objects[number as usize].links += 1;
        return Ok(number);
    }
    let number = count(objects.len())?;
    numbers[inode.0 as usize] = Some(number);
    let source = tree.inode(inode);
    let body = match &source.content {
        Content::Inline(bytes) | Content::Symlink(bytes) => Body::Bytes(bytes),
        Content::Blocks { block, size } => Body::Blocks { block: *block, size: *size },
        Content::Device { major, minor } => Body::Device { major: *major, minor: *minor },
        Content::Fifo => Body::Empty,
        Content::Pending(target) => return Err(super::layer::bad_link(b"", target, "does not exist")),
        Content::Broken(target, why) => return Err(super::layer::bad_link(b"", target, why)),
        Content::Skipped(_) | Content::Alias(_) => {
            return Err(ImageError::hostile("a file hidden by a layer is shown by another"));
        }
    };
    sources.push(None);
    objects.push(Object { meta: &source.meta, links: 1, body });
    Ok(number)
}

fn directory(tree: &Tree, dir: DirId, parent: u32) -> Object<'_> {
    let meta = tree.dir(dir).meta.as_ref().unwrap_or(&IMPLIED);
    Object { meta, links: 2, body: Body::Dir { parent, children: Vec::new() } }
}

fn parent(object: &Object<'_>) -> u32 {
    match object.body {
        Body::Dir { parent, .. } => parent,
        _ => 0,
    }
}

fn count(place: usize) -> Result<u32, ImageError> {
    u32::try_from(place).map_err(|_| ImageError::hostile("more files than can be counted"))
}
