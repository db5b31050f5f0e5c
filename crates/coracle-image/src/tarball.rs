//! Tar reader for hostile archives: ustar, GNU long names, PAX records.
//!
//! The `tar` crate (0.4.46) is not used for two reasons: it cuts PAX records at line ends, which destroys binary extended
//! attributes, and it reads extended headers into memory without a bound. Format: POSIX.1-2017 `pax`, "ustar Interchange
//! Format" and "pax Header Block"; GNU tar manual, "Basic Tar Format".

mod damaged;
mod header;
pub mod path;
mod pax;

use std::{
    collections::BTreeMap,
    io::{self, Read},
};

use crate::{ImageError, Limits};
use damaged::damaged;
use header::Header;
pub use header::shown;

const BLOCK: u64 = 512;

/// Kind of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Regular file.
    File,
    /// Directory.
    Dir,
    /// Symbolic link with its target.
    Symlink(Vec<u8>),
    /// Hard link with the path of the other name.
    HardLink(Vec<u8>),
    /// Character device.
    Char {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// Block device.
    Block {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// Named pipe.
    Fifo,
}

/// One archive member, before its data.
#[derive(Clone, Debug)]
pub struct Member {
    /// Path as written in the archive. It may be absolute or contain `..`.
    pub path: Vec<u8>,
    /// Kind, with the target of a link.
    pub kind: Kind,
    /// Bytes of data that follow; 0 for everything except files.
    pub size_bytes: u64,
    /// Permission bits with setuid, setgid and sticky.
    pub mode: u16,
    /// User id of the owner.
    pub uid: u32,
    /// Group id of the owner.
    pub gid: u32,
    /// Time of modification: seconds and nanoseconds since 1970.
    pub mtime: (i64, u32),
    /// Extended attributes by full name, such as `security.capability`.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Map and length of a sparse file in an archive of cocoon, from the records `COCOON.sparse.*`.
    pub sparse: Option<(Vec<u8>, Vec<u8>)>,
}

/// Reads members one after the other. Between two calls of [`Reader::next_member`], the reader is a [`Read`] of the data of the
/// current member.
pub struct Reader<'l, R> {
    input: R,
    limits: &'l Limits,
    /// Unread bytes of the current member's data.
    left: u64,
    /// Padding between the end of the data and the next header, bytes.
    padding: u64,
}

impl<'l, R: Read> Reader<'l, R> {
    /// Creates a reader of the archive `input`.
    pub fn new(input: R, limits: &'l Limits) -> Self {
        Self { input, limits, left: 0, padding: 0 }
    }

    /// Stream that the archive is read from.
    pub fn input_mut(&mut self) -> &mut R {
        &mut self.input
    }

    /// Next member, `None` at the end of the archive. Skips unread data of the last member.
    ///
    /// # Errors
    /// [`ImageError::Oci`] for a damaged archive, or one above the limits.
    pub fn next_member(&mut self) -> Result<Option<Member>, ImageError> {
        let mut pax = BTreeMap::new();
        let (mut long_path, mut long_link) = (None, None);
        loop {
            self.skip_data()?;
            let Some(header) = self.read_header()? else {
                return match long_path.is_some() || long_link.is_some() || !pax.is_empty() {
                    true => Err(damaged("it ends after an extended header")),
                    false => Ok(None),
                };
            };
            match header.kind() {
                b'x' => pax = pax::parse(&self.read_extended_header(&header)?)?,
                b'g' => drop(self.read_extended_header(&header)?),
                b'L' => long_path = Some(cut_at_nul(self.read_extended_header(&header)?)),
                b'K' => long_link = Some(cut_at_nul(self.read_extended_header(&header)?)),
                _ => {
                    let member = header::member(&header, pax, long_path, long_link)?;
                    self.begin_data(member.size_bytes)?;
                    return Ok(Some(member));
                }
            }
        }
    }

    /// Reads the rest of the stream behind the last member.
    ///
    /// # Errors
    /// [`ImageError::Oci`] for a damaged archive.
    pub fn drain(mut self) -> Result<(), ImageError> {
        self.skip_data()?;
        io::copy(&mut self.input, &mut io::sink()).map(drop).map_err(read_error)
    }

    /// Reads a header. `None` at the end of the archive: a block of zeros, or, as many writers leave it, the end of the stream
    /// after a whole block.
    fn read_header(&mut self) -> Result<Option<Header>, ImageError> {
        let mut block = [0u8; 512];
        let mut have = 0;
        while have < block.len() {
            match self.input.read(&mut block[have..]) {
                Ok(0) if have == 0 => return Ok(None),
                Ok(0) => return Err(damaged("it ends inside a header")),
                Ok(n) => have += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(read_error(e)),
            }
        }
        if block.iter().all(|b| *b == 0) {
            return Ok(None);
        }
        Header::check(block).map(Some)
    }

    fn read_extended_header(&mut self, header: &Header) -> Result<Vec<u8>, ImageError> {
        let size = header.size()?;
        if size > self.limits.header_bytes {
            let max = self.limits.header_bytes;
            return Err(ImageError::hostile(format!(
                "extended tar header of {size} bytes, at most {max} are allowed"
            )));
        }
        self.begin_data(size)?;
        let mut bytes = Vec::new();
        self.read_to_end(&mut bytes).map_err(read_error)?;
        Ok(bytes)
    }

    fn begin_data(&mut self, size: u64) -> Result<(), ImageError> {
        let max = self.limits.unpacked_bytes;
        if size > max {
            return Err(ImageError::hostile(format!(
                "archive entry of {size} bytes, at most {max} are allowed"
            )));
        }
        self.left = size;
        self.padding = (BLOCK - size % BLOCK) % BLOCK;
        Ok(())
    }

