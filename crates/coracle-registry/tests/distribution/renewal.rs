//! Certificate that is renewed while the registry runs.

use std::path::Path;

use crate::common::start_with;

/// Writes a new certificate with its key. Returns the certificate in DER.
fn renew(cert: &Path, key: &Path) -> Vec<u8> {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    std::fs::write(cert, made.cert.pem()).unwrap();
    std::fs::write(key, made.signing_key.serialize_pem()).unwrap();
    made.cert.der().to_vec()
}

/// Certificate that the server presents on a new connection.
async fn presented_certificate(url: &str) -> Vec<u8> {
    let http =
        reqwest::Client::builder().tls_danger_accept_invalid_certs(true).tls_info(true).build().unwrap();
    let answer = http.get(format!("{}/healthz", url.replace("http:", "https:"))).send().await.unwrap();
    let info = answer.extensions().get::<reqwest::tls::TlsInfo>().unwrap();
    info.peer_certificate().unwrap().to_vec()
}

#[tokio::test]
async fn renewed_certificate_is_shown_without_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    let first = renew(&cert, &key);
    let files = (cert.clone(), key.clone());
    let registry = start_with(move |c| c.tls = Some(files)).await;
    assert_eq!(presented_certificate(&registry.url).await, first);
    std::fs::write(&key, "half a renewal").unwrap();
    assert_eq!(presented_certificate(&registry.url).await, first, "what cannot be used changes nothing");
    let second = renew(&cert, &key);
    assert_eq!(presented_certificate(&registry.url).await, second);
}
