//! `/exec`, `/attach` and `/portForward`: upgrades of HTTP/1.1 requests.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, RawQuery, Request, State};
use axum::response::Response;
use coracle_host::ContainerState;
use coracle_pod::streams::{AttachSession, PortDialer};
use coracle_streaming::{serve_port_forward, serve_session};

use super::context::Context;
use super::guests;
use super::http_failure::HttpFailure;
use super::query::{all, pairs, ports, streams};
use super::target::{ContainerTarget, PodTarget};

/// Handles a command in a container: `command` may be repeated; the streams are `input`, `output`, `error`, `tty`.
pub(super) async fn exec(
    State(context): State<Context>,
    Path(target): Path<ContainerTarget>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Result<Response, HttpFailure> {
    let query = pairs(query.as_deref());
    let streams = streams(&query)?;
    let command = all(&query, "command");
    if command.is_empty() {
        target.find_pod(&context.pods)?;
        return Err(HttpFailure::bad_request("invalid command: it is empty"));
    }
    let session = guests::exec(&context, &target, command, streams)?;
    let response = serve_session(request, streams, session, &context.limits, &context.sessions);
    Ok(response.map(Body::new))
}

/// Handles attaching to the streams of a running container.
pub(super) async fn attach(
    State(context): State<Context>,
    Path(target): Path<ContainerTarget>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Result<Response, HttpFailure> {
    let streams = streams(&pairs(query.as_deref()))?;
    let found = target.find(&context.pods)?;
    if found.container.state != ContainerState::Running {
        return Err(HttpFailure::bad_request(format!("container \"{}\" is not running", target.container)));
    }
    let session = AttachSession::new(context.host.clone(), &found.vm, &found.container.id, streams);
    let session = session.map_err(|error| HttpFailure::of_host(&error))?;
    let response = serve_session(request, streams, Box::new(session), &context.limits, &context.sessions);
    Ok(response.map(Body::new))
}

/// Handles connections to ports of a pod. Old WebSocket clients name the ports in the query.
pub(super) async fn port_forward(
    State(context): State<Context>,
    Path(target): Path<PodTarget>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Result<Response, HttpFailure> {
    let ports = ports(&pairs(query.as_deref()))?;
    let vm = target.vm(&context)?;
    let dial = Arc::new(PortDialer::new(context.host.clone(), &vm, context.forwards.clone()));
    let response = serve_port_forward(request, &ports, dial, &context.limits, &context.sessions);
    Ok(response.map(Body::new))
}
