//! Test server whose sessions and ports are functions of this process.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, RawQuery, Request, State};
use axum::response::Response;
use axum::routing::any;
use coracle_streaming::{
    Connection, Dial, Limits, RunSession, Session, SessionOutcome, Streams, Tasks, serve_port_forward,
    serve_session,
};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, duplex};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Time limit of any exchange in a test.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);
/// A write that takes longer counts as blocked.
const BLOCKED: Duration = Duration::from_millis(300);

/// Recorded activity of sessions and connections.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Number of running sessions.
    pub(crate) running: AtomicUsize,
    /// Bytes that `flood` has written, and whether it is blocked.
    pub(crate) flooded: AtomicU64,
    pub(crate) blocked: AtomicUsize,
    /// Lines and sizes that a blocked session received.
    pub(crate) got: parking_lot::Mutex<Vec<String>>,
    /// Number of open connections.
    pub(crate) connections: Arc<AtomicUsize>,
}

/// Server on the loopback address.
pub(crate) struct Served {
    pub(crate) address: SocketAddr,
    pub(crate) seen: Arc<Seen>,
    pub(crate) tasks: Tasks,
    _server: JoinSet<()>,
}

#[derive(Clone)]
struct Shared {
    seen: Arc<Seen>,
    tasks: Tasks,
    limits: Limits,
}

impl Served {
    pub(crate) async fn new() -> Self {
        Self::with_limits(Limits::default()).await
    }

    pub(crate) async fn with_limits(limits: Limits) -> Self {
        let (seen, tasks) = (Arc::new(Seen::default()), Tasks::default());
        let router = Router::new()
            .route("/exec/{program}", any(exec))
            .route("/portforward", any(forward))
            .with_state(Shared { seen: Arc::clone(&seen), tasks: tasks.clone(), limits });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut server = JoinSet::new();
        server.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, seen, tasks, _server: server }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

/// Handles `/exec/PROGRAM?STREAM&STREAM` with the streams that the server decides on; a real server gets them from elsewhere.
async fn exec(
    State(shared): State<Shared>,
    Path(program): Path<String>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Response {
    let query = query.unwrap_or_default();
    let has = |name: &str| query.split('&').any(|part| part == name);
    let streams =
        Streams { stdin: has("stdin"), stdout: has("stdout"), stderr: has("stderr"), tty: has("tty") };
    let run = Box::new(Program { name: program, seen: shared.seen });
    serve_session(request, streams, run, &shared.limits, &shared.tasks).map(axum::body::Body::new)
}

async fn forward(State(shared): State<Shared>, RawQuery(query): RawQuery, request: Request) -> Response {
    let query = query.unwrap_or_default();
    let ports: Vec<u16> =
        query.split('&').filter_map(|part| part.strip_prefix("port=")?.parse().ok()).collect();
    let dial =
        Arc::new(Ports { open: Arc::clone(&shared.seen.connections), tasks: parking_lot::Mutex::default() });
    serve_port_forward(request, &ports, dial, &shared.limits, &shared.tasks).map(axum::body::Body::new)
}

/// Counts as one while it lives.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Simulated process by name: `cat`, `count`, `exit-N`, `fail`, `zeros-N`, `sizes-N`, `hang`, `flood`.
struct Program {
    name: String,
    seen: Arc<Seen>,
}

#[async_trait::async_trait]
impl RunSession for Program {
    async fn run(self: Box<Self>, mut session: Session) -> SessionOutcome {
        let _running = Counted::new(&self.seen.running);
        let (program, number) = self.name.split_once('-').unwrap_or((&self.name, "0"));
        let number: u64 = number.parse().unwrap();
        match program {
            "cat" => {
                let (mut stdin, mut stdout) = (session.stdin.unwrap(), session.stdout.unwrap());
                tokio::io::copy(&mut stdin, &mut stdout).await.unwrap();
            }
            "count" => {
                let read =
                    tokio::io::copy(&mut session.stdin.unwrap(), &mut tokio::io::sink()).await.unwrap();
                session.stdout.unwrap().write_all(read.to_string().as_bytes()).await.unwrap();
            }
            "exit" => {
                if let Some(mut stdout) = session.stdout {
                    stdout.write_all(b"out").await.unwrap();
                }
                if let Some(mut stderr) = session.stderr {
                    stderr.write_all(b"err").await.unwrap();
                }
                return SessionOutcome::Exited(i32::try_from(number).unwrap());
            }
            "fail" => return SessionOutcome::Failed("container not found".to_owned()),
            "zeros" => {
                let mut zeros = tokio::io::repeat(0).take(number);
                tokio::io::copy(&mut zeros, &mut session.stdout.unwrap()).await.unwrap();
            }
            "sizes" => {
                let mut stdout = session.stdout.unwrap();
                for _ in 0..number {
                    let size = session.resize.recv().await.unwrap();
                    stdout.write_all(format!("{}x{}\n", size.columns, size.rows).as_bytes()).await.unwrap();
                }
            }
            "hang" => std::future::pending().await,
            "flood" => flood(session, &self.seen).await,
            other => return SessionOutcome::Failed(format!("program {other:?} not found")),
        }
        SessionOutcome::Exited(0)
    }
}

/// Writes until it is blocked, then reads a line and a size, then writes the rest.
async fn flood(session: Session, seen: &Seen) {
    let Session { stdin, stdout, mut resize, .. } = session;
    let (mut stdin, mut stdout) = (BufReader::new(stdin.unwrap()), stdout.unwrap());
    loop {
        let Ok(written) = timeout(BLOCKED, stdout.write(&[b'x'; 1024])).await else { break };
        seen.flooded.fetch_add(written.unwrap() as u64, Ordering::SeqCst);
    }
    seen.blocked.fetch_add(1, Ordering::SeqCst);
    let mut line = String::new();
    stdin.read_line(&mut line).await.unwrap();
    let size = resize.recv().await.unwrap();
    seen.got.lock().extend([line, format!("{}x{}", size.columns, size.rows)]);
    stdout.write_all(b"end").await.unwrap();
}

/// Simulated ports: 7 echoes, 8 counts its input and answers at its end, 9 sends "hello" and closes; all others refuse.
struct Ports {
    open: Arc<AtomicUsize>,
    tasks: parking_lot::Mutex<JoinSet<()>>,
}

#[async_trait::async_trait]
impl Dial for Ports {
    async fn dial(&self, port: u16) -> Result<Connection, String> {
        if !(7..=9).contains(&port) {
            return Err("connection refused".to_owned());
        }
        let (near, far) = duplex(64 << 10);
        let open = Arc::clone(&self.open);
        self.tasks.lock().spawn(async move {
            let _open = Counted::new(&open);
            let (mut read, mut write) = tokio::io::split(far);
            // The connection ends when its reader is gone.
            let _either = match port {
                7 => tokio::io::copy(&mut read, &mut write).await.map(drop),
                8 => match tokio::io::copy(&mut read, &mut tokio::io::sink()).await {
                    Ok(length) => write.write_all(length.to_string().as_bytes()).await,
                    Err(error) => Err(error),
                },
                _ => write.write_all(b"hello").await,
            };
            let _either = write.shutdown().await;
        });
        Ok(Box::new(near))
    }
}
