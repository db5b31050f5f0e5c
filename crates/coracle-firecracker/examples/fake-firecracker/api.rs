//! Rules of the API: which requests are accepted when, and the messages of refusals.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::bodies::{
    Action, ActionType, BackendType, Balloon, BalloonPatch, BalloonStats, BootSource, CpuConfig, Drive,
    DrivePatch, Entropy, HotplugMemory, HotplugPatch, Logger, MachineConfig, Metrics, MmdsConfig, Nic,
    NicPatch, Pmem, Serial, SnapshotCreate, SnapshotLoad, State, VmState, Vsock,
};
use coracle_hypervisor_testing::stand_in::Guest;

const AFTER: &str = "The requested operation is not supported after starting the microVM.";
const BEFORE: &str = "The requested operation is not supported before starting the microVM.";

type Answer = Result<Option<Value>, String>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    NotStarted,
    Running,
    Paused,
}

/// MicroVM of the process, with its configuration and guest.
#[derive(Debug)]
pub(crate) struct Machine {
    id: String,
    phase: Phase,
    /// Configuration, by the last segments of the request path; a snapshot consists of this and the progress of the guest.
    config: BTreeMap<String, Value>,
    mmds: Value,
    guest: Guest,
    once: [bool; 2],
}

impl Machine {
    pub(crate) fn new(id: String) -> Self {
        Self {
            id,
            phase: Phase::NotStarted,
            config: BTreeMap::new(),
            mmds: Value::Null,
            guest: Guest::new(),
            once: [false; 2],
        }
    }

    /// Handles one request.
    pub(crate) fn handle(&mut self, method: &str, path: &str, body: &[u8]) -> Answer {
        let parts: Vec<_> = path.trim_matches('/').split('/').collect();
        match (method, parts.as_slice()) {
            ("GET", [""]) => Ok(Some(json!({
                "id": self.id, "vmm_version": "1.16.0", "app_name": "Firecracker",
                "state": match self.phase { Phase::NotStarted => "Not started", Phase::Running => "Running", Phase::Paused => "Paused" },
            }))),
            ("GET", ["version"]) => Ok(Some(json!({"firecracker_version": "1.16.0"}))),
            ("GET", ["vm", "config"]) => Ok(Some(json!(self.config))),
            ("GET", ["mmds"]) => Ok(Some(self.mmds.clone())),
            ("GET", ["machine-config"]) => Ok(Some(self.machine_config())),
            ("GET", ["balloon"] | ["balloon", "statistics"] | ["hotplug", "memory"]) => self
                .config
                .get(&parts.join("/").replace("/statistics", ""))
                .cloned()
                .map(Some)
                .ok_or_else(|| "Device not found.".into()),
            ("PUT", ["actions"]) => self.act(parse::<Action>(body)?.action_type),
            ("PATCH", ["vm"]) => self.set_state(parse::<VmState>(body)?.state),
            ("PUT", ["snapshot", "create"]) => self.save(&parse(body)?),
            ("PUT", ["snapshot", "load"]) => self.load(&parse(body)?),
            ("PUT" | "PATCH", ["mmds"]) => {
                let data: Value = parse(body)?;
                if method == "PUT" {
                    self.mmds = data
                } else {
                    merge(&mut self.mmds, data)
                }
                Ok(None)
            }
            ("PUT", ["logger"]) => parse::<Logger>(body).and_then(|_| self.only_once(0, "logger")),
            ("PUT", ["metrics"]) => parse::<Metrics>(body).and_then(|_| self.only_once(1, "metrics")),
            ("PUT" | "PATCH", _) => self.configure(method, &parts, body),
            ("DELETE", ["drives" | "pmem" | "network-interfaces", _]) => self.unplug(&parts.join("/")),
            _ => Err(format!("Invalid request method and/or path: {method} {path}.")),
        }
    }

