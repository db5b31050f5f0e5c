//! Entry points of the fuzz targets; not part of the API. Each accepts any bytes, keeps no state, and panics when a rule is
//! violated.

use std::collections::HashSet;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_util::sync::CancellationToken;

use crate::limits::Limits;
use crate::spdy;
use crate::spdy::frame::{Decoder, Frame, Reset};
use crate::spdy::header_block::Inflater;

/// Serves a SPDY connection with these bytes as input and streams that echo. Checks that the output is SPDY and follows the
/// order of the protocol.
pub fn spdy(bytes: &[u8]) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_time().build() else { return };
    // Small limits, so that short inputs reach them.
    let limits = Limits {
        streams_max: 4,
        input_max: 64,
        linger: Duration::ZERO,
        last_message: Duration::from_secs(1),
        ..Limits::default()
    };
    let sent = runtime.block_on(async {
        let (near, far) = tokio::io::duplex(256);
        let (mut read, mut write) = tokio::io::split(far);
        let mut sent = Vec::new();
        let client = async {
            // The server may close the connection before all bytes are written.
            let _either = write.write_all(bytes).await;
            write.shutdown().await
        };
        let serving =
            spdy::serve(near, &limits, CancellationToken::new(), async |incoming, _outbox, _activity| {
                echo(incoming).await;
            });
        let ((), _either, _all) = tokio::join!(serving, client, read.read_to_end(&mut sent));
        sent
    });
    check(&sent);
}

async fn echo(mut incoming: spdy::Incoming) {
    let mut streams = tokio::task::JoinSet::new();
    while let Some(pending) = incoming.recv().await {
        if pending.headers.get("streamtype") == Some("error") {
            pending.refuse(Reset::Refused);
        } else if let Some(mut stream) = pending.accept() {
            streams.spawn(async move { tokio::io::copy(&mut stream.input, &mut stream.output).await });
        }
    }
    streams.join_all().await;
}

/// Checks the output of the server like a client.
fn check(sent: &[u8]) {
    let (mut decoder, mut inflater) = (Decoder::default(), Inflater::new());
    let mut input = BytesMut::from(sent);
    let (mut open, mut ended) = (HashSet::new(), false);
    while let Ok(Some(frame)) = decoder.next(&mut input).inspect_err(|error| unreachable!("{error}")) {
        assert!(!ended, "a frame behind GOAWAY");
        match frame {
            Frame::SynReply { id, block, .. } => {
                assert!(inflater.headers(&block).is_ok(), "a header block that is none");
                assert!(open.insert(id), "two replies for a stream");
            }
            Frame::Data { id, fin, .. } => {
                assert!(open.contains(&id), "data of a stream that is not open");
                if fin {
                    open.remove(&id);
                }
            }
            Frame::RstStream { status, .. } => assert!(status != 0, "a reset without a status"),
            Frame::Ping { id } => assert!(id % 2 == 1, "an own ping"),
            Frame::GoAway { .. } => ended = true,
            Frame::SynStream { .. } | Frame::Headers { .. } => unreachable!("a frame of a client"),
        }
    }
}

/// Decodes a header block: as it is, or wrapped into stored zlib blocks if the first byte is even, because mutations do not
/// survive the compression. Checks that its headers are equal after encoding and decoding.
pub fn header_block(bytes: &[u8]) {
    let [raw, block @ ..] = bytes else { return };
    let packed = if raw % 2 == 0 { store_uncompressed(block) } else { block.to_vec() };
    let Ok(headers) = Inflater::new().headers(&packed) else { return };
    let again = Inflater::new().headers(&store_uncompressed(&headers.encode()));
    assert_eq!(again.as_ref(), Ok(&headers));
}

/// Returns `plain` as stored blocks after the header of a zlib stream with the dictionary.
fn store_uncompressed(plain: &[u8]) -> Vec<u8> {
    let mut out = vec![0x78, 0x20, 0xe3, 0xc6, 0xa7, 0xc2];
    for part in plain.chunks(usize::from(u16::MAX)).chain([&[][..]]) {
        let length = u16::try_from(part.len()).unwrap_or_default();
        out.push(0);
        out.extend(length.to_le_bytes());
        out.extend((!length).to_le_bytes());
        out.extend(part);
    }
    out
}
