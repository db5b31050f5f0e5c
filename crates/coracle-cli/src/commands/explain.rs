//! `coracle explain`: the steps from the desired to the observed state of a VM, and what to do.

use std::fmt::Write;

use coracle_api::subresources::Subresource;
use coracle_api::{condition, reason};
use coracle_proto::host as pb;

use super::events::{self, VmEvent};
use crate::cli::{ExplainArgs, Global};
use crate::client::{NameMatch, reach};
use crate::cluster::Cluster;
use crate::error::{Failure, printable};
use crate::output;
use crate::view::{self, Exit, Vm};

/// Number of console lines that are shown for a VM that did not start.
const CONSOLE_LINES: usize = 6;

/// Number of warnings that are shown.
const WARNINGS: usize = 3;

/// All known facts about a VM.
struct Facts {
    vm: Vm,
    happened: Vec<VmEvent>,
    console: Vec<String>,
    remote: bool,
}

/// Explains one VM.
pub async fn run(global: &Global, args: ExplainArgs) -> miette::Result<u8> {
    let vm = super::vm::load_vm(global, &args.vm).await?;
    let happened = match global.is_remote() {
        true => events::of_cluster(&Cluster::open(global).await?, Some(&vm.metadata.name)).await?,
        false => vec![],
    };
    let console = if is_up(&vm) { vec![] } else { console(global, &args.vm).await.unwrap_or_default() };
    let now = jiff::Timestamp::from_millisecond(super::vm::now_ms()).unwrap_or_default();
    let facts = Facts { vm, happened, console, remote: global.is_remote() };
    output::write(&explain(&facts, now))?;
    Ok(0)
}

fn is_up(vm: &Vm) -> bool {
    vm.status.state == "Running"
}

/// Returns the last lines of the serial console, if there is one.
async fn console(global: &Global, name: &str) -> Result<Vec<String>, Failure> {
    let mut reached = reach(global, name, NameMatch::Prefix, Subresource::Console).await?;
    let start = pb::ConsoleStart { vm: reached.vm, follow: false };
    let request = pb::ConsoleRequest { message: Some(pb::console_request::Message::Start(start)) };
    let mut said = reached.node.console(tokio_stream::once(request)).await?.into_inner();
    let mut bytes = Vec::new();
    while let Some(chunk) = said.message().await? {
        bytes.extend_from_slice(&chunk.data);
    }
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<_> = text.lines().map(|l| printable(l.trim())).filter(|l| !l.is_empty()).collect();
    Ok(lines[lines.len().saturating_sub(CONSOLE_LINES)..].to_vec())
}

/// Renders the whole explanation. Pure.
fn explain(facts: &Facts, now: jiff::Timestamp) -> String {
    let vm = &facts.vm;
    let (spec, status) = (&vm.spec, &vm.status);
    let ready = if is_up(vm) { "is Ready" } else { "is not Ready" };
    let age = view::age(status.started_at.as_deref().or(vm.metadata.created_at.as_deref()), now);
    let mut text = format!("vm/{} {ready} ({}, {age})\n", vm.metadata.name, status.state);
    let mut line = |label: &str, words: &str| {
        let mut lines = words.lines();
        let first = lines.next().unwrap_or_default();
        let _strings_take_everything = writeln!(text, "  {label:<9} {}", printable(first));
        for more in lines {
            let _strings_take_everything = writeln!(text, "  {:<9} {}", "", printable(more));
        }
    };
    line("spec", &format!("image={} cpus={} memory={}MiB", spec.image, spec.cpus, spec.memory_mib));
    match status.node_name.as_str() {
        "" => line("placed", "on no node yet"),
        node => line("placed", &placement_text(node, facts, now)),
    }
    match status.image_digest.as_str() {
        "" => line("image", "not resolved yet"),
        digest => line("image", digest),
    }
    match (status.vmm_pid, status.boots) {
        (0, 0) => line("vmm", "never started"),
        (0, _) => line("vmm", &format!("{}, not running", vm.driver_word())),
        (pid, _) => line("vmm", &format!("{}, pid {pid}, booted in {} ms", vm.driver_word(), status.boot_ms)),
    }
    if is_up(vm) {
        let agent = if status.agent_connected { "agent connected" } else { "agent not connected" };
        let address = if status.ip_address.is_empty() { "no address" } else { &status.ip_address };
        line("guest", &format!("{agent}, {address}"));
    }
    if let Some(exit) = &status.exit {
        let why = if exit.error.is_empty() { String::new() } else { format!(": {}", exit.error) };
        line("workload", &format!("exited with {}{why}", exit.code));
    }
    let warnings: Vec<_> = facts.happened.iter().filter(|h| h.kind == "Warning").collect();
    for warning in &warnings[warnings.len().saturating_sub(WARNINGS)..] {
        let age = view::age(warning.time.as_deref(), now);
        line("event", &format!("{age} ago {} (x{}): {}", warning.reason, warning.count, warning.note));
    }
    if !is_up(vm) {
        let (cause, fix) = diagnose(facts);
        line("cause", &cause);
        line("fix", &fix);
    }
    for said in &facts.console {
        line("console", &format!("| {said}"));
    }
    text
}

