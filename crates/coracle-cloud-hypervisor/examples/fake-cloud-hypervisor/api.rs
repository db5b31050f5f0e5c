//! Rules of the API: which requests are accepted in which state, and the status of refusals (those of version 53).

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use coracle_hypervisor_testing::stand_in::Guest;

/// Refusal: status and reason.
type Refusal = (u16, String);
type Answer = Result<Option<Value>, Refusal>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Created,
    Running,
    Paused,
    Shutdown,
}

/// Sections of a VM's configuration.
const SECTIONS: [&str; 26] = [
    "payload",
    "cpus",
    "memory",
    "disks",
    "net",
    "rng",
    "vsock",
    "fs",
    "balloon",
    "serial",
    "console",
    "pmem",
    "devices",
    "platform",
    "watchdog",
    "pvpanic",
    "landlock_enable",
    "landlock_rules",
    "iommu",
    "rate_limit_groups",
    "debug_console",
    "user_devices",
    "vdpa",
    "sgx_epc",
    "numa",
    "rtc",
];
/// Lists of devices that can be extended, by the name in the call.
const LISTS: [(&str, &str); 7] = [
    ("disk", "disks"),
    ("net", "net"),
    ("fs", "fs"),
    ("pmem", "pmem"),
    ("device", "devices"),
    ("user-device", "user_devices"),
    ("vdpa", "vdpa"),
];

/// Process with at most one VM.
#[derive(Debug)]
pub(crate) struct Machine {
    state: Option<State>,
    config: Map<String, Value>,
    guest: Guest,
    events: Option<File>,
}

impl Machine {
    pub(crate) fn new(events: Option<File>) -> Self {
        Self { state: None, config: Map::new(), guest: Guest::new(), events }
    }

    /// Handles one request.
    pub(crate) fn handle(&mut self, method: &str, path: &str, body: &[u8]) -> Answer {
        let Some(call) = path.strip_prefix("/api/v1/") else { return Err((404, "no such path".into())) };
        let has_body = !body.is_empty();
        match (method, call) {
            ("GET", "vmm.ping") => Ok(Some(
                json!({"version": "v53.0.0", "build_version": "v53.0.0", "pid": std::process::id(), "features": ["kvm"]}),
            )),
            ("GET", "vm.info") => self.info().map(Some),
            // Without a VM the error of this call has no status of its own, unlike those of other calls.
            ("GET", "vm.counters") => {
                self.check_created().map(|()| Some(json!({}))).map_err(|(_, message)| (500, message))
            }
            ("PUT", _) if is_bare(call) && has_body => Err((400, "this call takes no body".into())),
            ("PUT", "vm.boot") => self.boot(),
            ("PUT", "vm.pause") => self.hold(State::Running, State::Paused, "paused"),
            ("PUT", "vm.resume") => self.hold(State::Paused, State::Running, "resumed"),
            ("PUT", "vm.shutdown") => self.stop(),
            ("PUT", "vm.delete") => self.delete(),
            ("PUT", "vm.reboot" | "vm.power-button" | "vm.nmi") => self.check_running().map(|()| None),
            ("PUT", _) => self.change(call, &parse(body)?),
            _ => Err((404, format!("no such call: {method} {call}"))),
        }
    }

    fn change(&mut self, call: &str, body: &Map<String, Value>) -> Answer {
        match call {
            "vm.create" => self.create(body.clone()),
            "vm.resize" => self.fields(body, &["desired_vcpus", "desired_ram", "desired_balloon"]),
            "vm.resize-disk" => self.fields(body, &["id", "desired_size"]),
            "vm.resize-zone" => self.fields(body, &["id", "desired_ram"]),
            "vm.coredump" => self.fields(body, &["destination_url"]),
            "vm.snapshot" => self.save(&folder(body, "destination_url")?),
            "vm.restore" => self.restore(body),
            "vm.remove-device" => self.unplug(body),
            "vm.send-migration" => {
                self.fields(body, &["destination_url", "local", "downtime_ms", "timeout_s"])
            }
            "vm.receive-migration" => match self.state {
                None => check_fields(body, &["receiver_url", "tls_dir", "memory_mode"]).map(|()| None),
                Some(_) => Err((500, "a machine is there".into())),
            },
            _ => match call.strip_prefix("vm.add-") {
                Some("vsock") => self.check_created().map(|()| {
                    self.config.insert("vsock".into(), json!(body));
                    Some(json!({"id": "vsock", "bdf": "0000:00:07.0"}))
                }),
                Some(kind) => self.plug(kind, body),
                None => Err((404, format!("no such call: {call}"))),
            },
        }
    }

    fn check_created(&self) -> Result<(), Refusal> {
        self.state.map(drop).ok_or_else(|| (404, "The VM is not created".to_owned()))
    }

