//! Connections to a node: by its socket on this machine, or through the cluster.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_api::subresources::Subresource;
use coracle_proto::host as pb;
use coracle_proto::host::host_client::HostClient;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use crate::cli::Global;
use crate::cluster::Cluster;
use crate::error::{Failure, exit};
use crate::suggest;

/// Connects to the node that the command line names.
pub async fn connect(global: &Global) -> Result<HostClient<Channel>, Failure> {
    let socket = global.socket();
    match open(&socket).await {
        Ok(client) => Ok(client),
        Err(why) => {
            Err(Failure::new("COR-CLI-002", format!("no node answers at {}: {why}", socket.display()))
                .help("start one with `coracle up --detach`, or name its state directory with --state DIR"))
        }
    }
}

/// Like [`connect`], for commands that only work on the node of this machine.
pub async fn connect_local(global: &Global, what: &str) -> Result<HostClient<Channel>, Failure> {
    if global.is_remote() {
        return Err(local_only(what));
    }
    connect(global).await
}

/// Returns the error of a command that does not work in a cluster.
pub fn local_only(what: &str) -> Failure {
    Failure::new("COR-CLI-009", format!("{what} works on the node of this machine, not through a cluster"))
        .help("in a cluster VMs are MikromVM objects: apply or delete them with kubectl")
        .exit(exit::UNSUPPORTED)
}

/// Like [`connect`], for callers that wait for a node and handle the error themselves.
pub async fn open(socket: &Path) -> Result<HostClient<Channel>, String> {
    // Connects once before the channel does: the channel's own error does not contain the reason.
    let first = UnixStream::connect(socket).await.map_err(|e: io::Error| e.to_string())?;
    check_server(&first, rustix::process::geteuid().as_raw()).map_err(|e| e.to_string())?;
    let path: PathBuf = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://node")
        .connect_with_connector(connector)
        .await
        .map_err(|e| e.to_string())?;
    Ok(HostClient::new(channel).max_decoding_message_size(16 << 20))
}

/// Refuses a node daemon of another user except root: below a temporary directory any user may have made the socket.
fn check_server(stream: &UnixStream, own: u32) -> io::Result<()> {
    let server = stream.peer_cred()?.uid();
    if own == 0 || server == 0 || server == own {
        return Ok(());
    }
    let why = format!("the node there runs as uid {server}, and this command as uid {own}");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// A VM, and a connection to its node.
pub struct Reached {
    pub node: HostClient<Channel>,
    /// Internal id; a prefix has been resolved to it.
    pub vm: String,
}

/// Ways in which a name on the command line refers to a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameMatch {
    /// Exact name or full id, for commands that change a VM, enter its guest or wait for it.
    Exact,
    /// Also a unique prefix of a name or id, for commands that only read.
    Prefix,
}

/// Finds a VM by name, on this node or in the cluster, and connects to its node for the calls of one subresource.
pub async fn reach(
    global: &Global,
    name: &str,
    named: NameMatch,
    subresource: Subresource,
) -> Result<Reached, Failure> {
    if global.is_remote() {
        let cluster = Cluster::open(global).await?;
        let object = cluster.get(name, named).await?;
        let node = cluster.reach(&object, subresource).await?;
        return Ok(Reached { node, vm: object.vm_id() });
    }
    let mut node = connect(global).await?;
    let vm = find(&mut node, name, named).await?;
    Ok(Reached { node, vm: vm.id })
}

/// Returns the VM with this name on a node. The error of a miss suggests the nearest names.
pub async fn find(node: &mut HostClient<Channel>, name: &str, named: NameMatch) -> Result<pb::Vm, Failure> {
    let exact = named == NameMatch::Exact;
    match node.get_vm(pb::GetVmRequest { vm: name.to_owned(), exact, ..Default::default() }).await {
        Ok(vm) => Ok(vm.into_inner()),
        Err(status) if status.code() == Code::NotFound => {
            let known = node.list_vms(pb::ListVmsRequest {}).await.map(|l| l.into_inner().vms);
            let known = known.unwrap_or_default();
            let near = suggest::hint(name, known.iter().map(|vm| vm.name.as_str()));
            Err(with_hint(status.into(), near))
        }
        Err(status) => Err(status.into()),
    }
}

/// Puts a suggestion before the error's existing help.
pub fn with_hint(failure: Failure, hint: Option<String>) -> Failure {
    let lines: Vec<_> = hint.into_iter().chain(failure.help.clone()).collect();
    if lines.is_empty() { failure } else { failure.help(lines.join("\n")) }
}

/// Runs `work` for at most `limit`.
pub async fn with_timeout<T>(
    limit: Option<jiff::SignedDuration>,
    what: &str,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let Some(limit) = limit else { return work.await };
    let span = Duration::try_from(limit).map_err(|_| Failure::usage("a timeout is not negative"))?;
    match tokio::time::timeout(span, work).await {
        Ok(outcome) => outcome,
        Err(_) => {
            Err(Failure::new("COR-CLI-013", format!("{what}: not within {limit:#}")).exit(exit::TIMED_OUT))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn node_of_another_user_is_refused() {
        let (stream, _node) = UnixStream::pair().unwrap();
        let own = rustix::process::geteuid().as_raw();
        check_server(&stream, own).unwrap();
        let refused = check_server(&stream, own + 1);
        assert_eq!(refused.is_ok(), own == 0, "root serves everybody");
    }
}
