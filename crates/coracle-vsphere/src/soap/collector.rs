//! vCenter's property collector: filters over a view of objects, and the long poll for changes.

use std::time::Duration;

use super::{
    session::Session,
    xml::{Node, el, reference, text, typed},
};
use crate::{Object, VsphereError};

/// Time that an answer may take in addition to the longest wait on the server.
const WAIT_GRACE: Duration = Duration::from_secs(30);

/// Creates a property collector. The session's default collector would share its filters among all users of the session.
pub(super) async fn collector(session: &Session) -> Result<Object, VsphereError> {
    parse_created_object(
        &session.call("CreatePropertyCollector", &session.content.property_collector, "").await?,
        "collector",
    )
}

pub(super) fn parse_created_object(answer: &Node, what: &str) -> Result<Object, VsphereError> {
    answer.get("returnval").and_then(Node::object).ok_or_else(|| VsphereError::Protocol {
        operation: format!("make a {what}"),
        what: "none in the answer".into(),
    })
}

/// Arguments of `CreateFilter` for all objects of a view.
pub(super) fn filter(view_kind: &str, view: &Object, kind: &str, paths: &[&str]) -> String {
    let paths: String = paths.iter().map(|p| text("pathSet", p)).collect();
    let set = el("propSet", text("type", kind) + &paths);
    let traversal = typed(
        "selectSet",
        "TraversalSpec",
        text("name", "view") + &text("type", view_kind) + &text("path", "view") + &text("skip", false),
    );
    let object = el("objectSet", reference("obj", view) + &text("skip", true) + &traversal);
    el("spec", set + &object) + &text("partialUpdates", false)
}

/// Runs one long poll. `None`: nothing changed within `longest`.
pub(super) async fn wait(
    session: &Session,
    collector: &Object,
    version: &str,
    longest: Duration,
) -> Result<Option<Node>, VsphereError> {
    let arguments = text("version", version) + &el("options", text("maxWaitSeconds", longest.as_secs()));
    let deadline = longest + WAIT_GRACE;
    let answer = session.call_unbounded("WaitForUpdatesEx", collector, &arguments, deadline).await?;
    Ok(answer.get("returnval").cloned())
}

/// Changed objects and their updates.
pub(super) fn changes(set: &Node) -> impl Iterator<Item = (Object, &Node)> {
    let updates = set.all("filterSet").flat_map(|f| f.all("objectSet"));
    updates.filter_map(|update| Some((update.get("obj")?.object()?, update)))
}
