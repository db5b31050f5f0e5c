//! Upload of a file. The bytes go directly to a host that mounts the datastore, with a ticket of vCenter. If that is not
//! possible, they go through vCenter, which passes them to a host of its choice.
//!
//! Sources: "vSphere Web Services API", `SessionManager.AcquireGenericServiceTicket` and
//! `SessionManagerHttpServiceRequestSpec`; "vSphere Web Services SDK Programming Guide", HTTP access to datastore files.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt as _, stream};
use rand::seq::IndexedRandom as _;
use reqwest::{Method, RequestBuilder, Response, header};
use tokio::{sync::Mutex, time::sleep};
use tracing::{debug, info};

use super::{
    files::{datastore_path, url, url_at_host},
    session::{Properties, Session},
    tls,
    xml::text,
};
use crate::{Body, Fault, Object, Site, VsphereError, VsphereMetrics};

/// Cookie that carries a ticket to a host.
const TICKET_COOKIE: &str = "vmware_cgi_ticket";

/// Content of an upload and the number of bytes that were taken from it. As long as none was taken, another server can be
/// tried.
#[derive(Clone)]
struct Source {
    body: Arc<Mutex<Body>>,
    taken: Arc<AtomicU64>,
    metrics: VsphereMetrics,
}

impl Source {
    /// Returns the stream as the body of one request.
    fn stream(&self) -> reqwest::Body {
        let chunks = stream::unfold(self.clone(), |source| async move {
            let chunk = source.body.lock().await.next().await?;
            if let Ok(chunk) = &chunk {
                let bytes = u64::try_from(chunk.len()).unwrap_or(0);
                source.taken.fetch_add(bytes, Ordering::Relaxed);
                source.metrics.record_upload(bytes);
            }
            Some((chunk, source))
        });
        reqwest::Body::wrap_stream(chunks)
    }

    fn is_whole(&self) -> bool {
        self.taken.load(Ordering::Relaxed) == 0
    }
}

/// Uploads `body`. Gives up when no byte was taken for a while.
pub(super) async fn upload(
    session: &Session,
    site: &Site,
    path: &str,
    length: u64,
    body: Body,
) -> Result<(), VsphereError> {
    // A body cannot be sent twice, so make sure of the session first: this call logs in again if the session has ended.
    session.keep_alive().await?;
    let source = Source {
        body: Arc::new(Mutex::new(body)),
        taken: Arc::default(),
        metrics: session.metrics().clone(),
    };
    match ticket(session, site, path).await {
        Ok(Some(ticket)) => {
            let sent = send(session, site, path, length, ticket.request, &source).await;
            match sent {
                Err(error) if source.is_whole() => {
                    let host = &ticket.host;
                    info!(host, %error, "upload to a host failed, it goes through vCenter");
                }
                sent => return sent,
            }
        }
        Ok(None) => debug!(datastore = site.iso.name, "no host for an upload, it goes through vCenter"),
        Err(error) => {
            info!(datastore = site.iso.name, %error, "no ticket for an upload, it goes through vCenter")
        }
    }
    let request = session.request(Method::PUT, &url(site, path)).await;
    send(session, site, path, length, request, &source).await
}

/// Permission to write one file at a host.
struct Ticket {
    host: String,
    request: RequestBuilder,
}

