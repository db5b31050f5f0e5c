//! A real kubelet whose Pods are VMs: `coracle up --with scheduler,controller-manager,kubelet`, used by kubectl.

use std::process::Stdio;
use std::time::Duration;

use coracle_testkit::{elapse, netns, tools};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::pod_system::{LIMIT, READY, System, kill, processes};
use crate::pod_users::pod_has_users_of_its_own;
use crate::pods_outage::pods_are_unharmed_by_kills;
use crate::support::{coracle_ok, fetch, text, until};

const WITH: &str = "scheduler,controller-manager,kubelet";

const PODS: &str = r#"
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: qemu}
handler: coracle-qemu
---
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: unknown}
handler: coracle-unknown
---
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
    volumeMounts: [{name: memory, mountPath: /whole}]
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
    - {name: login, mountPath: /login}
    - {name: memory, mountPath: /part, subPath: part}
  volumes:
  - {name: work, emptyDir: {}}
  - {name: memory, emptyDir: {medium: Memory, sizeLimit: 4Mi}}
  - {name: settings, configMap: {name: settings}}
  - {name: login, secret: {secretName: login}}
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
---
apiVersion: v1
kind: Pod
metadata: {name: hoarder}
spec:
  runtimeClassName: qemu
  containers:
  - name: main
    image: localhost/coracle/demo:1
    imagePullPolicy: Never
    command: [sh, -c, "busybox dd if=/dev/zero of=/hoard bs=1M count=32; busybox sleep 1000"]
    resources: {limits: {ephemeral-storage: 8Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: unknown}
spec:
  runtimeClassName: unknown
  containers: [{name: main, image: "localhost/coracle/demo:1", imagePullPolicy: Never}]
---
apiVersion: v1
kind: Pod
metadata: {name: unreachable}
spec:
  containers: [{name: main, image: "127.0.0.1:1/none:1"}]
"#;

/// Pod of a build agent with a RuntimeClass for disk images, and with a script from a ConfigMap.
const DISK_POD: &str = r#"
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: macvm}
handler: macvm
---
apiVersion: v1
kind: ConfigMap
metadata: {name: scripts}
data: {run.sh: "echo profile $TC_CLOUD_PROFILE_ID; hostname; until test -e /tmp/go; do sleep 1; done; exit 3"}
---
apiVersion: v1
kind: Pod
metadata:
  name: mac
  annotations: {coracle.dev/display: 1280x1024}
spec:
  containers:
  - name: macos
    image: localhost/test/system:1
    imagePullPolicy: Never
    command: [sh]
    args: [/scripts/run.sh]
    env: [{name: TC_CLOUD_PROFILE_ID, value: kube-7}]
    resources: {limits: {cpu: "1", memory: 448Mi}}
    volumeMounts: [{name: scripts, mountPath: /scripts}]
  volumes: [{name: scripts, configMap: {name: scripts}}]
  enableServiceLinks: false
  runtimeClassName: macvm
  restartPolicy: Never
"#;

/// Pod for kubectl commands on a running pod.
const TOOLS_POD: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: tools}
spec:
  terminationGracePeriodSeconds: 2
  containers:
  - name: main
    image: localhost/coracle/demo:1
    imagePullPolicy: Never
    command: [sh, -c, "echo hello > /tmp/page; exec busybox httpd -f -p 8080 -h /tmp"]
    readinessProbe: {httpGet: {path: /page, port: 8080}, periodSeconds: 1}
    resources: {limits: {cpu: 500m, memory: 32Mi}}
    resizePolicy: [{resourceName: cpu, restartPolicy: NotRequired}, {resourceName: memory, restartPolicy: NotRequired}]
    volumeMounts: [{name: model, mountPath: /model}]
  - name: cat
    image: localhost/coracle/demo:1
    imagePullPolicy: Never
    stdin: true
    command: [sh, -c, "while read line; do echo got $line; done"]
    resources: {limits: {cpu: 100m, memory: 16Mi}}
  volumes: [{name: model, image: {reference: "localhost/coracle/demo:1", pullPolicy: Never}}]
"#;

