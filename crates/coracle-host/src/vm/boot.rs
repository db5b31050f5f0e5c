//! Start of a VM, until its guest runs the workload. Runs as a job of the VM's task, and may be repeated after an interruption
//! at any point.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use coracle_guest_client::{GuestError, GuestSession, NewSession, StartFailure};
use coracle_hypervisor::{Accelerator, Driver as _, ProcessId, VmmConfig};
use coracle_proto::guest as pb;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use tracing::{Instrument as _, info_span};

use super::Shared;
use super::guest_configuration::guest_configuration;
use super::hooks;
use super::kernel_panic::kernel_panic;
use super::launch::{GuestConnection, Launched, Origin, launch};
use super::reports::Reports;
use super::shared_dirs::SharedDirs;
use crate::vmm_config::{VmPaths, process, sandbox_configuration};
use crate::{ConsoleHandle, GuestClient, HostError, Record, Volume, VolumeKind, VolumePhase};
use coracle_instance::instances::BOOTS;
use coracle_instance::warm_pool::StartKind;
use coracle_lifecycle::{Hook, RunEvent, RunningVmm, SessionId, StartedFrom, Up};

/// Time limit of the configuration, which includes mounts and the first use of a fresh disk.
pub(super) const CONFIGURE_LIMIT: Duration = Duration::from_secs(30);

/// Time limit of the start of a workload in a guest that is configured.
const START_LIMIT: Duration = Duration::from_secs(10);

/// Time limit for the hello of a clone, whose agent waited for the host when the template was saved and so answers at once.
const CLONE_HELLO_LIMIT: Duration = Duration::from_secs(10);

/// Factor on the boot time limit of a disk image VM whose CPUs are emulated.
const EMULATION_FACTOR: u32 = 4;

/// Number of last console bytes in an error.
const LAST_WORDS: usize = 600;

/// Start of a VM.
pub(super) struct Boot {
    pub(super) shared: Arc<Shared>,
    pub(super) record: Record,
    /// Time of the request to start the VM.
    pub(super) requested_at: Instant,
    pub(super) console: ConsoleHandle,
    pub(super) reports: Reports,
    /// Resolves when the record says that the loaded memory is used.
    pub(super) recorded: oneshot::Receiver<()>,
    pub(super) shared_dirs: SharedDirs,
    /// Tasks that serve the shared directories which the workload needs from its start.
    pub(super) served: JoinSet<()>,
}

/// Starts the VM, or adopts a running VMM, and reports the result once. Then serves the shared directories until their session
/// ends.
pub(super) async fn run(mut boot: Boot) {
    let result = try_boot(&mut boot).await;
    boot.reports.send(RunEvent::Booted(result)).await;
    while boot.served.join_next().await.is_some() {}
}

async fn try_boot(boot: &mut Boot) -> Result<Up, HostError> {
    let (shared, record) = (boot.shared.clone(), boot.record.clone());
    let _permit = shared.node.boots.acquire().await.map_err(|_| HostError::Stopping)?;
    let deadline = Instant::now() + limit(&shared, &record);
    let mut boots = 0;
    let mut next = record.clone();
    loop {
        let launched = launch_until(boot, &next, deadline).await?;
        let instance = launched.vmm_config.id.clone();
        let is_clone = matches!(launched.origin, Origin::Cloned(_));
        boots += u32::from(matches!(launched.origin, Origin::Booted { .. }));
        // Concurrent, because moving a process waits for an RCU grace period and the guest need not wait for that.
        let moved = move_to_pod(shared.clone(), record.clone(), launched.vmm_config.clone(), launched.vmm);
        let (attended, ()) = tokio::join!(await_workload(boot, launched, deadline), moved);
        let Failure { error, may_boot_again } = match attended {
            Ok(up) => return Ok(up),
            Err(failure) => failure,
        };
        let boots_again = may_boot_again && (1..BOOTS).contains(&boots);
        if !is_clone && !boots_again {
            return Err(error);
        }
        let error = error.chain();
        tracing::warn!(vm = %record.id, is_clone, error, "start failed, cold booting");
        shared.node.instances.end(&instance, None).await?;
        next.cold |= is_clone;
    }
}

