//! VMMs without processes: VMs in memory, each with a small guest that speaks the real guest protocol. They outlive the driver,
//! as real VMMs outlive the daemon.

mod containers;
pub mod guest;
mod hostile;
pub mod remote;

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use coracle_hypervisor::{
    Accelerator, Cloned, Compatibility, Disk, Driver, DriverError, MemoryFile, Probe, ProcessId, Saved,
    Snapshots, Template, Templates, VmmConfig,
};
use coracle_types::InstanceId;

/// VMs of a fake host. Drivers that share one simulate a restart.
#[derive(Debug, Default)]
pub struct FakeMachines {
    running: Mutex<HashMap<InstanceId, FakeVmm>>,
    starts: AtomicU64,
    boot_time: Mutex<Duration>,
    failing_start: Mutex<Option<String>>,
    /// Accelerator that the probe finds, and accelerator that VMMs then use.
    accelerators: Mutex<Option<(Accelerator, Accelerator)>>,
    /// Process of the guests; `None`: this process.
    elsewhere: OnceLock<Arc<remote::Guests>>,
}

#[derive(Debug)]
struct FakeVmm {
    process: ProcessId,
    gone: watch::Sender<bool>,
    guest: MachineGuest,
    /// Slots that contain disks.
    filled: BTreeSet<usize>,
    /// Ends the guest's tasks with the VM.
    _stop: DropGuard,
}

#[derive(Debug)]
enum MachineGuest {
    Here(guest::Handle),
    Elsewhere(remote::RemoteGuest),
}

impl MachineGuest {
    fn connect(&self) -> io::Result<UnixStream> {
        match self {
            Self::Here(guest) => guest.connect(),
            Self::Elsewhere(guest) => guest.connect(),
        }
    }

    fn console(&self) -> io::Result<UnixStream> {
        match self {
            Self::Here(guest) => guest.console(),
            Self::Elsewhere(guest) => guest.console(),
        }
    }

    fn hold(&self, held: bool) -> io::Result<()> {
        match self {
            Self::Here(guest) => {
                guest.hold(held);
                Ok(())
            }
            Self::Elsewhere(guest) => guest.hold(held),
        }
    }

    /// Returns the guest, for operations that only guests in this process support.
    fn local_guest(&self) -> Option<&guest::Handle> {
        match self {
            Self::Here(guest) => Some(guest),
            Self::Elsewhere(_) => None,
        }
    }
}

/// First pid of fake processes, beyond the range of Linux (2^22).
const FIRST_FAKE_PID: u32 = 1 << 23;
/// Number of fake processes that this program has started.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Traffic that a guest has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Number of bytes of output.
    pub bytes: u64,
    /// Number of messages.
    pub messages: u64,
    /// Number of opened sessions.
    pub sessions: u64,
}

