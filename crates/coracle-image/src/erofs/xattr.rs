//! Extended attributes behind an inode: a 12-byte header, then entries padded to 4 bytes.

use std::collections::BTreeMap;

/// Name prefixes that are numbers on disk.
const PREFIXES: [(&[u8], u8); 5] = [
    (b"user.", 1),
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"trusted.", 4),
    (b"security.", 6),
];

/// Attributes with which an overlay marks its own state. In a lower layer they would be obeyed, which no
/// image means.
const OVERLAY: [&[u8]; 2] = [b"trusted.overlay.", b"user.overlay."];

/// Encodes attributes; empty when none is left. Names that EROFS cannot hold are left out, as on file systems
/// that refuse them.
///
/// The caller has bounded names to 255 bytes and all of it to 64 KiB.
pub(crate) fn encode(xattrs: &BTreeMap<Vec<u8>, Vec<u8>>) -> Vec<u8> {
    let mut out = vec![0; 12];
    for (name, value) in xattrs {
        let Some((index, rest)) = split(name) else { continue };
        let (Ok(name_len), Ok(value_len)) = (u8::try_from(rest.len()), u16::try_from(value.len())) else {
            continue;
        };
        out.extend([name_len, index]);
        out.extend(value_len.to_le_bytes());
        out.extend(rest);
        out.extend(value);
        out.resize(out.len().next_multiple_of(4), 0);
    }
    if out.len() == 12 { Vec::new() } else { out }
}

fn split(name: &[u8]) -> Option<(u8, &[u8])> {
    if OVERLAY.iter().any(|p| name.starts_with(p)) {
        return None;
    }
    PREFIXES.iter().find_map(|(prefix, index)| {
        let rest = name.strip_prefix(*prefix)?;
        // The two access lists are whole names, the others need something behind the dot.
        (rest.is_empty() == matches!(index, 2 | 3)).then_some((*index, rest))
    })
}

/// What `i_xattr_icount` says about a body of `bytes` bytes.
pub(super) fn count(bytes: usize) -> u16 {
    match bytes {
        0 => 0,
        // 64 KiB of attributes are 16 Ki units, far below the field's range.
        _ => u16::try_from((bytes - 12) / 4 + 1).unwrap_or(u16::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoding() {
        let names = [
            "user.a",
            "security.capability",
            "system.posix_acl_access",
            "system.nfs4_acl",
            "trusted.overlay.opaque",
            "user.",
        ];
        let map = names.iter().map(|n| (n.as_bytes().to_vec(), b"v".to_vec())).collect();
        let body = encode(&map);
        assert_eq!(body.len(), 12 + 16 + 8 + 8, "three of them are kept");
        assert_eq!(count(body.len()), 9);
        assert_eq!(&body[12..14], [10, 6]);
        assert!(encode(&BTreeMap::new()).is_empty());
    }
}
