//! Apple's framing of LZ4 blocks, as its compression library writes it and disks of tart use it.
//!
//! ```text
//! bv41  raw length  packed length  LZ4 block     may refer back into the 64 KiB before it
//! bv4-  length      bytes                        stored
//! bv4$                                           end mark
//! ```
//! Numbers are 32 bits, little endian. The format of the blocks is specified in "LZ4 Block Format Description".

use std::io::{self, Read, Write};

use lz4_flex::block::{compress, decompress_into_with_dict};

/// Distance to which a block may refer back, bytes.
const HISTORY_BYTES: usize = 64 << 10;
/// Longest raw or compressed block that is read, bytes: Apple's library writes 64 KiB, some writers a few MiB.
const BLOCK_MAX: usize = 16 << 20;
/// Raw size of a written block, bytes, as in Apple's library.
const PACKED_BLOCK: usize = 64 << 10;

/// Decompresses a whole stream. Bytes after the end mark are an error.
///
/// # Errors
/// `InvalidData` for an invalid stream; those of `to`.
pub(in super::super) fn unpack(mut from: impl Read, mut to: impl Write) -> io::Result<()> {
    let mut history = Vec::new();
    loop {
        let mut magic = [0; 4];
        from.read_exact(&mut magic).map_err(|_| invalid("the end mark is missing"))?;
        let block = match &magic {
            b"bv41" => {
                let (raw, compressed) = (length(&mut from)?, length(&mut from)?);
                decompress(&read_block(&mut from, compressed)?, raw, &history)?
            }
            b"bv4-" => {
                let raw = length(&mut from)?;
                read_block(&mut from, raw)?
            }
            b"bv4$" => {
                return match from.read(&mut [0; 1])? {
                    0 => Ok(()),
                    _ => Err(invalid("bytes behind the end mark")),
                };
            }
            _ => return Err(invalid("unknown block mark")),
        };
        to.write_all(&block)?;
        history.extend_from_slice(&block);
        history.drain(..history.len().saturating_sub(HISTORY_BYTES));
    }
}

fn length(from: &mut impl Read) -> io::Result<usize> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes).map_err(|_| invalid("truncated block"))?;
    let length = usize::try_from(u32::from_le_bytes(bytes)).unwrap_or(usize::MAX);
    if length <= BLOCK_MAX { Ok(length) } else { Err(invalid("block is too long")) }
}

fn read_block(from: &mut impl Read, length: usize) -> io::Result<Vec<u8>> {
    let mut block = vec![0; length];
    from.read_exact(&mut block).map_err(|_| invalid("truncated block"))?;
    Ok(block)
}

/// Compresses a whole stream. Each block is compressed independently, and stored where that is shorter.
///
/// # Errors
/// Errors of `from` and `to`.
pub(in super::super) fn pack(mut from: impl Read, mut to: impl Write) -> io::Result<()> {
    let mut block = Vec::with_capacity(PACKED_BLOCK);
    loop {
        block.clear();
        from.by_ref().take(PACKED_BLOCK as u64).read_to_end(&mut block)?;
        if block.is_empty() {
            return to.write_all(b"bv4$");
        }
        let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes();
        let packed = compress(&block);
        if packed.len() < block.len() {
            to.write_all(&[b"bv41".as_slice(), &length(&block), &length(&packed), &packed].concat())?;
        } else {
            to.write_all(&[b"bv4-".as_slice(), &length(&block), &block].concat())?;
        }
    }
}

/// Decompresses the `raw` bytes of an LZ4 block, which may refer to `history`.
fn decompress(block: &[u8], raw: usize, history: &[u8]) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; raw];
    let length = decompress_into_with_dict(block, &mut bytes, history);
    match length.map_err(|_| invalid("invalid LZ4 block"))? == raw {
        true => Ok(bytes),
        false => Err(invalid("block is shorter than announced")),
    }
}

fn invalid(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lz4_frames(parts: &[(&[u8; 4], usize, &[u8])]) -> Vec<u8> {
        let mut all = Vec::new();
        for (magic, raw, bytes) in parts {
            all.extend_from_slice(*magic);
            if *magic != b"bv4$" {
                all.extend(u32::try_from(*raw).unwrap().to_le_bytes());
            }
            if *magic == b"bv41" {
                all.extend(u32::try_from(bytes.len()).unwrap().to_le_bytes());
            }
            all.extend_from_slice(bytes);
        }
        all
    }

    fn raw(stream: &[u8]) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        unpack(stream, &mut out).map(|()| out)
    }

    const END: (&[u8; 4], usize, &[u8]) = (b"bv4$", 0, b"");

    #[test]
    fn stream_table() {
        // Literals "abc", then nine bytes from distance 3, then the literal "!".
        let run: &[u8] = &[0x35, b'a', b'b', b'c', 3, 0, 0x10, b'!'];
        // Four bytes from distance 12, which the previous block has written. Then one literal.
        let back: &[u8] = &[0x00, 12, 0, 0x10, b'.'];
        // Fifteen literals and five more.
        let long = [&[0xf0, 5][..], &[b'z'; 20]].concat();
        for (why, stream, want) in [
            ("empty", lz4_frames(&[END]), Some(Vec::new())),
            ("stored", lz4_frames(&[(b"bv4-", 3, b"xyz"), END]), Some(b"xyz".to_vec())),
            ("a run", lz4_frames(&[(b"bv41", 13, run), END]), Some(b"abcabcabcabc!".to_vec())),
            (
                "back into the last block",
                lz4_frames(&[(b"bv4-", 12, b"hello worlds"), (b"bv41", 5, back), END]),
                Some(b"hello worldshell.".to_vec()),
            ),
            ("many literals", lz4_frames(&[(b"bv41", 20, &long), END]), Some(vec![b'z'; 20])),
            ("no end", lz4_frames(&[(b"bv4-", 3, b"xyz")]), None),
            ("bytes behind the end mark", lz4_frames(&[END, END]), None),
            ("another mark", lz4_frames(&[(b"bvx2", 3, b"xyz"), END]), None),
            ("longer than announced", lz4_frames(&[(b"bv41", 12, run), END]), None),
            ("shorter than announced", lz4_frames(&[(b"bv41", 14, run), END]), None),
            ("reference before the beginning", lz4_frames(&[(b"bv41", 5, back), END]), None),
            ("endless", lz4_frames(&[(b"bv4-", 1 << 30, b""), END]), None),
        ] {
            assert_eq!(raw(&stream).ok(), want, "{why}");
        }
    }

    proptest! {
        #[test]
        fn unpack_reverses_pack(
            noise in proptest::collection::vec(any::<u8>(), 0..1000),
            zeroes in 0usize..200_000,
            times in 0usize..200,
        ) {
            let text = [vec![0; zeroes], noise.repeat(times)].concat();
            let mut stream = Vec::new();
            pack(text.as_slice(), &mut stream).unwrap();
            prop_assert_eq!(raw(&stream).unwrap(), text);
        }

        #[test]
        fn unpack_fuzz_does_not_panic(block in proptest::collection::vec(any::<u8>(), 0..300), length in 0usize..500) {
            let _either = raw(&lz4_frames(&[(b"bv41", length, &block), END]));
            let _either = raw(&block);
        }
    }
}
