//! A MikromVM that uses every input of its spec, on the real control plane and in a real guest.

use std::path::Path;
use std::time::Duration;

use crate::support::{coracle, coracle_ok, fetch, kubectl, node_tools, root, text, until};
use coracle_testkit::{netns, tools};

#[test]
fn vm_gets_environment_files_disk_keys_and_service() {
    netns::run_within(Duration::from_secs(240), || async {
        if node_tools().is_none() || tools::require(["etcd", "kube-apiserver", "kubectl"]).is_none() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let up = coracle(&state, &["up", "--detach"]).await;
        assert!(up.status.success(), "coracle up: {}", text(&up.stderr));
        let example = root().join("examples/mikromvm-shop.yaml");
        kubectl(&state, &["apply", "-f", example.to_str().unwrap()]).await.unwrap();
        kubectl(&state, &["wait", "mvm/shop", "--for=condition=Ready", "--timeout=90s"]).await.unwrap();

        let exec =
            async |command: &str| coracle_ok(&state, &["exec", "default-shop", "sh", "-c", command]).await;
        let node = of_vm(&state, "{.status.nodeName}").await;
        let seen = format!("change-me on {node}\n");
        until("what the command wrote onto its disk", Duration::from_secs(20), || async {
            let found = exec("cat /data/seen").await;
            if found == seen { Ok(()) } else { Err(found) }
        })
        .await;
        assert!(exec("cat /root/.ssh/authorized_keys").await.starts_with("ssh-ed25519 AAAA"));
        assert_eq!(exec("stat -c %a /root/.ssh/authorized_keys").await, "600\n");
        assert!(
            coracle(&state, &["exec", "default-shop", "sh", "-c", "echo x > /www/x"]).await.status.code()
                != Some(0)
        );
        assert!(exec("grep ' /data ' /proc/mounts").await.contains("ext4"));

        let address = of_vm(&state, "{.status.ipAddress}").await;
        let slice = until("the endpoint of the Service", Duration::from_secs(20), || async {
            let path =
                "-o=jsonpath={.endpoints[0].addresses[0]}:{.ports[0].port} {.endpoints[0].conditions.ready}";
            let said = kubectl(&state, &["get", "endpointslice", "shop", path]).await?;
            if said == format!("{address}:8080 true") { Ok(said) } else { Err(said) }
        })
        .await;
        let endpoint = slice.split(' ').next().unwrap().to_owned();
        let page = until("the shop's page", Duration::from_secs(20), || fetch(endpoint.clone())).await;
        assert!(page.contains("welcome to the shop"), "{page}");
        let port =
            kubectl(&state, &["get", "service", "shop", "-o=jsonpath={.spec.ports[0].port}"]).await.unwrap();
        assert_eq!(port, "80");
        let conditions = of_vm(&state, "{range .status.conditions[*]}{.type}={.status} {end}").await;
        for part in ["Scheduled=True", "ImageReady=True", "AgentReachable=True", "Ready=True"] {
            assert!(conditions.contains(part), "{conditions}");
        }
        let second = anti_affinity(&state).await;
        assert!(second.contains("has a VM of the VM anti-affinity"), "{second}");
        no_secret_is_readable(&state).await;
        pool_is_scaled(&state).await;

        kubectl(&state, &["delete", "mvm", "shop", "twin", "--timeout=60s"]).await.unwrap();
        until("the Service goes, too", Duration::from_secs(20), || async {
            let left =
                kubectl(&state, &["get", "service,endpointslice", "-l", "coracle.dev/vm", "-o", "name"])
                    .await?;
            if left.is_empty() { Ok(()) } else { Err(left) }
        })
        .await;
        assert_eq!(std::fs::read_dir(state.join("vms")).unwrap().count(), 0, "no file is left");
        let down = coracle(&state, &["down"]).await;
        assert!(down.status.success(), "coracle down: {}", text(&down.stderr));
    });
}

async fn of_vm(state: &Path, path: &str) -> String {
    kubectl(state, &["get", "mvm", "shop", &format!("-o=jsonpath={path}")]).await.unwrap()
}

/// Checks that a second VM of the app is not placed beside the first one, on the only node.
async fn anti_affinity(state: &Path) -> String {
    let twin = state.join("twin.yaml");
    let manifest = r#"{"apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM", "metadata": {"name": "twin"},
        "spec": {"image": "localhost/coracle/demo:1", "vcpuCount": 1, "memoryMB": 128, "affinity": {"vmAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"labelSelector": {"matchLabels": {"app": "shop"}}, "topologyKey": "kubernetes.io/hostname"}]}}}}"#;
    std::fs::write(&twin, manifest).unwrap();
    kubectl(state, &["apply", "-f", twin.to_str().unwrap()]).await.unwrap();
    until("the twin is refused", Duration::from_secs(30), || async {
        let path = r#"-o=jsonpath={.status.conditions[?(@.type=="Ready")].message}"#;
        let said = kubectl(state, &["get", "mvm", "twin", path]).await?;
        if said.is_empty() { Err("no status yet".to_owned()) } else { Ok(said) }
    })
    .await
}

/// Checks that the value is in no object except its Secret, in no log, and in no file that other users may read.
async fn no_secret_is_readable(state: &Path) {
    let objects = kubectl(state, &["get", "mvm,events,services,endpointslices", "-o", "json"]).await.unwrap();
    assert!(!objects.contains("change-me"), "{objects}");
    for entry in std::fs::read_dir(state.join("logs")).unwrap().flatten() {
        let log = std::fs::read(entry.path()).unwrap();
        assert!(!String::from_utf8_lossy(&log).contains("change-me"), "{}", entry.path().display());
    }
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(state).unwrap().permissions());
    assert_eq!(mode & 0o077, 0, "the directory of the state is private");
}

/// Checks that a pool creates its VMs, follows `kubectl scale`, and deletes them with itself.
async fn pool_is_scaled(state: &Path) {
    let file = state.join("pool.json");
    let manifest = r#"{"apiVersion": "coracle.dev/v1alpha1", "kind": "MikromVMPool", "metadata": {"name": "web"},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "web"}}, "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {"image": "localhost/coracle/demo:1", "vcpuCount": 1, "memoryMB": 128}}}}"#;
    std::fs::write(&file, manifest).unwrap();
    kubectl(state, &["apply", "-f", file.to_str().unwrap()]).await.unwrap();
    for replicas in ["1", "2", "1"] {
        kubectl(state, &["scale", "mvmpool/web", &format!("--replicas={replicas}")]).await.unwrap();
        until("the pool is complete", Duration::from_secs(60), || async {
            let path = "-o=jsonpath={.status.replicas} {.status.readyReplicas} {.status.updatedReplicas}";
            let said = kubectl(state, &["get", "mvmpool", "web", path]).await?;
            let running = coracle_ok(state, &["ps", "-q"]).await;
            let members = running.lines().count();
            let wanted = format!("{replicas} {replicas} {replicas}");
            let all = replicas.parse::<usize>().unwrap() + 1; // and the VM of the shop
            if said == wanted && members == all { Ok(()) } else { Err(format!("{said}; {running}")) }
        })
        .await;
    }
    kubectl(state, &["delete", "mvmpool", "web", "--timeout=60s"]).await.unwrap();
    until("its VMs are gone", Duration::from_secs(60), || async {
        let left = kubectl(state, &["get", "mvm", "-l", "app=web", "-o", "name"]).await?;
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
}
