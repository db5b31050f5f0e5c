//! Which accelerator to use: proven by running guest code, never assumed.
//!
//! `/dev/kvm` may open, create a VM and a CPU, and then interpret every
//! privileged instruction a thousand times too slowly, or stop at the first
//! one that its interpreter lacks. So the payload of `kvm.rs` runs in a child
//! process with a limit, and its steps are read from the child's output.

use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::Duration;

use coracle_hypervisor::Accelerator;
use tokio::process::Command;
use tokio::time::timeout;

/// The limit of the payload, and then of the child that runs it.
const LIMIT: Duration = Duration::from_millis(750);

/// How to ask whether KVM works.
#[derive(Clone, Debug)]
pub struct KvmProbe {
    /// Looked at first: without it there is nothing to run.
    pub device: PathBuf,
    /// A program that calls [`crate::run_kvm_payload`], and its arguments.
    pub command: Vec<PathBuf>,
}

/// The accelerator to use, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Which one.
    pub accelerator: Accelerator,
    /// One line for a person.
    pub reason: String,
}

impl Verdict {
    fn tcg(reason: impl Into<String>) -> Self {
        Self { accelerator: Accelerator::Tcg, reason: reason.into() }
    }
}

impl KvmProbe {
    /// Runs the probe. Takes milliseconds, and never longer than a second.
    pub async fn run(&self) -> Verdict {
        if !self.device.exists() {
            return Verdict::tcg(format!("{} does not exist", self.device.display()));
        }
        let Some((program, args)) = self.command.split_first() else {
            return Verdict::tcg("no probe program is configured");
        };
        let child = Command::new(program)
            .args(args)
            .arg(&self.device)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn();
        match child {
            Err(e) => Verdict::tcg(format!("the KVM probe could not be run: {e}")),
            Ok(child) => match timeout(LIMIT, child.wait_with_output()).await {
                Ok(Ok(output)) => judge(&output),
                Ok(Err(e)) => Verdict::tcg(format!("the KVM probe could not be read: {e}")),
                Err(_) => Verdict::tcg(format!(
                    "kvm opens, but guest code did not finish within {} ms",
                    LIMIT.as_millis()
                )),
            },
        }
    }
}

/// The last line that the child printed is its verdict: `ok …` or a reason.
fn judge(output: &Output) -> Verdict {
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().unwrap_or_default().trim();
    match last.strip_prefix("ok ") {
        Some(proof) if output.status.success() => {
            Verdict { accelerator: Accelerator::Kvm, reason: proof.to_owned() }
        }
        _ if last.is_empty() => {
            Verdict::tcg(format!("the KVM probe ended without a word ({})", output.status))
        }
        _ => Verdict::tcg(last.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn probe(script: &str) -> KvmProbe {
        let command = ["/bin/sh", "-c", script].map(PathBuf::from).to_vec();
        KvmProbe { device: "/dev/null".into(), command }
    }

    #[tokio::test]
    async fn a_device_that_opens_and_hangs_means_tcg_in_time() {
        let start = Instant::now();
        let verdict = probe("exec sleep 100").run().await;
        assert_eq!(verdict.accelerator, Accelerator::Tcg);
        assert!(verdict.reason.contains("did not finish"), "{}", verdict.reason);
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    #[tokio::test]
    async fn only_a_proof_means_kvm() {
        for (script, want) in [
            ("echo ok guest code ran", Accelerator::Kvm),
            ("echo ok guest code ran; exit 1", Accelerator::Tcg),
            ("echo kvm opens, but the guest stopped", Accelerator::Tcg),
            ("true", Accelerator::Tcg),
        ] {
            assert_eq!(probe(script).run().await.accelerator, want, "{script}");
        }
        let absent = KvmProbe { device: "/dev/absent".into(), command: vec![] };
        assert_eq!(absent.run().await.reason, "/dev/absent does not exist");
    }
}
