//! Exec, attach and port-forward: URLs on 127.0.0.1 to which a kubelet forwards its clients, and the sessions behind them.

mod server;

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::Duration;

use coracle_pod::streams::{AttachSession, ExecSession};
use coracle_proto::cri::{AttachRequest, ExecRequest, PortForwardRequest};
use coracle_streaming::{Streams, Tokens};
use tonic::Status;

use crate::refusal::{Refusal, of_host};
use crate::server::CriServer;

/// Time that a request waits for a VM to boot; the kubelet's limit is two minutes.
const BOOT_WAIT: Duration = Duration::from_secs(90);

/// Session that waits for its client.
#[derive(Debug)]
enum Waiting {
    Exec { session: Box<ExecSession>, streams: Streams },
    Attach { session: Box<AttachSession>, streams: Streams },
    PortForward { vm: String, disk: bool },
}

/// Address of the streaming server, and waiting sessions.
#[derive(Default)]
pub(crate) struct Streaming {
    address: OnceLock<SocketAddr>,
    waiting: Tokens<Waiting>,
}

impl std::fmt::Debug for Streaming {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Streaming").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Refuses invalid combinations of streams. Pure.
fn check(streams: Streams) -> Result<(), Refusal> {
    match streams {
        Streams { tty: true, stderr: true, .. } => {
            Err(Refusal::invalid("streams", "a terminal has no standard error"))
        }
        Streams { stdin: false, stdout: false, stderr: false, .. } => {
            Err(Refusal::invalid("streams", "none of stdin, stdout and stderr is asked for"))
        }
        _ => Ok(()),
    }
}

impl CriServer {
    pub(crate) async fn exec_url(&self, request: ExecRequest) -> Result<String, Status> {
        let ExecRequest { container_id, cmd, tty, stdin, stdout, stderr } = request;
        let streams = Streams { stdin, stdout, stderr, tty };
        check(streams)?;
        if cmd.is_empty() {
            return Err(Refusal::invalid("command", "it is empty").into());
        }
        let (pod, container) = self.0.table.container(&self.0.host, &container_id)?;
        if pod.facts.disk {
            self.await_boot(pod.vm(&container), Some(BOOT_WAIT)).await;
        }
        let session =
            ExecSession::new(self.0.host.clone(), pod.vm(&container), &container.record.id, cmd, streams);
        let session = Box::new(session.map_err(|e| of_host(&e))?);
        self.hand_out("exec", Waiting::Exec { session, streams })
    }

    pub(crate) fn attach_url(&self, request: AttachRequest) -> Result<String, Status> {
        let AttachRequest { container_id, stdin, tty, stdout, stderr } = request;
        let streams = Streams { stdin, stdout, stderr, tty };
        check(streams)?;
        let (pod, container) = self.0.table.container(&self.0.host, &container_id)?;
        if !container.is_running() {
            let (operation, why) = ("attach to", "it is not running");
            return Err(Refusal::State { operation, what: "container", id: container_id, why }.into());
        }
        let session =
            AttachSession::new(self.0.host.clone(), pod.vm(&container), &container.record.id, streams);
        let session = Box::new(session.map_err(|e| of_host(&e))?);
        self.hand_out("attach", Waiting::Attach { session, streams })
    }

    pub(crate) fn port_forward_url(&self, request: PortForwardRequest) -> Result<String, Status> {
        let pod = self.0.table.pod(&self.0.host, &request.pod_sandbox_id)?;
        if !pod.is_ready() {
            let (operation, id, why) = ("forward ports of", request.pod_sandbox_id, "it is not ready");
            return Err(Refusal::State { operation, what: "sandbox", id, why }.into());
        }
        let vm = self.running_vm(&pod)?.to_owned();
        self.hand_out("portforward", Waiting::PortForward { vm, disk: pod.facts.disk })
    }

    fn hand_out(&self, verb: &str, waiting: Waiting) -> Result<String, Status> {
        let streaming = &self.0.streaming;
        let address = streaming.address.get().ok_or_else(|| Status::unavailable("the server is starting"))?;
        let token = streaming.waiting.issue(waiting).map_err(|_| Refusal::TooManySessions)?;
        Ok(format!("http://{address}/{verb}/{}", token.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_table() {
        let streams = |stdin, stdout, stderr, tty| Streams { stdin, stdout, stderr, tty };
        for (why, streams, good) in [
            ("none", streams(false, false, false, false), false),
            ("a terminal with stderr", streams(true, true, true, true), false),
            ("a terminal", streams(true, true, false, true), true),
            ("input alone", streams(true, false, false, false), true),
            ("all", streams(true, true, true, false), true),
        ] {
            assert_eq!(check(streams).is_ok(), good, "{why}");
        }
    }
}
