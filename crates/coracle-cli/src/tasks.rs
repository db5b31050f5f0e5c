//! Owner of the long-lived tasks of a daemon.

use std::time::Duration;

use miette::{IntoDiagnostic, WrapErr, bail};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Tasks of a process. A task that ends before shutdown is a failure, even if it returned `Ok`.
pub struct Tasks {
    set: JoinSet<(&'static str, miette::Result<()>)>,
    stop: CancellationToken,
}

impl Default for Tasks {
    fn default() -> Self {
        Self::new()
    }
}

impl Tasks {
    pub fn new() -> Self {
        Self { set: JoinSet::new(), stop: CancellationToken::new() }
    }

    pub fn spawn<F>(&mut self, name: &'static str, task: impl FnOnce(CancellationToken) -> F)
    where
        F: Future<Output = miette::Result<()>> + Send + 'static,
    {
        let task = task(self.stop.child_token());
        self.set.spawn(async move { (name, task.await) });
    }

    /// Runs until `signal` resolves or the first task ends, then stops the other tasks within `grace`.
    pub async fn run(mut self, signal: impl Future<Output = ()>, grace: Duration) -> miette::Result<()> {
        let first = tokio::select! {
            () = signal => None,
            ended = self.set.join_next() => ended,
        };
        self.stop.cancel();
        let drained = timeout(grace, async { while self.set.join_next().await.is_some() {} }).await;
        if let Some(ended) = first {
            let (name, result) = ended.into_diagnostic()?;
            result.wrap_err_with(|| format!("task {name}"))?;
            bail!("task {name} ended early");
        }
        drained.into_diagnostic().wrap_err("drain tasks within the grace period")
    }
}

/// Resolves on ^C or SIGTERM.
pub async fn stop_signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let term = async {
        match signal(SignalKind::terminate()) {
            Ok(mut term) => {
                term.recv().await;
            }
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        () = term => {}
    }
}
