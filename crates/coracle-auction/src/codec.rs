//! Encoding of commands and snapshots: postcard (wire format 1.0), which is compact, exact and platform-independent.
//!
//! Fields and variants are written in the order of their declaration. So types may only be extended at the end, with a new
//! schema number of the store.

use postcard::ser_flavors::Flavor;
use serde::{Serialize, de::DeserializeOwned};

/// Error of bytes that do not encode a value of the expected type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed {0}")]
pub struct Malformed(pub &'static str);

/// Value that is stored in the journal or a snapshot.
pub trait Codec: Sized {
    /// Appends the encoded value to `out`.
    fn put(&self, out: &mut Vec<u8>);

    /// Decodes a value from the front of `from` and removes its bytes.
    ///
    /// # Errors
    /// [`Malformed`]: the bytes end early or do not encode a value.
    fn get(from: &mut &[u8]) -> Result<Self, Malformed>;
}

impl<T: Serialize + DeserializeOwned> Codec for T {
    #[expect(
        clippy::expect_used,
        reason = "memory takes every value; only a list of unknown length is refused"
    )]
    fn put(&self, out: &mut Vec<u8>) {
        postcard::serialize_with_flavor(self, Appended(out)).expect("lists have lengths");
    }

    fn get(from: &mut &[u8]) -> Result<Self, Malformed> {
        let (value, rest) = postcard::take_from_bytes(from)
            .map_err(|_| Malformed(short_type_name(std::any::type_name::<T>())))?;
        *from = rest;
        Ok(value)
    }
}

/// Name of a type without its path.
fn short_type_name(name: &'static str) -> &'static str {
    name.rsplit("::").next().unwrap_or(name)
}

/// Serializer output that appends to a vector.
struct Appended<'a>(&'a mut Vec<u8>);

impl Flavor for Appended<'_> {
    type Output = ();

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.push(byte);
        Ok(())
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Params, Price, Time};

    #[test]
    fn edge_values_round_trip_or_are_refused() {
        fn check_round_trip<T: Codec + PartialEq + std::fmt::Debug>(value: T) {
            let mut bytes = Vec::new();
            value.put(&mut bytes);
            let mut rest = bytes.as_slice();
            assert_eq!(T::get(&mut rest).as_ref(), Ok(&value));
            assert!(rest.is_empty());
            if let Some(short) = bytes.len().checked_sub(1) {
                assert!(T::get(&mut &bytes[..short]).is_err(), "{value:?} cut short");
            }
        }
        for value in [0, 1, 127, 128, u64::MAX - 1, u64::MAX] {
            check_round_trip(value);
        }
        for value in [0, -1, 1, i64::MIN, i64::MAX] {
            check_round_trip(value);
            check_round_trip(i128::from(value) * 7);
        }
        check_round_trip(i128::MIN);
        check_round_trip(i128::MAX);
        check_round_trip(Box::<str>::from("schön"));
        check_round_trip(vec![Some(Time(3)), None]);
        assert!(Vec::<u8>::get(&mut [200, 1].as_slice()).is_err(), "a length beyond the input");
        let huge = Vec::<[u8; 32]>::get(&mut [255, 255, 255, 255, 255, 255, 255, 255, 127].as_slice());
        assert!(huge.is_err(), "a length beyond all memory");
    }

    #[test]
    fn malformed_value_error_names_the_type() {
        assert_eq!(Params::get(&mut [].as_slice()), Err(Malformed("Params")));
        assert_eq!(Price::get(&mut [0x80].as_slice()).unwrap_err().to_string(), "malformed Price");
    }
}
