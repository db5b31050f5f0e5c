//! One window as zstd frames of 1 MiB with a seek table behind them (zstd's "seekable format"): any zstd reads the whole,
//! and who knows the table reads a part.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt};

use crate::{
    Digest,
    digest::Hasher,
    sparse::{is_zero, write_data},
};

/// Raw bytes of a frame; the last one of a window may have less.
pub(super) const FRAME_BYTES: usize = 1 << 20;
const SKIPPABLE: u32 = 0x184D_2A5E;
const SEEKABLE: u32 = 0x8F92_EAB1;
/// Bytes of the table besides its entries: header of the skippable frame, footer.
const TABLE_EXTRA: usize = 8 + 9;

/// Digest of a window's raw bytes. `None`: it is all zero. What is a hole is not read, and zeros in front of everything
/// else are hashed only when something follows: most of most disks is zero.
pub(super) fn look(file: &File, part: &Range<u64>) -> io::Result<Option<Digest>> {
    if !has_data(file, part)? {
        return Ok(None);
    }
    let (mut hasher, mut zeros, mut zero) = (Hasher::default(), 0, true);
    each_frame(file, part, |_, frame| {
        if zero && is_zero(frame) {
            zeros += frame.len();
            return Ok(());
        }
        if zero {
            let none = vec![0; FRAME_BYTES.min(zeros)];
            while zeros > 0 {
                let some = &none[..none.len().min(zeros)];
                hasher.update(some);
                zeros -= some.len();
            }
            zero = false;
        }
        hasher.update(frame);
        Ok(())
    })?;
    Ok((!zero).then(|| hasher.finish()))
}

/// Copies a part of one file to the same place of another and returns its digest; `None`, and nothing is copied, when it
/// is not there or a hole. What is copied is what was hashed, also when somebody writes meanwhile.
pub(super) fn copy(from: &File, to: &File, part: &Range<u64>) -> io::Result<Option<Digest>> {
    if from.metadata()?.len() < part.end || !has_data(from, part)? {
        return Ok(None);
    }
    let (mut hasher, place) = (Hasher::default(), Place::of(to, part)?);
    each_frame(from, part, |at, frame| {
        hasher.update(frame);
        place.write(frame, at)
    })?;
    Ok(Some(hasher.finish()))
}

/// False when the file system knows that a part is a hole.
fn has_data(file: &File, part: &Range<u64>) -> io::Result<bool> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(part.start)) {
        Ok(at) => Ok(at < part.end),
        // Behind the start there are only holes.
        Err(rustix::io::Errno::NXIO) => Ok(false),
        // A file system without holes.
        Err(rustix::io::Errno::INVAL) => Ok(true),
        Err(e) => Err(e.into()),
    }
}

/// A window, compressed.
pub(super) fn pack(file: &File, part: &Range<u64>, level: i32) -> io::Result<Vec<u8>> {
    let mut compressor = zstd::bulk::Compressor::new(level)?;
    let (mut packed, mut table) = (Vec::new(), Vec::new());
    // One buffer for all frames: memory that is new each time costs as much as the compressing.
    let mut compressed = vec![0; zstd::zstd_safe::compress_bound(FRAME_BYTES)];
    each_frame(file, part, |_, frame| {
        let length = compressor.compress_to_buffer(frame, &mut compressed[..])?;
        table.push((size(length)?, size(frame.len())?));
        packed.extend_from_slice(&compressed[..length]);
        Ok(())
    })?;
    packed.extend(SKIPPABLE.to_le_bytes());
    packed.extend(size(table.len() * 8 + 9)?.to_le_bytes());
    for (compressed, raw) in &table {
        packed.extend(compressed.to_le_bytes());
        packed.extend(raw.to_le_bytes());
    }
    packed.extend(size(table.len())?.to_le_bytes());
    packed.push(0);
    packed.extend(SEEKABLE.to_le_bytes());
    Ok(packed)
}

/// Where a window goes: what is zero in it stays a hole.
struct Place<'a> {
    file: &'a File,
    has_holes: bool,
}

impl<'a> Place<'a> {
    /// Nothing of an earlier pull is left there.
    fn of(file: &'a File, part: &Range<u64>) -> io::Result<Self> {
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(file, flags, part.start, part.end - part.start) {
            Ok(()) => Ok(Self { file, has_holes: true }),
            // The second is that of an empty part.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL) => {
                Ok(Self { file, has_holes: false })
            }
            Err(e) => Err(e.into()),
        }
    }

    fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        if self.has_holes { write_data(self.file, bytes, at) } else { self.file.write_all_at(bytes, at) }
    }
}

/// Writes a window's raw bytes to its place and returns their digest.
pub(super) fn unpack(packed: &[u8], file: &File, part: &Range<u64>) -> io::Result<Digest> {
    let place = Place::of(file, part)?;
    let (mut decompressor, mut hasher) = (zstd::bulk::Decompressor::new()?, Hasher::default());
    let (mut rest, mut at, mut buffer) = (packed, part.start, vec![0; FRAME_BYTES]);
    for (compressed, raw) in table(packed)? {
        let (frame, behind) =
            rest.split_at_checked(compressed).ok_or_else(|| broken("its table is longer than it"))?;
        // The table's frames are none larger than the buffer.
        let length = decompressor.decompress_to_buffer(frame, &mut buffer[..raw]);
        let length = length.map_err(|_| broken("a frame does not unpack"))?;
        if length != raw || at + raw as u64 > part.end {
            return Err(broken("a frame has another length than the table says"));
        }
        hasher.update(&buffer[..length]);
        place.write(&buffer[..length], at)?;
        (rest, at) = (behind, at + raw as u64);
    }
    if at != part.end {
        return Err(broken("it is shorter than the window"));
    }
    Ok(hasher.finish())
}

