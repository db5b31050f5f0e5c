//! Resource usage of a pod's VM, as its guest reports it: the statistics of one container, which is the VM.

use std::sync::Arc;
use std::time::Duration;

use coracle_host::{Access, Host, View};
use coracle_proto::guest::{ContainerStatistics, MetricsRequest, MetricsResponse, Statistics};
use coracle_types::VmId;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// Sampling interval, equal to that of guests for their containers.
const CADENCE: Duration = Duration::from_secs(10);
/// Time limit of a sample.
const LIMIT: Duration = Duration::from_secs(5);

/// Passes each sample of the VM whose id `vm` contains to `report`, and `None` for an unknown VM. If the guest does not
/// respond, the previous sample stays, with its time. Ends when the sender of `vm` is dropped.
pub async fn sample(
    host: Host,
    mut vm: watch::Receiver<Option<VmId>>,
    report: impl Fn(Option<Arc<Statistics>>),
) {
    loop {
        let id = vm.borrow_and_update().clone();
        match id.and_then(|id| host.find(id.as_str(), Access::Read).ok()) {
            None => report(None),
            Some(view) => {
                if let Some(statistics) = of(&host, &view).await {
                    report(Some(Arc::new(statistics)));
                }
            }
        }
        tokio::select! {
            changed = vm.changed() => if changed.is_err() { return },
            () = sleep(CADENCE) => {}
        }
    }
}

async fn of(host: &Host, view: &View) -> Option<Statistics> {
    let guest = view.guest.clone()?;
    let said = timeout(LIMIT, guest.rpc().metrics(MetricsRequest {})).await.ok()?.ok()?;
    let record = view.record.clone();
    let (disk, reader) = (record.clone(), host.clone());
    let disk = tokio::task::spawn_blocking(move || reader.disk_bytes(&disk)).await.unwrap_or(0);
    let time_unix_ns = host.clock().now().0.saturating_mul(1_000_000);
    Some(statistics(record.id.as_str(), said.into_inner(), disk, time_unix_ns))
}

/// Returns the statistics of the guest as one container. Its disk usage is the difference to the image.
fn statistics(id: &str, guest: MetricsResponse, disk_bytes: u64, time_unix_ns: i64) -> Statistics {
    let used = guest.memory_total_bytes.saturating_sub(guest.memory_available_bytes);
    let container = ContainerStatistics {
        container: id.to_owned(),
        cpu_usage_ns: guest.cpu_user_ns.saturating_add(guest.cpu_system_ns),
        cpu_user_ns: guest.cpu_user_ns,
        cpu_system_ns: guest.cpu_system_ns,
        memory_usage_bytes: used,
        memory_working_set_bytes: used,
        memory_rss_bytes: used,
        processes: guest.processes.into(),
        filesystem_used_bytes: disk_bytes,
        filesystem_inodes: guest.overlay_inodes.saturating_sub(guest.overlay_inodes_free),
        ..ContainerStatistics::default()
    };
    Statistics { time_unix_ns, containers: vec![container], sandbox: Some(guest) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_is_reported_as_one_container() {
        let guest = MetricsResponse {
            memory_total_bytes: 100,
            memory_available_bytes: 60,
            cpu_user_ns: 5,
            cpu_system_ns: 2,
            ..MetricsResponse::default()
        };
        let all = statistics("v", guest, 9, 7);
        let one = &all.containers[0];
        assert_eq!((one.memory_working_set_bytes, one.cpu_usage_ns, one.filesystem_used_bytes), (40, 7, 9));
        assert_eq!((one.container.as_str(), all.time_unix_ns, all.sandbox), ("v", 7, Some(guest)));
    }
}
