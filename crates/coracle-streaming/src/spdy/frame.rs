//! Decodes and encodes frames of SPDY/3.1. Pure.
//!
//! ```text
//! control  1 | version 15 | type 16 | flags 8 | length 24 | payload
//! data     0 | stream  31           | flags 8 | length 24 | payload
//! ```

use std::fmt;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

/// Protocol version in control frames.
const VERSION: u16 = 3;
/// Length of the header of a frame.
const HEADER: usize = 8;
/// Most bytes of a control frame that is decoded. Header blocks of Kubernetes have about 100 bytes.
const CONTROL_MAX: usize = 64 << 10;
/// Flag of the last frame that its sender sends on the stream.
const FIN: u8 = 0x01;
/// Flag of a stream on which only its opener sends.
const UNIDIRECTIONAL: u8 = 0x02;

const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const HEADERS: u16 = 8;

/// Number of a stream: 31 bits, odd when the client opened it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct StreamId(pub(crate) u32);

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Reason for resetting a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Reset {
    Protocol = 1,
    InvalidStream = 2,
    Refused = 3,
    Cancel = 5,
    AlreadyClosed = 9,
}

/// Reason for ending a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum GoAway {
    Ok = 0,
    Protocol = 1,
}

/// Frame, or part of a data frame. Parts are returned as they arrive, and only the last one has `fin`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    Data { id: StreamId, fin: bool, payload: Bytes },
    SynStream { id: StreamId, fin: bool, unidirectional: bool, block: Bytes },
    SynReply { id: StreamId, fin: bool, block: Bytes },
    Headers { id: StreamId, fin: bool, block: Bytes },
    RstStream { id: StreamId, status: u32 },
    Ping { id: u32 },
    GoAway { last: StreamId, status: u32 },
}

/// Error for bytes that are not SPDY/3. The connection cannot continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("invalid SPDY version \"{0}\": not 3")]
    Version(u16),
    #[error("invalid SPDY frame of type {kind}: length {length}")]
    Length { kind: u16, length: usize },
}

/// Decoder of one direction of a connection.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    state: State,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Between frames.
    #[default]
    Header,
    /// Inside a data frame of which `left` bytes are missing, at least one.
    Data { id: StreamId, fin: bool, left: usize },
    /// Inside a frame that is ignored.
    Skip { left: usize },
}

impl Decoder {
    /// Removes the next frame from the front of `input`. `None`: more bytes are needed, at most 64 KiB at a time.
    ///
    /// # Errors
    /// [`FrameError`]; the decoder must not be used any more.
    pub(crate) fn next(&mut self, input: &mut BytesMut) -> Result<Option<Frame>, FrameError> {
        loop {
            match self.state {
                State::Header => match self.header(input)? {
                    Header::Incomplete => return Ok(None),
                    Header::Inside(state) => self.state = state,
                    Header::Frame(frame) => return Ok(Some(frame)),
                },
                State::Data { id, fin, left } => {
                    if input.is_empty() {
                        return Ok(None);
                    }
                    let payload = input.split_to(left.min(input.len())).freeze();
                    let left = left - payload.len();
                    self.state = if left == 0 { State::Header } else { State::Data { id, fin, left } };
                    return Ok(Some(Frame::Data { id, fin: fin && left == 0, payload }));
                }
                State::Skip { left } => {
                    let now = left.min(input.len());
                    input.advance(now);
                    let left = left - now;
                    self.state = if left == 0 { State::Header } else { State::Skip { left } };
                    if left > 0 {
                        return Ok(None);
                    }
                }
            }
        }
    }

    fn header(&self, input: &mut BytesMut) -> Result<Header, FrameError> {
        let Some(mut header) = input.get(..HEADER) else { return Ok(Header::Incomplete) };
        let (first, second) = (header.get_u32(), header.get_u32());
        let [flags, ..] = second.to_be_bytes();
        let length = (second & 0x00ff_ffff) as usize;
        if first >> 31 == 0 {
            input.advance(HEADER);
            let (id, fin) = (StreamId(first), flags & FIN != 0);
            return Ok(match length {
                0 => Header::Frame(Frame::Data { id, fin, payload: Bytes::new() }),
                left => Header::Inside(State::Data { id, fin, left }),
            });
        }
        let [a, b, c, d] = first.to_be_bytes();
        let (version, kind) = (u16::from_be_bytes([a & 0x7f, b]), u16::from_be_bytes([c, d]));
        if version != VERSION {
            return Err(FrameError::Version(version));
        }
        let Some((least, most)) = lengths(kind) else {
            input.advance(HEADER);
            return Ok(Header::Inside(State::Skip { left: length }));
        };
        if length < least || length > most {
            return Err(FrameError::Length { kind, length });
        }
        if input.len() < HEADER + length {
            return Ok(Header::Incomplete);
        }
        input.advance(HEADER);
        Ok(Header::Frame(control(kind, flags, input.split_to(length).freeze())))
    }
}

