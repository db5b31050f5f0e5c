//! Stream of container events: output, ends, statistics. The containers keep all of the data, so a stream that breaks loses
//! nothing: the next one can request it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use coracle_proto::guest::guest_frame::Message;
use coracle_proto::guest::host_frame::Message as HostMessage;
use coracle_proto::guest::{
    ContainerOutput, ContainerStarted, GuestFrame, HostFrame, MetricsResponse, Resume, Statistics,
};
use futures_util::StreamExt;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{MissedTickBehavior, interval};
use tonic::{Status, Streaming};

use super::{Container, Containers};
use crate::task_stream::{Outbox, TaskStream};
use crate::workload::{WorkloadPhase, number};

/// Interval of statistics.
const STATISTICS_PERIOD: Duration = Duration::from_secs(10);
/// Delay from a change to the next statistics.
const SETTLED: Duration = Duration::from_millis(500);

impl Containers {
    /// Sends frames until the host closes its side. `first` says at which offset the output of each container continues.
    ///
    /// # Errors
    /// When the first message is not `resume`.
    pub(crate) fn session(
        self: &Arc<Self>,
        first: Option<HostMessage>,
        mut input: Streaming<HostFrame>,
        metrics: impl Fn() -> MetricsResponse + Send + 'static,
    ) -> Result<TaskStream<GuestFrame>, Status> {
        let Some(HostMessage::Resume(resume)) = first else {
            return Err(Status::invalid_argument("the first message is not `resume`"));
        };
        let containers = Arc::clone(self);
        Ok(TaskStream::new(|outbox, tasks| {
            tasks.spawn(async move {
                tokio::select! {
                    () = containers.take_receipts(&mut input) => {}
                    () = containers.follow(&resume, &outbox) => {}
                    () = containers.report(metrics, &outbox) => {}
                }
            });
        }))
    }

    /// Receives the offsets of stored output, until the host closes its side.
    async fn take_receipts(&self, input: &mut Streaming<HostFrame>) {
        while let Ok(Some(frame)) = input.message().await {
            let Some(HostMessage::Received(received)) = frame.message else { continue };
            for (id, offset) in received.offsets {
                if let Ok(container) = self.get(&id) {
                    container.workload.logs().set_received(Some(offset));
                }
            }
        }
    }

    /// Runs a task for each container, and for each new one.
    async fn follow(&self, resume: &Resume, outbox: &Outbox<GuestFrame>) {
        let mut changed = self.changed.subscribe();
        let mut followed: BTreeMap<String, (Arc<Container>, AbortHandle)> = BTreeMap::new();
        let mut known_before = BTreeSet::new();
        let mut tasks = JoinSet::new();
        loop {
            let now = self.snapshot();
            followed.retain(|_, (container, task)| {
                let stays = now.iter().any(|other| Arc::ptr_eq(other, container));
                if !stays && container.workload.progress() == WorkloadPhase::NotStarted {
                    task.abort(); // would wait for a start; tasks of started containers end with them
                }
                stays
            });
            for container in now {
                let id = container.plan.id.clone();
                if followed.contains_key(&id) {
                    continue;
                }
                // A new container may have the id of a removed one.
                let is_first = known_before.insert(id.clone());
                let from = resume.from_offsets.get(&id).copied().filter(|_| is_first).unwrap_or(0);
                let logs = container.workload.logs();
                // An offset beyond the end is from an earlier container: its output starts again.
                let from = if from <= logs.end() { from } else { 0 };
                logs.set_received(resume.acknowledges.then_some(from));
                let task = tasks.spawn(follow_one(container.clone(), from, outbox.clone()));
                followed.insert(id, (container, task));
            }
            while tasks.try_join_next().is_some() {}
            if changed.changed().await.is_err() {
                return;
            }
        }
    }

    async fn report(&self, metrics: impl Fn() -> MetricsResponse, outbox: &Outbox<GuestFrame>) {
        let mut changed = self.changed.subscribe();
        let mut period = interval(STATISTICS_PERIOD);
        period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = period.tick() => {}
                Ok(()) = changed.changed() => {
                    period.reset_after(SETTLED);
                    continue;
                }
            }
            let time_unix_ns = crate::sys::wall_clock_ns();
            let statistics =
                Statistics { sandbox: Some(metrics()), containers: self.statistics(), time_unix_ns };
            if send(outbox, Message::Statistics(statistics)).await.is_err() {
                return;
            }
        }
    }
}

/// Sends start, output and end of one container, in this order.
async fn follow_one(container: Arc<Container>, from: u64, outbox: Outbox<GuestFrame>) {
    let id = container.plan.id.clone();
    if let WorkloadPhase::Running(pid) = container.workload.wait_begun().await {
        let started = ContainerStarted { container: id.clone(), pid: number(pid) };
        if send(&outbox, Message::Started(started)).await.is_err() {
            return;
        }
    }
    let Ok(output) = container.workload.logs().follow(from) else { return };
    let mut output = Box::pin(output);
    while let Some(Ok(chunk)) = output.next().await {
        let message = Message::Output(ContainerOutput {
            container: id.clone(),
            offset: chunk.offset,
            stream: chunk.stream,
            data: chunk.data,
            time_unix_ns: chunk.time_unix_ns,
        });
        if send(&outbox, message).await.is_err() {
            return;
        }
    }
    container.workload.wait_exit().await;
    if let Some(exited) = container.exit() {
        let _session_over = send(&outbox, Message::Exited(exited)).await;
    }
}

async fn send(outbox: &Outbox<GuestFrame>, message: Message) -> Result<(), ()> {
    outbox.send(Ok(GuestFrame { message: Some(message) })).await.map_err(drop)
}