impl FakeMachines {
    /// Returns a host without VMs; guests answer at once.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Like [`FakeMachines::new`], with the guests in the process that [`remote::serve`]s the other end of `socket`. Such
    /// guests can only be started, connected to, paused, resumed and ended.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn with_guests_at(socket: OwnedFd) -> io::Result<Arc<Self>> {
        let machines = Self::new();
        let guests = remote::Guests::new(socket, Arc::downgrade(&machines))?;
        machines.elsewhere.get_or_init(|| guests);
        Ok(machines)
    }

    /// Sets the time from the start of a guest to its hello.
    pub fn set_boot_time(&self, time: Duration) {
        *lock(&self.boot_time) = time;
    }

    /// Makes every start fail with these last words, until `None`.
    pub fn fail_starts(&self, last_words: Option<&str>) {
        *lock(&self.failing_start) = last_words.map(str::to_owned);
    }

    /// Sets the accelerator that the probe finds, and the one that VMMs use; both are TCG by default.
    pub fn set_accelerators(&self, probed: Accelerator, used: Accelerator) {
        *lock(&self.accelerators) = Some((probed, used));
    }

    /// Returns the number of running VMs.
    #[must_use]
    pub fn running(&self) -> usize {
        lock(&self.running).len()
    }

    /// Returns the number of all VMM starts.
    #[must_use]
    pub fn starts(&self) -> u64 {
        self.starts.load(Ordering::Relaxed)
    }

    /// Returns whether the VMM of this id runs.
    pub fn is_running(&self, id: &InstanceId) -> bool {
        lock(&self.running).contains_key(id)
    }

    /// Kills the VMM, as by SIGKILL. Returns false when there is none.
    pub fn crash(&self, id: &InstanceId) -> bool {
        let machine = lock(&self.running).remove(id);
        machine.map(|m| m.gone.send_replace(true)).is_some()
    }

    /// Prints on the guest's console. Returns false when no client reads it.
    pub fn print(&self, id: &InstanceId, text: &str) -> bool {
        let running = lock(&self.running);
        running.get(id).and_then(|machine| machine.guest.local_guest()).is_some_and(|guest| guest.print(text))
    }

    /// Returns the traffic that the guest of a VM has sent in session streams since one of its containers became hostile
    /// (`hostile WORD`).
    pub fn sent(&self, id: &InstanceId) -> Option<Sent> {
        let running = lock(&self.running);
        let attack_traffic = running.get(id)?.guest.local_guest()?.attack_traffic();
        let [bytes, messages, sessions] =
            [&attack_traffic.bytes, &attack_traffic.messages, &attack_traffic.sessions]
                .map(|count| count.load(Ordering::Relaxed));
        Some(Sent { bytes, messages, sessions })
    }

    /// Ends the VM of a process, regardless of its driver.
    fn end(&self, process: ProcessId) {
        let of_process =
            |(id, machine): (&InstanceId, &FakeVmm)| (machine.process == process).then(|| id.clone());
        let id = lock(&self.running).iter().find_map(of_process);
        if let Some(id) = id {
            self.crash(&id);
        }
    }

    /// Like [`FakeMachines::end`], by the serial number of its start.
    fn end_serial(&self, serial: u64) {
        let of_serial = |machine: &FakeVmm| machine.process.start_ticks == serial;
        let process = lock(&self.running).values().find_map(|m| of_serial(m).then_some(m.process));
        if let Some(process) = process {
            self.end(process);
        }
    }

    /// Reboots the guest, as by reboot(8). Returns false when the VM does not run.
    pub fn reboot(&self, id: &InstanceId) -> bool {
        let running = lock(&self.running);
        running.get(id).and_then(|machine| machine.guest.local_guest()).map(guest::Handle::reboot).is_some()
    }

    /// Ends the guest's workload. Returns false when the VM does not run.
    pub fn exit_workload(&self, id: &InstanceId, code: i32) -> bool {
        match lock(&self.running).get(id).and_then(|machine| machine.guest.local_guest()) {
            Some(guest) => {
                guest.exit_workload(code);
                true
            }
            None => false,
        }
    }
}

/// Driver of [`FakeMachines`].
#[derive(Clone, Debug)]
pub struct FakeDriver {
    machines: Arc<FakeMachines>,
    name: &'static str,
}

impl FakeDriver {
    /// Returns a driver for these VMs.
    #[must_use]
    pub fn new(machines: Arc<FakeMachines>) -> Self {
        Self::named(machines, "fake")
    }

    /// Like [`FakeDriver::new`], under another name.
    #[must_use]
    pub fn named(machines: Arc<FakeMachines>, name: &'static str) -> Self {
        Self { machines, name }
    }

