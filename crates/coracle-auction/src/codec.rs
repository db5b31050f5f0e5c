//! Bytes of commands and snapshots: small, exact, the same on every machine.
//!
//! Integers are LEB128 (signed ones zigzag), lists carry their length. Layouts only
//! grow at the end, under a new schema number of the store.

use std::collections::{BTreeMap, BTreeSet};

use crate::{AllocationId, BidId, Charge, LotNo, OwnerKey, Params, Price, SupplierNo, TenantNo, Time};

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

fn put_unsigned(mut value: u128, out: &mut Vec<u8>) {
    loop {
        let low = u8::try_from(value & 0x7f).unwrap_or(0);
        value >>= 7;
        if value == 0 {
            return out.push(low);
        }
        out.push(low | 0x80);
    }
}

fn get_unsigned(from: &mut &[u8]) -> Result<u128, Malformed> {
    let mut value = 0u128;
    for shift in (0..128).step_by(7) {
        let (byte, rest) = from.split_first().ok_or(Malformed("integer"))?;
        *from = rest;
        value |= u128::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(Malformed("integer"))
}

/// Reads an integer of at most eight bytes from one word instead of byte by byte: a journal consists mostly of them.
/// `None`: the integer is longer, or fewer than eight bytes are left.
fn get_short(from: &mut &[u8]) -> Option<u64> {
    let word = u64::from_le_bytes(*from.first_chunk()?);
    let ends = !word & 0x8080_8080_8080_8080;
    if ends == 0 {
        return None;
    }
    // Seven bits and the flag of each byte up to the first one without a flag.
    let bits = ends.trailing_zeros() + 1;
    let sevens = word & (u64::MAX >> (64 - bits)) & 0x7f7f_7f7f_7f7f_7f7f;
    let pairs = sevens & 0x007f_007f_007f_007f | (sevens & 0x7f00_7f00_7f00_7f00) >> 1;
    let fours = pairs & 0x0000_3fff_0000_3fff | (pairs & 0x3fff_0000_3fff_0000) >> 2;
    let value = fours & 0x0fff_ffff | (fours & 0x0fff_ffff_0000_0000) >> 4;
    *from = from.get(bits as usize / 8..)?;
    Some(value)
}

macro_rules! unsigned {
    ($($int:ty),*) => {$(
        impl Codec for $int {
            fn put(&self, out: &mut Vec<u8>) {
                let mut value = u64::from(*self);
                while value >= 0x80 {
                    out.push((value & 0x7f) as u8 | 0x80);
                    value >>= 7;
                }
                out.push(value as u8);
            }

            fn get(from: &mut &[u8]) -> Result<Self, Malformed> {
                if let Some((byte @ 0..0x80, rest)) = from.split_first() {
                    *from = rest;
                    return Ok(Self::from(*byte));
                }
                if let Some(value) = get_short(from) {
                    return Self::try_from(value).map_err(|_| Malformed("integer"));
                }
                let mut value = 0u64;
                for shift in (0..64).step_by(7) {
                    let (byte, rest) = from.split_first().ok_or(Malformed("integer"))?;
                    *from = rest;
                    value |= u64::from(byte & 0x7f) << shift;
                    if byte & 0x80 == 0 {
                        return Self::try_from(value).map_err(|_| Malformed("integer"));
                    }
                }
                Err(Malformed("integer"))
            }
        }
    )*};
}

#[expect(clippy::cast_possible_truncation, reason = "seven bits at a time")]
mod integers {
    use super::{Codec, Malformed, get_short};
    unsigned!(u8, u16, u32, u64);
}

impl Codec for i128 {
    fn put(&self, out: &mut Vec<u8>) {
        put_unsigned(((self << 1) ^ (self >> 127)).cast_unsigned(), out);
    }

    fn get(from: &mut &[u8]) -> Result<Self, Malformed> {
        let zigzag = get_unsigned(from)?;
        Ok((zigzag >> 1).cast_signed() ^ -(zigzag & 1).cast_signed())
    }
}

impl Codec for i64 {
    fn put(&self, out: &mut Vec<u8>) {
        ((self << 1) ^ (self >> 63)).cast_unsigned().put(out);
    }

    fn get(from: &mut &[u8]) -> Result<Self, Malformed> {
        let zigzag = u64::get(from)?;
        Ok((zigzag >> 1).cast_signed() ^ -(zigzag & 1).cast_signed())
    }
}

impl Codec for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }

    fn get(from: &mut &[u8]) -> Result<Self, Malformed> {
        match u8::get(from)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed("flag")),
        }
    }
}

impl<const N: usize> Codec for [u8; N] {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }

    fn get(from: &mut &[u8]) -> Result<Self, Malformed> {
        let (bytes, rest) = from.split_first_chunk().ok_or(Malformed("bytes"))?;
        *from = rest;
        Ok(*bytes)
    }
}

fn length(from: &mut &[u8]) -> Result<usize, Malformed> {
    let length = usize::try_from(u64::get(from)?).map_err(|_| Malformed("length"))?;
    // Every element takes a byte at least, so a length beyond the input is a lie.
    if length > from.len() { Err(Malformed("length")) } else { Ok(length) }
}

impl Codec for Box<str> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u64).put(out);
        out.extend_from_slice(self.as_bytes());
    }

    fn get(from: &mut &[u8]) -> Result<Self, Malformed> {
        let length = length(from)?;
        let (text, rest) = from.split_at_checked(length).ok_or(Malformed("text"))?;
        *from = rest;
        Ok(std::str::from_utf8(text).map_err(|_| Malformed("text"))?.into())
    }
}

