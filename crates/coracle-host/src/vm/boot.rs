//! From "start" to a guest that runs its workload. Runs as a job of the VM's
//! task; safe to run again after being cut anywhere.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use coracle_hypervisor::{Driver as _, ProcessId, VmRecipe};
use coracle_proto::guest as pb;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout_at};

use super::hooks::{self, Hook};
use super::launch::{Launched, Origin, Talk, launch};
use super::{Note, Shared, StartedFrom, Up, What};
use crate::guest::{ASK_LIMIT, within};
use crate::recipe::{configuration, process};
use crate::{ConsoleHandle, HostError, Record, standby};

/// The configuration includes mounts and the first use of a fresh disk.
pub(super) const CONFIGURE_LIMIT: Duration = Duration::from_secs(30);

/// A clone's agent waits for the host when it is saved: it answers at once.
const CLONE_HELLO_LIMIT: Duration = Duration::from_secs(10);

/// Last console bytes that go into an error.
const LAST_WORDS: usize = 600;

/// Boots the VM and reports once. A VMM that is found running is taken as it is.
pub(super) async fn run(
    shared: Arc<Shared>,
    record: Record,
    console: ConsoleHandle,
    notes: mpsc::Sender<Note>,
) {
    let boot = record.boots;
    let result = try_boot(&shared, &record, &console, &notes).await;
    let _task_gone = notes.send(Note { boot, what: What::Booted(result) }).await;
}

async fn try_boot(
    shared: &Arc<Shared>,
    record: &Record,
    console: &ConsoleHandle,
    notes: &mpsc::Sender<Note>,
) -> Result<Up, HostError> {
    let _permit = shared.boots.acquire().await.map_err(|_| HostError::Stopping)?;
    let deadline = Instant::now() + limit(shared, record);
    let launched = launch(shared, record).await?;
    let vmm = launched.vmm;
    let is_clone = matches!(launched.origin, Origin::Cloned(_));
    match attend(shared, record, console, notes, launched, deadline).await {
        Err(error) if is_clone => {
            let error = error.chain();
            tracing::warn!(vm = %record.id, error, "clone did not come up, booting instead");
            let driver = |source| HostError::Driver { name: record.name.to_string(), source };
            shared.driver.kill(vmm).await.map_err(driver)?;
            let launched = launch(shared, &Record { cold: true, ..record.clone() }).await?;
            attend(shared, record, console, notes, launched, deadline).await
        }
        outcome => outcome,
    }
}

/// Tells of a VMM, lets its guest go, and stays until it is up.
async fn attend(
    shared: &Arc<Shared>,
    record: &Record,
    console: &ConsoleHandle,
    notes: &mpsc::Sender<Note>,
    Launched { recipe, vmm, origin, from }: Launched,
    deadline: Instant,
) -> Result<Up, HostError> {
    let record = &Record { prepared: from.prepared, ..record.clone() };
    let template = from.template.clone();
    let (mut limits, mut missing, mut talk) = (Limits::of_boot(shared, record), None, Talk::None);
    match origin {
        Origin::Found => {}
        Origin::Booted { missing: key } => {
            tell_spawned(notes, record, vmm, from).await;
            missing = key;
        }
        Origin::Cloned(open) => {
            tell_spawned(notes, record, vmm, from).await;
            limits = Limits::of_clone(shared);
            talk = open;
        }
        Origin::Restored(open) => {
            let (go, told) = oneshot::channel();
            let _task_gone = notes.send(Note { boot: record.boots, what: What::Loaded { vmm, go } }).await;
            told.await.map_err(|_| HostError::Stopping)?;
            if record.saved.as_ref().is_some_and(|saved| saved.of.is_some()) {
                limits = Limits::of_copy(shared);
            }
            let driver = |source| HostError::Driver { name: record.name.to_string(), source };
            shared.driver.resume(&recipe).await.map_err(driver)?;
            talk = open;
        }
    }
    let ready = bring_up(shared, record, &recipe, talk, limits);
    let failed = |why: String| HostError::Boot {
        name: record.name.to_string(),
        why: format!("{why}{}", last_words(console)),
    };
    let outcome = tokio::select! {
        outcome = timeout_at(deadline, ready) => outcome,
        _ = shared.driver.exited(vmm) => return Err(failed("the VMM exited".to_owned())),
    };
    if let Ok(Ok(_)) = outcome {
        match (missing, template) {
            (Some(key), _) => shared.templates.wish(key, recipe, record.disk_mib),
            (None, Some(key)) => standby::want(shared, key, &recipe),
            (None, None) => {}
        }
    }
    match outcome {
        Ok(result) => result,
        Err(_) => {
            let limit = limit(shared, record).as_secs();
            Err(failed(format!("the guest was not ready within {limit} s")))
        }
    }
}

