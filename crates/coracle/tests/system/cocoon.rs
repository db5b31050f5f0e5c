//! CocoonSets of `coracle up --with scheduler,controller-manager` on its own virtual node: pods that are real VMs, used by
//! kubectl.

use std::time::Duration;

use coracle_testkit::netns;

use crate::pod_system::System;

/// Deployment whose replicas are VMs, by the annotations of the template.
const DEPLOYMENT: &str = r#"
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 1
  selector: {matchLabels: {app: web}}
  template:
    metadata:
      labels: {app: web}
      annotations: {cocoonset.cocoonstack.io/image: "localhost/coracle/demo:1", cocoonset.cocoonstack.io/mode: run}
    spec:
      tolerations: [{key: virtual-kubelet.io/provider, operator: Exists}]
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: vm
        resources: {requests: {cpu: 100m, memory: 128Mi}}
"#;

#[test]
fn cocoonset_runs_vms_behind_pods() {
    netns::run_within(Duration::from_secs(300), || async {
        let Some(system) = System::start("scheduler,controller-manager").await else { return };
        let kubectl = async |args: &[&str]| system.kubectl(args).await;
        system.apply_example("cocoonset.yaml").await;
        system.wait(&["cocoonset/demo"], "{.status.phase}", "Running").await;
        let vms = kubectl(&[
            "get",
            "pods",
            "-o=jsonpath={.items[*].metadata.annotations.vm\\.cocoonstack\\.io/name}",
        ]);
        assert_eq!(vms.await.unwrap(), "vk-default-demo-0 vk-default-demo-1 vk-default-demo-tools");
        let main = kubectl(&["get", "pod", "demo-0", "-o=jsonpath={.status.podIP}"]).await.unwrap();
        let reported =
            kubectl(&["get", "cocoonset", "demo", "-o=jsonpath={.status.agents[0].ip}"]).await.unwrap();
        assert!(!main.is_empty() && main == reported, "{main:?} {reported:?}");
        let patch =
            ["patch", "cocoonset", "demo", "--type=merge", "-p", r#"{"spec":{"agent":{"replicas":0}}}"#];
        kubectl(&patch).await.unwrap();
        kubectl(&["wait", "--for=delete", "pod/demo-1", "--timeout=60s"]).await.unwrap();
        kubectl(&["delete", "cocoonset", "demo", "--timeout=60s"]).await.unwrap();
        assert_eq!(kubectl(&["get", "pods", "-o", "name"]).await.unwrap(), "");

        system.apply("deployment.yaml", DEPLOYMENT).await;
        system.wait(&["deployment/web"], "{.status.readyReplicas}", "1").await;
        let placed = async || {
            let path = "-o=jsonpath={.items[*].metadata.annotations.vm\\.cocoonstack\\.io/name} {.items[*].spec.nodeName}";
            kubectl(&["get", "pods", "-l", "app=web", path]).await.unwrap()
        };
        let before = placed().await;
        assert!(before.starts_with("vk-default-web-0 "), "{before}");
        kubectl(&["delete", "pods", "-l", "app=web", "--timeout=60s"]).await.unwrap();
        system.wait(&["deployment/web"], "{.status.readyReplicas}", "1").await;
        assert_eq!(placed().await, before, "slot, VM name and node survive the pod");
        let refused = kubectl(&["scale", "deployment/web", "--replicas=0"]).await.unwrap_err();
        assert!(refused.contains("cannot scale down from 1 to 0"), "{refused}");
        kubectl(&["delete", "deployment", "web", "--timeout=60s"]).await.unwrap();
        system.end().await;
    });
}
