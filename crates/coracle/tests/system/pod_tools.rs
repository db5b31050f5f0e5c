//! kubectl commands for a running pod over each transport: exec with a terminal, attach, cp. Once for a pod of containers in a
//! VM, and once for a pod that is a VM.

use std::process::Stdio;
use std::time::Duration;

use coracle_testkit::{netns, tools};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::Command;

use crate::pod_system::{LIMIT, READY, System};
use crate::support::{text, until};

const PODS: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: plain}
spec:
  tolerations: [{key: virtual-kubelet.io/provider, operator: Exists}]
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: localhost/coracle/demo:1
    imagePullPolicy: Never
    stdin: true
    command: [sh, -c, "while read line; do echo got $line; done"]
    resources: {limits: {cpu: 500m, memory: 64Mi}}
    volumeMounts: [{name: ram, mountPath: /ram}]
  volumes: [{name: ram, emptyDir: {medium: Memory, sizeLimit: 1Mi}}]
---
apiVersion: v1
kind: Pod
metadata: {name: told}
spec:
  tolerations: [{key: virtual-kubelet.io/provider, operator: Exists}]
  restartPolicy: Never
  automountServiceAccountToken: false
  hostAliases: [{ip: 192.0.2.7, hostnames: [alias.test]}]
  securityContext: {runAsUser: 1000}
  containers:
  - name: main
    image: localhost/coracle/demo:1
    imagePullPolicy: Never
    command: [sh, -c, "cat /etc/hosts; cat /proc/mounts; echo no oracle > /dev/termination-log; exit 3"]
    securityContext: {readOnlyRootFilesystem: true}
    resources: {limits: {cpu: 500m, memory: 64Mi}}
---
apiVersion: v1
kind: Pod
metadata:
  name: vm
  annotations:
    vm.cocoonstack.io/name: vk-default-vm
    cocoonset.cocoonstack.io/mode: run
    cocoonset.cocoonstack.io/managed: "true"
    cocoonset.cocoonstack.io/image: localhost/coracle/demo:1
spec:
  tolerations: [{key: virtual-kubelet.io/provider, operator: Exists}]
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: vm
    resources: {limits: {cpu: 500m, memory: 128Mi}}
"#;

/// Transports of kubectl: WebSockets, and SPDY as in older versions.
const TRANSPORTS: [&str; 2] = ["true", "false"];

impl System {
    fn kubectl_by(&self, websockets: &str, args: &[&str]) -> Command {
        let mut command = Command::new(self.state.join("bin/kubectl"));
        command.arg("--kubeconfig").arg(self.state.join("kubeconfig")).args(args).kill_on_drop(true);
        command.env("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", websockets);
        command
    }

