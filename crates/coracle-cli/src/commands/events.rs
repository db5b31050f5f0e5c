//! `coracle events`: events of VMs, oldest first.

use coracle_proto::host as pb;
use k8s_openapi::api::events::v1::Event;
use kube::ResourceExt;
use serde::Serialize;
use tokio::time::{Duration, sleep};

use crate::cli::{EventsArgs, Format, Global};
use crate::client::{NameMatch, connect, find};
use crate::cluster::{self, Cluster};
use crate::error::Failure;
use crate::output::{self, Columns};
use crate::view;

/// Poll interval of the cluster with `--watch`.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Event of a VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VmEvent {
    pub time: Option<String>,
    /// Normal, or Warning: a user should act.
    #[serde(rename = "type")]
    pub kind: String,
    pub reason: String,
    pub namespace: String,
    pub vm: String,
    pub note: String,
    /// Number of occurrences.
    pub count: i32,
}

/// Prints past events, and with `--watch` new ones.
pub async fn run(global: &Global, args: EventsArgs) -> miette::Result<u8> {
    if args.watch && !args.output.is_table() && args.output != Format::Name {
        return Err(Failure::usage("--watch prints lines: use it with -o table, wide or name").into());
    }
    if global.is_remote() {
        print_cluster_events(global, &args).await?
    } else {
        print_node_events(global, &args).await?
    }
    Ok(0)
}

async fn print_cluster_events(global: &Global, args: &EventsArgs) -> Result<(), Failure> {
    let cluster = Cluster::open(global).await?;
    let only = match &args.vm {
        Some(name) => Some(cluster.get(name, NameMatch::Prefix).await?.name_any()),
        None => None,
    };
    let mut printed: Vec<VmEvent> = of_cluster(&cluster, only.as_deref()).await?;
    print(&args.output, &printed, true)?;
    if !args.watch {
        return Ok(());
    }
    loop {
        sleep(POLL_INTERVAL).await;
        let all = of_cluster(&cluster, only.as_deref()).await?;
        let news: Vec<_> = all.iter().filter(|h| !printed.contains(h)).cloned().collect();
        print(&args.output, &news, false)?;
        printed = all;
    }
}

/// Returns the events that the cluster has recorded, of all VMs or of one.
pub(crate) async fn of_cluster(cluster: &Cluster, only: Option<&str>) -> Result<Vec<VmEvent>, Failure> {
    let events = cluster.events().await?;
    Ok(events.iter().map(of_event).filter(|h| only.is_none_or(|name| h.vm == name)).collect())
}

fn of_event(event: &Event) -> VmEvent {
    let about = event.regarding.clone().unwrap_or_default();
    VmEvent {
        time: cluster::time(event).map(|t| t.to_string()),
        kind: event.type_.clone().unwrap_or_default(),
        reason: event.reason.clone().unwrap_or_default(),
        namespace: about.namespace.unwrap_or_default(),
        vm: about.name.unwrap_or_default(),
        note: event.note.clone().unwrap_or_default(),
        count: event.series.as_ref().map_or(1, |s| s.count),
    }
}

async fn print_node_events(global: &Global, args: &EventsArgs) -> Result<(), Failure> {
    let mut client = connect(global).await?;
    let vms = match &args.vm {
        Some(name) => vec![find(&mut client, name, NameMatch::Prefix).await?],
        None => client.list_vms(pb::ListVmsRequest {}).await?.into_inner().vms,
    };
    let mut changes = match args.watch {
        true => {
            let vm = if args.vm.is_some() { vms[0].id.clone() } else { String::new() };
            Some(client.watch_vms(pb::WatchVmsRequest { vm }).await?.into_inner())
        }
        false => None,
    };
    let mut past: Vec<_> = vms.iter().flat_map(of_record).collect();
    past.sort_by(|a, b| a.time.cmp(&b.time));
    print(&args.output, &past, true)?;
    while let Some(changes) = &mut changes {
        let Some(event) = changes.message().await? else { break };
        let Some(vm) = &event.vm else { continue };
        let (kind, reason) = match event.r#type() {
            pb::vm_event::Type::Created => ("Normal", "Created"),
            pb::vm_event::Type::Started => ("Normal", "Started"),
            pb::vm_event::Type::Stopped => ("Normal", "Stopped"),
            pb::vm_event::Type::Deleted => ("Normal", "Deleted"),
            pb::vm_event::Type::Failed => ("Warning", "Failed"),
            pb::vm_event::Type::Updated | pb::vm_event::Type::Unspecified => continue,
        };
        print(&args.output, &[vm_event(vm, event.time_unix_ms, kind, reason, vm.message.clone())], false)?;
    }
    Ok(())
}

