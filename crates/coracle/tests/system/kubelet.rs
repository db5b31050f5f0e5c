//! A real kubelet whose Pods are VMs: `coracle up --with scheduler,controller-manager,kubelet`, used by kubectl.

use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_testkit::{netns, tools};

use crate::support::{coracle, coracle_ok, fetch, kubectl, node_tools, root, text, until};

/// A Pod's way to Running: a VM of its size boots first, beside the VMs of other tests.
const LIMIT: Duration = Duration::from_secs(120);

const PODS: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data: {greeting: hello}
---
apiVersion: v1
kind: Secret
metadata: {name: login}
stringData: {password: swordfish}
---
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec:
  terminationGracePeriodSeconds: 2
  initContainers:
  - name: prepare
    image: localhost/coracle/demo:1
    imagePullPolicy: Never
    command: [sh, -c, "echo prepared > /srv/page"]
    volumeMounts: [{name: work, mountPath: /srv}]
  - name: sidecar
    image: localhost/coracle/demo:1
    imagePullPolicy: Never
    restartPolicy: Always
    command: [sh, -c, "echo sidecar; while :; do sleep 1; done"]
  containers:
  - name: main
    image: localhost/coracle/demo:1
    imagePullPolicy: Never
    command: [sh, -c, "echo password $PASSWORD in $NAME; exec busybox httpd -f -p 8080 -h /srv"]
    env:
    - {name: PASSWORD, valueFrom: {secretKeyRef: {name: login, key: password}}}
    - {name: NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
    readinessProbe: {httpGet: {path: /page, port: 8080}, periodSeconds: 1}
    livenessProbe: {exec: {command: [sh, -c, "echo alive"]}, periodSeconds: 2}
    volumeMounts:
    - {name: work, mountPath: /srv}
    - {name: settings, mountPath: /settings}
  volumes:
  - {name: work, emptyDir: {}}
  - {name: settings, configMap: {name: settings}}
"#;

const JOB: &str = r#"
apiVersion: batch/v1
kind: Job
metadata: {name: sum}
spec:
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      containers:
      - name: main
        image: localhost/coracle/demo:1
        imagePullPolicy: Never
        command: [sh, -c, "echo $((6 * 7)); echo the end > /dev/termination-log"]
---
apiVersion: v1
kind: Pod
metadata: {name: greedy}
spec:
  restartPolicy: Never
  containers:
  - name: main
    image: localhost/coracle/demo:1
    imagePullPolicy: Never
    command: [sh, -c, "x=a; while :; do x=$x$x; done"]
    resources: {limits: {memory: 16Mi}}
"#;

/// A system with a kubelet; `None` with a printed reason where a program is missing.
struct System {
    _dir: tempfile::TempDir,
    state: PathBuf,
}

impl System {
    async fn start() -> Option<Self> {
        node_tools()?;
        tools::require([
            "etcd",
            "kube-apiserver",
            "kubectl",
            "kube-scheduler",
            "kube-controller-manager",
            "kubelet",
        ])?;
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let up = ["up", "--detach", "--with", "scheduler,controller-manager,kubelet"];
        let up = coracle(&state, &up).await;
        assert!(up.status.success(), "coracle up: {}", text(&up.stderr));
        Some(Self { _dir: dir, state })
    }

    async fn kubectl(&self, args: &[&str]) -> Result<String, String> {
        kubectl(&self.state, args).await
    }

    async fn apply(&self, name: &str, manifest: &str) {
        let file = self.state.join(name);
        std::fs::write(&file, manifest).unwrap();
        self.kubectl(&["apply", "-f", file.to_str().unwrap()]).await.unwrap();
    }

    /// Waits until a field of an object has a value.
    async fn wait(&self, what: &[&str], path: &str, want: &str) {
        let path = format!("-o=jsonpath={path}");
        let args = [&["get"], what, &[path.as_str()]].concat();
        until(&format!("{what:?} {want}"), LIMIT, async || match self.kubectl(&args).await? {
            value if value == want => Ok(()),
            other => {
                let described = self.kubectl(&[&["describe"], what].concat()).await.unwrap_or_default();
                Err(format!("{other:?}\n{described}"))
            }
        })
        .await;
    }

    /// Path of the kubelet's API behind the API server.
    async fn node_path(&self, path: &str) -> String {
        let node = self.kubectl(&["get", "nodes", "-o=jsonpath={.items[0].metadata.name}"]).await.unwrap();
        format!("/api/v1/nodes/{node}/proxy/{path}")
    }

    async fn end(self) {
        coracle_ok(&self.state, &["down"]).await;
        let left = coracle_hypervisor_testing::instances::processes_of(&self.state);
        assert!(left.is_empty(), "processes are left: {left:?}");
    }
}

const READY: &str = "{.status.conditions[?(@.type=='Ready')].status}";

/// Process ids of the programs of a system, by what their arguments contain.
fn processes(program: &str, state: &Path) -> Vec<i32> {
    let state = state.to_str().unwrap();
    let of = |entry: std::fs::DirEntry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let line = std::fs::read_to_string(entry.path().join("cmdline")).ok()?.replace('\0', " ");
        (line.contains(program) && line.contains(state)).then_some(pid)
    };
    std::fs::read_dir("/proc").unwrap().flatten().filter_map(of).collect()
}

fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn kubelet_runs_pods_as_vms() {
    netns::run_within(Duration::from_secs(300), || async {
        let Some(system) = System::start().await else { return };
        let example = root().join("examples/pod.yaml");
        system.kubectl(&["apply", "-f", example.to_str().unwrap()]).await.unwrap();
        system.wait(&["pod", "hello"], READY, "True").await;
        system.kubectl(&["delete", "pod", "hello"]).await.unwrap();
        system.apply("pods.yaml", PODS).await;
        system.wait(&["pod", "web"], READY, "True").await;
        let logs = system.kubectl(&["logs", "web", "-c", "main"]).await.unwrap();
        assert!(logs.contains("password swordfish in web"), "{logs}");
        let exec = ["exec", "web", "-c", "main", "--", "cat", "/settings/greeting", "/srv/page"];
        assert_eq!(system.kubectl(&exec).await.unwrap(), "helloprepared\n");
        let failed = system.kubectl(&["exec", "web", "-c", "main", "--", "sh", "-c", "exit 7"]).await;
        assert!(failed.unwrap_err().contains("exit code 7"));
        let ip = system.kubectl(&["get", "pod", "web", "-o=jsonpath={.status.podIP}"]).await.unwrap();
        assert_eq!(fetch(format!("{ip}:8080")).await.map(|page| page.contains("404")), Ok(true));
        // The kernel of the guest is not that of this machine: it is a VM.
        let guest = system.kubectl(&["exec", "web", "-c", "sidecar", "--", "uname", "-r"]).await.unwrap();
        assert_ne!(guest.trim(), std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap().trim());
        let summary = system.node_path("stats/summary").await;
        // The kubelet looks at cgroups every ten seconds.
        until("the VMM counts as its pod's", LIMIT, async || {
            let stats = system.kubectl(&["get", "--raw", &summary]).await?;
            let stats: serde_json::Value = serde_json::from_str(&stats).map_err(|e| e.to_string())?;
            let mut pods = stats["pods"].as_array().into_iter().flatten();
            let pod = pods.find(|pod| pod["podRef"]["name"] == "web").ok_or("no statistics")?;
            let containers = pod["containers"].as_array().map(Vec::len);
            match pod["memory"]["workingSetBytes"].as_u64() {
                Some(bytes) if bytes > 32 << 20 && containers == Some(2) => Ok(()),
                bytes => Err(format!("{bytes:?} bytes, {containers:?} containers")),
            }
        })
        .await;

        let patch = r#"{"data":{"greeting":"goodbye"}}"#;
        system.kubectl(&["patch", "configmap", "settings", "-p", patch]).await.unwrap();

        system.apply("job.yaml", JOB).await;
        system.wait(&["job", "sum"], "{.status.succeeded}", "1").await;
        assert_eq!(system.kubectl(&["logs", "job/sum"]).await.unwrap(), "42\n");
        let ended = "{.items[0].status.containerStatuses[0].state.terminated.message}";
        system.wait(&["pods", "-l", "job-name=sum"], ended, "the end\n").await;
        let reason = "{.status.containerStatuses[0].state.terminated.reason}";
        system.wait(&["pod", "greedy"], reason, "OOMKilled").await;

        until("the ConfigMap's change in the pod", Duration::from_secs(120), async || {
            match system.kubectl(&exec).await?.as_str() {
                "goodbyeprepared\n" => Ok(()),
                other => Err(other.to_owned()),
            }
        })
        .await;
        system.kubectl(&["delete", "pod", "web", "greedy"]).await.unwrap();
        system.kubectl(&["delete", "job", "sum"]).await.unwrap();
        until("no VM is left", LIMIT, async || {
            let vms = coracle_ok(&system.state, &["ps", "-a", "-o", "name"]).await;
            if vms.trim().is_empty() { Ok(()) } else { Err(vms) }
        })
        .await;
        system.end().await;
    });
}

#[test]
fn pods_outlive_node_daemon_and_kubelet() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(system) = System::start().await else { return };
        system.apply("pods.yaml", PODS).await;
        system.wait(&["pod", "web"], READY, "True").await;
        let started = "-o=jsonpath={.status.containerStatuses[0].containerID} {.status.containerStatuses[0].restartCount}";
        let before = system.kubectl(&["get", "pod", "web", started]).await.unwrap();
        for (program, state) in [("coracle node", &system.state), ("kubelet --config", &system.state)] {
            let old = processes(program, state);
            assert_eq!(old.len(), 1, "{program}");
            kill(old[0]);
            until(&format!("{program} is started again"), LIMIT, async || {
                match processes(program, state).as_slice() {
                    [new] if *new != old[0] => Ok(()),
                    other => Err(format!("{other:?}")),
                }
            })
            .await;
        }
        until("exec works again", LIMIT, async || {
            system.kubectl(&["exec", "web", "-c", "main", "--", "cat", "/srv/page"]).await
        })
        .await;
        assert_eq!(system.kubectl(&["get", "pod", "web", started]).await.unwrap(), before);
        system.end().await;
    });
}
