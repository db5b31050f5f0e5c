//! The single writer: collects commands, journals them as a group, applies them, answers.
//!
//! A group contains the commands that arrived while the previous group was written, so the disk sets the pace and no command
//! waits for a timer. While one group is being written to the disk, the previous group, which is on disk, is applied and
//! answered: disk and processor work at the same time.

mod group;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle_auction::codec::Codec;
use coracle_auction::{Command, Continuity, Event, Presence, Reply, SupplierNo, Time};
use coracle_telemetry::Readiness;
use coracle_types::Clock;
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::error::{RequestError, StoreError};
use crate::history::{self, RollUpQueue};
use crate::metrics::Metrics;
use crate::prices::Moved;
use crate::signed::saturating_i64;
use crate::state::{MarketState, Markets};
use crate::store::{Group, Projections, Store};
use group::{Entry, Waiting};

/// Most commands of one group; further ones wait for the next group.
const GROUP_MAX: usize = 8192;
/// Tenant number of the market itself. Numbers of tenants begin at 1.
pub(crate) const MARKET_ITSELF: u32 = 0;
/// Most queued requests.
const QUEUE: usize = 16_384;
/// Number of frames that a reader may lag behind before it starts again.
pub(crate) const BEHIND_MAX: usize = 1_000;
/// Number of commands after which a snapshot is made, unless there are more bids than this.
const SNAPSHOT_AFTER: u64 = 100_000;
/// Longest time that derived rows wait for a group to be written with.
const FLUSH: Duration = Duration::from_millis(50);
/// Longest sleep of the writer.
const IDLE: Duration = Duration::from_secs(1);

/// Effect of one group on one market.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) market: u32,
    pub(crate) seq: u64,
    pub(crate) events: Vec<Event>,
}

/// Results of commands.
#[derive(Clone, Debug)]
pub(crate) struct Applied {
    pub(crate) replies: Vec<Reply>,
    pub(crate) at: Time,
}

type Answer = oneshot::Sender<Result<Applied, RequestError>>;

enum Request {
    Apply { market: u32, who: u32, commands: Vec<Command>, answer: Answer },
    Heard { supplier: SupplierNo },
    Add { no: u32, state: Box<MarketState>, answer: oneshot::Sender<()> },
    Snapshot { market: u32, answer: oneshot::Sender<Result<(usize, i64), RequestError>> },
}

/// Handle of the writer.
#[derive(Clone, Debug)]
pub(crate) struct Writer {
    requests: mpsc::Sender<Request>,
    pub(crate) markets: Markets,
    pub(crate) events: broadcast::Sender<Arc<Batch>>,
    /// Price changes. Their readers get no other events, because there may be many readers, and bids are frequent.
    pub(crate) prices: broadcast::Sender<Arc<Moved>>,
}

/// Health of the writer.
#[derive(Clone, Debug)]
pub(crate) struct Health {
    pub(crate) metrics: Metrics,
    pub(crate) readiness: Readiness,
}

impl Health {
    /// Records whether the journal accepts commands.
    pub(crate) fn set_journal_up(&self, up: bool) {
        self.metrics.journal_up.set(i64::from(up));
        self.readiness.set("journal", up);
    }
}

/// Task behind the handles.
#[derive(Debug)]
pub(crate) struct WriterTask {
    requests: mpsc::Receiver<Request>,
    writer: Writer,
    store: Store,
    epoch: i64,
    clock: Clock,
    health: Health,
    made: Projections,
    ages: RollUpQueue,
    /// Groups that are in the journal but not applied yet.
    journaled: Vec<Entry>,
    /// Groups that may or may not be in the journal.
    doubtful: Vec<Group>,
    /// Whether the last append succeeded.
    is_up: bool,
    continuity: Continuity,
    presence: Presence,
    /// Time when presence is compared with the lots again.
    presence_due: Time,
    last: Time,
    wake: Time,
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Apply { .. } => "Apply",
            Self::Heard { .. } => "Heard",
            Self::Add { .. } => "Add",
            Self::Snapshot { .. } => "Snapshot",
        })
    }
}

fn shutdown_error() -> RequestError {
    RequestError::unavailable("the market is shutting down")
}

