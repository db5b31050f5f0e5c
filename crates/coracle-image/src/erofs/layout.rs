//! Plans the places of inodes and their content, then writes them in order. The root directory may be in block 0
//! ([`RootfsLayout::RootFirst`]): its inode number, its size and everything that a mount reads of the superblock are then the same
//! in all files.

use std::{
    fs::File,
    io::{self, BufWriter, Seek, SeekFrom, Write},
    os::unix::fs::FileExt,
};

use coracle_types::RootfsLayout;

use super::{BLOCK, Body, DataWriter, INLINE_MAX, Object, dir, superblock::Superblock, xattr};

const INODE_LEN: usize = 64;
const INODE: u64 = INODE_LEN as u64;
const SLOT_LEN: usize = 32;
const SLOT: u64 = SLOT_LEN as u64;

/// Offset of the first inode in the metadata area. Not 0: `readdir` takes node id 0 as a deleted entry.
const FIRST: u64 = 64;

/// Offset of the root directory's inode in block 0, behind the superblock, and size of its content, which fills the block.
const FIRST_ROOT: u64 = RootfsLayout::FIRST_ROOT_INODE * SLOT;
const FIRST_ROOT_LEN: usize = RootfsLayout::FIRST_ROOT_LEN;
const _: () = assert!(FIRST_ROOT + INODE + FIRST_ROOT_LEN as u64 == BLOCK);

/// Location of an inode and its content.
struct Place {
    /// Offset of the inode in the file, bytes.
    offset: u64,
    /// Number of the inode.
    nid: u64,
    size: u64,
    /// First block of the content, unless it is stored behind the inode.
    block: u32,
    inline: bool,
}

