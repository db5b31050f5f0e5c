//! The steps of the README as a test: `coracle up`, a MikromVM, its page, exec, delete, `coracle down`.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::support::{CORACLE, coracle, coracle_ok, fetch, kubectl, node_tools, root, text, until};
use coracle_testkit::{netns, tools};

/// Returns the fields of the line of `kubectl get mvm NAME --no-headers`.
async fn row(state: &Path, name: &str) -> Result<Vec<String>, String> {
    let line = kubectl(state, &["get", "mvm", name, "--no-headers"]).await?;
    Ok(line.split_whitespace().map(str::to_owned).collect())
}

#[test]
fn mikromvm_runs_as_a_microvm_and_leaves_nothing() {
    netns::run_within(Duration::from_secs(240), || async {
        if node_tools().is_none() || tools::require(["etcd", "kube-apiserver", "kubectl"]).is_none() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let up = coracle(&state, &["up", "--detach"]).await;
        let said = text(&up.stderr);
        assert!(up.status.success(), "coracle up: {said}\n{}", logs(&state));
        assert!(said.contains("export KUBECONFIG=") && said.contains("admission answers"), "{said}");

        let example = root().join("examples/mikromvm.yaml");
        kubectl(&state, &["apply", "-f", example.to_str().unwrap()]).await.unwrap();
        let header = kubectl(&state, &["get", "mvm"]).await.unwrap();
        let columns: Vec<_> = header.lines().next().unwrap().split_whitespace().collect();
        assert_eq!(columns, ["NAME", "PHASE", "IMAGE", "VCPU", "RAM(MB)", "IP", "NODE", "AGE"]);
        let running = until("Running with an address", Duration::from_secs(90), || async {
            let row = row(&state, "demo").await?;
            match row.as_slice() {
                [_, phase, _, _, _, ip, ..] if phase == "Running" && ip.contains('.') => Ok(ip.clone()),
                _ => Err(format!("{row:?}")),
            }
        })
        .await;
        let page =
            until("the guest's page", Duration::from_secs(20), || fetch(format!("{running}:80"))).await;
        assert!(page.contains("hello from a microVM"), "{page}");
        assert_eq!(coracle_ok(&state, &["exec", "default-demo", "hostname"]).await, "demo\n");
        assert_eq!(
            coracle(&state, &["exec", "default-demo", "sh", "-c", "exit 9"]).await.status.code(),
            Some(9)
        );
        let listed = coracle_ok(&state, &["ps"]).await;
        assert!(listed.contains("default-demo") && listed.contains(&running), "{listed}");

        examples_are_answered(&state).await;
        own_directory_is_a_volume(&state).await;
        run_is_killed(&state).await;
        power_states(&state, &running).await;
        cloned_from_a_snapshot(&state).await;

        kubectl(&state, &["delete", "mvm", "demo", "twin", "--timeout=60s"]).await.unwrap();
        coracle_ok(&state, &["snapshot", "rm", "demo-now"]).await;
        until("no VM", Duration::from_secs(60), async || {
            let left = coracle_ok(&state, &["ps", "-a", "-q"]).await;
            if left.is_empty() { Ok(()) } else { Err(left) }
        })
        .await;
        assert_eq!(std::fs::read_dir(state.join("vms")).unwrap().count(), 0, "no file is left");

        let down = coracle(&state, &["down"]).await;
        assert!(down.status.success(), "coracle down: {}", text(&down.stderr));
        let left = coracle_hypervisor_testing::instances::processes_of(&state);
        assert!(left.is_empty(), "processes are left: {left:?}");
    });
}

/// Checks that every kind of the examples gets a status: a system has an embedded market, and a pool reports what it waits for.
async fn examples_are_answered(state: &Path) {
    for (file, object, wanted) in [
        ("bidnode", "bidnode/ml-training-node", "Accepted"),
        ("vsphereagentpool", "vsphereagentpool/demo-worker", "KindsUnavailable"),
    ] {
        let example = root().join(format!("examples/{file}.yaml"));
        kubectl(state, &["apply", "-f", example.to_str().unwrap()]).await.unwrap();
        until(wanted, Duration::from_secs(5), || async {
            let path = "-o=jsonpath={.status.conditions[*].reason}";
            let reasons = kubectl(state, &["get", object, path]).await?;
            if reasons.contains(wanted) { Ok(()) } else { Err(reasons) }
        })
        .await;
    }
    kubectl(state, &["delete", "bidnode", "ml-training-node", "--timeout=30s"]).await.unwrap();
}

/// Checks that a local caller needs no permission of the node for a directory of their own.
async fn own_directory_is_a_volume(state: &Path) {
    let own = tempfile::tempdir().unwrap();
    std::fs::write(own.path().join("word"), "from the host\n").unwrap();
    let volume = format!("{}:/data:ro", own.path().display());
    let image = "localhost/coracle/demo:1";
    let said = coracle_ok(state, &["run", "--rm", "-v", &volume, image, "cat", "/data/word"]).await;
    assert_eq!(said, "from the host\n");
}

