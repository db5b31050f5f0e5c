//! Leader election on a Lease: one leader per controller group, which stops before it can be replaced.
//!
//! ```text
//!  renewed (time the request was SENT)                 another process may take it
//!     ├───────────────────── lease ────────────────────────────────▶│
//!     ├──────────── renew deadline ──────────▶│ work is cancelled │
//!                                             ├── work is dropped ──▶│ at the latest here
//! ```
//! A follower measures the lease duration from the moment when it *observed* a change of the record, by its own monotonic
//! clock, so the clocks of two hosts need not agree. Acquire and renew are compare-and-swap operations on the resource version.

use std::{pin::pin, time::Duration};

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{Api, Client, ResourceExt as _, api::PostParams};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{Clock, WallTime as _};

/// Reason why an election ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ElectionError {
    /// The times leave no room to stop before the Lease ends.
    #[error("lease {name}: need retry {retry:?} < renew deadline {renew:?} < lease {lease:?}")]
    Times {
        /// Name of the Lease.
        name: String,
        /// Time between two attempts.
        retry: Duration,
        /// Longest time without a renewal.
        renew: Duration,
        /// Duration of the Lease.
        lease: Duration,
    },
}

/// Leadership was lost, and the work was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost;

/// Candidate for one Lease.
#[derive(Clone, Debug)]
pub struct Election {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Name of the Lease: one per controller group.
    pub name: String,
    /// Identity of this process; never used by another process.
    pub identity: String,
    /// Time after the last renewal when another process may take the Lease.
    pub lease: Duration,
    /// Longest time of leadership without a renewal.
    pub renew_deadline: Duration,
    /// Time between two attempts to acquire or renew.
    pub retry: Duration,
}

impl Election {
    /// Creates a candidate with the times that Kubernetes components use: 15 s, 10 s, 2 s.
    #[must_use]
    pub fn new(namespace: impl Into<String>, name: impl Into<String>, identity: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
            identity: identity.into(),
            lease: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry: Duration::from_secs(2),
        }
    }

    fn check(&self) -> Result<(), ElectionError> {
        if self.retry < self.renew_deadline && self.renew_deadline < self.lease {
            return Ok(());
        }
        let (retry, renew, lease) = (self.retry, self.renew_deadline, self.lease);
        Err(ElectionError::Times { name: self.name.clone(), retry, renew, lease })
    }

    /// Runs `work` while this process leads; after a loss it tries to lead again. Returns `Ok` when `stop` is cancelled. `work`
    /// receives a token that is cancelled at the renew deadline, and is dropped before the Lease ends.
    ///
    /// # Errors
    /// [`ElectionError::Times`]; the error of `work`, after the Lease was released.
    pub async fn run<F, Fut, E>(
        &self,
        client: &Client,
        clock: &Clock,
        stop: &CancellationToken,
        mut work: F,
    ) -> Result<(), E>
    where
        F: FnMut(CancellationToken) -> Fut,
        Fut: Future<Output = Result<(), E>>,
        E: From<ElectionError>,
    {
        self.check()?;
        let mut candidate = Candidate {
            election: self,
            api: Api::namespaced(client.clone(), &self.namespace),
            clock,
            last: None,
        };
        while !stop.is_cancelled() {
            let Some(renewed) = candidate.acquire(stop).await else { break };
            info!(lease = self.name, identity = self.identity, "leading");
            let token = stop.child_token();
            match candidate.lead(renewed, &token, work(token.clone())).await {
                Ok(result) => {
                    candidate.release().await;
                    result?;
                    if stop.is_cancelled() {
                        break;
                    }
                }
                Err(Lost) => warn!(lease = self.name, identity = self.identity, "leadership lost"),
            }
        }
        Ok(())
    }
}

/// Lease as last read, and the time when this process observed its last change.
struct LastRecord {
    lease: Lease,
    changed: Instant,
}

struct Candidate<'a> {
    election: &'a Election,
    api: Api<Lease>,
    clock: &'a Clock,
    last: Option<LastRecord>,
}

