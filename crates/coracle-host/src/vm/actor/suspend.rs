//! Pausing a guest, saving its memory, and resuming it.
//!
//! ```text
//! pause      record Paused ─▶ pause                    resume   record Running ─▶ resume
//! hibernate  record Hibernating ─▶ pause ─▶ save, sync, rename ─▶ record Hibernated ─▶ end the VMM
//! snapshot   pre-snapshot hook ─▶ pause ─▶ save, copy the disk ─▶ resume as recorded ─▶ sync; post-snapshot hook
//! start      record Starting ─▶ VMM loads ─▶ record "used up" ─▶ resume ─▶ record Running ─▶ remove the file
//! ```
//! Cut off anywhere, the record says which of VMM and file counts (`adopt.rs`): up to "Hibernated" the VMM does, from
//! then on the file, until it is used up.

use std::fs::File;
use std::io::{self, Seek};
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_hypervisor::{Compatibility, Driver as _, ProcessId, Snapshots};
use coracle_types::{InstanceId, Op, VmState};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::{Actor, EventKind, JobEvent, JobEventKind, Reply};
use crate::files::{self, blocking};
use crate::vm::hooks::{self, Hook};
use crate::vm::text::bounded;
use crate::vm::{Copied, VmCopy};
use crate::{HostError, Volume};
use coracle_guest_client::GAP;
use coracle_record::SavedMemory;
use coracle_snapshot::{DISK_FILE, MEMORY_FILE};

/// Room for what a save holds beside the RAM.
const DEVICES_BYTES: u64 = 64 << 20;
/// Limit for an agent to say who it is.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// Memory in its file, and what is to be known of it.
struct Written {
    file: File,
    machine: Compatibility,
    agent: String,
}

impl Actor {
    pub(super) async fn suspend(&mut self, op: Op, reply: Reply) {
        let done = match (op, self.record.state) {
            (Op::Pause, VmState::Running) => self.pause().await,
            (Op::Hibernate, VmState::Running | VmState::Paused) => self.hibernate().await,
            (Op::Resume, _) => return self.start(reply).await,
            _ => Ok(()), // so it is already
        };
        let _caller_gone = reply.send(done.map(|()| self.record.clone()));
    }

    async fn pause(&mut self) -> Result<(), HostError> {
        self.change(VmState::Paused, String::new()).await?;
        if let Err(error) = self.restore_power_state().await {
            self.change(VmState::Running, String::new()).await?;
            let _runs_as_it_did = self.restore_power_state().await;
            return Err(error);
        }
        Ok(())
    }

    /// Resumes a paused guest. Idempotent.
    pub(super) async fn resume_vcpus(&mut self) -> Result<(), HostError> {
        if self.record.state != VmState::Paused {
            return Ok(());
        }
        self.change(VmState::Running, String::new()).await?;
        if let Err(error) = self.restore_power_state().await {
            self.change(VmState::Paused, String::new()).await?;
            return Err(error);
        }
        Ok(())
    }

    /// Pauses or resumes the vCPUs as the record says. An interrupted save ends here, too.
    pub(super) async fn restore_power_state(&mut self) -> Result<(), HostError> {
        let driver = &self.shared.node.driver;
        let vmm_config = self.vmm_config();
        let pause = self.record.state == VmState::Paused;
        // No call may wait for a paused guest.
        if pause {
            self.paused.send_replace(true);
        }
        let done = if pause { driver.pause(&vmm_config).await } else { driver.resume(&vmm_config).await };
        done.map_err(|source| HostError::Driver { name: self.record.name.to_string(), source })?;
        self.paused.send_replace(pause);
        if self.record.state == VmState::Hibernating {
            self.change(VmState::Running, "its hibernation was cut off".to_owned()).await?;
        }
        Ok(())
    }

