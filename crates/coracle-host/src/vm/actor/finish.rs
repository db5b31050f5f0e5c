//! After the workload has ended: an image of what it left, where its metadata asks for one; then the power-off.
//!
//! ```text
//! exited ─▶ output read ─┬─ no request, or it failed ───────────────▶ power off
//!                        └─ make the image, push it ─▶ record "pushed" ─▶ power off
//! ```
//! Cut off by a stop, no image is promised. Cut off by the end of the daemon, or by a copy of the memory, it begins
//! again: what was pushed is not pushed twice.

use std::pin::Pin;

use coracle_oci::{Digest, Reference};
use coracle_types::VmId;
use tokio::task::AbortHandle;
use tokio::time::{Duration, timeout};

use super::{Actor, POWER_OFF_GRACE};
use crate::Exit;
use crate::commit_annotation::commit_request;
use crate::vm::{JobEvent, JobEventKind};

/// A registry that takes longer does not keep a machine any more.
const COMMIT_LIMIT: Duration = Duration::from_secs(3600);
/// Letters of a reason that are kept.
const REASON_MAX: usize = 500;

/// What came of the request; `None`: the command has failed, and nothing was made.
pub(crate) type Committed = Result<Option<Digest>, String>;

/// Makes an image of a machine whose command has ended well, and pushes it. Of the host: the task of a VM knows no
/// registry.
pub(crate) type Commit =
    Box<dyn Fn(VmId, Exit, Reference) -> Pin<Box<dyn Future<Output = Committed> + Send>> + Send + Sync>;

/// An image that is being made.
#[derive(Debug)]
pub(super) struct Committing {
    request: Reference,
    job: AbortHandle,
}

fn ended(exit: &Exit) -> String {
    match (exit.signal, exit.code) {
        (0, code) => format!("the workload exited with code {code}"),
        (signal, _) => format!("the workload was killed by signal {signal}"),
    }
}

impl Actor {
    pub(super) async fn exited(&mut self, exit: Exit) {
        self.record.message = ended(&exit);
        self.record.exit = Some(exit);
        self.save_quietly().await;
    }

    /// All that it printed has been read.
    pub(super) async fn drained(&mut self) {
        let (request, exit) = (commit_request(&self.record.metadata), self.record.exit.clone());
        match (request, exit) {
            (Ok(Some(request)), Some(exit)) if exit.success() => self.begin_commit(request, exit).await,
            (Err(refused), Some(exit)) if exit.success() => {
                self.no_image("", &refused.chain());
                self.save_quietly().await;
                self.ask_to_power_off(POWER_OFF_GRACE).await;
            }
            _ => self.ask_to_power_off(POWER_OFF_GRACE).await,
        }
    }

    async fn begin_commit(&mut self, request: Reference, exit: Exit) {
        self.stop_committing();
        self.record.message = format!("{}; its image is made and pushed as {request}", ended(&exit));
        self.save_quietly().await;
        let (job_events, boot) = (self.job_events.clone(), self.record.boots);
        let work = (self.commit)(self.record.id.clone(), exit, request.clone());
        let job = self.jobs.spawn(async move {
            let late = |_| Err(format!("it took longer than {} minutes", COMMIT_LIMIT.as_secs() / 60));
            let outcome = timeout(COMMIT_LIMIT, work).await.unwrap_or_else(late);
            let _task_gone = job_events.send(JobEvent { boot, kind: JobEventKind::Committed(outcome) }).await;
        });
        self.committing = Some(Committing { request, job });
    }

    pub(super) async fn committed(&mut self, outcome: Committed) {
        let Some(Committing { request, .. }) = self.committing.take() else { return };
        match outcome {
            Ok(Some(digest)) => {
                tracing::info!(vm = %self.record.id, image = %request, %digest, "image of a VM pushed");
                let end = self.record.exit.as_ref().map(ended).unwrap_or_default();
                self.record.message = format!("{end}; pushed as {request}");
                self.record.committed = Some(digest.to_string());
            }
            // Not asked for where the command has failed.
            Ok(None) => {}
            Err(why) => {
                tracing::error!(vm = %self.record.id, image = %request, error = why, "image of a VM not pushed");
                self.no_image(&format!(" as {request}"), &why);
            }
        }
        self.save_quietly().await;
        self.ask_to_power_off(POWER_OFF_GRACE).await;
    }

    /// Stops making the image, because the session ends. It is made anew after the guest is resumed.
    pub(super) fn stop_committing(&mut self) {
        if let Some(Committing { job, .. }) = self.committing.take() {
            job.abort();
        }
    }

    /// What a run that ends leaves to be said: that no image was pushed, where one was being made.
    pub(super) fn last_word(&mut self, message: String) -> String {
        let Some(Committing { request, .. }) = self.committing.take() else { return message };
        self.no_image(&format!(" as {request}"), "the VM was stopped first");
        self.record.message.clone()
    }

    fn no_image(&mut self, place: &str, why: &str) {
        let why: String = why.chars().filter(|c| !c.is_control()).take(REASON_MAX).collect();
        let end = self.record.exit.as_ref().map(ended).unwrap_or_default();
        self.record.message = format!("{end}; no image was pushed{place}: {why}");
    }
}
