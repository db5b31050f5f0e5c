//! Messages with a channel: the channel number, then data. Pure.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use tokio_tungstenite::tungstenite::protocol::Message;

use crate::outbox::Encode;
use crate::status::Form;

/// Channel on which a v5 client closes another channel, whose number is the data.
pub(crate) const CLOSE: u8 = 255;

/// Encoding of a channel and its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coding {
    /// A byte, then the data.
    Binary,
    /// A digit, then base64.
    Base64,
}

/// Variant of the remote command protocol on WebSocket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Variant {
    pub(crate) coding: Coding,
    pub(crate) form: Form,
    /// Whether the client can close a channel (v5).
    pub(crate) half_close: bool,
}

/// Error for data of a message that are not base64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid message: not base64")]
pub(crate) struct NotBase64;

impl Coding {
    /// Decodes channel and data of a message; `None` for an empty one. Clients may send either encoding as text or binary
    /// message.
    ///
    /// # Errors
    /// [`NotBase64`]
    pub(crate) fn decode(self, mut message: Bytes) -> Result<Option<(u8, Bytes)>, NotBase64> {
        let Some(first) = message.first().copied() else { return Ok(None) };
        let data = message.split_off(1);
        match self {
            Self::Binary => Ok(Some((first, data))),
            Self::Base64 => match STANDARD.decode(&data) {
                Ok(data) => Ok(Some((first.wrapping_sub(b'0'), data.into()))),
                Err(_) => Err(NotBase64),
            },
        }
    }

    /// Returns the highest channel number that can be encoded: a byte, or an ASCII character.
    pub(crate) fn channel_max(self) -> u8 {
        match self {
            Self::Binary => CLOSE - 1,
            Self::Base64 => 127 - b'0',
        }
    }
}

/// Encoding of one channel's messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Channel {
    pub(crate) coding: Coding,
    pub(crate) number: u8,
}

impl Encode for Channel {
    type Message = Message;

    fn data(&self, payload: &[u8]) -> Message {
        match self.coding {
            Coding::Binary => Message::binary([&[self.number], payload].concat()),
            Coding::Base64 => {
                let mut text = String::with_capacity(1 + payload.len().div_ceil(3) * 4);
                text.push(char::from(b'0' + self.number));
                STANDARD.encode_string(payload, &mut text);
                Message::text(text)
            }
        }
    }

    /// Returns `None`: a server cannot end a single channel.
    fn end(&self) -> Option<Message> {
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn message_table() {
        for (why, coding, message, want) in [
            ("data", Coding::Binary, &b"\x00abc"[..], Ok(Some((0, Bytes::from("abc"))))),
            ("only a channel", Coding::Binary, b"\x01", Ok(Some((1, Bytes::new())))),
            ("empty", Coding::Binary, b"", Ok(None)),
            ("close", Coding::Binary, b"\xff\x00", Ok(Some((CLOSE, Bytes::from("\0"))))),
            ("base64", Coding::Base64, b"0YWJj", Ok(Some((0, Bytes::from("abc"))))),
            ("base64 of nothing", Coding::Base64, b"4", Ok(Some((4, Bytes::new())))),
            ("a channel before 0 is unknown", Coding::Base64, b"/YWJj", Ok(Some((255, Bytes::from("abc"))))),
            ("not base64", Coding::Base64, b"0a", Err(NotBase64)),
        ] {
            assert_eq!(coding.decode(Bytes::from_static(message)), want, "{why}");
        }
    }

    #[test]
    fn messages_are_binary_or_text() {
        let channel = |coding| Channel { coding, number: 1 };
        assert_eq!(channel(Coding::Binary).data(b"abc"), Message::binary(&b"\x01abc"[..]));
        assert_eq!(channel(Coding::Base64).data(b"abc"), Message::text("1YWJj"));
        assert_eq!(channel(Coding::Base64).data(b""), Message::text("1"));
    }

    proptest! {
        #[test]
        fn data_survive_both_codings(
            number in 0_u8..80,
            payload in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            for coding in [Coding::Binary, Coding::Base64] {
                let message = Channel { coding, number }.data(&payload);
                let decoded = coding.decode(message.into_data()).unwrap();
                prop_assert_eq!(decoded, Some((number, Bytes::from(payload.clone()))));
            }
        }
    }
}
