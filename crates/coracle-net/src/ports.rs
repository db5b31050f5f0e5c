//! Ports of the node that are forwarded to guests. Each port belongs to one VM.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use coracle_hypervisor::{Forward, Protocol};
use coracle_types::VmId;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};

use crate::NetError;

/// Keeps other programs of the node from using a port. The socket is bound but does not listen: while the VM is off,
/// connections are refused.
#[derive(Debug)]
struct Reservation {
    forward: Forward,
    _socket: OwnedFd,
}

/// Reserved ports by VM.
#[derive(Debug, Default)]
pub(crate) struct HostPorts(HashMap<VmId, Vec<Reservation>>);

impl HostPorts {
    /// Reserves the ports of a VM, all or none. Idempotent.
    ///
    /// # Errors
    /// [`NetError::PortTaken`] if another VM has a port; [`NetError::Port`] if the port cannot be bound.
    pub(crate) fn claim(&mut self, id: &VmId, wanted: &[Forward]) -> Result<(), NetError> {
        let held = self.0.remove(id).unwrap_or_default();
        let mut reservations = Vec::new();
        for forward in wanted {
            let taken = |(_, ports): &(&VmId, &Vec<Reservation>)| {
                ports.iter().any(|port| collide(&port.forward, forward))
            };
            if let Some((holder, _)) = self.0.iter().find(taken) {
                return Err(NetError::PortTaken { forward: *forward, holder: holder.clone() });
            }
            if held.iter().any(|port| port.forward == *forward) {
                continue;
            }
            let socket = reserve(forward).map_err(|source| NetError::Port { forward: *forward, source })?;
            reservations.push(Reservation { forward: *forward, _socket: socket });
        }
        reservations.extend(held.into_iter().filter(|port| wanted.contains(&port.forward)));
        if !reservations.is_empty() {
            self.0.insert(id.clone(), reservations);
        }
        Ok(())
    }

    /// Releases the ports of a VM.
    pub(crate) fn release(&mut self, id: &VmId) {
        self.0.remove(id);
    }
}

fn collide(one: &Forward, other: &Forward) -> bool {
    let any = one.host_address.is_unspecified() || other.host_address.is_unspecified();
    (one.protocol, one.host_port) == (other.protocol, other.host_port)
        && (any || one.host_address == other.host_address)
}

fn reserve(forward: &Forward) -> io::Result<OwnedFd> {
    let kind = match forward.protocol {
        Protocol::Tcp => SocketType::STREAM,
        Protocol::Udp => SocketType::DGRAM,
    };
    let socket = socket_with(AddressFamily::INET, kind, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddr::from((forward.host_address, forward.host_port)))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn vm(name: &str) -> VmId {
        VmId::of_name(&name.parse().unwrap())
    }

    fn free_port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    fn forward(host_address: [u8; 4], host_port: u16) -> Forward {
        Forward { protocol: Protocol::Tcp, host_address: host_address.into(), host_port, guest_port: 80 }
    }

    #[test]
    fn port_belongs_to_one_vm_until_it_is_released() {
        let (mut ports, port) = (HostPorts::default(), free_port());
        let (local, any) = (forward([127, 0, 0, 1], port), forward([0, 0, 0, 0], port));
        ports.claim(&vm("a"), &[local]).unwrap();
        ports.claim(&vm("a"), &[local]).unwrap();
        assert!(matches!(ports.claim(&vm("b"), &[any]), Err(NetError::PortTaken { .. })));
        assert!(TcpListener::bind(("127.0.0.1", port)).is_err(), "other programs do not get it");
        ports.release(&vm("a"));
        ports.claim(&vm("b"), &[any]).unwrap();
    }

    #[test]
    fn port_of_another_program_is_refused() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let wanted = forward([127, 0, 0, 1], other.local_addr().unwrap().port());
        let refused = HostPorts::default().claim(&vm("a"), &[wanted]).unwrap_err();
        assert!(matches!(refused, NetError::Port { .. }), "{refused}");
    }
}
