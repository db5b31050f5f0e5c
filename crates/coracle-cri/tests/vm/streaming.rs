//! Group Streaming of critest: exec, attach and port-forward with the client of client-go.

use std::process::Stdio;
use std::time::Duration;

use coracle_proto::cri::*;
use coracle_testkit::{eventually_within, tools};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};
use tonic::Code;

use crate::pod::{Pod, Row, shell};
use crate::rows;

const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) fn rows() -> Vec<Row> {
    rows![
        runtime_should_support_exec_with_tty_false_and_stdin_false,
        runtime_should_support_exec_with_tty_true_and_stdin_true,
        runtime_should_support_attach,
        attach_closes_input_that_is_for_one_session,
        runtime_should_support_port_forward,
        streaming_requests_are_validated,
    ]
}

fn client(verb: &str, args: &[&str]) -> Option<Child> {
    let [client] = tools::require(["streaming-client"])?;
    let mut command = Command::new(client);
    command.arg(verb).args(args).kill_on_drop(true);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    Some(command.spawn().unwrap())
}

/// Returns output and exit code of a client that gets `input`.
async fn finish(mut child: Child, input: &[u8]) -> (String, Option<i32>) {
    let mut stdin = child.stdin.take().unwrap();
    let writing = async {
        let _either = stdin.write_all(input).await;
        drop(stdin);
    };
    let ending = async { tokio::join!(writing, child.wait_with_output()).1.unwrap() };
    let output = tokio::time::timeout(DEADLINE, ending).await.expect("the client ends");
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code())
}

async fn exec_url(pod: &Pod, request: ExecRequest) -> String {
    pod.kubelet.clone().runtime.exec(request).await.unwrap().into_inner().url
}

async fn runtime_should_support_exec_with_tty_false_and_stdin_false(pod: Pod) {
    let id = pod.run(shell("exec", "sleep 1000")).await;
    for via in ["spdy", "websocket"] {
        let cmd = ["sh", "-c", "echo hello; exit 7"].map(str::to_owned).to_vec();
        let request = ExecRequest {
            container_id: id.clone(),
            cmd,
            stdout: true,
            stderr: true,
            ..ExecRequest::default()
        };
        let url = exec_url(&pod, request).await;
        let args = ["-via", via, "-stdin=false", "-stdout=true", "-stderr=true", "-tty=false", &url];
        let Some(child) = client("exec", &args) else { return };
        assert_eq!(finish(child, b"").await, ("hello\n".to_owned(), Some(7)), "{via}");
    }
    pod.remove(&id).await;
}

async fn runtime_should_support_exec_with_tty_true_and_stdin_true(pod: Pod) {
    let id = pod.run(shell("tty", "sleep 1000")).await;
    let cmd = ["sh"].map(str::to_owned).to_vec();
    let request =
        ExecRequest { container_id: id.clone(), cmd, tty: true, stdin: true, stdout: true, stderr: false };
    let url = exec_url(&pod, request).await;
    let args = ["-via", "spdy", "-stdin=true", "-stdout=true", "-stderr=false", "-tty=true", &url];
    let Some(child) = client("exec", &args) else { return };
    let (output, code) = finish(child, b"tty; exit 3\n").await;
    assert!(output.contains("/dev/pts/"), "{output}");
    assert_eq!(code, Some(3));
    pod.remove(&id).await;
}

async fn runtime_should_support_attach(pod: Pod) {
    let config =
        ContainerConfig { stdin: true, ..shell("attach", "while read line; do echo got $line; done") };
    let id = pod.run(config).await;
    for word in ["one", "two"] {
        let request =
            AttachRequest { container_id: id.clone(), stdin: true, stdout: true, ..AttachRequest::default() };
        let url = pod.kubelet.clone().runtime.attach(request).await.unwrap().into_inner().url;
        let args = ["-via", "spdy", "-stdin=true", "-stdout=true", "-stderr=false", "-tty=false", &url];
        let Some(mut child) = client("exec", &args) else { return };
        let mut stdin = child.stdin.take().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        stdin.write_all(format!("{word}\n").as_bytes()).await.unwrap();
        let line = tokio::time::timeout(DEADLINE, lines.next_line()).await.expect("it answers").unwrap();
        assert_eq!(line, Some(format!("got {word}")));
        drop(stdin);
        child.kill().await.unwrap();
        assert_eq!(pod.status(&id).await.state(), ContainerState::ContainerRunning, "it continues");
    }
    pod.remove(&id).await;
}

