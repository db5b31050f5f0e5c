//! Sandbox of a real VM, and the operations of tests in it.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::{Duration, Instant};

use coracle_proto::cri::*;
use coracle_testkit::eventually_within;
use futures_util::FutureExt as _;

use crate::support::{IMAGE, Kubelet};

/// Running sandbox.
#[derive(Clone)]
pub(crate) struct Pod {
    pub(crate) kubelet: Kubelet,
    pub(crate) id: String,
    pub(crate) config: PodSandboxConfig,
    /// Directory of the node, for logs and mounts.
    pub(crate) dir: PathBuf,
}

type Running = Pin<Box<dyn Future<Output = ()>>>;

/// Name and function of a test.
pub(crate) type Row = (&'static str, Box<dyn Fn(Pod) -> Running>);

pub(crate) fn row<F: Future<Output = ()> + 'static>(name: &'static str, run: fn(Pod) -> F) -> Row {
    (name, Box::new(move |pod| Box::pin(run(pod))))
}

/// Lists tests by the names of their functions.
#[macro_export]
macro_rules! rows {
    ($($row:ident),* $(,)?) => {
        vec![$($crate::pod::row(stringify!($row), $row)),*]
    };
}

/// Runs all tests, and fails with the names of those that failed.
pub(crate) async fn run_rows(pod: &Pod, rows: Vec<Row>) {
    let only = std::env::var("CORACLE_CRI_ROW").unwrap_or_default();
    let mut failed = Vec::new();
    for (name, row) in rows.into_iter().filter(|(name, _)| name.contains(&only)) {
        let began = Instant::now();
        let ended = AssertUnwindSafe(row(pod.clone())).catch_unwind().await;
        let verdict = if ended.is_ok() { "ok" } else { "FAILED" };
        eprintln!("row {name} ... {verdict} ({} ms)", began.elapsed().as_millis());
        if ended.is_err() {
            failed.push(name);
        }
    }
    assert!(failed.is_empty(), "rows failed: {failed:?}");
}

/// Returns the configuration of a container that runs a shell command line.
pub(crate) fn shell(name: &str, line: &str) -> ContainerConfig {
    ContainerConfig {
        metadata: Some(ContainerMetadata { name: name.into(), attempt: 0 }),
        image: Some(ImageSpec { image: IMAGE.into(), ..ImageSpec::default() }),
        command: ["sh", "-c", line].map(str::to_owned).to_vec(),
        log_path: format!("{name}.log"),
        labels: [("row".to_owned(), name.to_owned())].into(),
        linux: Some(LinuxContainerConfig::default()),
        ..ContainerConfig::default()
    }
}

/// Returns the configuration with a changed security context.
pub(crate) fn with_security_context(
    config: ContainerConfig,
    change: impl FnOnce(&mut LinuxContainerSecurityContext),
) -> ContainerConfig {
    let mut linux = config.linux.clone().unwrap_or_default();
    change(linux.security_context.get_or_insert_default());
    ContainerConfig { linux: Some(linux), ..config }
}

impl Pod {
    pub(crate) async fn create(&self, config: ContainerConfig) -> Result<String, tonic::Status> {
        let request = CreateContainerRequest {
            pod_sandbox_id: self.id.clone(),
            config: Some(config),
            sandbox_config: Some(self.config.clone()),
        };
        Ok(self.kubelet.clone().runtime.create_container(request).await?.into_inner().container_id)
    }

    pub(crate) async fn start(&self, id: &str) -> Result<(), tonic::Status> {
        let request = StartContainerRequest { container_id: id.into() };
        self.kubelet.clone().runtime.start_container(request).await.map(drop)
    }

    pub(crate) async fn run(&self, config: ContainerConfig) -> String {
        let id = self.create(config).await.unwrap();
        self.start(&id).await.unwrap();
        id
    }

    pub(crate) async fn stop(&self, id: &str, timeout: i64) {
        let request = StopContainerRequest { container_id: id.into(), timeout };
        self.kubelet.clone().runtime.stop_container(request).await.unwrap();
    }

    pub(crate) async fn remove(&self, id: &str) {
        let request = RemoveContainerRequest { container_id: id.into() };
        self.kubelet.clone().runtime.remove_container(request).await.unwrap();
    }

    pub(crate) async fn sandbox_status(&self) -> PodSandboxStatus {
        let request = PodSandboxStatusRequest { pod_sandbox_id: self.id.clone(), verbose: false };
        self.kubelet.clone().runtime.pod_sandbox_status(request).await.unwrap().into_inner().status.unwrap()
    }

    pub(crate) async fn status(&self, id: &str) -> ContainerStatus {
        let request = ContainerStatusRequest { container_id: id.into(), verbose: false };
        self.kubelet.clone().runtime.container_status(request).await.unwrap().into_inner().status.unwrap()
    }

    /// Waits for the end of a container, and returns its status and its output.
    pub(crate) async fn wait_for_exit(&self, id: &str) -> (ContainerStatus, Vec<String>) {
        let ended = eventually_within(Duration::from_secs(60), "the container ends", async || {
            let status = self.status(id).await;
            (status.state() == ContainerState::ContainerExited).then_some(status)
        });
        let status = ended.await.unwrap();
        let log = self.log(&status);
        (status, log)
    }

    /// Runs a container to its end, removes it, and returns its exit code and its output.
    pub(crate) async fn output(&self, config: ContainerConfig) -> (i32, Vec<String>) {
        let id = self.run(config).await;
        let (status, log) = self.wait_for_exit(&id).await;
        self.remove(&id).await;
        // The kubelet removes the log as well.
        std::fs::remove_file(&status.log_path).unwrap();
        (status.exit_code, log)
    }

    /// Returns the lines of a container's log, without timestamps, streams and tags.
    pub(crate) fn log(&self, status: &ContainerStatus) -> Vec<String> {
        let text = std::fs::read_to_string(&status.log_path).unwrap_or_default();
        let content = |line: &str| line.splitn(4, ' ').nth(3).unwrap_or_default().to_owned();
        text.lines().map(content).collect()
    }

    pub(crate) async fn exec(&self, id: &str, cmd: &[&str]) -> (String, i32) {
        let response = self.try_exec(id, cmd, 20).await.unwrap();
        (String::from_utf8(response.stdout).unwrap(), response.exit_code)
    }

    pub(crate) async fn try_exec(
        &self,
        id: &str,
        cmd: &[&str],
        timeout: i64,
    ) -> Result<ExecSyncResponse, tonic::Status> {
        let cmd = cmd.iter().map(|word| (*word).to_owned()).collect();
        let request = ExecSyncRequest { container_id: id.into(), cmd, timeout };
        Ok(self.kubelet.clone().runtime.exec_sync(request).await?.into_inner())
    }
}
