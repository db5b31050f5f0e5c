//! Sessions with client-go's executors.

use std::sync::atomic::Ordering;

use coracle_testkit::eventually;
use tokio::io::AsyncWriteExt as _;
use tokio::time::timeout;

use crate::clients::{Kind, SPDY, SPDY_V1, SPDY_V2, SPDY_V3, V4, V5, exec, finish, start};
use crate::support::{DEADLINE, Served};

/// Returns the MiB that are sent in each direction; `CORACLE_STREAMING_MIB` in longer runs.
fn mib() -> usize {
    std::env::var("CORACLE_STREAMING_MIB").ok().and_then(|text| text.parse().ok()).unwrap_or(16)
}

/// Returns bytes in which a missing byte is detected.
fn pattern(length: usize) -> Vec<u8> {
    (0_u32..).flat_map(|n| n.to_le_bytes()).take(length).collect()
}

#[tokio::test]
async fn exit_codes_and_output_reach_each_client() {
    let served = Served::new().await;
    for kind in [SPDY, V5, V4] {
        for code in [0, 1, 137, 255] {
            let Some(ended) = exec(&served, kind, &format!("exit-{code}"), "stdout stderr", b"").await else {
                return;
            };
            let got = (ended.code, ended.stdout(), ended.stderr.clone());
            assert_eq!(got, (Some(code), "out".into(), "err".into()), "{kind:?}");
        }
    }
}

#[tokio::test]
async fn failures_reach_each_client_as_text() {
    let served = Served::new().await;
    for (kind, program, want) in [
        (SPDY, "fail", "client: container not found"),
        (V5, "fail", "client: container not found"),
        (V4, "fail", "client: container not found"),
        // Old versions do not transmit exit codes.
        (SPDY_V3, "fail", "client: error executing remote command: container not found"),
        (SPDY_V2, "exit-3", "error executing remote command: command terminated with non-zero exit code: 3"),
    ] {
        let Some(ended) = exec(&served, kind, program, "stdout stderr", b"").await else { return };
        assert_eq!(ended.code, Some(99), "{ended:?}");
        assert!(ended.stderr.contains(want), "{kind:?}: {ended:?}");
    }
    for kind in [SPDY_V3, SPDY_V2, SPDY_V1] {
        let Some(ended) = exec(&served, kind, "exit-0", "stdout", b"").await else { return };
        assert_eq!((ended.code, ended.stdout()), (Some(0), "out".into()), "{kind:?}");
    }
}

#[tokio::test]
async fn input_ends_when_the_client_closes_it() {
    let served = Served::new().await;
    for kind in [SPDY, V5] {
        for (program, input, want) in [("cat", "hello", "hello"), ("count", "12345", "5"), ("cat", "", "")] {
            let Some(ended) = exec(&served, kind, program, "stdin stdout stderr", input.as_bytes()).await
            else {
                return;
            };
            assert_eq!((ended.code, ended.stdout().as_str()), (Some(0), want), "{kind:?}: {ended:?}");
        }
    }
}

/// The process ends while its input is open: the client must not wait for more input.
#[tokio::test]
async fn session_ends_with_its_process_while_input_is_open() {
    let served = Served::new().await;
    for kind in [SPDY, V5, V4] {
        let Some(mut child) = start(&served, kind, "exit-7", "stdin stdout", &[]) else { return };
        let open = child.stdin.take();
        let output = timeout(DEADLINE, child.wait_with_output()).await;
        assert_eq!(output.unwrap().unwrap().status.code(), Some(7), "{kind:?}");
        drop(open);
    }
}

#[tokio::test]
async fn large_transfers_arrive_complete_each_way() {
    let served = Served::new().await;
    let input = pattern(mib() << 20);
    for kind in [SPDY, V5] {
        let Some(ended) = exec(&served, kind, "cat", "stdin stdout", &input).await else { return };
        assert_eq!(ended.code, Some(0), "{kind:?}: {}", ended.stderr);
        assert!(
            ended.stdout == input,
            "{kind:?}: {} of {} bytes, or others",
            ended.stdout.len(),
            input.len()
        );
    }
}

#[tokio::test]
async fn output_of_an_ended_process_arrives_complete() {
    let served = Served::new().await;
    let length = mib() << 20;
    for kind in [SPDY, SPDY_V3, V5, V4] {
        let Some(ended) = exec(&served, kind, &format!("zeros-{length}"), "stdout", b"").await else {
            return;
        };
        assert_eq!((ended.code, ended.stdout.len()), (Some(0), length), "{kind:?}: {}", ended.stderr);
    }
}

#[tokio::test]
async fn terminal_sizes_reach_the_session() {
    let served = Served::new().await;
    for kind in [SPDY, SPDY_V3, V5, V4] {
        let flags = ["-sizes", "80x24"];
        let Some(child) = start(&served, kind, "sizes-1", "stdin stdout tty", &flags) else { return };
        let ended = finish(child, b"").await;
        assert_eq!((ended.code, ended.stdout()), (Some(0), "80x24\n".into()), "{kind:?}: {ended:?}");
    }
}

#[tokio::test]
async fn session_is_dropped_when_its_client_is_killed() {
    let served = Served::new().await;
    for kind in [SPDY, V5, V4] {
        let Some(mut child) = start(&served, kind, "hang", "stdin stdout", &[]) else { return };
        let running = || served.seen.running.load(Ordering::SeqCst);
        eventually("the session runs", async || (running() == 1).then_some(())).await.unwrap();
        child.kill().await.unwrap();
        eventually("the session is dropped", async || (running() == 0).then_some(())).await.unwrap();
        eventually("its task ends", async || (served.tasks.open() == 0).then_some(())).await.unwrap();
    }
}

/// A client whose output is not read blocks the process, while input and sizes still reach it.
#[tokio::test]
async fn unread_output_does_not_block_input_or_sizes() {
    for kind in [SPDY, V5, V4] {
        let served = Served::new().await;
        let flags = ["-sizes", "80x24"];
        let Some(mut child) = start(&served, kind, "flood", "stdin stdout tty", &flags) else { return };
        let blocked = || served.seen.blocked.load(Ordering::SeqCst) == 1;
        eventually("the session is blocked", async || blocked().then_some(())).await.unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(b"line\n").await.unwrap();
        let got = || served.seen.got.lock().len() == 2;
        eventually("input arrives", async || got().then_some(())).await.unwrap();
        assert_eq!(*served.seen.got.lock(), ["line\n", "80x24"], "{kind:?}");
        let output = timeout(DEADLINE, child.wait_with_output()).await.unwrap().unwrap();
        let flooded = usize::try_from(served.seen.flooded.load(Ordering::SeqCst)).unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(0), flooded + 3), "{kind:?}");
        drop(stdin);
    }
}

/// Without a status, the client would take the end of its streams for success.
#[tokio::test]
async fn stop_of_the_server_is_an_error_for_clients() {
    for kind in [SPDY, V5, V4] {
        let served = Served::new().await;
        let Some(child) = start(&served, kind, "hang", "stdin stdout stderr", &[]) else { return };
        let running = async || (served.seen.running.load(Ordering::SeqCst) == 1).then_some(());
        eventually("the session runs", running).await.unwrap();
        let (ended, ()) = tokio::join!(finish(child, b""), served.tasks.stop());
        let Kind { via, .. } = kind;
        assert_eq!(ended.code, Some(99), "{via}: {ended:?}");
        assert!(ended.stderr.contains("session ended: server is stopping"), "{via}: {ended:?}");
    }
}
