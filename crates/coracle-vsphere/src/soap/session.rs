//! SOAP session over HTTPS with a cookie; logs in again when the session has ended.

use std::{
    fmt,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use reqwest::{Client, Method, RequestBuilder, Response, header};
use tokio::{
    sync::{RwLock, Semaphore},
    time::{Instant, sleep, timeout},
};
use tracing::{debug, info, warn};

use super::{
    options::SoapOptions,
    tls,
    xml::{Node, envelope, fault_of, parse, reference, text},
};
use crate::{Credentials, FaultClass, Object, TaskId, VsphereError, VsphereMetrics};

/// Interval of the warnings about a call that has no answer yet.
const SLOW: Duration = Duration::from_secs(10);
/// Longest answer that is read, in bytes.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Newest API version that is requested. Requests to an older server use the server's version.
const API_VERSION_MAX: &str = "8.0.0.1";

/// Service content: the managers of the server, its API version and id.
#[derive(Clone, Debug)]
pub(super) struct Content {
    pub(super) property_collector: Object,
    pub(super) view_manager: Object,
    pub(super) session_manager: Object,
    pub(super) search_index: Object,
    pub(super) file_manager: Object,
    pub(super) storage_manager: Object,
    /// Task manager. Every vCenter has one; only calls that need it depend on it.
    pub(super) task_manager: Option<Object>,
    pub(super) api_version: String,
    pub(super) instance: String,
}

/// Logged-in session. Clones of the `Arc` share it.
pub(super) struct Session {
    http: Client,
    credentials: Credentials,
    pub(super) content: Content,
    options: SoapOptions,
    metrics: VsphereMetrics,
    places: Semaphore,
    /// Session cookie. A login holds the lock, so that concurrent callers log in only once.
    cookie: RwLock<Arc<str>>,
    /// Number of logins, so that a caller can detect that another caller logged in after its call.
    logins: AtomicU64,
    refused: Mutex<Option<Instant>>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("server", &self.credentials.server()).finish_non_exhaustive()
    }
}

impl Session {
    /// Connects and logs in.
    pub(super) async fn open(
        credentials: &Credentials,
        options: SoapOptions,
        metrics: VsphereMetrics,
    ) -> Result<Self, VsphereError> {
        let http = tls::client(credentials, &options)?;
        let mut session = Self {
            http,
            credentials: credentials.clone(),
            content: Content::unknown(),
            places: Semaphore::new(options.calls_max),
            options,
            metrics,
            cookie: RwLock::new("".into()),
            logins: AtomicU64::new(0),
            refused: Mutex::default(),
        };
        let instance = Object::new("ServiceInstance", "ServiceInstance");
        let answer = session.call_once("RetrieveServiceContent", &instance, "", session.options.call).await?;
        session.content = Content::read(&answer)?;
        session.login(0).await?;
        session.metrics.session(true);
        Ok(session)
    }

    /// Host and port of the server.
    pub(super) fn server(&self) -> &str {
        self.credentials.server()
    }

    /// Calls `method` of `this`; logs in again, once, when the session has ended. The result holds the answer's `returnval`s as
    /// its children.
    pub(super) async fn call(
        &self,
        method: &'static str,
        this: &Object,
        arguments: &str,
    ) -> Result<Node, VsphereError> {
        let Ok(place) = timeout(self.options.call, self.places.acquire()).await else {
            let what = "other calls are not answered, and no more are made at once".into();
            return Err(VsphereError::Protocol { operation: format!("{method} of {}", this.id), what });
        };
        let _place = place.map_err(|_| VsphereError::Closed)?;
        self.call_unbounded(method, this, arguments, self.options.call).await
    }

    /// Like [`Self::call`], but exempt from the limit on concurrent calls and with its own deadline: for calls that only wait.
    pub(super) async fn call_unbounded(
        &self,
        method: &'static str,
        this: &Object,
        arguments: &str,
        deadline: Duration,
    ) -> Result<Node, VsphereError> {
        let seen = self.logins.load(Ordering::Acquire);
        match self.call_once(method, this, arguments, deadline).await {
            // The server did nothing, so repeating any call is safe.
            Err(error) if error.fault() == Some("NotAuthenticated") => {
                self.login(seen).await?;
                self.call_once(method, this, arguments, deadline).await
            }
            other => other,
        }
    }

