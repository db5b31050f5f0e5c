//! User errors, through kubectl and through the command line, on one running system: each has a clear condition and event, or
//! an error with a code and help, and the system keeps running.

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use crate::support::{CORACLE, coracle, coracle_ok, kubectl, node_tools, registry_config, text, until};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::registry::DebianRegistry;
use coracle_testkit::{netns, tools};
use serde_json::{Value, json};
use tokio::process::Command;

/// Size of the node's image store, in which the demo image fits twice.
const STORE_MIB: usize = 24;

/// Time limit for a condition to report an error.
const SAID: Duration = Duration::from_secs(30);

/// Invalid change of an object, and the expected condition.
struct Wrong {
    name: &'static str,
    spec: Value,
    reason: &'static str,
    words: Vec<String>,
    event: &'static str,
}

fn object(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM", "metadata": {"name": name}, "spec": spec})
}

async fn apply(state: &Path, name: &str, spec: &Value) -> Result<String, String> {
    let file = state.join(format!("{name}.json"));
    std::fs::write(&file, object(name, spec).to_string()).unwrap();
    kubectl(state, &["apply", "-f", file.to_str().unwrap()]).await
}

/// References of images that a node must refuse, and their registries.
struct Images {
    open: DebianRegistry,
    closed: DebianRegistry,
    large: String,
    foreign: String,
    private: String,
}

fn images(dir: &Path) -> Images {
    let layout = |name: &str, layer: Vec<u8>, architecture: &str| -> PathBuf {
        let at = dir.join(name);
        let spec = ImageSpec {
            cmd: vec!["/bin/true".into()],
            architecture: architecture.into(),
            ..ImageSpec::default()
        };
        write_layout(&at, &[layer], &spec, "1").unwrap();
        at
    };
    let small = || LayerTar::new().file("bin/true", 0o755, b"x").finish();
    let noise: Vec<u8> = (0..(STORE_MIB << 20) / 8)
        .scan(7_u64, |seed, _| {
            *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            Some(*seed)
        })
        .flat_map(u64::to_le_bytes)
        .collect();
    let (open, closed) = (DebianRegistry::start().unwrap(), DebianRegistry::start_with_password().unwrap());
    let large = layout("large", LayerTar::new().file("noise", 0o644, &noise).finish(), "amd64");
    let large = open.push(&large, "1", "team/large:1", None).unwrap();
    let foreign = open.push(&layout("foreign", small(), "s390x"), "1", "team/foreign:1", None).unwrap();
    let login = Some(coracle_testkit::registry::LOGIN);
    let private = closed.push(&layout("private", small(), "amd64"), "1", "team/private:1", login).unwrap();
    Images { open, closed, large, foreign, private }
}

#[test]
fn invalid_input_is_reported_and_the_system_keeps_running() {
    netns::run_within(Duration::from_secs(300), || async {
        let programs = ["etcd", "kube-apiserver", "kubectl", "docker-registry", "skopeo"];
        if node_tools().is_none() || tools::require(programs).is_none() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let images = images(dir.path());
        let store = state.join("images");
        std::fs::create_dir_all(&store).unwrap();
        mount_tmpfs(&store).await;
        let known = [images.open.address().to_string(), images.closed.address().to_string()];
        let config = registry_config(dir.path(), &[&known[0], &known[1], "127.0.0.1:1"]);
        coracle_ok(&state, &["up", "--detach", "--registry-config", &config]).await;
        let boot = std::fs::read_dir(state.join("boot")).unwrap().next().unwrap().unwrap().path();
        std::fs::write(boot.join("notes.txt"), "no kernel").unwrap();

        refused_by_admission(&state).await;
        report_in_conditions(&state, &images, &boot).await;
        report_on_the_command_line(&state, &images, &boot).await;
        through_the_cluster(&state).await;

        coracle_ok(&state, &["down"]).await;
        let umount = Command::new("umount").arg(&store).status().await.unwrap();
        assert!(umount.success());
        drop((images.open, images.closed));
    });
}

async fn mount_tmpfs(at: &Path) {
    let size = format!("size={STORE_MIB}m");
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(at).status().await;
    assert!(mounted.unwrap().success(), "mount a small file system");
}

