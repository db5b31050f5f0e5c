//! The bridge network of one node.

use std::collections::HashSet;
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use coracle_types::{MacAddr, VmId};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::Mutex as AsyncMutex;

use crate::link::Links;
use crate::rules::Rules;
use crate::{Ipam, Lease, NetError, Network, Plug, Subnet};

/// Taps carry the VM's hash; the prefix tells them from other programs' taps.
const TAP_PREFIX: &str = "ct";

/// A bridge, a tap per VM, masquerading and filters. Needs root.
#[derive(Debug)]
pub struct BridgeNetwork {
    name: String,
    index: u32,
    subnet: Subnet,
    ipam: Mutex<Ipam>,
    links: Links,
    rules: Rules,
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
    /// Makes or finds the bridge of the node whose state lies in `state_dir`, on the
    /// subnet chosen at its first start: `wanted`, or the first free /24 of 10.100.0.0/16.
    ///
    /// # Errors
    /// [`NetError::NoFreeSubnet`], [`NetError::State`], [`NetError::Link`], [`NetError::Rules`].
    pub async fn open(state_dir: &Path, wanted: Option<Subnet>) -> Result<Self, NetError> {
        let links = Links::open()?;
        let subnet = choose(&links, &state_dir.join("network.json"), wanted).await?;
        let suffix = suffix(state_dir);
        let name = format!("cor{suffix}");
        let index = links.ensure_bridge(&name, subnet).await?;
        enable_forwarding()?;
        let rules = Rules::new(&suffix);
        rules.reset(subnet).await?;
        let ipam = Mutex::new(Ipam::new(subnet));
        Ok(Self { name, index, subnet, ipam, links, rules, firewall: AsyncMutex::new(()) })
    }

    /// Name of the bridge.
    #[must_use]
    pub fn bridge(&self) -> &str {
        &self.name
    }

    fn ipam(&self) -> std::sync::MutexGuard<'_, Ipam> {
        self.ipam.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Six hex digits of the state path: two nodes on one host do not meet.
fn suffix(state_dir: &Path) -> String {
    let mut hex = hex::encode(Sha256::digest(state_dir.as_os_str().as_encoded_bytes()));
    hex.truncate(6);
    hex
}

async fn choose(links: &Links, path: &PathBuf, wanted: Option<Subnet>) -> Result<Subnet, NetError> {
    let state = |source| NetError::State { path: path.clone(), source };
    match tokio::fs::read(path).await {
        Ok(bytes) => {
            let chosen: Chosen = serde_json::from_slice(&bytes).map_err(|e| state(e.into()))?;
            if wanted.is_none_or(|w| w == chosen.subnet) {
                return Ok(chosen.subnet);
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
    let bytes = serde_json::to_vec(&Chosen { schema: 1, subnet }).map_err(|e| state(e.into()))?;
    let temporary = path.with_extension("json.tmp");
    tokio::fs::write(&temporary, bytes).await.map_err(state)?;
    tokio::fs::rename(&temporary, path).await.map_err(state)?;
    Ok(subnet)
}

fn enable_forwarding() -> Result<(), NetError> {
    const SWITCH: &str = "/proc/sys/net/ipv4/ip_forward";
    let on = std::fs::read_to_string(SWITCH).is_ok_and(|text| text.trim() == "1");
    if on {
        return Ok(());
    }
    std::fs::write(SWITCH, "1")
        .map_err(|source| NetError::Link { operation: format!("switch on {SWITCH}"), source })
}

#[async_trait]
impl Network for BridgeNetwork {
    fn mode(&self) -> &'static str {
        "bridge"
    }

    fn subnet(&self) -> Option<Subnet> {
        Some(self.subnet)
    }

    fn lease(&self, id: &VmId, wanted: Option<Ipv4Addr>) -> Result<Option<Lease>, NetError> {
        self.ipam().lease(id, wanted).map(Some)
    }

    fn release(&self, id: &VmId) {
        self.ipam().release(id);
    }

    async fn plug(&self, id: &VmId) -> Result<Plug, NetError> {
        let tap = id.tap_name();
        self.links.ensure_tap(&tap).await?;
        Ok(Plug::Tap(tap))
    }

    async fn hand_over(&self, from: &VmId, to: &VmId) -> Result<Plug, NetError> {
        let tap = to.tap_name();
        self.links.delete(&tap).await?;
        self.links.rename(&from.tap_name(), &tap).await?;
        Ok(Plug::Tap(tap))
    }

    /// The filter comes before the tap goes up: no packet passes unfiltered.
    async fn attach(&self, id: &VmId, mac: MacAddr, lease: Option<Lease>) -> Result<Plug, NetError> {
        let tap = id.tap_name();
        let lease = match lease {
            Some(lease) => lease,
            None => self.ipam().lease(id, None)?,
        };
        {
            let _one_at_a_time = self.firewall.lock().await;
            self.rules.allow(&tap, mac, lease.address).await?;
        }
        let index = self.links.ensure_tap(&tap).await?;
        self.links.up(&tap, index, Some(self.index)).await?;
        Ok(Plug::Tap(tap))
    }

    async fn detach(&self, id: &VmId) -> Result<(), NetError> {
        let tap = id.tap_name();
        self.links.delete(&tap).await?;
        let _one_at_a_time = self.firewall.lock().await;
        self.rules.forget(&tap).await
    }

    /// Only taps on this bridge are looked at: another node's are its own affair.
    async fn sweep(&self, keep: &HashSet<VmId>) -> Result<Vec<String>, NetError> {
        let keep: HashSet<_> = keep.iter().map(VmId::tap_name).collect();
        let mut removed = Vec::new();
        for name in self.links.names().await? {
            let ours = name.starts_with(TAP_PREFIX)
                && Path::new("/sys/class/net").join(&self.name).join("brif").join(&name).exists();
            if ours && !keep.contains(&name) {
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
