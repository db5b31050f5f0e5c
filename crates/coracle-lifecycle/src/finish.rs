//! End of a workload: if the metadata request it, an image of its root file system is made and pushed; then the guest is
//! powered off.
//!
//! ```text
//! exited ─▶ output read ─┬─ no request, or it failed ───────────────▶ power off
//!                        └─ make the image, push it ─▶ record "pushed" ─▶ power off
//! ```
//! After an interruption by a stop, no image is promised. After an interruption by the end of the daemon, or by a copy of the
//! memory, the image is made again; blobs that were pushed are not pushed twice.

use std::time::Duration;

use super::input::{Committed, WorkloadEnd};
use super::{Effect, StepContext};
use crate::Exit;
use crate::commit_annotation::commit_request;

/// Time within which a guest must power off after its workload has ended by itself; it is killed afterwards.
const POWER_OFF_GRACE: Duration = Duration::from_secs(5);
/// The same time for a disk image VM, which stops services and unmounts its disks.
const SYSTEM_POWER_OFF_GRACE: Duration = Duration::from_secs(60);
/// Maximum length of a reason, characters.
const REASON_MAX: usize = 500;

fn describe_exit(exit: &Exit) -> String {
    match (exit.signal, exit.code) {
        (0, code) => format!("the workload exited with code {code}"),
        (signal, _) => format!("the workload was killed by signal {signal}"),
    }
}

impl StepContext {
    pub(super) fn on_exited(&mut self, end: WorkloadEnd) {
        let record = &mut self.state.record;
        let why = if end.oom_killed { ", because the guest was out of memory" } else { "" };
        record.message = format!("{}{why}", describe_exit(&end.exit));
        record.exit = Some(end.exit);
        record.oom_killed = end.oom_killed;
        self.save_quietly();
    }

    /// Handles the end of the workload's output, once all of it has been read.
    pub(super) fn on_drained(&mut self) {
        let record = &self.state.record;
        let (request, exit) = (commit_request(&record.metadata), record.exit.clone());
        match (request, exit) {
            (Ok(Some(request)), Some(exit)) if exit.success() => {
                self.stop_committing();
                self.state.record.message =
                    format!("{}; its image is made and pushed as {request}", describe_exit(&exit));
                self.save_quietly();
                self.state.committing = Some(request.clone());
                self.effect(Effect::Commit(exit, request));
            }
            (Err(refused), Some(exit)) if exit.success() => {
                self.record_missing_image("", &refused.chain());
                self.save_quietly();
                self.ask_to_power_off(self.power_off_grace(), false);
            }
            _ => self.ask_to_power_off(self.power_off_grace(), false),
        }
    }

    /// Returns the time for the guest to power off.
    fn power_off_grace(&self) -> Duration {
        if self.state.record.disk_image_vm.is_some() { SYSTEM_POWER_OFF_GRACE } else { POWER_OFF_GRACE }
    }

    pub(super) fn on_committed(&mut self, outcome: Committed) {
        let Some(request) = self.state.committing.take() else { return };
        match outcome {
            Ok(Some(digest)) => {
                tracing::info!(vm = %self.state.record.id, image = %request, %digest, "image of a VM pushed");
                let end = self.state.record.exit.as_ref().map(describe_exit).unwrap_or_default();
                self.state.record.message = format!("{end}; pushed as {request}");
                self.state.record.committed = Some(digest.to_string());
            }
            // No image is requested of a command that failed.
            Ok(None) => {}
            Err(why) => {
                tracing::error!(vm = %self.state.record.id, image = %request, error = why, "image of a VM not pushed");
                self.record_missing_image(&format!(" as {request}"), &why);
            }
        }
        self.save_quietly();
        self.ask_to_power_off(self.power_off_grace(), false);
    }

    /// Stops making the image, because the session ends. It is made again after the guest is resumed.
    pub(super) fn stop_committing(&mut self) {
        if self.state.committing.take().is_some() {
            self.effect(Effect::StopCommit);
        }
    }

    /// Returns the final message of a run: it says that no image was pushed, if one was being made.
    pub(super) fn final_message(&mut self, message: String) -> String {
        let Some(request) = self.state.committing.take() else { return message };
        self.record_missing_image(&format!(" as {request}"), "the VM was stopped first");
        self.state.record.message.clone()
    }

    fn record_missing_image(&mut self, place: &str, why: &str) {
        let why: String = why.chars().filter(|c| !c.is_control()).take(REASON_MAX).collect();
        let end = self.state.record.exit.as_ref().map(describe_exit).unwrap_or_default();
        self.state.record.message = format!("{end}; no image was pushed{place}: {why}");
    }
}