    async fn hibernate(&mut self) -> Result<(), HostError> {
        let before = self.record.state;
        let driver = self.shared.node.driver.clone();
        let snapshots = driver.snapshots(&self.vmm_config()).ok_or_else(|| self.cannot_save())?;
        self.change(VmState::Hibernating, String::new()).await?;
        let saved = match self.save_memory(snapshots).await {
            Ok(saved) => saved,
            Err(error) => {
                self.record.state = before;
                return Err(self.undo_hibernation(error).await);
            }
        };
        self.record.saved = Some(saved);
        if let Err(error) = self.change(VmState::Hibernated, String::new()).await {
            (self.record.saved, self.record.state) = (None, before);
            return Err(self.undo_hibernation(error).await);
        }
        self.end_run(VmState::Hibernated, String::new()).await;
        Ok(())
    }

    /// Back to the state before, which the record has already in memory.
    async fn undo_hibernation(&mut self, error: HostError) -> HostError {
        let state = self.record.state;
        let message = format!("not hibernated: {}", error.chain());
        if let Err(error) = self.change(state, message).await {
            tracing::error!(vm = %self.record.id, %error, "state not recorded");
        }
        if let Err(error) = self.restore_power_state().await {
            tracing::error!(vm = %self.record.id, %error, "resume VMM after a failed save failed");
        }
        self.follow_again();
        self.forget_saved().await;
        error
    }

    /// Writes the memory for the VM's own next start; synced when this returns.
    async fn save_memory(&mut self, snapshots: &dyn Snapshots) -> Result<SavedMemory, HostError> {
        let (dir, place) = (self.paths.saved(), self.paths.saved_memory());
        let part = dir.join("memory.part");
        let Written { file, machine, agent } = self.write_memory(snapshots, &dir, &part, 0).await?;
        let sealed = blocking(move || {
            let bytes = trim(&file)?;
            file.sync_all()?;
            std::fs::rename(&part, &place)?;
            files::sync_parent(&place)?;
            Ok(bytes)
        });
        let bytes = sealed.await.map_err(self.files_failed("keep the memory"))?;
        Ok(self.saved_now(machine, bytes, agent))
    }

    /// Reserves the space and `more`, leaves the guest, holds it and writes its memory to `part` in `dir`. It stands
    /// still when this returns.
    async fn write_memory(
        &mut self,
        snapshots: &dyn Snapshots,
        dir: &Path,
        part: &Path,
        more: u64,
    ) -> Result<Written, HostError> {
        let room = (self.record.machine_size().memory.bytes()) + DEVICES_BYTES + more;
        let (dir, part) = (dir.to_owned(), part.to_owned());
        let reserved = blocking(move || reserve(&dir, &part, room)).await;
        let file = reserved.map_err(self.files_failed("reserve space for the memory"))?;
        let agent = self.agent_version().await;
        self.leave_guest().await;
        // It is paused, and no call may wait for it.
        self.paused.send_replace(true);
        let name = self.record.name.to_string();
        let driver = |source| HostError::Driver { name: name.clone(), source };
        let vmm_config = self.vmm_config();
        self.shared.node.driver.pause(&vmm_config).await.map_err(driver)?;
        snapshots.save(&vmm_config, &file).await.map_err(driver)?;
        Ok(Written { file, machine: snapshots.compatibility(&vmm_config).await, agent })
    }

    /// What the agent calls itself, if it says so at once: nothing depends on it.
    async fn agent_version(&self) -> String {
        let Some(guest) = &self.guest else { return String::new() };
        let status = timeout(ANSWER_LIMIT, guest.status()).await;
        status.map_or_else(
            |_| String::new(),
            |answer| answer.map_or_else(|_| String::new(), |s| bounded(s.agent_version)),
        )
    }

