//! Paths of archive members: validation and whiteouts.

use crate::{ImageError, Limits, limits::NAME_BYTES_MAX, tarball::shown};

/// Meaning of the path of a member.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Name<'p> {
    /// Root directory itself.
    Root,
    /// Ordinary member.
    Entry {
        /// Directories above the member.
        above: Vec<&'p [u8]>,
        /// Last component.
        name: &'p [u8],
    },
    /// `.wh.name`: hides `name` in the lower layers.
    Whiteout { above: Vec<&'p [u8]>, name: &'p [u8] },
    /// `.wh..wh..opq`: hides everything that the lower layers have in this directory.
    Opaque { dir: Vec<&'p [u8]> },
    /// AUFS metadata (`.wh..wh.*`), which is not unpacked. Targets of hard links may be below `.wh..wh.plnk/`.
    Ignored,
}

const WHITEOUT: &[u8] = b".wh.";
const AUFS: &[u8] = b".wh..wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Splits a path into components. Drops leading slashes and dots, and resolves `..`.
///
/// # Errors
/// [`ImageError::Oci`] for a path that leaves the root, or is above the limits.
pub fn components<'p>(path: &'p [u8], limits: &Limits) -> Result<Vec<&'p [u8]>, ImageError> {
    let refuse = |why: &str| Err(ImageError::hostile(format!("path {} {why}", shown(path))));
    if path.len() > limits.path_bytes {
        return refuse("is too long");
    }
    if path.contains(&0) {
        return refuse("contains a zero byte");
    }
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in path.split(|b| *b == b'/') {
        match part {
            b"" | b"." => {}
            b".." if parts.pop().is_none() => return refuse("leads out of the image"),
            b".." => {}
            _ if part.len() > NAME_BYTES_MAX => return refuse("has a component longer than 255 bytes"),
            _ => parts.push(part),
        }
    }
    if parts.len() > limits.depth {
        return refuse("is nested too deeply");
    }
    Ok(parts)
}

/// Classifies the path of a member.
pub(crate) fn classify<'p>(path: &'p [u8], limits: &Limits) -> Result<Name<'p>, ImageError> {
    let refuse = |why: &str| Err(ImageError::hostile(format!("path {} {why}", shown(path))));
    let mut above = components(path, limits)?;
    let Some(name) = above.pop() else { return Ok(Name::Root) };
    let is_aufs = |part: &[u8]| part.starts_with(AUFS) && part != OPAQUE;
    if above.iter().any(|part| is_aufs(part)) {
        return Ok(Name::Ignored);
    }
    if above.iter().any(|part| part.starts_with(WHITEOUT)) {
        return refuse("uses a whiteout as a directory");
    }
    match name.strip_prefix(WHITEOUT) {
        None => Ok(Name::Entry { above, name }),
        Some(_) if name == OPAQUE => Ok(Name::Opaque { dir: above }),
        Some(b"" | b"." | b"..") => refuse("is a whiteout of nothing"),
        Some(_) if is_aufs(name) => Ok(Name::Ignored),
        Some(name) => Ok(Name::Whiteout { above, name }),
    }
}

/// Name of an AUFS hard-link target: a file directly below `.wh..wh.plnk/`.
pub(crate) fn aufs_link<'p>(parts: &[&'p [u8]]) -> Option<&'p [u8]> {
    match parts {
        [b".wh..wh.plnk", name] => Some(name),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_table() {
        let long = [b'n'; 256];
        let deep = b"d/".repeat(257);
        let far = b"abc/../".repeat(1000);
        for (why, path, want) in [
            ("plain", b"a/b".as_slice(), "Entry"),
            ("absolute is made relative", b"/a", "Entry"),
            ("dots go", b"./././a/", "Entry"),
            ("up and down again", b"a/../b", "Entry"),
            ("the root", b"./", "Root"),
            ("escape", b"../a", "leads out"),
            ("hidden escape", b"a/../../b", "leads out"),
            ("absolute escape", b"/../b", "leads out"),
            ("whiteout", b"a/.wh.b", "Whiteout"),
            ("opaque", b"a/.wh..wh..opq", "Opaque"),
            ("aufs", b".wh..wh.plnk", "Ignored"),
            ("below aufs", b".wh..wh.plnk/9.7", "Ignored"),
            ("below aufs, deeper", b"a/.wh..wh.x/.wh..wh..opq", "Ignored"),
            ("below an opaque mark", b"a/.wh..wh..opq/x", "as a directory"),
            ("empty whiteout", b"a/.wh.", "whiteout of nothing"),
            ("whiteout of ..", b"a/.wh...", "whiteout of nothing"),
            ("below a whiteout", b".wh.a/b", "as a directory"),
            ("zero byte", b"a\0b", "zero byte"),
            ("long name", &long, "255"),
            ("too deep", &deep, "deeply"),
            ("too long", &far, "too long"),
        ] {
            let got = match classify(path, &Limits::default()) {
                Ok(name) => format!("{name:?}"),
                Err(error) => error.to_string(),
            };
            assert!(got.contains(want), "{why}: {got}");
        }
    }
}
