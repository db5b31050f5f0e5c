//! Executes one check of a probe.

use std::time::Duration;

use async_trait::async_trait;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{ProbeCheck, ProbeOutcome, http};
use crate::runtime::{Exec, PodRuntime};
use coracle_record::ContainerId;

/// Number of tries of one check while its outcome is unknown.
const TRIES: u32 = 3;
/// Most characters of a command's output in a message.
const OUTPUT_MAX: usize = 256;

/// Network checks from the node. The frontend implements gRPC; tests replace the whole trait.
#[async_trait]
pub trait Network: Send + Sync {
    /// Sends a request of a probe or a hook once.
    async fn http(&self, request: &crate::probe::http::HttpRequest, limit: Duration) -> ProbeOutcome {
        http::get(request, limit).await
    }

    /// Opens a TCP connection and closes it.
    async fn tcp(&self, host: &str, port: u16, limit: Duration) -> ProbeOutcome {
        match timeout(limit, TcpStream::connect((host, port))).await {
            Ok(Ok(_)) => ProbeOutcome::Success,
            Ok(Err(error)) => ProbeOutcome::Failure(format!("cannot connect to {host} port {port}: {error}")),
            Err(_) => ProbeOutcome::Failure(format!(
                "cannot connect to {host} port {port}: no answer within {limit:?}"
            )),
        }
    }

    /// Calls `grpc.health.v1.Health/Check` for a service. Only SERVING passes; another status or a failed connection fails.
    async fn grpc(&self, host: &str, port: u16, service: &str, limit: Duration) -> ProbeOutcome;
}

/// Executes a check, with up to three tries while its outcome is unknown. Each try is bounded by `limit`. Cancel-safe: the
/// runtime ends a command that was cancelled.
pub async fn check(
    runtime: &dyn PodRuntime,
    network: &dyn Network,
    id: &ContainerId,
    check: &ProbeCheck,
    limit: Duration,
) -> ProbeOutcome {
    let mut outcome = run_check(runtime, network, id, check, limit).await;
    for _ in 1..TRIES {
        if !matches!(outcome, ProbeOutcome::Unknown(_)) {
            break;
        }
        outcome = run_check(runtime, network, id, check, limit).await;
    }
    outcome
}

async fn run_check(
    runtime: &dyn PodRuntime,
    network: &dyn Network,
    id: &ContainerId,
    check: &ProbeCheck,
    limit: Duration,
) -> ProbeOutcome {
    match check {
        ProbeCheck::Exec(argv) => match runtime.exec(id, argv, limit).await {
            Ok(exec) => exec_outcome(&exec, limit),
            Err(error) => ProbeOutcome::Unknown(error.message),
        },
        ProbeCheck::Http(request) => network.http(request, limit).await,
        ProbeCheck::Tcp { host, port } => network.tcp(host, *port, limit).await,
        ProbeCheck::Grpc { host, port, service } => network.grpc(host, *port, service, limit).await,
        ProbeCheck::Invalid(why) => ProbeOutcome::Unknown(why.clone()),
    }
}

fn exec_outcome(exec: &Exec, limit: Duration) -> ProbeOutcome {
    match exec {
        Exec::Exited { code: 0, .. } => ProbeOutcome::Success,
        Exec::Exited { code, output } => {
            let clean = output.chars().take(OUTPUT_MAX).map(|c| if c.is_control() { ' ' } else { c });
            let said: String = clean.collect();
            let said = said.trim();
            let colon = if said.is_empty() { "" } else { ": " };
            ProbeOutcome::Failure(format!("command exited with code {code}{colon}{said}"))
        }
        Exec::TimedOut => ProbeOutcome::Failure(format!("command did not end within {limit:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_of_a_command_decides_its_check() {
        let limit = Duration::from_secs(1);
        let failure = |text: &str| ProbeOutcome::Failure(text.to_owned());
        for (exec, want) in [
            (Exec::Exited { code: 0, output: "x".into() }, ProbeOutcome::Success),
            (Exec::Exited { code: 2, output: String::new() }, failure("command exited with code 2")),
            (Exec::Exited { code: 1, output: "a\nb\n".into() }, failure("command exited with code 1: a b")),
            (Exec::TimedOut, failure("command did not end within 1s")),
        ] {
            assert_eq!(exec_outcome(&exec, limit), want, "{exec:?}");
        }
    }
}
