//! The client of the original registry: `epoch push|pull|get|ls|inspect|tag|rm`, and `coracle registry …`.

mod snapshots;

use std::path::Path;

use coracle_disk::DiskOptions;
use coracle_oci::{Credentials, Reference, Registries, RegistryHost, RegistryHosts, Secret};
use reqwest::{Certificate, Client, Method, Url};
use serde_json::Value;

use crate::cli::{Global, RegistryCommand, RegistryServer};
use crate::error::{Failure, exit};
use crate::output;

/// Maximum size of an answer, bytes.
const ANSWER_MAX: usize = 64 << 20;
const ACCEPT: &str = "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json, application/vnd.docker.distribution.manifest.list.v2+json";

pub async fn run(global: &Global, command: RegistryCommand) -> miette::Result<u8> {
    match command {
        // A daemon, which the binary `coracle` runs.
        RegistryCommand::Serve(_) => {}
        RegistryCommand::Push(args) => snapshots::push(&global.state().join("pushes"), args).await?,
        RegistryCommand::Pull(args) => snapshots::pull(&global.state().join("pulls"), args).await?,
        RegistryCommand::Get(args) => {
            let (repository, tag) = split(&args.name);
            let (bytes, _) = Server::new(&args.server)?.manifest(repository, tag).await?;
            output::write(&String::from_utf8_lossy(&bytes))?;
        }
        RegistryCommand::Ls { name, server } => ls(&Server::new(&server)?, name.as_deref()).await?,
        RegistryCommand::Inspect(args) => {
            let (repository, tag) = split(&args.name);
            let path = format!("api/repositories/{repository}/tags/{tag}");
            let told = Server::new(&args.server)?.json(&path).await?;
            output::write(&format!("{told:#}\n"))?;
        }
        RegistryCommand::Tag { name, tag, server } => {
            let (repository, from) = split(&name);
            let server = Server::new(&server)?;
            let (bytes, media_type) = server.manifest(repository, from).await?;
            let path = format!("v2/{repository}/manifests/{tag}");
            let request = server.request(Method::PUT, &path)?.header("content-type", media_type).body(bytes);
            server.send(request, &path).await?;
            output::write(&format!("{repository}:{tag}\n"))?;
        }
        RegistryCommand::Rm(args) => {
            let (repository, tag) = split(&args.name);
            let server = Server::new(&args.server)?;
            let path = format!("api/repositories/{repository}/tags/{tag}");
            match server.send(server.request(Method::DELETE, &path)?, &path).await {
                // Scripts for the original client rely on success here.
                Err(failure) if failure.exit == exit::NOT_FOUND => eprintln!("it was not there"),
                sent => drop(sent?),
            }
            output::write(&format!("{repository}:{tag}\n"))?;
        }
    }
    Ok(0)
}

async fn ls(server: &Server, name: Option<&str>) -> Result<(), Failure> {
    let path =
        name.map_or_else(|| "api/repositories".to_owned(), |name| format!("api/repositories/{name}/tags"));
    let all = server.json(&path).await?;
    let mut columns = output::Columns::new(&["NAME", "KIND", "SIZE", "PUSHED"]);
    for one in all.as_array().into_iter().flatten() {
        let text = |key: &str| one[key].as_str().unwrap_or_default().to_owned();
        let size = output::bytes(one["totalSize"].as_u64().unwrap_or(0));
        let when = if name.is_some() { "pushedAt" } else { "updatedAt" };
        columns.row(&[text("name"), text("kind"), size, text(when)]);
    }
    columns.print()
}

/// Splits a name into repository and tag; the default tag is `latest`.
fn split(name: &str) -> (&str, &str) {
    match name.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => (repository, tag),
        _ => (name, "latest"),
    }
}

/// Registry that the environment names.
struct Server {
    http: Client,
    base: Url,
    token: Option<String>,
    /// Certificates to trust besides the system's, as PEM.
    trust: Vec<u8>,
}

impl Server {
    fn new(args: &RegistryServer) -> Result<Self, Failure> {
        let text = &args.server;
        let text = if text.contains("://") { text.clone() } else { format!("http://{text}") };
        let wrong = |why: &str| Failure::usage(format!("--server {text}: {why}"));
        let base =
            Url::parse(&format!("{}/", text.trim_end_matches('/'))).map_err(|e| wrong(&e.to_string()))?;
        if !matches!(base.scheme(), "http" | "https") || base.host_str().is_none() {
            return Err(wrong("it is http://HOST[:PORT] or https://HOST[:PORT]"));
        }
        let mut http = Client::builder().connect_timeout(std::time::Duration::from_secs(10));
        http = http.timeout(std::time::Duration::from_secs(60));
        let trust = args.ca_cert.as_deref().map(certificates).transpose()?.unwrap_or_default();
        for certificate in Certificate::from_pem_bundle(&trust).map_err(|e| wrong(&e.to_string()))? {
            http = http.add_root_certificate(certificate);
        }
        let http = http.build().map_err(|e| wrong(&e.to_string()))?;
        let token = args.token.clone().filter(|token| !token.is_empty());
        Ok(Self { http, base, token, trust })
    }

