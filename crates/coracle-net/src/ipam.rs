//! Who has which address. In memory; rebuilt from the VMs' records at start.

use std::collections::{BTreeMap, HashMap};
use std::net::Ipv4Addr;

use coracle_types::VmId;

use crate::{Lease, NetError, Subnet};

/// The addresses of one subnet.
#[derive(Debug)]
pub struct Ipam {
    subnet: Subnet,
    by_address: BTreeMap<Ipv4Addr, VmId>,
    by_vm: HashMap<VmId, Ipv4Addr>,
}

impl Ipam {
    /// Without leases.
    #[must_use]
    pub fn new(subnet: Subnet) -> Self {
        Self { subnet, by_address: BTreeMap::new(), by_vm: HashMap::new() }
    }

    /// Gives an address: the one the VM has, the wanted one, or the lowest free one.
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
            (None, None) => subnet
                .guests()
                .find(|a| !self.by_address.contains_key(a))
                .ok_or(NetError::Exhausted { subnet })?,
        };
        self.release(id);
        self.by_address.insert(address, id.clone());
        self.by_vm.insert(id.clone(), address);
        Ok(Lease { address, prefix: subnet.prefix(), gateway: subnet.gateway() })
    }

    /// Takes the VM's address back.
    pub fn release(&mut self, id: &VmId) {
        if let Some(address) = self.by_vm.remove(id) {
            self.by_address.remove(&address);
        }
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

    proptest! {
        #[test]
        fn no_address_is_held_twice(steps in prop::collection::vec((0_u8..20, any::<bool>()), 1..80)) {
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
