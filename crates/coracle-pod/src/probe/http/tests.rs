use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::*;

const LIMIT: Duration = Duration::from_secs(10);

/// Server that returns a fixed response for each path and records the requests. Dropping it stops it.
struct Server {
    port: u16,
    requests: Arc<Mutex<Vec<String>>>,
    _task: JoinSet<()>,
}

impl Server {
    async fn start(answer: fn(&str, u16) -> String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests: Arc<Mutex<Vec<String>>> = Arc::default();
        let mut task = JoinSet::new();
        let seen = Arc::clone(&requests);
        task.spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut bytes = vec![0; 8192];
                let read = stream.read(&mut bytes).await.unwrap_or(0);
                let text = String::from_utf8_lossy(&bytes[..read]).into_owned();
                let path = text.split(' ').nth(1).unwrap_or_default().to_owned();
                seen.lock().push(text);
                let _client_gone = stream.write_all(answer(&path, port).as_bytes()).await;
            }
        });
        Self { port, requests, _task: task }
    }

    async fn get(&self, path: &str, headers: &[(&str, &str)]) -> ProbeOutcome {
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let request = HttpRequest {
            scheme: "http",
            host: "127.0.0.1".into(),
            port: self.port,
            path: path.into(),
            headers: headers.iter().map(own).collect(),
        };
        get(&request, LIMIT).await
    }
}

fn answer(path: &str, port: u16) -> String {
    let reply = |status: &str, extra: &str, body: &str| {
        format!(
            "HTTP/1.1 {status}\r\n{extra}Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
    };
    match path {
        "/ok" => reply("200 OK", "", "fine"),
        "/down" => reply("503 Service Unavailable", "", "no\x1bdatabase"),
        "/moved" => reply("302 Found", "Location: /ok\r\n", ""),
        "/away" => reply("302 Found", "Location: http://example.invalid/\r\n", ""),
        "/loop" => reply("302 Found", &format!("Location: http://127.0.0.1:{port}/loop\r\n"), ""),
        "/silent" => String::new(),
        _ => reply("404 Not Found", "", ""),
    }
}

#[tokio::test]
async fn http_responses_map_to_probe_outcomes() {
    let server = Server::start(answer).await;
    for (path, want) in [
        ("/ok", ProbeOutcome::Success),
        ("/moved", ProbeOutcome::Success),
        ("/away", ProbeOutcome::Warning("redirect to another host was not followed: status 302".into())),
        ("/down", ProbeOutcome::Failure("HTTP probe failed with status 503: no database".into())),
        ("/none", ProbeOutcome::Failure("HTTP probe failed with status 404".into())),
    ] {
        assert_eq!(server.get(path, &[]).await, want, "{path}");
    }
    for path in ["/loop", "/silent"] {
        let outcome = server.get(path, &[]).await;
        assert!(matches!(outcome, ProbeOutcome::Failure(_)), "{path}: {outcome:?}");
    }
    let loops = server.requests.lock().iter().filter(|request| request.starts_with("GET /loop")).count();
    assert_eq!(loops, 11, "one request and ten redirects");
}

#[tokio::test]
async fn probe_headers_match_the_kubelet_unless_overridden() {
    let server = Server::start(answer).await;
    server.get("/ok", &[]).await;
    let own = [("Host", "example.org"), ("User-Agent", "mine"), ("Accept", ""), ("X-A", "1"), ("X-A", "2")];
    server.get("/ok", &own).await;
    let requests = server.requests.lock().clone();
    let plain = requests[0].to_lowercase();
    assert!(
        plain.contains("user-agent: kube-probe/1.36\r\n") && plain.contains("accept: */*\r\n"),
        "{plain}"
    );
    let own = requests[1].to_lowercase();
    assert!(own.contains("host: example.org\r\n") && own.contains("user-agent: mine\r\n"), "{own}");
    assert!(own.contains("x-a: 1\r\n") && own.contains("x-a: 2\r\n"), "{own}");
    let broken = server.get("/ok", &[("X A", "1")]).await;
    assert!(matches!(broken, ProbeOutcome::Unknown(_)), "{broken:?}");
}

#[tokio::test]
async fn closed_port_is_a_failure() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let request =
        HttpRequest { scheme: "http", host: "127.0.0.1".into(), port, path: "/".into(), headers: vec![] };
    assert!(matches!(get(&request, LIMIT).await, ProbeOutcome::Failure(_)));
}

#[test]
fn request_takes_scheme_host_and_port_from_the_spec() {
    let container =
        serde_json::from_value(json!({"name": "c", "ports": [{"name": "web", "containerPort": 8080}]}))
            .unwrap();
    for (get, want) in [
        (json!({"port": "web"}), Ok("http://10.1.0.9:8080/")),
        (json!({"port": 443, "scheme": "HTTPS", "path": "/x?y=1"}), Ok("https://10.1.0.9:443/x?y=1")),
        (json!({"port": 1, "host": "::1", "path": "x"}), Ok("http://[::1]:1/x")),
        (json!({"port": 1, "scheme": "ftp"}), Err("invalid scheme \"FTP\": HTTP or HTTPS")),
        (json!({"port": 0}), Err("invalid port \"0\": the container has no such port")),
    ] {
        let action = serde_json::from_value(get.clone()).unwrap();
        let got = request(&action, &container, "10.1.0.9").map(|request| url(&request));
        assert_eq!(got.as_deref().map_err(String::as_str), want, "{get}");
    }
}
