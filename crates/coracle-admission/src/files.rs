//! Webhooks with a certificate that the user supplies, from files that are read again when they change.

use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::Router;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::{net::TcpListener, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{Error, serve, serve::Tls};

/// Interval between checks of the files.
const LOOK: Duration = Duration::from_secs(10);

/// Serves `router` with the certificate and the key of those files (PEM) until `stop`. Installs nothing: the user manages the
/// configurations that name the listener.
///
/// # Errors
/// [`Error::File`] and [`Error::Tls`] when the files cannot be used at the start. Later the previous certificate is kept.
pub async fn serve_with_files(
    listener: TcpListener,
    certificate: PathBuf,
    key: PathBuf,
    router: Router,
    stop: CancellationToken,
) -> Result<(), Error> {
    let tls = Tls::default();
    let first = read(&certificate, &key)?;
    tls.set_chain(first.0.clone(), first.1.clone_key())?;
    let reload = async {
        let mut shown = first;
        loop {
            sleep(LOOK).await;
            match read(&certificate, &key) {
                Ok(pair) if pair == shown => {}
                Ok(pair) => match tls.set_chain(pair.0.clone(), pair.1.clone_key()) {
                    Ok(()) => {
                        info!("certificate replaced");
                        shown = pair;
                    }
                    // The two files are not replaced atomically, so they may not match for a moment.
                    Err(error) => {
                        warn!(error = &error as &dyn std::error::Error, "use new certificate failed")
                    }
                },
                Err(error) => warn!(error = &error as &dyn std::error::Error, "read certificate failed"),
            }
        }
    };
    tokio::select! {
        () = stop.cancelled() => Ok(()),
        () = serve::serve(&listener, tls.clone(), router) => Ok(()),
        () = reload => Ok(()),
    }
}

type Pair = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn read(certificate: &Path, key: &Path) -> Result<Pair, Error> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::File { path, source }
    };
    let chain = CertificateDer::pem_file_iter(certificate).map_err(failed(certificate))?;
    let chain = chain.collect::<Result<Vec<_>, _>>().map_err(failed(certificate))?;
    Ok((chain, PrivateKeyDer::from_pem_file(key).map_err(failed(key))?))
}