impl Writer {
    /// Creates a writer and its task.
    pub(crate) fn new(
        store: Store,
        epoch: i64,
        clock: Clock,
        health: Health,
        made: Projections,
    ) -> (Self, WriterTask) {
        let (tx, requests) = mpsc::channel(QUEUE);
        let (events, _) = broadcast::channel(BEHIND_MAX);
        let (prices, _) = broadcast::channel(BEHIND_MAX);
        let writer = Self { requests: tx, markets: Markets::default(), events, prices };
        let task = WriterTask {
            requests,
            writer: writer.clone(),
            store,
            epoch,
            clock,
            health,
            made,
            ages: RollUpQueue::default(),
            journaled: Vec::new(),
            doubtful: Vec::new(),
            is_up: true,
            continuity: Continuity::default(),
            presence: Presence::default(),
            presence_due: Time(0),
            last: Time(0),
            wake: Time(0),
        };
        (writer, task)
    }

    /// Applies commands to one market, together and in order. They are on disk when this returns, and are applied even if the
    /// caller is dropped meanwhile. `who`: number of the requesting tenant, [`MARKET_ITSELF`] for the market itself.
    pub(crate) async fn apply(
        &self,
        market: u32,
        who: u32,
        commands: Vec<Command>,
    ) -> Result<Applied, RequestError> {
        let (answer, wait) = oneshot::channel();
        self.requests
            .send(Request::Apply { market, who, commands, answer })
            .await
            .map_err(|_| shutdown_error())?;
        wait.await.map_err(|_| shutdown_error())?
    }

    pub(crate) async fn apply_one(
        &self,
        market: u32,
        who: u32,
        command: Command,
    ) -> Result<(Reply, Time), RequestError> {
        let applied = self.apply(market, who, vec![command]).await?;
        match applied.replies.first() {
            Some(Reply::Refused(refusal)) => Err((*refusal).into()),
            Some(reply) => Ok((*reply, applied.at)),
            None => Err(RequestError::not_found()),
        }
    }

    /// Records that a supplier was heard. Not journaled: only its silence and its return are.
    pub(crate) async fn report_heartbeat(&self, supplier: u32) -> Result<(), RequestError> {
        self.requests
            .send(Request::Heard { supplier: SupplierNo(supplier) })
            .await
            .map_err(|_| shutdown_error())
    }

    pub(crate) async fn add(&self, no: u32, state: MarketState) -> Result<(), RequestError> {
        let (answer, wait) = oneshot::channel();
        self.requests
            .send(Request::Add { no, state: Box::new(state), answer })
            .await
            .map_err(|_| shutdown_error())?;
        wait.await.map_err(|_| shutdown_error())
    }

    pub(crate) async fn snapshot(&self, market: u32) -> Result<(usize, i64), RequestError> {
        let (answer, wait) = oneshot::channel();
        self.requests.send(Request::Snapshot { market, answer }).await.map_err(|_| shutdown_error())?;
        wait.await.map_err(|_| shutdown_error())?
    }

    /// Reads one market.
    pub(crate) fn read<T>(
        &self,
        market: u32,
        look: impl FnOnce(&MarketState) -> T,
    ) -> Result<T, RequestError> {
        let markets = self.markets.read();
        markets.get(&market).map(look).ok_or_else(RequestError::not_found)
    }
}

impl WriterTask {
    /// Runs until `stop`, and completes the commands that were accepted. Ends with an error when another process has taken over
    /// the store.
    pub(crate) async fn run(mut self, stop: CancellationToken) -> Result<(), StoreError> {
        // Silences of suppliers are counted from here.
        self.presence.restart(self.time());
        loop {
            if stop.is_cancelled() {
                self.perform_journaled();
                return self.store.give_back(self.epoch).await;
            }
            let first = if self.journaled.is_empty() {
                let longest = if self.made.is_empty() && !self.ages.is_busy() { IDLE } else { FLUSH };
                let pause = Duration::from_millis(self.wake.since_ms(self.time())).min(longest);
                tokio::select! {
                    () = stop.cancelled() => continue,
                    request = self.requests.recv() => request,
                    () = tokio::time::sleep(pause) => None,
                }
            } else {
                // Callers of the journaled group wait for their answers, so do not wait for more requests.
                self.requests.try_recv().ok()
            };
            if !self.doubtful.is_empty() {
                self.settle_doubt().await?;
            }
            let mut waiting = BTreeMap::new();
            let mut count = 0;
            self.due_ticks(&mut waiting);
            let mut next = first;
            while let Some(request) = next {
                count += self.take(request, &mut waiting).await;
                next = if count < GROUP_MAX { self.requests.try_recv().ok() } else { None };
            }
            if self.doubtful.is_empty() {
                self.put_own_commands(&mut waiting);
            }
            if waiting.is_empty() {
                self.perform_journaled();
                if self.doubtful.is_empty() {
                    self.flush().await;
                }
                if self.is_up {
                    self.continuity.served(self.time());
                }
            } else {
                self.commit(waiting).await?;
            }
            self.make_due_snapshots().await;
            self.roll_up_history().await;
        }
    }