    /// Copies memory and disk of one instant into `dir` and restores the power state. Synced when it answers.
    pub(super) async fn snapshot(&mut self, dir: PathBuf, reply: Copied) {
        let copied = match self.record.state {
            _ if self.record.volumes.iter().any(is_written) => Err(self.has_volumes()),
            VmState::Hibernated => self.copy_saved(dir).await,
            _ => match self.run_pre_snapshot_hook().await {
                Ok(()) => self.copy_live(dir).await,
                Err(error) => Err(error),
            },
        };
        self.run_post_snapshot_hook();
        let copied = copied.map(|saved| VmCopy {
            record: self.record.clone(),
            containers: self.containers.records(),
            saved,
        });
        let _caller_gone = reply.send(copied);
    }

    /// A guest that runs may prepare itself for being copied, or refuse.
    async fn run_pre_snapshot_hook(&mut self) -> Result<(), HostError> {
        let Some(guest) = self.guest.clone().filter(|_| self.record.state == VmState::Running) else {
            return Ok(());
        };
        self.post_snapshot_due = true;
        hooks::run(&guest, self.record.name.as_str(), Hook::PreSnapshot).await
    }

    /// Runs the post-snapshot hook that a pre-snapshot hook calls for, as soon as there is a session.
    pub(super) fn run_post_snapshot_hook(&mut self) {
        let Some(guest) = self.guest.clone().filter(|_| self.post_snapshot_due) else { return };
        self.post_snapshot_due = false;
        let (name, boot, job_events) = (self.record.name.clone(), self.record.boots, self.job_events.clone());
        self.jobs.spawn(async move {
            match hooks::run(&guest, name.as_str(), Hook::PostSnapshot).await {
                Ok(()) => {}
                Err(HostError::Guest { .. }) => {
                    let _task_gone =
                        job_events.send(JobEvent { boot, kind: JobEventKind::HookInterrupted(guest) }).await;
                }
                Err(error) => {
                    tracing::warn!(vm = %name, error = error.chain(), "post-snapshot hook failed")
                }
            }
        });
    }

    async fn copy_live(&mut self, dir: PathBuf) -> Result<SavedMemory, HostError> {
        let driver = self.shared.node.driver.clone();
        let snapshots = driver.snapshots(&self.vmm_config()).ok_or_else(|| self.cannot_save())?;
        let overlay = self.paths.own_disk(&self.record);
        let room = files::allocated_bytes(&overlay);
        let (place, disk) = (dir.join(MEMORY_FILE), dir.join(DISK_FILE));
        let taken = match self.write_memory(snapshots, &dir, &place, room).await {
            Ok(Written { file, machine, agent }) => blocking(move || {
                let bytes = trim(&file)?;
                files::copy_sparse(&overlay, &disk)?;
                Ok((file, File::open(&disk)?, bytes, machine, agent))
            })
            .await
            .map_err(self.files_failed("copy the disk")),
            Err(error) => Err(error),
        };
        // Before the sync of the disk, and also when the copy failed.
        let goes_on = self.restore_power_state().await;
        self.follow_again();
        let (memory, disk, bytes, machine, agent) = taken?;
        goes_on?;
        let synced = blocking(move || memory.sync_all().and_then(|()| disk.sync_all())).await;
        synced.map_err(self.files_failed("write the snapshot to disk"))?;
        Ok(self.saved_now(machine, bytes, agent))
    }

    /// Memory of this VM that was just written.
    fn saved_now(&self, machine: Compatibility, bytes: u64, agent: String) -> SavedMemory {
        let saved_at = self.shared.node.clock.now();
        SavedMemory { machine, bytes, saved_at, of: None, same_identity: false, agent }
    }

    /// Of a VM at rest: its memory is there, and never written again.
    async fn copy_saved(&mut self, dir: PathBuf) -> Result<SavedMemory, HostError> {
        let saved = self.record.saved.clone().ok_or_else(|| self.cannot_save())?;
        let (memory, overlay) = (self.paths.saved_memory(), self.paths.own_disk(&self.record));
        let copied = blocking(move || {
            std::fs::create_dir_all(&dir)?;
            std::fs::hard_link(&memory, dir.join(MEMORY_FILE))?;
            files::copy_sparse(&overlay, &dir.join(DISK_FILE))?;
            File::open(dir.join(DISK_FILE))?.sync_all()
        });
        copied.await.map_err(self.files_failed("copy the saved VM"))?;
        Ok(saved)
    }

