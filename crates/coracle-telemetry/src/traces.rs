//! Exports traces to a collector by OTLP over gRPC, if `OTEL_EXPORTER_OTLP_ENDPOINT` is set. The other variables of the
//! OpenTelemetry SDK (`OTEL_TRACES_SAMPLER`, `OTEL_BSP_…`, `OTEL_RESOURCE_ATTRIBUTES`) apply as well.
//!
//! Daemons continue each other's traces by W3C Trace Context: the caller puts [`traceparent`] into the metadata of a call, and
//! the callee begins its span with [`call_span`].

use std::sync::OnceLock;

use opentelemetry::propagation::{Extractor, TextMapPropagator as _};
use opentelemetry::trace::{TraceContextExt as _, TracerProvider as _};
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracerProvider, Tracer};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// Metadata key of the caller's span.
pub const TRACEPARENT: &str = "traceparent";
/// Variables with the endpoint of a collector; one is sufficient.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];

static PROVIDER: OnceLock<SdkTracerProvider> = OnceLock::new();

/// Returns the tracer of this process, if a collector is configured. Must be called within a runtime, which the exporter uses.
///
/// # Errors
/// The fault of the variables.
pub(crate) fn tracer(service: &'static str) -> Result<Option<Tracer>, String> {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if !ENDPOINTS.into_iter().any(is_set) {
        return Ok(None);
    }
    let exporter = SpanExporter::builder().with_tonic().build().map_err(|error| error.to_string())?;
    // OTEL_SERVICE_NAME takes precedence.
    let resource = Resource::builder();
    let resource = match is_set("OTEL_SERVICE_NAME") {
        true => resource,
        false => resource.with_service_name(service),
    };
    let provider =
        SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource.build()).build();
    let tracer = provider.tracer("coracle");
    let _first_call_counts = PROVIDER.set(provider);
    Ok(Some(tracer))
}

/// Exports the remaining spans and shuts the exporter down. Blocking; call it before the runtime ends. Idempotent.
pub fn flush_traces() {
    if let Some(provider) = PROVIDER.get() {
        let _collector_gone = provider.shutdown();
    }
}

/// Returns the current span for the metadata of a call; `None` outside a trace.
#[must_use]
pub fn traceparent() -> Option<String> {
    PROVIDER.get()?;
    let context = Span::current().context();
    let span = context.span();
    let span = span.span_context();
    let flags = span.trace_flags().to_u8();
    span.is_valid().then(|| format!("00-{}-{}-{flags:02x}", span.trace_id(), span.span_id()))
}

struct Headers<'a>(&'a http::HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}

/// Returns the span of a call to a service, as a child of the caller's span. Disabled if tracing is off.
pub fn call_span<T>(request: &http::Request<T>) -> Span {
    if PROVIDER.get().is_none() {
        return Span::none();
    }
    let method = request.uri().path().rsplit('/').next().unwrap_or_default();
    let span = tracing::info_span!("call", otel.name = method, otel.kind = "server");
    let parent = TraceContextPropagator::new().extract(&Headers(request.headers()));
    let _not_traced = span.set_parent(parent);
    span
}
