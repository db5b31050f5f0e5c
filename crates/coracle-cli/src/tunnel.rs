//! Calls to a VM's node through the API server: HTTP/2 inside a WebSocket of the extension API.

use std::io;
use std::time::Duration;

use coracle_api::MikromVM;
use coracle_api::subresources::{GROUP, PROTOCOL, Subresource};
use coracle_proto::host::host_client::HostClient;
use coracle_streaming::{Handshake, Tunnel};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use hyper_util::rt::TokioIo;
use kube::client::Body;
use kube::{Client, ResourceExt as _};
use tonic::transport::{Channel, Endpoint, Uri};

use crate::api_failure::{chain, request_failure};
use crate::error::{Failure, exit};

/// Time limit for the answer of the API server and the node behind it.
const CONNECT: Duration = Duration::from_secs(30);
/// Interval of pings, which detect a lost connection.
const PING: Duration = Duration::from_secs(30);
/// Maximum size of a refusal.
const REFUSAL_MAX: usize = 64 << 10;

/// Opens a tunnel for the calls of one subresource.
pub(crate) async fn open(
    client: &Client,
    vm: &MikromVM,
    subresource: Subresource,
) -> Result<HostClient<Channel>, Failure> {
    let what = format!("open {} of MikromVM {}", subresource.name(), vm.name_any());
    let path = subresource.path(&vm.namespace().unwrap_or_default(), &vm.name_any());
    let opened = tokio::time::timeout(CONNECT, connect(client, &path, &what)).await;
    let silent = |why: &dyn std::error::Error| {
        Failure::new("COR-CLI-011", format!("{what}: {}", chain(why))).exit(exit::FAILED)
    };
    let upgraded = opened.map_err(|timed_out| silent(&timed_out))??;
    let mut tunnel = Some(TokioIo::new(Tunnel::client(TokioIo::new(upgraded)).await));
    let closed = || io::Error::from(io::ErrorKind::ConnectionAborted);
    let once = tower::service_fn(move |_: Uri| std::future::ready(tunnel.take().ok_or_else(closed)));
    let endpoint = Endpoint::from_static("http://node").http2_keep_alive_interval(PING);
    let channel = endpoint.keep_alive_while_idle(true).connect_with_connector(once).await;
    Ok(HostClient::new(channel.map_err(|error| silent(&error))?).max_decoding_message_size(16 << 20))
}

async fn connect(client: &Client, path: &str, what: &str) -> Result<hyper::upgrade::Upgraded, Failure> {
    let handshake = Handshake::new(PROTOCOL);
    let broken = |why: String| Failure::new("COR-API-001", format!("{what}: {why}"));
    let mut request = Request::get(path).body(Body::empty()).map_err(|error| broken(error.to_string()))?;
    request.headers_mut().extend(handshake.headers());
    let answer = client.send(request).await.map_err(|error| request_failure(what, &error))?;
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        return Err(answer_failure(answer, what).await);
    }
    if !handshake.is_accepted(&answer) {
        return Err(broken("the server speaks another protocol: it is of another version".into()));
    }
    hyper::upgrade::on(answer).await.map_err(|error| broken(chain(&error)))
}

/// Returns the failure that an answer describes.
async fn answer_failure(answer: Response<Body>, what: &str) -> Failure {
    let code = answer.status();
    let body = Limited::new(answer.into_body(), REFUSAL_MAX).collect().await;
    let text = body.map(|body| body.to_bytes()).unwrap_or_default();
    let status: Option<kube::core::Status> = serde_json::from_slice(&text).ok();
    let Some(status) = status.filter(|status| !status.message.is_empty()) else {
        return api_server_failure(code, what, String::from_utf8_lossy(&text).trim());
    };
    match code {
        StatusCode::NOT_IMPLEMENTED => {
            let message = format!("{what}: {}", status.message);
            Failure::new("COR-CLI-012", crate::error::printable(&message)).exit(exit::UNSUPPORTED)
        }
        _ => request_failure(what, &kube::Error::Api(Box::new(status))),
    }
}

/// Returns the failure of an answer by the API server itself, which does not serve the extension API or cannot reach its
/// backend.
fn api_server_failure(code: StatusCode, what: &str, text: &str) -> Failure {
    let message = crate::error::printable(&format!("{what}: the API server answers {code}: {text}"));
    let help = format!(
        "is the API there? kubectl get apiservices v1alpha1.{GROUP}\n\
         the operator installs it when it serves webhooks (--webhook-listen)"
    );
    Failure::new("COR-CLI-011", message).help(help)
}