    async fn call_once(
        &self,
        method: &'static str,
        this: &Object,
        arguments: &str,
        deadline: Duration,
    ) -> Result<Node, VsphereError> {
        let began = Instant::now();
        let cookie = self.cookie.read().await.clone();
        let mut answer = pin!(self.post(method, this, arguments, &cookie, deadline));
        let result = loop {
            tokio::select! {
                result = &mut answer => break result.map(|(node, _)| node),
                // Long polls have longer deadlines than calls.
                () = sleep(SLOW), if deadline <= self.options.call => {
                    let waited = began.elapsed();
                    warn!(server = self.server(), method, object = this.id, ?waited, "vCenter does not answer a call");
                }
            }
        };
        self.metrics.record_call(method, result.is_ok(), began.elapsed());
        debug!(method, object = this.id, ok = result.is_ok(), "vCenter call");
        result
    }

    /// One HTTP exchange. Returns the first element of the body, and the cookie.
    async fn post(
        &self,
        method: &'static str,
        this: &Object,
        arguments: &str,
        cookie: &str,
        deadline: Duration,
    ) -> Result<(Node, Option<String>), VsphereError> {
        let operation = || format!("{method} of {}", this.id);
        let request = self
            .http
            .post(&self.credentials.url)
            .timeout(deadline)
            .header(header::CONTENT_TYPE, "text/xml; charset=\"utf-8\"")
            .header("SOAPAction", format!("urn:vim25/{}", self.content.api_version))
            .header(header::COOKIE, cookie)
            .body(envelope(method, this, arguments));
        let response = request.send().await.map_err(|e| self.transport(operation(), e))?;
        let status = response.status();
        let set = response.headers().get(header::SET_COOKIE).and_then(|v| v.to_str().ok());
        let set = set.and_then(|v| v.split(';').next()).map(str::to_owned);
        if !status.is_success() && status.as_u16() != 500 {
            return Err(VsphereError::Status { operation: operation(), status: status.as_u16() });
        }
        let text = self.body(response, &operation).await?;
        let broken = |what: String| VsphereError::Protocol { operation: operation(), what };
        let document = parse(&text).map_err(broken)?;
        let body = document.get("Body").ok_or_else(|| broken("no Body in the answer".into()))?;
        if let Some(fault) = fault_of(body) {
            return Err(VsphereError::Fault { operation: operation(), fault });
        }
        let answer = body.children.first().cloned().ok_or_else(|| broken("an empty Body".into()))?;
        Ok((answer, set))
    }

