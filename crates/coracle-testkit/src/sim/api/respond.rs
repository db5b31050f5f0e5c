//! Responses to requests.

use std::convert::Infallible;

use bytes::Bytes;
use http::{Method, Response, StatusCode, header::CONTENT_TYPE, request::Parts};
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use serde_json::{Value, json};

use super::{
    ApiServer,
    failure::Failure,
    kinds::Kind,
    ownership::Manager,
    request::{Target, Url},
    select::Selector,
    store::{Part, Store, Write},
    watch,
};

/// Body of a response.
pub(super) type Reply = UnsyncBoxBody<Bytes, Infallible>;

type Answer = Result<(StatusCode, Value), Failure>;

/// Response that describes a failure.
pub(super) fn failure(failure: &Failure) -> Response<Reply> {
    respond(failure.code, &failure.body())
}

fn respond(code: StatusCode, body: &Value) -> Response<Reply> {
    let body = Full::new(Bytes::from(body.to_string())).boxed_unsync();
    json_response(code, body)
}

/// Response with a JSON body.
pub(super) fn json_response(code: StatusCode, body: Reply) -> Response<Reply> {
    let mut response = Response::new(body);
    *response.status_mut() = code;
    response.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    response
}

impl ApiServer {
    pub(super) fn respond(&self, parts: &Parts, url: &Url, body: &[u8]) -> Response<Reply> {
        if url.target.plural.is_empty() {
            return match discovery(&self.store(), parts.uri.path(), &url.target) {
                Some(found) => respond(StatusCode::OK, &found),
                None => failure(&Failure::unknown_path()),
            };
        }
        let Some(kind) = find(&self.store(), &url.target) else { return failure(&Failure::unknown_path()) };
        let selector = match Selector::parse(url.text("labelSelector"), url.text("fieldSelector")) {
            Ok(selector) => selector,
            Err(refused) => return failure(&refused),
        };
        let accept =
            parts.headers.get(http::header::ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let metadata_only = accept.contains("as=PartialObjectMetadata");
        if url.is_watch() && parts.method == Method::GET {
            return watch::open(self, &kind, url, selector, metadata_only);
        }
        match self.handle(parts, url, body, &kind, &selector) {
            Ok((code, body)) if metadata_only => respond(code, &partial_metadata(&body)),
            Ok((code, body)) => respond(code, &body),
            Err(refused) => failure(&refused),
        }
    }

    fn handle(&self, parts: &Parts, url: &Url, body: &[u8], kind: &Kind, selector: &Selector) -> Answer {
        let Target { namespace, name, subresource, .. } = &url.target;
        let (mut store, now) = (self.store(), self.now());
        let parse = || -> Result<Value, Failure> {
            if body.is_empty() {
                return Ok(json!({}));
            }
            serde_json::from_slice(body).map_err(|error| Failure::bad_request(error.to_string()))
        };
        let by = |applies| manager(parts, url, applies);
        match (&parts.method, name.as_str(), subresource.as_str()) {
            (&Method::GET, "", "") => list(&store, kind, url, selector),
            (&Method::GET, name, "" | "status") => ok(store.get(kind, namespace, name)?.clone()),
            (&Method::POST, "", "") => {
                let mut object = parse()?;
                object["apiVersion"] = json!(kind.api_version(&url.target.version));
                object["kind"] = json!(kind.kind);
                Ok((StatusCode::CREATED, store.create(kind, namespace, object, &by(false), now)?))
            }
            (&Method::POST, name, "eviction") if kind.kind == "Pod" => {
                let options = parse()?;
                let options = options.get("deleteOptions").or(options.get("delete_options")).cloned();
                store.delete(kind, namespace, name, &options.unwrap_or_default(), now)?;
                let body = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
                Ok((StatusCode::CREATED, body))
            }
            (&Method::PUT | &Method::PATCH, name, "" | "status") if !name.is_empty() => {
                let part = if subresource.is_empty() { Part::Main } else { Part::Status };
                if part == Part::Status && !kind.has_status {
                    return Err(Failure::unknown_path());
                }
                let mut body = parse()?;
                let (write, applies) = write_of(parts, url, &mut body, kind)?;
                let (object, made) = store.write(kind, (namespace, name), write, part, &by(applies), now)?;
                Ok((if made { StatusCode::CREATED } else { StatusCode::OK }, object))
            }
            (&Method::DELETE, "", "") => {
                let (_, found) = list(&store, kind, url, selector)?;
                for object in found["items"].as_array().into_iter().flatten() {
                    let of = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
                    store.delete(kind, &of("namespace"), &of("name"), &parse()?, now)?;
                }
                ok(found)
            }
            (&Method::DELETE, name, "") => {
                let (object, gone) = store.delete(kind, namespace, name, &parse()?, now)?;
                if gone && kind.kind != "Pod" {
                    let details = json!({"name": name, "uid": object["metadata"]["uid"]});
                    let body = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details});
                    return ok(body);
                }
                ok(object)
            }
            _ => Err(Failure::method_not_allowed()),
        }
    }
}

fn ok(body: Value) -> Answer {
    Ok((StatusCode::OK, body))
}

fn find(store: &Store, target: &Target) -> Option<Kind> {
    let is_it = |kind: &&Kind| {
        kind.group == target.group && kind.plural == target.plural && kind.versions.contains(&target.version)
    };
    store.kinds.iter().find(is_it).cloned()
}

