//! `coracle port-forward`.

use coracle_api::subresources::Subresource;
use coracle_proto::host as pb;
use pb::host_client::HostClient;
use pb::port_forward_request::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use super::listen::{listen, serve};
use crate::cli::{Global, PortForwardArgs};
use crate::client::{NameMatch, reach};
use crate::error::Failure;
use crate::tasks::stop_signal;

/// Listens until ^C; each connection becomes one stream into the guest.
pub async fn run(global: &Global, args: PortForwardArgs) -> miette::Result<u8> {
    // Reports a missing VM at once, not at the first connection.
    let reached = reach(global, &args.vm, NameMatch::Exact, Subresource::PortForward).await?;
    let mut listeners = JoinSet::new();
    for ports in &args.ports {
        let (local, guest) = parse(ports)?;
        let (listener, at) = listen(args.address, local).await?;
        eprintln!("forwarding {at} -> {}:{guest}", args.vm);
        let (node, vm) = (reached.node.clone(), reached.vm.clone());
        listeners.spawn(serve(listener, move |stream| carry(stream, node.clone(), vm.clone(), guest)));
    }
    tokio::select! {
        () = stop_signal() => {}
        _ended = listeners.join_next() => {}
    }
    Ok(0)
}

fn parse(text: &str) -> Result<(u16, u16), Failure> {
    let bad = || Failure::usage(format!("invalid ports {text:?}: want [LOCAL:]GUEST"));
    let (local, guest) = text.split_once(':').unwrap_or((text, text));
    let guest: u16 = guest.parse().map_err(|_| bad())?;
    let local = if local.is_empty() { 0 } else { local.parse().map_err(|_| bad())? };
    Ok((local, guest))
}

async fn carry(
    stream: TcpStream,
    mut client: HostClient<Channel>,
    vm: String,
    port: u16,
) -> Result<(), Failure> {
    let (mut read, mut write) = stream.into_split();
    let (requests, outgoing) = mpsc::channel(8);
    let start = Message::Start(pb::PortForwardStart { vm, port: port.into() });
    let upload = async move {
        let send =
            async |message| requests.send(pb::PortForwardRequest { message: Some(message) }).await.is_ok();
        let mut open = send(start).await;
        let mut buffer = vec![0; 32 * 1024];
        while open {
            open = match read.read(&mut buffer).await {
                Ok(n @ 1..) => send(Message::Data(buffer.get(..n).unwrap_or_default().to_vec())).await,
                Ok(_) | Err(_) => break,
            };
        }
        send(Message::CloseWrite(true)).await;
        // The request stream stays open until the guest has sent all its data.
        std::future::pending::<()>().await;
    };
    let download = async {
        let mut replies = client.port_forward(ReceiverStream::new(outgoing)).await?.into_inner();
        while let Some(reply) = replies.message().await? {
            if write.write_all(&reply.data).await.is_err() {
                break;
            }
        }
        Ok(())
    };
    tokio::select! {
        result = download => result,
        () = upload => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_pair_or_single_port_is_parsed() {
        assert_eq!(parse("8080:80").unwrap(), (8080, 80));
        assert_eq!(parse("80").unwrap(), (80, 80));
        assert_eq!(parse(":80").unwrap(), (0, 80));
        assert!(parse("x:80").is_err() && parse("80:").is_err());
    }
}
