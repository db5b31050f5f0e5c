//! Bridges and taps by netlink.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::RawFd;

use futures_util::{StreamExt, TryStreamExt};
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::link::LinkAttribute;
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute};
use rtnetlink::packet_route::tc::TcHandle;
use rtnetlink::{Handle, LinkBridge, LinkUnspec, LinkVeth, RouteMessageBuilder};

use crate::tap::make_tap;
use crate::{NetError, Subnet};

/// Handle of the ingress qdisc (Linux, include/uapi/linux/pkt_sched.h, `TC_H_INGRESS`).
const INGRESS_HANDLE: u32 = 0xffff_0000;

/// Matches frames of every protocol (Linux, include/uapi/linux/if_ether.h).
const ETH_P_ALL: u16 = 3;

/// A netlink connection, driven by the runtime until it is dropped.
#[derive(Debug)]
pub(crate) struct Links {
    handle: Handle,
    _driver: tokio::task::JoinSet<()>,
}

pub(crate) fn link_error(operation: String) -> impl FnOnce(rtnetlink::Error) -> NetError {
    move |error| {
        let source = match error {
            rtnetlink::Error::NetlinkError(message) => message.to_io(),
            other => io::Error::other(other.to_string()),
        };
        NetError::Link { operation, source }
    }
}

impl Links {
    pub(crate) fn open() -> Result<Self, NetError> {
        let (connection, handle, _) = rtnetlink::new_connection()
            .map_err(|source| NetError::Link { operation: "open a netlink socket".to_owned(), source })?;
        let mut driver = tokio::task::JoinSet::new();
        driver.spawn(connection);
        Ok(Self { handle, _driver: driver })
    }

    /// Handle of the connection, for objects other than links.
    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Index of an interface; `None` when it does not exist.
    pub(crate) async fn index(&self, name: &str) -> Result<Option<u32>, NetError> {
        match self.handle.link().get().match_name(name).execute().try_next().await {
            Ok(link) => Ok(link.map(|l| l.header.index)),
            Err(rtnetlink::Error::NetlinkError(e)) if e.raw_code() == -libc::ENODEV => Ok(None),
            Err(e) => Err(link_error(format!("look up interface {name}"))(e)),
        }
    }

    /// Names of all interfaces.
    pub(crate) async fn names(&self) -> Result<Vec<String>, NetError> {
        let links: Vec<_> = self
            .handle
            .link()
            .get()
            .execute()
            .try_collect()
            .await
            .map_err(link_error("list interfaces".to_owned()))?;
        let name = |attribute: &LinkAttribute| match attribute {
            LinkAttribute::IfName(name) => Some(name.clone()),
            _ => None,
        };
        Ok(links.iter().filter_map(|l| l.attributes.iter().find_map(name)).collect())
    }

    /// Makes the bridge, assigns it the gateway's address, removes its other addresses, and brings it up.
    pub(crate) async fn ensure_bridge(&self, name: &str, subnet: Subnet) -> Result<u32, NetError> {
        let index = match self.index(name).await? {
            Some(index) => index,
            None => {
                let add = self.handle.link().add(LinkBridge::new(name).build()).execute().await;
                add.map_err(link_error(format!("make bridge {name}")))?;
                self.index(name).await?.ok_or_else(|| missing_link(name))?
            }
        };
        let address = self.handle.address().add(index, subnet.gateway().into(), subnet.prefix());
        match address.replace().execute().await {
            Ok(()) => {}
            Err(e) => return Err(link_error(format!("give {} to bridge {name}", subnet.gateway()))(e)),
        }
        let mut addresses = self.handle.address().get().set_link_index_filter(index).execute();
        while let Some(address) = addresses.next().await {
            let address = address.map_err(link_error(format!("list addresses of {name}")))?;
            let is_other = |attribute: &AddressAttribute| matches!(attribute, AddressAttribute::Address(IpAddr::V4(ip)) if *ip != subnet.gateway());
            if address.attributes.iter().any(is_other) {
                let remove = self.handle.address().del(address).execute().await;
                remove.map_err(link_error(format!("take an address from bridge {name}")))?;
            }
        }
        self.up(name, index, None).await?;
        Ok(index)
    }

    /// Makes a persistent tap in this group. A new tap is down and on no bridge.
    pub(crate) async fn ensure_tap(&self, name: &str, group: u32) -> Result<u32, NetError> {
        let index = match self.index(name).await? {
            Some(index) => index,
            None => {
                let failed = |source| NetError::Link { operation: format!("make tap {name}"), source };
                make_tap(name).map_err(failed)?;
                self.index(name).await?.ok_or_else(|| missing_link(name))?
            }
        };
        self.set_group(name, index, group).await?;
        Ok(index)
    }

    /// Puts an interface into a group, which the packet filter matches.
    pub(crate) async fn set_group(&self, name: &str, index: u32, group: u32) -> Result<(), NetError> {
        let message = LinkUnspec::new_with_index(index).append_extra_attribute(LinkAttribute::Group(group));
        let set = self.handle.link().set(message.build()).execute().await;
        set.map_err(link_error(format!("put {name} into group {group}")))
    }

    /// Takes an interface down. `Ok` if it does not exist.
    pub(crate) async fn down(&self, name: &str) -> Result<(), NetError> {
        let Some(index) = self.index(name).await? else { return Ok(()) };
        let set = self.handle.link().set(LinkUnspec::new_with_index(index).down().build()).execute().await;
        set.map_err(link_error(format!("take down {name}")))
    }

