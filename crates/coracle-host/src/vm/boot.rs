//! From "start" to a guest that runs its workload. Runs as a job of the VM's
//! task; safe to run again after being cut anywhere.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use coracle_hypervisor::{Cloned, Driver as _, ProcessId, Saved, Template, VmRecipe};
use coracle_net::Plug;
use coracle_proto::guest as pb;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout_at};

use super::hooks::{self, Hook};
use super::{Note, Shared, Up, What};
use crate::guest::{ASK_LIMIT, within};
use crate::recipe::{VmPaths, configuration, process, recipe};
use crate::record::SavedMemory;
use crate::{ConsoleHandle, GuestClient, HostError, Record, TemplateKey, Volume, disks, files};

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
    let is_clone = matches!(launched.origin, Origin::Cloned { .. });
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
    Launched { recipe, vmm, origin, prepared }: Launched,
    deadline: Instant,
) -> Result<Up, HostError> {
    let record = &Record { prepared, ..record.clone() };
    let (mut limits, mut missing, mut channel) = (Limits::of_boot(shared, record), None, None);
    match origin {
        Origin::Found => {}
        Origin::Booted { missing: key } => {
            tell_spawned(notes, record, vmm, None).await;
            missing = key;
        }
        Origin::Cloned { template, channel: open } => {
            tell_spawned(notes, record, vmm, Some(template)).await;
            limits = Limits::of_clone(shared);
            channel = open;
        }
        Origin::Restored { channel: open } => {
            let (go, told) = oneshot::channel();
            let _task_gone = notes.send(Note { boot: record.boots, what: What::Loaded { vmm, go } }).await;
            told.await.map_err(|_| HostError::Stopping)?;
            if record.saved.as_ref().is_some_and(|saved| saved.of.is_some()) {
                limits = Limits::of_copy(shared);
            }
            let driver = |source| HostError::Driver { name: record.name.to_string(), source };
            shared.driver.resume(&recipe).await.map_err(driver)?;
            channel = open;
        }
    }
    let ready = bring_up(shared, record, &recipe, channel, limits);
    let failed = |why: String| HostError::Boot {
        name: record.name.to_string(),
        why: format!("{why}{}", last_words(console)),
    };
    let outcome = tokio::select! {
        outcome = timeout_at(deadline, ready) => outcome,
        _ = shared.driver.exited(vmm) => return Err(failed("the VMM exited".to_owned())),
    };
    if let (Ok(Ok(_)), Some(key)) = (&outcome, missing) {
        shared.templates.wish(key, recipe, record.disk_mib);
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

async fn tell_spawned(
    notes: &mpsc::Sender<Note>,
    record: &Record,
    vmm: ProcessId,
    template: Option<TemplateKey>,
) {
    let what = What::Spawned { vmm, template, prepared: record.prepared };
    let _task_gone = notes.send(Note { boot: record.boots, what }).await;
}

/// A VMM that is there.
struct Launched {
    recipe: VmRecipe,
    vmm: ProcessId,
    origin: Origin,
    /// As the record has it.
    prepared: bool,
}

/// Where its guest comes from. The agent speaks first on a channel that is there already.
enum Origin {
    /// It was there, as the record says.
    Found,
    /// It boots; `missing` is the template that it might have been cloned from, had there been one.
    Booted { missing: Option<TemplateKey> },
    /// It runs.
    Cloned { template: TemplateKey, channel: Option<UnixStream> },
    /// Its memory is loaded, and its CPUs are held.
    Restored { channel: Option<UnixStream> },
}

/// Network, disk, VMM: each is kept when it is already there. A VMM starts while the network is still made, which leads
/// nowhere until its filters are in place.
async fn launch(shared: &Arc<Shared>, record: &Record) -> Result<Launched, HostError> {
    let name = || record.name.to_string();
    let network = |source| HostError::Network { name: name(), source };
    let driver = |source| HostError::Driver { name: name(), source };
    let lease = shared.network.lease(&record.id, record.address).map_err(network)?;
    let plug = shared.network.plug(&record.id).await.map_err(network)?;
    let attach = async { shared.network.attach(&record.id, record.mac, lease).await.map_err(network) };
    let known = recipe(&shared.config, record, shared.accelerator(&record.driver), Some(&plug));
    match shared.driver.find(&known).await.map_err(driver)? {
        Some(vmm) if record.process == Some(vmm) => {
            attach.await?;
            // Cut off between the end of loading and the first step, it stands still.
            shared.driver.resume(&known).await.map_err(driver)?;
            let prepared = record.prepared;
            return Ok(Launched { recipe: known, vmm, origin: Origin::Found, prepared });
        }
        // Cut off before it was anybody's: nothing is known of what is in it.
        Some(vmm) => shared.driver.kill(vmm).await.map_err(driver)?,
        None => {}
    }
    let start = async {
        match &record.saved {
            Some(saved) => {
                prepare_files(shared, record, None).await?;
                let Cloned { process: vmm, channel } = restore(shared, record, &known, saved).await?;
                let (origin, prepared) = (Origin::Restored { channel }, record.prepared);
                Ok(Launched { recipe: known, vmm, origin, prepared })
            }
            None => start(shared, record, &plug).await,
        }
    };
    tokio::try_join!(attach, start).map(|(_, launched)| launched)
}

/// A VMM that is cloned from the template of its shape, or boots.
async fn start(shared: &Arc<Shared>, record: &Record, plug: &Plug) -> Result<Launched, HostError> {
    let accelerator = shared.accelerator(&record.driver);
    let recipe = |prepared| {
        let record = Record { prepared, ..record.clone() };
        recipe(&shared.config, &record, accelerator, Some(plug))
    };
    let booting = recipe(false);
    let key = if record.cold { None } else { shared.templates.key(shared, &booting).await };
    let template = match &key {
        Some(key) => shared.templates.get(shared, key).await,
        None => None,
    };
    let prepared = prepare_files(shared, record, template.clone()).await?;
    if let (Some(key), Some(template)) = (&key, &template) {
        let recipe = recipe(prepared);
        if let Some(Cloned { process: vmm, channel }) = clone(shared, &recipe, key, template).await {
            let origin = Origin::Cloned { template: key.clone(), channel };
            return Ok(Launched { recipe, vmm, origin, prepared });
        }
    }
    let driver = |source| HostError::Driver { name: record.name.to_string(), source };
    let vmm = shared.driver.start(&booting).await.map_err(driver)?;
    Ok(Launched { recipe: booting, vmm, origin: Origin::Booted { missing: key }, prepared: false })
}

/// A VMM with the memory of a VM that was hibernated, if this is a machine like the one that it was saved on.
async fn restore(
    shared: &Arc<Shared>,
    record: &Record,
    recipe: &VmRecipe,
    saved: &SavedMemory,
) -> Result<Cloned, HostError> {
    let name = || record.name.to_string();
    let driver = shared.driver_name(&record.driver);
    let unsupported =
        || HostError::Unsupported { name: name(), driver, what: "load the memory of a saved VM" };
    let snapshots = shared.driver.snapshots(recipe).ok_or_else(unsupported)?;
    let here = snapshots.compatibility(&VmRecipe { nic: None, ..recipe.clone() }).await;
    if let Some((field, was, is)) = saved.machine.difference(&here) {
        return Err(HostError::Incompatible { name: name(), field, saved: was.into(), here: is.into() });
    }
    let path = VmPaths::of(&shared.config, &record.id).saved_memory();
    let open = || -> io::Result<File> {
        let file = File::open(&path)?;
        let length = file.metadata()?.len();
        if length == saved.bytes {
            return Ok(file);
        }
        let why = format!("{} has {length} bytes instead of {}", path.display(), saved.bytes);
        Err(io::Error::new(io::ErrorKind::InvalidData, why))
    };
    let driver = |source| HostError::Driver { name: name(), source };
    if let Some(unfolded) = saved.of.as_ref().and_then(|snapshot| shared.unfolded.get(snapshot)) {
        return snapshots.restore(recipe, Saved::Unfolded(&unfolded)).await.map_err(driver);
    }
    let id = record.id.clone();
    let file = open().map_err(|source| HostError::Files { operation: "open the memory", id, source })?;
    snapshots.restore(recipe, Saved::File(&file)).await.map_err(driver)
}

/// A clone of the shape's template. `None`: it has to boot.
async fn clone(
    shared: &Arc<Shared>,
    recipe: &VmRecipe,
    key: &TemplateKey,
    template: &Template,
) -> Option<Cloned> {
    match shared.driver.templates(recipe)?.start_clone(recipe, template).await {
        Ok(cloned) => Some(cloned),
        Err(error) => {
            // The boot that follows has a new one taken.
            shared.templates.remove(key);
            let error = HostError::Driver { name: recipe.id.to_string(), source: error }.chain();
            tracing::warn!(vm = %recipe.id, template = %key, error, "clone failed, booting instead");
            None
        }
    }
}

/// The VM's folders, and its own disk where it has none yet. True when that is the one that the template's guest has
/// mounted.
async fn prepare_files(
    shared: &Arc<Shared>,
    record: &Record,
    template: Option<Arc<Template>>,
) -> Result<bool, HostError> {
    let paths = VmPaths::of(&shared.config, &record.id);
    let cache = shared.config.state_dir.join("cache");
    let id = record.id.clone();
    let network =
        configuration(&shared.config, record, shared.network.subnet(), vec![], shared.clock.now()).network;
    let (record, agent) = (record.clone(), shared.config.agent.clone());
    let make = move || -> io::Result<bool> {
        for Volume { source, .. } in &record.volumes {
            let told = |e: io::Error| io::Error::new(e.kind(), format!("volume {}: {e}", source.display()));
            source.metadata().map_err(told)?;
        }
        std::fs::create_dir_all(&paths.run)?;
        let own = paths.own_disk(&record);
        if let Some(dir) = own.parent() {
            std::fs::create_dir_all(dir)?;
        }
        if let Some(system) = &record.system {
            system.prepare(&paths, &record, network.as_ref(), &agent)?;
            return Ok(false);
        }
        match template.as_ref().and_then(|template| template.disk.as_ref()) {
            Some(disk) if !own.exists() && disk.length()? == record.disk_mib << 20 => {
                disks::copy(&disk.path(), &own).map(|()| true)
            }
            _ => disks::ensure_overlay(&cache, &own, record.disk_mib).map(|()| false),
        }
    };
    let made = files::blocking(make).await;
    made.map_err(|source| HostError::Files { operation: "make the disk", id, source })
}

/// Session, configuration, workload. Each call is idempotent in the guest.
async fn bring_up(
    shared: &Arc<Shared>,
    record: &Record,
    recipe: &VmRecipe,
    channel: Option<UnixStream>,
    limits: Limits,
) -> Result<Up, HostError> {
    let guest = |operation| {
        let name = record.name.to_string();
        move |status: tonic::Status| HostError::Guest { name, operation, source: Box::new(status) }
    };
    let unanswered = |e: io::Error| tonic::Status::unavailable(e.to_string());
    let client = GuestClient::open(&shared.driver, recipe, limits.hello, channel)
        .await
        .map_err(|e| guest("answers")(unanswered(e)))?;
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