    fn configure(&mut self, method: &str, parts: &[&str], body: &[u8]) -> Answer {
        let before = method == "PUT" || matches!(parts, ["machine-config"]);
        let known = match (method, parts) {
            ("PUT", ["boot-source"]) => check::<BootSource>(body, |_| Ok(())),
            ("PUT", ["machine-config"]) => check::<MachineConfig>(body, |m| {
                match m.vcpu_count {
                1..=32 if m.smt != Some(true) || m.vcpu_count % 2 == 0 || m.vcpu_count == 1 => Ok(()),
                _ => Err("The vCPU number is invalid! The vCPU number can only be 1 or an even number when SMT is enabled.".into()),
            }
            }),
            ("PATCH", ["machine-config"]) => parse::<Value>(body).map(drop),
            ("PUT", ["cpu-config"]) => check::<CpuConfig>(body, |_| Ok(())),
            ("PUT", ["drives", id]) => check::<Drive>(body, |d| {
                same_id(id, &d.drive_id)?;
                if d.socket.is_none()
                    && d.path_on_host.as_deref().is_none_or(|p| std::fs::metadata(p).is_err())
                {
                    return Err("Unable to create the virtio block device: Virtio backend error: Error manipulating the backing file: No such file or directory (os error 2)".into());
                }
                Ok(())
            }),
            ("PATCH", ["drives", id]) => check::<DrivePatch>(body, |d| {
                same_id(id, &d.drive_id)?;
                match d.path_on_host.as_deref().map(std::fs::metadata) {
                    Some(Err(e)) => Err(format!("Unable to patch the block device: {e}")),
                    _ => Ok(()),
                }
            }),
            ("PUT", ["network-interfaces", id]) => check::<Nic>(body, |n| same_id(id, &n.iface_id)),
            ("PATCH", ["network-interfaces", id]) => check::<NicPatch>(body, |n| same_id(id, &n.iface_id)),
            // The API description requires a guest CID of at least 3; Firecracker 1.17 accepts any.
            ("PUT", ["vsock"]) => check::<Vsock>(body, |_| Ok(())),
            ("PUT", ["balloon"]) => check::<Balloon>(body, |_| Ok(())),
            ("PATCH", ["balloon"]) => check::<BalloonPatch>(body, |_| Ok(())),
            ("PATCH", ["balloon", "statistics"]) => check::<BalloonStats>(body, |_| Ok(())),
            ("PUT", ["entropy"]) => check::<Entropy>(body, |_| Ok(())),
            ("PUT", ["serial"]) => check::<Serial>(body, |_| Ok(())),
            ("PUT", ["pmem", id]) => check::<Pmem>(body, |p| same_id(id, &p.id)),
            ("PUT", ["hotplug", "memory"]) => check::<HotplugMemory>(body, |m| {
                let block = m.block_size_mib.unwrap_or(2);
                if m.slot_size_mib.unwrap_or(128) < 128 || block < 2 || !block.is_power_of_two() {
                    return Err("Memory hotplug: invalid slot or block size".into());
                }
                Ok(())
            }),
            ("PATCH", ["hotplug", "memory"]) => check::<HotplugPatch>(body, |_| Ok(())),
            ("PUT", ["mmds", "config"]) => {
                let nics = self
                    .config
                    .keys()
                    .filter_map(|k| k.strip_prefix("network-interfaces/"))
                    .collect::<Vec<_>>();
                check::<MmdsConfig>(body, |m| {
                    match m.network_interfaces.iter().all(|n| nics.contains(&n.as_str())) {
                    true if !m.network_interfaces.is_empty() => Ok(()),
                    _ => Err("The list of network interface IDs provided contains at least one ID that does not correspond to any existing network interface.".into()),
                }
                })
            }
            _ => return Err(format!("Invalid request method and/or path: {method} /{}.", parts.join("/"))),
        };
        match (before, self.phase) {
            (true, Phase::Running | Phase::Paused) => return Err(AFTER.into()),
            (false, Phase::NotStarted) => return Err(BEFORE.into()),
            _ => known?,
        }
        let key = parts.join("/");
        if method == "PATCH"
            && !self.config.contains_key(parts.join("/").trim_end_matches("/statistics"))
            && key != "machine-config"
        {
            return Err("Device not found.".into());
        }
        merge(self.config.entry(key).or_insert(Value::Null), parse(body)?);
        Ok(None)
    }

