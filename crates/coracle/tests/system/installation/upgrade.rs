//! Replacement of every process of Coracle while guests count in their memory. `CORACLE_VMS` is their number.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::harness::{Installed, end};
use crate::support::{coracle, coracle_ok, text, until};
use coracle_testkit::elapse;
use serde_json::{Value, json};
use tokio::process::Child;
use tokio_util::sync::CancellationToken;

/// Time limit for moving a VM between nodes on a loaded machine, and for starting many.
pub(super) const LIMIT: Duration = Duration::from_secs(120);
/// Longest time without an answer that users may experience.
const OUTAGE_MAX: Duration = Duration::from_secs(5);
/// Pause between two requests.
const PAUSE: Duration = Duration::from_millis(50);

const NODES: [&str; 2] = ["n1", "n2"];

pub(super) struct Processes {
    pub(super) operator: Child,
    pub(super) nodes: [Child; 2],
}

/// Returns the object of a VM.
pub(super) fn vm(name: &str) -> Value {
    json!({
        "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM", "metadata": {"name": name},
        "spec": {"image": "localhost/idle:1", "vcpuCount": 1, "memoryMB": 128},
    })
}

/// Starts a counter in the memory of a guest.
pub(super) async fn begin_counting(node: &Path, vm: &str) {
    let count = "i=0; while :; do i=$((i+1)); echo $i > /dev/shm/count; /bin/busybox usleep 50000; done";
    let begin = format!("mkdir -p /dev/shm; ({count}) < /dev/null > /dev/null 2>&1 &");
    coracle_ok(node, &["exec", vm, "/bin/busybox", "sh", "-c", &begin]).await;
}

/// Waits until the counter is above `floor`, and returns its value.
pub(super) async fn counted(node: &Path, vm: &str, floor: u64) -> u64 {
    until("the guest counts on", LIMIT, || async {
        let read = coracle(node, &["exec", vm, "/bin/busybox", "cat", "/dev/shm/count"]).await;
        let said = text(&read.stdout);
        let count = said.trim().parse::<u64>().map_err(|e| format!("{e}: {said}{}", text(&read.stderr)))?;
        if count > floor { Ok(count) } else { Err(format!("{count}")) }
    })
    .await
}

/// Starts further guests, replaces one node after the other and then the operator, as `kubectl rollout` does, and removes those
/// guests. Panics if a counter breaks, a VM is restarted, or a node or the API gives no answer for [`OUTAGE_MAX`].
#[expect(clippy::print_stderr, reason = "the figures of a run")]
pub(super) async fn upgrade(
    installed: &Installed,
    mut processes: Processes,
    accounts: &[PathBuf; 2],
) -> Processes {
    let count = std::env::var("CORACLE_VMS").ok().and_then(|n| n.parse().ok()).unwrap_or(2_usize);
    let mut guests = Vec::new();
    for name in (1..count).map(|number| format!("up-{number}")) {
        installed.apply(vm(&name)).await;
        guests.push((placed(installed, &name).await, format!("default-{name}")));
    }
    let mut counters = Vec::new();
    for (node, vm) in &guests {
        begin_counting(node, vm).await;
        counters.push(counted(node, vm, 3).await);
    }
    let done = CancellationToken::new();
    let replace = async {
        for ((process, name), account) in processes.nodes.iter_mut().zip(NODES).zip(accounts) {
            end(std::slice::from_mut(process)).await;
            *process = installed.start_node(name, account).await;
            answers(&installed.state(name)).await;
        }
        end(std::slice::from_mut(&mut processes.operator)).await;
        processes.operator = installed.start_operator().await;
        // Waits until the new operator serves admission.
        admits(installed).await;
        installed.apply(vm("last")).await;
        placed(installed, "last").await;
        done.cancel();
    };
    let ask = |node: &'static str| {
        let state = installed.state(node);
        async move || coracle(&state, &["ps", "-o", "name"]).await.status.success()
    };
    let api = async || dry_run(installed).await.is_ok();
    let (first, second) = (ask("n1"), ask("n2"));
    let ((), n1, n2, api) =
        tokio::join!(replace, outage(&done, first), outage(&done, second), outage(&done, api));
    eprintln!(
        "{}",
        json!({"vms": count, "outage_ms": {"n1": n1.as_millis(), "n2": n2.as_millis(), "api": api.as_millis()}})
    );
    assert!(
        n1.max(n2).max(api) < OUTAGE_MAX,
        "no answer from n1 for {n1:?}, n2 for {n2:?}, the API for {api:?}"
    );
    for ((node, vm), before) in guests.iter().zip(counters) {
        counted(node, vm, before).await;
    }
    let restarts = ["get", "mikromvms", "-o=jsonpath={.items[*].status.restarts}"];
    assert_eq!(installed.kubectl(&restarts).await.unwrap(), "");
    let names: Vec<_> = (1..count).map(|number| format!("up-{number}")).chain(["last".to_owned()]).collect();
    let delete = ["delete", "mikromvm", "--timeout=120s"].into_iter();
    let delete: Vec<_> = delete.chain(names.iter().map(String::as_str)).collect();
    installed.kubectl(&delete).await.unwrap();
    processes
}

/// Waits until a VM runs, and returns the state directory of its node.
async fn placed(installed: &Installed, vm: &str) -> PathBuf {
    let path = "-o=jsonpath={.status.nodeName} {.status.conditions[?(@.type==\"Ready\")].reason}";
    let node = until("the VM runs", LIMIT, || async {
        let said = installed.kubectl(&["get", "mikromvm", vm, path]).await?;
        said.strip_suffix(" VMRunning").map(str::to_owned).ok_or(said)
    });
    installed.state(&node.await)
}

/// Waits until the operator admits a VM.
pub(super) async fn admits(installed: &Installed) {
    until("admission answers", LIMIT, || dry_run(installed)).await;
}

/// Creates a VM with a dry run, which passes the API server and the operator's admission.
async fn dry_run(installed: &Installed) -> Result<String, String> {
    let file = installed.dir.path().join("dry-run.json");
    std::fs::write(&file, vm("dry-run").to_string()).unwrap();
    installed.kubectl(&["create", "--dry-run=server", "-f", file.to_str().unwrap()]).await
}

async fn answers(node: &Path) {
    until("the node answers", LIMIT, || async {
        let said = coracle(node, &["ps"]).await;
        if said.status.success() { Ok(()) } else { Err(text(&said.stderr)) }
    })
    .await;
}

/// Repeats `ask` until `done`, and returns the longest time without an answer.
async fn outage(done: &CancellationToken, ask: impl AsyncFn() -> bool) -> Duration {
    let (mut longest, mut since) = (Duration::ZERO, Instant::now());
    while !done.is_cancelled() {
        let is_answered = ask().await;
        longest = longest.max(since.elapsed());
        if is_answered {
            since = Instant::now();
        }
        elapse(PAUSE).await;
    }
    longest
}
