//! Control socket of Firecracker and Cloud Hypervisor: JSON over HTTP/1.1 on a Unix socket.

mod descriptors;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, select};
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::UnixStream;
use tokio::time::timeout;

use self::descriptors::DescriptorStream;
use crate::{VmmConfig, VmmFiles};

/// Time limit of a call that moves no memory. Such a call takes milliseconds, more on a loaded host. The same limit as for
/// QEMU's monitor.
const CALL_LIMIT: Duration = Duration::from_secs(20);
/// Lowest rate, that of a slow disk, at which a call is allowed to write or read memory.
const SLOWEST_MIB_PER_SECOND: u64 = 16;

/// Returns the time limit of a call that writes or reads the whole memory of a VM.
#[must_use]
pub fn memory_call_limit(vmm_config: &VmmConfig) -> Duration {
    CALL_LIMIT + Duration::from_secs(u64::from(vmm_config.memory.get()) / SLOWEST_MIB_PER_SECOND)
}

/// Maximum length of a response body; the longest valid one is the configuration of a VM.
const ANSWER_BYTES_MAX: usize = 4 << 20;

/// Failure of an API call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApiError {
    /// The VMM rejected the call.
    #[error("{method} {path}: {message}")]
    Refused {
        /// HTTP method.
        method: Method,
        /// Request path.
        path: String,
        /// Status code of the response.
        status: StatusCode,
        /// Message of the VMM.
        message: String,
    },
    /// The VMM did not respond in time.
    #[error("{method} {path}: no answer within {seconds} s")]
    TimedOut {
        /// HTTP method.
        method: Method,
        /// Request path.
        path: String,
        /// Time limit.
        seconds: u64,
    },
    /// The socket failed, most likely because the VMM has ended.
    #[error("{method} {path}")]
    Io {
        /// HTTP method.
        method: Method,
        /// Request path.
        path: String,
        /// Cause.
        source: io::Error,
    },
}

impl ApiError {
    /// Returns the status code of a rejection.
    #[must_use]
    pub fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            Self::TimedOut { .. } | Self::Io { .. } => None,
        }
    }
}

/// Control socket of one VMM. Each call opens a connection of its own, because a VMM serves one connection at a time, and a
/// dropped caller leaves nothing half-sent.
#[derive(Clone, Debug)]
pub struct ApiSocket {
    location: SocketLocation,
    limit: Duration,
    /// Extracts the message from the body of an error response of this VMM.
    refusal: fn(&Value) -> Option<String>,
}

/// Location of the socket.
#[derive(Clone, Debug)]
enum SocketLocation {
    Path(PathBuf),
    /// Socket of this name among the files of the VMM with this `run_dir`.
    Vmm(PathBuf, &'static str),
}

impl ApiSocket {
    /// Socket of the VMM that listens at `socket`; `refusal` extracts the message of an error response.
    #[must_use]
    pub fn at(socket: &Path, refusal: fn(&Value) -> Option<String>) -> Self {
        Self { location: SocketLocation::Path(socket.to_owned()), limit: CALL_LIMIT, refusal }
    }

    /// Socket of this name among the files of a VMM.
    #[must_use]
    pub fn of(vmm_config: &VmmConfig, name: &'static str, refusal: fn(&Value) -> Option<String>) -> Self {
        Self { location: SocketLocation::Vmm(vmm_config.run_dir.clone(), name), limit: CALL_LIMIT, refusal }
    }

    /// Sets the time limit of calls.
    #[must_use]
    pub fn within(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Makes one call; `None` when the response has no body. Not cancel-safe: the VMM may carry the call out all the same.
    ///
    /// # Errors
    /// [`ApiError`].
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Option<Value>, ApiError> {
        self.call_with(method, path, body, vec![]).await
    }

    /// Like [`ApiSocket::call`], and passes these descriptors to the VMM.
    ///
    /// # Errors
    /// [`ApiError`].
    pub async fn call_with(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Option<Value>, ApiError> {
        let io = |source| ApiError::Io { method: method.clone(), path: path.to_owned(), source };
        let exchange = self.exchange(method.clone(), path, body, descriptors);
        let (status, answer) = match timeout(self.limit, exchange).await {
            Ok(answered) => answered.map_err(io)?,
            Err(_) => {
                let (path, seconds) = (path.to_owned(), self.limit.as_secs());
                return Err(ApiError::TimedOut { method, path, seconds });
            }
        };
        let json = serde_json::from_slice(&answer).ok();
        if status.is_success() {
            return Ok(json);
        }
        let said = json.as_ref().and_then(self.refusal);
        let message = said.unwrap_or_else(|| format!("{status}: {}", String::from_utf8_lossy(&answer)));
        let message = message.chars().map(|c| if c.is_control() { ' ' } else { c }).take(2000).collect();
        Err(ApiError::Refused { method, path: path.to_owned(), status, message })
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        descriptors: Vec<OwnedFd>,
    ) -> io::Result<(StatusCode, Bytes)> {
        let stream = match &self.location {
            SocketLocation::Path(socket) => UnixStream::connect(socket).await?,
            SocketLocation::Vmm(run_dir, name) => VmmFiles::of(run_dir)?.connect(name).await?,
        };
        let stream = DescriptorStream::new(stream, descriptors)?;
        let (mut send, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "localhost")
            .header(header::ACCEPT, "application/json");
        let bytes = match body {
            Some(body) => {
                request = request.header(header::CONTENT_TYPE, "application/json");
                Bytes::from(body.to_string())
            }
            None => Bytes::new(),
        };
        let request = request.body(Full::new(bytes)).map_err(io::Error::other)?;
        let answer = async {
            let response = send.send_request(request).await.map_err(io::Error::other)?;
            let status = response.status();
            let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
            Ok((status, body.map_err(io::Error::other)?.to_bytes()))
        };
        // This future drives the connection, so that no part of the connection outlives the call.
        let connection = std::pin::pin!(connection);
        match select(std::pin::pin!(answer), connection).await {
            Either::Left((answer, _)) => answer,
            Either::Right((_, answer)) => answer.await,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn call_without_an_answer_ends_at_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api.sock");
        let _silent = UnixListener::bind(&socket).unwrap();
        let api = ApiSocket::at(&socket, |_| None);
        let memory = Duration::from_secs(300);
        for (api, want) in [(api.clone(), CALL_LIMIT), (api.within(memory), memory)] {
            let began = Instant::now();
            let refused = api.call(Method::PUT, "/actions", None).await.unwrap_err();
            assert!(
                matches!(refused, ApiError::TimedOut { seconds, .. } if seconds == want.as_secs()),
                "{refused}"
            );
            assert_eq!(began.elapsed().as_secs(), want.as_secs());
        }
    }
}
