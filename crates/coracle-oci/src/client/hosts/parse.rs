//! Parser of `hosts.toml`. Pure: [`super::load`] reads the files that are named in it.

use std::{path::PathBuf, time::Duration};

use reqwest::Url;
use toml_span::{Span, Value, value::Table};

use crate::client::registry_host::{Capabilities, RegistryHost, RegistryHosts};

/// Error in a `hosts.toml`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct InvalidHosts {
    /// Line, counted from 1.
    pub line: usize,
    /// Reason.
    pub reason: String,
}

/// Parsed `hosts.toml`, before the files named in it are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parsed {
    pub(super) mirrors: Vec<ParsedHost>,
    pub(super) server: ParsedHost,
    /// Unknown keys and their lines.
    pub(super) unknown: Vec<(usize, String)>,
}

/// One server and the files that belong to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ParsedHost {
    pub(super) host: RegistryHost,
    pub(super) ca: Vec<PathBuf>,
    /// Client certificate, and its key if the key is a separate file.
    pub(super) client: Vec<(PathBuf, Option<PathBuf>)>,
}

impl RegistryHosts {
    /// Reads the text of a `hosts.toml`. Pure.
    ///
    /// # Errors
    /// [`InvalidHosts`] for invalid TOML, or for values of the wrong type.
    pub fn parse(text: &str) -> Result<Parsed, InvalidHosts> {
        let fail = |e: toml_span::Error| at(text, e.span, e.to_string());
        let document = toml_span::parse(text).map_err(fail)?;
        let root = document.as_table().ok_or_else(|| at(text, document.span, "not a table".to_owned()))?;
        let mut reader = Reader { text, unknown: Vec::new() };
        let mut server = reader.host(root, &["server", "host"])?;
        if let Some(value) = root.get("server") {
            server.host.url = Some(reader.url(reader.string(value, "server")?, value.span)?);
        }
        let mut mirrors = Vec::new();
        if let Some(value) = root.get("host") {
            // Restores the order of the document: the table is sorted by name.
            let mut all: Vec<_> = reader.table(value, "host")?.iter().collect();
            all.sort_by_key(|(key, value)| (key.span.start, value.span.start));
            for (key, value) in all {
                let mut parsed = reader.host(reader.table(value, &key.name)?, &[])?;
                parsed.host.url = Some(reader.url(&key.name, key.span)?);
                mirrors.push(parsed);
            }
        }
        Ok(Parsed { mirrors, server, unknown: reader.unknown })
    }
}

impl Parsed {
    /// Servers, without the contents of files.
    #[must_use]
    pub fn hosts(&self) -> RegistryHosts {
        let mirrors = self.mirrors.iter().map(|parsed| parsed.host.clone()).collect();
        RegistryHosts { mirrors, server: self.server.host.clone() }
    }

    /// Warnings about unknown keys, such as `line 3: unknown key "x"`.
    pub fn warnings(&self) -> impl Iterator<Item = String> + '_ {
        self.unknown.iter().map(|(line, key)| format!("line {line}: unknown key {key:?}"))
    }
}

struct Reader<'a> {
    text: &'a str,
    unknown: Vec<(usize, String)>,
}

impl<'a> Reader<'a> {
    /// Parses the settings of one server. `others` are keys of the same table that are parsed elsewhere.
    fn host(&mut self, table: &Table<'a>, others: &[&str]) -> Result<ParsedHost, InvalidHosts> {
        let mut parsed = ParsedHost::default();
        for (key, value) in table {
            match key.name.as_ref() {
                "capabilities" => parsed.host.capabilities = self.capabilities(value)?,
                "ca" => parsed.ca = self.strings(value, "ca")?.into_iter().map(PathBuf::from).collect(),
                "client" => parsed.client = self.client(value)?,
                "skip_verify" => parsed.host.skip_verify = self.boolean(value, "skip_verify")?,
                "override_path" => parsed.host.override_path = self.boolean(value, "override_path")?,
                "dial_timeout" => parsed.host.dial_timeout = Some(self.duration(value)?),
                "header" => parsed.host.headers = self.headers(value)?,
                name if others.contains(&name) => {}
                name => self.unknown.push((line(self.text, key.span), name.to_owned())),
            }
        }
        Ok(parsed)
    }

