//! Limits the number and the bytes of chunks that are transferred concurrently.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Largest chunk that is compressed and decompressed in memory, bytes. Larger chunks go through a file.
pub(super) const MEMORY_MAX: u64 = 64 << 20;
/// Limit of bytes in concurrent chunks. A larger chunk is transferred alone.
pub(super) const BYTES_MAX: u64 = 256 << 20;
/// Limit of concurrent chunks.
const CHUNKS_MAX: usize = 16;
/// Bytes per unit of the semaphore.
const UNIT: u64 = 1 << 20;

/// Budget of one transfer.
#[derive(Clone, Debug)]
pub(super) struct TransferBudget {
    chunks: Arc<Semaphore>,
    units: Arc<Semaphore>,
    units_max: u32,
}

/// Permit to transfer one chunk.
#[derive(Debug)]
pub(super) struct Permit {
    _chunk: OwnedSemaphorePermit,
    _units: OwnedSemaphorePermit,
}

impl TransferBudget {
    /// Budget of `concurrency` chunks with at most [`MEMORY_MAX`] bytes each; `None`: the defaults.
    pub(super) fn new(concurrency: Option<usize>) -> Self {
        let asked = concurrency.unwrap_or(0) as u64;
        let bytes_max = asked.saturating_mul(MEMORY_MAX).clamp(BYTES_MAX, BYTES_MAX * 64);
        let units_max = u32::try_from(bytes_max / UNIT).unwrap_or(u32::MAX);
        let chunks = concurrency.unwrap_or(CHUNKS_MAX).clamp(1, Semaphore::MAX_PERMITS);
        Self {
            chunks: Arc::new(Semaphore::new(chunks)),
            units: Arc::new(Semaphore::new(units_max as usize)),
            units_max,
        }
    }

    /// Waits until a chunk of `chunk_bytes` may be transferred. Never `None`: the semaphores are not closed.
    pub(super) async fn acquire(&self, chunk_bytes: u64) -> Option<Permit> {
        // Acquires in this order to avoid a deadlock: a caller with units has everything that it needs.
        let chunk = Arc::clone(&self.chunks).acquire_owned().await.ok()?;
        let units = Arc::clone(&self.units).acquire_many_owned(self.units_of(chunk_bytes)).await.ok()?;
        Some(Permit { _chunk: chunk, _units: units })
    }

    fn units_of(&self, chunk_bytes: u64) -> u32 {
        u32::try_from(chunk_bytes.div_ceil(UNIT)).unwrap_or(u32::MAX).clamp(1, self.units_max)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Acquires permits until the budget is exhausted.
    fn fill(budget: &TransferBudget, chunk_bytes: u64) -> Vec<Permit> {
        std::iter::from_fn(|| budget.acquire(chunk_bytes).now_or_never().flatten()).collect()
    }

    #[test]
    fn budget_bounds_bytes_and_number() {
        for (why, concurrency, chunk, want) in [
            ("small ones, by number", None, MIB, 16),
            ("usual ones, by bytes", None, 64 * MIB, 4),
            ("half the budget", None, 128 * MIB, 2),
            ("more than half", None, 129 * MIB, 1),
            ("those of a terabyte", None, 2048 * MIB, 1),
            ("the largest", None, 4096 * MIB, 1),
            ("a byte", None, 1, 16),
            ("one asked for", Some(1), MIB, 1),
            ("nothing asked for", Some(0), MIB, 1),
            ("eight asked for", Some(8), 64 * MIB, 8),
            ("eight asked for, large", Some(8), 2048 * MIB, 1),
        ] {
            let budget = TransferBudget::new(concurrency);
            let permits = fill(&budget, chunk);
            assert_eq!(permits.len(), want, "{why}");
            drop(permits);
            assert_eq!(fill(&budget, chunk).len(), want, "{why}: given back");
        }
    }

    #[test]
    fn budget_is_shared_by_large_and_small_chunks() {
        let budget = TransferBudget::new(None);
        let large = fill(&budget, 200 * MIB);
        let small = fill(&budget, MIB);
        assert_eq!((large.len(), small.len()), (1, 15));
        assert!(budget.acquire(200 * MIB).now_or_never().is_none());
    }
}
