//! VMMs without processes: machines in memory, each with a small guest that
//! speaks the real wire. They outlive the driver, as real VMMs outlive the daemon.

pub mod guest;

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use coracle_types::VmId;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    Accelerator, Cloned, Compatibility, Disk, Driver, DriverError, MemoryFile, Probe, ProcessId, Saved,
    Snapshots, Template, Templates, VmRecipe,
};

/// The machines of a pretended host. Share one between drivers to play a restart.
#[derive(Debug, Default)]
pub struct FakeMachines {
    running: Mutex<HashMap<VmId, Machine>>,
    starts: AtomicU64,
    boot_time: Mutex<Duration>,
    failing_start: Mutex<Option<String>>,
}

#[derive(Debug)]
struct Machine {
    process: ProcessId,
    gone: watch::Sender<bool>,
    guest: guest::Handle,
    /// Slots that disks are in.
    filled: BTreeSet<usize>,
    /// Ends the guest's tasks with the machine.
    _stop: DropGuard,
}

/// Pids of pretended processes are beyond what Linux can give out (2^22).
const FIRST_FAKE_PID: u32 = 1 << 23;
/// How many there were in this program.
static NEXT: AtomicU64 = AtomicU64::new(0);

impl FakeMachines {
    /// No machines yet; guests answer at once.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// How long a guest takes from start to its hello.
    pub fn set_boot_time(&self, time: Duration) {
        *lock(&self.boot_time) = time;
    }

    /// Makes every start fail with these last words, until `None`.
    pub fn fail_starts(&self, last_words: Option<&str>) {
        *lock(&self.failing_start) = last_words.map(str::to_owned);
    }

    /// How many machines run now.
    #[must_use]
    pub fn running(&self) -> usize {
        lock(&self.running).len()
    }

    /// How many VMMs were started in all.
    #[must_use]
    pub fn starts(&self) -> u64 {
        self.starts.load(Ordering::Relaxed)
    }

    /// The VMM dies, as from SIGKILL. False when there is none.
    pub fn crash(&self, id: &VmId) -> bool {
        let machine = lock(&self.running).remove(id);
        machine.map(|m| m.gone.send_replace(true)).is_some()
    }

    /// Ends the machine of a process, whosever it is.
    fn end(&self, process: ProcessId) {
        let of_process = |(id, machine): (&VmId, &Machine)| (machine.process == process).then(|| id.clone());
        let id = lock(&self.running).iter().find_map(of_process);
        if let Some(id) = id {
            self.crash(&id);
        }
    }

    /// The guest's workload ends. False when there is no such machine.
    pub fn exit_workload(&self, id: &VmId, code: i32) -> bool {
        match lock(&self.running).get(id) {
            Some(machine) => {
                machine.guest.exit_workload(code);
                true
            }
            None => false,
        }
    }
}

/// A driver over [`FakeMachines`].
#[derive(Clone, Debug)]
pub struct FakeDriver {
    machines: Arc<FakeMachines>,
    name: &'static str,
}

impl FakeDriver {
    /// A driver for these machines.
    #[must_use]
    pub fn new(machines: Arc<FakeMachines>) -> Self {
        Self::named(machines, "fake")
    }

    /// As [`FakeDriver::new`], under another name.
    #[must_use]
    pub fn named(machines: Arc<FakeMachines>, name: &'static str) -> Self {
        Self { machines, name }
    }

    /// A machine whose guest says hello after `boot_time`, or goes on from where it was saved.
    fn spawn(
        &self,
        recipe: &VmRecipe,
        boot_time: Duration,
        saved: Option<guest::Progress>,
    ) -> Result<ProcessId, DriverError> {
        let machines = &self.machines;
        if let Some(last_words) = lock(&machines.failing_start).clone() {
            return Err(DriverError::Exited { id: recipe.id.clone(), last_words });
        }
        machines.starts.fetch_add(1, Ordering::Relaxed);
        // As of real processes, no two are alike, whatever host they pretend to be on.
        let serial = NEXT.fetch_add(1, Ordering::Relaxed);
        let pid = FIRST_FAKE_PID.wrapping_add(u32::try_from(serial % (1 << 20)).unwrap_or(0));
        let process = ProcessId { pid, start_ticks: serial };
        let stop = CancellationToken::new();
        let weak = Arc::downgrade(machines);
        let power_off = move || {
            if let Some(machines) = weak.upgrade() {
                machines.end(process);
            }
        };
        let guest = guest::start(boot_time, saved, stop.clone(), power_off);
        let filled = recipe.disks.iter().map(|disk| disk.slot).collect();
        let gone = watch::Sender::new(false);
        let machine = Machine { process, gone, guest, filled, _stop: stop.drop_guard() };
        lock(&machines.running).insert(recipe.id.clone(), machine);
        Ok(process)
    }
}

