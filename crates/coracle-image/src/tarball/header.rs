//! Tar header of 512 bytes, merged with PAX records.

use std::collections::BTreeMap;

use super::damaged::damaged;
use super::{Kind, Member, pax};
use crate::ImageError;

/// Largest Linux device numbers: 12 bits major, 20 bits minor.
const MAJOR_MAX: u64 = (1 << 12) - 1;
const MINOR_MAX: u64 = (1 << 20) - 1;

/// Header with a valid checksum.
pub(super) struct Header([u8; 512]);

impl Header {
    pub(super) fn check(block: [u8; 512]) -> Result<Self, ImageError> {
        let header = Self(block);
        let field = |i: usize| (148..156).contains(&i);
        let sum: u64 = block.iter().enumerate().map(|(i, b)| if field(i) { 32 } else { u64::from(*b) }).sum();
        // Very old writers summed signed bytes.
        let signed: i64 = block
            .iter()
            .enumerate()
            .map(|(i, b)| if field(i) { 32 } else { i64::from(b.cast_signed()) })
            .sum();
        let said = header.number(148..156, "checksum")?;
        if said == sum || i64::try_from(said) == Ok(signed) {
            return Ok(header);
        }
        Err(damaged("a header's checksum is wrong"))
    }

    pub(super) fn kind(&self) -> u8 {
        self.0[156]
    }

    pub(super) fn size(&self) -> Result<u64, ImageError> {
        self.number(124..136, "size")
    }

    fn text(&self, range: std::ops::Range<usize>) -> &[u8] {
        let bytes = &self.0[range];
        &bytes[..bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len())]
    }

    /// Parses octal digits, or GNU base 256 when the first bit is set. Negative numbers are invalid except for times.
    fn number(&self, range: std::ops::Range<usize>, what: &str) -> Result<u64, ImageError> {
        let bytes = &self.0[range];
        let bad = || ImageError::hostile(format!("tar header field {what} is out of range"));
        if bytes[0] & 0x80 != 0 {
            let mut value = u64::from(bytes[0] & 0x7f);
            if bytes[0] & 0x40 != 0 {
                return Err(bad());
            }
            for byte in &bytes[1..] {
                value = value.checked_mul(256).ok_or_else(bad)? | u64::from(*byte);
            }
            return Ok(value);
        }
        let digits = bytes.iter().copied().skip_while(|b| *b == b' ').take_while(|b| !matches!(b, 0 | b' '));
        digits.into_iter().try_fold(0u64, |sum, digit| match digit {
            b'0'..=b'7' => sum.checked_mul(8).map(|s| s + u64::from(digit - b'0')).ok_or_else(bad),
            _ => Err(bad()),
        })
    }

    /// Seconds since 1970. Negative times exist in base 256 only.
    fn mtime(&self) -> Result<i64, ImageError> {
        let bytes = &self.0[136..148];
        if bytes[0] & 0xc0 == 0xc0 {
            let mut low = [0u8; 8];
            low.copy_from_slice(&bytes[4..]);
            return Ok(i64::from_be_bytes(low));
        }
        i64::try_from(self.number(136..148, "mtime")?).map_err(|_| damaged("a time is out of range"))
    }

    /// Name with the prefix of ustar. GNU headers use the bytes of the prefix for other fields.
    fn path(&self) -> Vec<u8> {
        let name = self.text(0..100);
        let prefix = self.text(345..500);
        if &self.0[257..263] == b"ustar\0" && !prefix.is_empty() {
            return [prefix, b"/", name].concat();
        }
        name.to_vec()
    }
}

/// Merges a header with its extended headers.
pub(super) fn member(
    header: &Header,
    pax: BTreeMap<Vec<u8>, Vec<u8>>,
    long_path: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
) -> Result<Member, ImageError> {
    let record = |key: &str| pax.get(key.as_bytes());
    let sparse = |path: &[u8]| ImageError::unsupported(format!("archive entry {} is sparse", shown(path)));
    let path = record("path").cloned().or(long_path).unwrap_or_else(|| header.path());
    if pax.keys().any(|key| key.starts_with(b"GNU.sparse.")) {
        return Err(sparse(record("GNU.sparse.name").unwrap_or(&path)));
    }
    if header.kind() == b'S' {
        return Err(sparse(&path));
    }
    let link = record("linkpath").cloned().or(long_link).unwrap_or_else(|| header.text(157..257).to_vec());
    let kind = kind(header, &path, link)?;
    let size_bytes = match (&kind, record("size")) {
        (Kind::File, Some(size)) => pax::number(size, "size")?,
        (Kind::File, None) => header.size()?,
        // Only files have data, as in Go's archive/tar, which all container tools use.
        _ => 0,
    };
    let id = |key: &str, range| match record(key) {
        Some(value) => pax::number(value, key),
        None => header.number(range, key),
    };
    let id = |key, range| {
        u32::try_from(id(key, range)?).map_err(|_| ImageError::hostile(format!("{key} is out of range")))
    };
    Ok(Member {
        kind,
        size_bytes,
        mode: (header.number(100..108, "mode")? & 0o7777) as u16,
        uid: id("uid", 108..116)?,
        gid: id("gid", 116..124)?,
        mtime: record("mtime").map_or_else(|| Ok((header.mtime()?, 0)), |value| pax::time(value))?,
        xattrs: pax::xattrs(&pax),
        sparse: record("COCOON.sparse.map").cloned().zip(record("COCOON.sparse.size").cloned()),
        path,
    })
}

fn kind(header: &Header, path: &[u8], link: Vec<u8>) -> Result<Kind, ImageError> {
    let device = || -> Result<(u32, u32), ImageError> {
        let (major, minor) = (header.number(329..337, "major")?, header.number(337..345, "minor")?);
        match (u32::try_from(major), u32::try_from(minor)) {
            (Ok(a), Ok(b)) if major <= MAJOR_MAX && minor <= MINOR_MAX => Ok((a, b)),
            _ => Err(ImageError::hostile(format!(
                "device number {major}:{minor} of {} is out of range",
                shown(path)
            ))),
        }
    };
    Ok(match header.kind() {
        // Before ustar, a directory was a file whose name ends in a slash.
        b'0' | 0 | b'7' if path.ends_with(b"/") => Kind::Dir,
        b'0' | 0 | b'7' => Kind::File,
        b'1' => Kind::HardLink(link),
        b'2' => Kind::Symlink(link),
        b'3' => device().map(|(major, minor)| Kind::Char { major, minor })?,
        b'4' => device().map(|(major, minor)| Kind::Block { major, minor })?,
        b'5' => Kind::Dir,
        b'6' => Kind::Fifo,
        other => {
            return Err(ImageError::unsupported(format!(
                "archive entry {} has kind {:?}",
                shown(path),
                char::from(other)
            )));
        }
    })
}

/// Path for a message: bounded and without control characters.
pub fn shown(path: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(path).chars().take(120).collect();
    format!("{text:?}")
}