    fn check_running(&self) -> Result<(), Refusal> {
        self.check_created()?;
        match self.state {
            Some(State::Running | State::Paused) => Ok(()),
            _ => Err((500, "The VM is not running".into())),
        }
    }

    fn info(&self) -> Result<Value, Refusal> {
        self.check_created()?;
        let state = self.state.map(|state| format!("{state:?}"));
        Ok(
            json!({"config": self.config, "state": state, "memory_actual_size": self.config["memory"]["size"], "device_tree": {}}),
        )
    }

    fn create(&mut self, config: Map<String, Value>) -> Answer {
        if self.state.is_some() {
            return Err((500, "The VM is already created".into()));
        }
        check_fields(&config, &SECTIONS)?;
        let payload = config
            .get("payload")
            .and_then(Value::as_object)
            .ok_or((400, "missing field `payload`".to_owned()))?;
        if !payload.contains_key("kernel") && !payload.contains_key("firmware") {
            return Err((400, "Kernel is missing".into()));
        }
        self.config = config;
        self.state = Some(State::Created);
        Ok(None)
    }

    fn boot(&mut self) -> Answer {
        self.check_created()?;
        if self.state == Some(State::Running) {
            return Err((500, "The VM is already running".into()));
        }
        let kernel = self.config["payload"]["kernel"].as_str().unwrap_or_default();
        fs::metadata(kernel).map_err(|e| (500, format!("Cannot open kernel file: {e}")))?;
        self.open()?;
        self.write_event("vm", "booting");
        self.guest.run(true);
        self.state = Some(State::Running);
        self.write_event("vm", "booted");
        Ok(None)
    }

    /// Opens the files of the configuration: disks, and the sockets of vsock and serial console.
    fn open(&self) -> Result<(), Refusal> {
        let none = Vec::new();
        for disk in self.config.get("disks").and_then(Value::as_array).unwrap_or(&none) {
            let path = disk["path"].as_str().unwrap_or_default();
            fs::metadata(path).map_err(|e| (500, format!("Cannot open disk path {path}: {e}")))?;
        }
        let failed = |e: std::io::Error| (500, format!("Cannot bind socket: {e}"));
        if let Some(socket) = self.config.get("vsock").and_then(|v| v["socket"].as_str()) {
            self.guest.listen(socket).map_err(failed)?;
        }
        if let Some(socket) = self.config.get("serial").and_then(|s| s["socket"].as_str()) {
            let listener = UnixListener::bind(socket).map_err(failed)?;
            std::thread::spawn(move || {
                let mut readers = Vec::new();
                for mut reader in listener.incoming().flatten() {
                    let _gone = reader.write_all(b"coracle-guest: version fake up\r\n");
                    readers.push(reader);
                }
            });
        }
        Ok(())
    }

    fn hold(&mut self, from: State, to: State, event: &str) -> Answer {
        self.check_created()?;
        if self.state != Some(from) {
            return Err((500, "VM state transition is invalid".into()));
        }
        self.state = Some(to);
        self.guest.run(to == State::Running);
        self.write_event("vm", event);
        Ok(None)
    }

    fn stop(&mut self) -> Answer {
        self.check_running()?;
        self.guest.run(false);
        self.state = Some(State::Shutdown);
        self.write_event("vm", "shutdown");
        Ok(None)
    }

    fn delete(&mut self) -> Answer {
        self.check_created()?;
        self.guest.run(false);
        self.state = None;
        self.config.clear();
        self.write_event("vm", "deleted");
        Ok(None)
    }

    fn fields(&self, body: &Map<String, Value>, allowed: &[&str]) -> Answer {
        check_fields(body, allowed)?;
        self.check_running().map(|()| None)
    }

    fn plug(&mut self, kind: &str, body: &Map<String, Value>) -> Answer {
        self.check_created()?;
        let list = LISTS
            .iter()
            .find(|(word, _)| *word == kind)
            .ok_or((404, format!("no such call: vm.add-{kind}")))?
            .1;
        let id = body.get("id").and_then(Value::as_str).unwrap_or("_device0").to_owned();
        let there =
            self.config.values().filter_map(Value::as_array).flatten().any(|d| d["id"] == id.as_str());
        if there {
            return Err((409, format!("Identifier {id} is not unique")));
        }
        let disk = body.get("path").and_then(Value::as_str).filter(|_| kind == "disk");
        if let Some(path) = disk {
            fs::metadata(path).map_err(|e| (500, format!("Cannot open disk path: {e}")))?;
        }
        if let Value::Array(all) = self.config.entry(list).or_insert(json!([])) {
            all.push(json!(body));
        }
        let hot = self.state == Some(State::Running) || self.state == Some(State::Paused);
        Ok(hot.then(|| json!({"id": id, "bdf": "0000:00:06.0"})))
    }

