//! Bridges and taps by netlink.

use std::io;
use std::net::{IpAddr, Ipv4Addr};

use futures_util::{StreamExt, TryStreamExt};
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::link::LinkAttribute;
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute};
use rtnetlink::{Handle, LinkBridge, LinkUnspec, RouteMessageBuilder};

use crate::tap::make_tap;
use crate::{NetError, Subnet};

/// A netlink connection, driven by the runtime until it is dropped.
#[derive(Debug)]
pub(crate) struct Links {
    handle: Handle,
    _driver: tokio::task::JoinSet<()>,
}

fn failed(operation: String) -> impl FnOnce(rtnetlink::Error) -> NetError {
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

    /// Index of an interface; `None` when it does not exist.
    pub(crate) async fn index(&self, name: &str) -> Result<Option<u32>, NetError> {
        match self.handle.link().get().match_name(name).execute().try_next().await {
            Ok(link) => Ok(link.map(|l| l.header.index)),
            Err(rtnetlink::Error::NetlinkError(e)) if e.raw_code() == -libc::ENODEV => Ok(None),
            Err(e) => Err(failed(format!("look up interface {name}"))(e)),
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
            .map_err(failed("list interfaces".to_owned()))?;
        let name = |attribute: &LinkAttribute| match attribute {
            LinkAttribute::IfName(name) => Some(name.clone()),
            _ => None,
        };
        Ok(links.iter().filter_map(|l| l.attributes.iter().find_map(name)).collect())
    }

    /// Makes the bridge, gives it the gateway's address, takes its others from it, and brings it up.
    pub(crate) async fn ensure_bridge(&self, name: &str, subnet: Subnet) -> Result<u32, NetError> {
        let index = match self.index(name).await? {
            Some(index) => index,
            None => {
                let add = self.handle.link().add(LinkBridge::new(name).build()).execute().await;
                add.map_err(failed(format!("make bridge {name}")))?;
                self.index(name).await?.ok_or_else(|| vanished(name))?
            }
        };
        let address = self.handle.address().add(index, subnet.gateway().into(), subnet.prefix());
        match address.replace().execute().await {
            Ok(()) => {}
            Err(e) => return Err(failed(format!("give {} to bridge {name}", subnet.gateway()))(e)),
        }
        let mut addresses = self.handle.address().get().set_link_index_filter(index).execute();
        while let Some(address) = addresses.next().await {
            let address = address.map_err(failed(format!("list addresses of {name}")))?;
            let is_other = |attribute: &AddressAttribute| matches!(attribute, AddressAttribute::Address(IpAddr::V4(ip)) if *ip != subnet.gateway());
            if address.attributes.iter().any(is_other) {
                let remove = self.handle.address().del(address).execute().await;
                remove.map_err(failed(format!("take an address from bridge {name}")))?;
            }
        }
        self.up(name, index, None).await?;
        Ok(index)
    }

    /// Makes a tap of that group that stays without a user; down and on no bridge when it is new.
    pub(crate) async fn ensure_tap(&self, name: &str, group: u32) -> Result<u32, NetError> {
        let index = match self.index(name).await? {
            Some(index) => index,
            None => {
                let failed = |source| NetError::Link { operation: format!("make tap {name}"), source };
                make_tap(name).map_err(failed)?;
                self.index(name).await?.ok_or_else(|| vanished(name))?
            }
        };
        self.set_group(name, index, group).await?;
        Ok(index)
    }

    /// Puts an interface into a group, by which the packet filter knows it.
    pub(crate) async fn set_group(&self, name: &str, index: u32, group: u32) -> Result<(), NetError> {
        let message = LinkUnspec::new_with_index(index).append_extra_attribute(LinkAttribute::Group(group));
        let set = self.handle.link().set(message.build()).execute().await;
        set.map_err(failed(format!("put {name} into group {group}")))
    }

    /// Takes an interface down. `Ok` when it is not there.
    pub(crate) async fn down(&self, name: &str) -> Result<(), NetError> {
        let Some(index) = self.index(name).await? else { return Ok(()) };
        let set = self.handle.link().set(LinkUnspec::new_with_index(index).down().build()).execute().await;
        set.map_err(failed(format!("take down {name}")))
    }

    /// Brings an interface up, on that bridge if one is named.
    pub(crate) async fn up(&self, name: &str, index: u32, bridge: Option<u32>) -> Result<(), NetError> {
        let mut message = LinkUnspec::new_with_index(index).up();
        if let Some(bridge) = bridge {
            message = message.controller(bridge);
        }
        let set = self.handle.link().set(message.build()).execute().await;
        set.map_err(failed(format!("bring up {name}")))
    }

    /// Removes an interface. `Ok` when it is not there.
    pub(crate) async fn delete(&self, name: &str) -> Result<(), NetError> {
        let Some(index) = self.index(name).await? else { return Ok(()) };
        match self.handle.link().del(index).execute().await {
            Ok(()) => Ok(()),
            Err(rtnetlink::Error::NetlinkError(e)) if e.raw_code() == -libc::ENODEV => Ok(()),
            Err(e) => Err(failed(format!("remove interface {name}"))(e)),
        }
    }

    /// The networks that this host has addresses in or routes to, default routes apart.
    pub(crate) async fn networks(&self) -> Result<Vec<Subnet>, NetError> {
        let mut networks = Vec::new();
        let mut addresses = self.handle.address().get().execute();
        while let Some(address) = addresses.next().await {
            let address = address.map_err(failed("list addresses".to_owned()))?;
            networks.extend(address.attributes.iter().filter_map(|attribute| match attribute {
                AddressAttribute::Address(IpAddr::V4(ip)) => {
                    Some(Subnet::around(*ip, address.header.prefix_len))
                }
                _ => None,
            }));
        }
        let mut routes = self.handle.route().get(RouteMessageBuilder::<Ipv4Addr>::new().build()).execute();
        while let Some(route) = routes.next().await {
            let route = route.map_err(failed("list routes".to_owned()))?;
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

/// The networks that this host has addresses in or routes to, default routes apart.
///
/// # Errors
/// [`NetError::Link`].
pub async fn host_networks() -> Result<Vec<Subnet>, NetError> {
    Links::open()?.networks().await
}

pub(crate) fn vanished(name: &str) -> NetError {
    NetError::Link { operation: format!("look up interface {name}"), source: io::ErrorKind::NotFound.into() }
}
