//! Virtual node of `coracle up --with scheduler,controller-manager`: Pods as VMs without a kubelet, in every kind of Kubernetes
//! workload, from plain container images.

use std::collections::BTreeSet;
use std::time::Duration;

use coracle_testkit::{elapse, netns};

use crate::pod_system::{LIMIT, READY, System};
use crate::support::{fetch, until};

/// One object of each kind. The programs end at once on SIGTERM.
const WORKLOADS: &str = r#"
apiVersion: batch/v1
kind: CronJob
metadata: {name: each-minute}
spec:
  schedule: "* * * * *"
  successfulJobsHistoryLimit: 1
  concurrencyPolicy: Forbid
  jobTemplate:
    spec:
      template:
        metadata: {labels: {kind: cron}}
        spec:
          tolerations: [{operator: Exists}]
          restartPolicy: OnFailure
          containers:
          - name: main
            image: localhost/coracle/demo:1
            imagePullPolicy: Never
            command: [sh, -c, "echo $((6 * 7))"]
            resources: {limits: {cpu: 100m, memory: 32Mi}}
---
apiVersion: batch/v1
kind: Job
metadata: {name: sum}
spec:
  completions: 2
  template:
    spec:
      tolerations: [{operator: Exists}]
      restartPolicy: Never
      containers:
      - name: main
        image: localhost/coracle/demo:1
        imagePullPolicy: Never
        command: [sh, -c, "echo $((6 * 7))"]
        resources: {limits: {cpu: 100m, memory: 32Mi}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: each-node}
spec:
  selector: {matchLabels: {app: each-node}}
  template:
    metadata: {labels: {app: each-node}}
    spec:
      tolerations: [{key: virtual-kubelet.io/provider, operator: Exists}]
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: localhost/coracle/demo:1
        imagePullPolicy: Never
        readinessProbe: {httpGet: {path: /, port: 80}, periodSeconds: 1}
        resources: {limits: {cpu: 100m, memory: 32Mi}}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db}
spec:
  serviceName: db
  replicas: 2
  selector: {matchLabels: {app: db}}
  template:
    metadata: {labels: {app: db}}
    spec:
      tolerations: [{operator: Exists}]
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: localhost/coracle/demo:1
        imagePullPolicy: Never
        command: [sh, -c, "hostname > /tmp/index.html; exec busybox httpd -f -p 80 -h /tmp"]
        readinessProbe: {httpGet: {path: /, port: 80}, periodSeconds: 1}
        resources: {limits: {cpu: 100m, memory: 32Mi}}
---
apiVersion: v1
kind: Service
metadata: {name: db}
spec:
  clusterIP: None
  selector: {app: db}
  ports: [{port: 80}]
"#;

/// Deployment whose requests must not fail during an update.
const DEPLOYMENT: &str = r#"
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 3
  strategy: {rollingUpdate: {maxSurge: 1, maxUnavailable: 0}}
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      tolerations: [{operator: Exists}]
      terminationGracePeriodSeconds: 10
      containers:
      - name: main
        image: localhost/coracle/demo:1
        imagePullPolicy: Never
        command: [sh, -c, "echo version $VERSION > /tmp/index.html; exec busybox httpd -f -p 80 -h /tmp"]
        env: [{name: VERSION, value: "1"}]
        readinessProbe: {httpGet: {path: /, port: 80}, periodSeconds: 1}
        lifecycle: {preStop: {sleep: {seconds: 3}}}
        resources: {limits: {cpu: 100m, memory: 32Mi}}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {app: web}
  ports: [{port: 80}]
"#;

impl System {
    /// Returns the addresses of the Service that take new connections, as kube-proxy selects them.
    async fn endpoints(&self, service: &str) -> Result<Vec<String>, String> {
        let path = "-o=jsonpath={.items[*].endpoints[?(@.conditions.ready==true)].addresses[0]}";
        let selector = format!("kubernetes.io/service-name={service}");
        let found = self.kubectl(&["get", "endpointslices", "-l", &selector, path]).await?;
        Ok(found.split_whitespace().map(str::to_owned).collect())
    }

    /// Returns the pages of all endpoints of the Service, once it has `count`.
    async fn pages(&self, service: &str, count: usize) -> BTreeSet<String> {
        let addresses = until(&format!("{count} endpoints of {service}"), LIMIT, async || {
            let found = self.endpoints(service).await?;
            if found.len() == count { Ok(found) } else { Err(format!("{found:?}")) }
        })
        .await;
        let mut pages = BTreeSet::new();
        for address in addresses {
            let page = until("its page", LIMIT, async || fetch(format!("{address}:80")).await).await;
            pages.insert(page.lines().last().unwrap_or_default().to_owned());
        }
        pages
    }

