//! The codec of a wire that has thousands of idle streams: a node has several to each guest, and the buffers of tonic's own
//! codec, 8 KiB for each direction of each, would be most of what a VM takes there.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::ProstCodec;

/// First size of a buffer; it grows with the messages.
const BUFFER: usize = 512;
/// Bytes that are encoded before they are sent, as in tonic's own codec.
const YIELD_THRESHOLD: usize = 32 * 1024;

/// Protocol Buffers, with buffers that begin small.
#[derive(Clone, Debug)]
pub struct CompactCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for CompactCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for CompactCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = <ProstCodec<T, U> as Codec>::Encoder;
    type Decoder = <ProstCodec<T, U> as Codec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::new(BUFFER, YIELD_THRESHOLD))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(BufferSettings::new(BUFFER, YIELD_THRESHOLD))
    }
}
