//! Image service: new bytes for every download, one `Last-Modified` per revision, and failures on request.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    task::JoinSet,
};

#[derive(Clone, Debug, Default)]
pub(crate) struct Behaviour {
    pub(crate) status: u16,
    pub(crate) truncate: bool,
    /// Whether ETags distinguish revisions, while the date never changes.
    pub(crate) etag: bool,
    /// Whether the service announces the length of a download, sends a part of it and then nothing more.
    pub(crate) silent: bool,
    pub(crate) revision: u32,
    pub(crate) downloads: usize,
    pub(crate) asked: usize,
}

pub(crate) struct ImageService {
    pub(crate) address: SocketAddr,
    state: Arc<Mutex<Behaviour>>,
    _task: JoinSet<()>,
}

impl ImageService {
    /// Image service that does not listen: in simulations the image is on the datastore already.
    pub(crate) fn absent() -> Self {
        let address = ([127, 0, 0, 1], 9).into();
        Self { address, state: Arc::default(), _task: JoinSet::new() }
    }

    pub(crate) async fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let state = Arc::new(Mutex::new(Behaviour { status: 200, revision: 1, ..Behaviour::default() }));
        let mut task = JoinSet::new();
        let shared = state.clone();
        task.spawn(async move {
            let mut all = JoinSet::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                let state = shared.clone();
                all.spawn(async move {
                    let mut request = Vec::new();
                    let mut buffer = [0; 2048];
                    while !request.windows(4).any(|w| w == b"\r\n\r\n") {
                        match stream.read(&mut buffer).await {
                            Ok(0) | Err(_) => return,
                            Ok(n) => request.extend_from_slice(&buffer[..n]),
                        }
                    }
                    let request = String::from_utf8_lossy(&request).to_lowercase();
                    let answer = answer(&state, &request);
                    let _ = stream.write_all(&answer).await;
                    if state.lock().unwrap().silent {
                        std::future::pending::<()>().await;
                    }
                    let _ = stream.shutdown().await;
                });
            }
        });
        Ok(Self { address, state, _task: task })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/images/1/full.iso?api_key=SECRET-TOKEN", self.address)
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.state.lock().unwrap());
    }

    pub(crate) fn seen(&self) -> Behaviour {
        self.state.lock().unwrap().clone()
    }
}

fn answer(state: &Mutex<Behaviour>, request: &str) -> Vec<u8> {
    let mut state = state.lock().unwrap();
    state.asked += 1;
    let second = if state.etag { 0 } else { state.revision };
    let modified = format!("Mon, 01 Jun 2026 10:00:{second:02} GMT");
    let tag = format!("\"revision-{}\"", state.revision);
    if state.status != 200 {
        return format!("HTTP/1.1 {} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", state.status)
            .into_bytes();
    }
    let is_same = match (state.etag, request.contains("if-none-match:")) {
        // RFC 9110: with If-None-Match, the date is ignored.
        (true, true) => request.contains(&format!("if-none-match: {tag}")),
        _ => request.contains(&format!("if-modified-since: {}", modified.to_lowercase())),
    };
    if is_same {
        return b"HTTP/1.1 304 Not Modified\r\nConnection: close\r\n\r\n".to_vec();
    }
    state.downloads += 1;
    // The service puts a new token into each download.
    let body = format!("revision {} download {}", state.revision, state.downloads).repeat(1000);
    let sent = if state.truncate || state.silent { &body[..body.len() / 2] } else { &body };
    let etag = if state.etag { format!("ETag: {tag}\r\n") } else { String::new() };
    format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nLast-Modified: {modified}\r\n{etag}Connection: close\r\n\r\n{sent}",
        body.len()
    )
    .into_bytes()
}
