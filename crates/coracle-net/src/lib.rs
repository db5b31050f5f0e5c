//! Networks of VMs behind one trait: a bridge with a tap per VM (needs root), networks of CNI plugins (needs root), a network
//! inside each VMM (unprivileged), and addresses only (for tests).
//!
//! ```text
//! guest ─ virtio ─ tap ct<12 hex of its instance> ─ bridge cor<6 hex> (gateway) ─ masquerade ─ outside
//!                   └─ bridge table of nftables: only its own MAC and address may enter; a tap without rules: nothing
//! ```
//! The packet filter is computed from the records of the VMs and replaced in one transaction: no tap is unfiltered at any time.
//! Opening a network changes nothing on the host; [`Network::prepare`] does, once the state is locked. Only the node assigns
//! addresses. The record of a VM holds its address; this crate remembers only the subnet over a restart.

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
pub use cni::{Bandwidth, Cni, CniAddresses, CniError, CniIpv6, CniNetwork, Dns, NetworkRequest, Route};
pub use ipam::Ipam;
pub use link::host_networks;
pub use routes::{PodRoute, PodRoutes, RouteChange};
pub use subnet::{InvalidSubnet, Sources, Subnet, Taken, choose};
pub use tap::{open_tap, set_tap_owner};

/// IP addresses leased to a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// IPv4 address.
    pub address: Ipv4Addr,
    /// Prefix length of the subnet.
    pub prefix: u8,
    /// Default gateway.
    pub gateway: Ipv4Addr,
    /// IPv6 address, on a network that assigns one.
    pub address6: Option<Ipv6Addr>,
}

/// Properties of a guest that the packet filter needs, from the record of its VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestNic {
    /// VMM instance of the guest, which owns its tap.
    pub instance: InstanceId,
    /// MAC of the guest's NIC.
    pub mac: MacAddr,
    /// IPv4 address of the guest.
    pub address: Ipv4Addr,
    /// Destinations that the guest may reach in addition to the outside of the node.
    pub reach: Reach,
    /// Ports of the node that are forwarded to the guest.
    pub ports: Vec<Forward>,
}

/// Maximum number of connections that a guest on a bridge may have open at a time.
pub const CONNECTIONS_MAX: u32 = rules::CONNECTIONS_MAX;

/// Destinations that a guest may reach in addition to the outside of its node. Link-local addresses and those of metadata
/// services are always denied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Reach {
    /// Other guests of the node that have this permission as well.
    pub guests: bool,
    /// Services of the node, and the API server of its cluster.
    pub node: bool,
}

impl Reach {
    /// Union of both.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self { guests: self.guests || other.guests, node: self.node || other.node }
    }
}

/// Network properties of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// MAC of the VM's NIC.
    pub mac: MacAddr,
    /// Leased addresses; `None` on a network whose addresses the node does not assign.
    pub lease: Option<Lease>,
    /// Destinations that the guest may reach.
    pub reach: Reach,
    /// Ports of the node that are forwarded to the VM.
    pub ports: Vec<Forward>,
}

/// Host side of a VM's NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// Tap device that exists.
    Tap(String),
    /// Network inside the VMM.
    User,
}

/// Outcome of the assignment of a subnet by the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assignment {
    /// The guests have the subnet.
    Current,
    /// VMs have addresses of another subnet. The assigned one is used when the last of them is removed, or after a restart
    /// without VMs.
    Pending,
    /// The subnet does not change: an administrator set it, or the node assigns no addresses.
    Fixed,
}

/// Network of one node. All calls are idempotent, and cancel-safe in the sense that repeating a call completes what was
/// interrupted.
#[async_trait]
pub trait Network: Send + Sync + std::fmt::Debug {
    /// Name of the implementation: `bridge`, `user` or `none`.
    fn mode(&self) -> &'static str;

    /// Subnet of the guests; `None` where the node assigns no addresses.
    fn subnet(&self) -> Option<Subnet>;

