//! VsphereAgentPool controllers, configured from the flags and the environment.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use coracle_agentpool::{Config, IsoVerify, PoolMetrics, election};
use coracle_reconcile::ControllerMetrics;
use coracle_vsphere::{Connect, Credentials, SoapConnect, Vsphere, VsphereError, VsphereMetrics};
use kube::Client;
use miette::{IntoDiagnostic, WrapErr};
use prometheus_client::registry::Registry;

use super::identity;
use coracle_cli::cli::{self, PoolFlags};
use coracle_cli::tasks::Tasks;

/// Returns the configuration of the controllers. `namespace` is that of their Lease; `None` runs them without leader election.
pub(super) fn config(
    flags: &PoolFlags,
    namespace: Option<&str>,
    metrics: ControllerMetrics,
    registry: &mut Registry,
) -> miette::Result<Config> {
    let soap = SoapConnect { metrics: VsphereMetrics::register(registry), ..SoapConnect::default() };
    let trust = Trust::of_environment(soap)?;
    let identity = identity();
    let mut config = Config::new(Arc::new(trust));
    config.election = namespace.map(|namespace| election(namespace, &identity));
    config.identity = identity;
    config.metrics = metrics;
    config.pool_metrics = PoolMetrics::register(registry);
    config.cross_namespace_secrets = flags.allow_cross_namespace_secrets;
    (config.creates, config.destroys) = (flags.vcenter_creates, flags.vcenter_destroys);
    config.iso.ca_file.clone_from(&flags.iso_ca_file);
    config.iso.verify = match flags.iso_verify {
        cli::IsoVerify::Size => IsoVerify::Size,
        cli::IsoVerify::Full => IsoVerify::Full,
    };
    Ok(config)
}

/// Runs the controllers as a task of the process.
pub(super) fn spawn(tasks: &mut Tasks, client: Client, config: Config) {
    tasks.spawn("agentpool", |stop| async move {
        Box::pin(coracle_agentpool::run(client, config, stop)).await.into_diagnostic()
    });
}

/// Certificates from the environment, for Secrets that contain none.
struct Trust {
    soap: SoapConnect,
    ca_pem: String,
    thumbprints: HashMap<String, String>,
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trust").finish_non_exhaustive()
    }
}

/// Variables of `govc` that are supported.
const CA_CERTS: &str = "GOVC_TLS_CA_CERTS";
const KNOWN_HOSTS: &str = "GOVC_TLS_KNOWN_HOSTS";

impl Trust {
    fn of_environment(soap: SoapConnect) -> miette::Result<Self> {
        let read = |file: PathBuf, name: &str| {
            let failed = || format!("read {} of ${name}", file.display());
            std::fs::read_to_string(&file).into_diagnostic().wrap_err_with(failed)
        };
        let mut ca_pem = String::new();
        for file in std::env::var_os(CA_CERTS).iter().flat_map(std::env::split_paths) {
            ca_pem += &read(file, CA_CERTS)?;
        }
        let known = match std::env::var_os(KNOWN_HOSTS).filter(|f| !f.is_empty()) {
            Some(file) => read(file.into(), KNOWN_HOSTS)?,
            None => String::new(),
        };
        let mut ignored: Vec<_> = std::env::vars_os()
            .filter_map(|(name, _)| name.into_string().ok())
            .filter(|name| name.starts_with("GOVC_") && name != CA_CERTS && name != KNOWN_HOSTS)
            .collect();
        ignored.sort();
        if !ignored.is_empty() {
            tracing::info!(names = ignored.join(","), "variables of govc have no effect: no govc is run");
        }
        Ok(Self { soap, ca_pem, thumbprints: thumbprints(&known) })
    }

    /// Completes the credentials of a Secret from the environment, if the Secret has no trust settings.
    fn complete(&self, mut credentials: Credentials) -> Credentials {
        let is_silent =
            !credentials.insecure && credentials.ca_pem.is_empty() && credentials.thumbprint.is_empty();
        if is_silent {
            let host = credentials.server();
            let with_port = if host.contains(':') { host.to_owned() } else { format!("{host}:443") };
            let known = self.thumbprints.get(&with_port).cloned();
            credentials.ca_pem.clone_from(&self.ca_pem);
            credentials.thumbprint = known.unwrap_or_default();
        }
        credentials
    }
}

#[async_trait]
impl Connect for Trust {
    async fn connect(&self, credentials: &Credentials) -> Result<Arc<dyn Vsphere>, VsphereError> {
        self.soap.connect(&self.complete(credentials.clone())).await
    }
}

/// Parses lines of the form `host[:port] thumbprint`, which `govc` writes, with SHA-1 or SHA-256. Pure.
fn thumbprints(file: &str) -> HashMap<String, String> {
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        let (host, said) = (words.next()?, words.next()?);
        let digest = said.replace(':', "").to_ascii_lowercase();
        let host = if host.contains(':') { host.to_owned() } else { format!("{host}:443") };
        let is_digest = matches!(digest.len(), 40 | 64) && digest.bytes().all(|b| b.is_ascii_hexdigit());
        if !is_digest {
            tracing::warn!(host, "ignore thumbprint that is neither SHA-1 nor SHA-256");
        }
        is_digest.then_some((host, digest))
    };
    file.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_trust_settings_override_the_environment() {
        let pin = "AB:".repeat(31) + "AB";
        let sha1 = "CD:".repeat(19) + "CD";
        let known = thumbprints(&format!("vc.example {pin}\nold.example {sha1}\nother:8443 aa:bb\n\n"));
        assert_eq!((known.len(), &known["old.example:443"]), (2, &"cd".repeat(20)));
        let trust = Trust { soap: SoapConnect::default(), ca_pem: "PEM".into(), thumbprints: known };
        let secret = |pairs: &[(&str, &str)]| {
            let base = [("username", "u"), ("password", "p")];
            let all = base.iter().chain(pairs).map(|(k, v)| ((*k).to_owned(), v.as_bytes().to_vec()));
            trust.complete(Credentials::parse(&all.collect()).unwrap())
        };
        let silent = secret(&[("server", "vc.example")]);
        assert_eq!((silent.ca_pem.as_str(), silent.thumbprint), ("PEM", "ab".repeat(32)));
        let elsewhere = secret(&[("server", "other:8443")]);
        assert_eq!((elsewhere.ca_pem.as_str(), elsewhere.thumbprint.as_str()), ("PEM", ""));
        let speaks = secret(&[("server", "vc.example"), ("ca.crt", "OWN")]);
        assert_eq!((speaks.ca_pem.as_str(), speaks.thumbprint.as_str()), ("OWN", ""));
        let any = secret(&[("server", "vc.example"), ("insecure", "true")]);
        assert_eq!((any.ca_pem.as_str(), any.thumbprint.as_str()), ("", ""));
    }
}