#[async_trait]
impl Driver for FakeDriver {
    fn name(&self) -> &'static str {
        self.name
    }

    async fn probe(&self) -> Probe {
        Probe {
            version: "1".to_owned(),
            accelerator: Some(Accelerator::Tcg),
            reason: "machines in memory, for tests".to_owned(),
        }
    }

    async fn start(&self, recipe: &VmRecipe) -> Result<ProcessId, DriverError> {
        let boot_time = *lock(&self.machines.boot_time);
        self.spawn(recipe, boot_time, None)
    }

    async fn find(&self, recipe: &VmRecipe) -> Result<Option<ProcessId>, DriverError> {
        Ok(lock(&self.machines.running).get(&recipe.id).map(|m| m.process))
    }

    async fn exited(&self, process: ProcessId) -> Result<(), DriverError> {
        let gone =
            lock(&self.machines.running).values().find(|m| m.process == process).map(|m| m.gone.subscribe());
        if let Some(mut gone) = gone {
            // The sender is dropped with the machine, which is also an end.
            let _end = gone.wait_for(|gone| *gone).await;
        }
        Ok(())
    }

    async fn kill(&self, process: ProcessId) -> Result<(), DriverError> {
        self.machines.end(process);
        Ok(())
    }

    async fn pause(&self, recipe: &VmRecipe) -> Result<(), DriverError> {
        self.guest(recipe, "stop", |guest| guest.hold(true))
    }

    async fn resume(&self, recipe: &VmRecipe) -> Result<(), DriverError> {
        self.guest(recipe, "cont", |guest| guest.hold(false))
    }

    async fn guest_channel(&self, recipe: &VmRecipe) -> Result<UnixStream, DriverError> {
        let refused = |source| DriverError::Channel { id: recipe.id.clone(), channel: "guest", source };
        let running = lock(&self.machines.running);
        let machine = running.get(&recipe.id).ok_or_else(|| refused(io::ErrorKind::NotFound.into()))?;
        machine.guest.connect().map_err(refused)
    }

    async fn console(&self, recipe: &VmRecipe) -> Result<UnixStream, DriverError> {
        let refused = |source| DriverError::Channel { id: recipe.id.clone(), channel: "console", source };
        let running = lock(&self.machines.running);
        let machine = running.get(&recipe.id).ok_or_else(|| refused(io::ErrorKind::NotFound.into()))?;
        machine.guest.console().map_err(refused)
    }

    async fn insert_disk(&self, recipe: &VmRecipe, disk: &Disk) -> Result<(), DriverError> {
        let absent = |source| DriverError::Io { operation: format!("open {}", disk.path.display()), source };
        std::fs::metadata(&disk.path).map_err(absent)?;
        self.slot(recipe, disk.slot, |slots| slots.insert(disk.slot))
    }

    async fn eject_disk(&self, recipe: &VmRecipe, slot: usize) -> Result<(), DriverError> {
        self.slot(recipe, slot, |slots| slots.remove(&slot))
    }

    fn has_user_network(&self, _: &VmRecipe) -> bool {
        true
    }

    fn snapshots(&self, _: &VmRecipe) -> Option<&dyn Snapshots> {
        Some(self)
    }

    fn templates(&self, _: &VmRecipe) -> Option<&dyn Templates> {
        Some(self)
    }
}

impl FakeDriver {
    /// Changes the slots of a machine that must be there; false: it was so already.
    fn slot(
        &self,
        recipe: &VmRecipe,
        slot: usize,
        change: impl FnOnce(&mut BTreeSet<usize>) -> bool,
    ) -> Result<(), DriverError> {
        let mut running = lock(&self.machines.running);
        let changed = running.get_mut(&recipe.id).filter(|_| slot < recipe.slots.total());
        let why = match changed.map(|machine| change(&mut machine.filled)) {
            Some(true) => return Ok(()),
            Some(false) => io::ErrorKind::AlreadyExists,
            None => io::ErrorKind::NotConnected,
        };
        let source = Box::new(io::Error::from(why));
        Err(DriverError::Control { id: recipe.id.clone(), operation: "swap a disk of", source })
    }

    /// Does something to the guest of a machine that must be there.
    fn guest<T>(
        &self,
        recipe: &VmRecipe,
        operation: &'static str,
        act: impl FnOnce(&guest::Handle) -> T,
    ) -> Result<T, DriverError> {
        let running = lock(&self.machines.running);
        let no_vmm = || io::Error::from(io::ErrorKind::NotConnected);
        running.get(&recipe.id).map(|machine| act(&machine.guest)).ok_or_else(|| DriverError::Control {
            id: recipe.id.clone(),
            operation,
            source: Box::new(no_vmm()),
        })
    }
}

#[async_trait]
impl Snapshots for FakeDriver {
    async fn compatibility(&self, recipe: &VmRecipe) -> Compatibility {
        Compatibility {
            driver: "fake".to_owned(),
            vmm: "1".to_owned(),
            accelerator: recipe.accelerator.as_str().to_owned(),
            cpu: "none".to_owned(),
            devices: self.fingerprint(recipe).await,
        }
    }

    async fn save(&self, recipe: &VmRecipe, mut file: &File) -> Result<(), DriverError> {
        let io = |source| DriverError::Io { operation: format!("save {}", recipe.id), source };
        let (held, progress) = self.guest(recipe, "migrate", |g| (g.is_held(), g.progress()))?;
        if !held {
            return Err(io(io::Error::other("the guest runs")));
        }
        file.write_all(progress.save().as_bytes()).map_err(io)
    }

