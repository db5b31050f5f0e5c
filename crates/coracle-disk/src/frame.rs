//! Chunks as zstd frames of 1 MiB followed by a seek table (zstd's "seekable format"). Any zstd decompresses the whole chunk;
//! readers of the table decompress parts.

use std::{
    fs::File,
    io::{self, Write},
    ops::Range,
    os::unix::fs::FileExt,
};

use coracle_image::sparse::{is_zero, write_data};
use coracle_oci::{Digest, Hasher};

/// Raw size of a frame, bytes. The last frame of a chunk may be shorter.
pub(super) const FRAME_BYTES: usize = 1 << 20;
const SKIPPABLE: u32 = 0x184D_2A5E;
const SEEKABLE: u32 = 0x8F92_EAB1;
/// Smallest average of raw bytes per frame, which limits the memory for the table.
const FRAME_MIN: u64 = 64 << 10;
/// Size of the table without its entries, bytes: header of the skippable frame, and footer.
const TABLE_EXTRA: usize = 8 + 9;

/// Digest of the raw bytes of a chunk. `None` when all are zero. Holes are not read, and leading zeros are hashed only when
/// other bytes follow, because most of a typical disk is zero.
pub(super) fn hash_range(file: &File, part: &Range<u64>) -> io::Result<Option<Digest>> {
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

/// Copies a range from one file to another and returns its digest. `None` when the range is a hole or beyond the end of the
/// file, and nothing was copied. The digest is that of the copied bytes, even if the source changes meanwhile.
pub(super) fn copy_range(from: &File, to: &File, part: &Range<u64>) -> io::Result<Option<Digest>> {
    if from.metadata()?.len() < part.end || !has_data(from, part)? {
        return Ok(None);
    }
    let (mut hasher, target_range) = (Hasher::default(), SparseTarget::of(to, part)?);
    each_frame(from, part, |at, frame| {
        hasher.update(frame);
        target_range.write(frame, at)
    })?;
    Ok(Some(hasher.finish()))
}

/// False when the file system reports the range as a hole.
fn has_data(file: &File, part: &Range<u64>) -> io::Result<bool> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(part.start)) {
        Ok(at) => Ok(at < part.end),
        // Only a hole follows the start.
        Err(rustix::io::Errno::NXIO) => Ok(false),
        // The file system does not support holes.
        Err(rustix::io::Errno::INVAL) => Ok(true),
        Err(e) => Err(e.into()),
    }
}

/// Compresses a chunk. Needs memory of twice its size.
pub(super) fn compress(file: &File, part: &Range<u64>, level: i32) -> io::Result<Vec<u8>> {
    let mut compressed_chunk = Vec::new();
    compress_into(&mut compressed_chunk, file, part, level)?;
    Ok(compressed_chunk)
}

/// Compresses a chunk into a writer. Needs memory for a few frames.
pub(super) fn compress_into(
    compressed_chunk: &mut impl Write,
    file: &File,
    part: &Range<u64>,
    level: i32,
) -> io::Result<()> {
    let mut compressor = zstd::bulk::Compressor::new(level)?;
    let mut table = Vec::new();
    // Uses one buffer for all frames: allocation costs as much as compression.
    let mut compressed = vec![0; zstd::zstd_safe::compress_bound(FRAME_BYTES)];
    each_frame(file, part, |_, frame| {
        let length = compressor.compress_to_buffer(frame, &mut compressed[..])?;
        table.push((size(length)?, size(frame.len())?));
        compressed_chunk.write_all(&compressed[..length])
    })?;
    compressed_chunk.write_all(&SKIPPABLE.to_le_bytes())?;
    compressed_chunk.write_all(&size(table.len() * 8 + 9)?.to_le_bytes())?;
    for (compressed, raw) in &table {
        compressed_chunk.write_all(&compressed.to_le_bytes())?;
        compressed_chunk.write_all(&raw.to_le_bytes())?;
    }
    compressed_chunk.write_all(&size(table.len())?.to_le_bytes())?;
    compressed_chunk.write_all(&[0])?;
    compressed_chunk.write_all(&SEEKABLE.to_le_bytes())
}

