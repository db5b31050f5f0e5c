//! Session whose agent has sent its hello. It takes a start request, or HTTP/2 (docs/reference/guest-channel.md, rules 11 to 13).

use std::io;
use std::time::Duration;

use coracle_hypervisor::{Driver, VmmConfig};
use coracle_proto::guest as pb;
use coracle_proto::guest::early_report::Report;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::connection::Connection;
use crate::early::EarlySession;
use crate::shared_stream::{Hangup, SharedStream, share};
use crate::start::{self, StartFailure, Started};
use crate::{GuestClient, GuestError, open_channel};

/// Session to which the host has sent nothing yet. Dropping it ends it, which the guest notices at once.
#[derive(Debug)]
pub struct NewSession {
    stream: SharedStream,
    hangup: Hangup,
}

/// Session that may have begun.
#[derive(Debug)]
pub enum GuestSession {
    /// The agent waits for a start request, or for HTTP/2.
    New(NewSession),
    /// HTTP/2 has begun.
    Http2(GuestClient),
}

impl GuestSession {
    /// Begins HTTP/2, unless it has begun.
    ///
    /// # Errors
    /// As for [`NewSession::http2`].
    pub async fn http2(self) -> io::Result<GuestClient> {
        match self {
            Self::New(session) => session.http2().await,
            Self::Http2(client) => Ok(client),
        }
    }
}

impl NewSession {
    /// Opens a session within `limit`, with as many tries as needed: the guest may be booting, or an earlier session may not
    /// have ended yet. The first try uses `channel`, if there is one. Cancel-safe.
    ///
    /// # Errors
    /// Last error, when the limit is over.
    pub async fn open(
        driver: &dyn Driver,
        vmm_config: &VmmConfig,
        limit: Duration,
        channel: Option<UnixStream>,
    ) -> io::Result<Self> {
        let (stream, hangup) = share(open_channel(driver, vmm_config, limit, channel).await?);
        Ok(Self { stream, hangup })
    }

    /// Begins HTTP/2.
    ///
    /// # Errors
    /// When the session ends.
    pub async fn http2(self) -> io::Result<GuestClient> {
        let connection = Connection::handshake(self.stream).await.map_err(io::Error::other)?;
        Ok(GuestClient::of(connection, self.hangup))
    }

    /// Has the agent configure the guest and start the workload, before HTTP/2. The agent must be of this version. Idempotent in
    /// the guest. `limits` are those of both steps. HTTP/2 begins with the first call; until then the caller reads the reports
    /// of the agent ([`GuestClient::early_report`]).
    ///
    /// # Errors
    /// [`StartFailure`], with the step that failed.
    pub async fn start(
        mut self,
        request: &pb::StartRequest,
        limits: (Duration, Duration),
    ) -> Result<(GuestClient, Started), StartFailure> {
        let started = start::start(&mut self.stream, request, limits).await?;
        Ok((GuestClient::of(Connection::early(self.stream), self.hangup), started))
    }

    /// Has a guest do a start, waits until its workload has ended, and has the guest reset. `limits` are those of the two steps
    /// of the start, and of the rest. Returns the session, which is new again.
    ///
    /// # Errors
    /// [`StartFailure`]: the guest is unusable.
    pub async fn warm_up(
        mut self,
        request: &pb::StartRequest,
        (configure_limit, start_limit, rest_limit): (Duration, Duration, Duration),
    ) -> Result<Self, StartFailure> {
        start::start(&mut self.stream, request, (configure_limit, start_limit)).await?;
        let session = EarlySession::new(self.stream);
        let rest = async {
            while !matches!(session.report().await?, Some(Report::Exited(_))) {}
            session.reset().await
        };
        let failed = |source| StartFailure { operation: "reset", source };
        let reset = timeout(rest_limit, rest).await.map_err(|_| failed(GuestError::timed_out(rest_limit)))?;
        let stream = reset.map_err(|e| failed(GuestError::unavailable(e.to_string())))?;
        Ok(Self { stream, hangup: self.hangup })
    }
}

#[cfg(test)]
mod tests {
    use coracle_proto::guest::start_response::Result as StepResult;
    use coracle_proto::guest::{RESET_MAGIC, frame};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    fn pair() -> (NewSession, UnixStream) {
        let (ours, agent) = UnixStream::pair().unwrap();
        let (stream, hangup) = share(ours);
        (NewSession { stream, hangup }, agent)
    }

    async fn expect_request(agent: &mut UnixStream, want: &[u8]) {
        let mut bytes = vec![0; want.len()];
        agent.read_exact(&mut bytes).await.unwrap();
        assert_eq!(bytes, want);
    }

    fn started_frames() -> Vec<u8> {
        let configured = StepResult::Configured(pb::ConfigureResponse::default());
        let steps = [configured, StepResult::Started(pb::StartWorkloadResponse { pid: 7 })];
        steps.map(|result| frame(&pb::StartResponse { result: Some(result) })).concat()
    }

    fn report_frame(report: Report) -> Vec<u8> {
        frame(&pb::EarlyReport { report: Some(report) })
    }

    #[tokio::test]
    async fn guest_starts_again_after_its_warm_up() {
        let (session, mut agent) = pair();
        let request = pb::StartRequest::default();
        let serve = async {
            expect_request(&mut agent, b"CORSTART\0\0\0\0").await;
            let output = Report::Output(pb::LogChunk { data: vec![b'x'; 300], ..Default::default() });
            let exited = Report::Exited(pb::WaitWorkloadResponse::default());
            let reports = [started_frames(), report_frame(output), report_frame(exited)].concat();
            agent.write_all(&reports).await.unwrap();
            expect_request(&mut agent, &RESET_MAGIC).await;
            agent.write_all(&report_frame(Report::Reset(pb::ResetResponse {}))).await.unwrap();
            expect_request(&mut agent, b"CORSTART\0\0\0\0").await;
            agent.write_all(&started_frames()).await.unwrap();
        };
        let start = async {
            let session = session.warm_up(&request, (LIMIT, LIMIT, LIMIT)).await.unwrap();
            session.start(&request, (LIMIT, LIMIT)).await.unwrap()
        };
        let _started = tokio::join!(start, serve);
    }

    #[tokio::test(start_paused = true)]
    async fn failed_warm_up_names_the_step() {
        let exited = report_frame(Report::Exited(pb::WaitWorkloadResponse::default()));
        for (why, answer, hangs_up, operation) in [
            ("no answer", vec![], false, "configure"),
            ("the workload does not end", started_frames(), false, "reset"),
            ("the session ends", started_frames(), true, "reset"),
            ("no reset", [started_frames(), exited].concat(), false, "reset"),
        ] {
            let (session, mut agent) = pair();
            agent.write_all(&answer).await.unwrap();
            if hangs_up {
                agent.shutdown().await.unwrap();
            }
            let failed = session.warm_up(&pb::StartRequest::default(), (LIMIT, LIMIT, LIMIT)).await;
            assert_eq!(failed.map_err(|failure| failure.operation).unwrap_err(), operation, "{why}");
        }
    }
}
