//! Extended attributes behind an inode: a 12-byte header, then entries padded to 4 bytes.

use std::collections::BTreeMap;

/// Name prefixes that have a number on disk.
const PREFIXES: [(&[u8], u8); 5] = [
    (b"user.", 1),
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"trusted.", 4),
    (b"security.", 6),
];

/// Prefixes of attributes that hold the state of an overlay. In a lower layer the kernel would act on them.
const OVERLAY: [&[u8]; 2] = [b"trusted.overlay.", b"user.overlay."];

/// Encodes attributes; empty when there are none. Names that EROFS cannot store are dropped.
///
/// The caller bounds names to 255 bytes and the sum to 64 KiB.
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
        // The two ACL names are complete. The other prefixes need a suffix.
        (rest.is_empty() == matches!(index, 2 | 3)).then_some((*index, rest))
    })
}

/// Value of `i_xattr_icount` for a body of `bytes` bytes.
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
    fn xattr_encoding_drops_unsupported_names() {
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
