//! Docker's `config.json` and credential helpers.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{Credentials, Login, Secret};
use crate::OciError;

const CONFIG_BYTES_MAX: u64 = 4 << 20;
const HELPER_BYTES_MAX: u64 = 64 << 10;
const HELPER_TIMEOUT: Duration = Duration::from_secs(30);
/// Docker Hub's key, older than every other rule.
const HUB_KEY: &str = "https://index.docker.io/v1/";
/// Keys that Docker Hub's entry may have, without a trailing slash.
pub(super) const HUB_KEYS: [&str; 4] =
    ["https://index.docker.io/v1", "index.docker.io", "docker.io", "https://index.docker.io"];
/// The user name with which a helper marks a refresh token.
const TOKEN_USER: &str = "<token>";

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    #[serde(default)]
    auths: BTreeMap<String, Auth>,
    #[serde(default)]
    cred_helpers: BTreeMap<String, String>,
    creds_store: Option<String>,
}

/// Credentials of one registry, in one of the forms that docker writes.
#[derive(Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) struct Auth {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: String,
}

/// Finds the credentials to send to `registry` (the host of a reference). Reads files and may run a helper, for at most 30 s.
/// Cancel-safe.
///
/// # Errors
/// [`OciError::Credentials`]
pub(crate) async fn lookup(credentials: &Credentials, registry: &str) -> Result<Login, OciError> {
    let dir = match credentials {
        Credentials::Anonymous => return Ok(Login::Anonymous),
        Credentials::Basic { user, password } => {
            return Ok(Login::Basic { user: user.clone(), password: password.clone() });
        }
        Credentials::Bearer(token) => return Ok(Login::Bearer(token.clone())),
        Credentials::Identity(token) => return Ok(Login::Identity(token.clone())),
        Credentials::Docker { dir } => dir.clone().or_else(default_dir),
    };
    let Some(dir) = dir else { return Ok(Login::Anonymous) };
    let Some(config) = read(&dir.join("config.json"), registry).await? else { return Ok(Login::Anonymous) };
    let helper = config.cred_helpers.get(registry).or(config.creds_store.as_ref().filter(|s| !s.is_empty()));
    if let Some(helper) = helper
        && let Some(login) = ask(helper, registry).await?
    {
        return Ok(login);
    }
    stored(&config, registry)
}

fn default_dir() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("DOCKER_CONFIG").or_else(|| set("HOME").map(|home| home.join(".docker")))
}

async fn read(path: &Path, registry: &str) -> Result<Option<Config>, OciError> {
    let mut bytes = Vec::new();
    match tokio::fs::File::open(path).await {
        Ok(file) => file
            .take(CONFIG_BYTES_MAX)
            .read_to_end(&mut bytes)
            .await
            .map_err(|e| OciError::io("read", path, e))?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(OciError::io("open", path, e)),
    };
    // Reports only the position from the parser's error: the file holds passwords.
    let config = serde_json::from_slice(&bytes);
    let position = |e: serde_json::Error| {
        format!("{} does not parse at line {} column {}", path.display(), e.line(), e.column())
    };
    config.map(Some).map_err(|e| credentials_error(registry, position(e), None))
}

/// Keys that the entry of a registry may have.
fn keys(registry: &str) -> Vec<String> {
    if registry == "docker.io" {
        return vec![
            HUB_KEY.to_owned(),
            "index.docker.io".to_owned(),
            "docker.io".to_owned(),
            "https://index.docker.io".to_owned(),
        ];
    }
    let bare = [registry.to_owned(), format!("https://{registry}"), format!("http://{registry}")];
    bare.iter()
        .flat_map(|key| [key.clone(), format!("{key}/"), format!("{key}/v1/"), format!("{key}/v2/")])
        .collect()
}

fn stored(config: &Config, registry: &str) -> Result<Login, OciError> {
    let Some(auth) = keys(registry).iter().find_map(|key| config.auths.get(key)) else {
        return Ok(Login::Anonymous);
    };
    auth.login(registry)
}

