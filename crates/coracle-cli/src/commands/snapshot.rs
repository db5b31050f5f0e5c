//! `coracle snapshot …`, restore and fork.

use std::path::Path;

use coracle_proto::host as pb;
use pb::host_client::HostClient;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio_stream::StreamExt;
use tonic::transport::Channel;

use crate::cli::{ForkArgs, Format, Global, ProgressMode, RestoreArgs, SnapshotCommand};
use crate::client::{NameMatch, connect_local, find, with_hint};
use crate::commands::vm::now_ms;
use crate::commands::{archive, transfer};
use crate::error::Failure;
use crate::output::{self, Columns};
use crate::progress::ProgressDisplay;
use crate::{suggest, view};

/// Bytes of an archive in one message.
const CHUNK: usize = 256 * 1024;
/// Customary suffix of an archive's name.
const SUFFIX: &str = ".tar.zst";

pub async fn run(global: &Global, command: SnapshotCommand) -> miette::Result<u8> {
    let (global, namespace) = match &command {
        SnapshotCommand::Share { .. } => grantee(global)?,
        _ => (global.clone(), String::new()),
    };
    let mut client = connect_local(&global, "coracle snapshot").await?;
    match command {
        SnapshotCommand::Save { vm, name } => save(&mut client, &vm, name).await?,
        SnapshotCommand::Ls { output } => ls(&mut client, &output).await?,
        SnapshotCommand::Inspect { output, names } => inspect(&mut client, &output, names).await?,
        SnapshotCommand::Share { name, revoke } => {
            share(&mut client, pb::ShareSnapshotRequest { name, namespace, revoke }).await?;
        }
        SnapshotCommand::Rm { names } => rm(&mut client, names).await?,
        SnapshotCommand::Export { name, file } => export(&mut client, name, &file).await?,
        SnapshotCommand::Push { name, reference, progress } => {
            push(&mut client, name, reference, progress).await?;
        }
        SnapshotCommand::Pull { reference, name, progress } => {
            pull(&mut client, reference, name, progress).await?;
        }
        SnapshotCommand::Import { file, name } => import(client, &file, name).await?,
    }
    Ok(0)
}

/// `coracle restore`.
pub async fn restore(global: &Global, args: RestoreArgs) -> miette::Result<u8> {
    let mut client = connect_local(global, "coracle restore").await?;
    let progress = start_progress(&format!("restoring {}", args.snapshot));
    let volume = |(name, source)| pb::Volume { name, source, ..Default::default() };
    let request = pb::RestoreVmRequest {
        snapshot: args.snapshot.clone(),
        name: args.name,
        volumes: args.volume.into_iter().map(volume).collect(),
        same_identity: args.same_identity,
        reach: Some(super::run::reach(&args.reach)),
        ..Default::default()
    };
    let restored = client.restore_vm(request).await;
    progress.done();
    match restored {
        Ok(vm) => output::write(&format!("{}\n", vm.into_inner().name))?,
        Err(status) => return Err(hint_names(&mut client, &args.snapshot, status.into()).await.into()),
    }
    Ok(0)
}

/// `coracle fork`.
pub async fn fork(global: &Global, args: ForkArgs) -> miette::Result<u8> {
    let mut client = connect_local(global, "coracle fork").await?;
    let vm = find(&mut client, &args.vm, NameMatch::Exact).await?.id;
    let progress = start_progress(&format!("forking {} {} times", args.vm, args.count));
    let forked = client.fork_vm(pb::ForkVmRequest { vm, count: args.count, prefix: args.prefix }).await;
    progress.done();
    for vm in forked.map_err(Failure::from)?.into_inner().vms {
        output::write(&format!("{}\n", vm.name))?;
    }
    Ok(0)
}

fn start_progress(what: &str) -> ProgressDisplay {
    let mut progress = ProgressDisplay::new(ProgressMode::Auto);
    progress.step(what);
    progress
}

async fn save(client: &mut HostClient<Channel>, vm: &str, name: String) -> Result<(), Failure> {
    let id = find(client, vm, NameMatch::Exact).await?.id;
    let progress = start_progress(&format!("saving {vm}"));
    let saved = client.save_snapshot(pb::SaveSnapshotRequest { vm: id, name, owner: None }).await;
    progress.done();
    output::write(&format!("{}\n", saved?.into_inner().name))
}

async fn inspect(
    client: &mut HostClient<Channel>,
    format: &Format,
    names: Vec<String>,
) -> Result<(), Failure> {
    let mut found = Vec::new();
    for name in names {
        match client.get_snapshot(pb::GetSnapshotRequest { name: name.clone() }).await {
            Ok(snapshot) => found.push(snapshot.into_inner()),
            Err(status) => return Err(hint_names(client, &name, status.into()).await),
        }
    }
    match (format, found.as_slice()) {
        (Format::Name | Format::Table | Format::Wide, all) => {
            output::write(&all.iter().map(|s| format!("{}\n", s.name)).collect::<String>())
        }
        (format, [one]) => output::document(format, &document(one)),
        (format, all) => output::list(format, "Snapshot", all.iter().map(document).collect()),
    }
}

