//! State shared by all requests.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use coracle_types::Clock;
use parking_lot::Mutex;
use tokio_util::task::TaskTracker;

use crate::auth::Gate;
use crate::manifest_memory::ManifestMemory;
use crate::manifest_store::ManifestStore;
use crate::meta::{Entry, Meta};
use crate::metrics::Metrics;
use crate::storage::Storage;
use crate::uploads::Sessions;

/// Limits that clients are subject to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest manifest, bytes. Default 50 MiB, as in epoch.
    pub manifest_bytes: u64,
    /// Largest upload, bytes. Default 40 GiB, as in epoch.
    pub upload_bytes: u64,
    /// Quota of all blobs together, bytes. Default unlimited.
    pub quota: Option<u64>,
    /// Quota of the blobs of one repository, bytes. Default unlimited.
    pub repository_quota: Option<u64>,
    /// Age after which an untouched upload is removed. Default 24 h.
    pub upload_age: Duration,
    /// Longest wait for the next byte of a request body, and for a client to read a response. Default 30 s.
    pub body_idle: Duration,
    /// Longest wait for the head of a request. Default 30 s.
    pub head_idle: Duration,
    /// Limit of concurrent connections. Default 1,024.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            manifest_bytes: 50 << 20,
            upload_bytes: 40 << 30,
            quota: None,
            repository_quota: None,
            upload_age: Duration::from_secs(24 * 3600),
            body_idle: Duration::from_secs(30),
            head_idle: Duration::from_secs(30),
            connections: 1024,
        }
    }
}

/// Settings of garbage collection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sweeping {
    /// Interval between sweeps. Default 10 min.
    pub every: Duration,
    /// Age after which an unreferenced blob is removed, counted from the last request for it. Default 24 h.
    pub grace: Duration,
    /// Age after which an untagged manifest is removed. Default never.
    pub untagged: Option<Duration>,
}

impl Default for Sweeping {
    fn default() -> Self {
        Self { every: Duration::from_secs(600), grace: Duration::from_secs(24 * 3600), untagged: None }
    }
}

/// Storage, tables, authorization and limits of one registry.
#[derive(Debug)]
pub(crate) struct Registry {
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) meta: Meta,
    pub(crate) gate: Gate,
    pub(crate) limits: Limits,
    pub(crate) sweeping: Sweeping,
    pub(crate) sessions: Sessions,
    pub(crate) metrics: Metrics,
    pub(crate) clock: Clock,
    /// Tasks of requests that write. They complete even if the client disconnects.
    pub(crate) writes: TaskTracker,
    /// Public base URL, if it differs from the URL of requests.
    pub(crate) public_url: Option<String>,
    pub(crate) tls: bool,
    /// True when anonymous clients get the empty token of epoch. By default they get a word, because clients refuse an empty
    /// token.
    pub(crate) empty_token: bool,
    pub(crate) manifests: ManifestStore,
    /// Dependencies that a repository must have for a pushed manifest.
    pub(crate) pushed: Entry,
    pub(crate) manifest_memory: ManifestMemory,
    /// True when blobs without rows were entered since the start.
    pub(crate) orphans_entered: AtomicBool,
    /// Recent size of all blobs, for early checks of the quota.
    pub(crate) used: RecentSum,
}

/// Recent sum of the sizes of all blobs, checked with each chunk of an upload. The exact check follows when a blob is finished.
#[derive(Debug, Default)]
pub(crate) struct RecentSum(Mutex<Option<(i64, i64)>>);

impl RecentSum {
    /// Longest age of a sum, milliseconds.
    const AGE_MAX: i64 = 5000;

    pub(crate) fn get(&self, now: i64) -> Option<i64> {
        let sum = *self.0.lock();
        sum.filter(|(_, at)| (0..Self::AGE_MAX).contains(&(now - at))).map(|(bytes, _)| bytes)
    }

    pub(crate) fn set(&self, bytes: i64, now: i64) {
        *self.0.lock() = Some((bytes, now));
    }

    /// Drops the sum after a blob was added or removed.
    pub(crate) fn forget(&self) {
        *self.0.lock() = None;
    }
}

impl Registry {
    /// Milliseconds since 1970.
    pub(crate) fn now(&self) -> i64 {
        self.clock.now().0
    }

    /// Time `age` ago.
    pub(crate) fn before(&self, age: Duration) -> i64 {
        self.now().saturating_sub(i64::try_from(age.as_millis()).unwrap_or(i64::MAX))
    }
}
