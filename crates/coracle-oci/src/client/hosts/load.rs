//! Reading the registry configuration directory.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{
    Registries,
    parse::{Parsed, ParsedHost},
};
use crate::client::registry_host::{RegistryHost, RegistryHosts};
use crate::{OciError, Secret};

/// Directory of registries without a directory of their own.
const DEFAULT: &str = "_default";
const FILE: &str = "hosts.toml";
/// Longest `hosts.toml` or certificate that is read, bytes.
const BYTES_MAX: u64 = 1 << 20;

impl Registries {
    /// Reads a configuration directory, certificates included. Also returns warnings, each with file, line and key. A
    /// directory without a `hosts.toml` has the certificates that docker would use: `*.crt` are trusted, `*.cert` and
    /// `*.key` identify the client. Blocking.
    ///
    /// # Errors
    /// [`OciError::RegistryConfig`] with file, line and reason.
    pub fn load(dir: &Path) -> Result<(Self, Vec<String>), OciError> {
        let (mut registries, mut warnings) = (Self::default(), Vec::new());
        let mut names = Vec::new();
        for entry in fs::read_dir(dir).map_err(|e| read_error(dir, &e))? {
            let entry = entry.map_err(|e| read_error(dir, &e))?;
            match entry.file_name().into_string() {
                Ok(name) if entry.path().is_dir() => names.push(name),
                _ => {}
            }
        }
        // When both spellings of a registry exist, the one with underscores wins, as in containerd: it is sorted last.
        names.sort_by_key(|name| (name.ends_with('_'), name.clone()));
        for name in names {
            let hosts = load_registry(&dir.join(&name), &mut warnings)?;
            match name.as_str() {
                DEFAULT => registries.default = Some(hosts),
                _ => registries = registries.with(&registry_of(&name), hosts),
            }
        }
        Ok((registries, warnings))
    }
}

/// Registry of a directory: `registry.example_5000_` is `registry.example:5000`.
fn registry_of(directory: &str) -> String {
    let port = directory.strip_suffix('_').and_then(|rest| rest.rsplit_once('_'));
    match port {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => format!("{host}:{port}"),
        _ => directory.to_owned(),
    }
}

fn load_registry(dir: &Path, warnings: &mut Vec<String>) -> Result<RegistryHosts, OciError> {
    let path = dir.join(FILE);
    let text = match read(&path) {
        Ok(bytes) => String::from_utf8(bytes).map_err(|_| config_error(&path, 1, "not UTF-8".to_owned()))?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(read_error(&path, &e)),
    };
    if text.trim().is_empty() {
        return Ok(RegistryHosts {
            mirrors: Vec::new(),
            server: with_files(dir, certificates(dir)?, warnings)?,
        });
    }
    let parsed = RegistryHosts::parse(&text).map_err(|e| config_error(&path, e.line, e.reason))?;
    warnings.extend(parsed.warnings().map(|warning| format!("{}: {warning}", path.display())));
    let Parsed { mirrors, server, .. } = parsed;
    let mirrors = mirrors.into_iter().map(|host| with_files(dir, host, warnings));
    Ok(RegistryHosts {
        mirrors: mirrors.collect::<Result<_, _>>()?,
        server: with_files(dir, server, warnings)?,
    })
}

/// Finds certificates by docker's file names.
fn certificates(dir: &Path) -> Result<ParsedHost, OciError> {
    let mut parsed = ParsedHost::default();
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| read_error(dir, &e))? {
        files.push(entry.map_err(|e| read_error(dir, &e))?.path());
    }
    files.sort();
    for file in files {
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("crt") => parsed.ca.push(file),
            Some("cert") => {
                let key = file.with_extension("key");
                parsed.client.push((file, Some(key)));
            }
            _ => {}
        }
    }
    Ok(parsed)
}

