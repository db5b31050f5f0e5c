//! Certificates of a local system: one authority, and a leaf certificate each for the node and the operator.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use miette::{IntoDiagnostic, WrapErr};
use rcgen::ExtendedKeyUsagePurpose::{self, ClientAuth, ServerAuth};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};

/// Certificate files of one system.
pub(crate) struct Pki {
    pub(crate) ca: PathBuf,
    pub(crate) node: Leaf,
    pub(crate) operator: Leaf,
}

/// Certificate and key of one party.
pub(crate) type Leaf = (PathBuf, PathBuf);

/// Makes all certificates again: none outlives a start of the system, so none must be rotated.
pub(crate) fn make(dir: &Path) -> miette::Result<Pki> {
    let authority = Authority::new("local")?;
    super::make_dir(dir)?;
    Ok(Pki {
        ca: authority.publish(dir)?,
        node: authority.leaf(dir, "node", &[ServerAuth])?,
        operator: authority.leaf(dir, "operator", &[ClientAuth])?,
    })
}

/// Certificate authority. Its key stays in memory, unless it was made by [`Authority::load_or_create`].
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    /// Makes an authority with a new key.
    pub(crate) fn new(name: &str) -> miette::Result<Self> {
        Self::of(name, KeyPair::generate().into_diagnostic()?)
    }

    /// Loads the authority with the key `<dir>/ca.key`, which is made if it is missing. Clients that trust the authority keep
    /// trusting its certificates after a restart.
    pub(crate) fn load_or_create(dir: &Path, name: &str) -> miette::Result<Self> {
        super::make_dir(dir)?;
        let path = dir.join("ca.key");
        if let Ok(pem) = std::fs::read_to_string(&path)
            && let Ok(key) = KeyPair::from_pem(&pem)
        {
            return Self::of(name, key);
        }
        let key = KeyPair::generate().into_diagnostic()?;
        write(&path, key.serialize_pem().as_bytes())?;
        Self::of(name, key)
    }

    fn of(name: &str, key: KeyPair) -> miette::Result<Self> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, format!("coracle {name} authority"));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        CertifiedIssuer::self_signed(params, key).map(Self).into_diagnostic()
    }

    /// Returns the authority's certificate, PEM.
    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    /// Writes the authority's certificate to `<dir>/ca.crt`.
    pub(crate) fn publish(&self, dir: &Path) -> miette::Result<PathBuf> {
        let path = dir.join("ca.crt");
        write(&path, self.pem().as_bytes())?;
        Ok(path)
    }

    /// Signs a certificate for loopback and writes it with its key to `<dir>/<name>.crt` and `.key`.
    pub(crate) fn leaf(
        &self,
        dir: &Path,
        name: &str,
        usages: &[ExtendedKeyUsagePurpose],
    ) -> miette::Result<Leaf> {
        self.leaf_for(dir, name, usages, &["localhost".to_owned(), "127.0.0.1".to_owned()])
    }

    /// Like [`Self::leaf`], for these names and addresses.
    pub(crate) fn leaf_for(
        &self,
        dir: &Path,
        name: &str,
        usages: &[ExtendedKeyUsagePurpose],
        names: &[String],
    ) -> miette::Result<Leaf> {
        let mut params = CertificateParams::new(names).into_diagnostic()?;
        params.extended_key_usages = usages.to_vec();
        params.distinguished_name.push(DnType::CommonName, format!("coracle {name}"));
        self.sign(dir, name, params)
    }

    /// Signs a client certificate of the administrators group (Kubernetes documentation, "Authenticating", "X.509 client
    /// certificates").
    pub(crate) fn administrator(&self, dir: &Path, name: &str) -> miette::Result<Leaf> {
        let mut params = CertificateParams::default();
        params.extended_key_usages = vec![ClientAuth];
        params.distinguished_name.push(DnType::CommonName, format!("coracle:{name}"));
        params.distinguished_name.push(DnType::OrganizationName, "system:masters");
        self.sign(dir, name, params)
    }

    fn sign(&self, dir: &Path, name: &str, mut params: CertificateParams) -> miette::Result<Leaf> {
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().into_diagnostic()?;
        let cert = params.signed_by(&key, &self.0).into_diagnostic()?;
        let files = (dir.join(format!("{name}.crt")), dir.join(format!("{name}.key")));
        write(&files.0, cert.pem().as_bytes())?;
        write(&files.1, key.serialize_pem().as_bytes())?;
        Ok(files)
    }
}

/// Writes a file that only its owner can read, from the first byte on.
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
