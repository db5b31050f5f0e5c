//! `coracle vnc`, and the display stream that it uses.

use coracle_proto::host as pb;
use pb::display_request::Message;
use pb::host_client::HostClient;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use super::listen::{listen, serve};
use crate::cli::{Global, VncArgs};
use crate::client::{NameMatch, connect_local, find};
use crate::error::Failure;
use crate::output;
use crate::tasks::stop_signal;

/// Listens until ^C; each viewer becomes one connection to the display.
pub async fn run(global: &Global, args: VncArgs) -> miette::Result<u8> {
    let mut client = connect_local(global, "coracle vnc").await?;
    let vm = find(&mut client, &args.vm, NameMatch::Exact).await?.id;
    // Reports a VM without a display at once, not at the first viewer.
    drop(open(&mut client, &vm).await?);
    let (listener, at) = listen(args.address, args.port).await?;
    output::write(&format!("vnc://{at}\n"))?;
    eprintln!("open it with a VNC viewer; ^C ends");
    tokio::select! {
        () = stop_signal() => {}
        () = serve(listener, |stream| carry(stream, client.clone(), vm.clone())) => {}
    }
    Ok(0)
}

/// Connects to the display of a VM: output, and input for keys.
async fn open(
    client: &mut HostClient<Channel>,
    vm: &str,
) -> Result<(tonic::Streaming<pb::DisplayResponse>, mpsc::Sender<pb::DisplayRequest>), Failure> {
    let (typed, outgoing) = mpsc::channel(8);
    let start = Message::Start(pb::DisplayStart { vm: vm.to_owned() });
    let _open = typed.send(pb::DisplayRequest { message: Some(start) }).await;
    let shown = client.display(ReceiverStream::new(outgoing)).await?.into_inner();
    Ok((shown, typed))
}

/// Copies bytes between a stream and the display of a VM until either ends.
pub(super) async fn carry(
    stream: impl AsyncRead + AsyncWrite,
    mut client: HostClient<Channel>,
    vm: String,
) -> Result<(), Failure> {
    let (mut shown, typed) = open(&mut client, &vm).await?;
    let (mut read, mut write) = tokio::io::split(stream);
    let upload = async {
        let mut buffer = vec![0; 32 * 1024];
        while let Ok(n @ 1..) = read.read(&mut buffer).await {
            let data = Message::Data(buffer.get(..n).unwrap_or_default().to_vec());
            if typed.send(pb::DisplayRequest { message: Some(data) }).await.is_err() {
                return;
            }
        }
    };
    let download = async {
        while let Some(reply) = shown.message().await? {
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
