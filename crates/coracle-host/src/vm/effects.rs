//! Executes the actions of jobs, each with a time limit. Nothing is decided here: `coracle-lifecycle` decides what to do, also
//! after a failure.

mod files;
mod guest;
mod memory;
mod vmm;

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coracle_guest_client::GAP;
use coracle_hypervisor::VmmConfig;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

pub(super) use self::files::Writer;
use super::Shared;
use super::container_table::ContainerLogs;
use super::shared_dirs::SharedDirs;
use crate::vmm_config::{VmPaths, vmm_config};
use crate::{GuestClient, HostError, Record};
use coracle_lifecycle::{Action, Failure, JobOutcome, JobResult, SaveTo};
use coracle_logs::LogWriter;

/// Time limit for file operations of a VM; a sync of a busy disk takes seconds.
const FILES_LIMIT: Duration = Duration::from_secs(30);
/// Time limit for calls of a driver or the network, which may have shorter ones.
const VMM_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for calls of a guest. Their own limits are shorter, except for a hook and for the end of a container, which takes
/// its grace.
const GUEST_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for the end of a VMM. The kernel ends it at once, unless the VMM waits for a disk.
const END_LIMIT: Duration = Duration::from_secs(20);
/// Time limit to copy memory and disk of a VM: 60 GiB on a slow disk.
const COPY_LIMIT: Duration = Duration::from_secs(3600);

/// Jobs of earlier runs that have not ended yet: one of them may still be starting a VMM.
pub(super) type Retired = Arc<tokio::sync::Mutex<Vec<JoinSet<()>>>>;

/// Waits until the jobs have ended. Cancel-safe.
pub(super) async fn end_retired(retired: &Retired, more: Option<JoinSet<()>>) {
    let mut retired = retired.lock().await;
    retired.extend(more);
    while let Some(jobs) = retired.last_mut() {
        jobs.shutdown().await;
        retired.pop();
    }
}

/// Context for the actions of one job.
pub(super) struct Context {
    pub(super) shared: Arc<Shared>,
    /// Record at the start of the job.
    pub(super) record: Record,
    pub(super) paths: VmPaths,
    pub(super) session: Option<GuestClient>,
    pub(super) writer: Arc<Writer>,
    /// Log of the workload's output.
    pub(super) log: Arc<Mutex<LogWriter>>,
    pub(super) container_logs: ContainerLogs,
    pub(super) shared_dirs: SharedDirs,
    /// Jobs of the run that is ending, for [`Action::EndVmm`].
    pub(super) ending: Option<JoinSet<()>>,
    pub(super) retired: Retired,
}

impl Context {
    /// Executes the actions in order, up to the first failure.
    pub(super) async fn run(mut self, actions: Vec<Action>) -> JobResult {
        let mut outcome = JobOutcome::Done;
        for (done, action) in actions.into_iter().enumerate() {
            match self.carry_out(action).await {
                Ok(JobOutcome::Done) => {}
                Ok(found) => outcome = found,
                Err(error) => return Err(Failure { done, error }),
            }
        }
        Ok(outcome)
    }

    async fn carry_out(&mut self, action: Action) -> Result<JobOutcome, HostError> {
        match action {
            Action::Try(action) => {
                let name = name(&action);
                if let Err(error) = self.run_within(limit(&action), *action).await {
                    tracing::warn!(vm = %self.record.id, action = name, error = error.chain(), "action failed");
                }
                Ok(JobOutcome::Done)
            }
            Action::Within(limit, action) => self.run_within(limit, *action).await,
            action => self.run_within(limit(&action), action).await,
        }
    }

    async fn run_within(&mut self, limit: Duration, action: Action) -> Result<JobOutcome, HostError> {
        let operation = name(&action);
        let late = || {
            let why = format!("it took longer than {} s", limit.as_secs());
            let source = io::Error::new(io::ErrorKind::TimedOut, why);
            HostError::Files { operation, id: self.record.id.clone(), source }
        };
        let late = late();
        timeout(limit, self.run_action(action)).await.unwrap_or(Err(late))
    }

