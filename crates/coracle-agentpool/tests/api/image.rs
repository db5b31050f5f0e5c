//! An image service: fresh bytes at every download, one `Last-Modified` a revision, and failures on request.

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
                    let _ = stream.shutdown().await;
                });
            }
        });
        Ok(Self { address, state, _task: task })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/images/1/full.iso?api_key=TOKEN-THAT-NOBODY-MAY-SEE", self.address)
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
    let modified = format!("Mon, 01 Jun 2026 10:00:{:02} GMT", state.revision);
    if state.status != 200 {
        return format!("HTTP/1.1 {} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", state.status)
            .into_bytes();
    }
    if request.contains(&format!("if-modified-since: {}", modified.to_lowercase())) {
        return b"HTTP/1.1 304 Not Modified\r\nConnection: close\r\n\r\n".to_vec();
    }
    state.downloads += 1;
    // The service puts a fresh token into each download.
    let body = format!("revision {} download {}", state.revision, state.downloads).repeat(1000);
    let sent = if state.truncate { &body[..body.len() / 2] } else { &body };
    format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nLast-Modified: {modified}\r\nConnection: close\r\n\r\n{sent}",
        body.len()
    )
    .into_bytes()
}