/// Pods that print consecutive numbers, none of which may be lost.
const COUNTERS: &str = r#"
apiVersion: apps/v1
kind: Deployment
metadata: {name: counter}
spec:
  replicas: 2
  selector: {matchLabels: {app: counter}}
  template:
    metadata: {labels: {app: counter}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: localhost/coracle/demo:1
        imagePullPolicy: Never
        command: [sh, -c, "n=0; while :; do n=$((n+1)); echo $n; busybox sleep 0.2; done"]
        readinessProbe: {exec: {command: [busybox, "true"]}, periodSeconds: 5, timeoutSeconds: 5}
        resources: {requests: {cpu: 50m, memory: 16Mi}, limits: {memory: 32Mi}}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: counter}
spec: {minAvailable: 2, selector: {matchLabels: {app: counter}}}
"#;

/// Template of the pods whose node daemon is killed.
const KILLED_POD: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: NAME}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: localhost/coracle/demo:1
    imagePullPolicy: Never
    command: [sh, -c, "trap 'exit 0' TERM; while :; do sleep 1; done"]
    resources: {limits: {memory: 32Mi}}
"#;

impl System {
    /// Returns a connection to a port of a pod, and the kubectl process that forwards it. Its stdout pipe must stay open.
    async fn forward(&self, pod: &str, port: u16) -> (Child, TcpStream) {
        let mut command = Command::new(self.state.join("bin/kubectl"));
        command.arg("--kubeconfig").arg(self.state.join("kubeconfig"));
        command.args(["port-forward", &format!("pod/{pod}"), &format!(":{port}")]);
        let mut kubectl = command.stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
        let mut lines = BufReader::new(kubectl.stdout.as_mut().unwrap()).lines();
        let line = tokio::time::timeout(LIMIT, lines.next_line()).await.expect("a port").unwrap().unwrap();
        let address = line.strip_prefix("Forwarding from ").and_then(|rest| rest.split(' ').next());
        (kubectl, TcpStream::connect(address.expect(&line)).await.unwrap())
    }
}

#[test]
fn kubelet_runs_pods_as_vms() {
    netns::run_within(Duration::from_secs(300), || async {
        let Some(system) = System::start(WITH).await else { return };
        system.apply_example("pod.yaml").await;
        system.wait(&["pod", "hello"], READY, "True").await;
        system.kubectl(&["delete", "pod", "hello"]).await.unwrap();
        system.apply("pods.yaml", PODS).await;
        system.wait(&["pod", "web"], READY, "True").await;
        let logs = system.kubectl(&["logs", "web", "-c", "main"]).await.unwrap();
        assert!(logs.contains("password swordfish in web"), "{logs}");
        let exec =
            ["exec", "web", "-c", "main", "--", "cat", "/settings/greeting", "/login/password", "/srv/page"];
        assert_eq!(system.kubectl(&exec).await.unwrap(), "helloswordfishprepared\n");
        let failed = system.kubectl(&["exec", "web", "-c", "main", "--", "sh", "-c", "exit 7"]).await;
        assert!(failed.unwrap_err().contains("exit code 7"));
        let ip = system.kubectl(&["get", "pod", "web", "-o=jsonpath={.status.podIP}"]).await.unwrap();
        assert_eq!(fetch(format!("{ip}:8080")).await.map(|page| page.contains("404")), Ok(true));
        // The guest's kernel differs from this machine's kernel, so the pod is a VM.
        let guest = system.kubectl(&["exec", "web", "-c", "sidecar", "--", "uname", "-r"]).await.unwrap();
        assert_ne!(guest.trim(), std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap().trim());
        let write = "busybox df -m /whole | busybox awk 'END {print $2}'; echo shared > /whole/part/page";
        let write = ["exec", "web", "-c", "sidecar", "--", "sh", "-c", write];
        assert_eq!(system.kubectl(&write).await.as_deref(), Ok("4\n"), "MiB of its limit");
        let read = ["exec", "web", "-c", "main", "--", "cat", "/part/page"];
        assert_eq!(system.kubectl(&read).await.as_deref(), Ok("shared\n"), "a part of a volume in memory");
        let summary = system.node_path("stats/summary").await;
        // The kubelet reads cgroups every ten seconds.
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
        let patch = r#"{"stringData":{"password":"mackerel"}}"#;
        system.kubectl(&["patch", "secret", "login", "-p", patch]).await.unwrap();

        system.apply("job.yaml", JOB).await;
        system.wait(&["job", "sum"], "{.status.succeeded}", "1").await;
        assert_eq!(system.kubectl(&["logs", "job/sum"]).await.unwrap(), "42\n");
        let ended = "{.items[0].status.containerStatuses[0].state.terminated.message}";
        system.wait(&["pods", "-l", "job-name=sum"], ended, "the end\n").await;
        let reason = "{.status.containerStatuses[0].state.terminated.reason}";
        system.wait(&["pod", "greedy"], reason, "OOMKilled").await;
        for (pod, why) in
            [("unknown", "\"coracle-unknown\" is not one of"), ("unreachable", "Error: RegistryUnavailable")]
        {
            until(&format!("{pod}: {why}"), LIMIT, async || {
                let of = format!("--field-selector=involvedObject.name={pod}");
                let events = system.kubectl(&["get", "events", &of]).await?;
                if events.contains(why) { Ok(()) } else { Err(events) }
            })
            .await;
        }

        until("changes of ConfigMap and Secret in the pod", Duration::from_secs(120), async || match system
            .kubectl(&exec)
            .await?
            .as_str()
        {
            "goodbyemackerelprepared\n" => Ok(()),
            other => Err(other.to_owned()),
        })
        .await;
        pod_has_users_of_its_own(&system).await;
        system.wait(&["pod", "hoarder"], "{.status.reason}", "Evicted").await;
        let pods = ["delete", "pod", "web", "greedy", "hoarder", "unknown", "unreachable"];
        system.kubectl(&pods).await.unwrap();
        system.kubectl(&["delete", "job", "sum"]).await.unwrap();
        system.until_no_vm().await;
        system.end().await;
    });
}

