//! Bytes of commands and snapshots: postcard (its wire format 1.0), which is small, exact, and the same on every machine.
//!
//! Fields and variants are written in the order of their declaration, so types only grow at the end, under a new schema
//! number of the store.

use postcard::ser_flavors::Flavor;
use serde::{Serialize, de::DeserializeOwned};

/// Bytes that do not encode a value of the wanted type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed {0}")]
pub struct Malformed(pub &'static str);

/// A value with a place in the journal or a snapshot.
pub trait Codec: Sized {
    /// Appends the value.
    fn put(&self, out: &mut Vec<u8>);

    /// Takes the value from the front.
    ///
    /// # Errors
    /// [`Malformed`]: the bytes end early or encode no value.
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
        let (value, rest) =
            postcard::take_from_bytes(from).map_err(|_| Malformed(short(std::any::type_name::<T>())))?;
        *from = rest;
        Ok(value)
    }
}

/// Name of a type without its path.
fn short(name: &'static str) -> &'static str {
    name.rsplit("::").next().unwrap_or(name)
}

/// The end of a vector.
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
    fn edges_go_both_ways() {
        fn both<T: Codec + PartialEq + std::fmt::Debug>(value: T) {
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
            both(value);
        }
        for value in [0, -1, 1, i64::MIN, i64::MAX] {
            both(value);
            both(i128::from(value) * 7);
        }
        both(i128::MIN);
        both(i128::MAX);
        both(Box::<str>::from("schön"));
        both(vec![Some(Time(3)), None]);
        assert!(Vec::<u8>::get(&mut [200, 1].as_slice()).is_err(), "a length beyond the input");
        let huge = Vec::<[u8; 32]>::get(&mut [255, 255, 255, 255, 255, 255, 255, 255, 127].as_slice());
        assert!(huge.is_err(), "a length beyond all memory");
    }

    #[test]
    fn malformed_value_is_named() {
        assert_eq!(Params::get(&mut [].as_slice()), Err(Malformed("Params")));
        assert_eq!(Price::get(&mut [0x80].as_slice()).unwrap_err().to_string(), "malformed Price");
    }
}