/// Kills `coracle run --rm`: its VM still ends, and the node removes it some seconds later.
async fn run_is_killed(state: &Path) {
    let image = "localhost/coracle/demo:1";
    let mut run = tokio::process::Command::new(CORACLE);
    run.arg("--state").arg(state).args(["run", "--rm", "--name", "killed", image, "sleep", "3"]);
    let mut client = run.spawn().unwrap();
    until("its VM runs", Duration::from_secs(60), async || {
        let rows = coracle_ok(state, &["ps"]).await;
        let runs = rows.lines().any(|row| row.contains("killed") && row.contains("Running"));
        if runs { Ok(()) } else { Err(rows) }
    })
    .await;
    client.kill().await.unwrap();
}

/// Checks that each power state of the spec is reached by the VM and shown in the status.
async fn power_states(state: &Path, address: &str) {
    for (spec, wanted, reason, ready) in [
        (r#"{"powerState":"Paused"}"#, "Paused", "Paused", "False"),
        (r#"{"powerState":"Hibernated"}"#, "Hibernated", "Hibernated", "False"),
        (r#"{"powerState":"Running"}"#, "Running", "VMRunning", "True"),
        (r#"{"powerState":"Stopped"}"#, "Stopped", "PoweredOff", "False"),
        (r#"{"powerState":"Running"}"#, "Running", "VMRunning", "True"),
        (r#"{"powerState":null,"hibernateAfter":"1s"}"#, "Hibernated", "Hibernated", "False"),
        (r#"{"powerState":"Running","hibernateAfter":null}"#, "Running", "VMRunning", "True"),
    ] {
        let patch = format!(r#"{{"spec":{spec}}}"#);
        kubectl(state, &["patch", "mvm", "demo", "--type=merge", "-p", &patch]).await.unwrap();
        until(wanted, Duration::from_secs(60), || async {
            let path = r#"-o=jsonpath={.status.powerState} {.status.conditions[?(@.type=="Ready")].reason} {.status.conditions[?(@.type=="Ready")].status}"#;
            let said = kubectl(state, &["get", "mvm", "demo", path]).await?;
            if said == format!("{wanted} {reason} {ready}") { Ok(()) } else { Err(said) }
        })
        .await;
    }
    let row = row(state, "demo").await.unwrap();
    assert_eq!(row.get(5).map(String::as_str), Some(address), "it kept its address: {row:?}");
}

/// Checks that a second object continues from a snapshot of the first one, as a VM of its own.
async fn cloned_from_a_snapshot(state: &Path) {
    coracle_ok(state, &["exec", "default-demo", "sh", "-c", "echo precious > /kept; sync"]).await;
    coracle_ok(state, &["snapshot", "save", "default-demo", "--name", "demo-now"]).await;
    let listed = coracle_ok(state, &["snapshot", "ls"]).await;
    assert!(listed.contains("demo-now") && listed.contains("default-demo"), "{listed}");
    let twin = state.join("twin.yaml");
    let manifest = "apiVersion: vm.mikrom.es/v1alpha1\nkind: MikromVM\nmetadata: {name: twin}\n\
        spec: {cloneFrom: demo-now, vcpuCount: 1, memoryMB: 128}\n";
    std::fs::write(&twin, manifest).unwrap();
    kubectl(state, &["apply", "-f", twin.to_str().unwrap()]).await.unwrap();
    until("the twin runs", Duration::from_secs(60), || async {
        let row = row(state, "twin").await?;
        if row.get(1).is_some_and(|phase| phase == "Running") { Ok(()) } else { Err(format!("{row:?}")) }
    })
    .await;
    assert_eq!(coracle_ok(state, &["exec", "default-twin", "hostname"]).await, "twin\n");
    assert_eq!(coracle_ok(state, &["exec", "default-twin", "cat", "/kept"]).await, "precious\n");
}

/// Returns the end of every log, for the report of a failure.
fn logs(state: &Path) -> String {
    let mut all = String::new();
    for name in ["etcd", "kube-apiserver", "node", "operator"] {
        let log = std::fs::read_to_string(state.join(format!("logs/{name}.log"))).unwrap_or_default();
        let tail: Vec<_> = log.lines().rev().take(15).collect();
        all += &format!("--- {name}\n{}\n", tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
    }
    all
}

/// `down` identifies programs by executable and user, not by process name or arguments.
#[test]
fn down_spares_processes_that_only_name_its_state() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().to_str().unwrap();
    let mut others = ["etcd", "kube-apiserver"].map(|name| {
        let mut command = std::process::Command::new("tail");
        command.arg0(name).args(["-f", "/dev/null", state]).stderr(Stdio::null());
        command.spawn().unwrap()
    });
    let down = std::process::Command::new(CORACLE).args(["down", "--state", state]).output().unwrap();
    let is_spared = others.iter_mut().all(|other| other.try_wait().unwrap().is_none());
    for other in &mut others {
        other.kill().unwrap();
        other.wait().unwrap();
    }
    assert!(down.status.success() && is_spared, "{}", text(&down.stderr));
}