async fn attach_closes_input_that_is_for_one_session(pod: Pod) {
    let config =
        ContainerConfig { stdin: true, stdin_once: true, ..shell("once", "cat; echo ended; exit 4") };
    let id = pod.run(config).await;
    let request =
        AttachRequest { container_id: id.clone(), stdin: true, stdout: true, ..AttachRequest::default() };
    let url = pod.kubelet.clone().runtime.attach(request).await.unwrap().into_inner().url;
    let args = ["-via", "spdy", "-stdin=true", "-stdout=true", "-stderr=false", "-tty=false", &url];
    let Some(child) = client("exec", &args) else { return };
    let (output, _) = finish(child, b"hello\n").await;
    assert!(output.starts_with("hello\n"), "{output}");
    let (status, log) = pod.wait_for_exit(&id).await;
    assert_eq!((status.exit_code, log), (4, ["hello", "ended"].map(str::to_owned).to_vec()));
    pod.remove(&id).await;
}

async fn runtime_should_support_port_forward(pod: Pod) {
    let id = pod.run(shell("forward", "exec httpd -f -p 127.0.0.1:80 -h /www")).await;
    for via in ["spdy", "websocket"] {
        let request = PortForwardRequest { pod_sandbox_id: pod.id.clone(), port: vec![80] };
        let url = pod.kubelet.clone().runtime.port_forward(request).await.unwrap().into_inner().url;
        let listens = eventually_within(DEADLINE, "it listens", async || {
            pod.exec(&id, &["netstat", "-ltn"]).await.0.contains("127.0.0.1:80").then_some(())
        });
        listens.await.unwrap();
        let Some(mut child) = client("forward", &["-via", via, &url, "12001:80"]) else { return };
        let page = eventually_within(DEADLINE, "the page", async || {
            let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", 12001)).await.ok()?;
            stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await.ok()?;
            let mut text = String::new();
            stream.read_to_string(&mut text).await.ok()?;
            text.ends_with("hello\n").then_some(())
        });
        page.await.unwrap();
        child.kill().await.unwrap();
    }
    pod.remove(&id).await;
}

async fn streaming_requests_are_validated(pod: Pod) {
    let id = pod.run(shell("valid", "sleep 1000")).await;
    let mut runtime = pod.kubelet.clone().runtime;
    let exec = |change: fn(&mut ExecRequest)| {
        let cmd = vec!["true".to_owned()];
        let mut request =
            ExecRequest { container_id: id.clone(), cmd, stdout: true, ..ExecRequest::default() };
        change(&mut request);
        request
    };
    for (why, request, code) in [
        ("nothing asked for", exec(|r| r.stdout = false), Code::InvalidArgument),
        ("a terminal with stderr", exec(|r| (r.tty, r.stderr) = (true, true)), Code::InvalidArgument),
        ("no command", exec(|r| r.cmd.clear()), Code::InvalidArgument),
        ("no such container", exec(|r| r.container_id = "nowhere".into()), Code::NotFound),
    ] {
        assert_eq!(runtime.exec(request).await.unwrap_err().code(), code, "{why}");
    }
    let url = runtime.exec(exec(|_| ())).await.unwrap().into_inner().url;
    let (address, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
    for (path, want) in [("exec/unknown!", "404"), (path, "400"), (path, "404")] {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = format!("GET /{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        assert!(text.starts_with(&format!("HTTP/1.1 {want}")), "{path}: {text}");
    }
    pod.stop(&id, 0).await;
    let ended = runtime.exec(exec(|_| ())).await.unwrap_err();
    assert_eq!(ended.code(), Code::FailedPrecondition);
    pod.remove(&id).await;
}