/// Checks that the API server stores none of these objects.
async fn refused_by_admission(state: &Path) {
    for (name, change, words) in [
        ("small", json!({"memoryMB": 64}), "greater than or equal to 128"),
        ("wide", json!({"vcpuCount": 64}), "less than or equal to 32"),
        ("too-wide", json!({"vcpuCount": 32}), "capacity.vm.mikrom.es"),
        ("too-large", json!({"memoryMB": 100_000_000}), "100000000 requested"),
        ("nothing", json!({"image": ""}), "give an image"),
        ("address", json!({"agentAddress": "nowhere"}), "agentAddress must be host:port"),
        ("kernel", json!({"kernelPath": "vmlinuz"}), "kernelPath must be absolute"),
    ] {
        let mut spec = json!({"image": "localhost/coracle/demo:1", "vcpuCount": 1, "memoryMB": 128});
        spec.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let said = apply(state, name, &spec).await.expect_err(name);
        assert!(said.contains(words), "{name}: {said}");
    }
    let said = apply(state, "too-wide", &json!({"image": "i", "vcpuCount": 32, "memoryMB": 128})).await;
    let said = said.unwrap_err();
    assert!(said.contains("vCPUs") || said.contains("CPUs"), "the refusal says what there is: {said}");
    assert_eq!(kubectl(state, &["get", "mvm", "-o", "name"]).await.unwrap(), "", "nothing was stored");
}

/// Checks objects that are stored and then refused by the node: condition and event, until they are corrected or deleted.
async fn report_in_conditions(state: &Path, images: &Images, boot: &Path) {
    let open = images.open.address();
    let spec = |change: Value| {
        let mut spec = json!({"image": "localhost/coracle/demo:1", "vcpuCount": 1, "memoryMB": 128});
        spec.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        spec
    };
    let pull = "ImagePullFailed";
    let wrong = [
        Wrong {
            name: "unknown",
            spec: spec(json!({"image": format!("{open}/team/nope:1")})),
            reason: pull,
            words: vec![format!("{open}/team/nope:1"), "COR-IMG-004".into()],
            event: pull,
        },
        Wrong {
            name: "private",
            spec: spec(json!({"image": images.private})),
            reason: pull,
            words: vec!["denied by registry".into(), "COR-IMG-005".into(), "docker login".into()],
            event: pull,
        },
        Wrong {
            name: "foreign",
            spec: spec(json!({"image": images.foreign})),
            reason: pull,
            words: vec!["linux/s390x".into(), "COR-IMG-006".into()],
            event: pull,
        },
        Wrong {
            name: "away",
            spec: spec(json!({"image": "127.0.0.1:1/team/app:1"})),
            reason: pull,
            words: vec!["127.0.0.1:1".into(), "COR-IMG-011".into()],
            event: pull,
        },
        Wrong {
            name: "forbidden",
            spec: spec(json!({"image": "localhost:2/team/app:1"})),
            reason: pull,
            words: vec!["a loopback address".into(), "COR-IMG-017".into(), "--registry-config".into()],
            event: pull,
        },
        Wrong {
            name: "large",
            spec: spec(json!({"image": images.large})),
            reason: "NoSpace",
            words: vec!["no space left on the file system".into(), "COR-IMG-010".into()],
            event: "NoSpace",
        },
        Wrong {
            name: "text",
            spec: spec(json!({"kernelPath": boot.join("notes.txt")})),
            reason: "AgentError",
            words: vec!["notes.txt".into(), "not a kernel image".into(), "COR-VM-009".into()],
            event: "Failed",
        },
        Wrong {
            name: "outside",
            spec: spec(json!({"kernelPath": "/etc/hostname"})),
            reason: "AgentError",
            words: vec!["not under an allowed kernel directory".into()],
            event: "Failed",
        },
        Wrong {
            name: "mistyped",
            spec: spec(json!({"agentAddress": "127.0.0.1:1"})),
            reason: "AgentNotAllowed",
            words: vec!["127.0.0.1:1".into(), "--agent-allow".into()],
            event: "AgentNotAllowed",
        },
    ];
    for wrong in &wrong {
        apply(state, wrong.name, &wrong.spec).await.unwrap();
    }
    for Wrong { name, reason, words, event, .. } in &wrong {
        let what = format!("{name} is {reason}");
        let ready = until(&what, SAID, || async {
            let yaml = kubectl(state, &["get", "mvm", name, "-o", "json"]).await?;
            let object: Value = serde_json::from_str(&yaml).unwrap();
            let ready = object["status"]["conditions"].as_array().into_iter().flatten();
            let ready = ready.into_iter().find(|c| c["type"] == "Ready").cloned().unwrap_or_default();
            if ready["reason"] == *reason { Ok(ready) } else { Err(object["status"].to_string()) }
        })
        .await;
        assert_ne!(ready["status"], "True", "{name}");
        let message = ready["message"].as_str().unwrap();
        for words in words {
            assert!(message.contains(words.as_str()), "{name}: {words:?} is not in {message}");
        }
        until(&format!("{name} has the event {event}"), Duration::from_secs(10), || async {
            let selector = format!("regarding.name={name}");
            let args = ["get", "events.events.k8s.io", "--field-selector", &selector, "-o", "json"];
            let said = match kubectl(state, &args).await {
                Ok(said) => said,
                Err(_) => kubectl(state, &["get", "events", "-o", "json"]).await?,
            };
            let warned = said.contains(&format!("\"reason\": \"{event}\""))
                && said.contains("\"type\": \"Warning\"")
                && said.contains(&format!("\"{name}\""));
            if warned { Ok(()) } else { Err(said) }
        })
        .await;
    }
    // The node of this VM neither answers nor is known to be gone: only the user can confirm that the VM does not exist.
    kubectl(state, &["annotate", "mvm", "mistyped", "coracle.dev/abandon=true"]).await.unwrap();
    for Wrong { name, .. } in &wrong {
        kubectl(state, &["delete", "mvm", name, "--timeout=30s"]).await.unwrap();
    }
    good_vm_runs(state, "after-all").await;
}