    /// Makes the shared parts of the network, and a packet filter that admits packets of exactly these guests. A running guest
    /// among them is filtered at any time; one that is not among them is disconnected. The caller holds the lock of the node's
    /// state.
    ///
    /// # Errors
    /// [`NetError::State`], [`NetError::Link`], [`NetError::Rules`].
    async fn prepare(&self, guests: &[GuestNic]) -> Result<(), NetError>;

    /// Whether guests have addresses at which the node reaches them.
    fn gives_addresses(&self) -> bool {
        self.subnet().is_some()
    }

    /// Makes the VM's own part of the network, before it gets an address. Does nothing on a network that VMs share as a whole.
    ///
    /// # Errors
    /// [`NetError::Cni`], [`NetError::Moved`].
    async fn setup(&self, _: &VmId, _: &NetworkRequest) -> Result<(), NetError> {
        Ok(())
    }

    /// Removes what [`Network::setup`] made.
    ///
    /// # Errors
    /// [`NetError::Cni`].
    async fn remove(&self, _: &VmId) -> Result<(), NetError> {
        Ok(())
    }

    /// Removes what [`Network::setup`] made for VMs that are not in the given set, and returns the ids of those VMs.
    ///
    /// # Errors
    /// [`NetError::Cni`].
    async fn collect(&self, _: &HashSet<VmId>) -> Result<Vec<VmId>, NetError> {
        Ok(vec![])
    }

    /// Network configuration of a VM's guest; `None` where it follows from the lease.
    fn guest_network(&self, _: &VmId) -> Option<CniAddresses> {
        None
    }

    /// Moves the guests to another subnet of the cluster. The address of a VM never changes: while a VM has a lease, the new
    /// subnet is only recorded, which survives a restart.
    ///
    /// # Errors
    /// [`NetError::State`], [`NetError::Link`], [`NetError::Rules`].
    async fn assign(&self, _: Subnet) -> Result<Assignment, NetError> {
        Ok(Assignment::Fixed)
    }

    /// Changes to the recorded subnet, if the last VM is gone. `None`: no subnet is recorded, or VMs still have leases.
    ///
    /// # Errors
    /// Like [`Network::assign`].
    async fn settle(&self) -> Result<Option<Subnet>, NetError> {
        Ok(None)
    }

    /// Restricts changes of the subnet to restarts, because a service listens on the gateway's address.
    fn pin(&self) {}

    /// Leases an address to the VM. Returns the same one if the VM has a lease. `None`: this network has no addresses that the
    /// host can reach.
    ///
    /// # Errors
    /// [`NetError::Exhausted`]; [`NetError::Taken`] or [`NetError::Outside`] for a wanted address.
    fn lease(&self, id: &VmId, wanted: Option<Ipv4Addr>) -> Result<Option<Lease>, NetError>;

    /// Reserves ports of the node for a VM, all or none. Fails for a port that another program uses. Idempotent: releases ports
    /// that the VM has and that are not in the list.
    ///
    /// # Errors
    /// [`NetError::PortTaken`], [`NetError::Port`].
    fn claim_ports(&self, id: &VmId, ports: &[Forward]) -> Result<(), NetError>;

    /// Releases the address and the ports of a VM. Does nothing if it has none.
    fn release(&self, id: &VmId);

    /// Makes the interface for the VMM. It passes no packets until [`Network::attach`].
    ///
    /// # Errors
    /// [`NetError::Link`].
    async fn create_interface(&self, id: &InstanceId) -> Result<Attachment, NetError>;

    /// Makes the interface if it is missing, loads its filter, and connects it. A failure leaves it disconnected. Fails without
    /// a lease where the node assigns addresses.
    ///
    /// # Errors
    /// [`NetError::Link`], [`NetError::Rules`].
    async fn attach(&self, id: &InstanceId, endpoint: &Endpoint) -> Result<Attachment, NetError>;

    /// Disconnects the interface. The VMM keeps it open, but no packet passes until [`Network::attach`].
    ///
    /// # Errors
    /// [`NetError::Link`].
    async fn cut_off(&self, id: &InstanceId) -> Result<(), NetError>;

