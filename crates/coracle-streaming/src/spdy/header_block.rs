//! Header blocks: names and values, compressed by one zlib stream in each direction of a connection. Pure.
//!
//! ```text
//! zlib, preset dictionary, sync flush after each block:  count u32 · count × (length u32 · name · length u32 · value)
//! ```

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use flate2::{Decompress, FlushDecompress, Status};

use super::dictionary::{ADLER, DICTIONARY};

/// Most bytes of an inflated block.
const BLOCK_MAX: usize = 64 << 10;
/// Most headers of a block. Kubernetes sends three.
const HEADERS_MAX: usize = 64;

/// Invalid block. The connection cannot continue, because the state of the compression is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BlockError {
    #[error("invalid header block: not a zlib stream with the dictionary of SPDY/3")]
    Compression,
    #[error("invalid header block: the zlib stream ends")]
    Finished,
    #[error("invalid header block: more than {BLOCK_MAX} bytes")]
    TooLong,
    #[error("invalid header block: {0}")]
    Content(&'static str),
}

/// Headers of a stream, in the order of the block; names are lower-case and unique.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Headers(pub(crate) Vec<(String, String)>);

impl Headers {
    /// Returns the value of header `name`; of several NUL-separated values, the first.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let (_, value) = self.0.iter().find(|(known, _)| known == name)?;
        value.split('\0').next()
    }

    /// Encodes the block before compression.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = BytesMut::new();
        let put = |out: &mut BytesMut, length: usize| out.put_uint(length as u64, 4);
        put(&mut out, self.0.len());
        for text in self.0.iter().flat_map(|(name, value)| [name, value]) {
            put(&mut out, text.len());
            out.put_slice(text.as_bytes());
        }
        out.into()
    }
}

/// Inflates the header blocks of one direction, in order and each exactly once.
#[derive(Debug)]
pub(crate) struct Inflater {
    zlib: Decompress,
}

impl Inflater {
    pub(crate) fn new() -> Self {
        Self { zlib: Decompress::new(true) }
    }

    /// Returns the headers of the next block. Takes at most a few hundred KiB of memory.
    ///
    /// # Errors
    /// [`BlockError`]; the inflater must not be used any more.
    pub(crate) fn headers(&mut self, block: &[u8]) -> Result<Headers, BlockError> {
        parse(&self.inflate(block)?)
    }

    fn inflate(&mut self, mut block: &[u8]) -> Result<Vec<u8>, BlockError> {
        let mut out = Vec::with_capacity(1024);
        loop {
            let (read, written) = (self.zlib.total_in(), out.len());
            let status = self.zlib.decompress_vec(block, &mut out, FlushDecompress::Sync);
            let read = usize::try_from(self.zlib.total_in() - read).unwrap_or(block.len());
            block.advance(read.min(block.len()));
            match status {
                Err(error) if error.needs_dictionary() == Some(ADLER) => {
                    self.zlib.set_dictionary(&DICTIONARY).map_err(|_invalid| BlockError::Compression)?;
                    continue;
                }
                Err(_) => return Err(BlockError::Compression),
                Ok(Status::StreamEnd) => return Err(BlockError::Finished),
                Ok(Status::Ok | Status::BufError) => {}
            }
            if out.len() > BLOCK_MAX {
                return Err(BlockError::TooLong);
            }
            if out.len() == out.capacity() {
                out.reserve(out.len()); // there may be more output
            } else if block.is_empty() {
                return Ok(out);
            } else if read == 0 && out.len() == written {
                return Err(BlockError::Compression);
            }
        }
    }
}

/// Parses an inflated block.
fn parse(mut block: &[u8]) -> Result<Headers, BlockError> {
    let count = word(&mut block)?;
    if count > HEADERS_MAX {
        return Err(BlockError::Content("too many headers"));
    }
    let mut headers: Vec<(String, String)> = Vec::with_capacity(count);
    for _ in 0..count {
        let name = text(&mut block)?;
        if name.is_empty() || name.chars().any(char::is_uppercase) {
            return Err(BlockError::Content("a name is empty or not lower-case"));
        }
        if headers.iter().any(|(known, _)| *known == name) {
            return Err(BlockError::Content("a name occurs twice"));
        }
        headers.push((name, text(&mut block)?));
    }
    if !block.is_empty() {
        return Err(BlockError::Content("it is longer than its headers"));
    }
    Ok(Headers(headers))
}

fn word(block: &mut &[u8]) -> Result<usize, BlockError> {
    let word = block.try_get_u32().ok().and_then(|word| usize::try_from(word).ok());
    word.ok_or(BlockError::Content("it is shorter than its headers"))
}

fn text(block: &mut &[u8]) -> Result<String, BlockError> {
    let length = word(block)?;
    let (text, rest) = block.split_at_checked(length).ok_or(BlockError::Content("a length is wrong"))?;
    *block = rest;
    let text = std::str::from_utf8(text).map_err(|_invalid| BlockError::Content("not UTF-8"))?;
    Ok(text.to_owned())
}

/// Header blocks of the server's direction. All are empty, so that short stored blocks suffice and no compressor is needed.
#[derive(Debug, Default)]
pub(crate) struct EmptyBlocks {
    started: bool,
}

impl EmptyBlocks {
    /// Returns the next block, without headers.
    pub(crate) fn next_block(&mut self) -> Bytes {
        /// zlib header with FDICT and the checksum of the dictionary.
        const START: [u8; 6] = [0x78, 0x20, 0xe3, 0xc6, 0xa7, 0xc2];
        /// A stored block with the count 0, and an empty stored block, as after a sync flush. Go's inflater returns data only
        /// at that mark.
        const BLOCK: [u8; 14] = [0, 4, 0, 0xfb, 0xff, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
        if std::mem::replace(&mut self.started, true) {
            Bytes::from_static(&BLOCK)
        } else {
            Bytes::from([START.as_slice(), &BLOCK].concat())
        }
    }
}

#[cfg(test)]
#[path = "header_block_tests.rs"]
mod tests;
