//! Programs of the manifests with exactly their arguments, environment and files, on three node machines and one for the
//! operator, each in a network namespace of its own.
//!
//! `CORACLE_IMAGE_ROOT` names the unpacked image of `cargo xtask package`, which is then the root of the programs. Otherwise
//! the programs are those under test, their root is that of the machine with the directories of a Pod mounted over it, and the
//! guest kernel has another path.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use crate::support::{CORACLE, text, until, write_idle_image};
use coracle_testkit::{netns, tools};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use super::harness::{Installed, LIMIT, end};

/// Prefix of the machines' network; the API server has its last address.
const NETWORK: &str = "10.77.0";
const GATEWAY: u8 = 254;

/// Script that sets up the file system of a container and executes its program: `ROOT DIR PROGRAM ARGUMENTS`. An empty ROOT is
/// the machine's root, which is not written.
const CONTAINER: &str = r#"set -eu
root=$1 dir=$2
shift 2
mount -t cgroup2 none /sys/fs/cgroup
if [ -z "$root" ]; then
  mount -t tmpfs none /var/lib
  mount -t tmpfs none /run
  mkdir /run/boot
else
  for at in dev proc sys; do mount --rbind "/$at" "$root/$at"; done
  touch "$root/etc/hosts" # as a runtime does
fi
account=/run/secrets/kubernetes.io/serviceaccount
mkdir -p "$root/var/lib/coracle" "$root/run/coracle" "$root$account"
mount --bind "$dir/state" "$root/var/lib/coracle"
mount --bind "$dir/run" "$root/run/coracle"
mount --bind "$dir/account" "$root$account"
mount --bind "$dir/hosts" "$root/etc/hosts"
if [ -z "$root" ]; then
  mount --bind "$dir/boot" /run/boot
  exec "$@"
fi
exec chroot "$root" "$@"
"#;

/// Machines on one bridge, which are removed on drop.
struct Machines {
    names: Vec<String>,
}

async fn ip(args: &str) {
    let output = Command::new("ip").args(args.split(' ')).output().await.unwrap();
    assert!(output.status.success(), "ip {args}: {}", text(&output.stderr));
}

impl Machines {
    async fn new(names: &[&str]) -> Self {
        ip("link add machines type bridge").await;
        ip(&format!("addr add {NETWORK}.{GATEWAY}/24 dev machines")).await;
        ip("link set machines up").await;
        let mut machines = Self { names: Vec::new() };
        for (index, name) in names.iter().enumerate() {
            let space = format!("coracle-{}-{name}", std::process::id());
            ip(&format!("netns add {space}")).await;
            machines.names.push(space.clone());
            ip(&format!("link add to-{name} type veth peer name eth0 netns {space}")).await;
            ip(&format!("link set to-{name} master machines up")).await;
            ip(&format!("-n {space} addr add {NETWORK}.{}/24 dev eth0", index + 1)).await;
            ip(&format!("-n {space} link set eth0 up")).await;
            ip(&format!("-n {space} link set lo up")).await;
            ip(&format!("-n {space} route add default via {NETWORK}.{GATEWAY}")).await;
        }
        machines
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for name in &self.names {
            let _absent = std::process::Command::new("ip").args(["netns", "del", name]).status();
        }
        let _absent = std::process::Command::new("ip").args(["link", "del", "machines"]).status();
        // ip(8) mounts it with the first namespace.
        let _absent = rustix::mount::unmount("/run/netns", rustix::mount::UnmountFlags::DETACH);
    }
}

/// Returns the environment variables of a container, with `$(NAME)` expanded.
fn environment(container: &Value, fields: &[(&str, String)]) -> Vec<(String, String)> {
    let mut all: Vec<(String, String)> = Vec::new();
    for variable in container["env"].as_array().unwrap() {
        let value = match variable["value"].as_str() {
            Some(value) => expanded(value, &all),
            None => {
                let path = variable["valueFrom"]["fieldRef"]["fieldPath"].as_str().unwrap();
                fields.iter().find(|(known, _)| *known == path).unwrap().1.clone()
            }
        };
        all.push((variable["name"].as_str().unwrap().to_owned(), value));
    }
    all
}

fn expanded(text: &str, variables: &[(String, String)]) -> String {
    variables.iter().fold(text.to_owned(), |text, (name, value)| text.replace(&format!("$({name})"), value))
}

struct Machine<'a> {
    installed: &'a Installed,
    name: &'a str,
    address: String,
    space: String,
    dir: PathBuf,
    root: String,
}

