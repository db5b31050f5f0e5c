//! Front proxy certificate that kube-apiserver presents to extension API servers, as kubeadm sets it up.

use std::fs;
use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

/// Common name of the certificate.
const CLIENT: &str = "front-proxy-client";

/// Creates a certificate authority and a certificate in `dir`, and returns the flags for them.
pub(crate) fn flags(dir: &Path) -> anyhow::Result<Vec<String>> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "front-proxy-ca");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, CLIENT);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &authority)?;
    let write = |name: &str, text: String| -> anyhow::Result<String> {
        let path = dir.join(name);
        fs::write(&path, text)?;
        Ok(path.display().to_string())
    };
    Ok(vec![
        format!("--requestheader-client-ca-file={}", write("front-proxy-ca.crt", authority.pem())?),
        format!("--proxy-client-cert-file={}", write("front-proxy-client.crt", certificate.pem())?),
        format!("--proxy-client-key-file={}", write("front-proxy-client.key", key.serialize_pem())?),
        format!("--requestheader-allowed-names={CLIENT}"),
        "--requestheader-username-headers=X-Remote-User".to_owned(),
        "--requestheader-group-headers=X-Remote-Group".to_owned(),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
    ])
}