/// Daemons are killed under load, a disruption budget forbids a drain, and pods are evicted under memory pressure.
#[test]
fn pods_outlive_node_daemon_and_kubelet() {
    netns::run_within(Duration::from_secs(500), || async {
        let Some(system) = System::start(WITH).await else { return };
        system.apply("pods.yaml", PODS).await;
        system.apply("counters.yaml", COUNTERS).await;
        let names = "-o=jsonpath={.items[*].metadata.name}";
        let names = until("the replicas", LIMIT, async || {
            let names = system.kubectl(&["get", "pods", "-l", "app=counter", names]).await?;
            let names: Vec<_> = names.split(' ').map(str::to_owned).collect();
            if names.len() == 2 { Ok(names) } else { Err(format!("{names:?}")) }
        })
        .await;
        system.wait(&["pod", "web"], READY, "True").await;
        pods_are_unharmed_by_kills(&system, &names, &["coracle node", "kubelet --config"]).await;
        let page = system.kubectl(&["exec", "web", "-c", "main", "--", "cat", "/srv/page"]).await;
        assert_eq!(page.as_deref(), Ok("prepared\n"));
        system.kubectl(&["delete", "pod", "web", "--wait=false"]).await.unwrap();

        let node = system.kubectl(&["get", "nodes", "-o=jsonpath={.items[0].metadata.name}"]).await.unwrap();
        let drain = ["drain", &node, "--pod-selector=app=counter", "--timeout=3s"];
        let refused = system.kubectl(&drain).await.unwrap_err();
        assert!(refused.contains("disruption budget"), "{refused}");
        for name in &names {
            system.wait(&["pod", name], READY, "True").await;
        }
        system.kubectl(&["uncordon", &node]).await.unwrap();

        // More memory than the machine has, so that there is pressure at once.
        set_soft_eviction(&system, json!({"memory.available": "1Pi"})).await;
        let pressure = "{.status.conditions[?(@.type=='MemoryPressure')].status}";
        system.wait(&["node", &node], pressure, "True").await;
        let reasons = "-o=jsonpath={.items[*].status.reason}";
        until("a pod is evicted", LIMIT, async || {
            let reasons = system.kubectl(&["get", "pods", "-l", "app=counter", reasons]).await?;
            if reasons.contains("Evicted") { Ok(()) } else { Err(reasons) }
        })
        .await;
        set_soft_eviction(&system, json!({})).await;
        system.wait(&["deployment", "counter"], "{.status.availableReplicas}", "2").await;
        system.end().await;
    });
}

