//! Bundle of several files in one stream: for VMMs that save into a directory, where a snapshot is one file.
//!
//! ```text
//! "CORBNDL1" count:u32 { name_length:u16 name length:u64 }… { { offset:u64 bytes:u64 data }… u64::MAX }…
//! ```
//! Numbers are big-endian. Pieces that are all zero are left out.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;

use crate::memory::visit_pieces;

const MAGIC: [u8; 8] = *b"CORBNDL1";
/// Marks the end of a file, after its last piece.
const END: u64 = u64::MAX;
/// Maximum length of a part's name.
const NAME_BYTES_MAX: u16 = 64;
/// Maximum length of a piece that is read at once.
const PIECE_BYTES_MAX: u64 = 1 << 20;

/// Writes `parts` to `out` from its current offset, and leaves the offset at the end of the bundle. Blocking.
///
/// # Errors
/// For example when the disk is full.
pub fn pack(out: &File, parts: &[(&str, &File)]) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(1 << 16, out);
    out.write_all(&MAGIC)?;
    out.write_all(&u32::try_from(parts.len()).unwrap_or(u32::MAX).to_be_bytes())?;
    for (name, file) in parts {
        out.write_all(&u16::try_from(name.len()).unwrap_or(u16::MAX).to_be_bytes())?;
        out.write_all(name.as_bytes())?;
        out.write_all(&file.metadata()?.len().to_be_bytes())?;
    }
    for (_, file) in parts {
        visit_pieces(file, file.metadata()?.len(), |offset, piece| {
            out.write_all(&offset.to_be_bytes())?;
            out.write_all(&(piece.len() as u64).to_be_bytes())?;
            out.write_all(piece)
        })?;
        out.write_all(&END.to_be_bytes())?;
    }
    out.flush()
}

/// Reads a bundle of [`pack`] from the current offset of `input` into the empty files of `parts`. The bundle must have exactly
/// these names, and no part may exceed its limit in bytes. Blocking.
///
/// # Errors
/// `InvalidData` unless it is a bundle of these parts.
pub fn unpack(input: &File, parts: &[(&str, u64, &File)]) -> io::Result<()> {
    let mut input = BufReader::with_capacity(1 << 16, input);
    if bytes::<8>(&mut input)? != MAGIC {
        return Err(invalid("not a saved VMM of this driver"));
    }
    let count = u32::from_be_bytes(bytes(&mut input)?);
    if usize::try_from(count).ok() != Some(parts.len()) {
        return Err(invalid("it has another number of parts"));
    }
    for (name, limit, file) in parts {
        let long = u16::from_be_bytes(bytes(&mut input)?).min(NAME_BYTES_MAX);
        let mut found = vec![0; usize::from(long)];
        input.read_exact(&mut found)?;
        let length = u64::from_be_bytes(bytes(&mut input)?);
        if found != name.as_bytes() || length > *limit {
            return Err(invalid("a part has another name, or is too long"));
        }
        file.set_len(length)?;
    }
    for (_, _, file) in parts {
        fill(&mut input, file)?;
    }
    Ok(())
}

fn fill(input: &mut impl Read, file: &File) -> io::Result<()> {
    let length = file.metadata()?.len();
    let mut piece = Vec::new();
    loop {
        let offset = u64::from_be_bytes(bytes(input)?);
        if offset == END {
            return Ok(());
        }
        let long = u64::from_be_bytes(bytes(input)?);
        let fits = offset.checked_add(long).is_some_and(|end| end <= length);
        if !fits || long > PIECE_BYTES_MAX {
            return Err(invalid("a piece is outside of its part"));
        }
        piece.resize(usize::try_from(long).unwrap_or_default(), 0);
        input.read_exact(&mut piece)?;
        file.write_all_at(&piece, offset)?;
    }
}

fn bytes<const N: usize>(input: &mut impl Read) -> io::Result<[u8; N]> {
    let mut found = [0; N];
    input.read_exact(&mut found)?;
    Ok(found)
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom};

    use super::*;

    fn file(content: &[(u64, &[u8])], length: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(length).unwrap();
        content.iter().for_each(|(at, data)| file.write_all_at(data, *at).unwrap());
        file
    }

    #[test]
    fn bundle_round_trip_preserves_parts_and_holes() {
        let (state, memory) =
            (file(&[(0, b"state")], 5), file(&[(1 << 20, b"x"), (60 << 20, b"y")], 64 << 20));
        let mut bundle = tempfile::tempfile().unwrap();
        bundle.write_all(b"before").unwrap();
        pack(&bundle, &[("state", &state), ("memory", &memory)]).unwrap();
        let end = bundle.stream_position().unwrap();
        assert!(end < 4 << 20, "{end} bytes");
        bundle.seek(SeekFrom::Start(6)).unwrap();
        let [one, two] = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
        unpack(&bundle, &[("state", 100, &one), ("memory", 64 << 20, &two)]).unwrap();
        let read = |file: &File| {
            let mut bytes = Vec::new();
            let mut file = file;
            file.rewind().unwrap();
            file.read_to_end(&mut bytes).unwrap();
            bytes
        };
        assert!(read(&one) == read(&state) && read(&two) == read(&memory));
    }

    #[test]
    fn unpack_refuses_foreign_bundle() {
        let whole = |parts: &[(&str, &File)]| {
            let mut bundle = tempfile::tempfile().unwrap();
            pack(&bundle, parts).unwrap();
            let mut bytes = Vec::new();
            bundle.rewind().unwrap();
            bundle.read_to_end(&mut bytes).unwrap();
            bytes
        };
        let state = file(&[(0, b"state")], 5);
        let good = whole(&[("state", &state)]);
        let outside = {
            let mut bytes = good.clone();
            let at = bytes.len() - 8 - 5 - 16;
            bytes[at + 7] = 9;
            bytes
        };
        let cases: [(&str, Vec<u8>); 7] = [
            ("nothing", vec![]),
            ("something else", b"QEVM a stream of another program".to_vec()),
            ("cut off", good[..good.len() - 3].to_vec()),
            ("another name", whole(&[("other", &state)])),
            ("two parts", whole(&[("state", &state), ("more", &state)])),
            ("too long", whole(&[("state", &file(&[], 1 << 30))])),
            ("a piece outside", outside),
        ];
        for (why, bytes) in cases {
            let bundle = file(&[(0, &bytes)], bytes.len() as u64);
            let out = tempfile::tempfile().unwrap();
            assert!(unpack(&bundle, &[("state", 1 << 20, &out)]).is_err(), "{why}");
        }
    }
}