    fn unplug(&mut self, body: &Map<String, Value>) -> Answer {
        self.check_created()?;
        let id = body.get("id").and_then(Value::as_str).ok_or((400, "missing field `id`".to_owned()))?;
        for list in self.config.values_mut().filter_map(Value::as_array_mut) {
            if let Some(at) = list.iter().position(|device| device["id"] == id) {
                list.remove(at);
                return Ok(None);
            }
        }
        Err((404, format!("The device {id} does not exist")))
    }

    fn save(&mut self, folder: &Path) -> Answer {
        self.check_created()?;
        if self.state != Some(State::Paused) {
            return Err((500, "The VM must be paused".into()));
        }
        let failed = |e: std::io::Error| (500, format!("Cannot save: {e}"));
        fs::write(folder.join("config.json"), json!(self.config).to_string()).map_err(failed)?;
        fs::write(folder.join("state.json"), json!({"guest": self.guest.save()}).to_string())
            .map_err(failed)?;
        let ranges = File::create(folder.join("memory-ranges")).map_err(failed)?;
        ranges.set_len(self.config["memory"]["size"].as_u64().unwrap_or_default()).map_err(failed)?;
        ranges.write_all_at(b"memory", 4096).map_err(failed)?;
        self.write_event("vm", "snapshotted");
        Ok(None)
    }

    fn restore(&mut self, body: &Map<String, Value>) -> Answer {
        check_fields(
            body,
            &["source_url", "prefault", "memory_restore_mode", "resume", "net_fds", "zone_updates"],
        )?;
        let folder = folder(body, "source_url")?;
        if self.state.is_some() {
            return Err((500, "The VM is already created".into()));
        }
        let read = |name: &str| -> Result<Value, Refusal> {
            let bytes =
                fs::read(folder.join(name)).map_err(|e| (500, format!("Cannot restore: {name}: {e}")))?;
            serde_json::from_slice(&bytes).map_err(|e| (500, format!("Cannot restore: {name}: {e}")))
        };
        let (config, state) = (read("config.json")?, read("state.json")?);
        let config = config.as_object().cloned().ok_or((500, "Cannot restore: config.json".to_owned()))?;
        check_fields(&config, &SECTIONS)?;
        let memory =
            fs::metadata(folder.join("memory-ranges")).map_err(|e| (500, format!("Cannot restore: {e}")))?;
        if Some(memory.len()) != config["memory"]["size"].as_u64() {
            return Err((500, "Cannot restore: memory-ranges".into()));
        }
        self.config = config;
        let guest = state["guest"].as_str().and_then(Guest::after);
        self.guest = guest.ok_or((500, "Cannot restore: state.json".to_owned()))?;
        self.open()?;
        self.state = Some(State::Paused);
        self.write_event("vm", "restored");
        if body.get("resume") == Some(&json!(true)) {
            self.hold(State::Paused, State::Running, "resumed")
        } else {
            Ok(None)
        }
    }

    /// Writes an event like `--event-monitor`: pretty-printed, without a separator.
    fn write_event(&self, source: &str, event: &str) {
        let Some(mut file) = self.events.as_ref() else { return };
        let told = json!({"timestamp": {"secs": 0, "nanos": 0}, "source": source, "event": event, "properties": null});
        let text = serde_json::to_string_pretty(&told).unwrap_or_default();
        let _full = file.write_all(text.as_bytes());
    }
}

/// Returns whether a call has no body.
fn is_bare(call: &str) -> bool {
    let bare = ["boot", "pause", "resume", "shutdown", "delete", "reboot", "power-button", "nmi"];
    call.strip_prefix("vm.").is_some_and(|call| bare.contains(&call))
}

fn parse(body: &[u8]) -> Result<Map<String, Value>, Refusal> {
    serde_json::from_slice(body).map_err(|e| (400, format!("invalid body: {e}")))
}

fn check_fields(body: &Map<String, Value>, allowed: &[&str]) -> Result<(), Refusal> {
    match body.keys().find(|key| !allowed.contains(&key.as_str())) {
        Some(key) => Err((400, format!("unknown field `{key}`"))),
        None => Ok(()),
    }
}

fn folder(body: &Map<String, Value>, key: &str) -> Result<PathBuf, Refusal> {
    let url = body.get(key).and_then(Value::as_str).ok_or_else(|| (400, format!("missing field `{key}`")))?;
    let path = url.strip_prefix("file://").ok_or((500, "only file:// is supported".to_owned()))?;
    let path = PathBuf::from(path);
    if path.is_dir() { Ok(path) } else { Err((500, format!("{} is not a directory", path.display()))) }
}
