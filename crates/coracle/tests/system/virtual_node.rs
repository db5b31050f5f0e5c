//! The virtual node of `coracle up --with scheduler,controller-manager`: Pods as VMs without a kubelet, used by kubectl.

use std::time::Duration;

use coracle_testkit::netns;

use crate::pod_system::{READY, System};
use crate::support::fetch;

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
        let Some(system) = System::start("scheduler,controller-manager").await else { return };
        system.apply_example("pod.yaml").await;
        system.wait(&["pod/hello"], READY, "True").await;
        system.apply("deployment.yaml", DEPLOYMENT).await;
        system.wait(&["deployment/web"], "{.status.readyReplicas}", "2").await;
        system.wait(&["job/sum"], "{.status.succeeded}", "1").await;
        let kubectl = async |args: &[&str]| system.kubectl(args).await;
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
        system.until_no_vm().await;
        system.end().await;
    });
}
