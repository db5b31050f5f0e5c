//! Networks of CNI plugins as the network of a node.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use coracle_hypervisor::Forward;
use coracle_types::{InstanceId, VmId};
use parking_lot::Mutex;

use super::{Cni, CniAddresses, CniError, NetworkRequest};
use crate::bridge::{TAP_PREFIX, suffix};
use crate::link::Links;
use crate::ports::HostPorts;
use crate::rules::group_of;
use crate::{Attachment, Endpoint, GuestNic, Lease, NetError, Network, Subnet};

/// Network that a list of CNI plugins makes for each VM. What guests reach is up to the plugins: the node filters nothing.
/// Needs root.
#[derive(Debug)]
pub struct CniNetwork {
    cni: Cni,
    links: Links,
    /// Interface group of the node's taps.
    group: u32,
    ports: Mutex<HostPorts>,
}

impl CniNetwork {
    /// Opens the networks that the files in `conf_dir` describe, with the plugins in `bin_dir`. Changes nothing.
    ///
    /// # Errors
    /// [`NetError::Link`].
    pub fn open(state_dir: &Path, conf_dir: PathBuf, bin_dir: PathBuf) -> Result<Self, NetError> {
        let group = group_of(&suffix(state_dir));
        let cni = Cni::new(conf_dir, bin_dir, state_dir);
        Ok(Self { cni, links: Links::open()?, group, ports: Mutex::default() })
    }

    fn has_group(&self, name: &str) -> bool {
        let path = Path::new("/sys/class/net").join(name).join("netdev_group");
        let group = std::fs::read_to_string(path).unwrap_or_default();
        group.trim().parse() == Ok(self.group)
    }
}

#[async_trait]
impl Network for CniNetwork {
    fn mode(&self) -> &'static str {
        "cni"
    }

    /// `None`: each network has its own subnet.
    fn subnet(&self) -> Option<Subnet> {
        None
    }

    fn gives_addresses(&self) -> bool {
        true
    }

    /// Running guests stay on their networks. A configuration that is unusable now may be fixed before the next VM is made.
    async fn prepare(&self, _: &[GuestNic]) -> Result<(), NetError> {
        if let Err(error) = self.cni.verify(None).await {
            tracing::warn!(%error, "CNI network not ready");
        }
        Ok(())
    }

    async fn setup(&self, id: &VmId, request: &NetworkRequest) -> Result<(), NetError> {
        let made = self.cni.add(id, request).await?;
        let address = request.address.map(IpAddr::from).zip(Some(made.address.into()));
        let made6 = made.ipv6.map(|ipv6| ipv6.address.into());
        let address6 = request.address6.map(IpAddr::from).zip(made6);
        let moved = address.into_iter().chain(address6).find(|(wanted, given)| wanted != given);
        let Some((wanted, given)) = moved else { return Ok(()) };
        self.cni.del(id).await?;
        Err(NetError::Moved { wanted, given })
    }

    async fn remove(&self, id: &VmId) -> Result<(), NetError> {
        Ok(self.cni.del(id).await?)
    }

    async fn collect(&self, keep: &HashSet<VmId>) -> Result<Vec<VmId>, NetError> {
        Ok(self.cni.collect(keep).await?)
    }

    fn guest_network(&self, id: &VmId) -> Option<CniAddresses> {
        self.cni.cached_addresses(id).ok().flatten()
    }

    /// Lease of the network that [`Network::setup`] made.
    fn lease(&self, id: &VmId, wanted: Option<Ipv4Addr>) -> Result<Option<Lease>, NetError> {
        let missing = || CniError::NotFound { name: format!("of VM {id}"), dir: self.cni.dir().to_owned() };
        let made = self.cni.cached_addresses(id)?.ok_or_else(missing)?;
        let CniAddresses { address, prefix, gateway, ipv6, .. } = made;
        match wanted {
            Some(wanted) if wanted != address => {
                Err(NetError::Moved { wanted: wanted.into(), given: address.into() })
            }
            _ => {
                let gateway = gateway.unwrap_or(Ipv4Addr::UNSPECIFIED);
                Ok(Some(Lease { address, prefix, gateway, address6: ipv6.map(|ipv6| ipv6.address) }))
            }
        }
    }

    fn claim_ports(&self, id: &VmId, ports: &[Forward]) -> Result<(), NetError> {
        self.ports.lock().claim(id, ports)
    }

    fn release(&self, id: &VmId) {
        self.ports.lock().release(id);
    }

    async fn create_interface(&self, id: &InstanceId) -> Result<Attachment, NetError> {
        let tap = id.tap_name();
        self.links.ensure_tap(&tap, self.group).await?;
        Ok(Attachment::Tap(tap))
    }

    async fn attach(&self, id: &InstanceId, endpoint: &Endpoint) -> Result<Attachment, NetError> {
        let no_lease = || NetError::NoLease { instance: id.clone() };
        let vm = self.cni.with_mac(endpoint.mac)?.ok_or_else(no_lease)?;
        let attachment = self.create_interface(id).await?;
        if let Err(error) = self.cni.join(&vm, id).await {
            if let Err(error) = self.cni.disconnect(id).await {
                tracing::error!(instance = %id, %error, "take down tap failed");
            }
            return Err(error.into());
        }
        Ok(attachment)
    }

    async fn cut_off(&self, id: &InstanceId) -> Result<(), NetError> {
        self.links.down(&id.tap_name()).await
    }

    async fn detach(&self, id: &InstanceId) -> Result<(), NetError> {
        self.cni.disconnect(id).await?;
        self.links.delete(&id.tap_name()).await
    }

    async fn sweep(&self, keep: &HashSet<InstanceId>) -> Result<Vec<String>, NetError> {
        let keep: HashSet<_> = keep.iter().map(InstanceId::tap_name).collect();
        let mut removed = Vec::new();
        for name in self.links.names().await? {
            if name.starts_with(TAP_PREFIX) && self.has_group(&name) && !keep.contains(&name) {
                self.cni.disconnect_tap(&name).await?;
                self.links.delete(&name).await?;
                removed.push(name);
            }
        }
        Ok(removed)
    }

    async fn teardown(&self) -> Result<(), NetError> {
        self.sweep(&HashSet::new()).await?;
        self.cni.collect(&HashSet::new()).await?;
        Ok(())
    }
}

impl From<CniError> for NetError {
    fn from(error: CniError) -> Self {
        match error {
            CniError::Link(error) => error,
            error => Self::Cni(Box::new(error)),
        }
    }
}
