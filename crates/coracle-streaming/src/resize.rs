//! Terminal sizes, as clients send them: JSON objects, with or without white space in between.

use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::sync::mpsc;

use crate::session::TerminalSize;

/// Most bytes of one object.
const OBJECT_MAX: usize = 1024;

/// JSON form of a size. Go ignores the case of names; clients use these two spellings.
#[derive(Deserialize)]
struct Wire {
    #[serde(default, alias = "width", rename = "Width")]
    width: u16,
    #[serde(default, alias = "height", rename = "Height")]
    height: u16,
}

/// Remaining input, which may be the beginning of an object.
#[derive(Debug, Default)]
struct Parser(Vec<u8>);

impl Parser {
    /// Returns the last size that `bytes` complete. Sizes with 0 columns or rows are ignored. Pure.
    ///
    /// # Errors
    /// When the input is not a sequence of sizes; the parser must not be used any more.
    fn push(&mut self, bytes: &[u8]) -> Result<Option<TerminalSize>, ()> {
        self.0.extend_from_slice(bytes);
        let mut objects = serde_json::Deserializer::from_slice(&self.0).into_iter::<Wire>();
        let (mut size, mut read) = (None, 0);
        while let Some(object) = objects.next() {
            match object {
                Ok(Wire { width: 0, .. } | Wire { height: 0, .. }) => {}
                Ok(Wire { width, height }) => size = Some(TerminalSize { columns: width, rows: height }),
                Err(error) if error.is_eof() => break,
                Err(_) => return Err(()),
            }
            read = objects.byte_offset();
        }
        self.0.drain(..read);
        if self.0.len() > OBJECT_MAX { Err(()) } else { Ok(size) }
    }
}

/// Forwards sizes until the end of `input`; a slow receiver gets the newest one. Without a receiver, and after an error, the
/// input is read and discarded, so that it does not block the connection.
pub(crate) async fn pump(mut input: impl AsyncRead + Unpin, sizes: mpsc::Sender<TerminalSize>) {
    let _ended = pass_on(&mut input, &sizes).await;
    drop(sizes);
    let _gone = tokio::io::copy(&mut input, &mut tokio::io::sink()).await;
}

/// Forwards sizes. Returns at the end of the input, after an error, and without a receiver.
async fn pass_on(input: &mut (impl AsyncRead + Unpin), sizes: &mpsc::Sender<TerminalSize>) -> Option<()> {
    let (mut parser, mut newest) = (Parser::default(), None);
    let mut bytes = [0; 512];
    loop {
        tokio::select! {
            biased;
            read = input.read(&mut bytes) => {
                let read = bytes.get(..read.ok()?)?;
                if read.is_empty() {
                    return sizes.send(newest?).await.ok();
                }
                newest = parser.push(read).ok()?.or(newest);
            }
            room = sizes.reserve(), if newest.is_some() => room.ok()?.send(newest.take()?),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    fn size(columns: u16, rows: u16) -> TerminalSize {
        TerminalSize { columns, rows }
    }

    #[test]
    fn sizes_are_read_in_every_form() {
        for (why, parts, want) in [
            ("Go", vec!["{\"Width\":80,\"Height\":24}\n"], Some(size(80, 24))),
            ("Python: no line end, a space", vec![r#"{"Height": 24, "Width": 80}"#], Some(size(80, 24))),
            ("lower case", vec![r#"{"width":1,"height":2}"#], Some(size(1, 2))),
            ("several at once", vec![r#"{"Width":1,"Height":1} {"Width":2,"Height":3}"#], Some(size(2, 3))),
            ("split", vec!["{\"Wid", "th\":80,\"Hei", "ght\":24}\n"], Some(size(80, 24))),
            ("zero", vec![r#"{"Width":0,"Height":0}"#], None),
            (
                "zero is not the newest",
                vec![r#"{"Width":5,"Height":5}{"Width":0,"Height":5}"#],
                Some(size(5, 5)),
            ),
            ("white space", vec!["\n\n"], None),
        ] {
            let mut parser = Parser::default();
            let mut got = None;
            for part in parts {
                got = parser.push(part.as_bytes()).expect(why);
            }
            assert_eq!(got, want, "{why}");
            assert!(parser.0.iter().all(u8::is_ascii_whitespace), "{why}");
        }
    }

    #[test]
    fn invalid_terminal_size_is_refused() {
        let long = format!("{{\"Width\":1,{}", " ".repeat(OBJECT_MAX));
        for (why, text) in [
            ("text", "exit\n"),
            ("another type", "80"),
            ("negative", r#"{"Width":-1,"Height":1}"#),
            ("too large", r#"{"Width":65536,"Height":1}"#),
            ("without an end", &long),
        ] {
            assert_eq!(Parser::default().push(text.as_bytes()), Err(()), "{why}");
        }
    }

    #[tokio::test]
    async fn slow_receiver_gets_the_newest_size() {
        let (mut client, input) = tokio::io::duplex(64);
        let (sender, mut sizes) = mpsc::channel(1);
        let sending = async {
            for width in 1..=500 {
                client.write_all(format!("{{\"Width\":{width},\"Height\":1}}\n").as_bytes()).await.unwrap();
            }
            drop(client);
        };
        let receiving = async {
            sending.await;
            let mut got = Vec::new();
            while let Some(size) = sizes.recv().await {
                got.push(size);
            }
            got
        };
        let ((), got) = tokio::join!(pump(input, sender), receiving);
        assert_eq!(got.last(), Some(&size(500, 1)));
        assert!(got.len() <= 3, "{got:?}");
    }

    #[tokio::test]
    async fn input_is_discarded_without_a_receiver() {
        let (mut client, input) = tokio::io::duplex(64);
        let (sender, sizes) = mpsc::channel(1);
        drop(sizes);
        let sending = async {
            for _ in 0..100 {
                client.write_all(b"{\"Width\":1,\"Height\":1}\n").await.unwrap();
            }
            client.write_all(&[b'?'; 1000]).await.unwrap();
            drop(client);
        };
        tokio::join!(pump(input, sender), sending);
    }
}