    fn capabilities(&self, value: &Value<'a>) -> Result<Capabilities, InvalidHosts> {
        let mut capabilities = Capabilities { pull: false, resolve: false, push: false };
        let words = self.strings(value, "capabilities")?;
        for word in &words {
            match word.to_ascii_lowercase().as_str() {
                "pull" => capabilities.pull = true,
                "resolve" => capabilities.resolve = true,
                "push" => capabilities.push = true,
                _ => return Err(self.invalid_value(value, format!("unknown capability {word:?}"))),
            }
        }
        Ok(if words.is_empty() { Capabilities::ALL } else { capabilities })
    }

    /// Parses one file, several files, or pairs of certificate and key.
    fn client(&self, value: &Value<'a>) -> Result<Vec<(PathBuf, Option<PathBuf>)>, InvalidHosts> {
        let Some(list) = value.as_array() else {
            return Ok(vec![(self.string(value, "client")?.into(), None)]);
        };
        let pair = |value: &Value<'a>| match value.as_array().map(Vec::as_slice) {
            None => Ok((PathBuf::from(self.string(value, "client")?), None)),
            Some([certificate, key]) => {
                let key = self.string(key, "client")?;
                let key = (!key.is_empty()).then(|| PathBuf::from(key));
                Ok((PathBuf::from(self.string(certificate, "client")?), key))
            }
            Some(_) => Err(self.invalid_value(value, "client: a pair is certificate and key".to_owned())),
        };
        list.iter().map(pair).collect()
    }

    fn headers(&self, value: &Value<'a>) -> Result<Vec<(String, String)>, InvalidHosts> {
        let mut headers = Vec::new();
        for (key, value) in self.table(value, "header")? {
            for text in self.strings(value, &key.name)? {
                let is_name = reqwest::header::HeaderName::from_bytes(key.name.as_bytes()).is_ok();
                if !is_name || reqwest::header::HeaderValue::from_str(text).is_err() {
                    return Err(self.invalid_value(value, format!("invalid header {:?}", key.name)));
                }
                headers.push((key.name.to_string(), text.to_owned()));
            }
        }
        Ok(headers)
    }

    /// Parses a duration as Go writes it, with one unit: `500ms`, `5s`, `1m`, `1h`.
    fn duration(&self, value: &Value<'a>) -> Result<Duration, InvalidHosts> {
        let text = self.string(value, "dial_timeout")?;
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit_ms = match &text[digits.len()..] {
            "ms" => 1.0,
            "s" => 1_000.0,
            "m" => 60_000.0,
            "h" => 3_600_000.0,
            _ => 0.0,
        };
        let duration = digits.parse::<f64>().ok().map(|count| count * unit_ms / 1_000.0);
        let duration = duration.filter(|s| *s > 0.0).and_then(|s| Duration::try_from_secs_f64(s).ok());
        duration.ok_or_else(|| self.invalid_value(value, format!("invalid dial_timeout {text:?}")))
    }

    /// Parses the URL of a server. Without a scheme, it is `https`.
    fn url(&self, text: &str, span: Span) -> Result<Url, InvalidHosts> {
        let fail = |reason: &str| at(self.text, span, format!("invalid server {text:?}: {reason}"));
        let whole = if text.contains("://") { text.to_owned() } else { format!("https://{text}") };
        let url = Url::parse(&whole).map_err(|e| fail(&e.to_string()))?;
        match url.scheme() {
            _ if url.host_str().is_none() => Err(fail("it has no host")),
            _ if url.query().is_some() || url.fragment().is_some() => Err(fail("it has a query")),
            _ if !url.username().is_empty() || url.password().is_some() => Err(fail("it has credentials")),
            "http" | "https" => Ok(url),
            _ => Err(fail("the scheme is http or https")),
        }
    }

    fn boolean(&self, value: &Value<'a>, key: &str) -> Result<bool, InvalidHosts> {
        value.as_bool().ok_or_else(|| self.invalid_value(value, format!("{key} is true or false")))
    }

    fn string<'v>(&self, value: &'v Value<'a>, key: &str) -> Result<&'v str, InvalidHosts> {
        value.as_str().ok_or_else(|| self.invalid_value(value, format!("{key} is a string")))
    }

    /// Parses one string or a list of strings.
    fn strings<'v>(&self, value: &'v Value<'a>, key: &str) -> Result<Vec<&'v str>, InvalidHosts> {
        let wrong = || self.invalid_value(value, format!("{key} is a string or a list of strings"));
        match value.as_array() {
            Some(list) => list.iter().map(|one| one.as_str().ok_or_else(wrong)).collect(),
            None => value.as_str().map(|one| vec![one]).ok_or_else(wrong),
        }
    }

    fn table<'v>(&self, value: &'v Value<'a>, key: &str) -> Result<&'v Table<'a>, InvalidHosts> {
        value.as_table().ok_or_else(|| self.invalid_value(value, format!("{key} is a table")))
    }

    fn invalid_value(&self, value: &Value<'a>, reason: String) -> InvalidHosts {
        at(self.text, value.span, reason)
    }
}