impl<T: Codec> Codec for Box<T> {
    fn put(&self, out: &mut Vec<u8>) {
        (**self).put(out);
    }

    fn get(from: &mut &[u8]) -> Result<Self, Malformed> {
        T::get(from).map(Self::new)
    }
}

impl<T: Codec> Codec for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }

    fn get(from: &mut &[u8]) -> Result<Self, Malformed> {
        Ok(if bool::get(from)? { Some(T::get(from)?) } else { None })
    }
}

impl<T: Codec> Codec for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u64).put(out);
        self.iter().for_each(|value| value.put(out));
    }

    fn get(from: &mut &[u8]) -> Result<Self, Malformed> {
        (0..length(from)?).map(|_| T::get(from)).collect()
    }
}

impl<K: Codec + Ord, V: Codec> Codec for BTreeMap<K, V> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u64).put(out);
        for (key, value) in self {
            key.put(out);
            value.put(out);
        }
    }

    fn get(from: &mut &[u8]) -> Result<Self, Malformed> {
        (0..length(from)?).map(|_| Ok((K::get(from)?, V::get(from)?))).collect()
    }
}

impl<K: Codec + Ord> Codec for BTreeSet<K> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u64).put(out);
        self.iter().for_each(|key| key.put(out));
    }

    fn get(from: &mut &[u8]) -> Result<Self, Malformed> {
        (0..length(from)?).map(|_| K::get(from)).collect()
    }
}

impl<A: Codec, B: Codec> Codec for (A, B) {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }

    fn get(from: &mut &[u8]) -> Result<Self, Malformed> {
        Ok((A::get(from)?, B::get(from)?))
    }
}

impl Codec for Price {
    fn put(&self, out: &mut Vec<u8>) {
        self.as_micros().put(out);
    }

    fn get(from: &mut &[u8]) -> Result<Self, Malformed> {
        i64::get(from).map(Self::micros)
    }
}

macro_rules! newtype {
    ($($name:ident),*) => {$(
        impl Codec for $name {
            fn put(&self, out: &mut Vec<u8>) {
                self.0.put(out);
            }

            fn get(from: &mut &[u8]) -> Result<Self, Malformed> {
                Codec::get(from).map(Self)
            }
        }
    )*};
}
newtype!(Time, TenantNo, LotNo, SupplierNo, BidId, AllocationId, OwnerKey, Charge);

/// Writes the fields of a struct in the order named. A `derived` one is not written, and is its default after reading.
macro_rules! codec_struct {
    ($name:ident { $($field:ident $(: $derived:ident)?),* $(,)? }) => {
        impl $crate::codec::Codec for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $($crate::codec::codec_struct!(@put self $field out $($derived)?);)*
            }

            fn get(from: &mut &[u8]) -> Result<Self, $crate::codec::Malformed> {
                Ok(Self { $($field: $crate::codec::codec_struct!(@get from $($derived)?)),* })
            }
        }
    };
    (@put $self:ident $field:ident $out:ident) => { $crate::codec::Codec::put(&$self.$field, $out) };
    (@put $self:ident $field:ident $out:ident derived) => {};
    (@get $from:ident) => { $crate::codec::Codec::get($from)? };
    (@get $from:ident derived) => { Default::default() };
}

/// Writes one byte for the variant, then its fields in the order named.
macro_rules! codec_enum {
    ($name:ident { $($tag:literal $variant:ident $({ $($field:ident),* $(,)? })?),* $(,)? }) => {
        impl $crate::codec::Codec for $name {
            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$variant $({ $($field),* })? => {
                        out.push($tag);
                        $($($crate::codec::Codec::put($field, out);)*)?
                    })*
                }
            }

            fn get(from: &mut &[u8]) -> Result<Self, $crate::codec::Malformed> {
                let (tag, rest) =
                    from.split_first().ok_or($crate::codec::Malformed(stringify!($name)))?;
                *from = rest;
                match *tag {
                    $($tag => Ok(Self::$variant $({ $($field: $crate::codec::Codec::get(from)?),* })?),)*
                    _ => Err($crate::codec::Malformed(stringify!($name))),
                }
            }
        }
    };
}
pub(crate) use {codec_enum, codec_struct};

codec_struct!(Params { reserve, cap, tick, call_interval_ms, min_runtime_ms, notice_ms });

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_integers_are_what_the_loop_reads() {
        for bits in 0..64 {
            for value in [1u64 << bits, (1 << bits) - 1, 0x5555_5555_5555_5555 >> bits] {
                let mut bytes = Vec::new();
                value.put(&mut bytes);
                let length = bytes.len();
                // Fewer than eight bytes are left: the loop reads them one by one.
                assert_eq!(u64::get(&mut bytes.as_slice()), Ok(value));
                bytes.extend([0xff; 8]);
                let mut rest = bytes.as_slice();
                assert_eq!((u64::get(&mut rest), rest), (Ok(value), &[0xff; 8][..]), "{length} bytes");
            }
        }
        let mut longer_than_needed = [0x81, 0x80, 0x00, 9, 9, 9, 9, 9, 9].as_slice();
        assert_eq!((u64::get(&mut longer_than_needed), longer_than_needed.len()), (Ok(1), 6));
    }

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
        assert_eq!(u8::get(&mut [0x80, 0x02].as_slice()), Err(Malformed("integer")), "256 does not fit u8");
        assert!(Vec::<u8>::get(&mut [200, 1].as_slice()).is_err(), "a length beyond the input");
    }
}
