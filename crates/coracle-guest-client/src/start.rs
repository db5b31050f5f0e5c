//! Start request: configuration and start of the workload in one, before HTTP/2 (docs/reference/guest-channel.md, rule 11).

use std::io;
use std::time::Duration;

use coracle_proto::guest::start_response::Result as StepResult;
use coracle_proto::guest::{START_MAGIC, StartRequest, StartResponse, StepError, frame, unframe};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout};
use tonic::{Code, Status};

use crate::{GuestError, MESSAGE_MAX};

/// Guest whose workload was started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Started {
    /// Present addresses of the guest, with their prefixes.
    pub addresses: Vec<String>,
    /// Time from the request to the configured guest.
    pub configured: Duration,
    /// Time from then to the started workload.
    pub started: Duration,
}

/// Start that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartFailure {
    /// Step that failed: "configure", "start the workload" or, in a warm-up, "reset".
    pub operation: &'static str,
    /// Reason.
    pub source: GuestError,
}

/// Sends the request and waits for the response of each step, within its limit.
pub(crate) async fn start(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    request: &StartRequest,
    (configure_limit, start_limit): (Duration, Duration),
) -> Result<Started, StartFailure> {
    let failed = |operation| move |source| StartFailure { operation, source };
    let began = Instant::now();
    let configure = async {
        let mut bytes = START_MAGIC.to_vec();
        bytes.extend(frame(request));
        stream.write_all(&bytes).await?;
        response(stream).await
    };
    let addresses = match step_within(configure_limit, configure).await.map_err(failed("configure"))? {
        StepResult::Configured(configured) => configured.addresses,
        other => return Err(failed("configure")(refusal(other))),
    };
    let configured = began.elapsed();
    let start = step_within(start_limit, response(stream)).await.map_err(failed("start the workload"))?;
    match start {
        StepResult::Started(_) => {
            Ok(Started { addresses, configured, started: began.elapsed().saturating_sub(configured) })
        }
        other => Err(failed("start the workload")(refusal(other))),
    }
}

async fn step_within(
    limit: Duration,
    step: impl Future<Output = io::Result<StepResult>>,
) -> Result<StepResult, GuestError> {
    let result = timeout(limit, step).await.map_err(|_| GuestError::timed_out(limit))?;
    result.map_err(|e| GuestError::unavailable(e.to_string()))
}

/// Error of a step whose result is not that of its success.
fn refusal(result: StepResult) -> GuestError {
    match result {
        StepResult::Error(StepError { code, message }) => Status::new(Code::from(code), message).into(),
        _ => GuestError::unavailable("the guest answers another step"),
    }
}

async fn response(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<StepResult> {
    let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    let length = usize::try_from(stream.read_u32().await?).unwrap_or(usize::MAX);
    if length > MESSAGE_MAX {
        return Err(invalid("the guest's response is too long".to_owned()));
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await?;
    let response: StartResponse = unframe(&bytes).map_err(|e| invalid(e.to_string()))?;
    response.result.ok_or_else(|| invalid("the guest's response has no result".to_owned()))
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixStream;

    use super::*;
    use coracle_proto::guest::{ConfigureResponse, StartWorkloadResponse};

    const LIMITS: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(5));

    /// Outcome of a start with a guest that answers with these bytes.
    async fn start_with_answer(answer: &[u8]) -> Result<Started, StartFailure> {
        let (mut host, mut guest) = UnixStream::pair().unwrap();
        guest.write_all(answer).await.unwrap();
        let outcome = start(&mut host, &StartRequest::default(), LIMITS).await;
        let mut sent = [0; 12];
        guest.read_exact(&mut sent).await.unwrap();
        assert_eq!(&sent, b"CORSTART\0\0\0\0");
        outcome
    }

    fn response(result: StepResult) -> Vec<u8> {
        frame(&StartResponse { result: Some(result) })
    }

    #[tokio::test]
    async fn start_error_names_the_failed_step() {
        let addresses = vec!["10.0.0.2/24".to_owned()];
        let configured = response(StepResult::Configured(ConfigureResponse { addresses: addresses.clone() }));
        let started = response(StepResult::Started(StartWorkloadResponse { pid: 7 }));
        let error = StepError { code: Code::InvalidArgument.into(), message: "no".to_owned() };
        let refused = response(StepResult::Error(error));
        for (answer, operation) in [
            (refused.clone(), "configure"),
            (started.clone(), "configure"),
            ([configured.clone(), refused].concat(), "start the workload"),
            ([configured.clone(), configured.clone()].concat(), "start the workload"),
        ] {
            assert_eq!(start_with_answer(&answer).await.unwrap_err().operation, operation);
        }
        assert_eq!(start_with_answer(&[configured, started].concat()).await.unwrap().addresses, addresses);
    }

    #[tokio::test]
    async fn malformed_start_response_is_refused() {
        for nonsense in [&[0xff; 64][..], &[0, 0, 0, 2, 0xff, 0xff], &[0; 4]] {
            assert_eq!(start_with_answer(nonsense).await.unwrap_err().operation, "configure");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silent_guest_times_out_at_the_step_limit() {
        let (mut host, _guest) = UnixStream::pair().unwrap();
        let began = Instant::now();
        let failure = start(&mut host, &StartRequest::default(), LIMITS).await.unwrap_err();
        assert_eq!((failure.operation, began.elapsed().as_secs()), ("configure", 5));
    }
}
