//! Request bodies in memory: limited in bytes, idle time and minimum rate, not in duration.

use std::error::Error;
use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use tokio::time::{Instant, timeout};

use super::too_large;
use crate::error::{Code, ErrorResponse};
use crate::manifest_memory::Share;
use crate::registry::Registry;

/// Minimum rate of a client over the idle time, bytes per second.
const RATE_MIN: f64 = 1024.0;

/// Receives a small body.
pub(super) async fn read_bounded(
    registry: &Registry,
    body: Body,
    bytes_max: u64,
) -> Result<Bytes, ErrorResponse> {
    read(registry.limits.body_idle, body, bytes_max, None).await
}

/// Receives a manifest as memory becomes available.
pub(super) async fn manifest(
    registry: &Registry,
    body: Body,
    bytes_max: u64,
) -> Result<Bytes, ErrorResponse> {
    let wait = registry.limits.body_idle;
    let share = registry.manifest_memory.share(wait);
    read(wait, body, bytes_max, Some(share)).await
}

async fn read(
    idle: Duration,
    mut body: Body,
    bytes_max: u64,
    mut share: Option<Share<'_>>,
) -> Result<Bytes, ErrorResponse> {
    let slow = || {
        ErrorResponse::new(Code::SizeInvalid, "the body came too slowly").status(StatusCode::REQUEST_TIMEOUT)
    };
    // Time and bytes of the client in the current interval. Waiting for memory does not count.
    let (mut all, mut window) = (BytesMut::new(), (Duration::ZERO, 0.0));
    loop {
        let asked = Instant::now();
        let frame = match timeout(idle, body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(None) => return Ok(all.freeze()),
            Ok(Some(Err(error))) => return Err(body_error(&error, bytes_max)),
            Err(_) => return Err(slow()),
        };
        let Ok(data) = frame.into_data() else { continue };
        if (all.len() + data.len()) as u64 > bytes_max {
            return Err(too_large(bytes_max));
        }
        window =
            (window.0 + asked.elapsed(), window.1 + f64::from(u32::try_from(data.len()).unwrap_or(u32::MAX)));
        if window.0 > idle {
            if window.1 < RATE_MIN * window.0.as_secs_f64() {
                return Err(slow());
            }
            window = (Duration::ZERO, 0.0);
        }
        if let Some(share) = &mut share {
            share.grow(all.len() + data.len()).await?;
        }
        all.extend_from_slice(&data);
    }
}

fn body_error(error: &axum::Error, bytes_max: u64) -> ErrorResponse {
    match error.source().is_some_and(|source| source.is::<http_body_util::LengthLimitError>()) {
        true => too_large(bytes_max),
        false => ErrorResponse::new(Code::SizeInvalid, "the body ended before its length"),
    }
}

#[cfg(test)]
mod tests {
    use crate::manifest_memory::ManifestMemory;
    use futures_util::stream;

    use super::*;

    const IDLE: Duration = Duration::from_secs(30);

    /// Body of `pieces` parts, each sent after a pause.
    fn body(pieces: usize, bytes: usize, pause: Duration) -> Body {
        Body::from_stream(stream::unfold(0, move |n| async move {
            if n == pieces {
                return None;
            }
            tokio::time::sleep(pause).await;
            Some((Ok::<_, std::io::Error>(vec![b'x'; bytes]), n + 1))
        }))
    }

    #[tokio::test(start_paused = true)]
    async fn body_pace_table() {
        let ms = Duration::from_millis;
        for (why, body, want) in [
            ("4 MiB at 1 Mbit/s, 34 s", body(256, 16 << 10, ms(131)), Ok(4 << 20)),
            ("silent for 31 s", body(2, 10, ms(31_000)), Err(StatusCode::REQUEST_TIMEOUT)),
            ("100 bytes a second", body(600, 10, ms(100)), Err(StatusCode::REQUEST_TIMEOUT)),
            ("larger than allowed", body(5, 1 << 20, ms(1)), Err(StatusCode::PAYLOAD_TOO_LARGE)),
        ] {
            let got = read(IDLE, body, 4 << 20, None).await;
            assert_eq!(got.map(|bytes| bytes.len()).map_err(|problem| problem.status), want, "{why}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn large_bodies_wait_for_each_other_and_small_ones_do_not() {
        let memory = ManifestMemory::new(1 << 20);
        let share = || Some(memory.share(IDLE));
        // Each body takes all of the memory except for the last bytes of the other one.
        let large = || read(IDLE, body(64, 16 << 10, Duration::from_millis(100)), 1 << 20, share());
        let small = read(IDLE, body(2, 1024, Duration::from_millis(3000)), 1 << 20, share());
        let (one, other, small) = tokio::join!(large(), large(), async {
            let at = Instant::now();
            small.await.map(|bytes| (bytes.len(), at.elapsed()))
        });
        assert_eq!(small.unwrap(), (2048, Duration::from_secs(6)), "it waits for none");
        assert!(one.is_ok() || other.is_ok(), "of two bodies that wait for each other, one completes");
        for problem in [one, other].into_iter().filter_map(Result::err) {
            assert_eq!(problem.status, StatusCode::SERVICE_UNAVAILABLE);
        }
        assert!(memory.is_free(16), "all of it is given back");
    }
}
