//! When a workload has ended: an image of what it left, where its owner asked for one; then the machine goes.
//!
//! ```text
//! exited ─▶ output read ─┬─ nobody asks, or it failed ──────────────▶ power off
//!                        └─ make the image, push it ─▶ record "pushed" ─▶ power off
//! ```
//! Cut off by a stop, no image is promised. Cut off by the end of the daemon, or by a copy of the memory, it begins
//! again: what was pushed is not pushed twice.

use std::pin::Pin;

use coracle_image::{Digest, Reference};
use coracle_types::VmId;
use tokio::task::AbortHandle;
use tokio::time::{Duration, timeout};

use super::{Actor, POWER_OFF_GRACE};
use crate::Exit;
use crate::service::commit_wish;
use crate::vm::{Note, What};

/// A registry that takes longer does not keep a machine any more.
const COMMIT_LIMIT: Duration = Duration::from_secs(3600);
/// Letters of a reason that are kept.
const REASON_MAX: usize = 500;

/// What came of the wish; `None`: the command has failed, and nothing was made.
pub(crate) type Committed = Result<Option<Digest>, String>;

/// Makes an image of a machine whose command has ended well, and pushes it. Of the host: the task of a VM knows no
/// registry.
pub(crate) type Commit =
    Box<dyn Fn(VmId, Exit, Reference) -> Pin<Box<dyn Future<Output = Committed> + Send>> + Send + Sync>;

/// An image that is being made.
#[derive(Debug)]
pub(super) struct Committing {
    wish: Reference,
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
        let (wish, exit) = (commit_wish(&self.record.metadata), self.record.exit.clone());
        match (wish, exit) {
            (Ok(Some(wish)), Some(exit)) if exit.success() => self.begin_commit(wish, exit).await,
            (Err(refused), Some(exit)) if exit.success() => {
                self.no_image("", refused.message());
                self.save_quietly().await;
                self.ask_to_power_off(POWER_OFF_GRACE).await;
            }
            _ => self.ask_to_power_off(POWER_OFF_GRACE).await,
        }
    }

    async fn begin_commit(&mut self, wish: Reference, exit: Exit) {
        self.stop_committing();
        self.record.message = format!("{}; its image is made and pushed as {wish}", ended(&exit));
        self.save_quietly().await;
        let (tell, boot) = (self.tell.clone(), self.record.boots);
        let work = (self.commit)(self.record.id.clone(), exit, wish.clone());
        let job = self.jobs.spawn(async move {
            let late = |_| Err(format!("it took longer than {} minutes", COMMIT_LIMIT.as_secs() / 60));
            let outcome = timeout(COMMIT_LIMIT, work).await.unwrap_or_else(late);
            let _task_gone = tell.send(Note { boot, what: What::Committed(outcome) }).await;
        });
        self.committing = Some(Committing { wish, job });
    }

    pub(super) async fn committed(&mut self, outcome: Committed) {
        let Some(Committing { wish, .. }) = self.committing.take() else { return };
        match outcome {
            Ok(Some(digest)) => {
                tracing::info!(vm = %self.record.id, image = %wish, %digest, "image of a VM pushed");
                let end = self.record.exit.as_ref().map(ended).unwrap_or_default();
                self.record.message = format!("{end}; pushed as {wish}");
                self.record.committed = Some(digest.to_string());
            }
            // Not asked for where the command has failed.
            Ok(None) => {}
            Err(why) => {
                tracing::error!(vm = %self.record.id, image = %wish, error = why, "image of a VM not pushed");
                self.no_image(&format!(" as {wish}"), &why);
            }
        }
        self.save_quietly().await;
        self.ask_to_power_off(POWER_OFF_GRACE).await;
    }

    /// What is being made needs a guest that answers, and this one is left. It is made anew when the guest goes on.
    pub(super) fn stop_committing(&mut self) {
        if let Some(Committing { job, .. }) = self.committing.take() {
            job.abort();
        }
    }

    /// What a run that ends leaves to be said: that no image was pushed, where one was being made.
    pub(super) fn last_word(&mut self, message: String) -> String {
        let Some(Committing { wish, .. }) = self.committing.take() else { return message };
        self.no_image(&format!(" as {wish}"), "the VM was stopped first");
        self.record.message.clone()
    }

    fn no_image(&mut self, place: &str, why: &str) {
        let why: String = why.chars().filter(|c| !c.is_control()).take(REASON_MAX).collect();
        let end = self.record.exit.as_ref().map(ended).unwrap_or_default();
        self.record.message = format!("{end}; no image was pushed{place}: {why}");
    }
}
