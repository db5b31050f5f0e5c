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
use crate::{GuestClient, GuestError, greeted};

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
        let (stream, hangup) = share(greeted(driver, vmm_config, limit, channel).await?);
        Ok(Self { stream, hangup })
    }

    /// Begins HTTP/2.
    ///
    /// # Errors
    /// When the session ends.
    pub async fn http2(self) -> io::Result<GuestClient> {
        let connection = Connection::over(self.stream).await.map_err(io::Error::other)?;
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
        let session = EarlySession::over(self.stream);
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