/// Requests a ticket. `None`: no host mounts the datastore for writing.
async fn ticket(session: &Session, site: &Site, path: &str) -> Result<Option<Ticket>, VsphereError> {
    let Some(host) = host(session, &site.iso.object).await? else { return Ok(None) };
    let scheme = session.credentials().url.split("://").next().unwrap_or("https");
    let file = url_at_host(site, path);
    let spec = text("method", "httpPut") + &text("url", format!("{scheme}://{host}{file}"));
    let arguments = format!("<spec xsi:type=\"SessionManagerHttpServiceRequestSpec\">{spec}</spec>");
    let manager = &session.content.session_manager;
    let answer = session.call("AcquireGenericServiceTicket", manager, &arguments).await?;
    let broken = |what: &str| VsphereError::Protocol {
        operation: "AcquireGenericServiceTicket".to_owned(),
        what: what.to_owned(),
    };
    let ticket = answer.get("returnval").ok_or_else(|| broken("no ticket in the answer"))?;
    let named = ticket.text_of("hostName");
    let host = if named.is_empty() { host } else { named.to_owned() };
    // Hosts have their own certificates; vCenter reports their thumbprints.
    let thumbprint = ticket.text_of("sslThumbprint").replace(':', "").to_ascii_lowercase();
    let client = if thumbprint.is_empty() {
        session.client()
    } else {
        let credentials = crate::Credentials { thumbprint, ..session.credentials().clone() };
        tls::client(&credentials, session.options())?
    };
    let request = client
        .put(format!("{scheme}://{host}{file}"))
        .header(header::COOKIE, format!("{TICKET_COOKIE}={}", ticket.text_of("id")));
    Ok(Some(Ticket { host, request }))
}

/// Name of a connected host that mounts the datastore for writing; hosts are used in turn.
async fn host(session: &Session, datastore: &Object) -> Result<Option<String>, VsphereError> {
    let mounts = session.properties(datastore, &["host"]).await?.unwrap_or_default();
    let mounts = mounts.get("host").map(|all| all.children.as_slice()).unwrap_or_default();
    let writable = mounts.iter().filter(|mount| {
        mount.get("mountInfo").is_some_and(|info| {
            info.text_of("accessMode") == "readWrite" && info.text_of("accessible") != "false"
        })
    });
    let hosts: Vec<_> = writable.filter_map(|mount| mount.get("key")?.object()).collect();
    if hosts.is_empty() {
        return Ok(None);
    }
    let states = session.retrieve(&hosts, &["name", "runtime.connectionState"]).await?;
    let is_connected = |p: &Properties| p.text("runtime.connectionState") == "connected";
    let names: Vec<_> = states.iter().filter(|(_, p)| is_connected(p)).map(|(_, p)| p.text("name")).collect();
    Ok(names.choose(&mut rand::rng()).map(|name| (*name).to_owned()))
}

async fn send(
    session: &Session,
    site: &Site,
    path: &str,
    length: u64,
    request: RequestBuilder,
    source: &Source,
) -> Result<(), VsphereError> {
    let operation = || format!("upload to {}", datastore_path(site, path));
    let request = request
        .header(header::CONTENT_LENGTH, length)
        .header(header::CONTENT_TYPE, "application/octet-stream")
        .body(source.stream());
    let response = tokio::select! {
        response = request.send() => response.map_err(|e| session.transport(operation(), e))?,
        () = wait_stalled(&source.taken, session.options().upload_idle) => {
            return Err(VsphereError::Protocol { operation: operation(), what: "no byte was taken for too long".into() });
        }
    };
    check_status(&response, operation())
}

fn check_status(response: &Response, operation: String) -> Result<(), VsphereError> {
    match response.status().as_u16() {
        200 | 201 | 204 => Ok(()),
        401 => Err(VsphereError::task(operation, Fault::of("NotAuthenticated"))),
        307 | 308 => {
            let to =
                response.headers().get(header::LOCATION).and_then(|v| v.to_str().ok()).unwrap_or_default();
            let to = to.split('?').next().unwrap_or_default();
            Err(VsphereError::Protocol { operation, what: format!("it is redirected to {to}") })
        }
        status => Err(VsphereError::Status { operation, status }),
    }
}

/// Returns when the count has not changed for `idle`.
async fn wait_stalled(count: &AtomicU64, idle: Duration) {
    let mut last = u64::MAX;
    loop {
        let now = count.load(Ordering::Relaxed);
        if now == last {
            return;
        }
        last = now;
        sleep(idle).await;
    }
}
