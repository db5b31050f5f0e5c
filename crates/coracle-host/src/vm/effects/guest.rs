//! Calls of the guest agent. Each has a time limit; an ended session is an error at once.

use std::time::Duration;

use coracle_guest_client::GuestError;
use coracle_proto::guest as pb;
use coracle_record::ProcessUser;
use tokio::time::timeout;

use super::{Context, lock};
use crate::vm::boot::CONFIGURE_LIMIT;
use crate::vm::guest_configuration::guest_configuration;
use crate::vm::hooks;
use crate::vm::text::sanitise_text;
use crate::vmm_config::{mount_request, process};
use crate::{ContainerId, Exit, GuestClient, HostError, Volume};
use coracle_lifecycle::Hook;
use coracle_lifecycle::JobOutcome;

/// Time limit for a guest to mount a volume.
const MOUNT_LIMIT: Duration = Duration::from_secs(10);
/// Time limit for a guest to flush and unmount a volume.
const UNMOUNT_LIMIT: Duration = Duration::from_secs(25);
/// Time limit for a guest to acknowledge a power-off.
const POWER_OFF_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for an agent to report its version.
const VERSION_LIMIT: Duration = Duration::from_secs(2);

impl Context {
    fn guest(&self, operation: &'static str) -> Result<&GuestClient, HostError> {
        let absent = || GuestError::unavailable("the guest agent is not connected");
        self.session.as_ref().ok_or_else(|| self.guest_error(operation)(absent()))
    }

    fn guest_error(&self, operation: &'static str) -> impl FnOnce(GuestError) -> HostError + use<> {
        let name = self.name();
        move |source| HostError::Guest { name, operation, source }
    }

    pub(super) async fn mount(&self, volume: &Volume) -> Result<(), HostError> {
        let operation = "mount a volume";
        let mounted = self.guest(operation)?.mount(mount_request(volume), MOUNT_LIMIT).await;
        mounted.map_err(self.guest_error(operation))
    }

    pub(super) async fn unmount(&self, volume: &str) -> Result<(), HostError> {
        let operation = "unmount a volume";
        let unmounted = self.guest(operation)?.unmount(volume, UNMOUNT_LIMIT).await;
        unmounted.map_err(self.guest_error(operation))
    }

    /// Asks the agent of a disk image VM for its state since its start.
    pub(super) async fn inspect_system(&self) -> Result<JobOutcome, HostError> {
        let operation = "ask for the status";
        let status = self.guest(operation)?.status().await.map_err(self.guest_error(operation))?;
        let has_command = status.workload() != pb::WorkloadState::NotStarted;
        let output_end = lock(&self.log).resume_offset(self.record.boots);
        Ok(JobOutcome::System { configured: status.configured, has_command, output_end })
    }

    pub(super) async fn start_command(&self) -> Result<(), HostError> {
        let operation = "start the command";
        let started = self.guest(operation)?.start_workload(process(&self.record)).await;
        started.map_err(self.guest_error(operation))
    }

    pub(super) async fn configure_again(&self) -> Result<(), HostError> {
        let operation = "configure";
        let guest = self.guest(operation)?;
        let (node, entropy) = (&self.shared.node, rand::random::<[u8; 64]>());
        let request = guest_configuration(node, &self.record, entropy.to_vec());
        let configured = guest.configure(request, CONFIGURE_LIMIT).await;
        configured.map(drop).map_err(self.guest_error(operation))
    }

    pub(super) async fn ask_to_power_off(&self, grace: Duration) -> Result<(), HostError> {
        let operation = "power off";
        let shut_down = self.guest(operation)?.shutdown(grace, POWER_OFF_LIMIT).await;
        shut_down.map_err(self.guest_error(operation))
    }

    pub(super) async fn run_hook(&self, hook: Hook) -> Result<(), HostError> {
        hooks::run(self.guest("run a hook")?, self.record.name.as_str(), hook).await
    }

    /// Returns the version of the agent if it answers in time; nothing depends on it.
    pub(super) async fn agent_version(&self) -> String {
        let Some(guest) = &self.session else { return String::new() };
        match timeout(VERSION_LIMIT, guest.status()).await {
            Ok(Ok(status)) => sanitise_text(status.agent_version),
            _ => String::new(),
        }
    }

    pub(super) async fn list_containers(&self) -> Result<JobOutcome, HostError> {
        let operation = "list containers";
        let listed = self.guest(operation)?.list_containers().await;
        listed.map(JobOutcome::Containers).map_err(self.guest_error(operation))
    }

    /// Creates a container and returns the user of its process, if the guest knows it.
    pub(super) async fn create_container(
        &self,
        request: pb::CreateContainerRequest,
    ) -> Result<JobOutcome, HostError> {
        let operation = "make a container";
        let made = self.guest(operation)?.create_container(request).await;
        let user = made.map_err(self.guest_error(operation))?;
        let user = user.map(|user| ProcessUser { uid: user.uid, gid: user.gid, groups: user.groups });
        Ok(JobOutcome::User(user))
    }

    pub(super) async fn start_container(&self, id: &ContainerId) -> Result<JobOutcome, HostError> {
        let operation = "start a container";
        let started = self.guest(operation)?.start_container(id.as_str()).await;
        let exit = started.map_err(self.guest_error(operation))?;
        let exit =
            exit.map(|exit| Exit { code: exit.code, signal: exit.signal, error: sanitise_text(exit.error) });
        Ok(JobOutcome::NotRun(exit))
    }

    pub(super) async fn stop_container(&self, id: &ContainerId, grace: Duration) -> Result<(), HostError> {
        let operation = "stop a container";
        let stopped = self.guest(operation)?.stop_container(id.as_str(), grace).await;
        stopped.map_err(self.guest_error(operation))
    }

    pub(super) async fn kill_container(&self, id: &ContainerId, signal: i32) -> Result<(), HostError> {
        let operation = "signal a container";
        let killed = self.guest(operation)?.kill_container(id.as_str(), signal).await;
        killed.map_err(self.guest_error(operation))
    }

    pub(super) async fn update_container(
        &self,
        id: &ContainerId,
        limits: pb::CgroupLimits,
    ) -> Result<(), HostError> {
        let operation = "update a container";
        let updated = self.guest(operation)?.update_container(id.as_str(), limits).await;
        updated.map_err(self.guest_error(operation))
    }

    pub(super) async fn remove_container(&self, id: &ContainerId) -> Result<(), HostError> {
        let operation = "remove a container";
        let removed = self.guest(operation)?.remove_container(id.as_str()).await;
        removed.map_err(self.guest_error(operation))
    }
}
