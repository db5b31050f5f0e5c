//! Host service: `coracle.host.v1` for the CLI and the operator.

mod convert;
mod images;
mod messages;
mod service;
mod snapshots;
mod streams;

use futures_util::stream::BoxStream;
use tonic::{Response, Status};

pub use self::service::HostService;

type Reply<T> = Result<Response<T>, Status>;
type Replies<T> = Result<Response<BoxStream<'static, Result<T, Status>>>, Status>;
