//! Text format of Prometheus, with explicit timestamps. Pure.

use std::fmt::Write as _;

/// Content type of the text.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Metrics, grouped in families.
#[derive(Debug, Default)]
pub(super) struct Text(String);

impl Text {
    /// Begins a family; `kind` is `counter` or `gauge`.
    pub(super) fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _infallible = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    /// Adds a sample; its labels keep their order. A sample without a timestamp is current.
    pub(super) fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64, time_ms: Option<i64>) {
        self.0.push_str(name);
        for (index, (label, value)) in labels.iter().enumerate() {
            self.0.push(if index == 0 { '{' } else { ',' });
            let _infallible = write!(self.0, "{label}=\"");
            self.escape(value);
            self.0.push('"');
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _infallible = write!(self.0, " {value}");
        if let Some(time_ms) = time_ms {
            let _infallible = write!(self.0, " {time_ms}");
        }
        self.0.push('\n');
    }

    fn escape(&mut self, value: &str) {
        for character in value.chars() {
            match character {
                '\\' => self.0.push_str("\\\\"),
                '"' => self.0.push_str("\\\""),
                '\n' => self.0.push_str("\\n"),
                other => self.0.push(other),
            }
        }
    }

    pub(super) fn finish(self) -> String {
        self.0
    }
}

/// Converts nanoseconds to seconds.
pub(super) fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped_and_ordered() {
        let mut text = Text::default();
        text.family("a_total", "counter", "What it counts");
        text.sample("a_total", &[("z", "1"), ("a", "x\"\\\ny")], seconds(1_500_000_000), Some(7));
        text.sample("a_total", &[], 0.0, None);
        let want = "# HELP a_total What it counts\n# TYPE a_total counter\n\
                    a_total{z=\"1\",a=\"x\\\"\\\\\\ny\"} 1.5 7\na_total 0\n";
        assert_eq!(text.finish(), want);
    }
}
