//! TLS certificate that is reloaded when its files change: a renewal needs no restart.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustls::ServerConfig;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio_rustls::TlsAcceptor;

/// File that cannot be used, and the cause.
type Refused = (PathBuf, Box<dyn std::error::Error + Send + Sync>);

/// Version of both files: device, inode, size and time of each.
type Stamp = [(u64, u64, u64, i64, i64); 2];

/// Certificate and key in PEM files.
#[derive(Debug)]
struct Files {
    cert: PathBuf,
    key: PathBuf,
    provider: Arc<CryptoProvider>,
    current: Mutex<(Option<Stamp>, Arc<CertifiedKey>)>,
}

/// TLS acceptor that serves the certificate in these files.
pub(crate) fn acceptor(cert: &Path, key: &Path) -> Result<TlsAcceptor, Refused> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let (stamp, loaded) = (stamp(cert, key).ok(), load(cert, key, &provider)?);
    let files = Files {
        cert: cert.to_owned(),
        key: key.to_owned(),
        provider: Arc::clone(&provider),
        current: Mutex::new((stamp, loaded)),
    };
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| (cert.to_owned(), e.into()))?;
    let mut config = config.with_no_client_auth().with_cert_resolver(Arc::new(files));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Version of both files. Follows links, because a renewal may point them to another directory.
fn stamp(cert: &Path, key: &Path) -> io::Result<Stamp> {
    let of = |path: &Path| {
        let m = path.metadata()?;
        Ok::<_, io::Error>((m.dev(), m.ino(), m.size(), m.mtime(), m.mtime_nsec()))
    };
    Ok([of(cert)?, of(key)?])
}

fn load(cert: &Path, key: &Path, provider: &CryptoProvider) -> Result<Arc<CertifiedKey>, Refused> {
    let refused = |path: &Path, error: Box<dyn std::error::Error + Send + Sync>| (path.to_owned(), error);
    let chain = CertificateDer::pem_file_iter(cert).and_then(Iterator::collect);
    let chain = chain.map_err(|e| refused(cert, e.into()))?;
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|e| refused(key, e.into()))?;
    let loaded = CertifiedKey::from_der(chain, secret, provider).map_err(|e| refused(cert, e.into()))?;
    Ok(Arc::new(loaded))
}

impl ResolvesServerCert for Files {
    /// Returns the current certificate. An incomplete or invalid renewal leaves the last certificate in use.
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let mut current = self.current.lock();
        if let Ok(stamp) = stamp(&self.cert, &self.key)
            && current.0 != Some(stamp)
        {
            current.0 = Some(stamp);
            match load(&self.cert, &self.key, &self.provider) {
                Ok(renewed) => {
                    tracing::info!(file = %self.cert.display(), "reloaded certificate");
                    current.1 = renewed;
                }
                Err((path, error)) => {
                    tracing::warn!(file = %path.display(), error = &*error as &dyn std::error::Error, "reload certificate failed");
                }
            }
        }
        Some(Arc::clone(&current.1))
    }
}
