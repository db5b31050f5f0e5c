//! Guest sessions through the API server while the processes that forward them are killed.

use std::process::{Output, Stdio};
use std::time::Duration;

use coracle_testkit::netns;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::harness::{Installed, LIMIT, end};
use super::upgrade::{admits, vm};
use crate::crash_node::import;
use crate::support::{CORACLE, coracle, text, until};

/// Script that prints the number of processes that ended sessions left in a guest.
const LEFT: &str = "/bin/busybox ps -o args | /bin/busybox grep -c '^/bin/busybox slee[p] 4711'; true";

impl Installed {
    fn exec(&self, command: &str) -> Command {
        let mut exec = Command::new(CORACLE);
        exec.args(["exec", "--kubeconfig"]).arg(self.cluster.kubeconfig());
        exec.args(["web", "/bin/busybox", "sh", "-c", command]).env_remove("CORACLE_STATE");
        exec.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        exec
    }

    /// Starts a session whose command does not end, and waits until the command runs.
    async fn long_session(&self) -> Child {
        let mut session = self.exec("echo begun; /bin/busybox sleep 4711").spawn().unwrap();
        let mut lines = BufReader::new(session.stdout.as_mut().unwrap()).lines();
        let said = timeout(LIMIT, lines.next_line()).await.expect("the command begins").unwrap();
        assert_eq!(said.as_deref(), Some("begun"));
        session
    }
}

/// Checks that the client of a broken session ends, with an exit code that is not the command's.
async fn ends(session: Child) {
    let Output { status, stderr, .. } =
        timeout(LIMIT, session.wait_with_output()).await.expect("the client ends").unwrap();
    assert_eq!(status.code(), Some(125), "{}", text(&stderr));
    assert!(text(&stderr).contains("error[COR-"), "{}", text(&stderr));
}

#[test]
fn guests_survive_kills_of_operator_and_node_during_sessions() {
    netns::run_within(Duration::from_secs(300), || async {
        let Some(installed) = Installed::plane().await else { return };
        installed.install().await;
        installed.route_webhook().await;
        let account = installed.pod_kubeconfig("coracle-node", "n1").await;
        let mut node = installed.start_node("n1", &account).await;
        let mut operator = installed.start_operator().await;
        installed.announced("n1").await;
        admits(&installed).await;
        import(&installed.state("n1"), &installed.dir.path().join("layout")).await;
        installed.apply(vm("web")).await;
        installed.until_running("web").await;
        let pid = vmm_pid(&installed).await;

        let session = installed.long_session().await;
        operator.kill().await.unwrap();
        ends(session).await;
        operator = installed.start_operator().await;
        enters_again(&installed).await;

        let session = installed.long_session().await;
        node.kill().await.unwrap();
        ends(session).await;
        node = installed.start_node("n1", &account).await;
        enters_again(&installed).await;

        assert_eq!(vmm_pid(&installed).await, pid, "the guest was not started anew");
        installed.kubectl(&["delete", "mikromvm", "web", "--timeout=60s"]).await.unwrap();
        end(&mut [node, operator]).await;
    });
}

async fn vmm_pid(installed: &Installed) -> String {
    let inspected = coracle(&installed.state("n1"), &["inspect", "default-web"]).await;
    let inspected: serde_json::Value = serde_json::from_slice(&inspected.stdout).unwrap();
    inspected["status"]["vmmPid"].to_string()
}

/// Checks that new sessions work, and that the command of the old one is gone.
async fn enters_again(installed: &Installed) {
    until("another session", LIMIT, || async {
        let Output { status, stdout, stderr } = installed.exec(LEFT).output().await.unwrap();
        match (status.success(), text(&stdout).trim()) {
            (true, "0") => Ok(()),
            (_, said) => Err(format!("{said} {}", text(&stderr))),
        }
    })
    .await;
}