/// Splits the flags into the namespace of a grant and the rest: elsewhere that flag selects the cluster.
fn grantee(global: &Global) -> Result<(Global, String), Failure> {
    let mut global = global.clone();
    match global.namespace.take() {
        Some(namespace) => Ok((global, namespace)),
        None => Err(Failure::usage("a snapshot is shared with a namespace: give --namespace NAME")),
    }
}

async fn share(client: &mut HostClient<Channel>, request: pb::ShareSnapshotRequest) -> Result<(), Failure> {
    let name = request.name.clone();
    match client.share_snapshot(request).await {
        Ok(_) => output::write(&format!("{name}\n")),
        Err(status) => Err(hint_names(client, &name, status.into()).await),
    }
}

async fn rm(client: &mut HostClient<Channel>, names: Vec<String>) -> Result<(), Failure> {
    for name in names {
        match client.delete_snapshot(pb::DeleteSnapshotRequest { name: name.clone() }).await {
            Ok(_) => output::write(&format!("{name}\n"))?,
            Err(status) => return Err(hint_names(client, &name, status.into()).await),
        }
    }
    Ok(())
}

/// Adds the names of similar snapshots to the failure.
async fn hint_names(client: &mut HostClient<Channel>, wanted: &str, failure: Failure) -> Failure {
    let known = client.list_snapshots(pb::ListSnapshotsRequest {}).await;
    let known: Vec<_> = known.map(|l| l.into_inner().snapshots).unwrap_or_default();
    with_hint(failure, suggest::hint(wanted, known.iter().map(|s| s.name.as_str())))
}

async fn ls(client: &mut HostClient<Channel>, format: &Format) -> Result<(), Failure> {
    let all = client.list_snapshots(pb::ListSnapshotsRequest {}).await?.into_inner().snapshots;
    match format {
        Format::Json | Format::Yaml | Format::JsonPath(_) => {
            output::list(format, "Snapshot", all.iter().map(document).collect())
        }
        Format::Name => output::write(&all.iter().map(|s| format!("{}\n", s.name)).collect::<String>()),
        Format::Table | Format::Wide if all.is_empty() => {
            eprintln!("no snapshots; `coracle snapshot save VM` makes one");
            Ok(())
        }
        Format::Table | Format::Wide => table(&all, now_ms()).print(),
    }
}

fn table(all: &[pb::Snapshot], now_ms: i64) -> Columns {
    let mut columns = Columns::new(&["NAME", "VM", "IMAGE", "CPUS", "MEMORY", "SIZE", "AGE"]);
    for snapshot in all {
        columns.row(&[
            snapshot.name.clone(),
            snapshot.vm.clone(),
            snapshot.image.clone(),
            snapshot.vcpus.to_string(),
            format!("{} MiB", snapshot.memory_mib),
            output::bytes(snapshot.memory_bytes + snapshot.disk_bytes),
            output::age(now_ms - snapshot.taken_at_ms),
        ]);
    }
    columns
}

fn document(snapshot: &pb::Snapshot) -> Value {
    json!({
        "apiVersion": output::API_VERSION,
        "kind": "Snapshot",
        "metadata": {"name": snapshot.name},
        "spec": {
            "vm": snapshot.vm,
            "image": snapshot.image,
            "imageDigest": snapshot.image_digest,
            "cpus": snapshot.vcpus,
            "memoryMiB": snapshot.memory_mib,
            "machine": {
                "driver": snapshot.driver,
                "vmmVersion": snapshot.vmm_version,
                "accelerator": snapshot.accelerator,
            },
            "agentVersion": snapshot.agent_version,
            "owner": snapshot.owner.as_ref().filter(|o| !o.namespace.is_empty()).map(|o| {
                json!({"namespace": o.namespace, "name": o.name, "uid": o.uid})
            }),
            "sharedWith": snapshot.shared_with,
        },
        "status": {
            "takenAt": view::time(snapshot.taken_at_ms),
            "memoryBytes": snapshot.memory_bytes,
            "diskBytes": snapshot.disk_bytes,
        },
    })
}

async fn export(client: &mut HostClient<Channel>, name: String, file: &Path) -> Result<(), Failure> {
    match client.export_snapshot(pb::ExportSnapshotRequest { name: name.clone() }).await {
        Ok(pieces) => archive::save(pieces.into_inner().map(|p| p.map(|p| p.data)), file).await,
        Err(status) => Err(hint_names(client, &name, status.into()).await),
    }
}

/// Pushes a snapshot to a registry and prints the digest of its manifest.
async fn push(
    client: &mut HostClient<Channel>,
    name: String,
    reference: String,
    mode: ProgressMode,
) -> Result<(), Failure> {
    let request = pb::PushSnapshotRequest { name: name.clone(), reference };
    let events = match client.push_snapshot(request).await {
        Ok(events) => events.into_inner(),
        Err(status) => return Err(hint_names(client, &name, status.into()).await),
    };
    transfer::follow_push(events, mode).await
}

