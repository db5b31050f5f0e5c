//! Networks of VMs behind one trait: a bridge with a tap per VM (root), networks of CNI plugins (root), a
//! network inside each VMM (no privilege), and addresses only (tests).
//!
//! ```text
//! guest ─ virtio ─ tap ct<12 hex of its instance> ─ bridge cor<6 hex> (gateway) ─ masquerade ─ outside
//!                   └─ bridge table of nftables: only its own MAC and address may enter; a tap without rules: nothing
//! ```
//! The packet filter is computed from the records of the VMs and replaced in one transaction; no instant leaves a tap
//! unfiltered. Opening a network changes nothing on the host: [`Network::prepare`] does, once the state is locked.
//! Addresses are given out by the node alone. What a VM holds is in its
//! record; nothing here is remembered over a restart but the subnet.

mod addressing;
mod bridge;
mod cni;
mod ipam;
mod link;
mod ports;
mod routes;
mod rules;
mod subnet;
mod tap;

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use async_trait::async_trait;
use coracle_hypervisor::Forward;
use coracle_types::{InstanceId, MacAddr, VmId};
use serde::{Deserialize, Serialize};

pub use addressing::kept_subnet;
pub use bridge::BridgeNetwork;
pub use cni::{Bandwidth, Cni, CniAddresses, CniError, CniIpv6, CniNetwork, Dns, Route, Wishes};
pub use ipam::Ipam;
pub use link::host_networks;
pub use routes::{PodRoute, PodRoutes, RouteChange};
pub use subnet::{InvalidSubnet, Sources, Subnet, Taken, choose};
pub use tap::{give_tap, open_tap};

/// What a VM was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The VM's address.
    pub address: Ipv4Addr,
    /// Length of the subnet's prefix.
    pub prefix: u8,
    /// The way out.
    pub gateway: Ipv4Addr,
    /// Its IPv6 address, on a network that gives one.
    pub address6: Option<Ipv6Addr>,
}

/// What the packet filter knows of a guest: what its record says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestNic {
    /// Instance of its VMM, whose tap it has.
    pub instance: InstanceId,
    /// Its MAC.
    pub mac: MacAddr,
    /// Its address.
    pub address: Ipv4Addr,
    /// What it may reach beside the outside.
    pub reach: Reach,
    /// Ports of the node that lead to it.
    pub ports: Vec<Forward>,
}

/// Connections that a guest of a bridge may have open at a time.
pub const CONNECTIONS_MAX: u32 = rules::CONNECTIONS_MAX;

/// What a guest may reach beside what is outside of its node. Link-local addresses and those of metadata services are
/// refused always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Reach {
    /// Other guests of the node that may reach guests.
    pub guests: bool,
    /// Services of the node, and the API server of its cluster.
    pub node: bool,
}

impl Reach {
    /// What either of the two admits.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self { guests: self.guests || other.guests, node: self.node || other.node }
    }
}

/// A VM as its network has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// MAC of its NIC.
    pub mac: MacAddr,
    /// Its address; `None` where guests have none that the node gives.
    pub lease: Option<Lease>,
    /// What it may reach.
    pub reach: Reach,
    /// Ports of the node that lead to it.
    pub ports: Vec<Forward>,
}

/// Where a VMM plugs in its NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// A tap device that exists.
    Tap(String),
    /// A network inside the VMM.
    User,
}

/// What became of a subnet that the cluster assigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assignment {
    /// Guests have it.
    Current,
    /// VMs have addresses of another one: it is taken when the last of them is removed, or at a restart without any.
    Waits,
    /// An administrator named the subnet, or guests have no addresses of the node's.
    Fixed,
}

/// One network of one node. All calls are idempotent and cancel-safe in the
/// sense that repeating them completes what was cut off.
#[async_trait]
pub trait Network: Send + Sync + std::fmt::Debug {
    /// `bridge`, `user` or `none`.
    fn mode(&self) -> &'static str;

    /// The guests' subnet, where guests have addresses of the node's.
    fn subnet(&self) -> Option<Subnet>;

    /// Makes what all VMs share, and a packet filter that admits the packets of exactly these guests. A running guest
    /// among them is filtered at every instant, one that is not among them is cut off. The caller holds the lock of the
    /// node's state.
    ///
    /// # Errors
    /// [`NetError::State`], [`NetError::Link`], [`NetError::Rules`].
    async fn prepare(&self, guests: &[GuestNic]) -> Result<(), NetError>;

