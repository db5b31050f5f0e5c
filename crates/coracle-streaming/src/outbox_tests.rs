use std::future::poll_fn;

use tokio::io::AsyncWriteExt as _;

use super::*;

/// Encoding for tests: data as text, the end as `.`.
#[derive(Clone, Debug)]
struct Text;

impl Encode for Text {
    type Message = String;

    fn data(&self, payload: &[u8]) -> String {
        String::from_utf8_lossy(payload).into_owned()
    }

    fn end(&self) -> Option<String> {
        Some(".".to_owned())
    }
}

fn output(outbox: &Outbox<String>) -> (Output<Text>, CancellationToken) {
    let gone = CancellationToken::new();
    (Output::new(Ender::new(Text, outbox.clone(), gone.clone())), gone)
}

async fn drain(queue: &mut Queue<String>) -> Vec<String> {
    let mut all = Vec::new();
    while let Some(messages) = queue.next().await {
        all.extend(messages);
    }
    all
}

async fn is_blocked(output: &mut Output<Text>) -> bool {
    poll_fn(|cx| Poll::Ready(Pin::new(&mut *output).poll_write(cx, b"x").is_pending())).await
}

#[tokio::test]
async fn messages_are_written_in_order_up_to_the_close() {
    let (outbox, mut queue) = channel();
    let (mut output, _gone) = output(&outbox);
    output.write_all(b"data").await.unwrap();
    outbox.control("reply".to_owned());
    output.shutdown().await.unwrap();
    drop(output);
    outbox.control("status".to_owned());
    outbox.close();
    outbox.control("late".to_owned());
    assert_eq!(drain(&mut queue).await, ["data", "reply", ".", "status"]);
}

#[tokio::test]
async fn writer_waits_for_the_client_and_replies_do_not() {
    let (outbox, mut queue) = channel();
    let (mut output, _gone) = output(&outbox);
    for _ in 0..DATA_MAX {
        assert!(!is_blocked(&mut output).await);
    }
    assert!(is_blocked(&mut output).await);
    outbox.control("pong".to_owned());
    assert_eq!(queue.next().await.map(|messages| messages.len()), Some(BATCH_MAX));
    assert!(is_blocked(&mut output).await, "taken is not written");
    assert_eq!(queue.next().await, Some(vec!["pong".to_owned()]));
    assert!(!is_blocked(&mut output).await);
    drop(queue);
    let error = output.write_all(b"x").await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    outbox.wait_until_written().await;
}

#[tokio::test]
async fn unread_replies_are_bounded() {
    let (outbox, mut queue) = channel();
    for _ in 0..CONTROL_MAX {
        outbox.check().unwrap();
        outbox.control("pong".to_owned());
    }
    assert_eq!(outbox.check(), Err(Full));
    queue.next().await.unwrap();
    queue.next().await.unwrap();
    assert_eq!(outbox.check(), Ok(()));
}

#[tokio::test]
async fn reset_stream_takes_no_data_and_has_no_end() {
    let (outbox, mut queue) = channel();
    let (mut output, gone) = output(&outbox);
    gone.cancel();
    let error = output.write_all(b"x").await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    drop(output);
    outbox.close();
    assert!(drain(&mut queue).await.is_empty());
}

#[tokio::test]
async fn stream_that_another_ended_takes_no_data() {
    let (outbox, mut queue) = channel();
    let (mut output, _gone) = output(&outbox);
    let ender = output.end_handle();
    let all = "x".repeat(2 * PAYLOAD_MAX + 1);
    output.write_all(all.as_bytes()).await.unwrap();
    ender.end();
    assert!(output.write_all(b"x").await.is_err());
    let mut written = std::pin::pin!(outbox.wait_until_written());
    assert!(futures_util::poll!(&mut written).is_pending());
    outbox.close();
    let lengths: Vec<_> = drain(&mut queue).await.iter().map(String::len).collect();
    assert_eq!(lengths, [PAYLOAD_MAX, PAYLOAD_MAX, 1, 1]);
    written.await;
}
