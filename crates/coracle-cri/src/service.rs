//! Calls of the CRI services: decode, call the responsible part, encode the reply.

mod image;
mod runtime;

use std::pin::Pin;

use futures_util::stream::{self, Stream};
use tonic::{Response, Status};

use crate::CriServer;

/// Most objects in one message of a streamed list.
const CHUNK: usize = 256;

/// Implementation of both CRI services.
#[derive(Clone, Debug)]
pub(crate) struct Service(pub(crate) CriServer);

type Reply<T> = Result<Response<T>, Status>;
type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn reply<T>(message: T) -> Reply<T> {
    Ok(Response::new(message))
}

/// Returns a list as a stream of messages of bounded size.
fn chunked<T, M>(objects: Vec<T>, message: fn(Vec<T>) -> M) -> Reply<Replies<M>>
where
    T: Clone + Send + 'static,
    M: Send + 'static,
{
    let messages: Vec<_> = objects.chunks(CHUNK).map(|chunk| Ok(message(chunk.to_vec()))).collect();
    reply(Box::pin(stream::iter(messages)))
}