fn placement_text(node: &str, facts: &Facts, now: jiff::Timestamp) -> String {
    let scheduled = facts.happened.iter().rev().find(|h| h.reason == "Scheduled");
    match scheduled {
        Some(h) => format!("node {node}, {} ago", view::age(h.time.as_deref(), now)),
        None => format!("node {node}"),
    }
}

/// Returns why the VM does not run, and what to do. Pure.
fn diagnose(facts: &Facts) -> (String, String) {
    let (vm, status) = (&facts.vm, &facts.vm.status);
    let name = &vm.metadata.name;
    let ready = status.conditions.iter().find(|c| c.kind == condition::READY);
    if let Some(ready) = ready {
        let cause = format!("{}: {}", ready.reason, ready.message);
        let fix = fix(&ready.reason, &ready.message, vm);
        return (cause, fix);
    }
    let local = if facts.remote { format!(" -n {}", vm.metadata.namespace) } else { String::new() };
    match (status.state.as_str(), status.message.as_str(), &status.exit) {
        ("Created", "", _) => ("it was never started".to_owned(), format!("coracle start {name}")),
        ("Stopped", message, Some(exit)) => {
            let fix = match exit {
                _ if status.oom_killed => format!("give it more memory than {} MiB", vm.spec.memory_mib),
                Exit { code: 0, .. } => format!("start it again: coracle start {name}{local}"),
                Exit { error, .. } if !error.is_empty() => "correct the command that it runs".to_owned(),
                _ => format!("read what it said: coracle logs {name}{local}"),
            };
            (message.to_owned(), fix)
        }
        ("Stopped", "", None) => ("it was stopped".to_owned(), format!("coracle start {name}")),
        (_, "", _) => ("it is on its way".to_owned(), format!("coracle wait --for running {name}{local}")),
        (_, message, _) => {
            (message.to_owned(), format!("look at its console: coracle console {name} --no-follow{local}"))
        }
    }
}

/// Returns what to do about a condition: a command wherever the user has to act, and "wait" only where waiting is enough. Pure.
fn fix(cause: &str, message: &str, vm: &Vm) -> String {
    let (name, namespace, node) =
        (&vm.metadata.name, &vm.metadata.namespace, or_unknown(&vm.status.node_name));
    let image = &vm.spec.image;
    let patch =
        |spec: &str| format!("kubectl patch mvm {name} -n {namespace} --type=merge -p '{{\"spec\":{spec}}}'");
    match cause {
        reason::IMAGE_PULL_FAILED => format!(
            "check the name and the node's access to its registry, then: {}\nwhat the node has: coracle image ls; \
             try it there: coracle image pull {image}",
            patch("{\"image\":\"REFERENCE\"}")
        ),
        reason::BOOT_FAILED => format!(
            "read the guest's last words: coracle console {name} -n {namespace} --no-follow\n\
             then correct image, kernel or memory; on the node: coracle doctor"
        ),
        reason::POWERED_OFF | reason::PAUSED | reason::HIBERNATED => {
            format!("it is so because spec.powerState asks for it: {}", patch("{\"powerState\":\"Running\"}"))
        }
        reason::POWER_STATE_FAILED => {
            format!("correct what the message names; what was tried: coracle events {name} -n {namespace}")
        }
        reason::UNSCHEDULABLE => format!(
            "ask for less, remove VMs, or add a node: {}\nwhat is declared: coracle ps -A",
            patch("{\"memoryMB\":SMALLER}")
        ),
        reason::AGENT_UNREACHABLE | reason::AGENT_ERROR if message.contains("certificate") => format!(
            "renew the certificates of operator and node {node}, then restart the node; \
             how long one is valid: openssl x509 -enddate -noout -in FILE"
        ),
        reason::AGENT_UNREACHABLE => format!(
            "start the agent at {node}, or correct spec.agentAddress; on that machine: coracle doctor, \
             systemctl status coracle-node"
        ),
        reason::AGENT_NOT_ALLOWED => {
            "correct spec.agentAddress, or have the operator started with --agent-allow".to_owned()
        }
        reason::AGENT_ERROR => {
            format!("correct what the message names: kubectl edit mvm {name} -n {namespace}")
        }
        reason::AGENT_INTERNAL_ERROR => {
            format!("read the log of the node at {node}; the object is tried again every minute")
        }
        reason::NO_SPACE => "free space or memory on the node: coracle image prune, coracle rm VM".to_owned(),
        reason::NODE_LOST => {
            format!("bring the node back, or give the VM up: kubectl delete mvm {name} -n {namespace}")
        }
        reason::VM_ID_CONFLICT => {
            "give the object another name: its VM's name on the node belongs to another object".to_owned()
        }
        reason::VM_STOPPED | reason::VM_FAILED | reason::VM_VANISHED => {
            format!("read what it said: coracle logs {name} -n {namespace}")
        }
        reason::DRAINED => format!("uncordon its node: kubectl uncordon {node}"),
        reason::DRAIN_BLOCKED | reason::MOVE_FAILED => format!(
            "correct what the message names, or have it hibernate: kubectl annotate mvm {name} -n {namespace} \
             --overwrite coracle.dev/on-drain=hibernate"
        ),
        reason::CONFIG_ERROR => {
            format!(
                "create or correct what the message names: kubectl get secret,configmap,pvc -n {namespace}"
            )
        }
        // Transient causes: Creating, InTransition, Moving, Deleting. The conditions of the parts show the progress.
        _ => format!("wait, it is on its way; what happens: coracle events {name} -n {namespace}"),
    }
}