    /// Starts a VMM whose guest says hello after `boot_time`, or continues from a saved state.
    fn spawn(
        &self,
        vmm_config: &VmmConfig,
        boot_time: Duration,
        saved: Option<guest::GuestState>,
    ) -> Result<ProcessId, DriverError> {
        let machines = &self.machines;
        if let Some(last_words) = lock(&machines.failing_start).clone() {
            return Err(DriverError::Exited { id: vmm_config.id.clone(), last_words });
        }
        machines.starts.fetch_add(1, Ordering::Relaxed);
        // Fake processes are unique like real ones, even across fake hosts.
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
        let guest = match machines.elsewhere.get() {
            None => MachineGuest::Here(guest::start(boot_time, saved, stop.clone(), power_off)),
            Some(guests) => {
                let io = |source| DriverError::Io { operation: format!("start {}", vmm_config.id), source };
                MachineGuest::Elsewhere(guests.start(serial, boot_time).map_err(io)?)
            }
        };
        let filled = vmm_config.disks.iter().map(|disk| disk.slot).collect();
        let gone = watch::Sender::new(false);
        let machine = FakeVmm { process, gone, guest, filled, _stop: stop.drop_guard() };
        lock(&machines.running).insert(vmm_config.id.clone(), machine);
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
            accelerator: Some(
                lock(&self.machines.accelerators).map_or(Accelerator::Tcg, |(probed, _)| probed),
            ),
            reason: "machines in memory, for tests".to_owned(),
        }
    }

    async fn start(&self, vmm_config: &VmmConfig) -> Result<ProcessId, DriverError> {
        let boot_time = *lock(&self.machines.boot_time);
        self.spawn(vmm_config, boot_time, None)
    }

    async fn find(&self, vmm_config: &VmmConfig) -> Result<Option<ProcessId>, DriverError> {
        Ok(lock(&self.machines.running).get(&vmm_config.id).map(|m| m.process))
    }

    fn accelerator_of(&self, vmm_config: &VmmConfig, _: ProcessId) -> Accelerator {
        lock(&self.machines.accelerators).map_or(vmm_config.accelerator, |(_, used)| used)
    }

    async fn exited(&self, process: ProcessId) -> Result<(), DriverError> {
        let gone =
            lock(&self.machines.running).values().find(|m| m.process == process).map(|m| m.gone.subscribe());
        if let Some(mut gone) = gone {
            // The sender is dropped with the VM, which also ends the wait.
            let _end = gone.wait_for(|gone| *gone).await;
        }
        Ok(())
    }

    async fn kill(&self, process: ProcessId) -> Result<(), DriverError> {
        self.machines.end(process);
        Ok(())
    }

    async fn pause(&self, vmm_config: &VmmConfig) -> Result<(), DriverError> {
        self.hold(vmm_config, "stop", true)
    }

    async fn resume(&self, vmm_config: &VmmConfig) -> Result<(), DriverError> {
        self.hold(vmm_config, "cont", false)
    }

    async fn guest_channel(&self, vmm_config: &VmmConfig) -> Result<UnixStream, DriverError> {
        let refused = |source| DriverError::Channel { id: vmm_config.id.clone(), channel: "guest", source };
        let running = lock(&self.machines.running);
        let machine = running.get(&vmm_config.id).ok_or_else(|| refused(io::ErrorKind::NotFound.into()))?;
        machine.guest.connect().map_err(refused)
    }

    async fn console(&self, vmm_config: &VmmConfig) -> Result<UnixStream, DriverError> {
        let refused = |source| DriverError::Channel { id: vmm_config.id.clone(), channel: "console", source };
        let running = lock(&self.machines.running);
        let machine = running.get(&vmm_config.id).ok_or_else(|| refused(io::ErrorKind::NotFound.into()))?;
        machine.guest.console().map_err(refused)
    }

    async fn attach_disk(&self, vmm_config: &VmmConfig, disk: &Disk) -> Result<(), DriverError> {
        let absent = |source| DriverError::Io { operation: format!("open {}", disk.path.display()), source };
        std::fs::metadata(&disk.path).map_err(absent)?;
        self.slot(vmm_config, disk.slot, |slots| slots.insert(disk.slot))
    }

    async fn detach_disk(&self, vmm_config: &VmmConfig, slot: usize) -> Result<(), DriverError> {
        self.slot(vmm_config, slot, |slots| slots.remove(&slot))
    }

    fn has_machine(&self, _: &VmmConfig) -> bool {
        true
    }

    fn has_user_network(&self, _: &VmmConfig) -> bool {
        true
    }

    fn snapshots(&self, _: &VmmConfig) -> Option<&dyn Snapshots> {
        Some(self)
    }

    fn templates(&self, _: &VmmConfig) -> Option<&dyn Templates> {
        Some(self)
    }
}

impl FakeDriver {
    /// Changes the slots of a running VM; returns false if the slot was already in that state.
    fn slot(
        &self,
        vmm_config: &VmmConfig,
        slot: usize,
        change: impl FnOnce(&mut BTreeSet<usize>) -> bool,
    ) -> Result<(), DriverError> {
        let mut running = lock(&self.machines.running);
        let changed = running.get_mut(&vmm_config.id).filter(|_| slot < vmm_config.slots.total());
        let why = match changed.map(|machine| change(&mut machine.filled)) {
            Some(true) => return Ok(()),
            Some(false) => io::ErrorKind::AlreadyExists,
            None => io::ErrorKind::NotConnected,
        };
        let source = Box::new(io::Error::from(why));
        Err(DriverError::Control { id: vmm_config.id.clone(), operation: "swap a disk of", source })
    }

    fn hold(&self, vmm_config: &VmmConfig, operation: &'static str, held: bool) -> Result<(), DriverError> {
        let running = lock(&self.machines.running);
        let no_vmm = || io::Error::from(io::ErrorKind::NotConnected);
        let outcome = running.get(&vmm_config.id).map_or_else(|| Err(no_vmm()), |m| m.guest.hold(held));
        let id = vmm_config.id.clone();
        outcome.map_err(|source| DriverError::Control { id, operation, source: Box::new(source) })
    }

    /// Calls `f` on the guest of a running VM.
    fn guest<T>(
        &self,
        vmm_config: &VmmConfig,
        operation: &'static str,
        act: impl FnOnce(&guest::Handle) -> T,
    ) -> Result<T, DriverError> {
        let running = lock(&self.machines.running);
        let no_vmm = || io::Error::from(io::ErrorKind::NotConnected);
        let guest = running.get(&vmm_config.id).and_then(|machine| machine.guest.local_guest());
        guest.map(act).ok_or_else(|| DriverError::Control {
            id: vmm_config.id.clone(),
            operation,
            source: Box::new(no_vmm()),
        })
    }
}

