//! One trace from the reconcile of a MikromVM to the phases of its start on a node.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::crash_node::import;
use crate::support::until;
use coracle_testkit::netns;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use serde_json::json;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use super::harness::{Installed, LIMIT, end};
use super::without_admission;

/// Span that the collector received.
#[derive(Clone, Debug)]
struct Span {
    trace: Vec<u8>,
    id: Vec<u8>,
    parent: Vec<u8>,
    name: String,
}

/// Collector that keeps the spans.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<Span>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let scopes = request.into_inner().resource_spans.into_iter().flat_map(|of| of.scope_spans);
        let spans = scopes.flat_map(|scope| scope.spans).map(|span| Span {
            trace: span.trace_id,
            id: span.span_id,
            parent: span.parent_span_id,
            name: span.name,
        });
        self.0.lock().unwrap().extend(spans);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// Starts the collector and returns its address.
    async fn serve(&self, installed: &Installed) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let service = TraceServiceServer::new(self.clone());
        installed.spawn(async move {
            let server = tonic::transport::Server::builder().add_service(service);
            server.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
        });
        address
    }

    /// Returns the names of spans from the root of its trace to the span `name`.
    fn path(&self, name: &str) -> Option<String> {
        let spans = self.0.lock().unwrap().clone();
        let by_id: BTreeMap<_, _> = spans.iter().map(|span| (&span.id, span)).collect();
        let mut span = spans.iter().find(|span| span.name == name)?;
        let mut names = vec![span.name.as_str()];
        while let Some(parent) = by_id.get(&span.parent) {
            assert_eq!(parent.trace, span.trace, "{span:?} is in another trace than {parent:?}");
            span = parent;
            names.insert(0, &span.name);
        }
        Some(names.join(" > "))
    }
}

#[test]
fn start_of_a_vm_is_one_trace_from_operator_to_guest() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(mut installed) = Installed::plane().await else { return };
        let collector = Collector::default();
        installed.env = vec![
            ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.serve(&installed).await),
            ("OTEL_BSP_SCHEDULE_DELAY", "200".to_owned()),
        ];
        installed.install().await;
        let account = installed.pod_kubeconfig("coracle-node", "n1").await;
        let mut processes =
            vec![installed.start_node("n1", &account).await, installed.start_operator().await];
        installed.announced("n1").await;
        import(&installed.state("n1"), &installed.dir.path().join("layout")).await;
        without_admission(&installed).await;
        installed
            .apply(json!({
                "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM", "metadata": {"name": "one"},
                "spec": {"image": "localhost/idle:1", "vcpuCount": 1, "memoryMB": 128, "nodeName": "n1"},
            }))
            .await;
        for (span, want) in [
            ("CreateVm", "reconcile > CreateVm"),
            ("launch_vmm", "reconcile > CreateVm > start_vm > launch_vmm"),
            ("boot", "reconcile > CreateVm > start_vm > launch_vmm > boot"),
            ("connect_agent", "reconcile > CreateVm > start_vm > connect_agent"),
            ("configure_and_start", "reconcile > CreateVm > start_vm > configure_and_start"),
        ] {
            until(span, LIMIT * 2, || async {
                match collector.path(span) {
                    Some(path) if path == want => Ok(()),
                    other => Err(format!("{other:?}, not {want}")),
                }
            })
            .await;
        }
        installed.kubectl(&["delete", "mikromvm", "one", "--timeout=60s"]).await.unwrap();
        end(&mut processes).await;
    });
}