/// Sets soft eviction thresholds. Thresholds of hard evictions would be subtracted from the allocatable resources.
async fn set_soft_eviction(system: &System, thresholds: serde_json::Value) {
    let file = system.state.join("kubelet/config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let signals = thresholds.as_object().unwrap().keys().cloned();
    config["evictionSoftGracePeriod"] = signals.map(|signal| (signal, json!("1s"))).collect();
    config["evictionSoft"] = thresholds;
    config["evictionMaxPodGracePeriod"] = 1.into();
    config["evictionPressureTransitionPeriod"] = "1s".into();
    std::fs::write(&file, serde_json::to_vec(&config).unwrap()).unwrap();
    system.kill_restarted("kubelet --config").await;
}

/// A disk image VM as a pod: display before it has booted, command from a ConfigMap, exec, logs, exit code.
#[test]
fn kubelet_runs_a_disk_image_by_runtime_class() {
    netns::run_within(Duration::from_secs(600), || async {
        let Some(image) = tools::system_image() else {
            return tools::skip("no disk image; `cargo xtask setup` makes it");
        };
        let Some(system) = System::start(WITH).await else { return };
        let source = format!("disk:{}", image.display());
        coracle_ok(&system.state, &["image", "import", &source, "localhost/test/system:1"]).await;
        system.apply("disk.yaml", DISK_POD).await;
        system.wait(&["pod", "mac"], "{.status.phase}", "Running").await;
        let ip = system.kubectl(&["get", "pod", "mac", "-o=jsonpath={.status.podIP}"]).await.unwrap();
        let (_kubectl, mut screen) = system.forward("mac", 5900).await;
        let mut said = [0; 12];
        let read = tokio::time::timeout(LIMIT, screen.read_exact(&mut said)).await;
        read.expect("it speaks first").unwrap();
        assert_eq!(text(&said), "RFB 003.008\n", "its screen");
        until("exec in the system", Duration::from_secs(300), async || {
            let look = ["exec", "mac", "--", "sh", "-c", "cat /scripts/run.sh; ip -4 -o addr"];
            let said = system.kubectl(&look).await?;
            if said.contains("profile") && said.contains(&ip) { Ok(()) } else { Err(said) }
        })
        .await;
        until("output of the command", LIMIT, async || {
            match system.kubectl(&["logs", "mac"]).await?.as_str() {
                "profile kube-7\nmac\n" => Ok(()),
                other => Err(other.to_owned()),
            }
        })
        .await;
        system.kubectl(&["exec", "mac", "--", "touch", "/tmp/go"]).await.unwrap();
        system.wait(&["pod", "mac"], "{.status.phase}", "Failed").await;
        let code = "{.status.containerStatuses[0].state.terminated.exitCode}";
        system.wait(&["pod", "mac"], code, "3").await;
        until("events of the VM", LIMIT, async || {
            let query = [
                "get",
                "events",
                "--field-selector",
                "involvedObject.name=mac",
                "-o",
                "jsonpath={.items[*].reason}",
            ];
            let told = system.kubectl(&query).await?;
            let all = ["DiskCloned", "VMMStarted", "AgentReady"].iter().all(|reason| told.contains(reason));
            if all { Ok(()) } else { Err(told) }
        })
        .await;
        system.kubectl(&["delete", "pod", "mac"]).await.unwrap();
        system.end().await;
    });
}

/// Checks image volume, port-forward, attach, ephemeral container, in-place resize, and a drain.
#[test]
fn kubectl_debugs_resizes_and_drains_pods() {
    netns::run_within(Duration::from_secs(400), || async {
        let Some(system) = System::start(WITH).await else { return };
        system.apply("tools.yaml", TOOLS_POD).await;
        system.wait(&["pod", "tools"], READY, "True").await;
        let exec =
            async |line: &str| system.kubectl(&["exec", "tools", "-c", "main", "--", "sh", "-c", line]).await;
        let model = exec("ls /model/bin; touch /model/x 2>&1 || echo read-only").await.unwrap();
        assert!(model.contains("busybox") && model.contains("read-only"), "{model}");
        let (_kubectl, mut server) = system.forward("tools", 8080).await;
        server.write_all(b"GET /page HTTP/1.0\r\n\r\n").await.unwrap();
        let mut lines = BufReader::new(server).lines();
        let page = async {
            while let Some(line) = lines.next_line().await.unwrap() {
                if line == "hello" {
                    return true;
                }
            }
            false
        };
        assert!(tokio::time::timeout(LIMIT, page).await.expect("a page"));

        let mut attach = Command::new(system.state.join("bin/kubectl"));
        attach.arg("--kubeconfig").arg(system.state.join("kubeconfig"));
        attach.args(["attach", "-i", "-q", "tools", "-c", "cat"]).kill_on_drop(true);
        attach.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut attached = attach.spawn().unwrap();
        attached.stdin.as_mut().unwrap().write_all(b"one line\n").await.unwrap();
        let mut lines = BufReader::new(attached.stdout.take().unwrap()).lines();
        let line = tokio::time::timeout(LIMIT, lines.next_line()).await.expect("an answer").unwrap();
        assert_eq!(line.as_deref(), Some("got one line"));
        drop(attached);

        let image = ["--image=localhost/coracle/demo:1", "--image-pull-policy=Never"];
        // One more httpd process runs while it serves a page.
        let line = "busybox ps | busybox grep -q '[h]ttpd' && echo seen; cat /proc/1/root/tmp/page";
        let debug =
            [&["debug", "tools", "-c", "dbg", "--target=main"][..], &image, &["--", "sh", "-c", line]];
        system.kubectl(&debug.concat()).await.unwrap();
        let state = "{.status.ephemeralContainerStatuses[0].state.terminated.exitCode}";
        system.wait(&["pod", "tools"], state, "0").await;
        assert_eq!(system.kubectl(&["logs", "tools", "-c", "dbg"]).await.unwrap(), "seen\nhello\n");

        let patch =
            r#"{"spec":{"containers":[{"name":"main","resources":{"limits":SIZE,"requests":SIZE}}]}}"#;
        let patch = &patch.replace("SIZE", r#"{"cpu":"700m","memory":"40Mi"}"#);
        system.kubectl(&["patch", "pod", "tools", "--subresource=resize", "-p", patch]).await.unwrap();
        let memory = "{.status.containerStatuses[?(@.name=='main')].resources.limits.memory}";
        system.wait(&["pod", "tools"], memory, "40Mi").await;
        assert_eq!(exec("cat /sys/fs/cgroup/memory.max").await.unwrap().trim(), (40 << 20).to_string());
        assert_eq!(exec("cat /sys/fs/cgroup/cpu.max").await.unwrap().trim(), "70000 100000");
        let restarts = "{.status.containerStatuses[?(@.name=='main')].restartCount}";
        system.wait(&["pod", "tools"], restarts, "0").await;

        let node = system.kubectl(&["get", "nodes", "-o=jsonpath={.items[0].metadata.name}"]).await.unwrap();
        let drain = ["drain", &node, "--force", "--delete-emptydir-data", "--timeout=100s"];
        system.kubectl(&drain).await.unwrap();
        system.until_no_vm().await;
        system.end().await;
    });
}

/// Kills the node daemon while pods are created and removed: none is lost, created twice, or left behind.
#[test]
fn pods_survive_kills_of_the_node_at_any_moment() {
    netns::run_within(Duration::from_secs(400), || async {
        let Some(system) = System::start(WITH).await else { return };
        let killed = async |after_ms: u64| {
            // The test needs kills at given moments.
            elapse(Duration::from_millis(after_ms)).await;
            let old = processes("coracle node", &system.state);
            old.iter().for_each(|pid| kill(*pid));
            until("the node is started again", LIMIT, async || {
                match processes("coracle node", &system.state).as_slice() {
                    [new] if !old.contains(new) => Ok(()),
                    other => Err(format!("{other:?}")),
                }
            })
            .await;
            // The supervisor gives up on a program that repeatedly ends soon after its start, which another test covers.
            elapse(Duration::from_secs(6)).await;
        };
        // From the creation of the sandbox through the boot of its guest to the start of the container.
        let moments = [0, 150, 400, 900, 1800];
        for (number, after_ms) in moments.iter().enumerate() {
            let pod = KILLED_POD.replace("NAME", &format!("pod-{number}"));
            system.apply("killed.yaml", &pod).await;
            killed(*after_ms).await;
        }
        for number in 0..moments.len() {
            system.wait(&["pod", &format!("pod-{number}")], READY, "True").await;
        }
        let vms = coracle_ok(&system.state, &["ps", "-a", "-o", "name"]).await;
        let sandboxes = vms.lines().count();
        assert!(sandboxes >= moments.len(), "{vms}");
        let names: Vec<_> = (0..moments.len()).map(|number| format!("pod-{number}")).collect();
        for (name, after_ms) in names.iter().zip(moments) {
            system.kubectl(&["delete", "pod", name, "--wait=false"]).await.unwrap();
            killed(after_ms).await;
        }
        system.until_no_vm().await;
        system.end().await;
    });
}
