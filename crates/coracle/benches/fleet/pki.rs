//! Certificates of the nodes and of the operator.

use std::path::Path;

/// Writes `ca.crt` and, for each name, `NAME.crt` and `NAME.key`: servers and clients at 127.0.0.1.
pub(crate) fn write(dir: &Path, names: &[&str]) {
    let mut params = rcgen::CertificateParams::new(vec![]).expect("parameters");
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().expect("a key");
    let ca = params.self_signed(&key).expect("an authority").pem();
    let issuer = rcgen::Issuer::new(params, key);
    let write =
        |name: String, text: String| std::fs::write(dir.join(name), text).expect("write a certificate");
    write("ca.crt".into(), ca);
    for name in names {
        let key = rcgen::KeyPair::generate().expect("a key");
        let params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("parameters");
        write(format!("{name}.crt"), params.signed_by(&key, &issuer).expect("a certificate").pem());
        write(format!("{name}.key"), key.serialize_pem());
    }
}
