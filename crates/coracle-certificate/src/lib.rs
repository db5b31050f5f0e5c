//! Serving certificates of a node: signed by the cluster, from files, or self-signed.
//!
//! ```text
//! stored pair ─▶ valid? ─▶ shown until 80 % of its life ─▶ request ─▶ approved by a user ─▶ stored, shown
//!                   └ no: signed by the node itself, with a warning ────┘
//! ```

mod authorities;
mod files;
mod node;
mod pair;
mod request;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coracle_files::{blocking, write_atomic};
use coracle_types::Clock;
use jiff::Timestamp;
use kube::Client;
use rustls::ServerConfig;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

pub use authorities::client_ca;
pub use files::{ClientCertificates, FileTls, TlsError, TlsFiles};
pub use node::NodeCertificate;
pub use pair::{CertificateError, Signer, Subject};

use pair::Pair;
use request::Request;

/// Interval between checks of the files and the expiry of a certificate.
const LOOK: Duration = Duration::from_secs(60);
/// Delay before a request is repeated: after an error, and after a denial.
const RETRY: Duration = Duration::from_secs(30);
const DENIED_RETRY: Duration = Duration::from_secs(3600);

/// File name suffixes: of the pair that the cluster signed, and of the key in a pending request.
const PAIR_SUFFIX: &str = ".pem";
const PENDING_SUFFIX: &str = "-pending.key";

/// Source of the certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CertificateSource {
    /// The signer of the [`Subject`] signs the certificate after the request is approved. The certificate is stored in the
    /// directory that [`Certificates::open`] gets. Until then, a self-signed certificate is used.
    Cluster,
    /// PEM files, which are reloaded when they change.
    Files {
        /// Chain of certificates.
        certificate: PathBuf,
        /// Key of the certificate.
        key: PathBuf,
    },
    /// The node signs the certificate itself.
    SelfSigned,
}

/// Keeps the certificate of the API valid.
pub struct Certificates {
    client: Client,
    source: CertificateSource,
    subject: Subject,
    dir: PathBuf,
    clock: Clock,
    shown: watch::Sender<Arc<ServerConfig>>,
    pair: Pair,
    /// Whether the pair is from the configured source, and not a temporary self-signed one.
    issued: watch::Sender<bool>,
}

impl std::fmt::Debug for Certificates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Certificates")
            .field("source", &self.source)
            .field("subject", &self.subject)
            .finish_non_exhaustive()
    }
}

impl Certificates {
    /// Returns the initial pair: the stored or configured one, else a self-signed one.
    ///
    /// # Errors
    /// [`CertificateError`] for files that cannot be used.
    pub async fn open(
        client: Client,
        source: CertificateSource,
        subject: Subject,
        dir: PathBuf,
        clock: Clock,
    ) -> Result<Self, CertificateError> {
        let now = now(&clock);
        let found = match &source {
            CertificateSource::Files { certificate, key } => Some(read_pair(certificate, key).await?),
            CertificateSource::Cluster => {
                let file = pair_file(&dir, &subject);
                let stored = read_pair(&file, &file).await.ok();
                stored.filter(|pair| now < pair.not_after && pair.is_of(&subject))
            }
            CertificateSource::SelfSigned => None,
        };
        let is_final = found.is_some() || source == CertificateSource::SelfSigned;
        let pair = match found {
            Some(pair) => pair,
            None => Pair::self_signed(&subject, now)?,
        };
        let shown = watch::Sender::new(pair.config()?);
        let issued = watch::Sender::new(is_final);
        Ok(Self { client, source, subject, dir, clock, shown, pair, issued })
    }

    /// Returns the TLS configuration of new connections.
    #[must_use]
    pub fn shown(&self) -> watch::Receiver<Arc<ServerConfig>> {
        self.shown.subscribe()
    }

    /// Returns a receiver that becomes true when the pair is from the configured source, and not a temporary self-signed one.
    #[must_use]
    pub fn issued(&self) -> watch::Receiver<bool> {
        self.issued.subscribe()
    }