/// Moves a VMM to the cgroup of its pod, if it has one.
async fn move_to_pod(shared: Arc<Shared>, record: Record, vmm_config: VmmConfig, vmm: ProcessId) {
    if record.cgroup_parent.is_empty() {
        return;
    }
    let moved = shared.node.instances.move_to_cgroup(&vmm_config, vmm, &record.cgroup_parent).await;
    if let Err(error) = moved {
        // The limits of the VMM apply in any case; only the kubelet's accounting is wrong.
        tracing::warn!(vm = %record.id, error = error.chain(), "VMM not in the cgroup of its pod");
    }
}

/// Reason why a guest did not come up.
struct Failure {
    error: HostError,
    /// Whether the VM ended in a way that no guest causes by powering off, so that another boot may succeed.
    may_boot_again: bool,
}

impl From<HostError> for Failure {
    fn from(error: HostError) -> Self {
        Self { error, may_boot_again: false }
    }
}

/// Launches the VMM before the deadline, because a disk of the VM may hang.
async fn launch_until(boot: &Boot, record: &Record, deadline: Instant) -> Result<Launched, HostError> {
    let launch = launch(&boot.shared, record).instrument(info_span!("launch_vmm"));
    let launched = timeout_at(deadline, launch).await;
    launched.unwrap_or_else(|_| Err(boot.boot_error("the VMM did not start in time".to_owned())))
}

impl Boot {
    fn boot_error(&self, why: String) -> HostError {
        let why = format!("{why}{}", last_words(&self.console));
        HostError::Boot { name: self.record.name.to_string(), why }
    }

    async fn report_spawned(&self, vmm_config: &VmmConfig, vmm: ProcessId, from: StartedFrom) {
        let vmm = self.running(vmm_config, vmm);
        self.reports.send(RunEvent::Spawned(vmm, from)).await;
    }

    /// Describes a VMM with the accelerator that it uses: a driver may have fallen back to another than the node's.
    fn running(&self, vmm_config: &VmmConfig, process: ProcessId) -> RunningVmm {
        let accelerator = self.shared.node.driver.accelerator_of(vmm_config, process);
        RunningVmm { instance: vmm_config.id.clone(), process, accelerator }
    }
}

/// Reports a VMM, resumes its guest if it is paused, and waits until the workload runs.
async fn await_workload(
    boot: &mut Boot,
    Launched { vmm_config, vmm, origin, from }: Launched,
    deadline: Instant,
) -> Result<Up, Failure> {
    let shared = &boot.shared.clone();
    let record = &Record { premounted: from.premounted, ..boot.record.clone() };
    let template = from.template.clone();
    let is_boot = matches!(origin, Origin::Booted { .. });
    let is_new = is_boot || matches!(origin, Origin::Cloned(_));
    let (mut limits, mut missing, mut connection) =
        (Limits::of_boot(shared, record), None, GuestConnection::None);
    match origin {
        Origin::Found => {}
        Origin::Booted { missing: key } => {
            boot.report_spawned(&vmm_config, vmm, from).await;
            missing = key;
        }
        Origin::Cloned(open) => {
            boot.report_spawned(&vmm_config, vmm, from).await;
            limits = Limits::of_clone(shared);
            connection = open;
        }
        Origin::Restored(open) => {
            let loaded = boot.running(&vmm_config, vmm);
            boot.reports.send(RunEvent::Loaded(loaded)).await;
            (&mut boot.recorded).await.map_err(|_| HostError::Stopping)?;
            if let Some(saved) = record.saved.as_ref().filter(|saved| saved.of.is_some()) {
                limits = Limits::of_copy(shared, saved.same_identity);
            }
            let driver = |source| HostError::Driver { name: record.name.to_string(), source };
            shared.node.driver.resume(&vmm_config).await.map_err(driver)?;
            connection = open;
        }
    }
    if record.disk_image_vm.as_ref().is_some_and(|settings| settings.without_agent) {
        return Ok(Up { session: None, identity: Duration::ZERO, workload: Duration::ZERO });
    }
    let has_own_kernel = record.disk_image_vm.is_some();
    let console = boot.console.clone();
    let ready = configure_and_start(boot, record, &vmm_config, (connection, is_new), limits);
    let outcome = tokio::select! {
        outcome = timeout_at(deadline, ready) => outcome,
        _ = shared.node.driver.exited(vmm) => {
            let error = boot.boot_error("the VMM exited".to_owned());
            return Err(Failure { error, may_boot_again: !has_own_kernel });
        }
        // Only for disk images: the kernel of the node powers the VM off when it panics.
        reason = kernel_panic(&console), if has_own_kernel && is_boot => {
            let error = boot.boot_error(format!("its kernel panicked: {reason}"));
            return Err(Failure { error, may_boot_again: true });
        }
    };
    if let Ok(Ok(_)) = outcome {
        match (missing, template) {
            (Some(key), _) => shared.templates.request(key, vmm_config, record.disk_mib),
            (None, Some(key)) => {
                shared.warm_pool.want(key, &vmm_config, boot.requested_at, Some(kind_of(record)));
            }
            (None, None) => {}
        }
    }
    match outcome {
        Ok(result) => Ok(result?),
        Err(_) => {
            let limit = limit(shared, record).as_secs();
            Err(boot.boot_error(format!("the guest was not ready within {limit} s")).into())
        }
    }
}

