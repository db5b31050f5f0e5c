//! Port-forward of old clients: two channels and one connection for each port of the request.

use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, duplex};
use tokio::task::JoinSet;
use tokio_tungstenite::tungstenite::protocol::Message;
use tokio_util::sync::CancellationToken;

use super::channel::{Channel, Coding};
use super::connection::{self, Inputs};
use super::session::output;
use crate::activity::Activity;
use crate::forward::{self, Dial};
use crate::limits::Limits;
use crate::outbox::{Encode as _, Outbox, Output};
use crate::run;

/// Channels of a port: for its data, and for its error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Channels {
    port: u16,
    data: u8,
    error: u8,
}

/// Returns the channels of a request's ports, in their order. `None` without a port, with port 0, and with more ports than
/// channels. Pure.
pub(crate) fn channels(ports: &[u16], coding: Coding) -> Option<Vec<Channels>> {
    let of = |(n, port): (usize, &u16)| {
        let data = u8::try_from(2 * n).ok()?;
        let error = data.checked_add(1).filter(|error| *error <= coding.channel_max())?;
        (*port != 0).then_some(Channels { port: *port, data, error })
    };
    let all: Option<Vec<_>> = ports.iter().enumerate().map(of).collect();
    all.filter(|all| !all.is_empty())
}

/// Serves the forwarded connections of a WebSocket connection after its handshake, until all of them have ended.
pub(crate) async fn serve<C: AsyncRead + AsyncWrite + Unpin>(
    connection: C,
    coding: Coding,
    ports: Vec<Channels>,
    dial: Arc<dyn Dial>,
    limits: &Limits,
    stop: CancellationToken,
) {
    let (near, far): (Vec<_>, Vec<_>) = ports
        .into_iter()
        .map(|channels| {
            let (near, far) = duplex(limits.input_max);
            ((channels.data, near), (channels, far))
        })
        .unzip();
    let inputs = Inputs { coding, half_close: false, open: near };
    let session = async |outbox: Outbox<Message>, activity: Activity| {
        // Dropping the set ends the connections with the session.
        let mut connections = JoinSet::new();
        for (Channels { port, data, error }, input) in far {
            for number in [data, error] {
                outbox.control(Channel { coding, number }.data(&port.to_le_bytes()));
            }
            let [data, error] = [data, error].map(|number| output(coding, number, &outbox));
            connections.spawn(forward(port, input, data, error, Arc::clone(&dial)));
        }
        tokio::select! {
            _interruption = activity.wait_for_interruption() => {}
            _ended = connections.join_all() => run::flush_outbox(&outbox, &activity).await,
        }
    };
    connection::serve(connection, inputs, limits, stop, session).await;
}

/// Serves one forwarded connection.
async fn forward(
    port: u16,
    input: DuplexStream,
    data: Output<Channel>,
    error: Output<Channel>,
    dial: Arc<dyn Dial>,
) {
    match dial.dial(port).await {
        Ok(connection) => {
            let _either = forward::copy_until_served(input, data, connection).await;
        }
        Err(reason) => {
            let text = format!("cannot forward port {port}: {reason}");
            error.finish(text.as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_of_ports_table() {
        let pair = |port, data| Channels { port, data, error: data + 1 };
        let many = |n: u16| (1..=n).collect::<Vec<_>>();
        let last = |ports: &[u16], coding| channels(ports, coding).and_then(|all| all.last().copied());
        assert_eq!(channels(&[80, 443], Coding::Binary), Some(vec![pair(80, 0), pair(443, 2)]));
        for (why, ports, coding, want) in [
            ("none", vec![], Coding::Binary, None),
            ("port 0", vec![80, 0], Coding::Binary, None),
            ("the same port twice", vec![80, 80], Coding::Binary, Some(pair(80, 2))),
            ("as many as there are bytes", many(127), Coding::Binary, Some(pair(127, 252))),
            ("one more", many(128), Coding::Binary, None),
            ("as many as there are characters", many(40), Coding::Base64, Some(pair(40, 78))),
            ("one character more", many(41), Coding::Base64, None),
        ] {
            assert_eq!(last(&ports, coding), want, "{why}");
        }
    }
}