/// What a guest may take for its first answers.
#[derive(Clone, Copy)]
struct Limits {
    hello: Duration,
    /// To become who it is: until then a clone is the twin of all others.
    identity: Duration,
    /// Its workload runs as another machine's.
    takes_over: bool,
}

impl Limits {
    fn of_boot(shared: &Shared, record: &Record) -> Self {
        Self { hello: limit(shared, record), identity: CONFIGURE_LIMIT, takes_over: false }
    }

    fn of_clone(shared: &Shared) -> Self {
        Self { hello: CLONE_HELLO_LIMIT, identity: shared.config.identity_limit, takes_over: false }
    }

    fn of_copy(shared: &Shared) -> Self {
        Self { takes_over: true, ..Self::of_clone(shared) }
    }
}

/// From start to acknowledged configuration.
fn limit(shared: &Shared, record: &Record) -> Duration {
    if record.system.is_some() { shared.config.system_boot_limit } else { shared.config.boot_limit }
}

async fn tell_spawned(notes: &mpsc::Sender<Note>, record: &Record, vmm: ProcessId, from: StartedFrom) {
    let what = What::Spawned { vmm, from };
    let _task_gone = notes.send(Note { boot: record.boots, what }).await;
}

/// Session, configuration, workload. Each call is idempotent in the guest.
async fn bring_up(
    shared: &Arc<Shared>,
    record: &Record,
    recipe: &VmRecipe,
    talk: Talk,
    limits: Limits,
) -> Result<Up, HostError> {
    let guest = |operation| {
        let name = record.name.to_string();
        move |status: tonic::Status| HostError::Guest { name, operation, source: Box::new(status) }
    };
    let unanswered = |e: io::Error| tonic::Status::unavailable(e.to_string());
    let client =
        talk.client(shared, recipe, limits.hello).await.map_err(|e| guest("answers")(unanswered(e)))?;
    let entropy: [u8; 64] = rand::random();
    let began = Instant::now();
    let mut request =
        configuration(&shared.config, record, shared.network.subnet(), entropy.to_vec(), shared.clock.now());
    request.takes_over = limits.takes_over;
    let reply = within(limits.identity, client.rpc().configure(request)).await.map_err(guest("configure"))?;
    let identity = began.elapsed();
    if let Some(address) = record.address {
        let told = address.to_string();
        if !reply.addresses.iter().any(|a| a.split('/').next() == Some(told.as_str())) {
            return Err(HostError::Address { name: record.name.to_string(), address });
        }
    }
    if limits.takes_over {
        hooks::run(&client, record.name.as_str(), Hook::PostClone).await?;
    }
    let began = Instant::now();
    if record.system.is_none() {
        let request = pb::StartWorkloadRequest { process: Some(process(record)) };
        within(ASK_LIMIT, client.rpc().start_workload(request)).await.map_err(guest("start the workload"))?;
    }
    Ok(Up { guest: client, identity, workload: began.elapsed() })
}

/// The end of the console, one line, without control characters.
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
