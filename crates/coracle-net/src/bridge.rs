//! The bridge network of one node.

use std::collections::{HashMap, HashSet};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use coracle_hypervisor::Forward;
use coracle_nftables::{Change, Connection, NftablesError};
use coracle_types::{InstanceId, VmId};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::sync::Mutex as AsyncMutex;

use crate::addressing::{Addressing, file};
use crate::link::{Links, missing_link};
use crate::ports::HostPorts;
use crate::rules::{self, Rules};
use crate::{Assignment, Attachment, Endpoint, GuestNic, Lease, NetError, Network, Sources, Subnet};

/// Prefix of tap names, before the digits of the instance: tells these taps from those of other programs.
pub(crate) const TAP_PREFIX: &str = "ct";

/// Network with a bridge, a tap per VM, masquerading and packet filters. Needs root.
#[derive(Debug)]
pub struct BridgeNetwork {
    name: String,
    addressing: Addressing,
    is_pinned: AtomicBool,
    ports: Mutex<HostPorts>,
    links: Links,
    filter: Connection,
    rules: Rules,
    /// Guests that the filter has rules for, by tap.
    filtered: Mutex<HashMap<String, GuestNic>>,
    /// Lock that keeps filter changes in the order of the changes of `filtered`.
    firewall: AsyncMutex<()>,
}

impl BridgeNetwork {
    /// Opens the network of the node with this state directory, on the subnet chosen at its first start: `wanted`, or the first
    /// free /24 of 10.100.0.0/16. Changes nothing, because another daemon may own that state.
    ///
    /// # Errors
    /// [`NetError::NoFreeSubnet`], [`NetError::State`], [`NetError::Link`].
    pub async fn open(state_dir: &Path, wanted: Option<Subnet>) -> Result<Self, NetError> {
        Self::open_with(state_dir, Sources { flag: wanted, ..Sources::default() }).await
    }

    /// Like [`BridgeNetwork::open`], with the subnet chosen from `sources`. A node that has another subnet changes to the
    /// chosen one in [`Network::settle`].
    ///
    /// # Errors
    /// Like [`BridgeNetwork::open`].
    pub async fn open_with(state_dir: &Path, sources: Sources) -> Result<Self, NetError> {
        let links = Links::open()?;
        let addressing = Addressing::open(file(state_dir), sources, links.networks().await?).await?;
        let suffix = suffix(state_dir);
        let name = format!("cor{suffix}");
        let rules = Rules::new(&suffix, &name, addressing.subnet());
        Ok(Self {
            name,
            addressing,
            is_pinned: AtomicBool::new(false),
            ports: Mutex::default(),
            links,
            filter: Connection::open().map_err(rules_error("open a netlink socket"))?,
            rules,
            filtered: Mutex::default(),
            firewall: AsyncMutex::new(()),
        })
    }

    /// Denies guests that may not reach the node the API server of its cluster, which answers at these addresses.
    #[must_use]
    pub fn with_api_server(self, addresses: Vec<SocketAddrV4>) -> Self {
        Self { rules: self.rules.with_api_server(addresses), ..self }
    }

    /// Keeps the source address of packets between guests and Pods of these networks, because other nodes route to the subnet
    /// of this node. Only guests that may reach other guests reach these Pods, and are reached by them.
    #[must_use]
    pub fn with_pod_networks(self, networks: Vec<Subnet>) -> Self {
        Self { rules: self.rules.with_pod_networks(networks), ..self }
    }

    /// Checks that this process may change the host's packet filter. Leaves no trace.
    ///
    /// # Errors
    /// [`NetError::Rules`].
    pub async fn probe() -> Result<(), NetError> {
        let tried = rules_error("try the packet filter");
        match Connection::open() {
            Ok(filter) => filter.apply(rules::probe()).await.map_err(tried),
            Err(error) => Err(tried(error)),
        }
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
            let operation = format!("open the packet filter for VMM instance {id}");
            self.change(&operation, self.rules().admit(&guest, before.as_ref())).await?;
        }
        if !ports.is_empty() {
            route_loopback(&self.name)?;
        }
        let index = self.links.ensure_tap(&tap, self.rules.group()).await?;
        let bridge = self.links.index(&self.name).await?.ok_or_else(|| missing_link(&self.name))?;
        self.links.up(&tap, index, Some(bridge)).await?;
        if !ports.is_empty() {
            // Hairpin mode of the bridge port (ip-link(8)): where the host filters bridged packets by its IPv4 tables, a packet
            // from a guest to its own published port returns by the bridge port that it came from.
            switch_on(&format!("/sys/class/net/{tap}/brport/hairpin_mode"))?;
        }
        Ok(())
    }

    async fn change(&self, operation: &str, changes: Vec<Change>) -> Result<(), NetError> {
        self.filter.apply(changes).await.map_err(rules_error(operation))
    }

    async fn replace(&self, guests: &[GuestNic]) -> Result<(), NetError> {
        self.change("set up the packet filter", self.rules().replace(guests)).await
    }

    fn rules(&self) -> Rules {
        self.rules.clone().with_subnet(self.addressing.subnet())
    }
}