    async fn run_by(&self, websockets: &str, args: &[&str]) -> Result<String, String> {
        let output = self.kubectl_by(websockets, args).output().await.map_err(|e| e.to_string())?;
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// Checks a shell with a terminal: its size, the size after a change, and its exit code.
    async fn exec_with_a_terminal(&self, websockets: &str, pod: &str) {
        let shows = |size: &str| {
            format!("until test \"$(busybox stty size)\" = '{size}'; do busybox sleep 0.1; done")
        };
        let script = format!("{}; echo first; {}; echo second; exit 7", shows("24 80"), shows("50 132"));
        let kubectl = self.state.join("bin/kubectl");
        let mut command = Command::new("python3");
        command.args(["-c", TERMINAL]).arg(kubectl).arg("--kubeconfig").arg(self.state.join("kubeconfig"));
        command.args(["exec", "-it", pod, "--", "sh", "-c", &script]).kill_on_drop(true);
        command.env("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", websockets);
        let output = tokio::time::timeout(LIMIT, command.output()).await.expect("the shell ends").unwrap();
        let said = text(&output.stdout);
        assert!(said.contains("first") && said.contains("second"), "{pod} {websockets}: {said}");
        assert_eq!(output.status.code(), Some(7), "{pod} {websockets}: {said}");
    }

    /// Checks that a memory volume is in the guest, not on the node, and that its size limit holds.
    async fn memory_volume_is_the_guests_and_bounded(&self) {
        let fill = "busybox grep ' /ram ' /proc/mounts; busybox dd if=/dev/zero of=/ram/x bs=64k count=32 2>&1; \
                    busybox wc -c < /ram/x";
        let said = self.kubectl(&["exec", "plain", "--", "sh", "-c", fill]).await.unwrap();
        assert!(said.starts_with("tmpfs /ram tmpfs rw"), "{said}");
        assert!(said.contains("No space left on device") && said.ends_with("1048576\n"), "{said}");
    }

    /// Checks that a pod without volumes and without a token shares no directory with its node.
    async fn names_and_message_need_no_volume(&self) {
        let message = "{.status.containerStatuses[0].state.terminated.message}";
        self.wait(&["pod", "told"], message, "no oracle\n").await;
        let said = self.kubectl(&["logs", "told"]).await.unwrap();
        let address = self.kubectl(&["get", "pod", "told", "-o=jsonpath={.status.podIP}"]).await.unwrap();
        assert!(said.starts_with("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n"), "{said}");
        for line in [format!("{address}\ttold"), "192.0.2.7\talias.test".to_owned()] {
            assert!(said.lines().any(|one| one == line), "{line:?} in {said}");
        }
        assert!(!said.contains(" fuse "), "{said}");
    }

    /// Copies a tree in and out again.
    async fn copy(&self, websockets: &str, pod: &str) {
        let dir = tempfile::tempdir().unwrap();
        let (from, back) = (dir.path().join("tree"), dir.path().join("back"));
        std::fs::create_dir_all(from.join("sub")).unwrap();
        let large: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
        std::fs::write(from.join("sub/large"), &large).unwrap();
        std::fs::write(from.join("small"), "a b\n").unwrap();
        let target = format!("/tmp/tree-{websockets}");
        let (local, local_back) = (from.to_str().unwrap(), back.to_str().unwrap());
        self.run_by(websockets, &["cp", local, &format!("{pod}:{target}")]).await.unwrap();
        let inside = format!("cat {target}/small; busybox wc -c < {target}/sub/large");
        let said = self.run_by(websockets, &["exec", pod, "--", "sh", "-c", &inside]).await.unwrap();
        assert_eq!(said, format!("a b\n{}\n", large.len()), "{pod} {websockets}");
        self.run_by(websockets, &["cp", &format!("{pod}:{target}"), local_back]).await.unwrap();
        assert_eq!(std::fs::read(back.join("sub/large")).unwrap(), large, "{pod} {websockets}");
        assert_eq!(std::fs::read_to_string(back.join("small")).unwrap(), "a b\n", "{pod} {websockets}");
    }

    /// Checks the metrics that metrics-server scrapes for `kubectl top`: each pod has the memory of a guest, and CPU time.
    async fn both_use_memory_and_cpu(&self) {
        let path = self.node_path("metrics/resource").await;
        for pod in ["plain", "vm"] {
            for (metric, least) in
                [("memory_working_set_bytes", f64::from(8 << 20)), ("cpu_usage_seconds_total", 0.01)]
            {
                let begin = format!("pod_{metric}{{namespace=\"default\",pod=\"{pod}\"}} ");
                until(&format!("{begin}is above {least}"), LIMIT, async || {
                    let scrape = self.kubectl(&["get", "--raw", &path]).await?;
                    let container = format!("container_{metric}{{container=\"main\",pod=\"{pod}\",");
                    let line = scrape.lines().find_map(|line| line.strip_prefix(&begin));
                    let value = line.and_then(|rest| rest.split(' ').next()?.parse::<f64>().ok());
                    let is_there = value.is_some_and(|value| value >= least) && scrape.contains(&container);
                    if is_there { Ok(()) } else { Err(scrape) }
                })
                .await;
            }
        }
    }

    /// Checks attach: two clients, one after the other, each send a line to the container's stdin, and the first does not close
    /// it.
    async fn attach(&self, websockets: &str, pod: &str) {
        for line in ["one", "two"] {
            let mut command = self.kubectl_by(websockets, &["attach", "-i", "-q", pod]);
            let mut client = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            let mut stdin = client.stdin.take().unwrap();
            stdin.write_all(format!("{line} {websockets}\n").as_bytes()).await.unwrap();
            let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
            let answer = tokio::time::timeout(LIMIT, lines.next_line()).await.expect("an answer").unwrap();
            assert_eq!(answer.as_deref(), Some(&*format!("got {line} {websockets}")), "{pod}");
            client.kill().await.unwrap();
        }
    }
}

/// Runs a program in a terminal of 24 rows and 80 columns, and enlarges the terminal when `first` has been printed. Prints the
/// program's output, and ends with its exit code.
const TERMINAL: &str = r#"
import fcntl, os, pty, struct, sys, termios
def size(fd, rows, columns):
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
pid, terminal = pty.fork()
if pid == 0:
    size(0, 24, 80)
    os.execv(sys.argv[1], sys.argv[1:])
seen, is_large = b"", False
while True:
    try:
        data = os.read(terminal, 4096)
    except OSError:
        break
    if not data:
        break
    seen += data
    if b"first" in seen and not is_large:
        size(terminal, 50, 132)
        is_large = True
sys.stdout.buffer.write(seen)
sys.stdout.flush()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"#;

#[test]
fn kubectl_works_with_pods_of_containers_and_of_vms() {
    netns::run_within(Duration::from_secs(400), || async {
        if tools::require(["python3", "metrics-server"]).is_none() {
            return;
        }
        let Some(system) = System::start("scheduler,controller-manager").await else { return };
        system.apply("pods.yaml", PODS).await;
        for pod in ["plain", "vm"] {
            system.wait(&["pod", pod], READY, "True").await;
            for websockets in TRANSPORTS {
                system.exec_with_a_terminal(websockets, pod).await;
                system.copy(websockets, pod).await;
            }
        }
        for websockets in TRANSPORTS {
            system.attach(websockets, "plain").await;
        }
        system.names_and_message_need_no_volume().await;
        system.memory_volume_is_the_guests_and_bounded().await;
        system.both_use_memory_and_cpu().await;
        system.top(&["plain", "vm"]).await;
        system.kubectl(&["delete", "pods", "--all"]).await.unwrap();
        system.until_no_vm().await;
        system.end().await;
    });
}