fn or_unknown(text: &str) -> &str {
    if text.is_empty() { "its address" } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::tests::{in_cluster, on_node};

    fn facts(vm: Vm) -> Facts {
        Facts { vm, happened: vec![], console: vec![], remote: false }
    }

    #[test]
    fn golden_explanations() {
        let now = jiff::Timestamp::from_second(1_700_000_180).unwrap();
        insta::assert_snapshot!("running", explain(&facts(Vm::of_node(&on_node())), now));

        let mut failed = on_node();
        failed.state = pb::VmState::Failed.into();
        failed.vmm_pid = 0;
        failed.message = "VM web did not boot: no hello within 60 s".into();
        let mut failed = facts(Vm::of_node(&failed));
        failed.console = vec!["Kernel panic - not syncing".into()];
        insta::assert_snapshot!("failed", explain(&failed, now));

        let mut object = facts(Vm::of_object(&in_cluster(), &[]));
        object.remote = true;
        object.happened = vec![
            VmEvent {
                time: Some("2023-11-14T22:14:00Z".into()),
                kind: "Normal".into(),
                reason: "Scheduled".into(),
                ..VmEvent::default()
            },
            VmEvent {
                time: Some("2023-11-14T22:15:00Z".into()),
                kind: "Warning".into(),
                reason: "Failed".into(),
                note: "CreateVM at 127.0.0.1:1: image nope:1 is not there".into(),
                count: 2,
                ..VmEvent::default()
            },
        ];
        insta::assert_snapshot!("object", explain(&object, now));
    }

    #[test]
    fn fix_is_wait_only_for_transient_reasons() {
        let vm = Vm::of_object(&in_cluster(), &[]);
        let source = include_str!("../../../coracle-api/src/mikromvm.rs");
        let (_, reasons) = source.split_once("pub mod reason {").unwrap();
        let (reasons, _) = reasons.split_once("\n}").unwrap();
        let reasons: Vec<_> = reasons.lines().filter_map(|line| line.split('"').nth(1)).collect();
        assert!(reasons.len() > 15, "{reasons:?}");
        for cause in reasons {
            let fix = fix(cause, "", &vm);
            let of_parts = ["Bound", "Pulled", "Waiting", "Answers"].contains(&cause);
            let passes =
                ["VMRunning", "Creating", "InTransition", "Moving", "Deleting"].contains(&cause) || of_parts;
            assert_eq!(fix.starts_with("wait"), passes, "{cause}: {fix}");
        }
    }

    #[test]
    fn expired_certificate_fix_is_renewal() {
        let vm = Vm::of_object(&in_cluster(), &[]);
        let fix = fix(reason::AGENT_UNREACHABLE, "invalid peer certificate: Expired", &vm);
        assert!(fix.starts_with("renew the certificates"), "{fix}");
    }

    #[test]
    fn vm_states_have_a_cause_and_a_fix() {
        let ended = |code, error: &str| Some(pb::ExitStatus { code, error: error.to_owned(), signal: 0 });
        for (state, exit, message, cause, fix) in [
            (pb::VmState::Created, None, "", "it was never started", "coracle start web"),
            (pb::VmState::Stopped, ended(0, ""), "it is done", "it is done", "coracle start web"),
            (pb::VmState::Stopped, ended(7, ""), "it failed", "it failed", "coracle logs web"),
            (pb::VmState::Stopped, ended(127, "no file"), "it failed", "it failed", "the command"),
            (pb::VmState::Stopped, ended(137, ""), "no memory", "no memory", "more memory than 256 MiB"),
            (pb::VmState::Stopped, None, "", "it was stopped", "coracle start web"),
            (pb::VmState::Starting, None, "", "it is on its way", "coracle wait"),
            (pb::VmState::Failed, None, "VMM ended", "VMM ended", "coracle console web"),
        ] {
            let mut vm = pb::Vm { state: state.into(), exit, message: message.to_owned(), ..on_node() };
            vm.oom_killed = message == "no memory";
            let said = diagnose(&facts(Vm::of_node(&vm)));
            assert!(said.0 == cause && said.1.contains(fix), "{state:?} {message}: {said:?}");
        }
    }
}