/// Reads the files that belong to a server. Paths are relative to the directory.
fn with_files(dir: &Path, parsed: ParsedHost, warnings: &mut Vec<String>) -> Result<RegistryHost, OciError> {
    let ParsedHost { mut host, ca, client } = parsed;
    let certificate = |path: &Path| {
        let path = dir.join(path);
        read(&path).map(|bytes| (bytes, path.clone())).map_err(|e| read_error(&path, &e))
    };
    for file in ca {
        let (mut bytes, path) = certificate(&file)?;
        match reqwest::Certificate::from_pem_bundle(&bytes) {
            Ok(found) if !found.is_empty() => {}
            _ => return Err(config_error(&path, 1, "no certificates in PEM".to_owned())),
        }
        bytes.push(b'\n');
        host.trust.extend(bytes);
    }
    if client.len() > 1 {
        let file = dir.join(FILE);
        warnings.push(format!("{}: only the first client certificate of a server is used", file.display()));
    }
    if let Some((file, key)) = client.into_iter().next() {
        let (mut bytes, path) = certificate(&file)?;
        if let Some(key) = key {
            bytes.push(b'\n');
            bytes.extend(certificate(&key)?.0);
        }
        let broken = || config_error(&path, 1, "no certificate with its key in PEM".to_owned());
        reqwest::Identity::from_pem(&bytes).map_err(|_| broken())?;
        host.identity = Some(Secret::new(String::from_utf8(bytes).map_err(|_| broken())?));
    }
    Ok(host)
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    use io::Read as _;
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > BYTES_MAX {
        return Err(io::Error::other(format!("longer than {BYTES_MAX} bytes")));
    }
    Ok(bytes)
}

fn read_error(path: &Path, error: &io::Error) -> OciError {
    OciError::RegistryConfig { path: path.to_owned(), line: None, reason: error.to_string() }
}

fn config_error(path: &Path, line: usize, reason: String) -> OciError {
    OciError::RegistryConfig { path: path.to_owned(), line: Some(line), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_names_table() {
        for (directory, want) in [
            ("docker.io", "docker.io"),
            ("registry.example:5000", "registry.example:5000"),
            ("registry.example_5000_", "registry.example:5000"),
            ("a_b", "a_b"),
            ("a_b_", "a_b_"),
        ] {
            assert_eq!(registry_of(directory), want);
        }
    }

    #[test]
    fn directory_errors_name_file_and_line() {
        let dir = tempfile::tempdir().unwrap();
        let file = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        file("lan_5000_/hosts.toml", "server = 'http://lan:5000'\nproxy = 'x'\n");
        file("lan:5000/hosts.toml", "server = 'http://wrong'\n");
        file("bare/readme.txt", "");
        file("_default/hosts.toml", "[host.'https://cache.example']\n");
        file("note", "not a directory");
        let (registries, warnings) = Registries::load(dir.path()).unwrap();
        let shown = dir.path().join("lan_5000_/hosts.toml");
        assert_eq!(warnings, [format!("{}: line 2: unknown key \"proxy\"", shown.display())]);
        assert_eq!(registries.hosts.keys().collect::<Vec<_>>(), ["bare", "lan:5000"]);
        assert_eq!(registries.hosts["lan:5000"].server.url.as_ref().unwrap().as_str(), "http://lan:5000/");
        assert!(registries.default.is_some());

        for (text, want) in [
            ("\nserver = 1", "line 2: server is a string"),
            ("ca = 'missing.pem'", "missing.pem: No such file"),
            ("ca = 'hosts.toml'", "no certificates in PEM"),
            ("client = 'hosts.toml'", "no certificate with its key"),
        ] {
            file("broken/hosts.toml", text);
            let error = Registries::load(dir.path()).expect_err(text);
            assert_eq!(error.code(), "COR-IMG-018");
            assert!(error.to_string().contains(want), "{text}: {error}");
            assert!(error.to_string().contains("broken/"), "{text}: {error}");
        }
        assert!(Registries::load(&dir.path().join("absent")).is_err());
    }
}