fn manager(parts: &Parts, url: &Url, applies: bool) -> Manager {
    let agent =
        parts.headers.get(http::header::USER_AGENT).and_then(|v| v.to_str().ok()).unwrap_or("unknown");
    let name = match url.text("fieldManager") {
        "" => agent.split('/').next().unwrap_or("unknown"),
        name => name,
    };
    Manager { name: name.to_owned(), applies, subresource: url.target.subresource.clone() }
}

fn write_of<'a>(
    parts: &Parts,
    url: &Url,
    body: &'a mut Value,
    kind: &Kind,
) -> Result<(Write<'a>, bool), Failure> {
    if parts.method == Method::PUT {
        body["apiVersion"] = json!(kind.api_version(&url.target.version));
        body["kind"] = json!(kind.kind);
        return Ok((Write::Replace(body), false));
    }
    let form = parts.headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    match form.split(';').next().unwrap_or_default() {
        "application/merge-patch+json" => Ok((Write::Merge(body), false)),
        "application/apply-patch+yaml" => {
            if url.text("fieldManager").is_empty() {
                return Err(Failure::bad_request("PatchOptions.fieldManager is required for apply patch"));
            }
            body["apiVersion"] = json!(kind.api_version(&url.target.version));
            body["kind"] = json!(kind.kind);
            Ok((Write::Apply { patch: body, force: url.is_true("force") }, true))
        }
        other => Err(Failure::bad_request(format!(
            "the simulated API server does not know patches of type {other:?}"
        ))),
    }
}

/// One page of a list. The continue token is the key of the last object of the previous page.
fn list(store: &Store, kind: &Kind, url: &Url, selector: &Selector) -> Answer {
    let (namespace, after) = (&url.target.namespace, url.text("continue"));
    let limit = url.text("limit").parse().ok().filter(|n| *n > 0).unwrap_or(usize::MAX);
    let mut items = Vec::new();
    let mut token = String::new();
    for ((group, plural, ns, name), stored) in &store.objects {
        let mine =
            *group == kind.group && *plural == kind.plural && (namespace.is_empty() || ns == namespace);
        let position = format!("{ns}/{name}");
        if !mine || !selector.matches(&stored.object) || (!after.is_empty() && position.as_str() <= after) {
            continue;
        }
        if items.len() == limit {
            token = items.last().map(position_of).unwrap_or_default();
            break;
        }
        items.push(stored.object.clone());
    }
    let meta = json!({"resourceVersion": store.revision.to_string(), "continue": token});
    let api_version = kind.api_version(&url.target.version);
    ok(
        json!({"kind": format!("{}List", kind.kind), "apiVersion": api_version, "metadata": meta, "items": items}),
    )
}

fn position_of(object: &Value) -> String {
    let of = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
    format!("{}/{}", of("namespace"), of("name"))
}

/// Object, or each object of a list, reduced to its metadata.
pub(super) fn partial_metadata(object: &Value) -> Value {
    let one = |object: &Value| json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"]});
    match object["items"].as_array() {
        Some(items) => json!({
            "kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"],
            "items": items.iter().map(one).collect::<Vec<_>>(),
        }),
        None if object["kind"] == "Status" => object.clone(),
        None => one(object),
    }
}

fn discovery(store: &Store, path: &str, target: &Target) -> Option<Value> {
    let of_group = |group: &str| store.kinds.iter().filter(|k| k.group == group).collect::<Vec<_>>();
    match (path.trim_matches('/'), target.version.as_str()) {
        ("api", _) => {
            Some(json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}))
        }
        ("apis", _) => {
            let mut names: Vec<_> =
                store.kinds.iter().map(|k| k.group.as_str()).filter(|g| !g.is_empty()).collect();
            names.sort_unstable();
            names.dedup();
            let groups: Vec<_> = names.iter().filter_map(|name| group(&of_group(name))).collect();
            Some(json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}))
        }
        (_, "") => group(&of_group(&target.group)),
        (_, version) => {
            let served: Vec<_> = of_group(&target.group)
                .into_iter()
                .filter(|k| k.versions.iter().any(|v| v == version))
                .collect();
            let first = served.first()?;
            let resources: Vec<_> = served.iter().flat_map(|kind| resources(kind)).collect();
            Some(json!({
                "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": first.api_version(version),
                "resources": resources,
            }))
        }
    }
}

fn group(kinds: &[&Kind]) -> Option<Value> {
    let first = kinds.first()?;
    let mut names: Vec<_> = kinds.iter().flat_map(|kind| kind.versions.clone()).collect();
    names.sort();
    names.dedup();
    let versions: Vec<_> =
        names.iter().map(|v| json!({"groupVersion": first.api_version(v), "version": v})).collect();
    Some(json!({
        "kind": "APIGroup", "apiVersion": "v1", "name": first.group, "versions": versions, "preferredVersion": versions[0],
        "serverAddressByClientCIDRs": [],
    }))
}

fn resources(kind: &Kind) -> Vec<Value> {
    let verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];
    let of = |name: String, verbs: &[&str]| json!({"name": name, "singularName": "", "namespaced": kind.namespaced, "kind": kind.kind, "verbs": verbs});
    let mut all = vec![of(kind.plural.clone(), &verbs)];
    if kind.has_status {
        all.push(of(format!("{}/status", kind.plural), &["get", "patch", "update"]));
    }
    all
}