    /// Removes the interface. Idempotent.
    ///
    /// # Errors
    /// Like [`Network::attach`].
    async fn detach(&self, id: &InstanceId) -> Result<(), NetError>;

    /// Removes the interfaces of all instances that are not in `keep`, and returns their names.
    ///
    /// # Errors
    /// Like [`Network::attach`].
    async fn sweep(&self, keep: &HashSet<InstanceId>) -> Result<Vec<String>, NetError>;

    /// Removes everything that this network made on the host.
    ///
    /// # Errors
    /// Like [`Network::attach`].
    async fn teardown(&self) -> Result<(), NetError>;
}

/// Network inside each VMM: makes nothing on the host and has no addresses that the host can reach.
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

    /// Does nothing: the VMM listens on the ports itself.
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

/// Errors of a network.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetError {
    /// All addresses of the subnet are leased.
    #[error("no address is left in {subnet}")]
    Exhausted {
        /// Subnet of the guests.
        subnet: Subnet,
    },
    /// A port of the node is reserved for another VM.
    #[error("port {}/{} of {} is in use by VM {holder}", .forward.host_port, .forward.protocol.as_str(), .forward.host_address)]
    PortTaken {
        /// Requested port.
        forward: Forward,
        /// VM that has the port.
        holder: VmId,
    },
    /// The port cannot be bound.
    #[error("cannot listen on port {}/{} of {}", .forward.host_port, .forward.protocol.as_str(), .forward.host_address)]
    Port {
        /// Requested port.
        forward: Forward,
        /// Cause.
        source: io::Error,
    },
    /// The requested address is leased to another VM.
    #[error("address {address} is in use by VM {holder}")]
    Taken {
        /// Requested address.
        address: Ipv4Addr,
        /// VM that has the address.
        holder: VmId,
    },
    /// The requested address is not a guest address of this node's subnet.
    #[error("address {address} is not a guest address of {subnet}")]
    Outside {
        /// Requested address.
        address: Ipv4Addr,
        /// Subnet of the guests.
        subnet: Subnet,
    },
    /// An interface cannot be connected, because its VM has no address to filter by.
    #[error("VMM instance {instance} has no address to be filtered by")]
    NoLease {
        /// Instance that owns the interface.
        instance: InstanceId,
    },
    /// An address was requested on a network without addresses.
    #[error("address {address} cannot be given: without root guests have no address of the host's")]
    NoAddresses {
        /// Requested address.
        address: Ipv4Addr,
    },
    /// Every /24 of the pool overlaps with a network of the host.
    #[error("no free /24 in {pool}: all overlap with addresses of this host")]
    NoFreeSubnet {
        /// Pool that subnets are chosen from.
        pool: Subnet,
    },
    /// The network gave a VM another address than the one in its record.
    #[error("cannot give address {wanted}: the network gave {given}")]
    Moved {
        /// Address in the record.
        wanted: IpAddr,
        /// Address that the network gave.
        given: IpAddr,
    },
    /// A CNI plugin failed.
    #[error(transparent)]
    Cni(Box<CniError>),
    /// The kernel refused a change of an interface.
    #[error("{operation}")]
    Link {
        /// Operation that failed, with the interface.
        operation: String,
        /// Cause.
        source: io::Error,
    },
    /// The packet filter could not be changed.
    #[error("{operation}")]
    Rules {
        /// Operation that failed.
        operation: String,
        /// Cause.
        source: coracle_nftables::NftablesError,
    },
    /// The file with the chosen subnet cannot be read or written.
    #[error("{}", .path.display())]
    State {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
}

impl NetError {
    /// Whether the request is at fault, and not the host.
    #[must_use]
    pub fn is_bad_request(&self) -> bool {
        match self {
            Self::Outside { .. } | Self::NoAddresses { .. } => true,
            Self::Cni(error) => matches!(**error, CniError::NotFound { .. } | CniError::Capability { .. }),
            _ => false,
        }
    }
}
