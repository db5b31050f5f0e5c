//! Connection to the market. It is opened again when the file with the market's authority changes.

use std::{error::Error, path::PathBuf, sync::Arc, time::Duration};

use parking_lot::RwLock;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tracing::{info, warn};

use super::{CALL, Connect, MarketAt};

/// Interval of HTTP/2 pings, which detect dead connections.
const PING: Duration = Duration::from_secs(5);

/// Connection to the market, with the authority that it trusts.
#[derive(Debug)]
pub(super) struct Connection {
    url: String,
    ca: Option<PathBuf>,
    connect: Arc<dyn Connect>,
    current: RwLock<Current>,
}

#[derive(Debug)]
struct Current {
    channel: Channel,
    pem: Option<Vec<u8>>,
}

impl Connection {
    /// Reads the authority and creates the channel, which connects at the first call.
    pub(super) fn open(
        at: &MarketAt,
        connect: Arc<dyn Connect>,
    ) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let pem = at.ca.as_ref().map(std::fs::read).transpose()?;
        let channel = channel(&at.url, pem.as_deref(), connect.as_ref())?;
        let current = RwLock::new(Current { channel, pem });
        Ok(Self { url: at.url.clone(), ca: at.ca.clone(), connect, current })
    }

    pub(super) fn channel(&self) -> Channel {
        self.current.read().channel.clone()
    }

    /// Reads the authority again. After a change, new calls use a new channel; streams of the old channel stay open until they
    /// end. If reading fails, the known authority stays.
    pub(super) async fn refresh(&self) {
        let Some(file) = &self.ca else { return };
        let pem = match tokio::fs::read(file).await {
            Ok(pem) => pem,
            Err(error) => {
                return warn!(%error, file = %file.display(), "read the market's authority failed");
            }
        };
        if self.current.read().pem.as_ref() == Some(&pem) {
            return;
        }
        match channel(&self.url, Some(&pem), self.connect.as_ref()) {
            Ok(channel) => {
                *self.current.write() = Current { channel, pem: Some(pem) };
                info!(file = %file.display(), "the market's authority was replaced");
            }
            Err(error) => warn!(error, file = %file.display(), "the market's authority is invalid"),
        }
    }
}

fn channel(
    url: &str,
    pem: Option<&[u8]>,
    connect: &dyn Connect,
) -> Result<Channel, Box<dyn Error + Send + Sync>> {
    let endpoint = Endpoint::from_shared(url.to_owned())?;
    let endpoint = match pem {
        Some(pem) => {
            endpoint.tls_config(ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)))?
        }
        None => endpoint,
    };
    let endpoint = endpoint
        .connect_timeout(CALL)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING)
        .keep_alive_timeout(PING)
        .keep_alive_while_idle(true);
    Ok(connect.connect(&endpoint))
}

#[cfg(test)]
mod tests {
    use coracle_proto::market::{ListMarketsRequest, market_client::MarketClient};
    use tokio::net::TcpListener;
    use tokio_stream::wrappers::TcpListenerStream;
    use tonic::{
        Code,
        service::Routes,
        transport::{Identity, Server, ServerTlsConfig},
    };

    use super::*;
    use crate::market::TcpConnect;

    /// Creates an authority, and key pair and certificate of a server at 127.0.0.1.
    fn authority() -> (String, Identity) {
        let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        let ca = params.self_signed(&key).unwrap().pem();
        let issuer = rcgen::Issuer::new(params, key);
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap().pem();
        (ca, Identity::from_pem(certificate, key.serialize_pem()))
    }

    async fn code(connection: &Connection) -> Code {
        MarketClient::new(connection.channel())
            .list_markets(ListMarketsRequest::default())
            .await
            .unwrap_err()
            .code()
    }

    #[tokio::test]
    async fn replaced_authority_is_trusted_without_a_restart() {
        let _the_only_one = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let (ca, identity) = authority();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let mut server = Server::builder().tls_config(ServerTlsConfig::new().identity(identity)).unwrap();
        // The server answers every unknown call with Unimplemented, which shows that the handshake succeeded.
        let served =
            server.add_routes(Routes::default()).serve_with_incoming(TcpListenerStream::new(listener));
        let tested = async {
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("ca.crt");
            std::fs::write(&file, authority().0).unwrap();
            let at = MarketAt {
                url,
                ca: Some(file.clone()),
                token: String::new(),
                token_file: None,
                cluster: String::new(),
                rate: 1,
            };
            let connection = Connection::open(&at, Arc::new(TcpConnect)).unwrap();
            assert_eq!(code(&connection).await, Code::Unavailable, "of another authority");
            connection.refresh().await;
            assert_eq!(code(&connection).await, Code::Unavailable, "unchanged");
            std::fs::write(&file, "no certificate").unwrap();
            connection.refresh().await;
            std::fs::write(&file, ca).unwrap();
            connection.refresh().await;
            assert_eq!(code(&connection).await, Code::Unimplemented);
            std::fs::remove_file(&file).unwrap();
            connection.refresh().await;
            assert_eq!(code(&connection).await, Code::Unimplemented, "the known one stays");
        };
        tokio::select! {
            served = served => panic!("{served:?}"),
            () = tested => {}
        }
    }
}