    fn skip_data(&mut self) -> Result<(), ImageError> {
        let want = self.left + self.padding;
        let got = io::copy(&mut (&mut self.input).take(want), &mut io::sink()).map_err(read_error)?;
        // The padding of the last member may be missing, its data may not.
        if got < self.left {
            return Err(damaged("it ends inside a file"));
        }
        (self.left, self.padding) = (0, 0);
        Ok(())
    }
}

impl<R: Read> Read for Reader<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let room = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if room == 0 {
            return Ok(0);
        }
        let got = self.input.read(&mut buffer[..room])?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= got as u64;
        Ok(got)
    }
}

fn cut_at_nul(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some(end) = bytes.iter().position(|b| *b == 0) {
        bytes.truncate(end);
    }
    bytes
}

/// Error of the stream below the archive. Errors of the kernel keep their kind; errors of a decompressor mean damaged content.
pub fn read_error(error: io::Error) -> ImageError {
    if let Some(refusal) = LimitExceeded::of(&error) {
        return ImageError::hostile(refusal);
    }
    if error.kind() == io::ErrorKind::StorageFull {
        return ImageError::io("write", "a layer", error);
    }
    match error.raw_os_error() {
        Some(_) => ImageError::io("read", "a layer", error),
        None if error.kind() == io::ErrorKind::UnexpectedEof => damaged("it ends too early"),
        None => damaged(&error.to_string()),
    }
}

/// Message of an exceeded limit, which a `Read` passes on in [`io::Error`].
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct LimitExceeded(pub(crate) String);

impl LimitExceeded {
    pub(crate) fn error(what: String) -> io::Error {
        io::Error::other(Self(what))
    }

    fn of(error: &io::Error) -> Option<String> {
        error.get_ref()?.downcast_ref::<Self>().map(|r| r.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gnu(path: &str, kind: u8, size: u64) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        header.set_entry_type(tar::EntryType::new(kind));
        header.set_size(size);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_cksum();
        header
    }

    fn read(bytes: &[u8]) -> Result<Vec<Member>, ImageError> {
        let limits = Limits::default();
        let mut reader = Reader::new(bytes, &limits);
        let mut all = Vec::new();
        while let Some(member) = reader.next_member()? {
            all.push(member);
        }
        reader.drain().map(|()| all)
    }

    #[test]
    fn long_names_and_binary_records_survive() {
        let mut builder = tar::Builder::new(Vec::new());
        let value = b"\x01\n0 \n=\x00\xff\n";
        builder
            .append_pax_extensions([
                ("SCHILY.xattr.security.capability", &value[..]),
                ("mtime", b"-1.5".as_slice()),
            ])
            .unwrap();
        builder.append(&gnu("f", b'0', 3), &b"abc"[..]).unwrap();
        let long = "d/".repeat(120) + "name";
        let mut header = gnu("x", b'2', 0);
        builder.append_link(&mut header, &long, "t".repeat(200)).unwrap();
        let members = read(&builder.into_inner().unwrap()).unwrap();
        assert_eq!(members[0].xattrs[b"security.capability".as_slice()], value);
        assert_eq!(members[0].mtime, (-2, 500_000_000));
        assert_eq!(members[1].path, long.as_bytes());
        assert_eq!(members[1].kind, Kind::Symlink("t".repeat(200).into_bytes()));
    }

    #[test]
    fn damaged_archive_table() {
        let mut whole = gnu("f", b'0', 3).as_bytes().to_vec();
        whole.extend(b"abc");
        assert_eq!(read(&whole).unwrap().len(), 1, "the last padding may be missing");
        let mut flipped = whole.clone();
        flipped[0] ^= 1;
        let huge = gnu("f", b'x', u64::MAX >> 1).as_bytes().to_vec();
        for (why, bytes, want) in [
            ("cut in a file", &whole[..514], "inside a file"),
            ("cut in a header", &whole[..100], "inside a header"),
            ("bad checksum", &flipped, "checksum"),
            ("huge extended header", &huge, "extended tar header"),
            ("sparse", gnu("f", b'S', 0).as_bytes(), "sparse"),
            ("unknown kind", gnu("f", b'!', 0).as_bytes(), "kind"),
        ] {
            let error = read(bytes).unwrap_err().to_string();
            assert!(error.contains(want), "{why}: {error}");
        }
    }

    proptest! {
        #[test]
        fn header_fuzz_does_not_panic(
            spoiled in proptest::collection::vec((0usize..512, any::<u8>()), 0..12),
            kind in prop::sample::select(b"0123456xgLKS".to_vec()),
            data in proptest::collection::vec(any::<u8>(), 0..700),
            sum in any::<bool>(),
        ) {
            let mut block = *gnu("some/name", kind, data.len() as u64).as_bytes();
            for (place, byte) in spoiled {
                block[place] = byte;
            }
            if sum {
                block[148..156].fill(b' ');
                let total: u32 = block.iter().map(|b| u32::from(*b)).sum();
                block[148..155].copy_from_slice(format!("{total:06o}\0").as_bytes());
            }
            let mut bytes = block.to_vec();
            bytes.extend(data);
            bytes.resize(bytes.len().next_multiple_of(512) + 1024, 0);
            let _ = read(&bytes);
        }

        #[test]
        fn pax_fuzz_does_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..60), text in "([0-9]{1,3} [a-z]{0,6}=?[-.0-9]{0,9}\n){0,3}") {
            let _ = pax::parse(&bytes);
            let _ = pax::time(&bytes);
            if let Ok(records) = pax::parse(text.as_bytes()) {
                for value in records.values() {
                    let _ = (pax::time(value), pax::number(value, "x"));
                }
            }
        }
    }
}
