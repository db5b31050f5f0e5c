//! Networks made by CNI plugins: a network namespace per VM, in which a list of plugins makes an interface, and the VM's tap
//! joined to that interface (CNI specification 1.0, sections 1 to 5).
//!
//! ```text
//! guest ─ tap ct<12 hex> ═ veth cv<12 hex> │ cp<12 hex> ═ eth0 ─ what the plugins made     ═ redirected frame by frame
//!                  network of the node     │     network namespace /run/netns/cor<6 hex>-<12 hex>
//! ```
//! The tap stays in the network namespace of the node, so that every driver opens it as usual. A request is recorded before any
//! plugin runs: after a crash [`Cni::collect`] undoes what belongs to no VM.

mod cache;
mod conf;
mod error;
mod exec;
mod join;
mod netns;
mod network;
mod result;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_types::{InstanceId, MacAddr, VmId};
use serde_json::Value;

use self::cache::{Cache, Entry};
pub use self::conf::{Bandwidth, NetworkRequest};
use self::conf::{Call, ConfList, INTERFACE};
pub use self::error::CniError;
use self::exec::{Execution, run};
pub use self::network::CniNetwork;
pub use self::result::{CniAddresses, CniIpv6, Dns, Route};
use crate::bridge::suffix;

/// Time limit of one plugin call.
const DEADLINE: Duration = Duration::from_secs(30);

/// CNI plugins of a node, and the networks that they made for its VMs.
#[derive(Debug)]
pub struct Cni {
    conf_dir: PathBuf,
    bin_dir: PathBuf,
    cache: Cache,
    /// Digits of the hash of the state directory, part of namespace names.
    node: String,
    deadline: Duration,
}

impl Cni {
    /// Uses the network configurations in `conf_dir` and the plugins in `bin_dir`. Keeps its records below `state_dir`.
    #[must_use]
    pub fn new(conf_dir: PathBuf, bin_dir: PathBuf, state_dir: &Path) -> Self {
        let (cache, node) = (Cache::new(state_dir.join("cni")), suffix(state_dir));
        Self { conf_dir, bin_dir, cache, node, deadline: DEADLINE }
    }

    /// Network namespace of a VM.
    #[must_use]
    pub fn netns(&self, id: &VmId) -> PathBuf {
        netns::path(&self.node, id)
    }

    /// Changes the time limit of one plugin call.
    #[must_use]
    pub fn with_deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// Makes the network of a VM: a namespace, and in it an interface made by ADD of each plugin. Returns the recorded result
    /// if the network exists. Makes the network again, with the same address, if its namespace is gone after a restart of the
    /// host. A failure leaves nothing behind.
    ///
    /// # Errors
    /// [`CniError`].
    pub async fn add(&self, id: &VmId, request: &NetworkRequest) -> Result<CniAddresses, CniError> {
        let before = match self.cache.read(id)? {
            Some(entry) if entry.result.is_some() && netns::exists(&entry.netns) => {
                return self.addresses(&entry);
            }
            // An earlier call was interrupted, or the host was restarted.
            Some(entry) => {
                self.undo(id, &entry).await?;
                Some(entry)
            }
            None => None,
        };
        let name = before.as_ref().map(|entry| entry.conf.name.as_str());
        let conf = ConfList::load(&self.conf_dir, request.network.as_deref().or(name))?;
        let mut runtime = conf.runtime(request)?;
        if request.bandwidth.is_none()
            && let Some(limits) = before.and_then(|entry| entry.runtime.get(conf::BANDWIDTH).cloned())
        {
            runtime[conf::BANDWIDTH] = limits;
        }
        let netns = self.netns(id);
        let entry = Entry {
            conf,
            netns: netns.clone(),
            runtime,
            mac: request.mac.to_string(),
            result: None,
            mtu: None,
        };
        self.cache.write(id, &entry)?;
        let made = self.make(id, &entry).await;
        match made {
            Ok((result, mtu)) => {
                let entry = Entry { result: Some(result), mtu: Some(mtu), ..entry };
                self.cache.write(id, &entry)?;
                self.addresses(&entry)
            }
            Err(error) => {
                if let Err(undo) = self.undo(id, &entry).await {
                    tracing::warn!(vm = %id, error = %undo, "remove the network of a VM failed");
                }
                Err(error)
            }
        }
    }