fn at(text: &str, span: Span, reason: String) -> InvalidHosts {
    InvalidHosts { line: line(text, span), reason }
}

fn line(text: &str, span: Span) -> usize {
    let before = text.as_bytes().get(..span.start).unwrap_or(text.as_bytes());
    before.iter().filter(|byte| **byte == b'\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Example from containerd's documentation.
    const MIRRORS: &str = r#"
server = "https://registry-1.docker.io"    # Exclude this to not use upstream

[host."https://public-mirror.example.com"]
  capabilities = ["pull"]                  # Requires less trust
[host."https://docker-mirror.internal"]
  capabilities = ["pull", "resolve"]
  ca = "docker-mirror.crt"
  client = [["a.cert", "a.key"], ["b.pem", ""]]
  dial_timeout = "1.5s"
  override_path = true
  skip_verify = true
  [host."https://docker-mirror.internal".header]
    x-custom-1 = ["part a", "part b"]
"#;

    #[test]
    fn hosts_toml_keeps_the_order_of_mirrors() {
        let parsed = RegistryHosts::parse(MIRRORS).unwrap();
        assert_eq!(parsed.unknown, []);
        let hosts = parsed.hosts();
        assert_eq!(hosts.server.url.as_ref().unwrap().as_str(), "https://registry-1.docker.io/");
        let urls: Vec<_> = hosts.mirrors.iter().map(|m| m.url.as_ref().unwrap().as_str()).collect();
        assert_eq!(urls, ["https://public-mirror.example.com/", "https://docker-mirror.internal/"]);
        assert_eq!(hosts.mirrors[0].capabilities, Capabilities { pull: true, resolve: false, push: false });
        let ParsedHost { host, ca, client } = &parsed.mirrors[1];
        assert_eq!(
            (ca.as_slice(), host.skip_verify, host.override_path),
            (&["docker-mirror.crt".into()][..], true, true)
        );
        assert_eq!(client[0], ("a.cert".into(), Some("a.key".into())));
        assert_eq!(client[1], ("b.pem".into(), None));
        assert_eq!(host.dial_timeout, Some(Duration::from_millis(1500)));
        let header = |text: &str| ("x-custom-1".to_owned(), text.to_owned());
        assert_eq!(host.headers, [header("part a"), header("part b")]);
    }

    #[test]
    fn hosts_toml_refused_table() {
        for (text, want) in [
            ("server = ", "line 1:"),
            ("\n\nserver = 7", "line 3: server is a string"),
            ("[host.'ftp://x']", "line 1: invalid server \"ftp://x\": the scheme is http or https"),
            ("[host.'https://u:p@x']", "it has credentials"),
            ("[host.'https://x?a']", "it has a query"),
            ("\n[host]\n'https://x' = 1", "line 3: https://x is a table"),
            ("\nskip_verify = 'yes'", "line 2: skip_verify is true or false"),
            ("capabilities = ['fly']", "line 1: unknown capability \"fly\""),
            ("ca = 1", "line 1: ca is a string or a list of strings"),
            ("client = [['a']]", "line 1: client: a pair is certificate and key"),
            ("[header]\nx = 1", "line 2: x is a string or a list of strings"),
            ("[header]\n'a b' = 'x'", "line 2: invalid header \"a b\""),
            ("dial_timeout = '5'", "line 1: invalid dial_timeout \"5\""),
            ("a = 1\na = 2", "line 2: duplicate key"),
        ] {
            let error = RegistryHosts::parse(text).expect_err(text).to_string();
            assert!(error.contains(want), "{text:?}: {error}");
        }
    }

    #[test]
    fn hosts_toml_unknown_key_is_a_warning() {
        let parsed = RegistryHosts::parse("\nproxy = 'http://p'\n[host.'https://x']\nspeed = 1\n").unwrap();
        let warnings: Vec<_> = parsed.warnings().collect();
        assert_eq!(warnings, ["line 2: unknown key \"proxy\"", "line 4: unknown key \"speed\""]);
    }
}
