//! Environment variables of the original registry's server and client.

use std::collections::BTreeMap;

use coracle_registry::S3Config;
use miette::{IntoDiagnostic, WrapErr, miette};

/// File below the home directory with the original's S3 settings; `EPOCH_S3_ENV_FILE` names another one.
const FILE: &str = ".config/epoch/s3.env";
/// Maximum size of that file, in bytes.
const FILE_MAX: u64 = 64 << 10;

/// Returns the object store from the environment and the file; `None` if neither names one. A variable overrides the file.
pub(crate) fn s3() -> miette::Result<Option<S3Config>> {
    let named = std::env::var_os("EPOCH_S3_ENV_FILE").filter(|path| !path.is_empty());
    let path = named.clone().map(std::path::PathBuf::from);
    let path = path.or_else(|| Some(std::path::PathBuf::from(std::env::var_os("HOME")?).join(FILE)));
    let text = match path {
        Some(path) if named.is_some() || path.is_file() => {
            read(&path).into_diagnostic().wrap_err_with(|| format!("read {}", path.display()))?
        }
        _ => String::new(),
    };
    let file = parse(&text);
    config(|name| std::env::var(name).ok().or_else(|| file.get(name).cloned()).filter(|v| !v.is_empty()))
}

fn read(path: &std::path::Path) -> std::io::Result<String> {
    use std::io::Read;
    let mut text = String::new();
    std::fs::File::open(path)?.take(FILE_MAX).read_to_string(&mut text)?;
    Ok(text)
}

/// Parses `NAME=value` lines as shells and systemd do: comments, `export`, quotes. Pure.
fn parse(text: &str) -> BTreeMap<String, String> {
    let line = |line: &str| {
        let line = line.trim();
        let (name, value) = line.strip_prefix("export ").unwrap_or(line).split_once('=')?;
        let value = value.trim();
        let quoted = ['"', '\''].iter().find_map(|q| value.strip_prefix(*q)?.strip_suffix(*q));
        Some((name.trim().to_owned(), quoted.unwrap_or(value).to_owned()))
    };
    text.lines().filter(|l| !l.trim_start().starts_with('#')).filter_map(line).collect()
}

/// Returns the configuration from the variables. Pure.
fn config(get: impl Fn(&str) -> Option<String>) -> miette::Result<Option<S3Config>> {
    let Some(endpoint) = get("EPOCH_S3_ENDPOINT") else { return Ok(None) };
    let need = |name: &str| {
        get(name).ok_or_else(|| miette!("EPOCH_S3_ENDPOINT is set, and {name} is not: set it, too"))
    };
    let plain = get("EPOCH_S3_SECURE").is_some_and(|v| matches!(v.as_str(), "false" | "0" | "no" | "off"));
    let scheme = if plain { "http" } else { "https" };
    let endpoint = if endpoint.contains("://") { endpoint } else { format!("{scheme}://{endpoint}") };
    Ok(Some(S3Config {
        endpoint,
        region: get("EPOCH_S3_REGION").unwrap_or_else(|| "us-east-1".to_owned()),
        bucket: need("EPOCH_S3_BUCKET")?,
        prefix: get("EPOCH_S3_PREFIX").unwrap_or_else(|| "epoch/".to_owned()),
        access_key: need("EPOCH_S3_ACCESS_KEY")?,
        secret_key: need("EPOCH_S3_SECRET_KEY")?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_config(text: &str) -> miette::Result<Option<S3Config>> {
        let file = parse(text);
        config(|name| file.get(name).cloned())
    }

    #[test]
    fn env_file_of_the_original_epoch_is_parsed() {
        let text = "# store\nexport EPOCH_S3_ENDPOINT=s3.example:9000\nEPOCH_S3_BUCKET=\"epoch\"\nEPOCH_S3_ACCESS_KEY='a'\n\
                    EPOCH_S3_SECRET_KEY = b=c \nEPOCH_S3_SECURE=false\n";
        let s3 = parse_config(text).unwrap().unwrap();
        assert_eq!((s3.endpoint.as_str(), s3.bucket.as_str()), ("http://s3.example:9000", "epoch"));
        assert_eq!((s3.prefix.as_str(), s3.secret_key.as_str()), ("epoch/", "b=c"));
        let secure = parse_config(&text.replace("EPOCH_S3_SECURE=false", "")).unwrap().unwrap();
        assert_eq!(secure.endpoint, "https://s3.example:9000");
        assert_eq!(parse_config("").unwrap(), None);
        let missing = parse_config("EPOCH_S3_ENDPOINT=x").unwrap_err().to_string();
        assert!(missing.contains("EPOCH_S3_BUCKET is not"), "{missing}");
    }
}
