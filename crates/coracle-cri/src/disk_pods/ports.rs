//! Ports of a disk pod: those of its guest, and its display.

use async_trait::async_trait;
use coracle_host::Host;
use coracle_pod::streams::PortDialer;
use coracle_streaming::{Connection, Dial};

/// Port of VNC servers (RFC 6143, 9).
const VNC: u16 = 5900;

/// Ports of the VM of a disk container. Without a VNC server in the guest, or while it boots, the VNC port leads to the VMM's
/// display.
#[derive(Debug)]
pub(crate) struct DiskPorts {
    pub(crate) host: Host,
    pub(crate) vm: String,
    pub(crate) guest: PortDialer,
}

#[async_trait]
impl Dial for DiskPorts {
    async fn dial(&self, port: u16) -> Result<Connection, String> {
        if port != VNC {
            return self.guest.dial(port).await;
        }
        let is_up = self.host.get(&self.vm).is_ok_and(|view| view.guest.is_some());
        if is_up && let Ok(server) = self.guest.dial(port).await {
            return Ok(server);
        }
        let screen = self.host.display(&self.vm).await.map_err(|error| error.chain())?;
        Ok(Box::new(screen))
    }
}
