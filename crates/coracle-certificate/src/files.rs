//! TLS configuration of servers from files: certificate, key and client authority, which are reloaded when they change.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_telemetry::TlsSettings;
use parking_lot::Mutex;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

/// PEM files of a server's TLS configuration.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// Certificate, and its chain.
    pub certificate: PathBuf,
    /// Key of the certificate.
    pub key: PathBuf,
    /// Authority of client certificates; a client with an invalid certificate is refused.
    pub client_ca: Option<PathBuf>,
}

/// Whether clients must present a certificate if an authority for them is configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    /// Clients without a certificate are accepted. The server decides what they may do.
    Optional,
    /// Connections without a client certificate are refused.
    Required,
}

/// File that cannot be used for TLS.
#[derive(Debug, thiserror::Error)]
#[error("use {} for TLS", .path.display())]
pub struct TlsError {
    path: PathBuf,
    source: Box<dyn std::error::Error + Send + Sync>,
}

/// Version of a file: device, inode, size and modification time.
type Stamp = (u64, u64, u64, i64, i64);

/// TLS configuration from files. Each connection gets the configuration of the current files.
#[derive(Debug)]
pub struct FileTls {
    files: TlsFiles,
    clients: ClientCertificates,
    protocols: Vec<Vec<u8>>,
    current: Mutex<(Vec<Option<Stamp>>, Arc<ServerConfig>)>,
}

fn tls_error<E: Into<Box<dyn std::error::Error + Send + Sync>>>(path: &Path) -> impl FnOnce(E) -> TlsError {
    let path = path.to_owned();
    move |source| TlsError { path, source: source.into() }
}

fn chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    CertificateDer::pem_file_iter(path).and_then(Iterator::collect).map_err(tls_error(path))
}

impl FileTls {
    /// Reads the files. `protocols` are offered by ALPN. Blocking.
    ///
    /// # Errors
    /// [`TlsError`] names the file that cannot be used.
    pub fn load(files: TlsFiles, clients: ClientCertificates, protocols: &[&str]) -> Result<Self, TlsError> {
        let protocols: Vec<_> = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        let (stamps, config) = (file_versions(&files), config(&files, clients, &protocols)?);
        Ok(Self { files, clients, protocols, current: Mutex::new((stamps, config)) })
    }
}

impl TlsSettings for FileTls {
    /// Returns the configuration of the current files. If they are incomplete or invalid, the last valid configuration stays in
    /// use.
    fn current(&self) -> Arc<ServerConfig> {
        let stamps = file_versions(&self.files);
        let mut current = self.current.lock();
        if current.0 != stamps {
            current.0 = stamps;
            match config(&self.files, self.clients, &self.protocols) {
                Ok(renewed) => {
                    tracing::info!(file = %self.files.certificate.display(), "reloaded certificate");
                    current.1 = renewed;
                }
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "reload certificate failed");
                }
            }
        }
        current.1.clone()
    }
}

/// Returns the versions of the files. Symbolic links are followed, because a renewal may switch them to another directory.
fn file_versions(files: &TlsFiles) -> Vec<Option<Stamp>> {
    let of = |path: &PathBuf| {
        let m = path.metadata().ok()?;
        Some((m.dev(), m.ino(), m.size(), m.mtime(), m.mtime_nsec()))
    };
    [&files.certificate, &files.key].into_iter().chain(&files.client_ca).map(of).collect()
}

fn config(
    files: &TlsFiles,
    clients: ClientCertificates,
    protocols: &[Vec<u8>],
) -> Result<Arc<ServerConfig>, TlsError> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let certificates = chain(&files.certificate)?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(tls_error(&files.key))?;
    let builder = ServerConfig::builder_with_provider(provider.clone());
    let builder = builder.with_safe_default_protocol_versions().map_err(tls_error(&files.certificate))?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(ca) => {
            let mut roots = RootCertStore::empty();
            for root in chain(ca)? {
                roots.add(root).map_err(tls_error(ca))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            let verifier = match clients {
                ClientCertificates::Optional => verifier.allow_unauthenticated(),
                ClientCertificates::Required => verifier,
            };
            builder.with_client_cert_verifier(verifier.build().map_err(tls_error(ca))?)
        }
    };
    let mut config = builder.with_single_cert(certificates, key).map_err(tls_error(&files.certificate))?;
    config.alpn_protocols = protocols.to_vec();
    Ok(Arc::new(config))
}
