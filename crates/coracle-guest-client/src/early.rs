//! Session before HTTP/2: reports of an agent that has started a workload for a start request (docs/reference/guest-channel.md,
//! rule 12).

use std::io;

use bytes::BytesMut;
use coracle_proto::guest::early_report::Report;
use coracle_proto::guest::{ALIVE_MAGIC, EarlyReport, RESET_MAGIC, UPGRADE_MAGIC, unframe};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::{Mutex, watch};
use tokio_stream::StreamExt as _;
use tokio_util::codec::{FramedRead, LengthDelimitedCodec};

use crate::MESSAGE_MAX;
use crate::shared_stream::SharedStream;

/// Initial size of the buffer, bytes: most guests report nothing, and a node has thousands of them.
const BUFFER: usize = 64;

/// Maximum of reports that arrive after the last request, bytes. An agent sends one more, and the buffers have some before it.
const LATE_BYTES_MAX: usize = 4 << 20;

/// Session with an agent that has not begun HTTP/2.
#[derive(Debug)]
pub(crate) struct EarlySession {
    /// `None` once the session is upgraded, or begins anew.
    stream: Mutex<Option<EarlyStream>>,
    /// Whether the end of the reports is wanted, for which a reader gives way.
    is_wanted: watch::Sender<bool>,
}

#[derive(Debug)]
struct EarlyStream {
    frames: FramedRead<SharedStream, LengthDelimitedCodec>,
    /// Whether the last request was sent.
    is_asked: bool,
    /// Bytes of reports since then.
    late_bytes: usize,
}

impl EarlySession {
    pub(crate) fn new(stream: SharedStream) -> Self {
        let codec = LengthDelimitedCodec::builder().max_frame_length(MESSAGE_MAX).new_codec();
        let frames = FramedRead::with_capacity(stream, codec, BUFFER);
        Self {
            stream: Mutex::new(Some(EarlyStream { frames, is_asked: false, late_bytes: 0 })),
            is_wanted: watch::Sender::new(false),
        }
    }

    /// Returns the next report; `None` once the session is being upgraded. Cancel-safe.
    ///
    /// # Errors
    /// When the session ends, or the agent sends something else.
    pub(crate) async fn report(&self) -> io::Result<Option<Report>> {
        let mut is_wanted = self.is_wanted.subscribe();
        let mut stream = self.stream.lock().await;
        let Some(stream) = stream.as_mut() else { return Ok(None) };
        tokio::select! {
            biased;
            _ = is_wanted.wait_for(|is_wanted| *is_wanted) => Ok(None),
            report = stream.report() => report.map(Some),
        }
    }

    /// Asks whether the agent is alive; [`Report::Alive`] follows. Does nothing once the session is being upgraded.
    ///
    /// # Errors
    /// When the session ends.
    pub(crate) async fn ask_alive(&self) -> io::Result<()> {
        match self.stream.lock().await.as_mut() {
            Some(stream) if !*self.is_wanted.borrow() => stream.send(ALIVE_MAGIC).await,
            _ => Ok(()),
        }
    }

    /// Asks for HTTP/2, and returns the stream on which it begins. The reports before it are discarded: HTTP/2 has calls for
    /// all of them. A call that is cancelled may be repeated.
    ///
    /// # Errors
    /// When the session ends, the agent sends more reports than it can have sent before the request, or the session has been
    /// upgraded already.
    pub(crate) async fn upgrade(&self) -> io::Result<SharedStream> {
        self.end(UPGRADE_MAGIC).await
    }

    /// Has a guest whose workload has ended reset, and returns the stream, on which the session begins anew.
    ///
    /// # Errors
    /// As for [`EarlySession::upgrade`]; also when the guest cannot be reset.
    pub(crate) async fn reset(&self) -> io::Result<SharedStream> {
        self.end(RESET_MAGIC).await
    }

    /// Sends the last request, unless a cancelled call has sent it, and waits for the last report.
    async fn end(&self, request: [u8; 8]) -> io::Result<SharedStream> {
        self.is_wanted.send_replace(true);
        let mut stream = self.stream.lock().await;
        let early = stream.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        if !early.is_asked {
            early.send(request).await?;
            early.is_asked = true;
        }
        while !matches!(early.report().await?, Report::Upgraded(_) | Report::Reset(_)) {}
        // The agent sends nothing more before the host does.
        let ended = stream.take().ok_or(io::ErrorKind::NotConnected)?;
        Ok(ended.frames.into_inner())
    }
}

impl EarlyStream {
    /// Cancel-safe.
    async fn report(&mut self) -> io::Result<Report> {
        let frame: BytesMut = self.frames.next().await.ok_or(io::ErrorKind::UnexpectedEof)??;
        let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
        if self.is_asked {
            self.late_bytes += frame.len();
            if self.late_bytes > LATE_BYTES_MAX {
                return Err(invalid("the guest does not end its reports".to_owned()));
            }
        }
        let report: EarlyReport = unframe(&frame).map_err(|e| invalid(e.to_string()))?;
        report.report.ok_or_else(|| invalid("empty report of a guest".to_owned()))
    }