#[async_trait]
impl Snapshots for FakeDriver {
    async fn compatibility(&self, vmm_config: &VmmConfig) -> Compatibility {
        Compatibility {
            driver: "fake".to_owned(),
            vmm: "1".to_owned(),
            accelerator: vmm_config.accelerator.as_str().to_owned(),
            cpu: "none".to_owned(),
            devices: self.fingerprint(vmm_config).await,
            tsc_khz: 0,
        }
    }

    async fn save(&self, vmm_config: &VmmConfig, mut file: &File) -> Result<(), DriverError> {
        let io = |source| DriverError::Io { operation: format!("save {}", vmm_config.id), source };
        let (held, progress) = self.guest(vmm_config, "migrate", |g| (g.is_held(), g.progress()))?;
        if !held {
            return Err(io(io::Error::other("the guest runs")));
        }
        file.write_all(progress.save().as_bytes()).map_err(io)
    }

    /// The saved line is the whole VM, so it replaces the device state.
    async fn materialize(
        &self,
        vmm_config: &VmmConfig,
        mut file: &File,
    ) -> Result<Option<Template>, DriverError> {
        let mut memory_images = || -> io::Result<Template> {
            let (ram, state) = (MemoryFile::new("ram", 0)?, MemoryFile::new("state", 0)?);
            let mut line = String::new();
            file.read_to_string(&mut line)?;
            guest::GuestState::load(&line).ok_or(io::ErrorKind::InvalidData)?;
            state.file().write_all(line.as_bytes())?;
            Ok(Template { ram: ram.seal()?, state: state.seal()?, disk: None })
        };
        let operation = format!("materialize {}", vmm_config.id);
        memory_images().map(Some).map_err(|source| DriverError::Io { operation, source })
    }

    async fn restore(&self, vmm_config: &VmmConfig, saved: Saved<'_>) -> Result<Cloned, DriverError> {
        let io = |source| DriverError::Io { operation: format!("load {}", vmm_config.id), source };
        let line = match saved {
            Saved::File(file) => io::read_to_string(file),
            Saved::MemoryImages(template) => template.state.reopen().and_then(io::read_to_string),
        };
        let line = line.map_err(io)?;
        let saved = guest::GuestState::load(&line).ok_or_else(|| io(io::ErrorKind::InvalidData.into()))?;
        let process = self.spawn(vmm_config, Duration::ZERO, Some(saved))?;
        Ok(Cloned { process, channel: Some(self.guest_channel(vmm_config).await?) })
    }
}

/// Content that the fake writes as device state; a clone of anything else is refused.
const STATE: &[u8] = b"a saved machine";

#[async_trait]
impl Templates for FakeDriver {
    async fn fingerprint(&self, vmm_config: &VmmConfig) -> String {
        format!("fake {} {} {:?}", vmm_config.vcpus.get(), vmm_config.memory.get(), vmm_config.slots)
    }

    fn premounts_disk(&self) -> bool {
        true
    }

    async fn boot_template(
        &self,
        vmm_config: &VmmConfig,
        _ram: &MemoryFile,
    ) -> Result<ProcessId, DriverError> {
        self.start(vmm_config).await
    }

    async fn save_template(
        &self,
        vmm_config: &VmmConfig,
        process: ProcessId,
        _ram: &MemoryFile,
        state: &MemoryFile,
    ) -> Result<Duration, DriverError> {
        let saved = std::fs::write(format!("/proc/self/fd/{}", state.number()), STATE);
        self.kill(process).await?;
        saved.map_err(|source| DriverError::Io { operation: format!("save {}", vmm_config.id), source })?;
        Ok(Duration::ZERO)
    }

    async fn start_clone(&self, vmm_config: &VmmConfig, template: &Template) -> Result<Cloned, DriverError> {
        let io = |source| DriverError::Io { operation: format!("load {}", vmm_config.id), source };
        if std::fs::read(template.state.path()).map_err(io)? != STATE {
            return Err(io(io::ErrorKind::InvalidData.into()));
        }
        let process = self.spawn(vmm_config, Duration::ZERO, None)?;
        Ok(Cloned { process, channel: Some(self.guest_channel(vmm_config).await?) })
    }

    fn can_assign(&self) -> bool {
        true
    }

    async fn fill(&self, clone: &VmmConfig, paused: bool) -> Result<(), DriverError> {
        let mut inserted = clone.disks.iter().filter(|disk| disk.slot < clone.slots.total());
        inserted.try_for_each(|disk| self.slot(clone, disk.slot, |slots| slots.insert(disk.slot)))?;
        if paused { self.resume(clone).await } else { Ok(()) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
