//! What is known and wanted of a VM.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use coracle_oci::Reference;
use coracle_record::{ContainerRecords, Record};
use coracle_types::VmState;
use tokio::time::Instant;

use super::containers::ContainerWork;
use super::effect::{Scope, WriteId};
use super::input::{Call, JobId, RunningVmm, SessionId, Ticket};
use super::settle::SettleWork;
use super::shared_record::SharedRecord;
use super::suspend::MemoryWork;
use super::volumes::VolumeWork;
use crate::{ContainerId, HostError};

/// Requests that may wait for one that is under way.
pub(super) const WAITING_MAX: usize = 32;

/// What the driver of the VM can do.
#[derive(Clone, Copy, Debug)]
pub struct Abilities {
    /// Its name.
    pub driver: &'static str,
    /// Save the memory of this VM.
    pub can_save: bool,
}

/// What follows a job.
#[derive(Debug)]
pub(crate) enum Then {
    /// Tell watchers; a failure is only logged.
    Publish,
    /// Nothing; a failure is only logged, under this name.
    Nothing(&'static str),
    /// After a restart of the daemon.
    Found,
    /// The network of an adopted VM is connected, or not.
    Adopted {
        network: Option<String>,
    },
    /// Instances that nothing is known of are ended.
    ReadyToBoot,
    /// The start is on record.
    BootRecorded {
        before: VmState,
    },
    /// The guest is up, and that is on record.
    RunRecorded {
        session: Option<SessionId>,
    },
    /// That the saved memory is used up is on record.
    LoadRecorded {
        vmm: RunningVmm,
        saved: Option<Box<coracle_record::SavedMemory>>,
    },
    /// A change of state is on record, or an old one at last.
    StateRecorded {
        before: VmState,
        ticket: Ticket,
    },
    /// That the guest is asked to power off is on record.
    StopRecorded {
        grace: Duration,
        paused: bool,
    },
    /// No VMM of the run is left.
    Ended {
        state: VmState,
        message: String,
    },
    /// And that is on record.
    EndRecorded {
        before: VmState,
        failed: Option<HostError>,
    },
    DeletionRecorded {
        force: bool,
    },
    /// No VMM is left of a VM that is being deleted.
    DeletionEnded {
        force: bool,
    },
    Erased {
        vmm_left: bool,
    },
    Memory(MemoryWork),
    Volume(VolumeWork),
    Container(ContainerWork),
    Settle(SettleWork),
}

/// Everything that decides what a VM's task does.
#[derive(Debug)]
pub struct State {
    /// As it is; what is on disk may be a step behind.
    pub record: SharedRecord,
    /// Its containers, by id.
    pub containers: Arc<ContainerRecords>,
    pub(crate) abilities: Abilities,
    /// Number of the present run. What jobs of an earlier one report means nothing.
    pub run: u64,
    /// The session with its guest, while there is one.
    pub session: Option<SessionId>,
    /// A job stays in touch with the guest.
    pub(crate) is_following: bool,
    /// A new session was not compared with the records yet.
    pub(crate) settle_due: bool,
    /// Its guest started anew by itself, and its command has to begin again.
    pub(crate) command_due: bool,
    /// Its guest is asked to power off, with this grace, when nothing is under way.
    pub(crate) power_off_due: Option<Duration>,
    /// The image that is being made of what the workload left.
    pub(crate) committing: Option<Reference>,
    /// The pre-snapshot hook has run, the post-snapshot hook has not.
    pub(crate) post_snapshot_due: bool,
    /// The record on disk is older than the one here.
    pub(crate) unsaved: bool,
    /// When patience with a guest that was asked to stop is over.
    pub kill_at: Option<Instant>,
    pub(crate) boot_began: Instant,
    /// Why the start failed, for those who wait for it.
    pub(crate) start_error: Option<HostError>,
    pub(crate) starters: Vec<Ticket>,
    pub(crate) stoppers: Vec<Ticket>,
    pub(crate) deleters: Vec<Ticket>,
    pub(crate) container_stoppers: BTreeMap<ContainerId, Vec<Ticket>>,
    /// Requests that wait until the job that is `busy` has ended.
    pub(crate) waiting: VecDeque<(Ticket, Call)>,
    /// What runs. Boxed: a map has room for eleven from the first on.
    pub(crate) jobs: BTreeMap<JobId, Box<(Scope, Then)>>,
    /// The job of the one request or change that is under way.
    pub(crate) busy: Option<JobId>,
    pub(super) last_job: u64,
    pub(super) last_write: WriteId,
    /// Nothing is left of the VM.
    pub is_gone: bool,
}

impl State {
    /// That of a VM whose record and containers are on disk.
    pub fn new(record: Record, containers: ContainerRecords, abilities: Abilities, now: Instant) -> Self {
        Self {
            record: record.into(),
            containers: Arc::new(containers),
            abilities,
            run: 0,
            session: None,
            is_following: false,
            settle_due: false,
            command_due: false,
            power_off_due: None,
            committing: None,
            post_snapshot_due: false,
            unsaved: false,
            kill_at: None,
            boot_began: now,
            start_error: None,
            starters: vec![],
            stoppers: vec![],
            deleters: vec![],
            container_stoppers: BTreeMap::new(),
            waiting: VecDeque::new(),
            jobs: BTreeMap::new(),
            busy: None,
            last_job: 0,
            last_write: 0,
            is_gone: false,
        }
    }

    /// What follows the job that is under way.
    pub(super) fn under_way(&self) -> Option<&Then> {
        self.busy.and_then(|job| self.jobs.get(&job)).map(|job| &job.1)
    }

    /// Its VMM is being ended, by a stop or a failure.
    pub(super) fn is_ending(&self) -> bool {
        matches!(self.under_way(), Some(Then::Ended { .. } | Then::EndRecorded { .. }))
    }

    pub(super) fn is_deleting(&self) -> bool {
        matches!(
            self.under_way(),
            Some(Then::DeletionRecorded { .. } | Then::DeletionEnded { .. } | Then::Erased { .. })
        )
    }
}