    /// Rolls up one part of one market's old history, if due, so that a group never waits for the roll-up of years.
    async fn roll_up_history(&mut self) {
        let now = self.time();
        let due = self.ages.next(now, || {
            let markets = self.writer.markets.read();
            markets.keys().copied().collect()
        });
        let Some(market) = due else { return };
        match history::roll_up(&self.store, market, saturating_i64(now.0)).await {
            Ok(more) => self.ages.complete_part(market, more),
            Err(error) => {
                // The data stays old, so the next roll-up finds it again.
                tracing::warn!(%error, market, "roll up history failed");
                self.ages.complete_part(market, false);
            }
        }
    }

    /// Makes snapshots of markets with many commands since the last one.
    async fn make_due_snapshots(&mut self) {
        let due: Vec<_> = {
            let markets = self.writer.markets.read();
            markets.iter().filter(|(_, state)| is_snapshot_due(state)).map(|(no, _)| *no).collect()
        };
        for no in due {
            // A failed snapshot is tried again after the next group; the journal has everything.
            self.make_snapshot(no).await.map(drop).unwrap_or_default();
        }
    }

    fn time(&self) -> Time {
        Time(u64::try_from(self.clock.now().0).unwrap_or(0)).max(self.last)
    }

    async fn take(&mut self, request: Request, waiting: &mut BTreeMap<u32, Waiting>) -> usize {
        match request {
            Request::Apply { market, who, mut commands, answer } => {
                let count = commands.len();
                for command in &commands {
                    if let Command::PutLot { supplier, .. } = command {
                        self.on_heartbeat(*supplier);
                    }
                }
                let group = waiting.entry(market).or_default();
                commands.iter().for_each(|_| who.put(&mut group.who));
                group.commands.append(&mut commands);
                group.answers.push((answer, count));
                return count.max(1);
            }
            Request::Heard { supplier } => self.on_heartbeat(supplier),
            Request::Add { no, state, answer } => {
                self.wake = self.wake.min(state.market.next_needed());
                self.writer.markets.write().insert(no, *state);
                answer.send(()).unwrap_or_default();
            }
            Request::Snapshot { market, answer } => {
                let done = self.make_snapshot(market).await;
                answer.send(done).unwrap_or_default();
            }
        }
        1
    }

    /// Adds ticks for markets where something is due, including indicative calls.
    fn due_ticks(&mut self, waiting: &mut BTreeMap<u32, Waiting>) {
        let now = self.time();
        if now < self.wake {
            return;
        }
        let mut wake = Time::NEVER;
        let markets = self.writer.markets.read();
        for (no, state) in &*markets {
            let due = next_tick(state);
            if due <= now {
                let group = waiting.entry(*no).or_default();
                group.commands.push(Command::Tick);
                MARKET_ITSELF.put(&mut group.who);
            }
            wake = wake.min(due.max(now.plus_ms(1)));
        }
        drop(markets);
        self.wake = wake;
    }

    /// Records that a supplier was heard, and examines presence again before the next group.
    fn on_heartbeat(&mut self, supplier: SupplierNo) {
        self.presence.heard(supplier, self.time());
        self.presence_due = Time(0);
    }

    /// Adds the market's own commands. After a gap this is `Restarted`, before all others and in every market; otherwise
    /// commands that follow from presence and silence.
    fn put_own_commands(&mut self, waiting: &mut BTreeMap<u32, Waiting>) {
        let now = self.time();
        let markets = self.writer.markets.read();
        if self.continuity.has_gap(now) {
            tracing::warn!("market stood still, counting leases, launches and silences from now");
            self.presence.restart(now);
            for no in markets.keys() {
                waiting.entry(*no).or_default().put_first(Command::Restarted);
            }
        } else if now >= self.presence_due {
            for (no, state) in &*markets {
                for command in self.presence.commands(&state.market, now) {
                    waiting.entry(*no).or_default().put_first(command);
                }
            }
            self.presence_due = now.plus_ms(u64::try_from(IDLE.as_millis()).unwrap_or(u64::MAX));
        }
    }