    async fn body(
        &self,
        mut response: Response,
        operation: &impl Fn() -> String,
    ) -> Result<String, VsphereError> {
        let mut bytes = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|e| self.transport(operation(), e))? {
            if bytes.len() + chunk.len() > ANSWER_BYTES_MAX {
                let what = format!("the answer has more than {ANSWER_BYTES_MAX} bytes");
                return Err(VsphereError::Protocol { operation: operation(), what });
            }
            bytes.extend_from_slice(&chunk);
        }
        String::from_utf8(bytes)
            .map_err(|_| VsphereError::Protocol { operation: operation(), what: "not UTF-8".into() })
    }

    /// Logs in, unless another caller has logged in since login number `seen`.
    async fn login(&self, seen: u64) -> Result<(), VsphereError> {
        let mut cookie = self.cookie.write().await;
        if self.logins.load(Ordering::Acquire) != seen {
            return Ok(());
        }
        let held = |at: &Instant| at.elapsed() < self.options.auth_hold;
        if self.refused.lock().as_ref().is_some_and(held) {
            return Err(VsphereError::LoginHeld { server: self.server().to_owned() });
        }
        let began = Instant::now();
        let arguments = text("userName", &self.credentials.username)
            + &text("password", self.credentials.password.reveal());
        let manager = &self.content.session_manager;
        let result = self.post("Login", manager, &arguments, "", self.options.call).await;
        self.metrics.record_call("Login", result.is_ok(), began.elapsed());
        match result {
            Ok((_, set)) => {
                *cookie = set.unwrap_or_default().into();
                self.logins.fetch_add(1, Ordering::Release);
                info!(server = self.server(), "logged in");
                Ok(())
            }
            Err(error) => {
                if error.class() == FaultClass::Auth {
                    let mut refused = self.refused.lock();
                    *refused = Some(Instant::now());
                }
                Err(error)
            }
        }
    }

    /// Ends the session, best effort.
    pub(super) async fn logout(&self) {
        self.places.close();
        let manager = &self.content.session_manager;
        let _ended = self.call_once("Logout", manager, "", Duration::from_secs(5)).await;
        self.metrics.session(false);
    }

    /// Makes a call that keeps an idle session open.
    pub(super) async fn keep_alive(&self) -> Result<(), VsphereError> {
        let instance = Object::new("ServiceInstance", "ServiceInstance");
        self.call("CurrentTime", &instance, "").await.map(drop)
    }

    /// Reads properties of one object. `None`: the object no longer exists.
    pub(super) async fn properties(
        &self,
        object: &Object,
        paths: &[&str],
    ) -> Result<Option<Properties>, VsphereError> {
        let found = self.retrieve(std::slice::from_ref(object), paths).await;
        match found {
            Ok(mut all) => Ok(all.pop().map(|(_, properties)| properties)),
            Err(error) if error.fault() == Some("ManagedObjectNotFound") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads the same properties of several objects, with one call for each type.
    pub(super) async fn retrieve(
        &self,
        objects: &[Object],
        paths: &[&str],
    ) -> Result<Vec<(Object, Properties)>, VsphereError> {
        let mut all = Vec::new();
        let mut kinds: Vec<_> = objects.iter().map(|o| o.kind.clone()).collect();
        kinds.sort();
        kinds.dedup();
        for kind in kinds {
            let paths: String = paths.iter().map(|p| text("pathSet", p)).collect();
            let set = super::xml::el("propSet", text("type", &kind) + &paths);
            let ours = objects.iter().filter(|o| o.kind == kind);
            let list: String = ours.map(|o| super::xml::el("objectSet", reference("obj", o))).collect();
            let arguments = super::xml::el("specSet", set + &list) + "<options/>";
            let mut answer =
                self.call("RetrievePropertiesEx", &self.content.property_collector, &arguments).await?;
            while let Some(page) = answer.get("returnval") {
                all.extend(page.all("objects").filter_map(read_object));
                for object in page.all("objects") {
                    check_missing_set(object)?;
                }
                let token = page.text_of("token").to_owned();
                if token.is_empty() {
                    break;
                }
                let next = text("token", token);
                let collector = &self.content.property_collector;
                answer = self.call("ContinueRetrievePropertiesEx", collector, &next).await?;
            }
        }
        Ok(all)
    }

    /// Calls a method that returns a task.
    pub(super) async fn start_task(
        &self,
        method: &'static str,
        this: &Object,
        arguments: &str,
    ) -> Result<TaskId, VsphereError> {
        let answer = self.call(method, this, arguments).await?;
        let task = answer.get("returnval").and_then(Node::object);
        task.map(|t| TaskId(t.id)).ok_or_else(|| VsphereError::Protocol {
            operation: format!("{method} of {}", this.id),
            what: "no task in the answer".into(),
        })
    }

    /// Builds a request to another path of the same server, with the cookie.
    pub(super) async fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let base = self.credentials.url.rsplit_once('/').map_or("", |(base, _)| base);
        let cookie = self.cookie.read().await.clone();
        self.http.request(method, format!("{base}{path}")).header(header::COOKIE, &*cookie)
    }

    /// HTTP client of the session, without the cookie.
    pub(super) fn client(&self) -> Client {
        self.http.clone()
    }

    /// Credentials, for services that do not use SOAP.
    pub(super) fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    pub(super) fn transport(&self, operation: String, source: reqwest::Error) -> VsphereError {
        let server = self.server().to_owned();
        // URLs of images and uploads must not be logged.
        VsphereError::Transport { operation, server, source: Box::new(source.without_url()) }
    }

    pub(super) fn metrics(&self) -> &VsphereMetrics {
        &self.metrics
    }

    pub(super) fn options(&self) -> &SoapOptions {
        &self.options
    }
}

/// Properties of one object, by name.
#[derive(Clone, Debug, Default)]
pub(super) struct Properties(std::collections::HashMap<String, Node>);

