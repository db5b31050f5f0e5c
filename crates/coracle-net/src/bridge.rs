//! The bridge network of one node.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use coracle_hypervisor::Forward;
use coracle_types::{InstanceId, VmId};
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::Mutex as AsyncMutex;

use crate::link::{Links, vanished};
use crate::ports::HostPorts;
use crate::rules::Rules;
use crate::{Attachment, Endpoint, GuestNic, Ipam, Lease, NetError, Network, Subnet};

/// Taps carry the digits of the instance; the prefix tells them from other programs' taps.
const TAP_PREFIX: &str = "ct";

/// A bridge, a tap per VM, masquerading and filters. Needs root.
#[derive(Debug)]
pub struct BridgeNetwork {
    name: String,
    /// File that keeps the subnet over restarts.
    path: PathBuf,
    subnet: Subnet,
    /// The file does not have this subnet yet.
    is_new: bool,
    ipam: Mutex<Ipam>,
    ports: Mutex<HostPorts>,
    links: Links,
    rules: Rules,
    /// What the filter has rules for, by tap.
    filtered: Mutex<HashMap<String, GuestNic>>,
    /// `nft` takes a lock of its own and fails when two batches collide.
    firewall: AsyncMutex<()>,
}

/// What is remembered over restarts, `<state>/network.json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Chosen {
    schema: u32,
    subnet: Subnet,
}

impl BridgeNetwork {
    /// The network of the node whose state lies in `state_dir`, on the subnet chosen at its first start: `wanted`, or
    /// the first free /24 of 10.100.0.0/16. Changes nothing: another daemon may own that state.
    ///
    /// # Errors
    /// [`NetError::NoFreeSubnet`], [`NetError::State`], [`NetError::Link`].
    pub async fn open(state_dir: &Path, wanted: Option<Subnet>) -> Result<Self, NetError> {
        let links = Links::open()?;
        let path = state_dir.join("network.json");
        let (subnet, is_new) = choose(&links, &path, wanted).await?;
        let suffix = suffix(state_dir);
        let name = format!("cor{suffix}");
        let rules = Rules::new(&suffix, &name, subnet);
        let ipam = Mutex::new(Ipam::new(subnet));
        Ok(Self {
            name,
            path,
            subnet,
            is_new,
            ipam,
            ports: Mutex::default(),
            links,
            rules,
            filtered: Mutex::default(),
            firewall: AsyncMutex::new(()),
        })
    }

    /// Name of the bridge.
    #[must_use]
    pub fn bridge(&self) -> &str {
        &self.name
    }

    /// Names of the taps on the bridge.
    async fn taps(&self) -> Result<Vec<String>, NetError> {
        let ports = Path::new("/sys/class/net").join(&self.name).join("brif");
        let names = self.links.names().await?.into_iter();
        Ok(names.filter(|name| name.starts_with(TAP_PREFIX) && ports.join(name).exists()).collect())
    }

    async fn connect(&self, id: &InstanceId, endpoint: &Endpoint) -> Result<(), NetError> {
        let Some(Lease { address, .. }) = endpoint.lease else {
            return Err(NetError::NoLease { instance: id.clone() });
        };
        let tap = id.tap_name();
        let Endpoint { mac, reach, ref ports, .. } = *endpoint;
        let guest = GuestNic { instance: id.clone(), mac, address, reach, ports: ports.clone() };
        {
            let _one_at_a_time = self.firewall.lock().await;
            let before = self.filtered.lock().insert(tap.clone(), guest.clone());
            self.rules.allow(&guest, before.as_ref()).await?;
        }
        if !ports.is_empty() {
            route_loopback(&self.name)?;
        }
        let index = self.links.ensure_tap(&tap, self.rules.group()).await?;
        let bridge = self.links.index(&self.name).await?.ok_or_else(|| vanished(&self.name))?;
        self.links.up(&tap, index, Some(bridge)).await?;
        if !ports.is_empty() {
            // Where the host filters bridged packets by its IPv4 tables, a guest that uses its own port of the node gets
            // its packet back by the bridge port that it came from (ip-link(8), `hairpin`).
            switch_on(&format!("/sys/class/net/{tap}/brport/hairpin_mode"))?;
        }
        Ok(())
    }

    fn ipam(&self) -> MutexGuard<'_, Ipam> {
        self.ipam.lock()
    }
}

/// Six hex digits of the state path: two nodes on one host do not meet.
fn suffix(state_dir: &Path) -> String {
    let mut hex = hex::encode(Sha256::digest(state_dir.as_os_str().as_encoded_bytes()));
    hex.truncate(6);
    hex
}

