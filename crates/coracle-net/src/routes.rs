//! Routes from this host to the Pod subnets of other nodes, each via the address of its node: all nodes are on one link.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use futures_util::StreamExt as _;
use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol,
};

use crate::link::{Links, link_error};
use crate::{NetError, Subnet};

/// Protocol number of the routes that this module makes (rtnetlink(7), `rtm_protocol`). Numbers above 4 are for routing
/// daemons; iproute2 has no name for this one.
const PROTOCOL: u8 = 214;

/// Pod subnet of a node, and the address of that node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodRoute {
    /// Pod subnet.
    pub destination: Subnet,
    /// Address of the node that the subnet belongs to.
    pub gateway: Ipv4Addr,
}

/// Existing route of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    destination: Subnet,
    gateway: Option<Ipv4Addr>,
    is_ours: bool,
}

/// A change of the routes of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteChange {
    /// The route was made, or now leads to another node.
    Set(PodRoute),
    /// The route to this subnet was removed.
    Removed(Subnet),
}

/// Computes the changes. Routes of other programs are left alone: a network plugin may have a route to the same subnet. Pure.
fn plan(wanted: &[PodRoute], found: &[Found]) -> Vec<RouteChange> {
    let key = |subnet: Subnet| subnet.to_string();
    let mut ours: BTreeMap<_, _> =
        found.iter().filter(|f| f.is_ours).map(|f| (key(f.destination), f)).collect();
    let mut changes = Vec::new();
    for route in wanted {
        let others = found.iter().any(|f| !f.is_ours && f.destination == route.destination);
        let has = ours.get(&key(route.destination)).map(|f| f.gateway);
        if others {
            continue;
        }
        ours.remove(&key(route.destination));
        if has != Some(Some(route.gateway)) {
            changes.push(RouteChange::Set(*route));
        }
    }
    let removed: Vec<_> = ours.values().map(|f| RouteChange::Removed(f.destination)).collect();
    [removed, changes].concat()
}

/// Routes of this host to the Pod subnets of other nodes.
#[derive(Debug)]
pub struct PodRoutes {
    links: Links,
}

impl PodRoutes {
    /// Opens a netlink socket in the network namespace of this thread.
    ///
    /// # Errors
    /// [`NetError::Link`].
    pub fn open() -> Result<Self, NetError> {
        Ok(Self { links: Links::open()? })
    }

    /// Makes exactly these routes, next to those of other programs, and returns the changes. Idempotent, cancel-safe. A route
    /// that fails does not prevent the others.
    ///
    /// # Errors
    /// First [`NetError::Link`]: there can be no route via a gateway that is on no link of this host.
    pub async fn reconcile(&self, wanted: &[PodRoute]) -> Result<Vec<RouteChange>, NetError> {
        let (mut done, mut first) = (Vec::new(), Ok(()));
        for change in plan(wanted, &self.list_routes().await?) {
            let result = match change {
                RouteChange::Set(route) => self.set(route).await,
                RouteChange::Removed(destination) => self.remove(destination).await,
            };
            match result {
                Ok(()) => done.push(change),
                Err(error) => first = first.and(Err(error)),
            }
        }
        first.map(|()| done)
    }

    async fn set(&self, PodRoute { destination, gateway }: PodRoute) -> Result<(), NetError> {
        let message = route_to(destination).gateway(gateway).build();
        let set = self.links.handle().route().add(message).replace().execute().await;
        set.map_err(link_error(format!("make a route to {destination} by {gateway}")))
    }

    async fn remove(&self, destination: Subnet) -> Result<(), NetError> {
        match self.links.handle().route().del(route_to(destination).build()).execute().await {
            Err(rtnetlink::Error::NetlinkError(e)) if e.raw_code() == -libc::ESRCH => Ok(()),
            removed => removed.map_err(link_error(format!("remove the route to {destination}"))),
        }
    }

    /// Routes to networks in the main table.
    async fn list_routes(&self) -> Result<Vec<Found>, NetError> {
        let request = RouteMessageBuilder::<Ipv4Addr>::new().build();
        let mut routes = self.links.handle().route().get(request).execute();
        let mut found = Vec::new();
        while let Some(route) = routes.next().await {
            found.extend(parse_route(&route.map_err(link_error("list routes".to_owned()))?));
        }
        Ok(found)
    }
}

fn route_to(destination: Subnet) -> RouteMessageBuilder<Ipv4Addr> {
    RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(destination.network(), destination.prefix())
        .protocol(RouteProtocol::Other(PROTOCOL))
}

fn parse_route(route: &RouteMessage) -> Option<Found> {
    let header = &route.header;
    let destination = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(ip)) => {
            Some(Subnet::around(*ip, header.destination_prefix_length))
        }
        _ => None,
    })?;
    let gateway = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet(ip)) => Some(*ip),
        _ => None,
    });
    let is_ours = header.protocol == RouteProtocol::Other(PROTOCOL);
    (header.table == RouteHeader::RT_TABLE_MAIN).then_some(Found { destination, gateway, is_ours })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(destination: &str, gateway: &str) -> PodRoute {
        PodRoute { destination: destination.parse().unwrap(), gateway: gateway.parse().unwrap() }
    }

    fn found_route(destination: &str, gateway: &str, is_ours: bool) -> Found {
        let route = route(destination, gateway);
        Found { destination: route.destination, gateway: Some(route.gateway), is_ours }
    }

    #[test]
    fn routes_follow_added_moved_and_removed_nodes() {
        let (a, b) = (route("10.244.1.0/24", "192.0.2.1"), route("10.244.2.0/24", "192.0.2.2"));
        let ours = |route: PodRoute| Found {
            destination: route.destination,
            gateway: Some(route.gateway),
            is_ours: true,
        };
        for (why, wanted, found, want) in [
            ("nothing is there", vec![a, b], vec![], vec![RouteChange::Set(a), RouteChange::Set(b)]),
            ("all is there", vec![a, b], vec![ours(a), ours(b)], vec![]),
            ("a node has gone", vec![b], vec![ours(a), ours(b)], vec![RouteChange::Removed(a.destination)]),
            (
                "a node has another address",
                vec![a],
                vec![found_route("10.244.1.0/24", "192.0.2.9", true)],
                vec![RouteChange::Set(a)],
            ),
            (
                "a network plugin made it",
                vec![a],
                vec![found_route("10.244.1.0/24", "192.0.2.1", false)],
                vec![],
            ),
            (
                "a network plugin made it, too",
                vec![a],
                vec![found_route("10.244.1.0/24", "192.0.2.1", false), ours(a)],
                vec![RouteChange::Removed(a.destination)],
            ),
            ("routes of others stay", vec![], vec![found_route("10.96.0.0/12", "192.0.2.1", false)], vec![]),
        ] {
            assert_eq!(plan(&wanted, &found), want, "{why}");
        }
    }
}
