//! Address leases of VMs. In memory; rebuilt from the records of the VMs at start.
//!
//! Addresses rotate: peers keep connection, name and ARP entries for minutes, so an address that was released is the last one
//! to be leased again. After a restart only the leased addresses are known. Addresses above the highest of them are leased
//! first, because a gap below it was most likely released.

use std::collections::{BTreeMap, HashMap};
use std::net::Ipv4Addr;

use coracle_types::VmId;

use crate::{Lease, NetError, Subnet};

/// Address leases of one subnet.
#[derive(Debug)]
pub struct Ipam {
    subnet: Subnet,
    by_address: BTreeMap<Ipv4Addr, VmId>,
    by_vm: HashMap<VmId, Ipv4Addr>,
    /// Address after which the search for a free one begins.
    last: Ipv4Addr,
    /// Addresses that were released, with the number of the release.
    released: HashMap<Ipv4Addr, u64>,
    releases: u64,
}

impl Ipam {
    /// Makes an IPAM without leases.
    #[must_use]
    pub fn new(subnet: Subnet) -> Self {
        Self {
            subnet,
            by_address: BTreeMap::new(),
            by_vm: HashMap::new(),
            last: subnet.gateway(),
            released: HashMap::new(),
            releases: 0,
        }
    }

    /// Leases an address: the one that the VM has, the wanted one, or a free one. Addresses that were never leased come first,
    /// then the one that was released first.
    ///
    /// # Errors
    /// [`NetError::Exhausted`], [`NetError::Taken`], [`NetError::Outside`].
    pub fn lease(&mut self, id: &VmId, wanted: Option<Ipv4Addr>) -> Result<Lease, NetError> {
        let subnet = self.subnet;
        let address = match (self.by_vm.get(id), wanted) {
            (Some(held), None) => *held,
            (Some(held), Some(wanted)) if *held == wanted => wanted,
            (_, Some(address)) if !subnet.has_guest(address) => {
                return Err(NetError::Outside { address, subnet });
            }
            (_, Some(address)) => match self.by_address.get(&address) {
                Some(holder) => return Err(NetError::Taken { address, holder: holder.clone() }),
                None => address,
            },
            (None, None) => self.next().ok_or(NetError::Exhausted { subnet })?,
        };
        if self.by_vm.get(id) != Some(&address) {
            self.release(id);
        }
        self.last = match wanted {
            Some(_) => self.last.max(address),
            None => address,
        };
        self.released.remove(&address);
        self.by_address.insert(address, id.clone());
        self.by_vm.insert(id.clone(), address);
        Ok(Lease { address, prefix: subnet.prefix(), gateway: subnet.gateway(), address6: None })
    }

    /// True when no VM has an address.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_vm.is_empty()
    }

    /// Releases the address of a VM.
    pub fn release(&mut self, id: &VmId) {
        if let Some(address) = self.by_vm.remove(id) {
            self.by_address.remove(&address);
            self.releases += 1;
            self.released.insert(address, self.releases);
        }
    }

    fn next(&self) -> Option<Ipv4Addr> {
        let after = self.subnet.guests().filter(|address| *address > self.last);
        let before = self.subnet.guests().take_while(|address| *address <= self.last);
        let mut fresh = after.chain(before).filter(|address| !self.by_address.contains_key(address));
        let oldest =
            || self.released.iter().min_by_key(|(_, release)| **release).map(|(address, _)| *address);
        fresh.find(|address| !self.released.contains_key(address)).or_else(oldest)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn vm(name: &str) -> VmId {
        VmId::of_name(&name.parse().unwrap())
    }

    #[test]
    fn addresses_are_kept_honoured_or_refused() {
        let mut ipam = Ipam::new("10.100.0.0/29".parse().unwrap());
        let a = ipam.lease(&vm("a"), None).unwrap();
        assert_eq!(a.address.to_string(), "10.100.0.2");
        assert_eq!(ipam.lease(&vm("a"), None).unwrap(), a, "asking again changes nothing");
        let wanted = Some("10.100.0.5".parse().unwrap());
        assert_eq!(ipam.lease(&vm("b"), wanted).unwrap().address.to_string(), "10.100.0.5");
        assert!(matches!(ipam.lease(&vm("c"), wanted), Err(NetError::Taken { .. })));
        let outside = Some("10.200.0.5".parse().unwrap());
        assert!(matches!(ipam.lease(&vm("c"), outside), Err(NetError::Outside { .. })));
        for name in ["c", "d", "e"] {
            ipam.lease(&vm(name), None).unwrap();
        }
        assert!(matches!(ipam.lease(&vm("f"), None), Err(NetError::Exhausted { .. })));
        ipam.release(&vm("a"));
        assert_eq!(ipam.lease(&vm("f"), None).unwrap().address, a.address, "a freed address is used again");
    }

    /// Steps: `+a` leases, `+a=5` asks for the address, `-a` releases, `!` restarts with the records.
    fn replay(steps: &str) -> Vec<u8> {
        let subnet = "10.100.0.0/29".parse().unwrap();
        let (mut ipam, mut given) = (Ipam::new(subnet), vec![]);
        for step in steps.split_whitespace() {
            let (kind, rest) = step.split_at(1);
            let (name, wanted) = rest.split_once('=').map_or((rest, None), |(name, n)| (name, Some(n)));
            let wanted = wanted.map(|n| Ipv4Addr::new(10, 100, 0, n.parse().unwrap()));
            match kind {
                "+" => given.push(ipam.lease(&vm(name), wanted).unwrap().address.octets()[3]),
                "-" => ipam.release(&vm(name)),
                _ => {
                    let records = std::mem::replace(&mut ipam, Ipam::new(subnet)).by_vm;
                    for (id, address) in records {
                        ipam.lease(&id, Some(address)).unwrap();
                    }
                }
            }
        }
        given
    }

    #[test]
    fn released_address_is_given_last_table() {
        for (why, steps, want) in [
            ("in order", "+a +b +c", &[2, 3, 4][..]),
            ("one that was released waits for all others", "+a -a +b +c +d +e +f", &[2, 3, 4, 5, 6, 2]),
            ("the one released first comes first", "+a +b +c +d +e -d -b +f +g", &[2, 3, 4, 5, 6, 5, 3]),
            (
                "released twice, it waits from the last time",
                "+a +b +c +d +e -a -b +x=2 -x +f",
                &[2, 3, 4, 5, 6, 2, 3],
            ),
            ("one that is wanted is given at once", "+a -a +b=2", &[2, 2]),
            ("a wanted one does not skip others for good", "+a=6 +b +c +d +e", &[6, 2, 3, 4, 5]),
            ("after a restart, first those above the records", "+a +b -a ! +c +d +e +f", &[2, 3, 4, 5, 6, 2]),
            ("asking again releases nothing", "+a +a +b", &[2, 2, 3]),
        ] {
            assert_eq!(replay(steps), want, "{why}");
        }
    }

    proptest! {
        #[test]
        fn address_is_never_leased_twice(steps in prop::collection::vec((0_u8..20, any::<bool>()), 1..80)) {
            let mut ipam = Ipam::new("10.100.0.0/28".parse().unwrap());
            let mut held: HashMap<u8, Ipv4Addr> = HashMap::new();
            for (n, take) in steps {
                let id = vm(&format!("vm{n}"));
                if take {
                    if let Ok(lease) = ipam.lease(&id, None) {
                        held.insert(n, lease.address);
                    }
                } else {
                    ipam.release(&id);
                    held.remove(&n);
                }
                let distinct: HashSet<_> = held.values().collect();
                prop_assert_eq!(distinct.len(), held.len());
            }
        }
    }
}