    async fn run_action(&mut self, action: Action) -> Result<JobOutcome, HostError> {
        let done = match action {
            Action::Find => return Ok(JobOutcome::Found(self.find().await)),
            Action::ListContainers => return self.list_containers().await,
            Action::InspectSystem => return self.inspect_system().await,
            Action::AskAgentVersion => return Ok(JobOutcome::Agent(self.agent_version().await)),
            Action::CreateContainer(request) => return self.create_container(*request).await,
            Action::StartContainer(id) => return self.start_container(&id).await,
            Action::SaveMemory(to) => return self.save_memory(to).await,
            Action::SaveRecord(write, record) => self.save_record(write, *record).await,
            Action::SaveContainer(write, record) => self.save_container(write, record).await,
            Action::OpenLogs(records) => self.open_logs(records).await,
            Action::OpenLog(record) => self.open_log(record).await,
            Action::RemoveContainerFiles(write, id) => self.remove_container_files(write, id).await,
            Action::RestoreNetwork => self.restore_network().await,
            Action::Pause => self.pause().await,
            Action::Resume => self.resume().await,
            Action::EndVmm => self.end_vmm().await,
            Action::CutOff => self.cut_off().await,
            Action::RemoveNetwork => self.remove_network().await,
            Action::Erase => self.erase().await,
            Action::RemoveSavedMemory => self.remove_saved_memory().await,
            Action::Claim(volume, found) => self.claim(&volume, &found),
            Action::AttachDisk { disk, absent } => self.attach_disk(&disk, &absent).await,
            Action::DetachDisk { slot } => self.detach_disk(slot).await,
            Action::OpenSharedDir(volume) => self.open_shared_dir(&volume).await,
            Action::RemoveNodeTable(volume) => self.remove_node_table(&volume).await,
            Action::Mount(volume) => self.mount(&volume).await,
            Action::Unmount(name) => self.unmount(&name).await,
            Action::ConfigureAgain => self.configure_again().await,
            Action::StartCommand => self.start_command().await,
            Action::AskToPowerOff { grace } => self.ask_to_power_off(grace).await,
            Action::RunHook(hook) => self.run_hook(hook).await,
            Action::StopContainer(id, grace) => self.stop_container(&id, grace).await,
            Action::KillContainer(id, signal) => self.kill_container(&id, signal).await,
            Action::UpdateContainer(id, limits) => self.update_container(&id, *limits).await,
            Action::RemoveContainer(id) => self.remove_container(&id).await,
            Action::ReserveMemory(to) => self.reserve_memory(to).await,
            Action::SyncCopy(dir) => self.sync_copy(dir).await,
            Action::CopySaved(dir) => self.copy_saved(dir).await,
            Action::AwaitHangup => {
                sleep(GAP).await;
                Ok(())
            }
            // These actions are not nested.
            Action::Try(_) | Action::Within(..) => Ok(()),
        };
        done.map(|()| JobOutcome::Done)
    }

    /// VMM config to find and control the VMM, not to start one.
    fn vmm_config(&self) -> VmmConfig {
        known_vmm_config(&self.shared, &self.record)
    }

    fn name(&self) -> String {
        self.record.name.to_string()
    }

    fn files_error(&self, operation: &'static str) -> impl FnOnce(io::Error) -> HostError + use<> {
        let id = self.record.id.clone();
        move |source| HostError::Files { operation, id, source }
    }
}

/// VMM config to find and control the VMM of a VM, not to start one.
pub(super) fn known_vmm_config(shared: &Shared, record: &Record) -> VmmConfig {
    let of_run = record.accelerator.filter(|_| record.state.has_vmm());
    let accelerator = of_run.unwrap_or_else(|| shared.node.accelerator(&record.driver));
    vmm_config(&shared.node.config, record, accelerator, None)
}