/// Writes all metadata behind the data, and block 0 last. Truncates the file to whole blocks. Returns the layout, which is not
/// the wanted one if the root directory does not fit into block 0. Does not sync the file.
pub(crate) fn write(
    mut data: DataWriter,
    objects: &[Object<'_>],
    uuid: [u8; 16],
    wanted: RootfsLayout,
) -> io::Result<RootfsLayout> {
    let start = data.position();
    let layout = if objects.first().is_some_and(fits_first) { wanted } else { RootfsLayout::RootLast };
    let (places, blocks) = plan(objects, start, layout)?;
    data.reserve((u64::from(blocks) * BLOCK).saturating_sub(start))?;
    let file = data.into_file();
    let mut out = BufWriter::with_capacity(1 << 20, &file);
    write_inodes(&mut out, objects, &places, start)?;
    write_large(&mut out, objects, &places)?;
    out.flush()?;
    drop(out);
    file.set_len(u64::from(blocks) * BLOCK)?;
    let root = places.first().map_or(0, |root| root.nid);
    let (root_nid, meta_block) = match layout {
        RootfsLayout::RootFirst => {
            write_first_root(&file, objects, &places)?;
            (root, 0)
        }
        RootfsLayout::RootLast => (root, block_number(start)?),
    };
    let root_nid = u16::try_from(root_nid).map_err(io::Error::other)?;
    Superblock { root_nid, inodes: objects.len() as u64, blocks, meta_block, uuid, layout }.write(&file)?;
    Ok(layout)
}

/// Whether the root directory fits into block 0.
fn fits_first(root: &Object<'_>) -> bool {
    root.meta.xattrs.is_empty() && content(root).0 <= FIRST_ROOT_LEN as u64
}

/// Writes the root directory into block 0. A name ends at the next one, or with a zero byte: the kernel ignores what follows
/// (`erofs_fill_dentries`).
fn write_first_root(file: &File, objects: &[Object<'_>], places: &[Place]) -> io::Result<()> {
    let (Some(root), Some(place)) = (objects.first(), places.first()) else { return Ok(()) };
    let mut bytes = inode(root, place, 0).to_vec();
    bytes.extend(&*self::bytes(root, 0, objects, places));
    bytes.resize(INODE_LEN + FIRST_ROOT_LEN, 0);
    file.write_all_at(&bytes, FIRST_ROOT)
}

/// Computes all places and the number of blocks of the file. `start` is the end of the data.
fn plan(objects: &[Object<'_>], start: u64, layout: RootfsLayout) -> io::Result<(Vec<Place>, u32)> {
    let mut places = Vec::with_capacity(objects.len());
    let mut next = FIRST;
    let nid_base = match layout {
        RootfsLayout::RootLast => 0,
        RootfsLayout::RootFirst => start,
    };
    for object in objects {
        if layout == RootfsLayout::RootFirst && places.is_empty() {
            let (nid, size) = (RootfsLayout::FIRST_ROOT_INODE, FIRST_ROOT_LEN as u64);
            places.push(Place { offset: FIRST_ROOT, nid, size, block: 0, inline: true });
            continue;
        }
        let (size, inline) = content(object);
        let head = INODE + object.meta.xattrs.len() as u64;
        let tail = if inline { size } else { 0 };
        let offset = find_slot(next, head, tail);
        next = (offset + head + tail).next_multiple_of(SLOT);
        let block = match object.body {
            Body::Blocks { block, .. } => block,
            _ => 0,
        };
        let nid = (nid_base + offset) / SLOT;
        places.push(Place { offset: start + offset, nid, size, block, inline });
    }
    let mut free = (start + next).next_multiple_of(BLOCK);
    for (place, object) in places.iter_mut().zip(objects) {
        if place.size > 0 && !place.inline && !matches!(object.body, Body::Blocks { .. }) {
            place.block = block_number(free)?;
            free += place.size.next_multiple_of(BLOCK);
        }
    }
    Ok((places, block_number(free)?))
}

/// Next offset at which the inode and the content behind it are each within one block, as the kernel requires.
fn find_slot(from: u64, head: u64, tail: u64) -> u64 {
    let fits = |offset: &u64| {
        let start = (offset + head) % BLOCK;
        offset % BLOCK + INODE <= BLOCK && (tail == 0 || start + tail <= BLOCK)
    };
    (from..).step_by(SLOT_LEN).find(fits).unwrap_or(from)
}

/// Size of the content, and whether it is stored behind the inode.
fn content(object: &Object<'_>) -> (u64, bool) {
    let size = match &object.body {
        Body::Dir { children, .. } => dir::size(with_dots(children).map(|(name, _)| name)),
        Body::Bytes(bytes) => bytes.len() as u64,
        Body::Blocks { size, .. } => return (*size, false),
        Body::Device { .. } | Body::Empty => 0,
    };
    (size, size > 0 && size <= INLINE_MAX as u64)
}

/// Target of a directory entry: `.` and `..` are resolved once node ids are known.
#[derive(Clone, Copy)]
enum Target {
    Own,
    Parent,
    Child(u32),
}

/// Children with `.` and `..` at their sorted places.
fn with_dots<'c>(children: &'c [(&'c [u8], u32)]) -> impl Iterator<Item = (&'c [u8], Target)> {
    let first = children.partition_point(|(name, _)| *name < b".".as_slice());
    let second = children.partition_point(|(name, _)| *name < b"..".as_slice());
    let child = |(name, index): &(&'c [u8], u32)| (*name, Target::Child(*index));
    let dot = std::iter::once((b".".as_slice(), Target::Own));
    let dots = std::iter::once((b"..".as_slice(), Target::Parent));
    let (head, middle, tail) = (&children[..first], &children[first..second], &children[second..]);
    head.iter()
        .map(child)
        .chain(dot)
        .chain(middle.iter().map(child))
        .chain(dots)
        .chain(tail.iter().map(child))
}

fn write_inodes(
    out: &mut (impl Write + Seek),
    objects: &[Object<'_>],
    places: &[Place],
    start: u64,
) -> io::Result<()> {
    out.seek(SeekFrom::Start(start))?;
    let mut at = start;
    for (number, (object, place)) in objects.iter().zip(places).enumerate() {
        if place.offset < start {
            continue; // the root directory in block 0
        }
        pad(out, place.offset - at)?;
        out.write_all(&inode(object, place, number))?;
        out.write_all(&object.meta.xattrs)?;
        at = place.offset + INODE + object.meta.xattrs.len() as u64;
        if place.inline {
            out.write_all(&bytes(object, number, objects, places))?;
            at += place.size;
        }
    }
    Ok(())
}

fn write_large(out: &mut (impl Write + Seek), objects: &[Object<'_>], places: &[Place]) -> io::Result<()> {
    for (number, (object, place)) in objects.iter().zip(places).enumerate() {
        if place.size > 0 && !place.inline && !matches!(object.body, Body::Blocks { .. }) {
            out.seek(SeekFrom::Start(u64::from(place.block) * BLOCK))?;
            out.write_all(&bytes(object, number, objects, places))?;
        }
    }
    Ok(())
}

/// Content that is written together with the metadata.
fn bytes<'o>(
    object: &'o Object<'_>,
    number: usize,
    objects: &[Object<'_>],
    places: &[Place],
) -> std::borrow::Cow<'o, [u8]> {
    match &object.body {
        Body::Dir { parent, children } => {
            let entry = |(name, target)| {
                let index = match target {
                    Target::Own => number,
                    Target::Parent => *parent as usize,
                    Target::Child(index) => index as usize,
                };
                (name, places[index].nid, objects[index].meta.mode)
            };
            let entries: Vec<_> = with_dots(children).map(entry).collect();
            dir::encode(&entries).into()
        }
        Body::Bytes(bytes) => (*bytes).into(),
        Body::Blocks { .. } | Body::Device { .. } | Body::Empty => [].as_slice().into(),
    }
}

/// Encodes a `struct erofs_inode_extended`.
fn inode(object: &Object<'_>, place: &Place, number: usize) -> [u8; INODE_LEN] {
    let mut raw = [0; INODE_LEN];
    let mut put = |at: usize, value: &[u8]| raw[at..at + value.len()].copy_from_slice(value);
    let layout: u16 = if place.inline { 2 } else { 0 }; // FLAT_INLINE, FLAT_PLAIN
    let union = match object.body {
        Body::Device { major, minor } => device(major, minor),
        _ => place.block,
    };
    put(0, &(1 | layout << 1).to_le_bytes());
    put(2, &xattr::count(object.meta.xattrs.len()).to_le_bytes());
    put(4, &object.meta.mode.to_le_bytes());
    put(8, &place.size.to_le_bytes());
    put(16, &union.to_le_bytes());
    put(20, &u32::try_from(number + 1).unwrap_or(u32::MAX).to_le_bytes());
    put(24, &object.meta.uid.to_le_bytes());
    put(28, &object.meta.gid.to_le_bytes());
    put(32, &object.meta.mtime.0.to_le_bytes());
    put(40, &object.meta.mtime.1.to_le_bytes());
    put(44, &object.links.to_le_bytes());
    raw
}

/// Encodes a device number like the kernel's `new_encode_dev`.
fn device(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

fn pad(out: &mut impl Write, mut bytes: u64) -> io::Result<()> {
    const ZEROS: [u8; 512] = [0; 512];
    while bytes > 0 {
        let now = bytes.min(ZEROS.len() as u64);
        out.write_all(&ZEROS[..usize::try_from(now).unwrap_or(0)])?;
        bytes -= now;
    }
    Ok(())
}

fn block_number(offset: u64) -> io::Result<u32> {
    u32::try_from(offset / BLOCK).map_err(|_| io::ErrorKind::FileTooLarge.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inodes_and_tails_never_straddle_blocks() {
        for (from, head, tail) in [
            (64, 64, 0),
            (4064, 64, 0),
            (4000, 64, 100),
            (64, 64, 2048),
            (2112, 64, 2048),
            (64, 70_000, 2048),
        ] {
            let at = find_slot(from, head, tail);
            assert!(at >= from && at.is_multiple_of(SLOT));
            assert!(at % BLOCK + INODE <= BLOCK, "inode at {at}");
            assert!(
                tail == 0 || (at + head) / BLOCK == (at + head + tail - 1) / BLOCK,
                "tail of {from} {head} {tail}"
            );
        }
    }

    #[test]
    fn dot_entries_are_sorted_with_the_children() {
        let children: Vec<(&[u8], u32)> = vec![(b"!", 1), (b"-", 2), (b".a", 3), (b"...", 4), (b"a", 5)];
        let mut sorted = children.clone();
        sorted.sort_unstable();
        let names: Vec<_> = with_dots(&sorted).map(|(name, _)| name).collect();
        assert!(names.is_sorted() && names.len() == 7, "{names:?}");
    }
}