fn vm_event(vm: &pb::Vm, ms: i64, kind: &str, reason: &str, note: String) -> VmEvent {
    VmEvent {
        time: jiff::Timestamp::from_millisecond(ms).ok().map(|t| t.to_string()),
        kind: kind.to_owned(),
        reason: reason.to_owned(),
        namespace: vm.owner.as_ref().map(|o| o.namespace.clone()).unwrap_or_default(),
        vm: vm.name.clone(),
        note,
        count: 1,
    }
}

/// Derives events from a node's record of a VM, which covers only the latest run. Pure.
pub fn of_record(vm: &pb::Vm) -> Vec<VmEvent> {
    let mut all = vec![vm_event(
        vm,
        vm.created_at_ms,
        "Normal",
        "Created",
        format!("from {}, {} CPUs, {} MiB", vm.image, vm.vcpus, vm.memory_mib),
    )];
    if vm.started_at_ms > 0 {
        let note = format!("boot {} in {} ms", vm.boots, vm.boot_ms);
        all.push(vm_event(vm, vm.started_at_ms, "Normal", "Started", note));
    }
    if vm.finished_at_ms > 0 {
        let (kind, reason) = match vm.state() {
            pb::VmState::Failed => ("Warning", "Failed"),
            _ => ("Normal", "Stopped"),
        };
        let note = match &vm.exit {
            Some(exit) if vm.message.is_empty() => format!("exit code {}", exit.code),
            _ => vm.message.clone(),
        };
        all.push(vm_event(vm, vm.finished_at_ms, kind, reason, note));
    }
    all
}

fn print(format: &Format, events: &[VmEvent], header: bool) -> Result<(), Failure> {
    match format {
        Format::Table | Format::Wide => {
            if events.is_empty() {
                if header {
                    eprintln!("no events");
                }
                return Ok(());
            }
            let now = jiff::Timestamp::from_millisecond(super::vm::now_ms()).unwrap_or_default();
            table(events, *format == Format::Wide, header, now).print()
        }
        Format::Name => output::write(&events.iter().map(|e| format!("{}\n", e.reason)).collect::<String>()),
        _ => {
            let items: Result<Vec<_>, _> = events.iter().map(serde_json::to_value).collect();
            output::list(format, "Event", items.map_err(|e| Failure::new("COR-CLI-004", e.to_string()))?)
        }
    }
}

fn table(events: &[VmEvent], wide: bool, header: bool, now: jiff::Timestamp) -> Columns {
    let names: &[&str] = match (header, wide) {
        (false, _) => &[],
        (true, false) => &["AGE", "TYPE", "REASON", "VM", "NOTE"],
        (true, true) => &["TIME", "TYPE", "REASON", "NAMESPACE", "VM", "COUNT", "NOTE"],
    };
    let mut columns = Columns::new(names);
    for event in events {
        let note = event.note.lines().next().unwrap_or_default().to_owned();
        let (kind, reason, vm) = (event.kind.clone(), event.reason.clone(), event.vm.clone());
        if wide {
            let time = event.time.clone().unwrap_or_default();
            columns.row(&[time, kind, reason, event.namespace.clone(), vm, event.count.to_string(), note]);
        } else {
            columns.row(&[view::age(event.time.as_deref(), now), kind, reason, vm, note]);
        }
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::tests::on_node;

    #[test]
    fn vm_record_yields_events_of_its_latest_run() {
        let reasons = |vm: &pb::Vm| of_record(vm).into_iter().map(|h| h.reason).collect::<Vec<_>>();
        let mut vm = on_node();
        assert_eq!(reasons(&vm), ["Created", "Started"]);
        vm.finished_at_ms = vm.started_at_ms + 5;
        vm.state = pb::VmState::Stopped.into();
        vm.exit = Some(pb::ExitStatus { code: 3, ..Default::default() });
        assert_eq!(reasons(&vm), ["Created", "Started", "Stopped"]);
        assert_eq!(of_record(&vm)[2].note, "exit code 3");
        vm.state = pb::VmState::Failed.into();
        vm.message = "the VMM went away".into();
        let last = of_record(&vm).remove(2);
        assert_eq!((last.kind.as_str(), last.note.as_str()), ("Warning", "the VMM went away"));
        let now = jiff::Timestamp::from_second(1_700_000_180).unwrap();
        insta::assert_snapshot!("events_table", table(&of_record(&vm), false, true, now).text());
    }
}
