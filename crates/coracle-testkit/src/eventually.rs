//! Waiting in tests. Tests do not sleep: they wait for a condition with these functions, or let time pass with [`elapse`].

use std::time::{self, Duration};

use tokio::time::{Instant, sleep};

/// Time within which a condition must hold on a usual host under load.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Factor on every time limit of a test: the slowest CI hosts emulate processors at a third of the usual speed. A limit only
/// ends a test that hangs; speed is measured by benchmarks.
pub(crate) const SLOWEST: u32 = 3;
/// Shortest and longest pause between two attempts.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// Pause after an attempt of this duration. Attempts that start a process, such as kubectl, then use at most a third of a
/// processor, and leave the rest to what they wait for.
fn pause(attempt: Duration) -> Duration {
    (attempt * 2).clamp(PAUSE.0, PAUSE.1)
}

/// Calls `ask` until it returns an answer. On a paused clock the pauses take no time.
///
/// To show that something does *not* happen, count what must happen meanwhile (reconciles, calls) and wait for that.
///
/// # Errors
/// "never: " and `what`, without an answer within [`LIMIT`] on the slowest host.
pub async fn eventually<T>(what: &str, ask: impl AsyncFnMut() -> Option<T>) -> anyhow::Result<T> {
    eventually_within(LIMIT, what, ask).await
}

/// Like [`eventually`], with a limit other than [`LIMIT`].
///
/// # Errors
/// Like [`eventually`].
pub async fn eventually_within<T>(
    limit: Duration,
    what: &str,
    mut ask: impl AsyncFnMut() -> Option<T>,
) -> anyhow::Result<T> {
    eventually_ok_within(limit, what, async || ask().await.ok_or_else(|| "no answer".to_owned())).await
}

/// Like [`eventually_within`], for questions that fail with a reason.
///
/// # Errors
/// Like [`eventually_within`], with the last failure.
pub async fn eventually_ok_within<T>(
    limit: Duration,
    what: &str,
    mut ask: impl AsyncFnMut() -> Result<T, String>,
) -> anyhow::Result<T> {
    let limit = limit * SLOWEST;
    let end = Instant::now() + limit;
    loop {
        let began = Instant::now();
        let last = match ask().await {
            Ok(answer) => return Ok(answer),
            Err(last) => last,
        };
        anyhow::ensure!(Instant::now() < end, "never: {what} (within {limit:?}; last: {last})");
        sleep(pause(began.elapsed())).await;
    }
}

/// Like [`eventually_within`], outside of a runtime: blocks the thread.
///
/// # Errors
/// Like [`eventually_within`].
pub fn eventually_blocking<T>(
    limit: Duration,
    what: &str,
    mut ask: impl FnMut() -> Option<T>,
) -> anyhow::Result<T> {
    let limit = limit * SLOWEST;
    let end = time::Instant::now() + limit;
    loop {
        let began = time::Instant::now();
        if let Some(answer) = ask() {
            return Ok(answer);
        }
        anyhow::ensure!(time::Instant::now() < end, "never: {what} (within {limit:?})");
        std::thread::sleep(pause(began.elapsed()));
    }
}

/// Lets time pass, where the other side offers no event to wait for, or where the time itself is the subject: a slow link, a
/// kill at some moment. A comment at each call states which.
pub async fn elapse(time: Duration) {
    sleep(time).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn wait_ends_with_the_answer_or_the_last_failure() {
        let mut left = 3;
        let counted = eventually("three attempts", async || {
            left -= 1;
            (left == 0).then_some("done")
        });
        assert_eq!(counted.await.unwrap(), "done");
        let error = eventually_ok_within(LIMIT, "a page", async || Err::<(), _>("refused".to_owned())).await;
        assert_eq!(error.unwrap_err().to_string(), "never: a page (within 180s; last: refused)");
        let mut left = 3;
        let blocking = eventually_blocking(LIMIT, "three attempts", || {
            left -= 1;
            (left == 0).then_some(left)
        });
        assert_eq!(blocking.unwrap(), 0);
        let error = eventually_blocking(Duration::ZERO, "a socket", || None::<()>).unwrap_err();
        assert_eq!(error.to_string(), "never: a socket (within 0ns)");
    }
}
