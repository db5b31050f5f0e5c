//! The node daemon is killed under pods of its virtual node, while clients follow their logs and run commands in them.
//!
//! `CORACLE_PODS` is the number of pods.

use std::process::Stdio;
use std::time::Duration;

use coracle_testkit::netns;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::pod_system::{LIMIT, READY, System};
use crate::support::until;

/// Pod that prints consecutive numbers.
const POD: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: NAME}
spec:
  tolerations: [{key: virtual-kubelet.io/provider, operator: Exists}]
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: localhost/coracle/demo:1
    imagePullPolicy: Never
    command: [sh, -c, "n=0; while :; do n=$((n+1)); echo $n; busybox sleep 0.2; done"]
    readinessProbe: {exec: {command: [busybox, "true"]}, periodSeconds: 5, timeoutSeconds: 5}
    resources: {requests: {cpu: 50m}, limits: {memory: 32Mi}}
---
"#;
/// Number of lines that a pod prints before the kill.
const PRINTED: u64 = 20;

/// A pod and its clients.
struct Watched {
    name: String,
    logs: Child,
    exec: Child,
}

impl Watched {
    async fn begin(system: &System, name: String) -> Self {
        let start = |args: &[&str]| {
            let mut command = Command::new(system.state.join("bin/kubectl"));
            command.arg("--kubeconfig").arg(system.state.join("kubeconfig")).args(args).kill_on_drop(true);
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
        };
        let logs = start(&["logs", "--follow", &name]);
        let exec = start(&["exec", "-i", &name, "--", "sh", "-c", "echo in; read line"]);
        let mut watched = Self { name, logs, exec };
        let mut lines = BufReader::new(watched.exec.stdout.as_mut().unwrap()).lines();
        let said = tokio::time::timeout(LIMIT, lines.next_line()).await.expect("the command runs").unwrap();
        assert_eq!(said.as_deref(), Some("in"), "{}", watched.name);
        watched
    }

    /// Waits until the clients end, and returns the log lines that were received until then.
    async fn cut_off(mut self) -> String {
        let mut seen = String::new();
        let both = async {
            self.logs.stdout.take().unwrap().read_to_string(&mut seen).await.unwrap();
            self.exec.wait().await.unwrap();
        };
        tokio::time::timeout(LIMIT, both).await.expect("clients of a node that was killed end");
        seen
    }
}

/// Returns the last of the printed numbers, after checking that none is missing or printed twice.
fn counted(pod: &str, printed: &str) -> u64 {
    let whole = printed.rfind('\n').map_or("", |end| &printed[..end]);
    let mut last = 0;
    for line in whole.lines() {
        assert_eq!(line.parse(), Ok(last + 1), "{pod}: after {last}");
        last += 1;
    }
    last
}

/// Kills programs of the node under pods whose first container counts, each with a client of its logs and one of a command.
/// Checks that the state of the pods is unchanged, and that no log line is lost or duplicated.
pub(crate) async fn pods_are_unharmed_by_kills(system: &System, names: &[String], programs: &[&str]) {
    let kubectl = async |args: &[&str]| system.kubectl(args).await;
    let mut watched = Vec::new();
    for name in names {
        system.wait(&["pod", name], READY, "True").await;
        watched.push(Watched::begin(system, name.clone()).await);
    }
    let at_least = async |name: &String, least: u64| {
        until(&format!("{name} has printed {least} lines"), LIMIT, async || {
            let printed = kubectl(&["logs", name]).await?;
            let last = counted(name, &printed);
            if last >= least { Ok(last) } else { Err(format!("{last} lines")) }
        })
        .await
    };
    for name in names {
        at_least(name, PRINTED).await;
    }
    let lives = "-o=jsonpath={range .items[*]}{.metadata.name} {.status.podIP} {.status.containerStatuses[0].containerID} {.status.containerStatuses[0].restartCount}{\"\\n\"}{end}";
    let before = kubectl(&["get", "pods", lives]).await.unwrap();
    assert!(before.lines().all(|line| line.ends_with(" 0")) && !before.is_empty(), "{before}");

    for program in programs {
        system.kill_restarted(program).await;
    }
    for one in watched {
        let name = one.name.clone();
        let seen = counted(&name, &one.cut_off().await);
        assert!(seen >= PRINTED, "{name}: its follower saw {seen} lines");
        // More lines than before the kill: the same process still counts, and no line is lost.
        let now = at_least(&name, seen + PRINTED).await;
        assert!(now > seen, "{name}");
    }
    for name in names {
        until(&format!("exec in {name}"), LIMIT, async || {
            kubectl(&["exec", name, "--", "busybox", "true"]).await
        })
        .await;
        system.wait(&["pod", name], READY, "True").await;
    }
    assert_eq!(kubectl(&["get", "pods", lives]).await.unwrap(), before, "no pod was harmed");
}

#[test]
fn pods_with_open_exec_and_logs_survive_kills_of_the_node() {
    netns::run_within(Duration::from_secs(900), || async {
        let count = std::env::var("CORACLE_PODS").ok().and_then(|n| n.parse().ok()).unwrap_or(4);
        let Some(system) = System::start("scheduler,controller-manager").await else { return };
        let names: Vec<_> = (0..count).map(|number| format!("pod-{number}")).collect();
        let manifests: Vec<_> = names.iter().map(|name| POD.replace("NAME", name)).collect();
        system.apply("pods.yaml", &manifests.concat()).await;
        pods_are_unharmed_by_kills(&system, &names, &["coracle node"]).await;
        println!("{{\"scenario\":\"pods_outage\",\"pods\":{count},\"ok\":true}}");
        system.kubectl(&["delete", "pods", "--all"]).await.unwrap();
        system.until_no_vm().await;
        system.end().await;
    });
}