    /// Brings an interface up, as a port of the bridge if one is given.
    pub(crate) async fn up(&self, name: &str, index: u32, bridge: Option<u32>) -> Result<(), NetError> {
        let mut message = LinkUnspec::new_with_index(index).up();
        if let Some(bridge) = bridge {
            message = message.controller(bridge);
        }
        let set = self.handle.link().set(message.build()).execute().await;
        set.map_err(link_error(format!("bring up {name}")))
    }

    /// Makes a veth pair, both ends down.
    pub(crate) async fn make_pair(&self, near: &str, far: &str) -> Result<(), NetError> {
        let add = self.handle.link().add(LinkVeth::new(near, far).build()).execute().await;
        add.map_err(link_error(format!("make the pair {near}, {far}")))
    }

    /// Moves an interface to the network namespace that this descriptor refers to.
    pub(crate) async fn move_to(&self, name: &str, index: u32, namespace: RawFd) -> Result<(), NetError> {
        let message = LinkUnspec::new_with_index(index).setns_by_fd(namespace);
        let set = self.handle.link().set(message.build()).execute().await;
        set.map_err(link_error(format!("move {name} to another network namespace")))
    }

    /// MTU of an interface, bytes.
    pub(crate) async fn mtu(&self, name: &str) -> Result<u32, NetError> {
        let link = self.handle.link().get().match_name(name).execute().try_next().await;
        let link = link.map_err(link_error(format!("look up interface {name}")))?;
        let mtu = |attribute: &LinkAttribute| match attribute {
            LinkAttribute::Mtu(mtu) => Some(*mtu),
            _ => None,
        };
        link.iter().flat_map(|link| &link.attributes).find_map(mtu).ok_or_else(|| missing_link(name))
    }

    /// Sets the MTU of an interface.
    pub(crate) async fn set_mtu(&self, name: &str, index: u32, mtu: u32) -> Result<(), NetError> {
        let message = LinkUnspec::new_with_index(index).mtu(mtu);
        let set = self.handle.link().set(message.build()).execute().await;
        set.map_err(link_error(format!("set the MTU of {name} to {mtu}")))
    }

    /// Redirects every frame that an interface receives to another one, so that nothing else sees it. Replaces an earlier
    /// redirection.
    pub(crate) async fn redirect(&self, name: &str, from: u32, to: u32) -> Result<(), NetError> {
        let operation = format!("redirect the frames of {name}");
        let index = from.cast_signed();
        let mut disciplines = self.handle.qdisc();
        let mut old = disciplines.del(index);
        old.message_mut().header.parent = TcHandle::INGRESS;
        old.message_mut().header.handle = TcHandle::from(INGRESS_HANDLE);
        let _there_was_none = old.execute().await;
        disciplines.add(index).ingress().execute().await.map_err(link_error(operation.clone()))?;
        let mut filters = self.handle.traffic_filter(index);
        let filter =
            filters.add().parent(INGRESS_HANDLE).priority(1).protocol(ETH_P_ALL.to_be()).redirect(to);
        filter.map_err(link_error(operation.clone()))?.execute().await.map_err(link_error(operation))
    }

    /// Removes an interface. `Ok` if it does not exist.
    pub(crate) async fn delete(&self, name: &str) -> Result<(), NetError> {
        let Some(index) = self.index(name).await? else { return Ok(()) };
        match self.handle.link().del(index).execute().await {
            Ok(()) => Ok(()),
            Err(rtnetlink::Error::NetlinkError(e)) if e.raw_code() == -libc::ENODEV => Ok(()),
            Err(e) => Err(link_error(format!("remove interface {name}"))(e)),
        }
    }

    /// Networks that this host has addresses in or routes to, without default routes.
    pub(crate) async fn networks(&self) -> Result<Vec<Subnet>, NetError> {
        let mut networks = Vec::new();
        let mut addresses = self.handle.address().get().execute();
        while let Some(address) = addresses.next().await {
            let address = address.map_err(link_error("list addresses".to_owned()))?;
            networks.extend(address.attributes.iter().filter_map(|attribute| match attribute {
                AddressAttribute::Address(IpAddr::V4(ip)) => {
                    Some(Subnet::around(*ip, address.header.prefix_len))
                }
                _ => None,
            }));
        }
        let mut routes = self.handle.route().get(RouteMessageBuilder::<Ipv4Addr>::new().build()).execute();
        while let Some(route) = routes.next().await {
            let route = route.map_err(link_error("list routes".to_owned()))?;
            let prefix = route.header.destination_prefix_length;
            networks.extend(route.attributes.iter().filter_map(|attribute| match attribute {
                RouteAttribute::Destination(RouteAddress::Inet(ip)) if prefix > 0 => {
                    Some(Subnet::around(*ip, prefix))
                }
                _ => None,
            }));
        }
        Ok(networks)
    }
}

/// Networks that this host has addresses in or routes to, without default routes.
///
/// # Errors
/// [`NetError::Link`].
pub async fn host_networks() -> Result<Vec<Subnet>, NetError> {
    Links::open()?.networks().await
}

pub(crate) fn missing_link(name: &str) -> NetError {
    NetError::Link { operation: format!("look up interface {name}"), source: io::ErrorKind::NotFound.into() }
}
