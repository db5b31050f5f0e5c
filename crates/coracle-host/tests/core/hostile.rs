//! A compromised guest uses the session stream against the node: other VMs still answer, the data that reach the host are
//! bounded, and the VM can be deleted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle_host::{
    ContainerId, ContainerSpec, ContainerState, Host, PullOrigin, PullPolicy, Sandbox, VmSpec, Workload,
};
use coracle_hypervisor_testing::fake::Sent;
use coracle_oci::NoProgress;
use coracle_testkit::{elapse, eventually};

use super::support::{IMAGE, Node};

/// Guaranteed time limit of a forced deletion.
const PROMISE: Duration = Duration::from_secs(10);
/// Guaranteed time limit of a call to another VM.
const PROMPT: Duration = Duration::from_secs(1);
/// Duration of the attack.
const ATTACK: Duration = Duration::from_secs(2);
/// Number of log files and maximum size of each, with a margin for the last record.
const LOG_BYTES_MAX: u64 = 64 << 20;

/// Maximum amount that may reach the host in [`ATTACK`]: a burst of two seconds, two seconds at the rate, what buffers hold on
/// the way (2 MiB, and some messages), and as much again for a slow host.
const OUTPUT_MAX: u64 = 2 * ((4 * 8 + 2) << 20);
const EVENTS_MAX: u64 = 2 * (4 * 200 + 100 * 1024);
const SESSIONS_MAX: u64 = 16;

fn id(text: &str) -> ContainerId {
    text.parse().unwrap()
}

async fn sandbox(host: &Host, name: &str) {
    let spec = VmSpec { sandbox: Some(Sandbox::default()), ..VmSpec::of(name.parse().unwrap(), "") };
    host.create(spec, Arc::new(NoProgress)).await.unwrap();
    host.start(name, None).await.unwrap();
}

async fn run(host: &Host, vm: &str, name: &str, argv: &[&str]) {
    let argv = argv.iter().map(|a| (*a).to_owned()).collect();
    let process = Workload { argv, ..Workload::default() };
    let spec = ContainerSpec { image: IMAGE.to_owned(), process, ..ContainerSpec::default() };
    let from = (PullPolicy::Never, PullOrigin::Local);
    host.create_container(vm, id(name), spec, from, Arc::new(NoProgress)).await.unwrap();
    host.start_container(vm, &id(name)).await.unwrap();
}

/// Runs a container in another VM from start to end, within the time limit.
async fn assert_other_vm_answers(host: &Host, turn: u32) {
    let began = Instant::now();
    let name = format!("c{turn}");
    run(host, "other", &name, &["echo", "here"]).await;
    let ended = host.wait_container("other", &id(&name)).await.unwrap();
    assert_eq!(ended.exit.map(|exit| exit.code), Some(0));
    host.remove_container("other", &id(&name)).await.unwrap();
    let took = began.elapsed();
    assert!(took < PROMPT, "another VM answered after {took:?}");
}

/// Runs the attack and returns what reached the host.
async fn run_attack(host: &Host, node: &Node, word: &str) -> Sent {
    sandbox(host, "pod").await;
    let instance = host.get("pod").unwrap().record.instance.clone().unwrap();
    run(host, "pod", "main", &["hostile", word]).await;
    let began = Instant::now();
    let mut turn = 0;
    while began.elapsed() < ATTACK {
        assert_other_vm_answers(host, turn).await;
        turn += 1;
        elapse(Duration::from_millis(50)).await;
    }
    assert_eq!(host.get("pod").unwrap().containers.len(), 1, "{word}: no container was invented");
    node.machines.sent(&instance).unwrap()
}

async fn delete(host: &Host, word: &str) {
    let began = Instant::now();
    host.delete("pod", true, None).await.unwrap();
    assert!(began.elapsed() < PROMISE, "{word}: deleted after {:?}", began.elapsed());
}

fn log_bytes(node: &Node, host: &Host) -> u64 {
    let vm = host.get("pod").unwrap().record.id.to_string();
    let dir = node.state().join("vms").join(vm).join("containers");
    let files = std::fs::read_dir(dir).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|file| file.len()).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_guest_is_bounded_and_harms_no_other() {
    let node = Node::new().await;
    let host = node.open().await;
    sandbox(&host, "other").await;
    for (word, least, most) in [
        // The minimum shows that the attack took place.
        ("output", Sent { bytes: 4 << 20, messages: 0, sessions: 1 }, (OUTPUT_MAX, EVENTS_MAX, SESSIONS_MAX)),
        ("empty", Sent { bytes: 0, messages: 100, sessions: 1 }, (0, EVENTS_MAX, SESSIONS_MAX)),
        ("events", Sent { bytes: 0, messages: 400, sessions: 1 }, (0, EVENTS_MAX, SESSIONS_MAX)),
        ("lies", Sent { bytes: 100, messages: 10, sessions: 1 }, (1 << 20, 1000, SESSIONS_MAX)),
        ("oversized", Sent { bytes: 0, messages: 0, sessions: 2 }, (SESSIONS_MAX << 25, 500, SESSIONS_MAX)),
        ("sessions", Sent { bytes: 0, messages: 0, sessions: 2 }, (0, 0, SESSIONS_MAX)),
        ("freeze", Sent { bytes: 0, messages: 0, sessions: 1 }, (0, 0, SESSIONS_MAX)),
    ] {
        let sent = run_attack(&host, &node, word).await;
        println!("{word}: {sent:?}");
        assert!(
            sent.bytes >= least.bytes && sent.messages >= least.messages && sent.sessions >= least.sessions,
            "{word}: {sent:?}"
        );
        let (bytes, messages, sessions) = most;
        assert!(
            sent.bytes <= bytes && sent.messages <= messages && sent.sessions <= sessions,
            "{word}: {sent:?}"
        );
        assert!(log_bytes(&node, &host) <= LOG_BYTES_MAX, "{word}");
        delete(&host, word).await;
    }
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_guest_report_changes_no_container_of_other_vms() {
    let node = Node::new().await;
    let host = node.open().await;
    for name in ["other", "pod"] {
        sandbox(&host, name).await;
        run(&host, name, "c0", &["serve"]).await;
    }
    run(&host, "pod", "main", &["hostile", "lies"]).await;
    let ended = async || {
        let state = host.get("pod").ok()?.containers[&id("c0")].state;
        (state == ContainerState::Exited).then_some(())
    };
    eventually("it believes its own guest about its own container", ended).await.unwrap();
    let other = host.get("other").unwrap();
    assert_eq!(other.containers[&id("c0")].state, ContainerState::Running, "a guest speaks for itself alone");
    assert_eq!(host.get("pod").unwrap().containers.len(), 2);
    host.shutdown().await;
}