    async fn make(&self, id: &VmId, entry: &Entry) -> Result<(Value, u32), CniError> {
        netns::make(&entry.netns)?;
        let mut previous = None;
        for plugin in &entry.conf.plugins {
            let output = self.call(id, entry, plugin, "ADD", previous.as_ref()).await?;
            let reason = |reason: String| CniError::Answer {
                plugin: conf::type_of(plugin).to_owned(),
                command: "ADD",
                reason,
            };
            previous = Some(serde_json::from_slice(&output).map_err(|error| reason(error.to_string()))?);
        }
        let result = previous.unwrap_or_default();
        CniAddresses::parse(&result).map_err(|reason| self.invalid_result(reason))?;
        Ok((result, join::mtu(&entry.netns).await?))
    }

    /// Addresses that a guest gets from a completed entry.
    fn addresses(&self, entry: &Entry) -> Result<CniAddresses, CniError> {
        let result = entry.result.as_ref().unwrap_or(&Value::Null);
        let addresses = CniAddresses::parse(result).map_err(|reason| self.invalid_result(reason))?;
        Ok(CniAddresses { mtu: entry.mtu, ..addresses })
    }

    fn invalid_result(&self, reason: String) -> CniError {
        CniError::Answer { plugin: "list".to_owned(), command: "ADD", reason }
    }

    /// Runs CHECK of each plugin: is the network of a VM still as the plugins made it?
    ///
    /// # Errors
    /// [`CniError`], also for a VM without a network.
    pub async fn check(&self, id: &VmId) -> Result<(), CniError> {
        let not_found = || CniError::NotFound { name: id.to_string(), dir: self.conf_dir.clone() };
        let entry = self.cache.read(id)?.ok_or_else(not_found)?;
        if !entry.conf.disable_check {
            for plugin in &entry.conf.plugins {
                self.call(id, &entry, plugin, "CHECK", entry.result.as_ref()).await?;
            }
        }
        Ok(())
    }

    /// Removes the network of a VM by DEL of each plugin in reverse order. Idempotent; the next call repeats a DEL that failed.
    ///
    /// # Errors
    /// [`CniError`].
    pub async fn del(&self, id: &VmId) -> Result<(), CniError> {
        match self.cache.read(id)? {
            Some(entry) => self.undo(id, &entry).await,
            None => Ok(()),
        }
    }

    /// Calls every plugin, even after one that failed. The namespace is removed in any case; the entry stays if a plugin
    /// failed.
    async fn undo(&self, id: &VmId, entry: &Entry) -> Result<(), CniError> {
        let mut outcome = Ok(());
        for plugin in entry.conf.plugins.iter().rev() {
            let deleted = self.call(id, entry, plugin, "DEL", entry.result.as_ref()).await;
            outcome = outcome.and(deleted.map(drop));
        }
        netns::remove(&entry.netns)?;
        outcome?;
        self.cache.remove(id)
    }

