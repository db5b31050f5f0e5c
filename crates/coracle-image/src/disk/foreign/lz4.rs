//! Apple's framing of LZ4 blocks, as its compression library writes it and tart's disks use it.
//!
//! ```text
//! bv41  raw length  packed length  LZ4 block     may refer back into the 64 KiB before it
//! bv4-  length      bytes                        stored
//! bv4$                                           the end
//! ```
//! Numbers are 32 bits, little endian. The block format is LZ4's ("LZ4 Block Format Description").

use std::io::{self, Read, Write};

/// How far back a block may refer.
const BACK: usize = 64 << 10;
/// Longest block that is read, raw: the library's are 64 KiB, and some writers' a few MiB.
const BLOCK_MAX: usize = 16 << 20;
/// Shortest match.
const MATCH_MIN: usize = 4;

/// Decompresses a whole stream. What follows its end mark is an error.
///
/// # Errors
/// `InvalidData` for what is no such stream; those of `to`.
pub(in super::super) fn unpack(mut from: impl Read, mut to: impl Write) -> io::Result<()> {
    // The last of what was written, then the block being read.
    let mut window = Vec::new();
    loop {
        let mut magic = [0; 4];
        from.read_exact(&mut magic).map_err(|_| broken("it ends without a mark"))?;
        let begin = window.len();
        match &magic {
            b"bv41" => {
                let (raw, packed) = (length(&mut from)?, length(&mut from)?);
                let mut block = vec![0; packed];
                from.read_exact(&mut block).map_err(|_| broken("a block is cut off"))?;
                expand(&block, &mut window, raw)?;
            }
            b"bv4-" => {
                let raw = length(&mut from)?;
                window.resize(begin + raw, 0);
                from.read_exact(&mut window[begin..]).map_err(|_| broken("a block is cut off"))?;
            }
            b"bv4$" => {
                return match from.read(&mut [0; 1])? {
                    0 => Ok(()),
                    _ => Err(broken("there is more behind its end")),
                };
            }
            _ => return Err(broken("a block begins with no mark that is known")),
        }
        to.write_all(&window[begin..])?;
        let keep = window.len().min(BACK);
        window.drain(..window.len() - keep);
    }
}

fn length(from: &mut impl Read) -> io::Result<usize> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes).map_err(|_| broken("a block is cut off"))?;
    let length = usize::try_from(u32::from_le_bytes(bytes)).unwrap_or(usize::MAX);
    if length <= BLOCK_MAX { Ok(length) } else { Err(broken("a block is too long")) }
}

/// Appends the `raw` bytes of an LZ4 block to what came before it.
fn expand(block: &[u8], out: &mut Vec<u8>, raw: usize) -> io::Result<()> {
    let (end, mut at) = (out.len() + raw, 0);
    let short = || broken("a block is shorter than it says");
    loop {
        let token = *block.get(at).ok_or_else(short)?;
        at += 1;
        let literals = count(block, &mut at, usize::from(token >> 4))?;
        let bytes = block.get(at..at + literals).ok_or_else(short)?;
        if out.len() + literals > end {
            return Err(broken("a block has more bytes than it says"));
        }
        out.extend_from_slice(bytes);
        at += literals;
        if at == block.len() {
            // The last sequence has literals alone.
            return if out.len() == end { Ok(()) } else { Err(short()) };
        }
        let back = block.get(at..at + 2).ok_or_else(short)?;
        let back = usize::from(u16::from_le_bytes([back[0], back[1]]));
        at += 2;
        let matched = MATCH_MIN + count(block, &mut at, usize::from(token & 15))?;
        if back == 0 || back > out.len() || out.len() + matched > end {
            return Err(broken("a block refers to what is not there"));
        }
        // Byte by byte: a match may overlap what it makes.
        for _ in 0..matched {
            out.push(out[out.len() - back]);
        }
    }
}

/// A count that goes on in bytes of 255 behind a nibble of 15.
fn count(block: &[u8], at: &mut usize, nibble: usize) -> io::Result<usize> {
    let mut total = nibble;
    if nibble == 15 {
        loop {
            let more = *block.get(*at).ok_or_else(|| broken("a block is cut off"))?;
            *at += 1;
            total += usize::from(more);
            if more != 255 {
                break;
            }
        }
    }
    if total <= BLOCK_MAX { Ok(total) } else { Err(broken("a block is too long")) }
}

fn broken(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn framed(parts: &[(&[u8; 4], usize, &[u8])]) -> Vec<u8> {
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
        // "abc", then nine bytes from three back, then "!".
        let run: &[u8] = &[0x35, b'a', b'b', b'c', 3, 0, 0x10, b'!'];
        // Four bytes from twelve back: what the block before has written. Then one literal.
        let back: &[u8] = &[0x00, 12, 0, 0x10, b'.'];
        // Fifteen literals and five more.
        let long = [&[0xf0, 5][..], &[b'z'; 20]].concat();
        for (why, stream, want) in [
            ("nothing", framed(&[END]), Some(Vec::new())),
            ("stored", framed(&[(b"bv4-", 3, b"xyz"), END]), Some(b"xyz".to_vec())),
            ("a run", framed(&[(b"bv41", 13, run), END]), Some(b"abcabcabcabc!".to_vec())),
            (
                "back into the last block",
                framed(&[(b"bv4-", 12, b"hello worlds"), (b"bv41", 5, back), END]),
                Some(b"hello worldshell.".to_vec()),
            ),
            ("many literals", framed(&[(b"bv41", 20, &long), END]), Some(vec![b'z'; 20])),
            ("no end", framed(&[(b"bv4-", 3, b"xyz")]), None),
            ("more behind the end", framed(&[END, END]), None),
            ("another mark", framed(&[(b"bvx2", 3, b"xyz"), END]), None),
            ("longer than it says", framed(&[(b"bv41", 12, run), END]), None),
            ("shorter than it says", framed(&[(b"bv41", 14, run), END]), None),
            ("back before the beginning", framed(&[(b"bv41", 5, back), END]), None),
            ("endless", framed(&[(b"bv4-", 1 << 30, b""), END]), None),
        ] {
            assert_eq!(raw(&stream).ok(), want, "{why}");
        }
    }

    proptest! {
        #[test]
        fn hostile_stream_is_an_error_and_no_panic(block in proptest::collection::vec(any::<u8>(), 0..300), length in 0usize..500) {
            let _either = raw(&framed(&[(b"bv41", length, &block), END]));
            let _either = raw(&block);
        }
    }
}