/// Compressed and raw bytes of each frame.
fn table(packed: &[u8]) -> io::Result<Vec<(usize, usize)>> {
    let word =
        |at: usize| -> Option<u32> { Some(u32::from_le_bytes(packed.get(at..at + 4)?.try_into().ok()?)) };
    let footer = packed.len().checked_sub(9).ok_or_else(|| broken("it has no table"))?;
    let count = word(footer).unwrap_or(0) as usize;
    let length = count.checked_mul(8).and_then(|n| n.checked_add(TABLE_EXTRA)).unwrap_or(usize::MAX);
    let begin = packed.len().checked_sub(length).ok_or_else(|| broken("its table is longer than it"))?;
    let marked = word(footer + 5) == Some(SEEKABLE) && word(begin) == Some(SKIPPABLE);
    if !marked || packed.get(footer + 4) != Some(&0) {
        return Err(broken("it has no table"));
    }
    let entries = packed[begin + 8..footer].chunks_exact(8).map(|entry| {
        let number = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        (number(&entry[..4]), number(&entry[4..]))
    });
    let entries: Vec<_> = entries.collect();
    match entries.iter().all(|(_, raw)| *raw <= FRAME_BYTES) {
        true => Ok(entries),
        false => Err(broken("a frame is larger than 1 MiB")),
    }
}

fn each_frame(
    file: &File,
    part: &Range<u64>,
    mut work: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let (mut buffer, mut at) = (vec![0; FRAME_BYTES], part.start);
    while at < part.end {
        let length = usize::try_from(part.end - at).unwrap_or(FRAME_BYTES).min(FRAME_BYTES);
        file.read_exact_at(&mut buffer[..length], at)?;
        work(at, &buffer[..length])?;
        at += length as u64;
    }
    Ok(())
}

fn size(n: usize) -> io::Result<u32> {
    u32::try_from(n).map_err(io::Error::other)
}

fn broken(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(bytes: &[u8]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        file
    }

    #[test]
    fn window_comes_back_whole_and_in_its_place() {
        let noise: Vec<u8> =
            (0..3_500_000u32).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[2]).collect();
        let (source, part) = (file(&noise), 100_000..3_400_000);
        let packed = pack(&source, &part, 1).unwrap();
        let target = file(&[]);
        let digest = unpack(&packed, &target, &part).unwrap();
        assert_eq!(Some(digest), look(&source, &part).unwrap());
        let mut back = vec![0; 3_300_000];
        target.read_exact_at(&mut back, 100_000).unwrap();
        assert!(back == noise[100_000..3_400_000]);
        let plain = zstd::stream::decode_all(packed.as_slice()).unwrap();
        assert!(plain == back, "any zstd reads it");
        assert!(unpack(&packed, &target, &(0..3_200_000)).is_err(), "more than the window");
        assert!(unpack(&packed, &target, &(0..3_400_000)).is_err(), "less than the window");
    }

    #[test]
    fn zeros_of_a_window_are_holes_also_over_what_was_there() {
        use std::os::unix::fs::MetadataExt;
        let mut bytes = vec![0; 4 << 20];
        bytes[(2 << 20) + 5] = 1;
        let (source, part) = (file(&bytes), 0..4 << 20);
        let packed = pack(&source, &part, 1).unwrap();
        let fresh = tempfile::tempfile().unwrap();
        fresh.set_len(4 << 20).unwrap();
        let moves: [&dyn Fn(&File); 2] = [&|to| assert!(unpack(&packed, to, &part).is_ok()), &|to| {
            assert!(copy(&source, to, &part).unwrap().is_some())
        }];
        for (target, put) in [fresh, file(&vec![7; 4 << 20])].iter().flat_map(|t| moves.map(|m| (t, m))) {
            put(target);
            let mut back = vec![9; 4 << 20];
            target.read_exact_at(&mut back, 0).unwrap();
            assert!(back == bytes);
            assert!(target.metadata().unwrap().blocks() * 512 <= 1 << 20);
        }
    }

    #[test]
    fn zero_is_seen() {
        assert_eq!(look(&file(&[0; 3_000_000]), &(0..3_000_000)).unwrap(), None);
        for at in [0, 1, 1_500_000, 2_999_999] {
            let mut bytes = vec![0; 3_000_000];
            bytes[at] = 1;
            let want = Some(Digest::of(&bytes));
            assert_eq!(look(&file(&bytes), &(0..3_000_000)).unwrap(), want, "{at}");
            let sparse = tempfile::tempfile().unwrap();
            sparse.set_len(6_000_000).unwrap();
            sparse.write_all_at(&[1], 3_000_000 + at as u64).unwrap();
            assert_eq!(look(&sparse, &(3_000_000..6_000_000)).unwrap(), want, "{at}, among holes");
            assert_eq!(look(&sparse, &(0..2_000_000)).unwrap(), None);
        }
    }

    proptest! {
        #[test]
        fn hostile_window_is_an_error_and_no_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), real in any::<bool>(), at in any::<usize>(), value in any::<u8>()) {
            if real {
                bytes = pack(&file(&bytes), &(0..bytes.len() as u64), 1).unwrap();
                let place = at % bytes.len();
                bytes[place] = value;
            }
            let _either = unpack(&bytes, &file(&[]), &(0..200));
        }
    }
}
