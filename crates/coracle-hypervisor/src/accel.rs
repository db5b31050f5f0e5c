//! Choice of the accelerator: proven by running guest code, never assumed.
//!
//! `/dev/kvm` may open, and create a VM and a vCPU, and then interpret every privileged instruction a thousand times too
//! slowly, or stop at the first instruction that its interpreter lacks. Therefore the payload of `kvm.rs` runs in a child
//! process with a time limit, and the child's output reports its steps. The verdict is kept for as long as host, kernel and VMM
//! stay the same.

use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::process::Command;
use tokio::time::timeout;

use crate::{Accelerator, cpu_model};

/// Time limit of the payload, and then of the child that runs it.
const LIMIT: Duration = Duration::from_millis(750);

/// Probe that tells whether KVM works.
#[derive(Clone, Debug)]
pub struct KvmProbe {
    /// KVM device. Without the device, the payload is not run.
    pub device: PathBuf,
    /// Program that calls [`crate::run_kvm_payload`], and its arguments.
    pub command: Vec<PathBuf>,
    /// File that keeps the verdict; `None`: every call probes.
    pub kept: Option<PathBuf>,
}

/// Conditions under which a verdict holds: one boot of one host, with one VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Circumstances {
    boot_id: String,
    kernel: String,
    cpu: String,
    vmm: String,
}

impl Circumstances {
    fn now(vmm: &str) -> Self {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self {
            boot_id: boot_id.trim().to_owned(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            cpu: cpu_model().to_owned(),
            vmm: vmm.to_owned(),
        }
    }
}

/// Verdict on disk.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    circumstances: Circumstances,
    verdict: AcceleratorChoice,
}

/// Accelerator to use, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceleratorChoice {
    /// Accelerator.
    pub accelerator: Accelerator,
    /// Reason in one line, for people.
    pub reason: String,
}

impl AcceleratorChoice {
    fn tcg(reason: impl Into<String>) -> Self {
        Self { accelerator: Accelerator::Tcg, reason: reason.into() }
    }
}

impl KvmProbe {
    /// Returns the verdict for this version of the VMM: the kept verdict if nothing has changed since, otherwise that of the
    /// probe. Takes milliseconds, and never longer than a second. A verdict that cannot be kept is probed again.
    pub async fn verdict(&self, vmm: &str) -> AcceleratorChoice {
        if !self.device.exists() {
            return AcceleratorChoice::tcg(format!("{} does not exist", self.device.display()));
        }
        let Some(path) = &self.kept else { return self.run().await };
        let circumstances = Circumstances::now(vmm);
        let kept = std::fs::read(path).ok().and_then(|bytes| serde_json::from_slice::<Kept>(&bytes).ok());
        if let Some(kept) = kept.filter(|kept| kept.circumstances == circumstances) {
            return kept.verdict;
        }
        let verdict = self.run().await;
        let kept = Kept { circumstances, verdict: verdict.clone() };
        let part = path.with_extension("part");
        let text = serde_json::to_vec_pretty(&kept).unwrap_or_default();
        if let Err(error) = std::fs::write(&part, text).and_then(|()| std::fs::rename(&part, path)) {
            tracing::debug!(path = %path.display(), %error, "verdict on the accelerator not kept");
        }
        verdict
    }

    /// Runs the probe.
    async fn run(&self) -> AcceleratorChoice {
        let Some((program, args)) = self.command.split_first() else {
            return AcceleratorChoice::tcg("no probe program is configured");
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
            Err(e) => AcceleratorChoice::tcg(format!("the KVM probe could not be run: {e}")),
            Ok(child) => match timeout(LIMIT, child.wait_with_output()).await {
                Ok(Ok(output)) => parse_verdict(&output),
                Ok(Err(e)) => AcceleratorChoice::tcg(format!("the KVM probe could not be read: {e}")),
                Err(_) => AcceleratorChoice::tcg(format!(
                    "kvm opens, but guest code did not finish within {} ms",
                    LIMIT.as_millis()
                )),
            },
        }
    }
}

/// Reads the verdict from the last line that the child printed: `ok …` or a reason.
fn parse_verdict(output: &Output) -> AcceleratorChoice {
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().unwrap_or_default().trim();
    match last.strip_prefix("ok ") {
        Some(proof) if output.status.success() => {
            AcceleratorChoice { accelerator: Accelerator::Kvm, reason: proof.to_owned() }
        }
        _ if last.is_empty() => {
            AcceleratorChoice::tcg(format!("the KVM probe ended without a word ({})", output.status))
        }
        _ => AcceleratorChoice::tcg(last.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn probe(script: &str) -> KvmProbe {
        let command = ["/bin/sh", "-c", script].map(PathBuf::from).to_vec();
        KvmProbe { device: "/dev/null".into(), command, kept: None }
    }

    #[tokio::test]
    async fn hanging_kvm_falls_back_to_tcg_in_time() {
        let start = Instant::now();
        let verdict = probe("exec sleep 100").run().await;
        assert_eq!(verdict.accelerator, Accelerator::Tcg);
        assert!(verdict.reason.contains("did not finish"), "{}", verdict.reason);
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    #[tokio::test]
    async fn kvm_is_chosen_only_after_guest_code_ran() {
        for (script, want) in [
            ("echo ok guest code ran", Accelerator::Kvm),
            ("echo ok guest code ran; exit 1", Accelerator::Tcg),
            ("echo kvm opens, but the guest stopped", Accelerator::Tcg),
            ("true", Accelerator::Tcg),
        ] {
            assert_eq!(probe(script).run().await.accelerator, want, "{script}");
        }
        let absent = KvmProbe { device: "/dev/absent".into(), command: vec![], kept: None };
        assert_eq!(absent.verdict("7.2").await.reason, "/dev/absent does not exist");
    }

    #[tokio::test]
    async fn kvm_probe_verdict_is_cached_per_vmm_version() {
        let dir = tempfile::tempdir().unwrap();
        let count = dir.path().join("count");
        let script = format!("echo x >> {}; echo ok guest code ran", count.display());
        let probe = KvmProbe { kept: Some(dir.path().join("accelerator.json")), ..probe(&script) };
        let asked = || std::fs::read_to_string(&count).unwrap().lines().count();
        for (vmm, times) in [("7.2", 1), ("7.2", 1), ("10.0", 2), ("10.0", 2)] {
            assert_eq!(probe.verdict(vmm).await.accelerator, Accelerator::Kvm);
            assert_eq!(asked(), times, "{vmm}");
        }
        std::fs::write(probe.kept.as_ref().unwrap(), "torn").unwrap();
        probe.verdict("10.0").await;
        assert_eq!(asked(), 3, "what cannot be read is asked for again");
    }
}