    /// True when guests have addresses by which the node reaches them.
    fn gives_addresses(&self) -> bool {
        self.subnet().is_some()
    }

    /// Makes what a VM has of its own before it is given an address. A network whose VMs share everything has nothing to do.
    ///
    /// # Errors
    /// [`NetError::Cni`], [`NetError::Moved`].
    async fn setup(&self, _: &VmId, _: &Wishes) -> Result<(), NetError> {
        Ok(())
    }

    /// Removes what [`Network::setup`] made.
    ///
    /// # Errors
    /// [`NetError::Cni`].
    async fn remove(&self, _: &VmId) -> Result<(), NetError> {
        Ok(())
    }

    /// Removes what [`Network::setup`] made for VMs that are not among these, and returns whose it was.
    ///
    /// # Errors
    /// [`NetError::Cni`].
    async fn collect(&self, _: &HashSet<VmId>) -> Result<Vec<VmId>, NetError> {
        Ok(vec![])
    }

    /// What the guest of a VM is given, where it is not an address of the node's subnet.
    fn guest_network(&self, _: &VmId) -> Option<CniAddresses> {
        None
    }

    /// Moves the guests to another subnet of the cluster's. Addresses of VMs never change: while one has an address, the
    /// subnet is remembered, also over a restart.
    ///
    /// # Errors
    /// [`NetError::State`], [`NetError::Link`], [`NetError::Rules`].
    async fn assign(&self, _: Subnet) -> Result<Assignment, NetError> {
        Ok(Assignment::Fixed)
    }

    /// Takes the subnet that waits for the last VM to be gone, if it is. `None`: nothing waits, or still does.
    ///
    /// # Errors
    /// As [`Network::assign`].
    async fn settle(&self) -> Result<Option<Subnet>, NetError> {
        Ok(None)
    }

    /// From now on the subnet changes at a restart only: a service listens on the gateway's address.
    fn pin(&self) {}

    /// Gives the VM an address, the same one again when it has one. `None`: this
    /// network has no addresses that the host can reach.
    ///
    /// # Errors
    /// [`NetError::Exhausted`]; [`NetError::Taken`] or [`NetError::Outside`] for a wanted address.
    fn lease(&self, id: &VmId, wanted: Option<Ipv4Addr>) -> Result<Option<Lease>, NetError>;

    /// Reserves ports of the node for a VM, or none of them; another program's are refused. Idempotent: what the VM has and
    /// is not among them is given back.
    ///
    /// # Errors
    /// [`NetError::PortTaken`], [`NetError::Port`].
    fn claim_ports(&self, id: &VmId, ports: &[Forward]) -> Result<(), NetError>;

    /// Gives address and ports back. Nothing happens when there are none.
    fn release(&self, id: &VmId);

    /// Makes the interface for the VMM, which passes no packets until [`Network::attach`].
    ///
    /// # Errors
    /// [`NetError::Link`].
    async fn create_interface(&self, id: &InstanceId) -> Result<Attachment, NetError>;

    /// Makes the interface if it is missing, with its filters, and connects it. A failure leaves it disconnected. Where VMs
    /// are given addresses, one without a lease is refused.
    ///
    /// # Errors
    /// [`NetError::Link`], [`NetError::Rules`].
    async fn attach(&self, id: &InstanceId, endpoint: &Endpoint) -> Result<Attachment, NetError>;

    /// Disconnects the interface: the VMM keeps it open, and no packet passes until [`Network::attach`].
    ///
    /// # Errors
    /// [`NetError::Link`].
    async fn cut_off(&self, id: &InstanceId) -> Result<(), NetError>;

    /// Removes the interface. Idempotent.
    ///
    /// # Errors
    /// As [`Network::attach`].
    async fn detach(&self, id: &InstanceId) -> Result<(), NetError>;

    /// Removes what belongs to none of `keep` and returns its names.
    ///
    /// # Errors
    /// As [`Network::attach`].
    async fn sweep(&self, keep: &HashSet<InstanceId>) -> Result<Vec<String>, NetError>;

    /// Removes everything that this network made on the host.
    ///
    /// # Errors
    /// As [`Network::attach`].
    async fn teardown(&self) -> Result<(), NetError>;
}

/// The network inside each VMM: nothing on the host, no address that it can reach.
#[derive(Debug, Default)]
pub struct UserNetwork;

