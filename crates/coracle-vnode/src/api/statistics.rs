//! `/stats/summary` and `/metrics`.

use axum::Json;
use axum::extract::{RawQuery, State};
use axum::response::IntoResponse;
use http::header;
use serde_json::Value;

use super::context::Context;
use super::query::{first, pairs};
use crate::stats::{self, CONTENT_TYPE, NodeSample, Summary};

/// Handles a summary. With `only_cpu_and_memory=true`, other values are left out.
pub(super) async fn summary(State(context): State<Context>, RawQuery(query): RawQuery) -> Json<Value> {
    let query = pairs(query.as_deref());
    let only_cpu_and_memory = matches!(first(&query, "only_cpu_and_memory"), Some("true" | "1"));
    let (node, pods) = tokio::join!(node(&context), stats::observe(&context.host, &context.pods));
    let (rates, node_name) = (&context.rates, context.node.as_str());
    Json(stats::summary(&Summary { node_name, node: &node, pods: &pods, rates, only_cpu_and_memory }))
}

pub(super) async fn resource_metrics(State(context): State<Context>) -> impl IntoResponse {
    let (node, pods) = tokio::join!(node(&context), stats::observe(&context.host, &context.pods));
    text(stats::resource_metrics(&node, &pods))
}

pub(super) async fn container_metrics(State(context): State<Context>) -> impl IntoResponse {
    text(stats::container_metrics(&stats::observe(&context.host, &context.pods).await))
}

pub(super) async fn node_metrics(State(context): State<Context>) -> impl IntoResponse {
    let pods = stats::observe(&context.host, &context.pods).await;
    text(stats::node_metrics(&context.node, &pods))
}

pub(super) async fn probe_metrics(State(context): State<Context>) -> impl IntoResponse {
    text(stats::probe_metrics(&stats::observe(&context.host, &context.pods).await))
}

/// Responds without metrics: the node has none of this path. Scrapers accept that.
pub(super) async fn no_metrics() -> impl IntoResponse {
    text(String::new())
}

async fn node(context: &Context) -> NodeSample {
    stats::read_node(context.host.config().state_dir.clone(), context.host.clock().now().0).await
}

fn text(text: String) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], text)
}
