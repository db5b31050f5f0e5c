//! HTTP/1.1 on a Unix socket, one connection at a time, as VMMs serve it.

use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::sync::Arc;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response, StatusCode, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::UnixListener;

/// Status and body of a response.
pub type Answer = (u16, Option<Value>);
/// Answers a request by its method, path and body.
pub type Handle = Arc<dyn Fn(&str, &str, &[u8]) -> Answer + Send + Sync>;

/// Serves until the process ends. Bodies of more than `limit` bytes get 413.
///
/// # Errors
/// When the socket cannot be bound or accepts no more.
pub async fn serve(socket: &Path, limit: usize, handle: Handle) -> io::Result<()> {
    let listener = UnixListener::bind(socket)?;
    loop {
        let (stream, _) = listener.accept().await?;
        let service = service_fn(|request| answer(request, limit, handle.clone()));
        let _caller_gone = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
    }
}

async fn answer(
    request: Request<Incoming>,
    limit: usize,
    handle: Handle,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    if hangs_at(&path) {
        std::future::pending::<()>().await;
    }
    let (status, body) = match Limited::new(request.into_body(), limit).collect().await {
        Ok(body) => {
            let body = body.to_bytes();
            let done = tokio::task::spawn_blocking(move || handle(method.as_str(), &path, &body)).await;
            done.unwrap_or((500, None))
        }
        Err(_) => (413, None),
    };
    let bytes = body.map(|body| Bytes::from(body.to_string())).unwrap_or_default();
    let mut response = Response::new(Full::new(bytes));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    Ok(response)
}

/// Returns whether this program never answers a call of this path: its name ends with `hangs-at-` and the last part of the
/// path.
fn hangs_at(path: &str) -> bool {
    let program = std::env::args().next().unwrap_or_default();
    let word = program.rsplit_once("hangs-at-").map(|(_, word)| word);
    word.is_some_and(|word| path.rsplit('/').next() == Some(word))
}

/// Runs [`serve`] on a runtime of its own with the handler that `make` makes there; returns the exit code.
#[expect(clippy::print_stderr, reason = "it is the end of a program")]
pub fn run(socket: &Path, limit: usize, make: impl FnOnce() -> Handle) -> std::process::ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    match runtime.and_then(|runtime| runtime.block_on(async { serve(socket, limit, make()).await })) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            std::process::ExitCode::from(1)
        }
    }
}