    /// The line is the whole machine, so it stands in the place of the devices' state.
    async fn unfold(&self, recipe: &VmRecipe, mut file: &File) -> Result<Option<Template>, DriverError> {
        let mut unfolded = || -> io::Result<Template> {
            let (ram, state) = (MemoryFile::new("ram", 0)?, MemoryFile::new("state", 0)?);
            let mut line = String::new();
            file.read_to_string(&mut line)?;
            guest::Progress::load(&line).ok_or(io::ErrorKind::InvalidData)?;
            state.file().write_all(line.as_bytes())?;
            Ok(Template { ram: ram.seal()?, state: state.seal()?, disk: None })
        };
        let operation = format!("unfold {}", recipe.id);
        unfolded().map(Some).map_err(|source| DriverError::Io { operation, source })
    }

    async fn restore(&self, recipe: &VmRecipe, saved: Saved<'_>) -> Result<Cloned, DriverError> {
        let io = |source| DriverError::Io { operation: format!("load {}", recipe.id), source };
        let line = match saved {
            Saved::File(file) => io::read_to_string(file),
            Saved::Unfolded(template) => template.state.reopen().and_then(io::read_to_string),
        };
        let line = line.map_err(io)?;
        let saved = guest::Progress::load(&line).ok_or_else(|| io(io::ErrorKind::InvalidData.into()))?;
        let process = self.spawn(recipe, Duration::ZERO, Some(saved))?;
        Ok(Cloned { process, channel: Some(self.guest_channel(recipe).await?) })
    }
}

/// What the fake writes where a VMM writes device state; a clone of anything else is refused.
const STATE: &[u8] = b"a saved machine";

#[async_trait]
impl Templates for FakeDriver {
    async fn fingerprint(&self, recipe: &VmRecipe) -> String {
        format!("fake {} {} {:?}", recipe.vcpus.get(), recipe.memory.get(), recipe.slots)
    }

    fn prepares_disk(&self) -> bool {
        true
    }

    async fn boot_template(&self, recipe: &VmRecipe, _ram: &MemoryFile) -> Result<ProcessId, DriverError> {
        self.start(recipe).await
    }

    async fn save_template(
        &self,
        recipe: &VmRecipe,
        process: ProcessId,
        _ram: &MemoryFile,
        state: &MemoryFile,
    ) -> Result<Duration, DriverError> {
        let saved = std::fs::write(format!("/proc/self/fd/{}", state.number()), STATE);
        self.kill(process).await?;
        saved.map_err(|source| DriverError::Io { operation: format!("save {}", recipe.id), source })?;
        Ok(Duration::ZERO)
    }

    async fn start_clone(&self, recipe: &VmRecipe, template: &Template) -> Result<Cloned, DriverError> {
        let io = |source| DriverError::Io { operation: format!("load {}", recipe.id), source };
        if std::fs::read(template.state.path()).map_err(io)? != STATE {
            return Err(io(io::ErrorKind::InvalidData.into()));
        }
        let process = self.spawn(recipe, Duration::ZERO, None)?;
        Ok(Cloned { process, channel: Some(self.guest_channel(recipe).await?) })
    }

    fn hands_over(&self) -> bool {
        true
    }

    async fn claim(&self, from: &VmRecipe, to: &VmRecipe) -> Result<(), DriverError> {
        let mut running = lock(&self.machines.running);
        if let Some(machine) = running.remove(&from.id) {
            running.insert(to.id.clone(), machine);
        }
        Ok(())
    }

    async fn hand_over(&self, _: &VmRecipe, to: &VmRecipe) -> Result<(), DriverError> {
        let inserted = to.disks.iter().filter(|disk| disk.slot < to.slots.total());
        inserted.into_iter().try_for_each(|disk| self.slot(to, disk.slot, |slots| slots.insert(disk.slot)))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_fake_conforms() {
        let machines = FakeMachines::new();
        let recipe = VmRecipe {
            id: VmId::of_name(&"fake".parse().unwrap()),
            vcpus: 1.try_into().unwrap(),
            memory: 128.try_into().unwrap(),
            kernel: "/nowhere".into(),
            initrd: "/nowhere".into(),
            disks: vec![],
            slots: Default::default(),
            machine: Default::default(),
            nic: None,
            state_dir: "/nowhere".into(),
            run_dir: "/nowhere".into(),
            accelerator: Accelerator::Tcg,
            driver: String::new(),
        };
        crate::conformance::check(|| FakeDriver::new(machines.clone()), &recipe).await;
        assert_eq!((machines.running(), machines.starts()), (0, 2));
        crate::conformance::check_templates(&FakeDriver::new(machines.clone()), &recipe).await;
        assert_eq!(machines.running(), 0);
        crate::conformance::check_snapshots(&FakeDriver::new(machines.clone()), &recipe).await;
        assert_eq!(machines.running(), 0);
        crate::conformance::check_disks(&FakeDriver::new(machines.clone()), &recipe).await;
        assert_eq!(machines.running(), 0);
    }
}