/// Checks that the system keeps running: a valid VM starts and is removed.
async fn good_vm_runs(state: &Path, name: &str) {
    let spec = json!({"image": "localhost/coracle/demo:1", "vcpuCount": 1, "memoryMB": 128});
    apply(state, name, &spec).await.unwrap();
    coracle_ok(
        state,
        &[
            "wait",
            "--for",
            "running",
            "--timeout",
            "60s",
            "-n",
            "default",
            "--kubeconfig",
            state.join("kubeconfig").to_str().unwrap(),
            name,
        ],
    )
    .await;
}

/// Checks an error: its exit code, and its code and words of its message and help.
fn failed(output: &Output, exit: i32, words: &[&str]) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(exit), "{said}");
    for words in words {
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
}

async fn report_on_the_command_line(state: &Path, images: &Images, boot: &Path) {
    let open = images.open.address().to_string();
    let unknown = format!("{open}/team/nope:1");
    let notes = boot.join("notes.txt");
    let demo = "localhost/coracle/demo:1";
    for (args, exit, words) in [
        (vec!["run", &unknown], 125, vec!["error[COR-IMG-004]", "help:"]),
        (vec!["run", &images.private], 125, vec!["error[COR-IMG-005]", "docker login"]),
        (vec!["run", &images.foreign], 125, vec!["error[COR-IMG-006]", "linux/s390x", "help:"]),
        (vec!["run", &images.large], 125, vec!["error[COR-IMG-010]", "image prune"]),
        (vec!["run", "--memory", "64", demo], 2, vec!["error[COR-VM-004]", "128"]),
        (vec!["run", "--cpus", "64", demo], 2, vec!["error[COR-VM-004]", "32"]),
        (vec!["run", "--network", "pods", demo], 2, vec!["no network \"pods\"", "--network cni"]),
        (
            vec!["run", "--kernel", notes.to_str().unwrap(), demo],
            125,
            vec!["error[COR-VM-009]", "not a kernel image"],
        ),
        (
            vec!["run", "--kernel", "/etc/hostname", demo],
            125,
            vec!["error[COR-VM-009]", "allowed kernel directory"],
        ),
        (vec!["run", "No/Such Image"], 2, vec!["error[COR-IMG-001]", "help:"]),
        (vec!["image", "pull", &unknown], 3, vec!["error[COR-IMG-004]"]),
        (vec!["image", "pull", &images.private], 7, vec!["error[COR-IMG-005]"]),
        (vec!["image", "pull", &images.foreign], 5, vec!["error[COR-IMG-006]"]),
        (
            vec!["image", "inspect", "localhost/coracle/dem:1"],
            3,
            vec!["nearest names: localhost/coracle/demo:1"],
        ),
        (
            vec!["exec", "default-aftr-all", "true"],
            125,
            vec!["error[COR-VM-001]", "nearest names: default-after-all"],
        ),
        (vec!["inspect", "zebra"], 3, vec!["error[COR-VM-001]", "coracle ps -a"]),
        (
            vec!["wait", "--timeout", "1s", "default-after-all"],
            6,
            vec!["error[COR-CLI-013]", "not within 1s"],
        ),
        (vec!["rm", "default-after-all"], 4, vec!["error[COR-VM-005]"]),
    ] {
        let output = coracle(state, &args).await;
        eprintln!("coracle {args:?}: {:?}\n{}", output.status.code(), text(&output.stderr));
        failed(&output, exit, &words);
    }
    let names = coracle_ok(state, &["ps", "-a", "-q"]).await;
    assert_eq!(names, "default-after-all\n", "what did not start is not left behind");
}

