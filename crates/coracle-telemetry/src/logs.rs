//! Logs to stderr: JSON for machines, lines for people.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

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

/// Starts logging. `filter` is a level or a `tracing` filter; a bad one means `info`.
/// Only the first call of a process counts.
pub fn init_logs(filter: &str, format: LogFormat) {
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|_| EnvFilter::new("info"));
    let json = match format {
        LogFormat::Auto => !std::io::stderr().is_terminal(),
        LogFormat::Json => true,
        LogFormat::Text => false,
    };
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let _already_started = if json {
        tracing::subscriber::set_global_default(lines.json().flatten_event(true).finish())
    } else {
        tracing::subscriber::set_global_default(lines.with_target(false).finish())
    };
}
