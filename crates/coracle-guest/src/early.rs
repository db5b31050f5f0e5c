//! Reports before HTTP/2 (docs/reference/guest-channel.md, rule 12): a clone whose host makes no calls never runs the code of
//! HTTP/2, which an emulated CPU is slow to run for the first time, and keeps translated in memory.

use std::io;
use std::pin::pin;

use coracle_proto::guest::early_report::Report;
use coracle_proto::guest::{
    ALIVE_MAGIC, Alive, EarlyReport, RESET_MAGIC, ResetResponse, UPGRADE_MAGIC, Upgraded, frame,
};
use coracle_spawn::Thread;
use futures_util::StreamExt as _;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::agent::Agent;

/// Request of a host before HTTP/2.
type Request = [u8; UPGRADE_MAGIC.len()];

/// Requests of a host, of which one may have been received in part.
#[derive(Default)]
struct Requests {
    request: Request,
    received: usize,
}

impl Requests {
    /// Next request of the host. Cancel-safe: what was received of it is kept.
    async fn next(&mut self, io: &mut (impl AsyncRead + Unpin)) -> io::Result<Request> {
        while let Some(rest) = self.request.get_mut(self.received..).filter(|rest| !rest.is_empty()) {
            match io.read(rest).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                bytes => self.received = self.received.saturating_add(bytes),
            }
        }
        self.received = 0;
        Ok(self.request)
    }
}

/// Reports output and exit of the workload that was started, and answers the host, until the host asks for HTTP/2, or has the
/// guest reset once its workload has ended. The session begins anew then.
///
/// # Errors
/// When the session ends, the host sends something else, or the guest cannot be reset.
pub(crate) async fn serve(io: &mut (impl AsyncRead + AsyncWrite + Unpin), agent: &Agent) -> io::Result<()> {
    let mut output = pin!(agent.workload.logs().follow(0).map_err(io::Error::other)?.fuse());
    let mut exit = pin!(agent.workload_exit());
    let (mut requests, mut has_exited) = (Requests::default(), false);
    loop {
        let report = tokio::select! {
            biased;
            request = requests.next(io) => match request? {
                ALIVE_MAGIC => Report::Alive(Alive {}),
                UPGRADE_MAGIC => Report::Upgraded(Upgraded {}),
                RESET_MAGIC => {
                    if !has_exited {
                        exit.as_mut().await;
                    }
                    while output.next().await.is_some() {}
                    agent.reset(Thread::OfRuntime).await.map_err(io::Error::other)?;
                    Report::Reset(ResetResponse {})
                }
                _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "unknown request before HTTP/2")),
            },
            Some(chunk) = output.next() => Report::Output(chunk.map_err(io::Error::other)?),
            exited = &mut exit, if !has_exited => {
                has_exited = true;
                Report::Exited(exited)
            }
        };
        let is_last = matches!(report, Report::Upgraded(_) | Report::Reset(_));
        io.write_all(&frame(&EarlyReport { report: Some(report) })).await?;
        if is_last {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Root;
    use coracle_proto::guest::{LogChunk, Process, unframe};
    use coracle_spawn::Thread;
    use std::path::Path;
    use tokio::io::DuplexStream;

    async fn report(host: &mut DuplexStream) -> Report {
        let mut bytes = vec![0; usize::try_from(host.read_u32().await.unwrap()).unwrap()];
        host.read_exact(&mut bytes).await.unwrap();
        unframe::<EarlyReport>(&bytes).unwrap().report.unwrap()
    }

    #[tokio::test]
    async fn reports_are_sent_until_the_http2_upgrade() {
        let agent = Agent::of_directory(Root::open(Path::new("/")).unwrap());
        let (mut host, mut io) = tokio::io::duplex(4096);
        let script = "read line; printf $line; exit 3";
        let argv = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
        let process = Process { argv, stdin: true, ..Process::default() };
        agent.start_workload(process, Thread::OfRuntime).await.unwrap();
        let ask = async {
            host.write_all(&ALIVE_MAGIC[..3]).await.unwrap();
            host.write_all(&ALIVE_MAGIC[3..]).await.unwrap();
            assert_eq!(report(&mut host).await, Report::Alive(Alive {}));
            agent.workload.input().stdin.unwrap().write_all(b"three\n").await.unwrap();
            let reports = [report(&mut host).await, report(&mut host).await];
            let printed = |r: &Report| matches!(r, Report::Output(LogChunk { offset: 0, data, .. }) if data == b"three");
            let exited =
                |r: &Report| matches!(r, Report::Exited(end) if end.exit.as_ref().unwrap().code == 3);
            assert!(reports.iter().any(printed) && reports.iter().any(exited), "{reports:?}");
            host.write_all(&UPGRADE_MAGIC).await.unwrap();
            assert_eq!(report(&mut host).await, Report::Upgraded(Upgraded {}));
        };
        tokio::select! {
            _ = agent.reap() => unreachable!("it returns never"),
            (served, ()) = async { tokio::join!(serve(&mut io, &agent), ask) } => served.unwrap(),
        }
        host.write_all(b"PRI * HT").await.unwrap();
        let mut next = Request::default();
        io.read_exact(&mut next).await.unwrap();
        assert_eq!(&next, b"PRI * HT", "nothing of HTTP/2 was read");
    }

    #[tokio::test]
    async fn reset_waits_for_the_workload() {
        let agent = Agent::of_directory(Root::open(Path::new("/")).unwrap());
        let (mut host, mut io) = tokio::io::duplex(4096);
        let argv = ["/bin/sh", "-c", "read line"].map(str::to_owned).to_vec();
        let process = Process { argv, stdin: true, ..Process::default() };
        agent.start_workload(process, Thread::OfRuntime).await.unwrap();
        let ask = async {
            host.write_all(&RESET_MAGIC).await.unwrap();
            tokio::task::yield_now().await;
            agent.workload.input().stdin.unwrap().write_all(b"\n").await.unwrap();
            assert_eq!(report(&mut host).await, Report::Reset(ResetResponse {}));
            assert!(agent.workload.is_over());
        };
        tokio::select! {
            _ = agent.reap() => unreachable!("it returns never"),
            (served, ()) = async { tokio::join!(serve(&mut io, &agent), ask) } => served.unwrap(),
        }
    }

    #[tokio::test]
    async fn unknown_request_ends_the_session() {
        let agent = Agent::of_directory(Root::open(Path::new("/")).unwrap());
        for (request, kind) in
            [(&b"CORSTART"[..], io::ErrorKind::InvalidData), (b"COR", io::ErrorKind::UnexpectedEof)]
        {
            let (mut host, mut io) = tokio::io::duplex(64);
            host.write_all(request).await.unwrap();
            drop(host);
            assert_eq!(serve(&mut io, &agent).await.unwrap_err().kind(), kind);
        }
    }
}