/// Runs the same commands through the cluster.
async fn through_the_cluster(state: &Path) {
    let kubeconfig = state.join("kubeconfig");
    let remote = async |args: &[&str]| {
        let flags = ["--kubeconfig", kubeconfig.to_str().unwrap(), "-n", "default"];
        // Without a state directory only the cluster leads to the node.
        let output = Command::new(CORACLE)
            .args([&args[..1], &flags, &args[1..]].concat())
            .env_remove("CORACLE_STATE")
            .stdin(Stdio::null())
            .output();
        output.await.unwrap()
    };
    let ok = async |args: &[&str]| {
        let output = remote(args).await;
        assert!(output.status.success(), "coracle {args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let listed = ok(&["ps"]).await;
    assert!(
        listed.contains("after-all") && listed.contains("Running") && listed.contains("qemu/"),
        "{listed}"
    );
    assert_eq!(ok(&["ps", "-o", "jsonpath={.items[*].metadata.name}"]).await, "after-all");
    let shape = async |document: &str| -> Vec<String> {
        let value: Value = serde_json::from_str(document).unwrap();
        ["metadata", "spec", "status"]
            .iter()
            .flat_map(|part| value[part].as_object().unwrap().keys().cloned())
            .collect()
    };
    let here = coracle_ok(state, &["inspect", "default-after-all"]).await;
    let there = ok(&["inspect", "after-all"]).await;
    assert_eq!(shape(&here).await, shape(&there).await, "one shape, local and remote");
    assert!(there.contains("\"vmmPid\""), "the node was asked too: {there}");
    assert_eq!(ok(&["exec", "after-all", "hostname"]).await, "after-all\n");
    assert_eq!(remote(&["exec", "after-all", "sh", "-c", "exit 9"]).await.status.code(), Some(9));
    assert!(ok(&["logs", "after-all"]).await.contains("demo is up"));
    let events = ok(&["events", "after-all"]).await;
    assert!(events.contains("Scheduled") && events.contains("Started"), "{events}");
    let explained = ok(&["explain", "after-all"]).await;
    assert!(explained.starts_with("vm/after-all is Ready (Running"), "{explained}");
    failed(&remote(&["exec", "afterall", "true"]).await, 125, &["nearest names: after-all"]);
    failed(&remote(&["stop", "after-all"]).await, 5, &["error[COR-CLI-009]", "help:"]);
    failed(&remote(&["rm", "after-all"]).await, 4, &["--force"]);
    assert_eq!(ok(&["rm", "--force", "--timeout", "60s", "after-all"]).await, "after-all\n");
    failed(&remote(&["inspect", "after-all"]).await, 3, &["not found in namespace default"]);
    assert_eq!(coracle_ok(state, &["ps", "-a", "-q"]).await, "", "the VM is gone with its object");
}