/// Compressed chunk in memory or in a file.
pub(super) trait CompressedChunk {
    fn bytes(&self) -> io::Result<u64>;
    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()>;
}

impl CompressedChunk for [u8] {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(at).ok().and_then(|at| self.get(at..)?.get(..to.len()));
        to.copy_from_slice(from.ok_or_else(|| invalid("it is truncated"))?);
        Ok(())
    }
}

impl CompressedChunk for File {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(to, at)
    }
}

/// Range of a file that a chunk is written to. Zeros become holes.
pub(super) struct SparseTarget<'a> {
    file: &'a File,
    has_holes: bool,
}

impl<'a> SparseTarget<'a> {
    /// Clears earlier content of the range.
    pub(super) fn of(file: &'a File, part: &Range<u64>) -> io::Result<Self> {
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(file, flags, part.start, part.end - part.start) {
            Ok(()) => Ok(Self { file, has_holes: true }),
            // `INVAL` is returned for an empty range.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL) => {
                Ok(Self { file, has_holes: false })
            }
            Err(e) => Err(e.into()),
        }
    }

    pub(super) fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        if self.has_holes { write_data(self.file, bytes, at) } else { self.file.write_all_at(bytes, at) }
    }
}

/// Decompresses a chunk into its range and returns the digest of the raw bytes.
pub(super) fn decompress<P: CompressedChunk + ?Sized>(
    compressed_chunk: &P,
    file: &File,
    part: &Range<u64>,
) -> io::Result<Digest> {
    let target_range = SparseTarget::of(file, part)?;
    let (mut decompressor, mut hasher) = (zstd::bulk::Decompressor::new()?, Hasher::default());
    let (mut from, mut at, mut buffer) = (0, part.start, vec![0; FRAME_BYTES]);
    let mut frame = vec![0; zstd::zstd_safe::compress_bound(FRAME_BYTES)];
    for (compressed, raw) in table(compressed_chunk, part.end - part.start)? {
        let frame = frame.get_mut(..compressed).ok_or_else(|| invalid("a frame is larger than the bound"))?;
        compressed_chunk.read(from, frame)?;
        // The buffer is at least as large as every frame in the table.
        let length = decompressor.decompress_to_buffer(&*frame, &mut buffer[..raw]);
        let length = length.map_err(|_| invalid("a frame cannot be decompressed"))?;
        if length != raw || at + raw as u64 > part.end {
            return Err(invalid("the length of a frame differs from the table"));
        }
        hasher.update(&buffer[..length]);
        target_range.write(&buffer[..length], at)?;
        (from, at) = (from + compressed as u64, at + raw as u64);
    }
    if at != part.end {
        return Err(invalid("it is shorter than its range"));
    }
    Ok(hasher.finish())
}

