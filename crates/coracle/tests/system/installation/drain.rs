//! Guests survive maintenance of their nodes: drains, and the replacement of every process of Coracle.

use std::time::Duration;

use super::harness::{Installed, end};
use super::upgrade::{LIMIT, Processes, admits, begin_counting, counted, upgrade, vm};
use crate::crash_node::import;
use crate::support::{coracle_ok, until};
use coracle_testkit::netns;
use serde_json::json;

impl Installed {
    /// Marks a Node ready, as its kubelet would.
    async fn ready(&self, node: &str) {
        let ready = json!({"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let status = json!({"status": {"conditions": [ready]}}).to_string();
        self.kubectl(&["patch", "node", node, "--subresource=status", "-p", &status]).await.unwrap();
        // The controller manager would remove the taint.
        self.kubectl(&["taint", "node", node, "node.kubernetes.io/not-ready-"]).await.unwrap();
    }

    async fn on_drain(&self, vm: &str, policy: &str) {
        let annotation = format!("coracle.dev/on-drain={policy}");
        self.kubectl(&["annotate", "--overwrite", "mikromvm", vm, &annotation]).await.unwrap();
    }

    /// Waits until the VM is on that node, with that reason.
    async fn until_vm(&self, vm: &str, node: &str, reason: &str) {
        let wanted = format!("{node} {reason}");
        let path = "-o=jsonpath={.status.nodeName} {.status.conditions[?(@.type==\"Ready\")].reason} {.status.migration}";
        until(&wanted, LIMIT, || async {
            let said = self.kubectl(&["get", "mikromvm", vm, path]).await?;
            let message = "-o=jsonpath={.status.conditions[?(@.type==\"Ready\")].message}";
            match said.trim() == wanted {
                true => Ok(()),
                false => Err(format!("{said}: {}", self.kubectl(&["get", "mikromvm", vm, message]).await?)),
            }
        })
        .await;
    }
}

#[test]
fn guests_outlive_drains_and_the_replacement_of_every_process() {
    netns::run_within(Duration::from_secs(400), || async {
        let Some(installed) = Installed::plane().await else { return };
        installed.install().await;
        installed.route_webhook().await;
        let accounts = [
            installed.pod_kubeconfig("coracle-node", "n1").await,
            installed.pod_kubeconfig("coracle-node", "n2").await,
        ];
        let first = installed.start_node("n1", &accounts[0]).await;
        let second = installed.start_node("n2", &accounts[1]).await;
        let operator = installed.start_operator().await;
        for node in ["n1", "n2"] {
            installed.ready(node).await;
            installed.announced(node).await;
            import(&installed.state(node), &installed.dir.path().join("layout")).await;
        }
        installed.kubectl(&["cordon", "n2"]).await.unwrap();
        admits(&installed).await;
        installed.apply(vm("web")).await;
        installed.until_vm("web", "n1", "VMRunning").await;
        let (n1, n2) = (installed.state("n1"), installed.state("n2"));
        begin_counting(&n1, "default-web").await;
        let count = counted(&n1, "default-web", 3).await;

        // The VM moves with its memory.
        installed.on_drain("web", "move").await;
        installed.kubectl(&["uncordon", "n2"]).await.unwrap();
        installed.kubectl(&["cordon", "n1"]).await.unwrap();
        installed.until_vm("web", "n2", "VMRunning").await;
        let count = counted(&n2, "default-web", count).await;
        assert_eq!(coracle_ok(&n1, &["ps", "-a", "-o", "name"]).await, "", "nothing is left at the source");
        for node in [&n1, &n2] {
            assert_eq!(coracle_ok(node, &["snapshot", "ls", "-o", "name"]).await, "");
        }
        let events = ["get", "events", "--field-selector=involvedObject.name=web", "-o=jsonpath={..reason}"];
        assert!(installed.kubectl(&events).await.unwrap().contains("Moving"));

        // Every process is replaced while the guests keep running.
        installed.kubectl(&["uncordon", "n1"]).await.unwrap();
        let processes = Processes { operator, nodes: [first, second] };
        let Processes { operator, nodes: [first, second] } = upgrade(&installed, processes, &accounts).await;
        installed.kubectl(&["cordon", "n1"]).await.unwrap();
        let count = counted(&n2, "default-web", count).await;

        // The VM hibernates while its node is cordoned.
        installed.on_drain("web", "hibernate").await;
        installed.kubectl(&["cordon", "n2"]).await.unwrap();
        installed.until_vm("web", "n2", "Drained").await;
        end(&mut [second]).await;
        let second = installed.start_node("n2", &accounts[1]).await;
        installed.kubectl(&["uncordon", "n2"]).await.unwrap();
        installed.until_vm("web", "n2", "VMRunning").await;
        counted(&n2, "default-web", count).await;

        installed.kubectl(&["delete", "mikromvm", "web", "--timeout=60s"]).await.unwrap();
        assert_eq!(coracle_ok(&n2, &["ps", "-a", "-o", "name"]).await, "");
        end(&mut [operator, first, second]).await;
    });
}
