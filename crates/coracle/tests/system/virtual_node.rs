//! The virtual node of `coracle up --with scheduler,controller-manager`: Pods as VMs without a kubelet, used by kubectl.

use std::time::Duration;

use coracle_testkit::{netns, tools};

use crate::support::{coracle, coracle_ok, fetch, kubectl, node_tools, root, text, until};

const LIMIT: Duration = Duration::from_secs(120);

const DEPLOYMENT: &str = r#"
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      tolerations: [{operator: Exists}]
      terminationGracePeriodSeconds: 2
      containers:
      - name: main
        image: localhost/coracle/demo:1
        imagePullPolicy: Never
        readinessProbe: {httpGet: {path: /, port: 80}, periodSeconds: 1}
        resources: {requests: {cpu: 100m, memory: 64Mi}}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {app: web}
  ports: [{port: 80}]
---
apiVersion: batch/v1
kind: Job
metadata: {name: sum}
spec:
  template:
    spec:
      tolerations: [{operator: Exists}]
      restartPolicy: Never
      containers:
      - name: main
        image: localhost/coracle/demo:1
        imagePullPolicy: Never
        command: [sh, -c, "echo $((6 * 7))"]
"#;

#[test]
fn virtual_node_runs_pods_as_vms() {
    netns::run_within(Duration::from_secs(300), || async {
        let programs = ["etcd", "kube-apiserver", "kubectl", "kube-scheduler", "kube-controller-manager"];
        if node_tools().is_none() || tools::require(programs).is_none() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let up = coracle(&state, &["up", "--detach", "--with", "scheduler,controller-manager"]).await;
        assert!(up.status.success(), "coracle up: {}", text(&up.stderr));
        let kubectl = async |args: &[&str]| kubectl(&state, args).await;
        let wait = async |what: &str, path: &str, want: &str| {
            let path = format!("-o=jsonpath={path}");
            until(&format!("{what} {want}"), LIMIT, async || match kubectl(&["get", what, &path]).await? {
                value if value == want => Ok(()),
                other => {
                    Err(format!("{other:?}\n{}", kubectl(&["describe", what]).await.unwrap_or_default()))
                }
            })
            .await;
        };
        let example = root().join("examples/pod.yaml");
        kubectl(&["apply", "-f", example.to_str().unwrap()]).await.unwrap();
        wait("pod/hello", "{.status.conditions[?(@.type=='Ready')].status}", "True").await;
        let file = dir.path().join("deployment.yaml");
        std::fs::write(&file, DEPLOYMENT).unwrap();
        kubectl(&["apply", "-f", file.to_str().unwrap()]).await.unwrap();
        wait("deployment/web", "{.status.readyReplicas}", "2").await;
        wait("job/sum", "{.status.succeeded}", "1").await;
        assert_eq!(kubectl(&["logs", "job/sum"]).await.unwrap(), "42\n");
        let exec = kubectl(&["exec", "hello", "--", "sh", "-c", "hostname; exit 3"]).await.unwrap_err();
        assert!(exec.contains("exit code 3"), "{exec}");
        let slices = "-o=jsonpath={.items[0].endpoints[*].addresses[0]}";
        let selector = "kubernetes.io/service-name=web";
        let addresses = kubectl(&["get", "endpointslices", "-l", selector, slices]).await.unwrap();
        assert_eq!(addresses.split(' ').count(), 2, "{addresses}");
        for address in addresses.split(' ') {
            assert!(fetch(format!("{address}:80")).await.unwrap().contains("hello from a microVM"));
        }
        kubectl(&["delete", "deployment,service,job,pod", "--all"]).await.unwrap();
        until("no VM is left", LIMIT, async || {
            let vms = coracle_ok(&state, &["ps", "-a", "-o", "name"]).await;
            if vms.trim().is_empty() { Ok(()) } else { Err(vms) }
        })
        .await;
        coracle_ok(&state, &["down"]).await;
        let left = coracle_hypervisor_testing::instances::processes_of(&state);
        assert!(left.is_empty(), "processes are left: {left:?}");
    });
}
