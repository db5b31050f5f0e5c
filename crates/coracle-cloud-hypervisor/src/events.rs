//! Events of a VM: `--event-monitor` writes one JSON object after the other, without a separator.

use std::io;
use std::path::Path;

use serde::Deserialize;

/// File of a VM's events, in its run directory.
pub(crate) const EVENTS_FILE: &str = "events.json";
/// Maximum length that is read of the file; one life of a VM has some ten events.
const BYTES_MAX: u64 = 1 << 20;

/// Event of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Event {
    /// Source of the event: `vm`, `vmm`, or a device.
    pub source: String,
    /// Kind of the event: `booted`, `shutdown`, …
    pub event: String,
}

/// Reads all events of the last VMM of a VM; an incomplete object is left out.
///
/// # Errors
/// When the file cannot be read. A missing file means no events.
pub fn events(run_dir: &Path) -> io::Result<Vec<Event>> {
    let file = match std::fs::File::open(run_dir.join(EVENTS_FILE)) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut text = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(file, BYTES_MAX), &mut text)?;
    Ok(parse(&text))
}

fn parse(text: &[u8]) -> Vec<Event> {
    serde_json::Deserializer::from_slice(text).into_iter::<Event>().map_while(Result::ok).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concatenated_events_are_parsed_and_truncated_one_waits() {
        let text = br#"{
  "timestamp": {"secs": 0, "nanos": 1}, "source": "vmm", "event": "starting", "properties": null
}{"timestamp": {"secs": 0, "nanos": 2}, "source": "vm", "event": "booted", "properties": {"id": "x"}}
{"source": "vm", "eve"#;
        let told: Vec<_> = parse(text).into_iter().map(|e| format!("{} {}", e.source, e.event)).collect();
        assert_eq!(told, ["vmm starting", "vm booted"]);
        assert!(events(Path::new("/no/such/folder")).unwrap().is_empty());
    }
}