fn kind_of(record: &Record) -> StartKind {
    if record.sandbox.is_some() { StartKind::Sandbox } else { StartKind::Workload }
}

/// Time limits for the first answers of a guest, and the origin of its memory.
#[derive(Clone, Copy)]
struct Limits {
    hello: Duration,
    /// Time limit to give the guest its identity: until then a clone is identical to all others.
    identity: Duration,
    /// Whether the guest's workload runs already, because its memory is a copy of another VM's.
    takes_over: bool,
    /// Whether the VM keeps the identity of that other VM, because it has moved.
    same_identity: bool,
}

impl Limits {
    fn of_boot(shared: &Shared, record: &Record) -> Self {
        Self {
            hello: limit(shared, record),
            identity: CONFIGURE_LIMIT,
            takes_over: false,
            same_identity: false,
        }
    }

    fn of_clone(shared: &Shared) -> Self {
        let identity = shared.node.config.identity_limit;
        Self { hello: CLONE_HELLO_LIMIT, identity, takes_over: false, same_identity: false }
    }

    fn of_copy(shared: &Shared, same_identity: bool) -> Self {
        Self { takes_over: true, same_identity, ..Self::of_clone(shared) }
    }
}

/// Time limit from the start to the acknowledged configuration.
fn limit(shared: &Shared, record: &Record) -> Duration {
    let config = &shared.node.config;
    let accelerator = record.accelerator.unwrap_or_else(|| shared.node.accelerator(&record.driver));
    match (record.disk_image_vm.is_some(), accelerator) {
        (true, Accelerator::Tcg) => config.disk_image_vm_boot_limit * EMULATION_FACTOR,
        (true, Accelerator::Kvm) => config.disk_image_vm_boot_limit,
        (false, _) => config.boot_limit,
    }
}

/// Opens the session, configures the guest and starts the workload. Each call is idempotent in the guest. `is_new`: the guest was
/// booted or cloned for this start, so its agent is of this version.
async fn configure_and_start(
    boot: &mut Boot,
    record: &Record,
    vmm_config: &VmmConfig,
    (connection, is_new): (GuestConnection, bool),
    limits: Limits,
) -> Result<Up, HostError> {
    let shared = &boot.shared.clone();
    let guest = |operation| {
        let name = record.name.to_string();
        move |source: GuestError| HostError::Guest { name, operation, source }
    };
    let no_session = |e: io::Error| guest("open a session")(GuestError::unavailable(e.to_string()));
    let session = connection.session(shared, vmm_config, limits.hello);
    let client = async {
        match session.await.map_err(no_session)? {
            GuestSession::New(session) if is_new && starts_at_once(record) => Ok(Err(session)),
            session => session.http2().await.map(Ok).map_err(no_session),
        }
    };
    let client = match client.instrument(info_span!("connect_agent")).await? {
        Ok(client) => client,
        Err(session) => return start_at_once(boot, record, session, limits.identity).await,
    };
    let entropy: [u8; 64] = rand::random();
    let began = Instant::now();
    let mut request = guest_configuration(&shared.node, record, entropy.to_vec());
    request.takes_over = limits.takes_over;
    let configure = info_span!("configure");
    let reply = match &record.sandbox {
        Some(sandbox) => {
            let request = sandbox_configuration(sandbox, record, request);
            client.configure_sandbox(request, limits.identity).instrument(configure).await
        }
        None => client.configure(request, limits.identity).instrument(configure).await,
    };
    let reply = reply.map_err(guest("configure"))?;
    let identity = began.elapsed();
    check_addresses(record, &reply.addresses)?;
    if limits.takes_over && !limits.same_identity {
        hooks::run(&client, record.name.as_str(), Hook::PostClone).await?;
    }
    let began = Instant::now();
    let session = boot.reports.session(&client);
    // A disk image VM may have no command.
    if record.sandbox.is_none() && !record.workload.argv.is_empty() {
        serve_shared_dirs(boot, record, session, &client).await?;
        let started = client.start_workload(process(record)).instrument(info_span!("start_workload")).await;
        started.map_err(guest("start the workload"))?;
    }
    Ok(Up { session: Some(session), identity, workload: began.elapsed() })
}