    /// Polls the Service until `done` resolves, and returns the pages. No poll may fail.
    async fn poll(&self, service: &str, done: impl Future<Output = ()>) -> BTreeSet<String> {
        let (mut pages, mut number) = (BTreeSet::new(), 0);
        let polls = async {
            loop {
                let addresses = self.endpoints(service).await.unwrap();
                assert!(!addresses.is_empty(), "poll {number}: no endpoint is ready");
                // Delay with which kube-proxy may update its rules.
                elapse(Duration::from_millis(500)).await;
                for address in addresses {
                    let page = fetch(format!("{address}:80")).await;
                    let page = page.unwrap_or_else(|e| panic!("poll {number} of {address}: {e}"));
                    assert!(page.contains(" 200 "), "poll {number} of {address}: {page}");
                    pages.insert(page.lines().last().unwrap_or_default().to_owned());
                    number += 1;
                }
            }
        };
        tokio::select! {
            () = done => {}
            () = polls => {}
        }
        pages
    }
}

fn pages<const N: usize>(pages: [&str; N]) -> BTreeSet<String> {
    pages.map(str::to_owned).into()
}

#[test]
fn virtual_node_runs_every_kind_of_workload() {
    netns::run_within(Duration::from_secs(900), || async {
        let Some(system) = System::start("scheduler,controller-manager").await else { return };
        let kubectl = async |args: &[&str]| system.kubectl(args).await;
        system.apply("workloads.yaml", WORKLOADS).await;
        system.apply("deployment.yaml", DEPLOYMENT).await;
        system.apply_example("pod.yaml").await;
        system.wait(&["pod/hello"], READY, "True").await;
        let exec = kubectl(&["exec", "hello", "--", "sh", "-c", "hostname; exit 3"]).await.unwrap_err();
        assert!(exec.contains("exit code 3"), "{exec}");

        system.wait(&["deployment/web"], "{.status.readyReplicas}", "3").await;
        assert_eq!(system.pages("web", 3).await, pages(["version 1"]));
        system.wait(&["statefulset/db"], "{.status.readyReplicas}", "2").await;
        assert_eq!(system.pages("db", 2).await, pages(["db-0", "db-1"]));
        system.wait(&["daemonset/each-node"], "{.status.numberReady}", "1").await;
        system.wait(&["job/sum"], "{.status.succeeded}", "2").await;
        assert_eq!(kubectl(&["logs", "job/sum"]).await.unwrap(), "42\n");

        let probes = kubectl(&["get", "--raw", &system.node_path("metrics/probes").await]).await.unwrap();
        let passed = "prober_probe_total{probe_type=\"Readiness\",result=\"successful\",container=\"main\",pod=\"db-0\"";
        assert!(probes.contains(passed), "{probes}");

        let updated = async {
            kubectl(&["set", "env", "deployment/web", "VERSION=2"]).await.unwrap();
            kubectl(&["rollout", "status", "deployment/web", "--timeout=150s"]).await.unwrap();
            // Pods of the first version end while clients may still know their endpoints.
            until("no pod of the first version is left", LIMIT, async || {
                let pods = kubectl(&["get", "pods", "-l", "app=web", "-o", "name"]).await?;
                if pods.lines().count() == 3 { Ok(()) } else { Err(pods) }
            })
            .await;
        };
        assert_eq!(system.poll("web", updated).await, pages(["version 1", "version 2"]));
        assert_eq!(system.pages("web", 3).await, pages(["version 2"]));

        let done = "{.items[?(@.status.succeeded==1)].metadata.ownerReferences[0].name}";
        until("a Job of the CronJob", LIMIT, async || {
            let owners = kubectl(&["get", "jobs", &format!("-o=jsonpath={done}")]).await?;
            if owners.contains("each-minute") { Ok(()) } else { Err(owners) }
        })
        .await;
        // The Job of the next minute may be about to start.
        let logs = ["logs", "-l", "kind=cron", "--tail=1"];
        let printed = until("what the Jobs printed", LIMIT, async || kubectl(&logs).await).await;
        assert!(printed.starts_with("42\n"), "{printed}");
        kubectl(&["delete", "cronjob,daemonset,statefulset,deployment,service,job,pod", "--all"])
            .await
            .unwrap();
        system.until_no_vm().await;
        system.end().await;
    });
}