    /// Journals a group; meanwhile applies and answers the previous one.
    async fn commit(&mut self, waiting: BTreeMap<u32, Waiting>) -> Result<(), StoreError> {
        let at = self.time();
        self.last = at;
        let (groups, entries) = self.encode(at, waiting);
        let made = std::mem::take(&mut self.made);
        let started = Instant::now();
        let (store, epoch, known) = (self.store.clone(), self.epoch, self.doubtful.is_empty());
        let append = async {
            if known {
                store.append(epoch, &groups, &made).await
            } else {
                Err(StoreError::Held { until_ms: 0 })
            }
        };
        let (outcome, ()) = tokio::join!(biased; append, async { self.perform_journaled() });
        self.health.metrics.journal_commit.observe(started.elapsed().as_secs_f64());
        if let Err(error) = outcome {
            tracing::error!(%error, "write journal failed");
            self.health.set_journal_up(false);
            self.is_up = false;
            // These rows come before those that the previous group made meanwhile.
            let since = std::mem::replace(&mut self.made, made);
            self.made.extend(since);
            if known {
                self.doubtful = groups;
            }
            for (answer, _) in entries.into_iter().flat_map(|entry| entry.waiting.answers) {
                answer
                    .send(Err(RequestError::unavailable("the journal cannot be written")))
                    .unwrap_or_default();
            }
            return if matches!(error, StoreError::Held { .. }) && known { Err(error) } else { Ok(()) };
        }
        self.health.set_journal_up(true);
        self.is_up = true;
        self.continuity.served(at);
        self.journaled = entries;
        Ok(())
    }

    /// Writes derived rows when there is no group to write them with.
    async fn flush(&mut self) {
        let made = std::mem::take(&mut self.made);
        if made.is_empty() {
            return;
        }
        if let Err(error) = self.store.append(self.epoch, &[], &made).await {
            tracing::error!(%error, "write history failed");
            self.made = made;
        }
    }

    /// Checks whether the groups of a failed append are in the journal. Until this is known, no command is accepted.
    ///
    /// # Errors
    /// Another writer's group is at the position of this writer's group, so this process must end.
    async fn settle_doubt(&mut self) -> Result<(), StoreError> {
        let groups = std::mem::take(&mut self.doubtful);
        for (done, group) in groups.iter().enumerate() {
            match self.store.chain_at(group.market, group.seq).await {
                Ok(Some(chain)) if chain == group.chain => self.perform_late(group),
                Ok(Some(_)) => return Err(StoreError::Held { until_ms: 0 }),
                Ok(None) => {}
                Err(_) => {
                    self.doubtful = groups[done..].to_vec();
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Stores derived rows, then a snapshot: rows of commands in the snapshot cannot be derived again from the journal after
    /// it.
    async fn make_snapshot(&mut self, no: u32) -> Result<(usize, i64), RequestError> {
        let made = std::mem::take(&mut self.made);
        let image = self.writer.read(no, |state| (state.market.snapshot(), state.seq, state.chain));
        let (body, seq, chain) = image?;
        let stored = match self.store.append(self.epoch, &[], &made).await {
            Ok(()) => self.store.put_snapshot(no, seq, &body, &chain).await,
            Err(e) => Err(e),
        };
        if let Err(error) = stored {
            tracing::error!(%error, market = no, "store snapshot failed");
            self.made = made;
            return Err(RequestError::unavailable("the snapshot cannot be stored"));
        }
        let mut markets = self.writer.markets.write();
        if let Some(state) = markets.get_mut(&no) {
            state.since_snapshot = 0;
        }
        Ok((body.len(), seq))
    }
}

/// Time at which a market must be ticked.
fn next_tick(state: &MarketState) -> Time {
    state.market.next_needed().min(state.market.next_indicative())
}

/// Whether a snapshot of the market is due.
fn is_snapshot_due(state: &MarketState) -> bool {
    state.since_snapshot > SNAPSHOT_AFTER.max(2 * state.market.bids_known())
}
