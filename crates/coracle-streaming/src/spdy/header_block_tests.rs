use flate2::Compression;
use proptest::prelude::*;

use super::*;
use crate::spdy::peer::Deflater;

fn block(frame: &str, header: usize) -> Vec<u8> {
    hex::decode(frame).unwrap().split_off(header)
}

#[test]
fn published_blocks_are_read_in_order() {
    let mut client = Inflater::new();
    for (frame, want) in [
        (
            "80030001000000280000000100000000000078f9e3c6a7c202a62346703a2b294a4dcc851625aca9a08006000000ffff",
            "error",
        ),
        ("800300010000001900000003000000000000c22a054ccc29f9a52500000000ffff", "stdout"),
    ] {
        let headers = client.headers(&block(frame, 18)).unwrap();
        assert_eq!(headers, Headers(vec![("streamtype".into(), want.into())]));
        assert_eq!(headers.get("streamtype"), Some(want));
        assert_eq!(headers.get("port"), None);
    }
    let mut server = Inflater::new();
    for frame in [
        "80030002000000140000000178f9e3c6a7c202a6230600000000ffff",
        "800300020000000c00000003020100000000ffff",
    ] {
        assert_eq!(server.headers(&block(frame, 12)), Ok(Headers::default()));
    }
}

#[test]
fn own_blocks_are_read_by_an_inflater() {
    let (mut ours, mut reader) = (EmptyBlocks::default(), Inflater::new());
    for _ in 0..3 {
        let block = ours.next_block();
        assert!(block.ends_with(b"\x00\x00\x00\xff\xff"));
        assert_eq!(reader.headers(&block), Ok(Headers::default()));
    }
}

#[test]
fn hostile_blocks_are_refused() {
    let long = vec![("a".to_owned(), "x".repeat(10 << 20))];
    let many: Vec<_> = (0..65).map(|n| (format!("name{n}"), String::new())).collect();
    let twice = vec![("a".to_owned(), String::new()); 2];
    let named = |name: &str| vec![(name.to_owned(), String::new())];
    let (wrong, plain) = (BlockError::Content, |bytes: &[u8]| Deflater::new().raw(bytes));
    for (why, bytes, want) in [
        ("a bomb", Deflater::new().block(&long), BlockError::TooLong),
        ("many headers", Deflater::new().block(&many), wrong("too many headers")),
        ("a name twice", Deflater::new().block(&twice), wrong("a name occurs twice")),
        ("no name", Deflater::new().block(&named("")), wrong("a name is empty or not lower-case")),
        ("upper case", Deflater::new().block(&named("A")), wrong("a name is empty or not lower-case")),
        ("nothing", plain(b""), wrong("it is shorter than its headers")),
        ("no bytes", vec![], wrong("it is shorter than its headers")),
        ("a count without headers", plain(&[0, 0, 0, 1]), wrong("it is shorter than its headers")),
        ("a count of 2^32-1", plain(&[0xff; 4]), wrong("too many headers")),
        ("a length beyond the end", plain(&[0, 0, 0, 1, 0, 0, 0, 9, b'a']), wrong("a length is wrong")),
        ("bytes behind", plain(&[0, 0, 0, 0, 1]), wrong("it is longer than its headers")),
        ("no text", plain(&[0, 0, 0, 1, 0, 0, 0, 1, 0xff, 0, 0, 0, 0]), wrong("not UTF-8")),
        ("another dictionary", hex::decode("78f900000001").unwrap(), BlockError::Compression),
        ("no zlib", b"streamtype".to_vec(), BlockError::Compression),
        ("a stream that ends", Deflater::new().finish_compression(), BlockError::Finished),
    ] {
        assert_eq!(Inflater::new().headers(&bytes), Err(want), "{why}");
    }
}

#[test]
fn header_with_several_values_gives_the_first() {
    let headers = vec![("port".to_owned(), "80\u{0}81".to_owned())];
    let read = Inflater::new().headers(&Deflater::new().block(&headers)).unwrap();
    assert_eq!(read.get("port"), Some("80"));
}

proptest! {
    #[test]
    fn headers_survive_compression(
        blocks in proptest::collection::vec(
            proptest::collection::btree_map("[a-z][a-z0-9-]{0,20}", ".{0,200}", 0..8), 1..6),
        level in 0_u32..10,
    ) {
        let (mut deflater, mut inflater) = (Deflater::with_level(Compression::new(level)), Inflater::new());
        for headers in blocks {
            let headers: Vec<_> = headers.into_iter().collect();
            let block = deflater.block(&headers);
            prop_assert_eq!(inflater.headers(&block), Ok(Headers(headers)));
        }
    }

    #[test]
    fn arbitrary_header_blocks_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _either = Inflater::new().headers(&bytes);
        let start = hex::decode("78f9e3c6a7c2").unwrap();
        let _either = Inflater::new().headers(&[start, bytes].concat());
    }
}