#[async_trait]
impl Network for UserNetwork {
    fn mode(&self) -> &'static str {
        "user"
    }

    fn subnet(&self) -> Option<Subnet> {
        None
    }

    fn lease(&self, _: &VmId, wanted: Option<Ipv4Addr>) -> Result<Option<Lease>, NetError> {
        match wanted {
            None => Ok(None),
            Some(address) => Err(NetError::NoAddresses { address }),
        }
    }

    /// The VMM listens on them itself.
    fn claim_ports(&self, _: &VmId, _: &[Forward]) -> Result<(), NetError> {
        Ok(())
    }

    fn release(&self, _: &VmId) {}

    async fn prepare(&self, _: &[GuestNic]) -> Result<(), NetError> {
        Ok(())
    }

    async fn create_interface(&self, _: &InstanceId) -> Result<Attachment, NetError> {
        Ok(Attachment::User)
    }

    async fn attach(&self, _: &InstanceId, _: &Endpoint) -> Result<Attachment, NetError> {
        Ok(Attachment::User)
    }

    async fn cut_off(&self, _: &InstanceId) -> Result<(), NetError> {
        Ok(())
    }

    async fn detach(&self, _: &InstanceId) -> Result<(), NetError> {
        Ok(())
    }

    async fn sweep(&self, _: &HashSet<InstanceId>) -> Result<Vec<String>, NetError> {
        Ok(vec![])
    }

    async fn teardown(&self) -> Result<(), NetError> {
        Ok(())
    }
}

/// What can go wrong with a network.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetError {
    /// Every address is in use.
    #[error("no address is left in {subnet}")]
    Exhausted {
        /// The subnet.
        subnet: Subnet,
    },
    /// A port of the node belongs to another VM.
    #[error("port {}/{} of {} is in use by VM {holder}", .forward.host_port, .forward.protocol.as_str(), .forward.host_address)]
    PortTaken {
        /// What was wanted.
        forward: Forward,
        /// Who has it.
        holder: VmId,
    },
    /// The node does not give a port.
    #[error("cannot listen on port {}/{} of {}", .forward.host_port, .forward.protocol.as_str(), .forward.host_address)]
    Port {
        /// What was wanted.
        forward: Forward,
        /// Why.
        source: io::Error,
    },
    /// A wanted address belongs to another VM.
    #[error("address {address} is in use by VM {holder}")]
    Taken {
        /// The address.
        address: Ipv4Addr,
        /// Who has it.
        holder: VmId,
    },
    /// A wanted address is not one of this node's guests.
    #[error("address {address} is not a guest address of {subnet}")]
    Outside {
        /// The address.
        address: Ipv4Addr,
        /// The subnet.
        subnet: Subnet,
    },
    /// An interface was to be connected without an address for its filter.
    #[error("VMM instance {instance} has no address to be filtered by")]
    NoLease {
        /// Whose interface.
        instance: InstanceId,
    },
    /// An address was wanted where there are none.
    #[error("address {address} cannot be given: without root guests have no address of the host's")]
    NoAddresses {
        /// The address.
        address: Ipv4Addr,
    },
    /// Every /24 of the pool overlaps with a network of the host.
    #[error("no free /24 in {pool}: all overlap with addresses of this host")]
    NoFreeSubnet {
        /// Where subnets come from.
        pool: Subnet,
    },
    /// A VM has another address than the one that its record says.
    #[error("cannot give address {wanted}: the network gave {given}")]
    Moved {
        /// What was wanted.
        wanted: IpAddr,
        /// What there is.
        given: IpAddr,
    },
    /// A CNI plugin failed.
    #[error(transparent)]
    Cni(Box<CniError>),
    /// The kernel refused a change of a device.
    #[error("{operation}")]
    Link {
        /// What was tried, with the device.
        operation: String,
        /// Why not.
        source: io::Error,
    },
    /// The packet filter was not changed.
    #[error("{operation}")]
    Rules {
        /// What was tried.
        operation: String,
        /// Why not.
        source: coracle_nftables::NftablesError,
    },
    /// The file with the chosen subnet cannot be used.
    #[error("{}", .path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

impl NetError {
    /// True when the caller's own wish was wrong, not the host.
    #[must_use]
    pub fn is_bad_request(&self) -> bool {
        match self {
            Self::Outside { .. } | Self::NoAddresses { .. } => true,
            Self::Cni(error) => matches!(**error, CniError::NotFound { .. } | CniError::Capability { .. }),
            _ => false,
        }
    }
}