    /// Sends a request. Cancel-safe: a socket takes so few bytes as a whole.
    async fn send(&mut self, request: [u8; 8]) -> io::Result<()> {
        let sent = self.frames.get_mut().write(&request).await?;
        if sent == request.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }
}

#[cfg(test)]
mod tests {
    use coracle_proto::guest::{Alive, LogChunk, ResetResponse, Upgraded, frame};
    use futures_util::FutureExt as _;
    use tokio::io::AsyncReadExt as _;
    use tokio::net::UnixStream;

    use super::*;
    use crate::shared_stream::{Hangup, share};

    /// Session, its owner's handle and the agent's end.
    fn pair() -> (EarlySession, Hangup, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (stream, hangup) = share(ours);
        (EarlySession::new(stream), hangup, theirs)
    }

    fn bytes(report: Report) -> Vec<u8> {
        frame(&EarlyReport { report: Some(report) })
    }

    async fn request(agent: &mut UnixStream) -> [u8; 8] {
        let mut request = [0; 8];
        agent.read_exact(&mut request).await.unwrap();
        request
    }

    #[tokio::test]
    async fn partial_report_survives_a_cancelled_read() {
        let (session, _hangup, mut agent) = pair();
        let output = Report::Output(LogChunk { data: vec![b'x'; 300], ..Default::default() });
        let sent = bytes(output.clone());
        agent.write_all(&sent[..200]).await.unwrap();
        assert!(session.report().now_or_never().is_none());
        session.ask_alive().await.unwrap();
        assert_eq!(request(&mut agent).await, ALIVE_MAGIC);
        agent.write_all(&[&sent[200..], &bytes(Report::Alive(Alive {}))].concat()).await.unwrap();
        assert_eq!(session.report().await.unwrap(), Some(output));
        assert_eq!(session.report().await.unwrap(), Some(Report::Alive(Alive {})));
    }

    #[tokio::test]
    async fn upgrade_ends_a_pending_report_read() {
        let (session, _hangup, mut agent) = pair();
        let upgrade = async {
            assert!(session.upgrade().now_or_never().is_none(), "the agent has not answered");
            // The call is repeated, but not its request.
            session.upgrade().await.unwrap()
        };
        let answer = async {
            assert_eq!(request(&mut agent).await, UPGRADE_MAGIC);
            let (late, last) = (Report::Alive(Alive {}), Report::Upgraded(Upgraded {}));
            agent.write_all(&[bytes(late), bytes(last)].concat()).await.unwrap();
        };
        let (report, mut stream, ()) = tokio::join!(session.report(), upgrade, answer);
        assert_eq!(report.unwrap(), None);
        assert_eq!(session.report().await.unwrap(), None, "the session is HTTP/2 from now on");
        session.ask_alive().await.unwrap();
        stream.write_all(b"PRI * HT").await.unwrap();
        assert_eq!(&request(&mut agent).await, b"PRI * HT");
        assert_eq!(session.upgrade().await.unwrap_err().kind(), io::ErrorKind::NotConnected);
    }

    #[tokio::test]
    async fn reset_returns_a_stream_for_the_next_start() {
        let (session, _hangup, mut agent) = pair();
        let answer = async {
            assert_eq!(request(&mut agent).await, RESET_MAGIC);
            agent.write_all(&bytes(Report::Reset(ResetResponse {}))).await.unwrap();
        };
        let (stream, ()) = tokio::join!(session.reset(), answer);
        stream.unwrap().write_all(b"CORSTART").await.unwrap();
        assert_eq!(&request(&mut agent).await, b"CORSTART");
    }

    #[tokio::test]
    async fn agent_that_floods_instead_of_an_upgrade_is_given_up() {
        let (session, _hangup, mut agent) = pair();
        let output = bytes(Report::Output(LogChunk { data: vec![b'x'; 1 << 16], ..Default::default() }));
        let flood = async { while agent.write_all(&output).await.is_ok() {} };
        let upgraded = tokio::select! {
            () = flood => unreachable!("the flood ends only with the host"),
            upgraded = session.upgrade() => upgraded,
        };
        assert_eq!(upgraded.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[tokio::test]
    async fn malformed_early_frames_are_refused() {
        for nonsense in [&[0xff; 64][..], &[0, 0, 0, 2, 0xff, 0xff], &[0; 4]] {
            let (session, _hangup, mut agent) = pair();
            agent.write_all(nonsense).await.unwrap();
            assert_eq!(session.report().await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
        let (session, _hangup, agent) = pair();
        drop(agent);
        assert_eq!(session.report().await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