enum Header {
    Incomplete,
    Inside(State),
    Frame(Frame),
}

/// Returns the least and most bytes of a control frame that is decoded. Others, such as SETTINGS and WINDOW_UPDATE, are
/// skipped.
fn lengths(kind: u16) -> Option<(usize, usize)> {
    match kind {
        SYN_STREAM => Some((10, CONTROL_MAX)),
        SYN_REPLY | HEADERS => Some((4, CONTROL_MAX)),
        RST_STREAM | GOAWAY => Some((8, 8)),
        PING => Some((4, 4)),
        _ => None,
    }
}

/// Decodes a control frame whose length was checked.
fn control(kind: u16, flags: u8, mut payload: Bytes) -> Frame {
    let fin = flags & FIN != 0;
    let first = payload.get_u32();
    let id = StreamId(first & 0x7fff_ffff);
    match kind {
        SYN_STREAM => {
            payload.advance(6); // associated stream, priority, slot
            Frame::SynStream { id, fin, unidirectional: flags & UNIDIRECTIONAL != 0, block: payload }
        }
        SYN_REPLY => Frame::SynReply { id, fin, block: payload },
        HEADERS => Frame::Headers { id, fin, block: payload },
        RST_STREAM => Frame::RstStream { id, status: payload.get_u32() },
        PING => Frame::Ping { id: first },
        _ => Frame::GoAway { last: id, status: payload.get_u32() },
    }
}

impl Frame {
    /// Encodes the frame.
    pub(crate) fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        match self {
            Self::Data { id, fin, payload } => return data(*id, *fin, payload),
            Self::SynStream { id, fin, unidirectional, block } => {
                let flags = (u8::from(*fin) * FIN) | (u8::from(*unidirectional) * UNIDIRECTIONAL);
                start(&mut out, SYN_STREAM, flags, 10 + block.len(), id.0);
                out.put_slice(&[0; 6]);
                out.put_slice(block);
            }
            Self::SynReply { id, fin, block } => {
                start(&mut out, SYN_REPLY, u8::from(*fin) * FIN, 4 + block.len(), id.0);
                out.put_slice(block);
            }
            Self::Headers { id, fin, block } => {
                start(&mut out, HEADERS, u8::from(*fin) * FIN, 4 + block.len(), id.0);
                out.put_slice(block);
            }
            Self::RstStream { id, status } => {
                start(&mut out, RST_STREAM, 0, 8, id.0);
                out.put_u32(*status);
            }
            Self::Ping { id } => start(&mut out, PING, 0, 4, *id),
            Self::GoAway { last, status } => {
                start(&mut out, GOAWAY, 0, 8, last.0);
                out.put_u32(*status);
            }
        }
        out.freeze()
    }
}

/// Returns a data frame. `payload` must have at most 2^24−1 bytes; all callers pass far fewer.
pub(crate) fn data(id: StreamId, fin: bool, payload: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(HEADER + payload.len());
    out.put_u32(id.0);
    put_length(&mut out, u8::from(fin) * FIN, payload.len());
    out.put_slice(payload);
    out.freeze()
}

/// Writes the header and first word of a control frame of `length` bytes.
fn start(out: &mut BytesMut, kind: u16, flags: u8, length: usize, first: u32) {
    out.put_u16(0x8000 | VERSION);
    out.put_u16(kind);
    put_length(out, flags, length);
    out.put_u32(first);
}

fn put_length(out: &mut BytesMut, flags: u8, length: usize) {
    debug_assert!(length < 1 << 24, "a frame of {length} bytes");
    out.put_u8(flags);
    out.put_uint(length as u64, 3);
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