    /// Returns the reference of a repository, and the options, for transfers of blobs.
    fn transfer_target(&self, repository: &str, tag: &str) -> Result<(Reference, DiskOptions), Failure> {
        let host = self.base.host_str().unwrap_or_default();
        let host = self.base.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        let reference = format!("{host}/{repository}:{tag}");
        let reference = reference.parse().map_err(|e| Failure::usage(format!("{repository}:{tag}: {e}")))?;
        let credentials = match &self.token {
            Some(token) => Credentials::Basic { user: "token".into(), password: Secret::new(token.as_str()) },
            None => Credentials::Anonymous,
        };
        let mut root = self.base.clone();
        root.set_path("");
        let server = RegistryHost { trust: self.trust.clone(), ..RegistryHost::at(root) };
        let hosts = RegistryHosts { server, ..RegistryHosts::default() };
        let registries = Registries::default().with(&host, hosts);
        Ok((reference, DiskOptions { credentials, registries, ..DiskOptions::default() }))
    }

    fn request(&self, method: Method, path: &str) -> Result<reqwest::RequestBuilder, Failure> {
        let url = self.base.join(path).map_err(|e| Failure::usage(format!("{path}: {e}")))?;
        let request = self.http.request(method, url);
        Ok(match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        })
    }

    /// Sends a request and returns the body of a successful answer.
    async fn send(&self, request: reqwest::RequestBuilder, what: &str) -> Result<Vec<u8>, Failure> {
        let unreachable = |e: reqwest::Error| {
            let failure =
                Failure::new("COR-IMG-011", format!("{what} at {}: {}", self.base, e.without_url()));
            failure.help("is the registry running? EPOCH_SERVER or --server says where it is")
        };
        let mut answer = request.send().await.map_err(unreachable)?;
        let status = answer.status();
        let mut bytes = Vec::new();
        while let Some(piece) = answer.chunk().await.map_err(unreachable)? {
            bytes.extend_from_slice(&piece);
            if bytes.len() > ANSWER_MAX {
                return Err(Failure::new(
                    "COR-IMG-008",
                    format!("{what} at {}: the answer is too long", self.base),
                ));
            }
        }
        if status.is_success() {
            return Ok(bytes);
        }
        let said: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let said: String =
            said["errors"][0]["message"].as_str().unwrap_or_default().chars().take(200).collect();
        let (code, exit) = match status.as_u16() {
            404 => ("COR-IMG-004", exit::NOT_FOUND),
            401 | 403 => ("COR-IMG-005", exit::FORBIDDEN),
            _ => ("COR-IMG-012", exit::FAILED),
        };
        let failure = Failure::new(code, format!("{what} at {}: {status} {said}", self.base)).exit(exit);
        match exit {
            exit::FORBIDDEN => Err(failure.help("give a token by EPOCH_REGISTRY_TOKEN")),
            _ => Err(failure),
        }
    }

    async fn json(&self, path: &str) -> Result<Value, Failure> {
        let bytes = self.send(self.request(Method::GET, path)?, path).await?;
        let wrong =
            |e| Failure::new("COR-IMG-012", format!("{path} at {}: the answer is not JSON: {e}", self.base));
        serde_json::from_slice(&bytes).map_err(wrong)
    }

    /// Returns a manifest and its media type.
    async fn manifest(&self, repository: &str, tag: &str) -> Result<(Vec<u8>, String), Failure> {
        let path = format!("v2/{repository}/manifests/{tag}");
        let bytes = self.send(self.request(Method::GET, &path)?.header("accept", ACCEPT), &path).await?;
        let own: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let media_type = own["mediaType"].as_str().unwrap_or("application/vnd.oci.image.manifest.v1+json");
        let media_type = media_type.to_owned();
        Ok((bytes, media_type))
    }
}

/// Reads a file of certificates, as PEM.
fn certificates(path: &Path) -> Result<Vec<u8>, Failure> {
    let wrong = |why: String| Failure::usage(format!("read certificates of {}: {why}", path.display()));
    let bytes = std::fs::read(path).map_err(|e| wrong(e.to_string()))?;
    match Certificate::from_pem_bundle(&bytes).map_err(|e| wrong(e.to_string()))?.is_empty() {
        true => Err(wrong("there is none in it".to_owned())),
        false => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_table() {
        for (name, want) in [
            ("vms/web", ("vms/web", "latest")),
            ("vms/web:hibernate", ("vms/web", "hibernate")),
            ("web:1", ("web", "1")),
        ] {
            assert_eq!(split(name), want);
        }
    }

    #[test]
    fn server_table() {
        let args = |server: &str| RegistryServer { server: server.into(), token: None, ca_cert: None };
        for (server, want) in [
            ("http://127.0.0.1:8080", Some("127.0.0.1:8080/a:latest")),
            ("registry.example/", Some("registry.example/a:latest")),
            ("ftp://x", None),
            ("", None),
        ] {
            let place = Server::new(&args(server)).and_then(|s| s.transfer_target("a", "latest"));
            assert_eq!(place.ok().map(|(reference, _)| reference.to_string()).as_deref(), want, "{server}");
        }
    }
}
