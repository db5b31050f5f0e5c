//! Life of a pod whose container is a VM: its task of `coracle-vm-pod`, and the output of its VM.

use std::path::PathBuf;
use std::sync::Arc;

use coracle_pod::runtime::RuntimeError;
use coracle_pod::task::Ended;
use coracle_vm_pod::task::{self, VmPodInput, VmPodPeers};
use coracle_vm_pod::{output, statistics};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::life::{PodTask, PodVersion};
use super::object::ApiVmPod;
use super::row::Row;

/// Directory of the VM's output, in the directory of the pod.
const LOGS: &str = "vm-output";

impl PodTask {
    /// Like [`PodTask::run`], for a pod whose container is a VM.
    pub(super) async fn run_vm(mut self, stop: CancellationToken) -> Result<Ended, RuntimeError> {
        let shared = self.shared.clone();
        let first = self.seen.borrow().pod.clone();
        let row = self.new_row(&first);
        let dir = super::directories(&shared.options, &shared.host).0.join(&self.pod.uid);
        let logs = dir.join(LOGS);
        let api = self.api_pod(&first, &row);
        drop(first); // each version takes some kilobytes, and the pod runs for long
        let Some(failure) = stop.run_until_cancelled(Box::pin(self.admit())).await else {
            return Ok(Ended::Stopped);
        };
        let refused = failure.map(|failure| (failure.reason, failure.message));
        let (vm, own_vm) = watch::channel(None);
        let (table, own) = (shared.table.clone(), self.pod.uid.clone());
        let peers = VmPodPeers {
            host: shared.host.clone(),
            object: Arc::new(ApiVmPod { api, logs: logs.clone(), vm }),
            registry: shared.options.vms.registry.clone(),
            leases: shared.options.vms.leases.clone(),
            exported: shared.options.vms.exported.clone(),
            default_memory: shared.options.default_memory,
            known: Arc::new(move |uid| uid == own || table.has(uid)),
            image_keys: self.image_keys(),
            metrics: shared.options.vms.metrics.clone(),
        };
        let (input, receiver) = watch::channel(self.vm_input(&refused));
        let mut ended = Box::pin(task::run(peers, self.pod.clone(), receiver, stop));
        let ended = tokio::select! {
            ended = &mut ended => ended,
            () = self.feed_vm(&input, &row, &refused) => task::Ended::Stopped,
            () = statistics::sample(shared.host.clone(), own_vm.clone(), |sample| row.set_statistics(sample)) => {
                task::Ended::Stopped
            }
            () = output::keep(shared.host.clone(), own_vm, logs) => task::Ended::Stopped,
        };
        match ended {
            task::Ended::Stopped => Ok(Ended::Stopped),
            task::Ended::Removed => {
                remove(dir).await;
                Ok(Ended::Removed)
            }
        }
    }

    fn vm_input(&mut self, refused: &Option<(String, String)>) -> VmPodInput {
        let PodVersion { pod, forced } = self.seen.borrow_and_update().clone();
        let node = self.shared.facts.borrow().addresses.clone();
        VmPodInput { pod, forced, refused: refused.clone(), node }
    }

    /// Updates the input of the task after changes in the cluster. Returns when the pods of the node end.
    async fn feed_vm(
        &mut self,
        input: &watch::Sender<VmPodInput>,
        row: &Row,
        refused: &Option<(String, String)>,
    ) {
        loop {
            let now = self.vm_input(refused);
            row.set_pod(&now.pod);
            input.send_replace(now);
            if self.seen.changed().await.is_err() {
                return;
            }
        }
    }
}

async fn remove(dir: PathBuf) {
    if let Err(error) = coracle_files::blocking(move || coracle_files::remove_tree(&dir)).await {
        tracing::warn!(%error, "remove the output of a VM failed");
    }
}