/// Pulls a snapshot from a registry and prints its name.
async fn pull(
    client: &mut HostClient<Channel>,
    reference: String,
    name: Option<String>,
    mode: ProgressMode,
) -> Result<(), Failure> {
    use pb::pull_snapshot_response::Message;
    let name = name.unwrap_or_else(|| name_in(&reference));
    let mut events = client.pull_snapshot(pb::PullSnapshotRequest { reference, name }).await?.into_inner();
    let mut progress = ProgressDisplay::new(mode);
    while let Some(event) = events.message().await? {
        match event.message {
            Some(Message::Progress(step)) => progress.pull(&step),
            Some(Message::Snapshot(snapshot)) => {
                progress.done();
                return output::write(&format!("{}\n", snapshot.name));
            }
            None => {}
        }
    }
    Err(Failure::new("COR-RPC-015", "the node ended the pull without a snapshot"))
}

/// Returns the local name of a reference: the last component of its repository, and its tag unless that is `latest`.
fn name_in(reference: &str) -> String {
    let last = reference.split('@').next().and_then(|name| name.rsplit('/').next()).unwrap_or_default();
    match last.split_once(':') {
        Some((name, "latest")) => name.to_owned(),
        _ => last.replace(':', "-"),
    }
}

async fn import(mut client: HostClient<Channel>, file: &Path, name: Option<String>) -> Result<(), Failure> {
    let name = match name.or_else(|| name_of(file)) {
        Some(name) => name,
        None => return Err(Failure::usage("what comes from the standard input needs a --name")),
    };
    let input: Box<dyn AsyncRead + Send + Unpin> = if file == Path::new("-") {
        Box::new(tokio::io::stdin())
    } else {
        let opened = tokio::fs::File::open(file).await;
        Box::new(opened.map_err(|e| Failure::usage(format!("read {}: {e}", file.display())))?)
    };
    use pb::import_snapshot_request::Part;
    let message = |part| pb::ImportSnapshotRequest { part: Some(part), owner: None };
    let first = tokio_stream::once(message(Part::Name(name)));
    let pieces = read_chunks(input).map(move |data| message(Part::Data(data)));
    let progress = start_progress(&format!("reading {}", file.display()));
    let taken = client.import_snapshot(first.chain(pieces)).await;
    progress.done();
    output::write(&format!("{}\n", taken?.into_inner().name))
}

/// Returns the name of a file without its suffix.
fn name_of(file: &Path) -> Option<String> {
    let name = file.file_name()?.to_str().filter(|name| *name != "-")?;
    Some(name.strip_suffix(SUFFIX).unwrap_or(name).to_owned())
}

/// Reads the input to its end. A read error makes the archive too short, so that the node refuses it.
fn read_chunks(input: Box<dyn AsyncRead + Send + Unpin>) -> impl tokio_stream::Stream<Item = Vec<u8>> + Send {
    futures_util::stream::unfold(input, |mut input| async move {
        let mut piece = Vec::with_capacity(CHUNK);
        match (&mut input).take(CHUNK as u64).read_to_end(&mut piece).await {
            Ok(n) if n > 0 => Some((piece, input)),
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_table() {
        let snapshot = |name: &str, vm: &str, memory_mib, disk_bytes| pb::Snapshot {
            name: name.into(),
            vm: vm.into(),
            image: "localhost/coracle/demo:1".into(),
            vcpus: 2,
            memory_mib,
            taken_at_ms: 1_000_000,
            memory_bytes: 57 << 20,
            disk_bytes,
            ..Default::default()
        };
        let all =
            [snapshot("before-upgrade", "web", 256, 5 << 20), snapshot("db-18f2", "db", 16384, 9 << 30)];
        insta::assert_snapshot!(table(&all, 4_600_000).text());
    }

    #[test]
    fn share_takes_the_namespace_and_stays_local() {
        use crate::cli::{Cli, Command};
        use clap::Parser as _;
        let parse = |words: &[&str]| {
            let cli = Cli::try_parse_from(words).unwrap();
            assert!(matches!(cli.command, Command::Snapshot(_)));
            cli.global
        };
        let global = parse(&["coracle", "snapshot", "share", "before", "--namespace", "team"]);
        let (local, namespace) = grantee(&global).unwrap();
        assert_eq!((local.is_remote(), namespace.as_str()), (false, "team"));
        assert!(grantee(&parse(&["coracle", "snapshot", "share", "before"])).is_err());
    }

    #[test]
    fn snapshot_name_is_derived_from_file_or_reference() {
        assert_eq!(name_of(Path::new("/tmp/web-1.tar.zst")).as_deref(), Some("web-1"));
        assert_eq!(name_of(Path::new("web")).as_deref(), Some("web"));
        assert_eq!(name_of(Path::new("-")), None);
        for (reference, want) in [
            ("localhost:5000/vms/web:before", "web-before"),
            ("localhost:5000/vms/web:latest", "web"),
            ("localhost:5000/vms/web", "web"),
            ("registry.example/web@sha256:00", "web"),
        ] {
            assert_eq!(name_in(reference), want);
        }
    }
}