    /// Removes the networks of all VMs that are not in `keep`, and returns the ids of those VMs. Plugins of version 1.1 are
    /// also asked to collect what they hold for other VMs (GC).
    ///
    /// # Errors
    /// [`CniError`], after all networks were tried.
    pub async fn collect(&self, keep: &HashSet<VmId>) -> Result<Vec<VmId>, CniError> {
        let mut outcome = Ok(());
        let mut removed = Vec::new();
        for id in self.cache.ids()?.into_iter().filter(|id| !keep.contains(id)) {
            match self.del(&id).await {
                Ok(()) => removed.push(id),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        if let Ok(conf) = ConfList::load(&self.conf_dir, None)
            && conf.has_gc()
        {
            let valid: Vec<_> = self.cache.ids()?.iter().map(conf::attachment).collect();
            for plugin in &conf.plugins {
                let input = conf.gc(plugin, &valid);
                let call = Call { command: "GC", id: "", netns: "", interface: "", args: String::new() };
                outcome = outcome.and(self.exec(plugin, &call, &input).await.map(drop));
            }
        }
        outcome.map(|()| removed)
    }

    /// Asks each plugin of a network for its versions: the version of the configuration must be among them.
    ///
    /// # Errors
    /// [`CniError`].
    pub async fn verify(&self, network: Option<&str>) -> Result<(), CniError> {
        let conf = ConfList::load(&self.conf_dir, network)?;
        for plugin in &conf.plugins {
            let call = Call { command: "VERSION", id: "", netns: "", interface: "", args: String::new() };
            let input = serde_json::json!({"cniVersion": conf.version});
            let output = self.exec(plugin, &call, &input).await?;
            let answer: Value = serde_json::from_slice(&output).unwrap_or_default();
            let versions = answer["supportedVersions"].as_array().cloned().unwrap_or_default();
            if !versions.iter().any(|version| *version == conf.version) {
                let reason =
                    format!("it does not support version {} of the network {}", conf.version, conf.name);
                let plugin = conf::type_of(plugin).to_owned();
                return Err(CniError::Answer { plugin, command: "VERSION", reason });
            }
        }
        Ok(())
    }

    /// Joins the tap of an instance to the network of a VM and sets the MTU of that network. Idempotent.
    ///
    /// # Errors
    /// [`CniError`].
    pub async fn join(&self, id: &VmId, instance: &InstanceId) -> Result<(), CniError> {
        join::join(&self.netns(id), instance).await
    }

    /// Disconnects the tap of an instance from its network. Idempotent.
    ///
    /// # Errors
    /// [`CniError`].
    pub async fn disconnect(&self, instance: &InstanceId) -> Result<(), CniError> {
        self.disconnect_tap(&instance.tap_name()).await
    }

    async fn disconnect_tap(&self, tap: &str) -> Result<(), CniError> {
        join::disconnect(tap).await
    }

    /// Recorded addresses of a VM, without a call of its plugins.
    fn cached_addresses(&self, id: &VmId) -> Result<Option<CniAddresses>, CniError> {
        let made = self.cache.read(id)?.filter(|entry| entry.result.is_some());
        made.map(|entry| self.addresses(&entry)).transpose()
    }

    /// Returns the VM whose NIC has this MAC.
    fn with_mac(&self, mac: MacAddr) -> Result<Option<VmId>, CniError> {
        let text = mac.to_string();
        for id in self.cache.ids()? {
            if self.cache.read(&id)?.is_some_and(|entry| entry.mac == text) {
                return Ok(Some(id));
            }
        }
        Ok(None)
    }

    /// Directory of the network configurations.
    fn dir(&self) -> &Path {
        &self.conf_dir
    }

    async fn call(
        &self,
        id: &VmId,
        entry: &Entry,
        plugin: &Value,
        command: &'static str,
        previous: Option<&Value>,
    ) -> Result<Vec<u8>, CniError> {
        let input = entry.conf.input(plugin, &entry.runtime, previous);
        let netns = entry.netns.to_string_lossy();
        // DEL works without a namespace that is gone (section 4, "Runtime responsibilities").
        let netns = if command == "DEL" && !netns::exists(&entry.netns) { "" } else { &*netns };
        let args = conf::args(&entry.mac, &entry.runtime);
        self.exec(plugin, &Call { command, id: id.as_str(), netns, interface: INTERFACE, args }, &input).await
    }

    async fn exec(&self, plugin: &Value, call: &Call<'_>, input: &Value) -> Result<Vec<u8>, CniError> {
        let plugin = conf::type_of(plugin);
        run(&Execution { plugin, dir: &self.bin_dir, call, input, deadline: self.deadline }).await
    }
}