impl Machine<'_> {
    /// Starts the program of a workload as its kubelet does.
    async fn run(&self, workload: &str, account: &str) -> Child {
        let pod = self.installed.pod_spec(workload).await;
        assert_eq!(pod["serviceAccountName"], account);
        self.files(account).await;
        let container = &pod["containers"][0];
        let fields = [
            ("spec.nodeName", self.name.to_owned()),
            ("status.hostIP", self.address.clone()),
            ("metadata.name", format!("{account}-{}", self.name)),
            ("metadata.namespace", "coracle-system".to_owned()),
        ];
        let mut variables = environment(container, &fields);
        let args = container["args"].as_array().unwrap().iter().map(|arg| {
            match (arg.as_str().unwrap(), self.root.as_str()) {
                // The machine does not have the guest kernel at the path of the image.
                (arg, "") if arg.starts_with("--boot=") => "--boot=/run/boot".to_owned(),
                (arg, _) => expanded(arg, &variables),
            }
        });
        let args: Vec<_> = args.collect();
        let api = [("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc"), ("KUBERNETES_SERVICE_PORT", "443")];
        variables.extend(api.map(|(name, value)| (name.to_owned(), value.to_owned())));
        variables.push((
            "PATH".to_owned(),
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned(),
        ));
        let log = std::fs::File::create(self.dir.join("log")).unwrap();
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.space, "sh", "-c", CONTAINER, "sh", &self.root]).arg(&self.dir);
        command.arg(self.program()).args(args).env_clear().envs(variables).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log).kill_on_drop(true).spawn().unwrap()
    }

    fn program(&self) -> &'static str {
        if self.root.is_empty() { CORACLE } else { "/usr/bin/coracle" }
    }

    /// Makes the volumes of a Pod below its directory.
    async fn files(&self, account: &str) {
        for name in ["state", "run", "account"] {
            std::fs::create_dir_all(self.dir.join(name)).unwrap();
        }
        let write = |name: &str, text: &str| std::fs::write(self.dir.join(name), text).unwrap();
        write("account/token", &self.installed.pod_token(account, self.name).await);
        write("account/namespace", "coracle-system");
        let authority = std::fs::read_to_string(self.installed.cluster.dir().join("certs/apiserver.crt"));
        write("account/ca.crt", &authority.unwrap());
        write("hosts", &format!("127.0.0.1 localhost\n{NETWORK}.{GATEWAY} kubernetes.default.svc\n"));
        let boot = tools::guest_kernel().unwrap().kernel.parent().unwrap().to_owned();
        if !self.dir.join("boot").exists() {
            std::os::unix::fs::symlink(boot, self.dir.join("boot")).unwrap();
        }
    }

    /// Runs a command of the program in the container of `process`.
    async fn command(&self, process: &Child, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new("nsenter");
        command.args(["--target", &process.id().unwrap().to_string(), "--net", "--mount", "--root", "--"]);
        let output = command.arg(self.program()).args(args).output().await.unwrap();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }
}

#[test]
fn manifests_run_on_three_nodes() {
    netns::run_within(Duration::from_secs(400), || async {
        let Some(installed) = Installed::plane().await else { return };
        if tools::require(["ip", "nsenter"]).is_none() {
            return;
        }
        installed.install_default().await;
        let names = ["n1", "n2", "n3", "control"];
        let machines = Machines::new(&names).await;
        // At an address of the machines' network, as Pods reach the API server.
        installed.serve_api(&format!("{NETWORK}.{GATEWAY}")).await;
        let root = std::env::var("CORACLE_IMAGE_ROOT").unwrap_or_default();
        let machine = |index: usize| Machine {
            installed: &installed,
            name: names[index],
            address: format!("{NETWORK}.{}", index + 1),
            space: machines.names[index].clone(),
            dir: installed.dir.path().join(names[index]),
            root: root.clone(),
        };
        let nodes = [machine(0), machine(1), machine(2)];
        let mut processes = vec![machine(3).run("deployment/coracle-operator", "coracle-operator").await];
        for node in &nodes {
            processes.push(node.run("daemonset/coracle-node", "coracle-node").await);
        }
        let mut subnets = std::collections::BTreeSet::new();
        for node in &nodes {
            let lease = installed.announced(node.name).await;
            let said = &lease["metadata"]["annotations"];
            assert_eq!(said["coracle.dev/host-address"], format!("{}:50052", node.address));
            subnets.insert(said["coracle.dev/guest-subnet"].as_str().unwrap().to_owned());
        }
        assert_eq!(subnets.len(), 3, "each node has a network of its own: {subnets:?}");
        for (node, process) in nodes.iter().zip(&processes[1..]) {
            write_idle_image(&node.dir.join("run/layout"));
            let import = [
                "--state=/var/lib/coracle",
                "image",
                "import",
                "oci:/run/coracle/layout:1",
                "localhost/idle:1",
            ];
            until("the image", LIMIT, || node.command(process, &import)).await;
            installed.apply(vm(node.name)).await;
        }
        for node in &nodes {
            let address = until("a running VM", LIMIT * 3, || async {
                let get = [
                    "get",
                    "mikromvm",
                    node.name,
                    "-o=jsonpath={.status.phase} {.status.ipAddress} {.status.nodeName}",
                ];
                let said = installed.kubectl(&get).await?;
                said.strip_prefix("Running ").map(str::to_owned).ok_or(said)
            })
            .await;
            let (address, on) = address.split_once(' ').unwrap();
            assert_eq!(on, node.name);
            let (network, _) = address.rsplit_once('.').unwrap();
            assert!(subnets.contains(&format!("{network}.0/24")), "{address} is in none of {subnets:?}");
        }
        doctor_finds_the_nodes(&installed).await;
        installed.kubectl(&["delete", "mikromvm", "--all", "--timeout=60s"]).await.unwrap();
        end(&mut processes).await;
        drop(machines);
    });
}

fn vm(node: &str) -> Value {
    json!({
        "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM", "metadata": {"name": node},
        "spec": {"image": "localhost/idle:1", "vcpuCount": 1, "memoryMB": 128, "nodeName": node},
    })
}

/// Checks `coracle doctor --cluster` from another machine, which connects by TLS.
async fn doctor_finds_the_nodes(installed: &Installed) {
    let mut command = Command::new(CORACLE);
    command.args(["doctor", "--cluster", "--kubeconfig"]).arg(installed.cluster.kubeconfig());
    let output = command.output().await.unwrap();
    let table = text(&output.stdout);
    for (index, node) in ["n1", "n2", "n3"].iter().enumerate() {
        let row = table.lines().find(|line| line.starts_with(&format!("node {node} "))).unwrap_or_default();
        assert!(
            row.contains(" ok ") && row.contains(&format!("{NETWORK}.{}:50052 answers", index + 1)),
            "{table}"
        );
    }
    assert!(table.contains("3, none overlaps"), "{table}");
}