impl Properties {
    pub(super) fn from_pairs(pairs: impl Iterator<Item = (String, Node)>) -> Self {
        Self(pairs.collect())
    }

    pub(super) fn get(&self, name: &str) -> Option<&Node> {
        self.0.get(name)
    }

    pub(super) fn text(&self, name: &str) -> &str {
        self.get(name).map_or("", |n| n.text.as_str())
    }

    pub(super) fn object(&self, name: &str) -> Option<Object> {
        self.get(name)?.object()
    }

    /// Value of a property that is a list of references.
    pub(super) fn objects(&self, name: &str) -> Vec<Object> {
        self.get(name).map(|n| n.children.iter().filter_map(Node::object).collect()).unwrap_or_default()
    }
}

/// Returns an error that names a property which the user may not read, because an empty value would have another meaning. Other
/// properties are missing because the object does not have them at present.
fn check_missing_set(node: &Node) -> Result<(), VsphereError> {
    let missing = node.all("missingSet").map(|m| (m.text_of("path"), task_fault_of(m)));
    let mut refused =
        missing.filter(|(_, fault)| matches!(fault.kind.as_str(), "NoPermission" | "NotAuthenticated"));
    let Some((property, fault)) = refused.next() else { return Ok(()) };
    let object = node.get("obj").and_then(Node::object).map(|o| format!("{} {}", o.kind, o.id));
    let (object, property) = (object.unwrap_or_default(), property.to_owned());
    Err(VsphereError::Unreadable { object, property, fault })
}

/// Fault that is reported for a missing property.
fn task_fault_of(missing: &Node) -> crate::Fault {
    missing.get("fault").map(super::xml::task_fault).unwrap_or_default()
}

fn read_object(node: &Node) -> Option<(Object, Properties)> {
    let object = node.get("obj")?.object()?;
    let pairs =
        node.all("propSet").filter_map(|p| Some((p.text_of("name").to_owned(), p.get("val")?.clone())));
    Some((object, Properties::from_pairs(pairs)))
}

impl Content {
    fn unknown() -> Self {
        let none = Object::new("", "");
        Self {
            property_collector: none.clone(),
            view_manager: none.clone(),
            session_manager: none.clone(),
            search_index: none.clone(),
            file_manager: none.clone(),
            storage_manager: none,
            task_manager: None,
            api_version: "6.5".into(),
            instance: String::new(),
        }
    }

    fn read(answer: &Node) -> Result<Self, VsphereError> {
        let operation = || "RetrieveServiceContent".to_owned();
        let value = answer.get("returnval");
        let object = |name: &str| {
            value.and_then(|v| v.get(name)).and_then(Node::object).ok_or_else(|| VsphereError::Protocol {
                operation: operation(),
                what: format!("no {name}: is this a vCenter?"),
            })
        };
        let about = value.and_then(|v| v.get("about"));
        Ok(Self {
            property_collector: object("propertyCollector")?,
            view_manager: object("viewManager")?,
            session_manager: object("sessionManager")?,
            search_index: object("searchIndex")?,
            file_manager: object("fileManager")?,
            storage_manager: object("storageResourceManager")?,
            task_manager: object("taskManager").ok(),
            api_version: negotiate_version(about.map_or("", |a| a.text_of("apiVersion"))).to_owned(),
            instance: about.map_or("", |a| a.text_of("instanceUuid")).to_owned(),
        })
    }
}

/// Returns the older of the server's version and the newest known version.
fn negotiate_version(server: &str) -> &str {
    let numbers = |v: &str| v.split('.').map(|n| n.parse::<u32>().unwrap_or(0)).collect::<Vec<_>>();
    if server.is_empty() || numbers(server) > numbers(API_VERSION_MAX) { API_VERSION_MAX } else { server }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_version_is_capped_at_the_latest_known() {
        for (server, want) in [
            ("6.5", "6.5"),
            ("8.0.0.1", "8.0.0.1"),
            ("8.0.3.0", "8.0.0.1"),
            ("9.0", "8.0.0.1"),
            ("", "8.0.0.1"),
        ] {
            assert_eq!(negotiate_version(server), want, "{server}");
        }
    }
}
