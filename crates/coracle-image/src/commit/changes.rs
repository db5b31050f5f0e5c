//! Layer from the upper directory of an overlay: the exact differences, as the kernel recorded them.
//!
//! Format: kernel, Documentation/filesystems/overlayfs.rst, "whiteouts and opaque directories"; OCI image
//! specification, "Image Layer Filesystem Changeset". The guest agent mounts without `userxattr`, so
//! attributes `user.overlay.*` belong to an unprivileged overlay inside the container and are kept.

use std::io::{Read, Write};

use super::{Bounds, MADE_MOUNTS, MOUNTS, OWN, VmRoot, append, below_root, whiteout};
use crate::{
    ImageError,
    content::ContentStore,
    tarball::path::{Name, classify, components},
    tarball::{self, Kind, Member, shown},
};

/// Prefix of the overlay's own attributes, which never enter an image.
const OVERLAY: &[u8] = b"trusted.overlay.";
const OPAQUE: &[u8] = b"trusted.overlay.opaque";
/// Attributes of a file whose data or name is partly in the lower layer.
const INCOMPLETE: [&[u8]; 2] = [b"trusted.overlay.redirect", b"trusted.overlay.metacopy"];
/// Longest name that still fits into a whiteout with the prefix `.wh.`, bytes.
const NAME_MAX: usize = crate::limits::NAME_BYTES_MAX - 4;

/// Copies the stream of an upper directory into a layer.
pub(super) fn copy<R: Read>(
    inner: &ContentStore,
    root: &mut VmRoot<R>,
    out: &mut tar::Builder<impl Write>,
) -> Result<(), ImageError> {
    let limits = &inner.options.limits;
    let mut bounds = Bounds::of(limits);
    let volumes: Vec<Vec<u8>> = root.mounts.iter().map(|path| below_root(path)).collect();
    let is_left_out = |path: &[u8]| {
        let below = |dir: &[u8]| path.strip_prefix(dir).is_some_and(|rest| rest.starts_with(b"/"));
        OWN.contains(&path)
            || MADE_MOUNTS.contains(&path)
            || MOUNTS.into_iter().any(below)
            || volumes.iter().any(|volume| path == volume.as_slice() || below(volume))
    };
    let mut archive = tarball::Reader::new(&mut root.tar, limits);
    while let Some(mut member) = archive.next_member()? {
        bounds.take(&member)?;
        let (above, name) = match classify(&member.path, limits)? {
            Name::Entry { above, name } => (above.join(&b'/'), name.to_vec()),
            // A file with the name of a whiteout cannot be stored in an image layer.
            Name::Whiteout { .. } | Name::Opaque { .. } | Name::Ignored | Name::Root => continue,
        };
        let path = [above.as_slice(), &name].join(&b'/');
        let path = path.strip_prefix(b"/").unwrap_or(&path);
        if is_left_out(path) {
            continue;
        }
        if member.kind == (Kind::Char { major: 0, minor: 0 }) {
            write_whiteout(&above, &name, out)?;
            continue;
        }
        if let Kind::HardLink(to) = &member.kind {
            let to = components(to, limits)?.join(&b'/');
            if is_left_out(&to) {
                continue;
            }
            member.kind = Kind::HardLink(to);
        }
        let is_opaque = take_overlay(&mut member)? && member.kind == Kind::Dir;
        append(out, path, &member, &mut archive)?;
        if is_opaque {
            whiteout(&[path, b"/.wh..wh..opq"].concat(), out)?;
        }
    }
    archive.drain()?;
    out.finish().map_err(tarball::read_error)
}

/// Writes a whiteout for `name`.
fn write_whiteout(above: &[u8], name: &[u8], out: &mut tar::Builder<impl Write>) -> Result<(), ImageError> {
    if name.len() > NAME_MAX {
        return Err(ImageError::unsupported(format!(
            "the VM removed {}, whose name is too long for a whiteout (at most {NAME_MAX} bytes)",
            shown(name)
        )));
    }
    let path = [above, b"/.wh.", name].concat();
    whiteout(path.strip_prefix(b"/").unwrap_or(&path), out)
}

/// Removes the attributes of the overlay. True when they mark an opaque directory.
fn take_overlay(member: &mut Member) -> Result<bool, ImageError> {
    if INCOMPLETE.iter().any(|name| member.xattrs.contains_key(*name)) {
        return Err(ImageError::unsupported(format!(
            "the overlay of the VM has only a part of {} (redirect_dir or metacopy)",
            shown(&member.path)
        )));
    }
    let is_opaque = member.xattrs.get(OPAQUE).is_some_and(|value| value == b"y");
    member.xattrs.retain(|name, _| !name.starts_with(OVERLAY));
    Ok(is_opaque)
}
