//! Output of a VM's workload, as text, with those parameters of `pods/log` that apply to a VM.

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use coracle_proto::host as pb;
use coracle_proto::host::host_client::HostClient;
use futures_util::TryStreamExt as _;
use http::{HeaderValue, header};
use jiff::Timestamp;
use serde::Deserialize;
use tonic::{Code, Status};

use crate::failure::Failure;
use crate::target::Target;

/// Query parameters of a request (Kubernetes API, "read log of the specified Pod").
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Parameters {
    follow: bool,
    tail_lines: Option<u32>,
    since_seconds: Option<u32>,
    timestamps: bool,
}

/// Returns the lines.
///
/// # Errors
/// 400 for parameters that cannot be parsed; the errors of the node.
pub(crate) async fn read(target: Target, query: &str, now: Timestamp) -> Result<Response, Failure> {
    let uri = format!("/?{query}").parse().map_err(|_| Failure::bad_request("cannot read the query"))?;
    let wanted = axum::extract::Query::<Parameters>::try_from_uri(&uri);
    let wanted = wanted.map_err(|error| Failure::bad_request(error.body_text()))?.0;
    let request = pb::LogsRequest {
        vm: target.vm,
        follow: wanted.follow,
        tail: wanted.tail_lines,
        since_unix_ms: wanted.since_seconds.map_or(0, |seconds| since(now, seconds)),
    };
    let chunks =
        HostClient::new(target.channel).logs(request).await.map_err(|status| failure_from(&status))?;
    let timestamps = wanted.timestamps;
    let lines = chunks.into_inner().map_ok(move |line| text(&line, timestamps));
    let mut response = Response::new(Body::from_stream(lines));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    Ok(response)
}

fn since(now: Timestamp, seconds: u32) -> i64 {
    now.as_millisecond() - i64::from(seconds) * 1000
}

fn text(line: &pb::LogsResponse, timestamps: bool) -> Bytes {
    match Timestamp::from_nanosecond(line.time_unix_ns.into()) {
        Ok(time) if timestamps => [format!("{time} ").as_bytes(), &line.data].concat().into(),
        _ => Bytes::copy_from_slice(&line.data),
    }
}

fn failure_from(status: &Status) -> Failure {
    match status.code() {
        Code::NotFound => Failure::not_found(status.message()),
        Code::FailedPrecondition => Failure::conflict(status.message()),
        _ => Failure::unavailable(status.message()),
    }
}