/// Six hex digits of the hash of the state path, so that names of two nodes on one host do not collide.
pub(crate) fn suffix(state_dir: &Path) -> String {
    let mut hex = hex::encode(Sha256::digest(state_dir.as_os_str().as_encoded_bytes()));
    hex.truncate(6);
    hex
}

fn rules_error(operation: &str) -> impl FnOnce(NftablesError) -> NetError {
    move |source| NetError::Rules { operation: operation.to_owned(), source }
}

fn enable_forwarding() -> Result<(), NetError> {
    switch_on("/proc/sys/net/ipv4/ip_forward")
}

/// Enables `route_localnet` on the bridge, so that a connection to a port on 127.0.0.1 can be translated to a guest. The
/// filters of guests drop their packets to loopback addresses.
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
        Some(self.addressing.subnet())
    }

    /// Taps made by an earlier version are in no interface group. They join the group before the filter that matches it is
    /// loaded.
    async fn prepare(&self, guests: &[GuestNic]) -> Result<(), NetError> {
        self.addressing.save().await?;
        {
            let _one_at_a_time = self.firewall.lock().await;
            for tap in self.taps().await? {
                if let Some(index) = self.links.index(&tap).await? {
                    self.links.set_group(&tap, index, self.rules.group()).await?;
                }
            }
            let by_tap = guests.iter().map(|guest| (guest.instance.tap_name(), guest.clone()));
            *self.filtered.lock() = by_tap.collect();
            self.replace(guests).await?;
        }
        self.links.ensure_bridge(&self.name, self.addressing.subnet()).await?;
        enable_forwarding()
    }

    async fn assign(&self, subnet: Subnet) -> Result<Assignment, NetError> {
        if self.addressing.is_fixed() {
            return Ok(Assignment::Fixed);
        }
        let waits = self.addressing.wait_for(subnet);
        self.addressing.save().await?;
        let waits = waits && self.settle().await?.is_none();
        Ok(if waits { Assignment::Pending } else { Assignment::Current })
    }

    /// The rules of the new subnet are loaded before the bridge gets an address of it: at that time no guest has one.
    async fn settle(&self) -> Result<Option<Subnet>, NetError> {
        if self.is_pinned.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let _one_at_a_time = self.firewall.lock().await;
        let Some(subnet) = self.addressing.advance() else { return Ok(None) };
        self.filtered.lock().clear();
        self.replace(&[]).await?;
        self.links.ensure_bridge(&self.name, subnet).await?;
        self.addressing.save().await?;
        Ok(Some(subnet))
    }

    fn pin(&self) {
        self.is_pinned.store(true, Ordering::Relaxed);
    }

    fn lease(&self, id: &VmId, wanted: Option<Ipv4Addr>) -> Result<Option<Lease>, NetError> {
        self.addressing.ipam().lease(id, wanted).map(Some)
    }

    fn claim_ports(&self, id: &VmId, ports: &[Forward]) -> Result<(), NetError> {
        self.ports.lock().claim(id, ports)
    }

    fn release(&self, id: &VmId) {
        self.addressing.ipam().release(id);
        self.ports.lock().release(id);
    }

    async fn create_interface(&self, id: &InstanceId) -> Result<Attachment, NetError> {
        let tap = id.tap_name();
        self.links.ensure_tap(&tap, self.rules.group()).await?;
        Ok(Attachment::Tap(tap))
    }

    /// The filter is loaded before the tap goes up: no packet passes unfiltered.
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
            let operation = format!("close the packet filter for {tap}");
            self.change(&operation, self.rules.forget(&guest, keep_address)).await?;
            self.filtered.lock().remove(&tap);
        }
        Ok(())
    }

    /// Considers only taps on this bridge: other taps belong to other nodes.
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
        self.change("remove the packet filter", self.rules.remove()).await
    }
}
