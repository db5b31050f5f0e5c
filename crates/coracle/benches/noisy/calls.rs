//! Calls to the node while other work runs: a list, and the creation and removal of a VM record.

use std::cell::Cell;
use std::time::{Duration, Instant};

use coracle_proto::host as pb;
use coracle_testkit::figures::{figure, percentile};
use tokio::time::sleep;

use super::node::{DISK_MIB, IMAGE, MEMORY_MIB, Node};

/// Pause between two rounds of calls.
const PAUSE: Duration = Duration::from_millis(500);

/// Durations of calls in milliseconds.
#[derive(Default)]
pub(super) struct Times {
    list: Vec<f64>,
    record: Vec<f64>,
}

impl Times {
    pub(super) fn add(&mut self, other: Self) {
        self.list.extend(other.list);
        self.record.extend(other.record);
    }

    pub(super) fn report(&self) {
        eprintln!("calls beside the noisy guest, ms: list {:.1?}, record {:.1?}", self.list, self.record);
        figure("noisy.list_max_ms", percentile(&self.list, 100), "ms");
        figure("noisy.record_p50_ms", percentile(&self.record, 50), "ms");
        figure("noisy.record_max_ms", percentile(&self.record, 100), "ms");
        eprintln!("goal: 1000 ms");
    }
}

/// Makes calls until `work` has ended.
pub(super) async fn measure_during(node: &Node, work: impl Future<Output = ()>) -> Times {
    let (mut times, ended) = (Times::default(), Cell::new(false));
    let calls = async {
        while !ended.get() {
            let (list, record) = round(node).await;
            times.list.push(list);
            times.record.push(record);
        }
    };
    let work = async {
        work.await;
        ended.set(true);
    };
    tokio::join!(work, calls);
    times
}

async fn round(node: &Node) -> (f64, f64) {
    let mut host = node.host();
    let began = Instant::now();
    host.list_vms(pb::ListVmsRequest::default()).await.expect("a list");
    let listed = began.elapsed().as_secs_f64() * 1000.0;
    let request = pb::CreateVmRequest {
        name: "recorded".to_owned(),
        image: IMAGE.to_owned(),
        vcpus: 1,
        memory_mib: MEMORY_MIB,
        disk_mib: DISK_MIB,
        idempotent: true,
        ..Default::default()
    };
    let began = Instant::now();
    host.create_vm(request).await.expect("a record");
    let recorded = began.elapsed().as_secs_f64() * 1000.0;
    let remove = pb::DeleteVmRequest { vm: "recorded".to_owned(), force: true, ..Default::default() };
    host.delete_vm(remove).await.expect("delete");
    sleep(PAUSE).await;
    (listed, recorded)
}