impl Candidate<'_> {
    /// Tries until the Lease is acquired, and returns the time at which that request was sent. `None`: stopped.
    async fn acquire(&mut self, stop: &CancellationToken) -> Option<Instant> {
        loop {
            let sent = Instant::now();
            match timeout(self.election.renew_deadline, self.try_take()).await {
                Ok(Ok(true)) => return Some(sent),
                Ok(Ok(false)) => {}
                Ok(Err(error)) if is_conflict(&error) => {}
                Ok(Err(error)) => warn!(lease = self.election.name, %error, "acquire Lease failed"),
                Err(_) => warn!(lease = self.election.name, "acquire Lease timed out"),
            }
            tokio::select! {
                () = stop.cancelled() => return None,
                () = sleep(self.election.retry) => {}
            }
        }
    }

    /// Runs `work` and renews the Lease. `Err(Lost)`: the renew deadline passed, and `work` has ended or was dropped.
    async fn lead<T>(
        &mut self,
        sent: Instant,
        token: &CancellationToken,
        work: impl Future<Output = T>,
    ) -> Result<T, Lost> {
        let mut work = pin!(work);
        let mut renewed = sent;
        loop {
            let deadline = renewed + self.election.renew_deadline;
            let next = tokio::select! {
                result = &mut work => return Ok(result),
                next = self.renew_until(deadline) => next,
            };
            match next {
                Some(sent) => renewed = sent,
                None => break,
            }
        }
        token.cancel();
        // After the end of the Lease another process may lead: work that did not stop is dropped here.
        let _ = timeout_at(renewed + self.election.lease, work).await;
        self.last = None;
        Err(Lost)
    }

    /// Renews after one retry period, repeatedly until a request succeeds, and returns the time at which it was sent. `None`:
    /// `deadline` passed, or another process has the Lease.
    async fn renew_until(&mut self, deadline: Instant) -> Option<Instant> {
        loop {
            if timeout_at(deadline, sleep(self.election.retry)).await.is_err() {
                return None;
            }
            let sent = Instant::now();
            match timeout_at(deadline, self.try_take()).await {
                Ok(Ok(true)) => return Some(sent),
                Ok(Ok(false)) | Err(_) => return None,
                Ok(Err(error)) => warn!(lease = self.election.name, %error, "renew Lease failed"),
            }
        }
    }

    /// Makes one attempt: reads the Lease and writes it when this process has it or it is free. `Ok(false)`: another process
    /// has it.
    async fn try_take(&mut self) -> Result<bool, kube::Error> {
        let Some(current) = self.api.get_opt(&self.election.name).await? else {
            let lease = Lease {
                metadata: kube::core::ObjectMeta {
                    name: Some(self.election.name.clone()),
                    ..Default::default()
                },
                spec: Some(self.record(None)),
            };
            let lease = self.api.create(&PostParams::default(), &lease).await?;
            self.remember(lease);
            return Ok(true);
        };
        let spec = current.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.clone().unwrap_or_default();
        let changed = self.remember(current.clone());
        if !holder.is_empty() && holder != self.election.identity {
            let seconds = u64::try_from(spec.lease_duration_seconds.unwrap_or(0)).unwrap_or(0);
            // The record has whole seconds, so the holder's own finer duration was rounded up, never down.
            if changed.elapsed() < Duration::from_secs(seconds) {
                return Ok(false);
            }
        }
        let lease = Lease { spec: Some(self.record(Some(&spec))), ..current };
        let lease = self.api.replace(&self.election.name, &PostParams::default(), &lease).await?;
        self.remember(lease);
        Ok(true)
    }

    /// Stores the record, and returns the time when this version was first observed.
    fn remember(&mut self, lease: Lease) -> Instant {
        match &self.last {
            Some(last) if last.lease.resource_version() == lease.resource_version() => last.changed,
            _ => {
                let changed = Instant::now();
                self.last = Some(LastRecord { lease, changed });
                changed
            }
        }
    }

    fn record(&self, old: Option<&LeaseSpec>) -> LeaseSpec {
        let now = MicroTime(self.clock.timestamp());
        let held = old.filter(|o| o.holder_identity.as_deref() == Some(&self.election.identity));
        let seconds = self.election.lease.as_millis().div_ceil(1000);
        LeaseSpec {
            holder_identity: Some(self.election.identity.clone()),
            lease_duration_seconds: Some(i32::try_from(seconds).unwrap_or(i32::MAX)),
            acquire_time: held.and_then(|o| o.acquire_time.clone()).or_else(|| Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: match (held, old) {
                (Some(o), _) => o.lease_transitions,
                (None, Some(o)) => Some(o.lease_transitions.unwrap_or(0).saturating_add(1)),
                (None, None) => Some(0),
            },
            ..LeaseSpec::default()
        }
    }

    /// Releases the Lease, best effort, so that the next leader need not wait for its end.
    async fn release(&mut self) {
        let Some(LastRecord { lease, .. }) = self.last.take() else { return };
        let mut lease = lease;
        if let Some(spec) = lease.spec.as_mut() {
            spec.holder_identity = None;
            spec.lease_duration_seconds = Some(1);
        }
        let params = PostParams::default();
        let given = self.api.replace(&self.election.name, &params, &lease);
        if !matches!(timeout(self.election.retry, given).await, Ok(Ok(_))) {
            warn!(lease = self.election.name, "release Lease failed; it expires");
        }
    }
}

fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}
