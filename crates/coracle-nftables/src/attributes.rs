//! Netlink attributes: a length and a type of two bytes each, a payload, and zeros to a multiple of four (Linux,
//! Documentation/userspace-api/netlink/intro.rst).

/// Attributes of one message, or of one nested attribute.
#[derive(Debug, Default)]
pub(crate) struct Attributes(Vec<u8>);

const HEADER: usize = 4;

impl Attributes {
    /// Adds an attribute with this payload. The kernel limits names to 255 bytes; a payload that is too long for an attribute
    /// is cut, so that the kernel refuses the message.
    pub(crate) fn bytes(mut self, kind: u16, payload: &[u8]) -> Self {
        let payload = &payload[..payload.len().min(usize::from(u16::MAX) - HEADER)];
        let length = u16::try_from(HEADER + payload.len()).unwrap_or(u16::MAX);
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(payload);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// Adds a string with its terminating zero.
    pub(crate) fn string(self, kind: u16, text: &str) -> Self {
        let mut bytes = text.as_bytes().to_vec();
        bytes.push(0);
        self.bytes(kind, &bytes)
    }

    /// Adds a number in network byte order, which nf_tables uses throughout.
    pub(crate) fn number(self, kind: u16, number: u32) -> Self {
        self.bytes(kind, &number.to_be_bytes())
    }

    /// Adds a nested attribute.
    pub(crate) fn nest(self, kind: u16, inner: Attributes) -> Self {
        self.bytes(kind | NESTED, &inner.0)
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// Flag of an attribute that holds attributes.
const NESTED: u16 = 1 << 15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_lengths_are_not() {
        let made = Attributes::default().string(1, "abcd").number(2, 5).into_bytes();
        assert_eq!(made, [9, 0, 1, 0, b'a', b'b', b'c', b'd', 0, 0, 0, 0, 8, 0, 2, 0, 0, 0, 0, 5]);
    }

    #[test]
    fn nested_attributes_have_the_nested_flag() {
        let made = Attributes::default().nest(3, Attributes::default().number(1, 1)).into_bytes();
        assert_eq!(made, [12, 0, 3, 0x80, 8, 0, 1, 0, 0, 0, 0, 1]);
    }
}
