//! Sends batches to the kernel.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::netlink::{NETFILTER, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};
use rustix::net::{bind, recv, send, socket_with};

use crate::Change;
use crate::encode::{HEADER, batch};

/// Error of a batch, of which no change was carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NftablesError {
    /// The kernel refused a change.
    #[error("{change}")]
    Refused {
        /// Change that was refused.
        change: Box<Change>,
        /// Cause.
        source: io::Error,
    },
    /// The socket failed, or the kernel refused the batch as a whole.
    #[error("change the packet filter over netlink")]
    Netlink(#[source] io::Error),
}

/// Connection to the packet filter of the network namespace in which it was opened. Clones share one socket.
///
/// Keep the connection open. The kernel frees deleted objects in the background, once no packet can be matched against them any
/// more. Closing a connection waits for that, for some 10 ms (`nft_rcv_nl_event` of net/netfilter/nf_tables_api.c).
#[derive(Clone, Debug)]
pub struct Connection(Arc<Mutex<OwnedFd>>);

impl Connection {
    /// Opens a netlink socket.
    ///
    /// # Errors
    /// [`NftablesError::Netlink`].
    pub fn open() -> Result<Self, NftablesError> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(NETFILTER));
        let bound = socket.and_then(|socket| bind(&socket, &SocketAddrNetlink::new(0, 0)).map(|()| socket));
        let socket = bound.map_err(|error| NftablesError::Netlink(error.into()))?;
        Ok(Self(Arc::new(Mutex::new(socket))))
    }

    /// Carries out all changes in one transaction, or none. Needs `CAP_NET_ADMIN`. Dropping the future does not stop the
    /// transaction.
    ///
    /// # Errors
    /// [`NftablesError`].
    pub async fn apply(&self, changes: Vec<Change>) -> Result<(), NftablesError> {
        if changes.is_empty() {
            return Ok(());
        }
        let connection = self.clone();
        // Blocking: the kernel processes a batch within the call that sends it.
        let done = tokio::task::spawn_blocking(move || connection.apply_blocking(changes)).await;
        done.unwrap_or_else(|ended| Err(NftablesError::Netlink(io::Error::other(ended))))
    }

    fn apply_blocking(&self, mut changes: Vec<Change>) -> Result<(), NftablesError> {
        let batch = batch(&changes);
        let answers = exchange(&self.0.lock(), &batch).map_err(NftablesError::Netlink)?;
        if let Some(Answer { number, errno }) = answers.iter().find(|answer| answer.errno != 0) {
            let source = io::Error::from_raw_os_error(*errno);
            let index = usize::try_from(*number).ok().filter(|index| *index < changes.len());
            return Err(match index {
                Some(index) => {
                    NftablesError::Refused { change: Box::new(changes.swap_remove(index)), source }
                }
                None => NftablesError::Netlink(source),
            });
        }
        let is_last =
            |answer: &Answer| usize::try_from(answer.number).is_ok_and(|it| it + 1 == changes.len());
        if answers.iter().any(is_last) {
            return Ok(());
        }
        Err(NftablesError::Netlink(io::Error::other("the kernel did not acknowledge the batch")))
    }
}

/// Answer of the kernel to one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Answer {
    number: u32,
    /// Error number; 0 for an acknowledgement.
    errno: i32,
}

/// Sends a batch. All answers are readable when the call that sends returns.
fn exchange(socket: &OwnedFd, batch: &[u8]) -> io::Result<Vec<Answer>> {
    // Discards answers to a call that failed half-way.
    let _earlier = receive_answers(socket)?;
    // A batch is one message of the socket. The kernel doubles the requested size, which its own structures need.
    sockopt::set_socket_send_buffer_size_force(socket, batch.len().max(SEND_BUFFER_MIN))?;
    let sent = send(socket, batch, SendFlags::empty())?;
    if sent != batch.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    receive_answers(socket)
}

/// Reads the answers that are readable now.
fn receive_answers(socket: &OwnedFd) -> io::Result<Vec<Answer>> {
    let mut answers = Vec::new();
    let mut buffer = vec![0; RECEIVE_BUFFER];
    loop {
        match recv(socket, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((_, length)) => answers.extend(parse(&buffer[..length.min(RECEIVE_BUFFER)])),
            Err(Errno::AGAIN) => return Ok(answers),
            // More errors than the socket buffer holds: the first ones suffice.
            Err(Errno::NOBUFS) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

const SEND_BUFFER_MIN: usize = 64 << 10;

/// Size of the receive buffer. An error contains the request (netlink(7)), so a message can be as long as a rule.
const RECEIVE_BUFFER: usize = 16 << 10;

/// Parses answers: messages of type `NLMSG_ERROR`, with a negative errno and the header of the request.
fn parse(mut bytes: &[u8]) -> Vec<Answer> {
    let mut answers = Vec::new();
    let number = |bytes: &[u8], at: usize| Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
    while let Some(length) = number(bytes, 0).and_then(|length| usize::try_from(length).ok()) {
        let kind = bytes.get(4..).and_then(|rest| rest.first_chunk()).map(|two| u16::from_ne_bytes(*two));
        if kind.map(i32::from) == Some(libc::NLMSG_ERROR)
            && let (Some(errno), Some(number)) = (number(bytes, HEADER), number(bytes, HEADER + 4 + 8))
        {
            answers.push(Answer { number, errno: errno.cast_signed().wrapping_neg() });
        }
        let Some(rest) = bytes.get(length.max(HEADER).next_multiple_of(4)..) else { break };
        bytes = rest;
    }
    answers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(number: u32, errno: i32) -> Vec<u8> {
        let mut bytes = 36_u32.to_ne_bytes().to_vec();
        bytes.extend(u16::try_from(libc::NLMSG_ERROR).unwrap().to_ne_bytes());
        bytes.extend([0; 10]);
        bytes.extend((-errno).to_ne_bytes());
        bytes.extend([0; 8]);
        bytes.extend(number.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes
    }

    #[test]
    fn answers_are_read_one_after_another() {
        let both = [error(3, libc::ENOENT), error(7, 0)].concat();
        let want = [Answer { number: 3, errno: libc::ENOENT }, Answer { number: 7, errno: 0 }];
        assert_eq!(parse(&both), want);
        assert_eq!(parse(&both[..50]), want[..1], "a message that is cut off");
        assert_eq!(parse(&[0; 32]), [], "lengths of zero");
    }
}
