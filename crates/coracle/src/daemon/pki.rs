//! Certificates of a local system: one authority, a leaf for the node, one for the operator, one for the command line.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use miette::{IntoDiagnostic, WrapErr};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

/// Files of one system.
pub(crate) struct Pki {
    pub(crate) ca: PathBuf,
    pub(crate) node: (PathBuf, PathBuf),
    pub(crate) operator: (PathBuf, PathBuf),
    pub(crate) client: (PathBuf, PathBuf),
}

/// Makes all of it anew: nothing outlives a start of the system, so nothing must be rotated.
pub(crate) fn make(dir: &Path) -> miette::Result<Pki> {
    super::make_dir(dir)?;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "coracle local authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    let key = KeyPair::generate().into_diagnostic()?;
    let authority = CertifiedIssuer::self_signed(params, key).into_diagnostic()?;
    let ca = dir.join("ca.crt");
    write(&ca, authority.pem().as_bytes())?;
    let node = leaf(dir, "node", ExtendedKeyUsagePurpose::ServerAuth, &authority)?;
    let operator = leaf(dir, "operator", ExtendedKeyUsagePurpose::ClientAuth, &authority)?;
    let client = leaf(dir, "client", ExtendedKeyUsagePurpose::ClientAuth, &authority)?;
    Ok(Pki { ca, node, operator, client })
}

fn leaf(
    dir: &Path,
    name: &str,
    usage: ExtendedKeyUsagePurpose,
    authority: &CertifiedIssuer<'_, KeyPair>,
) -> miette::Result<(PathBuf, PathBuf)> {
    let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
    let mut params = CertificateParams::new(names).into_diagnostic()?;
    params.distinguished_name.push(DnType::CommonName, format!("coracle {name}"));
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate().into_diagnostic()?;
    let cert = params.signed_by(&key, authority).into_diagnostic()?;
    let files = (dir.join(format!("{name}.crt")), dir.join(format!("{name}.key")));
    write(&files.0, cert.pem().as_bytes())?;
    write(&files.1, key.serialize_pem().as_bytes())?;
    Ok(files)
}

/// Readable by the owner only, from the first byte on.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> miette::Result<()> {
    File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| file.write_all(bytes))
        .into_diagnostic()
        .wrap_err_with(|| format!("write {}", path.display()))
}
