//! Memory budget shared by manifests that are being received.

use std::time::Duration;

use axum::http::header;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::error::{Code, ErrorResponse};

/// Unit of the memory budget, and the first share of each body, bytes.
const UNIT: usize = 64 << 10;
/// Number of first shares that can be held concurrently.
const FIRST_SHARES: usize = 64;
/// Memory budget for manifests that are being received. A body takes memory as its bytes arrive, the first share from a
/// separate part: slow or large bodies delay other large ones only, and idle clients hold no memory.
#[derive(Debug)]
pub(crate) struct ManifestMemory {
    first: Semaphore,
    rest: Semaphore,
}

impl ManifestMemory {
    /// Budget for one manifest of this size, in addition to the first shares.
    pub(crate) fn new(bytes_max: u64) -> Self {
        let units = usize::try_from(bytes_max).unwrap_or(usize::MAX).div_ceil(UNIT);
        Self {
            first: Semaphore::new(FIRST_SHARES),
            rest: Semaphore::new(units.clamp(1, Semaphore::MAX_PERMITS)),
        }
    }

    /// Memory of a new body, which holds none yet. Waits at most `wait` for each part.
    pub(crate) fn share(&self, wait: Duration) -> Share<'_> {
        Share { of: self, first: None, rest: None, wait }
    }

    /// True when all first shares and `rest` units are free.
    #[cfg(test)]
    pub(crate) fn is_free(&self, rest: usize) -> bool {
        self.first.available_permits() == FIRST_SHARES && self.rest.available_permits() == rest
    }
}

/// Memory held by one body.
#[derive(Debug)]
pub(crate) struct Share<'a> {
    of: &'a ManifestMemory,
    first: Option<SemaphorePermit<'a>>,
    rest: Option<SemaphorePermit<'a>>,
    wait: Duration,
}

impl<'a> Share<'a> {
    /// Waits until the body holds memory for `bytes`.
    pub(crate) async fn grow(&mut self, bytes: usize) -> Result<(), ErrorResponse> {
        if self.first.is_none() {
            self.first = Some(Self::take(&self.of.first, 1, self.wait).await?);
        }
        let held = self.rest.as_ref().map_or(0, SemaphorePermit::num_permits);
        let more = bytes.div_ceil(UNIT).saturating_sub(1).saturating_sub(held);
        if more > 0 {
            let taken = Self::take(&self.of.rest, more, self.wait).await?;
            match &mut self.rest {
                Some(rest) => rest.merge(taken),
                None => self.rest = Some(taken),
            }
        }
        Ok(())
    }

    /// Waits for memory with a time limit, so that bodies that wait for each other fail.
    async fn take(
        from: &'a Semaphore,
        units: usize,
        wait: Duration,
    ) -> Result<SemaphorePermit<'a>, ErrorResponse> {
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        match timeout(wait, from.acquire_many(units)).await {
            Ok(Ok(taken)) => Ok(taken),
            _ => Err(ErrorResponse::new(Code::Unavailable, "other manifests use the memory; try again")
                .header(header::RETRY_AFTER, "1")),
        }
    }
}