/// Locks a mutex that is never held across an await.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn limit(action: &Action) -> Duration {
    match action {
        Action::Try(action) => limit(action),
        Action::Within(limit, _) => *limit,
        Action::SaveMemory(_) | Action::SyncCopy(_) | Action::CopySaved(_) => COPY_LIMIT,
        Action::EndVmm => END_LIMIT,
        Action::StopContainer(_, grace) => *grace + GUEST_LIMIT,
        Action::Find
        | Action::RestoreNetwork
        | Action::Pause
        | Action::Resume
        | Action::CutOff
        | Action::RemoveNetwork
        | Action::AttachDisk { .. }
        | Action::DetachDisk { .. } => VMM_LIMIT,
        Action::Mount(_)
        | Action::Unmount(_)
        | Action::InspectSystem
        | Action::ConfigureAgain
        | Action::StartCommand
        | Action::AskToPowerOff { .. }
        | Action::RunHook(_)
        | Action::CreateContainer(_)
        | Action::StartContainer(_)
        | Action::KillContainer(..)
        | Action::UpdateContainer(..)
        | Action::RemoveContainer(_)
        | Action::ListContainers
        | Action::AskAgentVersion
        | Action::AwaitHangup => GUEST_LIMIT,
        Action::SaveRecord(..)
        | Action::SaveContainer(..)
        | Action::OpenLogs(_)
        | Action::OpenLog(_)
        | Action::RemoveContainerFiles(..)
        | Action::Erase
        | Action::RemoveSavedMemory
        | Action::Claim(..)
        | Action::OpenSharedDir(_)
        | Action::RemoveNodeTable(_)
        | Action::ReserveMemory(_) => FILES_LIMIT,
    }
}

/// Name of an action in errors and logs.
fn name(action: &Action) -> &'static str {
    match action {
        Action::Try(action) | Action::Within(_, action) => name(action),
        Action::SaveRecord(..) => "write the record",
        Action::SaveContainer(..) => "write the record of a container",
        Action::OpenLogs(_) | Action::OpenLog(_) => "open a container's log",
        Action::RemoveContainerFiles(..) => "remove the files of a container",
        Action::Find => "find the VMM",
        Action::RestoreNetwork => "connect the network",
        Action::Pause => "pause the vCPUs",
        Action::Resume => "resume the vCPUs",
        Action::EndVmm => "end the VMM",
        Action::CutOff => "cut off the network",
        Action::RemoveNetwork => "remove the network",
        Action::Erase => "remove the files",
        Action::RemoveSavedMemory => "remove the used memory",
        Action::Claim(..) => "claim a volume",
        Action::AttachDisk { .. } => "attach a disk",
        Action::DetachDisk { .. } => "detach a disk",
        Action::OpenSharedDir(_) => "open a shared directory",
        Action::RemoveNodeTable(_) => "remove the node table of a shared directory",
        Action::Mount(_) => "mount a volume",
        Action::Unmount(_) => "unmount a volume",
        Action::InspectSystem => "ask whether the guest rebooted",
        Action::ConfigureAgain => "configure the guest again",
        Action::StartCommand => "start the command again",
        Action::AskToPowerOff { .. } => "ask the guest to power off",
        Action::RunHook(_) => "run a hook",
        Action::CreateContainer(_) => "make a container",
        Action::StartContainer(_) => "start a container",
        Action::StopContainer(..) => "stop a container",
        Action::KillContainer(..) => "signal a container",
        Action::UpdateContainer(..) => "update a container",
        Action::RemoveContainer(_) => "remove a container",
        Action::ListContainers => "list containers",
        Action::AskAgentVersion => "ask for the agent's version",
        Action::AwaitHangup => "end the session",
        Action::ReserveMemory(_) => "reserve space for the memory",
        Action::SaveMemory(SaveTo::Own) => "keep the memory",
        Action::SaveMemory(SaveTo::Copy(_)) => "copy the memory and the disk",
        Action::SyncCopy(_) => "write the snapshot to disk",
        Action::CopySaved(_) => "copy the saved VM",
    }
}
