//! SOAP vCenter with scripted answers, for behaviour that the simulator lacks: properties that cannot be read, tasks whose end
//! is never reported, servers that accept a connection and do not answer. It counts calls, including logins.
//!
//! The answers follow VMware's API reference ("vSphere Web Services API"); nothing here was recorded from a vCenter.

use std::{
    collections::BTreeMap,
    fmt, io,
    net::SocketAddr,
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::sleep,
};

/// Longest request that is read, bytes.
const REQUEST_MAX: usize = 1 << 20;
/// Time after which a long poll without updates ends.
const POLL: Duration = Duration::from_millis(200);

/// Received call.
#[derive(Clone, Debug)]
pub struct ScriptedCall {
    /// SOAP method, or else the HTTP method and path, such as `POST /api/session`.
    pub method: String,
    /// Head of the request: its first line and headers.
    pub head: String,
    /// Body of the request.
    pub body: String,
}

/// Scripted answer.
#[derive(Clone, Debug)]
pub enum ScriptedReply {
    /// Child elements of the response, such as `<returnval>…</returnval>`.
    Xml(String),
    /// Fault of the type, with child elements.
    Fault(&'static str, String),
    /// HTTP status and JSON body.
    Http(u16, String),
    /// No answer; the connection stays open.
    Silence,
}

type Script = dyn Fn(&ScriptedCall) -> Option<ScriptedReply> + Send + Sync;

struct Shared {
    calls: Mutex<BTreeMap<String, usize>>,
    script: Box<Script>,
}

/// Scripted server. Dropping it stops it.
pub struct ScriptedVcenter {
    address: SocketAddr,
    shared: Arc<Shared>,
    _task: JoinSet<()>,
}

impl fmt::Debug for ScriptedVcenter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptedVcenter").field("address", &self.address).finish_non_exhaustive()
    }
}

impl ScriptedVcenter {
    /// Listens on loopback. `script` answers calls; where it returns `None`, the answer is that of an empty vCenter.
    ///
    /// # Errors
    /// When no port can be opened.
    pub async fn start(
        script: impl Fn(&ScriptedCall) -> Option<ScriptedReply> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared { calls: Mutex::default(), script: Box::new(script) });
        let weak = Arc::downgrade(&shared);
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut all = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                all.spawn(serve(stream, weak.clone()));
            }
        });
        Ok(Self { address, shared, _task: task })
    }

    /// `http://127.0.0.1:PORT/sdk`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}/sdk", self.address)
    }

    /// Address on which the server listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Number of calls of a method.
    #[must_use]
    pub fn count(&self, method: &str) -> usize {
        self.shared.calls.lock().get(method).copied().unwrap_or_default()
    }
}

/// Serves the requests of one connection.
async fn serve(mut stream: TcpStream, shared: Weak<Shared>) {
    let mut read = Vec::new();
    while let Some(call) = request(&mut stream, &mut read).await {
        let Some(shared) = shared.upgrade() else { return };
        *shared.calls.lock().entry(call.method.clone()).or_default() += 1;
        let reply = (shared.script)(&call).unwrap_or_else(|| default(&call.method));
        drop(shared);
        if matches!(reply, ScriptedReply::Silence) {
            return std::future::pending().await;
        }
        if call.method == "WaitForUpdatesEx" && matches!(&reply, ScriptedReply::Xml(xml) if xml.is_empty()) {
            sleep(POLL).await;
        }
        if stream.write_all(text(&call.method, &reply).as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Reads the next request. `None`: the connection ended.
async fn request(stream: &mut TcpStream, read: &mut Vec<u8>) -> Option<ScriptedCall> {
    loop {
        if let Some(end) = read.windows(4).position(|w| w == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&read[..end]).into_owned();
            let length = head.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
            });
            let whole = end + 4 + length.unwrap_or(0);
            if read.len() >= whole {
                let body = String::from_utf8_lossy(&read[end + 4..whole]).into_owned();
                read.drain(..whole);
                return Some(ScriptedCall { method: method(&head, &body), head, body });
            }
        }
        let mut buffer = [0; 8192];
        match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => return None,
            Ok(n) if read.len() + n <= REQUEST_MAX => read.extend_from_slice(&buffer[..n]),
            Ok(_) => return None,
        }
    }
}

fn method(head: &str, body: &str) -> String {
    let named = body.split_once("Body>").and_then(|(_, rest)| rest.trim_start().strip_prefix('<'));
    match named {
        Some(rest) => rest.split([' ', '>', '/']).next().unwrap_or_default().to_owned(),
        None => head.split_whitespace().take(2).collect::<Vec<_>>().join(" "),
    }
}

/// Answer of an empty vCenter.
fn default(method: &str) -> ScriptedReply {
    let object = |kind: &str, id: &str| format!("<returnval type=\"{kind}\">{id}</returnval>");
    ScriptedReply::Xml(match method {
        "RetrieveServiceContent" => content(),
        "CreatePropertyCollector" => object("PropertyCollector", "pc-1"),
        "CreateContainerView" => object("ContainerView", "view-1"),
        "CreateListView" => object("ListView", "list-1"),
        "CreateFilter" => object("PropertyFilter", "filter-1"),
        _ => String::new(),
    })
}

fn content() -> String {
    let managers = [
        ("rootFolder", "Folder", "group-d1"),
        ("propertyCollector", "PropertyCollector", "propertyCollector"),
        ("viewManager", "ViewManager", "ViewManager"),
    ];
    let after = [
        ("sessionManager", "SessionManager", "SessionManager"),
        ("fileManager", "FileManager", "FileManager"),
        ("searchIndex", "SearchIndex", "SearchIndex"),
        ("storageResourceManager", "StorageResourceManager", "StorageResourceManager"),
    ];
    let one = |(name, kind, id): &(&str, &str, &str)| format!("<{name} type=\"{kind}\">{id}</{name}>");
    let about = "<about><apiVersion>8.0.0.1</apiVersion><instanceUuid>scripted</instanceUuid></about>";
    let all: Vec<_> =
        managers.iter().map(one).chain([about.to_owned()]).chain(after.iter().map(one)).collect();
    format!("<returnval>{}</returnval>", all.concat())
}

/// Complete HTTP response.
fn text(method: &str, reply: &ScriptedReply) -> String {
    let envelope = |body: String| {
        format!(
            "<soapenv:Envelope xmlns:soapenv=\"http://schemas.xmlsoap.org/soap/envelope/\" \
             xmlns:xsi=\"http://www.w3.org/2001/XMLSchema-instance\"><soapenv:Body>{body}</soapenv:Body></soapenv:Envelope>"
        )
    };
    let (status, body) = match reply {
        ScriptedReply::Xml(inner) => {
            (200, envelope(format!("<{method}Response xmlns=\"urn:vim25\">{inner}</{method}Response>")))
        }
        ScriptedReply::Fault(kind, inner) => (
            500,
            envelope(format!(
                "<soapenv:Fault><faultcode>ServerFaultCode</faultcode><faultstring></faultstring><detail>\
                 <{kind}Fault xmlns=\"urn:vim25\" xsi:type=\"{kind}\">{inner}</{kind}Fault></detail></soapenv:Fault>"
            )),
        ),
        ScriptedReply::Http(status, body) => (*status, body.clone()),
        ScriptedReply::Silence => (204, String::new()),
    };
    let cookie = if method == "Login" { "Set-Cookie: vmware_soap_session=\"s-1\"; Path=/\r\n" } else { "" };
    format!("HTTP/1.1 {status} X\r\n{cookie}Content-Length: {}\r\n\r\n{body}", body.len())
}
