//! Network checks from the node: gRPC here, the others in `coracle-pod`.

use std::time::Duration;

use async_trait::async_trait;
use coracle_pod::probe::ProbeOutcome;
use coracle_pod::probe::prober::Network;
use http::uri::PathAndQuery;
use prost::Message;
use tokio::time::timeout;
use tonic::client::Grpc;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

/// Path of the RPC (gRPC health checking protocol).
const CHECK: &str = "/grpc.health.v1.Health/Check";
const USER_AGENT: &str = "kube-probe/1.36";
/// Status of a service that is healthy.
const SERVING: i32 = 1;

/// Message `grpc.health.v1.HealthCheckRequest`.
#[derive(Clone, PartialEq, Message)]
struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    service: String,
}

/// Message `grpc.health.v1.HealthCheckResponse`.
#[derive(Clone, PartialEq, Message)]
struct HealthCheckResponse {
    /// UNKNOWN 0, SERVING 1, NOT_SERVING 2, SERVICE_UNKNOWN 3.
    #[prost(int32, tag = "1")]
    status: i32,
}

/// Network of the node.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeNetwork;

#[async_trait]
impl Network for NodeNetwork {
    async fn grpc(&self, host: &str, port: u16, service: &str, limit: Duration) -> ProbeOutcome {
        match timeout(limit, check(host, port, service)).await {
            Ok(Ok(SERVING)) => ProbeOutcome::Success,
            Ok(Ok(status)) => {
                ProbeOutcome::Failure(format!("service unhealthy (responded with status {status})"))
            }
            Ok(Err(why)) => ProbeOutcome::Failure(why),
            Err(_) => {
                ProbeOutcome::Failure(format!("cannot check {host} port {port}: no answer within {limit:?}"))
            }
        }
    }
}

async fn check(host: &str, port: u16, service: &str) -> Result<i32, String> {
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let failed = |error: tonic::transport::Error| {
        let cause = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        format!("cannot connect to {host} port {port}: {cause}")
    };
    let endpoint = Endpoint::from_shared(format!("http://{host}:{port}")).map_err(failed)?;
    let endpoint = endpoint.user_agent(USER_AGENT).map_err(failed)?;
    let mut client = Grpc::new(endpoint.connect().await.map_err(failed)?);
    client.ready().await.map_err(failed)?;
    let request = Request::new(HealthCheckRequest { service: service.to_owned() });
    let codec = ProstCodec::<HealthCheckRequest, HealthCheckResponse>::default();
    let answer = client.unary(request, PathAndQuery::from_static(CHECK), codec).await;
    answer.map(|answer| answer.into_inner().status).map_err(|status| status_message(&status))
}

/// Returns the explanation of an error status, for the event.
fn status_message(status: &Status) -> String {
    match status.code() {
        Code::Unimplemented => "the server does not implement grpc.health.v1.Health".to_owned(),
        Code::NotFound => "the server does not know the service".to_owned(),
        code => format!("cannot check the health of the server: {code:?}"),
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future::{Ready, ready};
    use std::task::{Context, Poll};

    use tokio::net::TcpListener;
    use tokio::task::JoinSet;
    use tonic::Response;
    use tonic::body::Body;
    use tonic::server::UnaryService;

    use super::*;

    /// Server that responds as the service's name says.
    #[derive(Clone)]
    struct Health;

    impl UnaryService<HealthCheckRequest> for Health {
        type Response = HealthCheckResponse;
        type Future = Ready<Result<Response<HealthCheckResponse>, Status>>;

        fn call(&mut self, request: Request<HealthCheckRequest>) -> Self::Future {
            ready(match request.into_inner().service.as_str() {
                "" => Ok(Response::new(HealthCheckResponse { status: SERVING })),
                "sick" => Ok(Response::new(HealthCheckResponse { status: 2 })),
                _ => Err(Status::not_found("no such service")),
            })
        }
    }

    impl tonic::server::NamedService for Health {
        const NAME: &'static str = "grpc.health.v1.Health";
    }

    impl tonic::codegen::Service<http::Request<Body>> for Health {
        type Response = http::Response<Body>;
        type Error = Infallible;
        type Future = tonic::codegen::BoxFuture<Self::Response, Infallible>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: http::Request<Body>) -> Self::Future {
            let own = self.clone();
            Box::pin(async move {
                assert_eq!(request.uri().path(), CHECK);
                let codec = ProstCodec::<HealthCheckResponse, HealthCheckRequest>::default();
                Ok(tonic::server::Grpc::new(codec).unary(own, request).await)
            })
        }
    }

    #[tokio::test]
    async fn grpc_check_follows_the_health_service() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut server = JoinSet::new();
        server.spawn(
            tonic::transport::Server::builder()
                .add_service(Health)
                .serve_with_incoming(tonic::transport::server::TcpIncoming::from(listener)),
        );
        let limit = Duration::from_secs(10);
        let failure = |text: &str| ProbeOutcome::Failure(text.to_owned());
        for (service, want) in [
            ("", ProbeOutcome::Success),
            ("sick", failure("service unhealthy (responded with status 2)")),
            ("other", failure("the server does not know the service")),
        ] {
            assert_eq!(NodeNetwork.grpc("127.0.0.1", port, service, limit).await, want, "{service:?}");
        }
        server.shutdown().await;
        // A bound port without a listener. An unbound port may be in use by another test.
        let silent = tokio::net::TcpSocket::new_v4().unwrap();
        silent.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let refused = NodeNetwork.grpc("127.0.0.1", silent.local_addr().unwrap().port(), "", limit).await;
        assert!(matches!(refused, ProbeOutcome::Failure(why) if why.contains("cannot connect")));
    }
}