    fn machine_config(&self) -> Value {
        let mut all = json!({"vcpu_count": 1, "mem_size_mib": 128, "smt": false, "track_dirty_pages": false, "huge_pages": "None"});
        merge(&mut all, self.config.get("machine-config").cloned().unwrap_or(json!({})));
        all
    }

    fn only_once(&mut self, which: usize, what: &str) -> Answer {
        match self.once.get_mut(which) {
            Some(done) if !*done => {
                *done = true;
                Ok(None)
            }
            _ => Err(format!("Could not initialize {what} system: already initialized")),
        }
    }

    fn act(&mut self, action: ActionType) -> Answer {
        match (action, self.phase) {
            (ActionType::FlushMetrics, _) if !self.once[1] => {
                Err("Failed to flush metrics: Metrics are not initialized".into())
            }
            (ActionType::FlushMetrics, _) => Ok(None),
            (ActionType::SendCtrlAltDel, Phase::NotStarted) => Err(BEFORE.into()),
            (ActionType::SendCtrlAltDel, _) => Ok(None),
            (ActionType::InstanceStart, Phase::NotStarted) => self.start(),
            (ActionType::InstanceStart, _) => Err(AFTER.into()),
        }
    }

    fn start(&mut self) -> Answer {
        let kernel = self.config.get("boot-source").and_then(|b| b.get("kernel_image_path"));
        let kernel =
            kernel.and_then(Value::as_str).ok_or("Cannot start microvm without kernel configuration.")?;
        std::fs::metadata(kernel).map_err(|e| format!("Kernel file cannot be opened: {e}"))?;
        self.open_vsock()?;
        self.phase = Phase::Running;
        self.guest.run(true);
        let mut out = std::io::stdout();
        let _full = out.write_all(b"coracle-guest: version fake up\r\n").and_then(|()| out.flush());
        Ok(None)
    }

    fn open_vsock(&self) -> Result<(), String> {
        let path = self.config.get("vsock").and_then(|v| v.get("uds_path")).and_then(Value::as_str);
        path.map_or(Ok(()), |p| {
            self.guest.listen(p).map_err(|e| format!("Error binding to the host-side Unix socket: {e}"))
        })
    }

    fn set_state(&mut self, state: State) -> Answer {
        if self.phase == Phase::NotStarted {
            return Err(BEFORE.into());
        }
        self.phase = if state == State::Paused { Phase::Paused } else { Phase::Running };
        self.guest.run(state == State::Resumed);
        Ok(None)
    }

    fn unplug(&mut self, key: &str) -> Answer {
        match self.phase {
            Phase::NotStarted => Err(BEFORE.into()),
            _ if self.config.remove(key).is_none() => Err("Device not found.".into()),
            _ => Ok(None),
        }
    }

    fn save(&mut self, to: &SnapshotCreate) -> Answer {
        match self.phase {
            Phase::NotStarted => return Err(BEFORE.into()),
            Phase::Running => {
                return Err("Create snapshot error: Cannot save a running microVM: pause it first".into());
            }
            Phase::Paused => {}
        }
        let io = |e: std::io::Error| format!("Create snapshot error: Cannot open the snapshot file: {e}");
        let state = json!({"format": "v8.0.0", "config": self.config, "guest": self.guest.save()});
        let mut file = File::create(&to.snapshot_path).map_err(io)?;
        file.write_all(state.to_string().as_bytes()).map_err(io)?;
        let mib = self.machine_config().get("mem_size_mib").and_then(Value::as_u64).unwrap_or(128);
        let memory = File::create(&to.mem_file_path).map_err(io)?;
        memory.set_len(mib << 20).map_err(io)?;
        memory.write_all_at(self.guest.save().as_bytes(), 4096).map_err(io)?;
        Ok(None)
    }