    /// A copy would use files that the original writes.
    fn has_volumes(&self) -> HostError {
        let written = self.record.volumes.iter().filter(|volume| is_written(volume));
        let names: Vec<_> = written.map(|volume| volume.name.as_str()).collect();
        let name = &self.record.name;
        let message = format!(
            "VM {name} writes to disks, and a copy of it would write the same files: detach {} first",
            names.join(", ")
        );
        HostError::Invalid { message }
    }

    fn cannot_save(&self) -> HostError {
        HostError::Unsupported {
            name: self.record.name.to_string(),
            driver: self.shared.node.driver_name(&self.record.driver),
            what: "save the memory of a VM",
        }
    }

    pub(super) fn files_failed(
        &self,
        operation: &'static str,
    ) -> impl FnOnce(io::Error) -> HostError + use<> {
        let id = self.record.id.clone();
        move |source| HostError::Files { operation, id, source }
    }

    /// Ends the session, so that the guest waits for the next one and finds no dead one after it is resumed.
    async fn leave_guest(&mut self) {
        if let Some(follower) = self.follower.take() {
            follower.abort();
        }
        self.stop_committing();
        if let Some(guest) = self.guest.take() {
            guest.close();
            self.publish(EventKind::Updated);
            sleep(GAP).await;
        }
    }

    /// Stays in touch again with a guest that was left. One that was not left has its follower still: a second one would
    /// read its output twice.
    fn follow_again(&mut self) {
        if self.follower.is_none() {
            self.follow(None);
        }
    }

    /// The VMM has loaded the memory. With its first step the guest changes its disks, so the file is used up before.
    pub(super) async fn loaded(&mut self, instance: InstanceId, vmm: ProcessId, go: oneshot::Sender<()>) {
        let saved = self.record.saved.take();
        self.record.instance = Some(instance);
        self.record.process = Some(vmm);
        self.record_accelerator(vmm);
        match self.save().await {
            Ok(()) => {
                self.watch(vmm);
                let _job_gone = go.send(());
            }
            Err(error) => {
                self.record.saved = saved;
                let message = error.chain();
                self.answer_starters(Err(error));
                self.end_run(VmState::Hibernated, message).await;
            }
        }
    }

    /// Removes memory that no guest needs.
    pub(super) async fn forget_saved(&self) {
        if self.record.saved.is_some() {
            return;
        }
        let dir = self.paths.saved();
        if let Err(error) = blocking(move || files::remove_tree(&dir)).await {
            tracing::warn!(vm = %self.record.id, %error, "memory that is used up was not removed");
        }
    }
}

/// A file with space reserved for the whole memory.
fn reserve(dir: &Path, part: &Path, bytes: u64) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    std::fs::create_dir_all(dir)?;
    let file = File::options().read(true).write(true).create(true).truncate(true).mode(0o600).open(part)?;
    match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::KEEP_SIZE, 0, bytes) {
        // Where space cannot be reserved, a full disk is met while writing.
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => Ok(file),
        Err(error) => {
            let _nothing_is_kept = std::fs::remove_file(part);
            Err(error.into())
        }
    }
}

/// Gives back what was not needed behind what was written; the length.
fn trim(mut file: &File) -> io::Result<u64> {
    let bytes = file.stream_position()?;
    file.set_len(bytes)?;
    Ok(bytes)
}

/// A disk that the guest writes. A shared directory is the node's, and any number of guests write to it.
fn is_written(volume: &Volume) -> bool {
    volume.slot().is_some() && !volume.read_only
}
