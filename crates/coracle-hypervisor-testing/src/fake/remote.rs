//! Guests in another process than their driver, like real ones, so that measurements of the node's process cover the node
//! alone.
//!
//! ```text
//! node ── start, connect + socket, console + socket, hold, let run, stop ─▶ process of guests
//!      ◀─ powered off ─────────────────────────────────────────────────────
//! ```
//! A message is one packet of a `SOCK_SEQPACKET` pair: kind, serial and milliseconds, and for a stream its end as `SCM_RIGHTS`
//! (`unix(7)`).

use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType, recvmsg, sendmsg, shutdown,
    socketpair,
};
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{FakeMachines, guest};

/// Length of a packet: kind, serial number, milliseconds.
const PACKET: usize = 17;
/// Kinds of packets.
const START: u8 = 1;
const CONNECT: u8 = 2;
const CONSOLE: u8 = 3;
const STOP: u8 = 4;
const HOLD: u8 = 5;
const LET_RUN: u8 = 6;
const POWERED_OFF: u8 = 7;

/// Returns a pair of sockets: one for [`FakeMachines::with_guests_at`], one for [`serve`] in the other process.
///
/// # Errors
/// The system call's.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Process of the guests, as the driver sees it.
#[derive(Debug)]
pub(super) struct Guests {
    socket: OwnedFd,
}

impl Drop for Guests {
    /// Ends the thread and the other side.
    fn drop(&mut self) {
        let _gone = shutdown(&self.socket, Shutdown::Both);
    }
}

/// Guest in the other process; ends on drop.
#[derive(Debug)]
pub(super) struct RemoteGuest {
    guests: Arc<Guests>,
    serial: u64,
}

impl Guests {
    /// Starts a thread that receives which guests have powered off, until the process ends.
    pub(super) fn new(socket: OwnedFd, machines: Weak<FakeMachines>) -> io::Result<Arc<Self>> {
        let hears = socket.try_clone()?;
        thread::Builder::new().name("fake-guests".to_owned()).spawn(move || {
            while let Ok(Some((POWERED_OFF, serial, ..))) = receive(&hears) {
                let Some(machines) = machines.upgrade() else { return };
                machines.end_serial(serial);
            }
        })?;
        Ok(Arc::new(Self { socket }))
    }

    pub(super) fn start(self: &Arc<Self>, serial: u64, boot_time: Duration) -> io::Result<RemoteGuest> {
        send(&self.socket, START, serial, boot_time, None)?;
        Ok(RemoteGuest { guests: self.clone(), serial })
    }
}

impl RemoteGuest {
    /// Opens a session with the agent.
    pub(super) fn connect(&self) -> io::Result<UnixStream> {
        self.stream(CONNECT)
    }

    /// Opens the console.
    pub(super) fn console(&self) -> io::Result<UnixStream> {
        self.stream(CONSOLE)
    }

    /// Pauses or resumes the vCPUs; a paused guest answers no calls.
    pub(super) fn hold(&self, held: bool) -> io::Result<()> {
        let kind = if held { HOLD } else { LET_RUN };
        send(&self.guests.socket, kind, self.serial, Duration::ZERO, None)
    }

    fn stream(&self, kind: u8) -> io::Result<UnixStream> {
        let (host, guest) = std::os::unix::net::UnixStream::pair()?;
        send(&self.guests.socket, kind, self.serial, Duration::ZERO, Some(guest.into()))?;
        host.set_nonblocking(true)?;
        UnixStream::from_std(host)
    }
}

impl Drop for RemoteGuest {
    fn drop(&mut self) {
        // If the process has ended, so have its guests.
        let _gone = send(&self.guests.socket, STOP, self.serial, Duration::ZERO, None);
    }
}

/// Serves the guests of the node behind `socket` until the node closes it. Blocking; guests run on the caller's runtime.
///
/// # Errors
/// An invalid message, or a stream that cannot be used.
pub fn serve(socket: &OwnedFd) -> io::Result<()> {
    let _runtime = Handle::current().enter();
    let mut guests: HashMap<u64, (guest::Handle, DropGuard)> = HashMap::new();
    while let Some((kind, serial, boot_time, stream)) = receive(socket)? {
        match (kind, stream) {
            (START, None) => {
                let stop = CancellationToken::new();
                let off = socket.try_clone()?;
                let power_off = move || {
                    // If the node has ended, there is no receiver.
                    let _gone = send(&off, POWERED_OFF, serial, Duration::ZERO, None);
                };
                let guest = guest::start(boot_time, None, stop.clone(), power_off);
                guests.insert(serial, (guest, stop.drop_guard()));
            }
            (STOP, None) => drop(guests.remove(&serial)),
            (HOLD | LET_RUN, None) => {
                if let Some((guest, _)) = guests.get(&serial) {
                    guest.hold(kind == HOLD);
                }
            }
            (CONNECT | CONSOLE, Some(stream)) => {
                let Some((guest, _)) = guests.get(&serial) else { continue };
                let stream = std::os::unix::net::UnixStream::from(stream);
                stream.set_nonblocking(true)?;
                let stream = UnixStream::from_std(stream)?;
                if kind == CONSOLE {
                    guest.open_console(stream);
                } else {
                    // Too many sessions wait: the client sees the end of this one.
                    let _busy = guest.accept(stream);
                }
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
    Ok(())
}

fn send(
    socket: &OwnedFd,
    kind: u8,
    serial: u64,
    boot_time: Duration,
    stream: Option<OwnedFd>,
) -> io::Result<()> {
    let mut packet = vec![kind];
    packet.extend_from_slice(&serial.to_le_bytes());
    packet.extend_from_slice(&u64::try_from(boot_time.as_millis()).unwrap_or(u64::MAX).to_le_bytes());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let rights = stream.as_ref().map(|stream| [stream.as_fd()]);
    if let Some(rights) = &rights {
        control.push(SendAncillaryMessage::ScmRights(rights));
    }
    sendmsg(socket, &[IoSlice::new(&packet)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

type Packet = (u8, u64, Duration, Option<OwnedFd>);

/// Receives a packet; `None`: the other end is closed.
fn receive(socket: &OwnedFd) -> io::Result<Option<Packet>> {
    let mut packet = [0; PACKET];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(socket, &mut [IoSliceMut::new(&mut packet)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let streams = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
        _ => None,
    });
    let stream = streams.last();
    let [kind, rest @ ..] = packet;
    let (serial, boot_time) = rest.split_at(8);
    match (received.bytes, serial.try_into(), boot_time.try_into()) {
        (0, ..) => Ok(None),
        (PACKET, Ok(serial), Ok(boot_time)) => {
            let boot_time = Duration::from_millis(u64::from_le_bytes(boot_time));
            Ok(Some((kind, u64::from_le_bytes(serial), boot_time, stream)))
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}