/// The subnet, and whether it is another one than the file has.
async fn choose(links: &Links, path: &Path, wanted: Option<Subnet>) -> Result<(Subnet, bool), NetError> {
    let state = |source| NetError::State { path: path.to_owned(), source };
    match tokio::fs::read(path).await {
        Ok(bytes) => {
            let chosen: Chosen = serde_json::from_slice(&bytes).map_err(|e| state(e.into()))?;
            if wanted.is_none_or(|w| w == chosen.subnet) {
                return Ok((chosen.subnet, false));
            }
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(state(e)),
    }
    let subnet = match wanted {
        Some(subnet) => subnet,
        None => {
            let used = links.networks().await?;
            Subnet::POOL.first_free_24(&used).ok_or(NetError::NoFreeSubnet { pool: Subnet::POOL })?
        }
    };
    Ok((subnet, true))
}

async fn keep(path: &Path, subnet: Subnet) -> Result<(), NetError> {
    let state = |source| NetError::State { path: path.to_owned(), source };
    let bytes = serde_json::to_vec(&Chosen { schema: 1, subnet }).map_err(|e| state(e.into()))?;
    let temporary = path.with_extension("json.tmp");
    tokio::fs::write(&temporary, bytes).await.map_err(state)?;
    tokio::fs::rename(&temporary, path).await.map_err(state)
}

fn enable_forwarding() -> Result<(), NetError> {
    switch_on("/proc/sys/net/ipv4/ip_forward")
}

/// Packets from the node's loopback may leave by the bridge: what connects to a port on 127.0.0.1 is led to a guest. What
/// comes from guests for these addresses is refused by their filters.
fn route_loopback(bridge: &str) -> Result<(), NetError> {
    switch_on(&format!("/proc/sys/net/ipv4/conf/{bridge}/route_localnet"))
}

fn switch_on(path: &str) -> Result<(), NetError> {
    let on = std::fs::read_to_string(path).is_ok_and(|text| text.trim() == "1");
    if on {
        return Ok(());
    }
    std::fs::write(path, "1")
        .map_err(|source| NetError::Link { operation: format!("switch on {path}"), source })
}

#[async_trait]
impl Network for BridgeNetwork {
    fn mode(&self) -> &'static str {
        "bridge"
    }

    fn subnet(&self) -> Option<Subnet> {
        Some(self.subnet)
    }

    /// Taps of an earlier version are in no group: they join it before the filter that looks at it.
    async fn prepare(&self, guests: &[GuestNic]) -> Result<(), NetError> {
        if self.is_new {
            keep(&self.path, self.subnet).await?;
        }
        {
            let _one_at_a_time = self.firewall.lock().await;
            for tap in self.taps().await? {
                if let Some(index) = self.links.index(&tap).await? {
                    self.links.set_group(&tap, index, self.rules.group()).await?;
                }
            }
            let by_tap = guests.iter().map(|guest| (guest.instance.tap_name(), guest.clone()));
            *self.filtered.lock() = by_tap.collect();
            self.rules.replace(guests).await?;
        }
        self.links.ensure_bridge(&self.name, self.subnet).await?;
        enable_forwarding()
    }

    fn lease(&self, id: &VmId, wanted: Option<Ipv4Addr>) -> Result<Option<Lease>, NetError> {
        self.ipam().lease(id, wanted).map(Some)
    }

    fn claim_ports(&self, id: &VmId, ports: &[Forward]) -> Result<(), NetError> {
        self.ports.lock().claim(id, ports)
    }

    fn release(&self, id: &VmId) {
        self.ipam().release(id);
        self.ports.lock().release(id);
    }

    async fn create_interface(&self, id: &InstanceId) -> Result<Attachment, NetError> {
        let tap = id.tap_name();
        self.links.ensure_tap(&tap, self.rules.group()).await?;
        Ok(Attachment::Tap(tap))
    }

    /// The filter comes before the tap goes up: no packet passes unfiltered.
    async fn attach(&self, id: &InstanceId, endpoint: &Endpoint) -> Result<Attachment, NetError> {
        if let Err(error) = self.connect(id, endpoint).await {
            if let Err(error) = self.cut_off(id).await {
                tracing::error!(instance = %id, %error, "take down tap failed");
            }
            return Err(error);
        }
        Ok(Attachment::Tap(id.tap_name()))
    }

    async fn cut_off(&self, id: &InstanceId) -> Result<(), NetError> {
        self.links.down(&id.tap_name()).await
    }

    async fn detach(&self, id: &InstanceId) -> Result<(), NetError> {
        let tap = id.tap_name();
        self.links.delete(&tap).await?;
        let _one_at_a_time = self.firewall.lock().await;
        let guest = self.filtered.lock().get(&tap).cloned();
        if let Some(guest) = guest {
            let shares = |(other, nic): (&String, &GuestNic)| *other != tap && nic.address == guest.address;
            let keep_address = self.filtered.lock().iter().any(shares);
            self.rules.forget(&guest, keep_address).await?;
            self.filtered.lock().remove(&tap);
        }
        Ok(())
    }

    /// Only taps on this bridge are looked at: another node's are its own affair.
    async fn sweep(&self, keep: &HashSet<InstanceId>) -> Result<Vec<String>, NetError> {
        let keep: HashSet<_> = keep.iter().map(InstanceId::tap_name).collect();
        let mut removed = Vec::new();
        for name in self.taps().await? {
            if !keep.contains(&name) {
                self.links.delete(&name).await?;
                removed.push(name);
            }
        }
        Ok(removed)
    }

    async fn teardown(&self) -> Result<(), NetError> {
        self.sweep(&HashSet::new()).await?;
        self.links.delete(&self.name).await?;
        let _one_at_a_time = self.firewall.lock().await;
        self.rules.remove().await
    }
}
