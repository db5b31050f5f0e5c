//! Tags. They use REST and not SOAP: `/api`, and `/rest` on servers before 7.0.

use std::{collections::HashMap, sync::Arc};

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::sync::Mutex;

use super::session::Session;
use crate::{Object, VsphereError};

/// Prefix of tag ids, which are used without a look-up.
const ID_PREFIX: &str = "urn:vmomi:InventoryServiceTag:";
const SESSION_HEADER: &str = "vmware-api-session-id";

/// Tag API of a server (`/api` or `/rest`), and the session with it.
#[derive(Clone, Debug)]
struct TagApi {
    is_api: bool,
    session: String,
}

#[derive(Debug, Default)]
struct Known {
    tag_api: Option<TagApi>,
    names: Option<Arc<TagsByName>>,
}

/// Tag name → pairs of tag id and category.
type TagsByName = HashMap<String, Vec<(String, String)>>;

/// Cached answers about tags.
#[derive(Debug, Default)]
pub(super) struct TagCache(Mutex<Known>);

impl TagCache {
    pub(super) fn forget(&self) {
        if let Ok(mut known) = self.0.try_lock() {
            *known = Known::default();
        }
    }

    /// Attaches `tags` to `vm`. Opens an ended session again, once.
    pub(super) async fn attach(
        &self,
        session: &Session,
        vm: &Object,
        tags: &[String],
    ) -> Result<(), VsphereError> {
        if tags.is_empty() {
            return Ok(());
        }
        match self.try_attach(session, vm, tags).await {
            Err(VsphereError::Status { status: 401, .. }) => {
                *self.0.lock().await = Known::default();
                self.try_attach(session, vm, tags).await
            }
            other => other,
        }
    }

    async fn try_attach(&self, session: &Session, vm: &Object, tags: &[String]) -> Result<(), VsphereError> {
        for tag in tags {
            let (tag_api, id) = self.resolve(session, tag).await?;
            let path = if tag_api.is_api {
                format!("/api/cis/tagging/tag-association/{id}?action=attach")
            } else {
                format!("/rest/com/vmware/cis/tagging/tag-association/id:{id}?~action=attach")
            };
            let body = json!({"object_id": {"id": vm.id, "type": vm.kind}});
            match ask(session, &tag_api, Method::POST, &path, Some(&body)).await {
                Err(VsphereError::Tagging { kind, .. }) if kind == "ALREADY_EXISTS" => {}
                other => drop(other?),
            }
        }
        Ok(())
    }

    async fn resolve(&self, session: &Session, tag: &str) -> Result<(TagApi, String), VsphereError> {
        let mut known = self.0.lock().await;
        let tag_api = match &known.tag_api {
            Some(tag_api) => tag_api.clone(),
            None => known.tag_api.insert(open(session).await?).clone(),
        };
        if tag.starts_with(ID_PREFIX) {
            return Ok((tag_api, tag.to_owned()));
        }
        let names = match &known.names {
            Some(names) => names.clone(),
            None => known.names.insert(Arc::new(list(session, &tag_api).await?)).clone(),
        };
        match names.get(tag).map(Vec::as_slice) {
            Some([(id, _)]) => Ok((tag_api, id.clone())),
            Some(several) if !several.is_empty() => Err(VsphereError::Ambiguous {
                field: "vsphere.vmTags",
                name: tag.to_owned(),
                candidates: several.iter().map(|(id, category)| format!("{id} in {category}")).collect(),
            }),
            _ => {
                // The tag may be created at any time: do not cache its absence.
                known.names = None;
                Err(VsphereError::NoSuchName { field: "vsphere.vmTags", kind: "tag", name: tag.to_owned() })
            }
        }
    }
}

async fn open(session: &Session) -> Result<TagApi, VsphereError> {
    let credentials = session.credentials();
    for (is_api, path) in [(true, "/api/session"), (false, "/rest/com/vmware/cis/session")] {
        let request = session.request(Method::POST, path).await;
        let request = request.basic_auth(&credentials.username, Some(credentials.password.reveal()));
        let operation = || "open a tagging session".to_owned();
        let response = request.send().await.map_err(|e| session.transport(operation(), e))?;
        if response.status() == StatusCode::NOT_FOUND && is_api {
            continue;
        }
        if !response.status().is_success() {
            return Err(VsphereError::Status { operation: operation(), status: response.status().as_u16() });
        }
        let answer: Value = response.json().await.map_err(|e| session.transport(operation(), e))?;
        let id = answer.as_str().or_else(|| answer["value"].as_str()).unwrap_or_default().to_owned();
        return Ok(TagApi { is_api, session: id });
    }
    Err(VsphereError::Status { operation: "open a tagging session".into(), status: 404 })
}

async fn list(session: &Session, tag_api: &TagApi) -> Result<TagsByName, VsphereError> {
    let base = if tag_api.is_api { "/api/cis/tagging/tag" } else { "/rest/com/vmware/cis/tagging/tag" };
    let ids = ask(session, tag_api, Method::GET, base, None).await?;
    let mut names = TagsByName::new();
    for id in ids.as_array().into_iter().flatten().filter_map(Value::as_str) {
        let path = if tag_api.is_api { format!("{base}/{id}") } else { format!("{base}/id:{id}") };
        let tag = ask(session, tag_api, Method::GET, &path, None).await?;
        let field = |name: &str| tag[name].as_str().unwrap_or_default().to_owned();
        names.entry(field("name")).or_default().push((id.to_owned(), field("category_id")));
    }
    Ok(names)
}

/// Error of an answer with status 400: `error_type` in `/api`, the name of the type in `/rest`.
fn refusal(operation: String, answer: &Value) -> VsphereError {
    let value = answer.get("value").unwrap_or(answer);
    let named = answer["type"].as_str().and_then(|t| t.rsplit('.').next()).unwrap_or_default();
    let kind = value["error_type"].as_str().unwrap_or(named).to_ascii_uppercase();
    let texts = value["messages"].as_array().into_iter().flatten();
    let texts: Vec<_> = texts.filter_map(|m| m["default_message"].as_str()).collect();
    VsphereError::Tagging { operation, kind, message: texts.join(" ") }
}

/// Sends one request and unwraps the `value` of a `/rest` answer.
async fn ask(
    session: &Session,
    tag_api: &TagApi,
    method: Method,
    path: &str,
    body: Option<&Value>,
) -> Result<Value, VsphereError> {
    let operation = || format!("{method} {}", path.split('?').next().unwrap_or(path));
    let mut request = session.request(method.clone(), path).await.header(SESSION_HEADER, &tag_api.session);
    if let Some(body) = body {
        request = request.json(body);
    }
    let response = request.send().await.map_err(|e| session.transport(operation(), e))?;
    let status = response.status();
    let text = response.text().await.map_err(|e| session.transport(operation(), e))?;
    let answer: Value = serde_json::from_str(&text).unwrap_or_default();
    if status == StatusCode::BAD_REQUEST {
        return Err(refusal(operation(), &answer));
    }
    if !status.is_success() {
        return Err(VsphereError::Status { operation: operation(), status: status.as_u16() });
    }
    Ok(answer.get("value").cloned().unwrap_or(answer))
}
