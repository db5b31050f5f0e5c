//! What every request works with.

use std::sync::Arc;
use std::time::Duration;

use coracle_types::Clock;
use tokio_util::task::TaskTracker;

use crate::auth::Gate;
use crate::meta::Meta;
use crate::metrics::Metrics;
use crate::names::RepositoryName;
use crate::storage::Storage;
use crate::uploads::Sessions;

/// Bounds on what clients may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one manifest. Default 50 MiB, the original's.
    pub manifest_bytes: u64,
    /// Bytes of one upload. Default 40 GiB, the original's.
    pub upload_bytes: u64,
    /// Bytes of all blobs together. Default none.
    pub quota: Option<u64>,
    /// Bytes of the blobs of one repository. Default none.
    pub repository_quota: Option<u64>,
    /// An upload that was not touched for so long is forgotten. Default 24 h.
    pub upload_age: Duration,
    /// Longest wait for the next byte of a body. Default 30 s.
    pub body_idle: Duration,
    /// Longest wait for a request's head. Default 30 s.
    pub head_idle: Duration,
    /// Connections at once. Default 1,024.
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

/// When garbage goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sweeping {
    /// How often to look. Default 10 min.
    pub every: Duration,
    /// A blob that nobody names stays so long after it was last asked for. Default 24 h.
    pub grace: Duration,
    /// A manifest without a tag goes when it is so old. Default never.
    pub untagged: Option<Duration>,
}

impl Default for Sweeping {
    fn default() -> Self {
        Self { every: Duration::from_secs(600), grace: Duration::from_secs(24 * 3600), untagged: None }
    }
}

/// Locks by repository; some repositories share one.
#[derive(Debug, Default)]
pub(crate) struct Turns([tokio::sync::Mutex<()>; 32]);

impl Turns {
    pub(crate) async fn of(&self, repo: &RepositoryName) -> tokio::sync::MutexGuard<'_, ()> {
        let sum = repo.as_str().bytes().fold(7usize, |sum, b| sum.wrapping_mul(31).wrapping_add(b.into()));
        self.0[sum % self.0.len()].lock().await
    }
}

/// Storage, names, gate and limits of one registry.
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
    /// Requests that write go on when their client hangs up, so that what they hold is let go of in order.
    pub(crate) writes: TaskTracker,
    /// How clients reach the registry, where that is not what they say themselves.
    pub(crate) public_url: Option<String>,
    pub(crate) tls: bool,
    /// The original's empty token for anonymous clients; ours has a word, since clients refuse an empty one.
    pub(crate) empty_token: bool,
    /// One change of the manifests of a repository at a time: file and row go together.
    pub(crate) turns: Turns,
    /// Memory for manifests that are being read, in units of 64 KiB.
    pub(crate) manifest_memory: Arc<tokio::sync::Semaphore>,
}

impl Registry {
    /// Milliseconds since 1970.
    pub(crate) fn now(&self) -> i64 {
        self.clock.now().0
    }

    /// The moment before which things are older than `age`.
    pub(crate) fn before(&self, age: Duration) -> i64 {
        self.now().saturating_sub(i64::try_from(age.as_millis()).unwrap_or(i64::MAX))
    }
}
