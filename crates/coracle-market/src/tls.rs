//! TLS of the market's gRPC and HTTP. Certificate, key and client authority are read again when their files change.

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

/// Files of a certificate, PEM.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// Certificate, and the chain behind it.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// Authority of client certificates. Suppliers need one; a client that shows an invalid one is refused.
    pub client_ca: Option<PathBuf>,
}

/// A file that TLS cannot use.
#[derive(Debug, thiserror::Error)]
#[error("use {} for TLS", .path.display())]
pub struct TlsError {
    path: PathBuf,
    source: Box<dyn std::error::Error + Send + Sync>,
}

/// Version of a file: device, inode, size and time.
type Stamp = (u64, u64, u64, i64, i64);

/// Settings made from files.
#[derive(Debug)]
pub(crate) struct Tls {
    files: TlsFiles,
    protocols: Vec<Vec<u8>>,
    current: Mutex<(Vec<Option<Stamp>>, Arc<ServerConfig>)>,
}

fn refused<E: Into<Box<dyn std::error::Error + Send + Sync>>>(path: &Path) -> impl FnOnce(E) -> TlsError {
    let path = path.to_owned();
    move |source| TlsError { path, source: source.into() }
}

fn chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    CertificateDer::pem_file_iter(path).and_then(Iterator::collect).map_err(refused(path))
}

impl Tls {
    /// Reads the files. `protocols` are offered by ALPN.
    pub(crate) fn load(files: TlsFiles, protocols: &[&str]) -> Result<Self, TlsError> {
        let protocols: Vec<_> = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        let (stamps, config) = (stamps(&files), config(&files, &protocols)?);
        Ok(Self { files, protocols, current: Mutex::new((stamps, config)) })
    }
}

impl TlsSettings for Tls {
    /// A renewal that is incomplete or invalid leaves the last settings in use.
    fn current(&self) -> Arc<ServerConfig> {
        let stamps = stamps(&self.files);
        let mut current = self.current.lock();
        if current.0 != stamps {
            current.0 = stamps;
            match config(&self.files, &self.protocols) {
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

/// Follows links: a renewal may switch them to another directory.
fn stamps(files: &TlsFiles) -> Vec<Option<Stamp>> {
    let of = |path: &PathBuf| {
        let m = path.metadata().ok()?;
        Some((m.dev(), m.ino(), m.size(), m.mtime(), m.mtime_nsec()))
    };
    [&files.certificate, &files.key].into_iter().chain(&files.client_ca).map(of).collect()
}

fn config(files: &TlsFiles, protocols: &[Vec<u8>]) -> Result<Arc<ServerConfig>, TlsError> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let certificates = chain(&files.certificate)?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(refused(&files.key))?;
    let builder = ServerConfig::builder_with_provider(provider.clone());
    let builder = builder.with_safe_default_protocol_versions().map_err(refused(&files.certificate))?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(ca) => {
            let mut roots = RootCertStore::empty();
            for root in chain(ca)? {
                roots.add(root).map_err(refused(ca))?;
            }
            // Tenants have tokens alone, so a client may show no certificate; the API of suppliers asks for it.
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            builder.with_client_cert_verifier(verifier.allow_unauthenticated().build().map_err(refused(ca))?)
        }
    };
    let mut config = builder.with_single_cert(certificates, key).map_err(refused(&files.certificate))?;
    config.alpn_protocols = protocols.to_vec();
    Ok(Arc::new(config))
}
