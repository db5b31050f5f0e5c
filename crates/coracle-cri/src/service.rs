//! The calls of the contract: unpack, call the part that does it, pack the answer.

mod image;
mod runtime;

use std::pin::Pin;

use futures_util::stream::{self, Stream};
use tonic::{Response, Status};

use crate::CriServer;

/// Objects in one message of a streamed list.
const CHUNK: usize = 256;

/// Both services over one server.
#[derive(Clone, Debug)]
pub(crate) struct Service(pub(crate) CriServer);

type Reply<T> = Result<Response<T>, Status>;
type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn reply<T>(message: T) -> Reply<T> {
    Ok(Response::new(message))
}

/// A list as messages of bounded size, each object once.
fn chunked<T, M>(objects: Vec<T>, message: fn(Vec<T>) -> M) -> Reply<Replies<M>>
where
    T: Clone + Send + 'static,
    M: Send + 'static,
{
    let messages: Vec<_> = objects.chunks(CHUNK).map(|chunk| Ok(message(chunk.to_vec()))).collect();
    reply(Box::pin(stream::iter(messages)))
}