/// Compressed and raw sizes of the frames of a chunk of `chunk_bytes`.
fn table<P: CompressedChunk + ?Sized>(
    compressed_chunk: &P,
    chunk_bytes: u64,
) -> io::Result<Vec<(usize, usize)>> {
    let word = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let bytes = compressed_chunk.bytes()?;
    let footer = bytes.checked_sub(9).ok_or_else(|| invalid("the seek table is missing"))?;
    let mut end = [0; 9];
    compressed_chunk.read(footer, &mut end)?;
    let count = u64::from(word(&end));
    if count > chunk_bytes / FRAME_MIN + 16 {
        return Err(invalid("it has more frames than allowed"));
    }
    let length = count * 8 + TABLE_EXTRA as u64;
    let begin =
        bytes.checked_sub(length).ok_or_else(|| invalid("the seek table is longer than the chunk"))?;
    let mut head = [0; 8];
    compressed_chunk.read(begin, &mut head)?;
    if word(&end[5..]) != SEEKABLE || word(&head) != SKIPPABLE || end[4] != 0 {
        return Err(invalid("the seek table is missing"));
    }
    let mut entries = vec![0; usize::try_from(count * 8).map_err(io::Error::other)?];
    compressed_chunk.read(begin + 8, &mut entries)?;
    let entries = entries.chunks_exact(8).map(|entry| (word(entry) as usize, word(&entry[4..]) as usize));
    let entries: Vec<_> = entries.collect();
    match entries.iter().all(|(_, raw)| *raw <= FRAME_BYTES) {
        true => Ok(entries),
        false => Err(invalid("a frame is larger than 1 MiB")),
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

fn invalid(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
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
    fn chunk_round_trip_keeps_bytes_and_range() {
        let noise: Vec<u8> =
            (0..3_500_000u32).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[2]).collect();
        let (source, part) = (file(&noise), 100_000..3_400_000);
        let compressed_chunk = compress(&source, &part, 1).unwrap();
        let target = file(&[]);
        let digest = decompress(compressed_chunk.as_slice(), &target, &part).unwrap();
        assert_eq!(decompress(&file(&compressed_chunk), &target, &part).unwrap(), digest, "out of a file");
        assert_eq!(Some(digest), hash_range(&source, &part).unwrap());
        let mut back = vec![0; 3_300_000];
        target.read_exact_at(&mut back, 100_000).unwrap();
        assert!(back == noise[100_000..3_400_000]);
        let plain = zstd::stream::decode_all(compressed_chunk.as_slice()).unwrap();
        assert!(plain == back, "plain zstd decompresses it");
        assert!(
            decompress(compressed_chunk.as_slice(), &target, &(0..3_200_000)).is_err(),
            "more than the chunk"
        );
        assert!(
            decompress(compressed_chunk.as_slice(), &target, &(0..3_400_000)).is_err(),
            "less than the chunk"
        );
    }

    #[test]
    fn zeros_of_a_chunk_replace_old_bytes_by_holes() {
        use std::os::unix::fs::MetadataExt;
        let mut bytes = vec![0; 4 << 20];
        bytes[(2 << 20) + 5] = 1;
        let (source, part) = (file(&bytes), 0..4 << 20);
        let compressed_chunk = compress(&source, &part, 1).unwrap();
        let fresh = tempfile::tempfile().unwrap();
        fresh.set_len(4 << 20).unwrap();
        let moves: [&dyn Fn(&File); 2] =
            [&|to| assert!(decompress(compressed_chunk.as_slice(), to, &part).is_ok()), &|to| {
                assert!(copy_range(&source, to, &part).unwrap().is_some())
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
    fn seek_table_with_too_many_frames_is_refused() {
        let count = 1_000_000u32;
        let mut bytes = SKIPPABLE.to_le_bytes().to_vec();
        bytes.extend((count * 8 + 9).to_le_bytes());
        bytes.resize(bytes.len() + count as usize * 8, 0);
        bytes.extend(count.to_le_bytes());
        bytes.push(0);
        bytes.extend(SEEKABLE.to_le_bytes());
        let refused = decompress(bytes.as_slice(), &file(&[]), &(0..1 << 20)).unwrap_err();
        assert!(refused.to_string().contains("more frames"), "{refused}");
    }

    #[test]
    fn hash_of_a_zero_range_is_none() {
        assert_eq!(hash_range(&file(&[0; 3_000_000]), &(0..3_000_000)).unwrap(), None);
        for at in [0, 1, 1_500_000, 2_999_999] {
            let mut bytes = vec![0; 3_000_000];
            bytes[at] = 1;
            let want = Some(Digest::of(&bytes));
            assert_eq!(hash_range(&file(&bytes), &(0..3_000_000)).unwrap(), want, "{at}");
            let sparse = tempfile::tempfile().unwrap();
            sparse.set_len(6_000_000).unwrap();
            sparse.write_all_at(&[1], 3_000_000 + at as u64).unwrap();
            assert_eq!(hash_range(&sparse, &(3_000_000..6_000_000)).unwrap(), want, "{at}, among holes");
            assert_eq!(hash_range(&sparse, &(0..2_000_000)).unwrap(), None);
        }
    }

    proptest! {
        #[test]
        fn decompress_fuzz_does_not_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), real in any::<bool>(), at in any::<usize>(), value in any::<u8>()) {
            if real {
                bytes = compress(&file(&bytes), &(0..bytes.len() as u64), 1).unwrap();
                let place = at % bytes.len();
                bytes[place] = value;
            }
            let _either = decompress(bytes.as_slice(), &file(&[]), &(0..200));
        }
    }
}
