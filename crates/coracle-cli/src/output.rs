//! Tables and documents on stdout.

pub mod jsonpath;

use std::io::Write;

use comfy_table::{ContentArrangement, Table, presets};
use serde_json::{Value, json};

use crate::cli::Format;
use crate::error::{Failure, printable};

/// Group and version of every document.
pub const API_VERSION: &str = "coracle.dev/v1";

/// Table without borders, with two spaces between columns.
pub struct Columns {
    table: Table,
}

impl Columns {
    pub fn new(header: &[&str]) -> Self {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        if !header.is_empty() {
            table.set_header(header.iter().copied());
        }
        Self { table }
    }

    pub fn row(&mut self, cells: &[String]) {
        self.table.add_row(cells.iter().map(|c| printable(c)));
    }

    pub fn print(self) -> Result<(), Failure> {
        write(&self.text())
    }

    /// Returns the lines without trailing blanks.
    pub fn text(mut self) -> String {
        let last = self.table.column_count().saturating_sub(1);
        for (n, column) in self.table.column_iter_mut().enumerate() {
            column.set_padding((0, if n == last { 0 } else { 3 }));
        }
        self.table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
    }
}

/// Writes to stdout; a closed pipe ends the command without an error.
pub fn write(text: &str) -> Result<(), Failure> {
    write_bytes(text.as_bytes())
}

/// Like [`write()`], for bytes that may not be text.
pub fn write_bytes(bytes: &[u8]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(e) => Err(Failure::new("COR-CLI-003", format!("write to stdout: {e}"))),
    }
}

/// Prints a list as one document with a kind and an apiVersion, in the same shape for every command.
pub fn list(format: &Format, kind: &str, items: Vec<Value>) -> Result<(), Failure> {
    document(format, &json!({"apiVersion": API_VERSION, "kind": format!("{kind}List"), "items": items}))
}

/// Prints one document.
pub fn document(format: &Format, value: &Value) -> Result<(), Failure> {
    let text = match format {
        Format::Yaml => {
            serde_saphyr::to_string(value).map_err(|e| Failure::new("COR-CLI-004", e.to_string()))?
        }
        Format::JsonPath(template) => template.render(value),
        Format::Json | Format::Table | Format::Wide | Format::Name => format!("{value:#}\n"),
    };
    write(&text)
}

/// Formats an age as kubectl does: `5s`, `3m`, `2h`, `4d`.
pub fn age(ms: i64) -> String {
    let s = ms.max(0) / 1000;
    match s {
        0..120 => format!("{s}s"),
        120..7200 => format!("{}m", s / 60),
        7200..172_800 => format!("{}h", s / 3600),
        _ => format!("{}d", s / 86_400),
    }
}

/// Formats a size: `12.3 MiB`.
pub fn bytes(n: u64) -> String {
    indicatif::BinaryBytes(n).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_formatted_as_by_kubectl() {
        for (ms, want) in [
            (0, "0s"),
            (119_000, "119s"),
            (120_000, "2m"),
            (7_200_000, "2h"),
            (172_800_000, "2d"),
            (-5, "0s"),
        ] {
            assert_eq!(age(ms), want);
        }
    }
}