    /// Loads a snapshot, only in a process without a microVM; drives are opened at the recorded paths.
    fn load(&mut self, from: &SnapshotLoad) -> Answer {
        let fail = |why: String| format!("Load snapshot error: {why}");
        if self.phase != Phase::NotStarted || !self.config.is_empty() {
            return Err(fail(
                "Loading a microVM snapshot not allowed after configuring boot-specific resources.".into(),
            ));
        }
        let memory = match (&from.mem_backend, &from.mem_file_path) {
            (Some(backend), None) if backend.backend_type == BackendType::File => &backend.backend_path,
            (Some(_), None) => return Err(fail("no page fault handler listens".into())),
            (None, Some(path)) => path,
            _ => return Err(fail("exactly one of mem_backend and mem_file_path is needed".into())),
        };
        let state = std::fs::read(&from.snapshot_path).map_err(|e| fail(e.to_string()))?;
        let state: Value = serde_json::from_slice(&state).map_err(|e| fail(format!("invalid state: {e}")))?;
        let config =
            state.get("config").and_then(Value::as_object).ok_or_else(|| fail("invalid state".into()))?;
        let guest = state.get("guest").and_then(Value::as_str).and_then(Guest::after);
        let guest = guest.ok_or_else(|| fail("invalid state".into()))?;
        self.config = config.clone().into_iter().collect();
        let mib = self.machine_config().get("mem_size_mib").and_then(Value::as_u64).unwrap_or(128);
        let length = std::fs::metadata(memory).map_err(|e| fail(e.to_string()))?.len();
        if length != mib << 20 {
            return Err(fail(format!("the memory file has {length} bytes")));
        }
        for over in from.network_overrides.iter().flatten() {
            let nic = self.config.get_mut(&format!("network-interfaces/{}", over.iface_id));
            let nic = nic.ok_or_else(|| fail(format!("Unknown Network Device: {}", over.iface_id)))?;
            merge(nic, json!({"host_dev_name": over.host_dev_name}));
        }
        if let (Some(over), Some(vsock)) = (&from.vsock_override, self.config.get_mut("vsock")) {
            merge(vsock, json!({"uds_path": over.uds_path}));
        }
        for (key, drive) in self.config.iter().filter(|(key, _)| key.starts_with("drives/")) {
            let path = drive.get("path_on_host").and_then(Value::as_str).unwrap_or_default();
            std::fs::metadata(path).map_err(|e| fail(format!("{key}: {e}")))?;
        }
        self.guest = guest;
        self.open_vsock().map_err(fail)?;
        self.phase = Phase::Paused;
        if from.resume_vm == Some(true) { self.set_state(State::Resumed) } else { Ok(None) }
    }
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    serde_json::from_slice(body)
        .map_err(|e| format!("An error occurred when deserializing the json body of a request: {e}."))
}

fn check<T: DeserializeOwned>(
    body: &[u8],
    rule: impl FnOnce(&T) -> Result<(), String>,
) -> Result<(), String> {
    parse::<T>(body).and_then(|body| rule(&body))
}

fn same_id(path: &str, body: &str) -> Result<(), String> {
    if path == body {
        return Ok(());
    }
    Err(format!("The id from the path [{path}] does not match the id from the body [{body}]!"))
}

/// Applies a merge patch (RFC 7396).
fn merge(target: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *target = patch;
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Some(target) = target.as_object_mut() else { return };
    for (key, value) in patch {
        match value {
            Value::Null => drop(target.remove(&key)),
            value => merge(target.entry(key).or_insert(Value::Null), value),
        }
    }
}
