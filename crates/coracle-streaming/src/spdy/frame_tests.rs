use proptest::prelude::*;

use super::*;

fn decode(bytes: &[u8]) -> Result<Vec<Frame>, FrameError> {
    let (mut decoder, mut input, mut frames) = (Decoder::default(), BytesMut::from(bytes), Vec::new());
    while let Some(frame) = decoder.next(&mut input)? {
        frames.push(frame);
    }
    Ok(frames)
}

/// Joins the parts of data frames. Frame ends without `fin` are not visible, so that adjacent frames of a stream are joined as
/// well.
fn join_frames(frames: Vec<Frame>) -> Vec<Frame> {
    let mut all: Vec<Frame> = Vec::new();
    for frame in frames {
        match (all.last_mut(), frame) {
            (
                Some(Frame::Data { id, fin: fin @ false, payload }),
                Frame::Data { id: next, fin: last, payload: more },
            ) if *id == next => {
                *fin = last;
                *payload = [payload.as_ref(), more.as_ref()].concat().into();
            }
            (_, frame) => all.push(frame),
        }
    }
    all
}

#[test]
fn published_vectors_are_decoded() {
    let (three, five) = (StreamId(3), StreamId(5));
    let block = |hex: &str| Bytes::from(hex::decode(hex).unwrap());
    for (hex, want) in [
        ("800300060000000400000001", Frame::Ping { id: 1 }),
        ("0000000301000000", Frame::Data { id: three, fin: true, payload: Bytes::new() }),
        ("80030003000000080000000500000005", Frame::RstStream { id: five, status: Reset::Cancel as u32 }),
        ("80030007000000080000000900000000", Frame::GoAway { last: StreamId(9), status: GoAway::Ok as u32 }),
        (
            "800300010000001900000003000000000000c22a054ccc29f9a52500000000ffff",
            Frame::SynStream {
                id: three,
                fin: false,
                unidirectional: false,
                block: block("c22a054ccc29f9a52500000000ffff"),
            },
        ),
        (
            "800300020000000c00000003020100000000ffff",
            Frame::SynReply { id: three, fin: false, block: block("020100000000ffff") },
        ),
    ] {
        let bytes = hex::decode(hex).unwrap();
        assert_eq!(decode(&bytes), Ok(vec![want.clone()]));
        assert_eq!(want.encode(), bytes, "{want:?}");
    }
}

#[test]
fn frames_of_no_interest_are_skipped_by_their_length() {
    let ping = Frame::Ping { id: 7 };
    for (why, hex) in [
        ("settings", "800300040000000400000000"),
        ("window update", "80030009000000080000000100001000"),
        ("an unknown type", "8003000b00000003aabbcc"),
        ("an empty one", "8003ffff00000000"),
    ] {
        let bytes = [hex::decode(hex).unwrap(), ping.encode().to_vec()].concat();
        assert_eq!(decode(&bytes), Ok(vec![ping.clone()]), "{why}");
    }
    let mut long = hex::decode("8003000500ffffff").unwrap();
    long.resize(8 + 0x00ff_ffff, 0);
    assert_eq!(decode(&[long, ping.encode().to_vec()].concat()), Ok(vec![ping]));
}

#[test]
fn wrong_versions_and_lengths_are_refused() {
    for (why, hex, want) in [
        ("SPDY/2", "800200060000000400000001", FrameError::Version(2)),
        ("another protocol", "c34f000600000004", FrameError::Version(0x434f)),
        ("a long ping", "80030006000000050000000100", FrameError::Length { kind: PING, length: 5 }),
        ("a short reset", "800300030000000400000001", FrameError::Length { kind: RST_STREAM, length: 4 }),
        ("a stream without an id", "8003000100000000", FrameError::Length { kind: SYN_STREAM, length: 0 }),
        (
            "a huge block, before it arrives",
            "8003000800ffffff",
            FrameError::Length { kind: HEADERS, length: 0x00ff_ffff },
        ),
    ] {
        assert_eq!(decode(&hex::decode(hex).unwrap()), Err(want), "{why}");
    }
}

#[test]
fn long_data_is_passed_on_before_it_is_complete() {
    let mut decoder = Decoder::default();
    let mut input = BytesMut::from(&hex::decode("0000000101000003aa").unwrap()[..]);
    let part = |bytes: &'static [u8], fin| {
        Ok(Some(Frame::Data { id: StreamId(1), fin, payload: Bytes::from_static(bytes) }))
    };
    assert_eq!(decoder.next(&mut input), part(b"\xaa", false));
    assert_eq!(decoder.next(&mut input), Ok(None));
    input.extend_from_slice(b"\xbb\xcc\x00");
    assert_eq!(decoder.next(&mut input), part(b"\xbb\xcc", true));
    assert_eq!(decoder.next(&mut input), Ok(None));
}

fn frame() -> impl Strategy<Value = Frame> {
    let id = || (0_u32..0x8000_0000).prop_map(StreamId);
    let bytes = || proptest::collection::vec(any::<u8>(), 0..300).prop_map(Bytes::from);
    prop_oneof![
        (id(), any::<bool>(), bytes()).prop_map(|(id, fin, payload)| Frame::Data { id, fin, payload }),
        (id(), any::<bool>(), any::<bool>(), bytes()).prop_map(|(id, fin, unidirectional, block)| {
            Frame::SynStream { id, fin, unidirectional, block }
        }),
        (id(), any::<bool>(), bytes()).prop_map(|(id, fin, block)| Frame::SynReply { id, fin, block }),
        (id(), any::<bool>(), bytes()).prop_map(|(id, fin, block)| Frame::Headers { id, fin, block }),
        (id(), any::<u32>()).prop_map(|(id, status)| Frame::RstStream { id, status }),
        any::<u32>().prop_map(|id| Frame::Ping { id }),
        (id(), any::<u32>()).prop_map(|(last, status)| Frame::GoAway { last, status }),
    ]
}

proptest! {
    #[test]
    fn frames_survive_encoding_and_any_cut(
        frames in proptest::collection::vec(frame(), 0..12),
        step in 1_usize..64,
    ) {
        let bytes: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
        let (mut decoder, mut input, mut got) = (Decoder::default(), BytesMut::new(), Vec::new());
        for piece in bytes.chunks(step) {
            input.extend_from_slice(piece);
            while let Some(frame) = decoder.next(&mut input).unwrap() {
                got.push(frame);
            }
        }
        prop_assert!(input.is_empty());
        prop_assert_eq!(join_frames(got), join_frames(frames));
    }

    #[test]
    fn arbitrary_frames_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _either = decode(&bytes);
    }
}
