//! Logs to stderr: JSON for machines, text lines for people.

use std::io::IsTerminal;

use tracing::Level;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Lines on a terminal, JSON elsewhere.
    #[default]
    Auto,
    /// One JSON object per line.
    Json,
    /// Readable lines.
    Text,
}

/// Prefix of targets whose spans are exported, so that the exporter does not trace its own calls.
const TRACED: &str = "coracle";

/// Starts logging, and tracing if a collector is configured, see [`crate::flush_traces`]. `filter` is a level or a `tracing`
/// filter; an invalid one means `info`. Only the first call of a process has an effect.
pub fn init_logs(filter: &str, format: LogFormat) {
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|_| EnvFilter::new("info"));
    let json = match format {
        LogFormat::Auto => !std::io::stderr().is_terminal(),
        LogFormat::Json => true,
        LogFormat::Text => false,
    };
    let (tracer, failed) = match crate::traces::tracer(TRACED) {
        Ok(tracer) => (tracer, None),
        Err(error) => (None, Some(error)),
    };
    let traces = tracer.map(|tracer| {
        let ours = filter_fn(|of| of.target().starts_with(TRACED) && *of.level() <= Level::INFO);
        tracing_opentelemetry::layer().with_tracer(tracer).with_filter(ours)
    });
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = match json {
        true => lines.json().flatten_event(true).boxed(),
        false => lines.with_target(false).boxed(),
    };
    let all = tracing_subscriber::registry().with(lines.with_filter(filter)).with(traces);
    let _already_started = tracing::subscriber::set_global_default(all);
    if let Some(error) = failed {
        tracing::warn!(error, "traces are not exported");
    }
}