/// Whether the start of the workload needs nothing of the host after the configuration of the guest.
fn starts_at_once(record: &Record) -> bool {
    let is_shared = |volume: &Volume| volume.kind == VolumeKind::SharedDir;
    record.sandbox.is_none()
        && record.disk_image_vm.is_none()
        && !record.workload.argv.is_empty()
        && !record.volumes.iter().any(is_shared)
}

/// Like [`configure_and_start`], for a new guest: both steps are one request, before HTTP/2.
async fn start_at_once(
    boot: &Boot,
    record: &Record,
    session: NewSession,
    identity_limit: Duration,
) -> Result<Up, HostError> {
    let entropy: [u8; 64] = rand::random();
    let request = pb::StartRequest {
        configure: Some(guest_configuration(&boot.shared.node, record, entropy.to_vec())),
        process: Some(process(record)),
    };
    let started = session.start(&request, (identity_limit, START_LIMIT));
    let started = started.instrument(info_span!("configure_and_start")).await;
    let (client, started) = started.map_err(|StartFailure { operation, source }| HostError::Guest {
        name: record.name.to_string(),
        operation,
        source,
    })?;
    check_addresses(record, &started.addresses)?;
    let session = boot.reports.session(&client);
    Ok(Up { session: Some(session), identity: started.configured, workload: started.started })
}

/// Checks that the guest has acknowledged the addresses of its VM.
fn check_addresses(record: &Record, acknowledged: &[String]) -> Result<(), HostError> {
    let has = |address: &IpAddr| {
        let address = address.to_string();
        acknowledged.iter().any(|a| a.split('/').next() == Some(address.as_str()))
    };
    match record.addresses().into_iter().find(|address| !has(address)) {
        Some(address) => Err(HostError::Address { name: record.name.to_string(), address }),
        None => Ok(()),
    }
}

/// Serves the shared directories before the workload starts: its command may be in one of them. The guest has mounted all of
/// them and waits for replies.
async fn serve_shared_dirs(
    boot: &mut Boot,
    record: &Record,
    session: SessionId,
    client: &GuestClient,
) -> Result<(), HostError> {
    let paths = VmPaths::of(&boot.shared.node.config, &record.id);
    let volumes = record.volumes.iter();
    for volume in volumes.filter(|v| v.kind == VolumeKind::SharedDir && v.phase == VolumePhase::Attached) {
        let opened = boot.shared_dirs.open(volume, paths.folder_table(&volume.name)).await;
        opened.map_err(|e| boot.boot_error(format!("open shared directory {}: {e}", volume.name)))?;
        let serving = boot.shared_dirs.clone().serve(volume.name.clone(), session, client.clone());
        boot.served.spawn(serving);
    }
    Ok(())
}

/// Last console output on one line, without control characters.
pub(super) fn last_words(console: &ConsoleHandle) -> String {
    let history = console.attach().map(|(history, _)| history).unwrap_or_default();
    let tail = history.get(history.len().saturating_sub(LAST_WORDS)..).unwrap_or_default();
    let text: String = String::from_utf8_lossy(tail)
        .chars()
        .map(|c| if c == '\n' { '|' } else { c })
        .filter(|c| !c.is_control())
        .collect();
    match text.trim_matches(['|', ' ']) {
        "" => String::new(),
        words => format!("; last console output: {words}"),
    }
}
