//! Query parameters of requests. Pure.

mod logs;

use coracle_streaming::Streams;

use super::http_failure::HttpFailure;
pub(super) use logs::LogOptions;

/// Names and values, in order.
pub(super) type Pairs = Vec<(String, String)>;

pub(super) fn pairs(query: Option<&str>) -> Pairs {
    form_urlencoded::parse(query.unwrap_or_default().as_bytes()).into_owned().collect()
}

/// Returns the first value of a name.
pub(super) fn first<'a>(pairs: &'a Pairs, name: &str) -> Option<&'a str> {
    pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
}

/// Returns all values of a name, in order.
pub(super) fn all(pairs: &Pairs, name: &str) -> Vec<String> {
    pairs.iter().filter(|(key, _)| key == name).map(|(_, value)| value.clone()).collect()
}

/// Returns the streams of an exec or attach. A terminal has no standard error: if both are requested, the terminal is used.
///
/// # Errors
/// 400: no stream is requested.
pub(super) fn streams(pairs: &Pairs) -> Result<Streams, HttpFailure> {
    let is_set = |name: &str| matches!(first(pairs, name), Some("1" | "true"));
    let tty = is_set("tty");
    let streams =
        Streams { stdin: is_set("input"), stdout: is_set("output"), stderr: is_set("error") && !tty, tty };
    match streams {
        Streams { stdin: false, stdout: false, stderr: false, .. } => {
            Err(HttpFailure::bad_request("you must specify at least 1 of stdin, stdout, stderr"))
        }
        streams => Ok(streams),
    }
}

/// Returns the ports of an old WebSocket client, `port=80&port=81,82`.
///
/// # Errors
/// 400: a port is invalid.
pub(super) fn ports(pairs: &Pairs) -> Result<Vec<u16>, HttpFailure> {
    let values = all(pairs, "port");
    let ports = values.iter().flat_map(|value| value.split(',')).map(|port| {
        let parsed = port.trim().parse::<u16>().ok().filter(|port| *port > 0);
        parsed.ok_or_else(|| HttpFailure::bad_request(format!("invalid port {port:?}: not 1 to 65535")))
    });
    ports.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_table() {
        for (why, query, want) in [
            ("none", "command=ls", None),
            ("none, by their values", "input=0&output=false", None),
            ("a terminal alone", "tty=1&error=1", None),
            ("all", "input=1&output=1&error=1", Some((true, true, true, false))),
            ("input alone", "input=1", Some((true, false, false, false))),
            ("stderr of a terminal is dropped", "output=1&error=1&tty=1", Some((false, true, false, true))),
        ] {
            let got = streams(&pairs(Some(query))).map(|s| (s.stdin, s.stdout, s.stderr, s.tty));
            assert_eq!(got.clone().ok(), want, "{why}");
            assert!(want.is_some() || got.unwrap_err().status == 400, "{why}");
        }
    }

    #[test]
    fn commands_and_ports_are_read_in_order() {
        let query = pairs(Some("command=sh&command=-c&output=1&command=echo+a%20b"));
        assert_eq!(all(&query, "command"), ["sh", "-c", "echo a b"]);
        for (query, want) in [
            ("", Some(vec![])),
            ("port=80", Some(vec![80])),
            ("port=80,81&port=82", Some(vec![80, 81, 82])),
            ("port=0", None),
            ("port=65536", None),
            ("port=http", None),
        ] {
            assert_eq!(ports(&pairs(Some(query))).ok(), want, "{query}");
        }
    }
}
