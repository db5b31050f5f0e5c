//! Memory for manifests that are being received: a budget that bodies share.

use std::time::Duration;

use axum::http::header;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::error::{Code, ErrorResponse};

/// Unit of the memory budget, and the first share of each body.
const UNIT: usize = 64 << 10;
/// Concurrent first shares.
const FIRST_SHARES: usize = 64;
/// Memory for manifests that are being received. A body takes it while its bytes arrive, the first share from
/// a separate part: slow or large bodies delay other large ones only, and idle clients hold no memory.
#[derive(Debug)]
pub(crate) struct ManifestMemory {
    first: Semaphore,
    rest: Semaphore,
}

impl ManifestMemory {
    /// Memory for one manifest of this size in addition to the first shares.
    pub(crate) fn new(bytes_max: u64) -> Self {
        let units = usize::try_from(bytes_max).unwrap_or(usize::MAX).div_ceil(UNIT);
        Self {
            first: Semaphore::new(FIRST_SHARES),
            rest: Semaphore::new(units.clamp(1, Semaphore::MAX_PERMITS)),
        }
    }

    /// Memory for one body; waits at most `wait` for each part of it.
    pub(crate) fn share(&self, wait: Duration) -> Share<'_> {
        Share { of: self, first: None, rest: None, wait }
    }

    /// Whether all first shares and `rest` units are free.
    #[cfg(test)]
    pub(crate) fn is_free(&self, rest: usize) -> bool {
        self.first.available_permits() == FIRST_SHARES && self.rest.available_permits() == rest
    }
}

/// Memory of one body.
#[derive(Debug)]
pub(crate) struct Share<'a> {
    of: &'a ManifestMemory,
    first: Option<SemaphorePermit<'a>>,
    rest: Option<SemaphorePermit<'a>>,
    wait: Duration,
}

impl<'a> Share<'a> {
    /// Waits until there is memory for `bytes` of this body.
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

    /// Bodies that wait for each other's memory time out.
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