impl Auth {
    /// Login that the entry describes.
    ///
    /// # Errors
    /// [`OciError::Credentials`] for an `auth` that cannot be read.
    pub(super) fn login(&self, registry: &str) -> Result<Login, OciError> {
        let full = |text: &Option<String>| text.clone().filter(|t| !t.is_empty());
        if let Some(token) = full(&self.registrytoken) {
            return Ok(Login::Bearer(Secret::new(token)));
        }
        if let Some(token) = full(&self.identitytoken) {
            return Ok(Login::Identity(Secret::new(token)));
        }
        if let (Some(user), Some(password)) = (full(&self.username), full(&self.password)) {
            return Ok(Login::Basic { user, password: Secret::new(password) });
        }
        let Some(encoded) = full(&self.auth) else { return Ok(Login::Anonymous) };
        let decoded = STANDARD.decode(encoded.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        let pair = decoded.as_deref().and_then(|text| text.split_once(':'));
        let (user, password) = pair.ok_or_else(|| {
            credentials_error(registry, "its \"auth\" is not base64 of user:password".to_owned(), None)
        })?;
        let password = Secret::new(password.trim_end_matches('\0'));
        Ok(Login::Basic { user: user.to_owned(), password })
    }
}

/// Runs `docker-credential-<helper> get`. `None` when the helper has nothing for the registry.
async fn ask(helper: &str, registry: &str) -> Result<Option<Login>, OciError> {
    if !helper.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.')) {
        return Err(credentials_error(
            registry,
            format!("credential helper {helper:?} has an impossible name"),
            None,
        ));
    }
    let program = format!("docker-credential-{helper}");
    let server = if registry == "docker.io" { HUB_KEY } else { registry };
    let run = tokio::time::timeout(HELPER_TIMEOUT, run(&program, server)).await;
    let broken = |e: io::Error| credentials_error(registry, format!("run {program}"), Some(e.into()));
    let (success, output) = run
        .map_err(|_| credentials_error(registry, format!("{program} did not answer in time"), None))?
        .map_err(broken)?;
    if !success {
        // The helper protocol has no exit code for a missing entry, only this sentence.
        let missing = String::from_utf8_lossy(&output).contains("credentials not found");
        return if missing {
            Ok(None)
        } else {
            Err(credentials_error(registry, format!("{program} failed"), None))
        };
    }
    let answer: Answer = serde_json::from_slice(&output)
        .map_err(|_| credentials_error(registry, format!("{program} gave no credentials"), None))?;
    if answer.username == TOKEN_USER {
        return Ok(Some(Login::Identity(Secret::new(answer.secret))));
    }
    Ok(Some(Login::Basic { user: answer.username, password: Secret::new(answer.secret) }))
}

async fn run(program: &str, input: &str) -> io::Result<(bool, Vec<u8>)> {
    let mut child = tokio::process::Command::new(program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A helper that does not read its input closes the pipe; its exit code reports any failure.
        let _ = stdin.write_all(input.as_bytes()).await;
    }
    let mut output = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(HELPER_BYTES_MAX).read_to_end(&mut output).await?;
    }
    Ok((child.wait().await?.success(), output))
}

fn credentials_error(registry: &str, reason: String, source: Option<crate::error::Cause>) -> OciError {
    OciError::Credentials { registry: registry.to_owned(), reason, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored_login_text(config: &str, registry: &str) -> String {
        match stored(&serde_json::from_str(config).unwrap(), registry) {
            Ok(Login::Anonymous) => "anonymous".to_owned(),
            Ok(Login::Basic { user, password }) => format!("{user}:{}", password.expose()),
            Ok(Login::Bearer(token)) => format!("bearer {}", token.expose()),
            Ok(Login::Identity(token)) => format!("identity {}", token.expose()),
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn stored_credentials_table() {
        let auth = STANDARD.encode("u:p:q");
        let entry = |key: &str| format!(r#"{{"auths":{{"{key}":{{"auth":"{auth}"}}}}}}"#);
        for (why, config, registry, want) in [
            ("nothing", "{}".to_owned(), "r.io", "anonymous"),
            ("plain key", entry("r.io"), "r.io", "u:p:q"),
            ("URL key", entry("https://r.io/v2/"), "r.io", "u:p:q"),
            ("port", entry("localhost:5000"), "localhost:5000", "u:p:q"),
            ("another port", entry("localhost:5001"), "localhost:5000", "anonymous"),
            ("hub", entry(HUB_KEY), "docker.io", "u:p:q"),
            ("a helper keeps the secret", r#"{"auths":{"r.io":{}}}"#.to_owned(), "r.io", "anonymous"),
            ("token", r#"{"auths":{"r.io":{"registrytoken":"t"}}}"#.to_owned(), "r.io", "bearer t"),
            (
                "identity token",
                r#"{"auths":{"r.io":{"auth":"dTo=","identitytoken":"t"}}}"#.to_owned(),
                "r.io",
                "identity t",
            ),
            (
                "plain fields",
                r#"{"auths":{"r.io":{"username":"u","password":"p"}}}"#.to_owned(),
                "r.io",
                "u:p",
            ),
        ] {
            assert_eq!(stored_login_text(&config, registry), want, "{why}");
        }
        assert!(stored_login_text(r#"{"auths":{"r.io":{"auth":"???"}}}"#, "r.io").contains("not base64"));
    }

    #[test]
    fn secrets_are_hidden_in_debug_output() {
        let shown = format!("{:?}", Credentials::Basic { user: "u".into(), password: Secret::new("hush") });
        assert_eq!(shown, "Basic(\"u\")");
    }
}