    /// Renews the certificate until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut pause = Duration::ZERO;
        while stop.run_until_cancelled(sleep(pause)).await.is_some() {
            let Some(turn) = stop.run_until_cancelled(self.renew_if_due()).await else { return };
            pause = turn.unwrap_or_else(|error| {
                tracing::warn!(error = chain(&error), "renew the certificate of the API failed");
                if matches!(error, CertificateError::Denied { .. }) { DENIED_RETRY } else { RETRY }
            });
        }
    }

    /// Checks the certificate and renews it if needed. Returns the time until the next check.
    async fn renew_if_due(&mut self) -> Result<Duration, CertificateError> {
        let now = now(&self.clock);
        match self.source.clone() {
            CertificateSource::Files { certificate, key } => {
                let pair = read_pair(&certificate, &key).await?;
                if pair != self.pair {
                    self.set_pair(pair)?;
                }
            }
            CertificateSource::SelfSigned if now >= self.pair.renew_at() => {
                self.set_pair(Pair::self_signed(&self.subject, now)?)?;
            }
            CertificateSource::Cluster if !*self.issued.borrow() || now >= self.pair.renew_at() => {
                let pair = self.request().await?;
                self.set_pair(pair)?;
                self.issued.send_replace(true);
            }
            CertificateSource::SelfSigned | CertificateSource::Cluster => {}
        }
        Ok(LOOK)
    }

    fn set_pair(&mut self, pair: Pair) -> Result<(), CertificateError> {
        self.shown.send_replace(pair.config()?);
        tracing::info!(until = %pair.not_after, "the API has a new certificate");
        self.pair = pair;
        Ok(())
    }

    /// Requests a certificate from the cluster; waits without a limit for its approval. The key is stored, so that a request
    /// that a user approves after a restart is not lost.
    async fn request(&self) -> Result<Pair, CertificateError> {
        let pending = self.dir.join(format!("{}{PENDING_SUFFIX}", self.subject.signer.file_stem()));
        let key = read(&pending).await.ok().and_then(|pem| rcgen::KeyPair::from_pem(&pem).ok());
        let key = match key {
            Some(key) => key,
            None => {
                let key = rcgen::KeyPair::generate().map_err(|source| CertificateError::Make { source })?;
                write(&pending, key.serialize_pem()).await?;
                key
            }
        };
        let request = Request::new(&self.subject, &key)?;
        let issued = request.wait(&self.client).await;
        if issued.is_ok() || matches!(issued, Err(CertificateError::Denied { .. })) {
            remove(&pending).await;
        }
        let pair = Pair::parse(&issued?, &key.serialize_pem())?;
        write(&pair_file(&self.dir, &self.subject), pair.pem()).await?;
        Ok(pair)
    }
}

fn now(clock: &Clock) -> Timestamp {
    Timestamp::from_millisecond(clock.now().0).unwrap_or_default()
}

fn pair_file(dir: &Path, subject: &Subject) -> PathBuf {
    dir.join(format!("{}{PAIR_SUFFIX}", subject.signer.file_stem()))
}

/// Returns an error and its causes in one line.
fn chain(error: &CertificateError) -> String {
    let causes = std::iter::successors(std::error::Error::source(error), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

async fn read_pair(certificate: &Path, key: &Path) -> Result<Pair, CertificateError> {
    Pair::parse(&read(certificate).await?, &read(key).await?)
}

async fn read(path: &Path) -> Result<String, CertificateError> {
    let own = path.to_owned();
    let failed = |source| CertificateError::File { operation: "read", path: path.to_owned(), source };
    blocking(move || std::fs::read_to_string(own)).await.map_err(failed)
}

/// Writes a file that only the daemon's user can read.
async fn write(path: &Path, pem: String) -> Result<(), CertificateError> {
    use std::os::unix::fs::PermissionsExt as _;
    let own = path.to_owned();
    let failed = |source| CertificateError::File { operation: "write", path: path.to_owned(), source };
    let work = move || {
        if let Some(dir) = own.parent() {
            std::fs::create_dir_all(dir)?;
            std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700))?;
        }
        write_atomic(&own, pem.as_bytes())
    };
    blocking(work).await.map_err(failed)
}

async fn remove(path: &Path) {
    let own = path.to_owned();
    if let Err(error) = blocking(move || coracle_files::remove_file(&own)).await {
        tracing::warn!(path = %path.display(), %error, "remove the key of a request failed");
    }
}
