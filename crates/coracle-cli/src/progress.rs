//! Progress on stderr: bars on a terminal, a line per step and per 10 % elsewhere.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::time::Duration;

use coracle_proto::host::PullProgress;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::cli::ProgressMode;

/// Progress display of one operation.
pub enum ProgressDisplay {
    Bars { all: MultiProgress, bars: HashMap<String, ProgressBar>, spinner: Option<ProgressBar> },
    Lines { said: HashMap<String, u64> },
    None,
}

impl ProgressDisplay {
    pub fn new(mode: ProgressMode) -> Self {
        let terminal =
            std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|t| t != "dumb");
        match mode {
            ProgressMode::None => Self::None,
            ProgressMode::Auto if terminal => {
                Self::Bars { all: MultiProgress::new(), bars: HashMap::new(), spinner: None }
            }
            ProgressMode::Auto | ProgressMode::Plain => Self::Lines { said: HashMap::new() },
        }
    }

    /// Shows an event of a pull.
    pub fn pull(&mut self, event: &PullProgress) {
        let key = format!("{} {}", event.step, short(&event.item)).trim_end().to_owned();
        match self {
            Self::None => {}
            Self::Bars { all, bars, .. } => {
                let bar = bars.entry(key.clone()).or_insert_with(|| {
                    let bar = all.add(ProgressBar::new(event.total_bytes));
                    let style = "{prefix:24} {bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
                    if let Ok(style) = ProgressStyle::with_template(style) {
                        bar.set_style(style);
                    }
                    bar.set_prefix(key);
                    bar
                });
                bar.set_length(event.total_bytes.max(event.done_bytes));
                bar.set_position(event.done_bytes);
            }
            Self::Lines { said } => {
                let tenth = (event.done_bytes * 10).checked_div(event.total_bytes).unwrap_or(0);
                if said.insert(key.clone(), tenth) != Some(tenth) {
                    match event.total_bytes {
                        0 => eprintln!("{key}"),
                        total => eprintln!("{key} {}% of {}", tenth * 10, crate::output::bytes(total)),
                    }
                }
            }
        }
    }

    /// Shows a named step without a measure.
    pub fn step(&mut self, what: &str) {
        match self {
            Self::None => {}
            Self::Bars { all, spinner, .. } => {
                if let Some(done) = spinner.take() {
                    done.finish_and_clear();
                }
                let bar = all.add(ProgressBar::new_spinner());
                bar.set_message(what.to_owned());
                bar.enable_steady_tick(Duration::from_millis(100));
                *spinner = Some(bar);
            }
            Self::Lines { .. } => eprintln!("{what}"),
        }
    }

    /// Clears bars and spinners.
    pub fn done(self) {
        if let Self::Bars { bars, spinner, .. } = self {
            for bar in bars.into_values().chain(spinner) {
                bar.finish_and_clear();
            }
        }
    }
}

/// Shortens a digest: `sha256:0123…` → `0123456789ab`.
fn short(digest: &str) -> &str {
    let hex = digest.split(':').next_back().unwrap_or_default();
    hex.get(..12).unwrap_or(hex)
}
