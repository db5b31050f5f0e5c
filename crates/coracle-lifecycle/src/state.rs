//! State of a VM's task: what is known of the VM, and what is wanted.

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

/// Maximum number of requests that wait for the one under way.
pub(super) const WAITING_MAX: usize = 32;

/// Capabilities of the VM's driver.
#[derive(Clone, Copy, Debug)]
pub struct Abilities {
    /// Name of the driver.
    pub driver: &'static str,
    /// Whether the driver can save the memory of this VM.
    pub can_save: bool,
}

/// Continuation of a job.
#[derive(Debug)]
pub(crate) enum Then {
    /// Notifies watchers; a failure is only logged.
    Publish,
    /// Does nothing; a failure is only logged, with this description.
    Nothing(&'static str),
    /// The search for the VMM after a restart of the daemon has ended.
    Found,
    /// The network of an adopted VM is connected, or the attempt failed.
    Adopted {
        network: Option<String>,
    },
    /// Instances of an interrupted start are ended.
    ReadyToBoot,
    /// The start is recorded.
    BootRecorded {
        before: VmState,
    },
    /// The guest is up, and that is recorded.
    RunRecorded {
        session: Option<SessionId>,
    },
    /// The use of the saved memory is recorded.
    LoadRecorded {
        vmm: RunningVmm,
        saved: Option<Box<coracle_record::SavedMemory>>,
    },
    /// A change of state is recorded, or an earlier one whose record could not be written.
    StateRecorded {
        before: VmState,
        ticket: Ticket,
    },
    /// The request to power off is recorded.
    StopRecorded {
        grace: Duration,
        paused: bool,
    },
    /// All VMMs of the run have ended.
    Ended {
        state: VmState,
        message: String,
    },
    /// The end of the run is recorded.
    EndRecorded {
        before: VmState,
        failed: Option<HostError>,
    },
    DeletionRecorded {
        force: bool,
    },
    /// All VMMs of a VM that is being deleted have ended.
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

/// State that determines the decisions of a VM's task.
#[derive(Debug)]
pub struct State {
    /// Present record; the one on disk may be one step behind.
    pub record: SharedRecord,
    /// Containers of the VM, by id.
    pub containers: Arc<ContainerRecords>,
    pub(crate) abilities: Abilities,
    /// Number of the present run. Reports of jobs of an earlier run are ignored.
    pub run: u64,
    /// Session with the guest, while there is one.
    pub session: Option<SessionId>,
    /// Whether a job follows the guest.
    pub(crate) is_following: bool,
    /// Whether a new session still has to be settled.
    pub(crate) settle_due: bool,
    /// Whether the guest rebooted by itself, and its command has to be started again.
    pub(crate) command_due: bool,
    /// Grace period for the power-off that the guest is asked for as soon as nothing is under way.
    pub(crate) power_off_due: Option<Duration>,
    /// Reference of the image of the workload that is being made.
    pub(crate) committing: Option<Reference>,
    /// Whether the pre-snapshot hook has run and the post-snapshot hook has not.
    pub(crate) post_snapshot_due: bool,
    /// Whether the record on disk is older than the present one.
    pub(crate) unsaved: bool,
    /// Time at which a guest that was asked to stop is killed.
    pub kill_at: Option<Instant>,
    pub(crate) boot_began: Instant,
    /// Error of the start, for the callers that wait for it.
    pub(crate) start_error: Option<HostError>,
    pub(crate) starters: Vec<Ticket>,
    pub(crate) stoppers: Vec<Ticket>,
    pub(crate) deleters: Vec<Ticket>,
    pub(crate) container_stoppers: BTreeMap<ContainerId, Vec<Ticket>>,
    /// Requests that wait for the end of the `busy` job.
    pub(crate) waiting: VecDeque<(Ticket, Call)>,
    /// Jobs that run. Boxed, because a map allocates room for eleven entries at once.
    pub(crate) jobs: BTreeMap<JobId, Box<(Scope, Then)>>,
    /// Job of the one request or change that is under way.
    pub(crate) busy: Option<JobId>,
    pub(super) last_job: u64,
    pub(super) last_write: WriteId,
    /// Whether the VM is gone.
    pub is_gone: bool,
}

impl State {
    /// Returns the state of a VM whose record and containers are on disk.
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

    /// Returns the continuation of the job that is under way.
    pub(super) fn under_way(&self) -> Option<&Then> {
        self.busy.and_then(|job| self.jobs.get(&job)).map(|job| &job.1)
    }

    /// Returns whether the VMM is being ended, by a stop or a failure.
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
