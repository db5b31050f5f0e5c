//! `coracle registry …`, and what the name `epoch` means.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Args, Debug)]
pub(crate) struct RegistryArgs {
    #[command(subcommand)]
    pub(crate) command: RegistryCommand,
}

#[derive(Subcommand, Debug)]
pub(crate) enum RegistryCommand {
    /// Serve an OCI registry from the state folder
    Serve(Box<RegistryServeArgs>),
    /// Push a snapshot of the original runtime, or a disk image, to a registry
    Push(RegistryPushArgs),
    /// Pull a snapshot into the original runtime, or either into a file
    Pull(RegistryPullArgs),
    /// Print the raw manifest of NAME[:TAG]
    Get(RegistryNameArgs),
    /// List repositories, or the tags of one
    Ls {
        /// Repository
        name: Option<String>,
        #[command(flatten)]
        server: RegistryServer,
    },
    /// Show everything that a registry knows of NAME[:TAG], as JSON
    Inspect(RegistryNameArgs),
    /// Give what NAME[:TAG] names one more tag
    Tag {
        /// Repository, and a tag unless it is latest
        name: String,
        /// The new tag
        tag: String,
        #[command(flatten)]
        server: RegistryServer,
    },
    /// Remove a tag
    Rm(RegistryNameArgs),
}

/// The registry that client commands speak with, by the original's environment.
#[derive(Args, Debug)]
pub(crate) struct RegistryServer {
    /// Address of the registry
    #[arg(long, env = "EPOCH_SERVER", value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub(crate) server: String,
    /// Token for writing, and for private reads; better in the environment
    #[arg(long, env = "EPOCH_REGISTRY_TOKEN", value_name = "TOKEN", hide_env_values = true)]
    pub(crate) token: Option<String>,
    /// Certificates to trust besides the system's
    #[arg(long, env = "EPOCH_CA_CERT", value_name = "FILE")]
    pub(crate) ca_cert: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct RegistryNameArgs {
    /// Repository, and a tag unless it is latest
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) server: RegistryServer,
}

#[derive(Args, Debug)]
pub(crate) struct RegistryPushArgs {
    /// Repository, and a tag unless it is latest
    pub(crate) name: String,
    /// A disk (raw or qcow2) or a snapshot's archive; - is an archive on the standard input [default: the snapshot of
    /// that name, exported by the original runtime]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Write large files of a snapshot in compressed chunks, which older readers do not know
    #[arg(long)]
    pub(crate) chunked: bool,
    /// The original runtime's program
    #[arg(long, env = "EPOCH_COCOON_BINARY", value_name = "FILE", default_value = "cocoon")]
    pub(crate) cocoon: PathBuf,
    #[command(flatten)]
    pub(crate) server: RegistryServer,
}

#[derive(Args, Debug)]
pub(crate) struct RegistryPullArgs {
    /// Repository, and a tag unless it is latest
    pub(crate) name: String,
    /// Write the disk or the snapshot's archive here; - is the standard output, for an archive [default: import the
    /// snapshot into the original runtime]
    #[arg(short = 'f', long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// The original runtime's program
    #[arg(long, env = "EPOCH_COCOON_BINARY", value_name = "FILE", default_value = "cocoon")]
    pub(crate) cocoon: PathBuf,
    #[command(flatten)]
    pub(crate) server: RegistryServer,
}

#[derive(Args, Debug)]
pub(crate) struct RegistryServeArgs {
    /// Serve here
    #[arg(long, visible_alias = "addr", env = "CORACLE_REGISTRY_LISTEN", value_name = "ADDR", value_parser = address, default_value = "127.0.0.1:5000")]
    pub(crate) listen: SocketAddr,
    /// Names and tokens: postgres://… [default: SQLite in the state folder]
    #[arg(long, env = "CORACLE_REGISTRY_DSN", value_name = "ADDRESS")]
    pub(crate) dsn: Option<String>,
    /// Keep blobs and manifests in this S3-compatible store, like https://HOST [default: files in the state folder]
    #[arg(long, env = "CORACLE_REGISTRY_S3_ENDPOINT", value_name = "URL", requires = "s3_bucket")]
    pub(crate) s3_endpoint: Option<String>,
    /// Bucket of the object store; it exists
    #[arg(long, env = "CORACLE_REGISTRY_S3_BUCKET", value_name = "NAME")]
    pub(crate) s3_bucket: Option<String>,
    /// Region that requests to the object store are signed for
    #[arg(long, env = "CORACLE_REGISTRY_S3_REGION", value_name = "NAME", default_value = "us-east-1")]
    pub(crate) s3_region: String,
    /// What all keys in the bucket begin with
    #[arg(long, env = "CORACLE_REGISTRY_S3_PREFIX", value_name = "PATH", default_value = "")]
    pub(crate) s3_prefix: String,
    /// Access key of the object store
    #[arg(
        long,
        env = "CORACLE_REGISTRY_S3_ACCESS_KEY",
        value_name = "KEY",
        default_value = "",
        hide_env_values = true
    )]
    pub(crate) s3_access_key: String,
    /// Its secret; better in the environment, where other users do not see it
    #[arg(
        long,
        env = "CORACLE_REGISTRY_S3_SECRET_KEY",
        value_name = "KEY",
        default_value = "",
        hide_env_values = true
    )]
    pub(crate) s3_secret_key: String,
    /// Certificate; without one the registry speaks plain HTTP
    #[arg(long, env = "CORACLE_REGISTRY_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Key of the certificate
    #[arg(long, env = "CORACLE_REGISTRY_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Serve metrics and health here
    #[arg(long, env = "CORACLE_REGISTRY_ADMIN_LISTEN", value_name = "ADDR")]
    pub(crate) admin_listen: Option<SocketAddr>,
    /// Let only tokens read: snapshots hold the memory of guests
    #[arg(long, env = "CORACLE_REGISTRY_PRIVATE_READS")]
    pub(crate) private_reads: bool,
    /// Let everybody write
    #[arg(long, env = "CORACLE_REGISTRY_OPEN_WRITES")]
    pub(crate) open_writes: bool,
    /// How clients reach the registry [default: what they say themselves]
    #[arg(long, env = "CORACLE_REGISTRY_PUBLIC_URL", value_name = "URL")]
    pub(crate) public_url: Option<String>,
    /// Bytes of all blobs together, like 500GiB [default: no limit]
    #[arg(long, env = "CORACLE_REGISTRY_QUOTA", value_name = "SIZE", value_parser = bytes)]
    pub(crate) quota: Option<u64>,
    /// Bytes of the blobs of one repository [default: no limit]
    #[arg(long, env = "CORACLE_REGISTRY_REPOSITORY_QUOTA", value_name = "SIZE", value_parser = bytes)]
    pub(crate) repository_quota: Option<u64>,
    /// Bytes of one upload
    #[arg(long, env = "CORACLE_REGISTRY_UPLOAD_MAX", value_name = "SIZE", value_parser = bytes, default_value = "40GiB")]
    pub(crate) upload_max: u64,
    /// Forget an upload that nobody went on with for so long
    #[arg(long, env = "CORACLE_REGISTRY_UPLOAD_AGE", value_name = "DURATION", default_value = "24h")]
    pub(crate) upload_age: jiff::SignedDuration,
    /// Longest wait for the next byte of a request
    #[arg(long, env = "CORACLE_REGISTRY_IDLE", value_name = "DURATION", default_value = "30s")]
    pub(crate) idle: jiff::SignedDuration,
    /// How often garbage is looked for
    #[arg(long, env = "CORACLE_REGISTRY_GC_EVERY", value_name = "DURATION", default_value = "10m")]
    pub(crate) gc_every: jiff::SignedDuration,
    /// How long a blob that nobody names stays
    #[arg(long, env = "CORACLE_REGISTRY_GC_GRACE", value_name = "DURATION", default_value = "24h")]
    pub(crate) gc_grace: jiff::SignedDuration,
    /// Remove manifests that have had no tag for so long [default: never]
    #[arg(long, env = "CORACLE_REGISTRY_GC_UNTAGGED", value_name = "DURATION")]
    pub(crate) gc_untagged: Option<jiff::SignedDuration>,
    /// Log level or filter
    #[arg(long, env = "CORACLE_REGISTRY_LOG", default_value = "info")]
    pub(crate) log: String,
    /// Started under the name of the original registry
    #[arg(long, hide = true)]
    pub(crate) legacy: bool,
}

#[derive(Args, Debug)]
pub(crate) struct ImagePushArgs {
    /// Image reference; credentials are docker's
    pub(crate) reference: String,
    /// Where to [default: as it is called]
    #[arg(conflicts_with = "disk")]
    pub(crate) target: Option<String>,
    /// Push this raw disk, without the node
    #[arg(long, value_name = "FILE")]
    pub(crate) disk: Option<PathBuf>,
    /// Bytes of a window; doubled until a disk has less than a thousand [default: 64MiB, less for a disk below 32GiB]
    #[arg(long, value_name = "SIZE", value_parser = bytes, requires = "disk")]
    pub(crate) window: Option<u64>,
    /// How the disk is written: windows, containerdisk (KubeVirt) or cloud-image (epoch); each is read by pull
    #[arg(long, value_enum, default_value_t, requires = "disk")]
    pub(crate) format: WrittenAs,
    /// Windows at once; each takes up to twice a window of memory [default: 4, more of small ones]
    #[arg(long, value_name = "COUNT", requires = "disk")]
    pub(crate) parallel: Option<usize>,
    /// How to show progress
    #[arg(long, value_enum, default_value_t)]
    pub(crate) progress: super::ProgressMode,
}

/// How a disk is written into a registry.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum WrittenAs {
    #[default]
    Windows,
    #[value(name = "containerdisk")]
    ContainerDisk,
    CloudImage,
}

/// Under the name `epoch` the commands are the registry's own, with the original's defaults.
pub(super) fn epoch(args: &mut Vec<OsString>) {
    let serves = args.get(1).is_some_and(|verb| verb == "serve");
    args.insert(1, "registry".into());
    if serves {
        args.insert(3, "--legacy".into());
        let own = |arg: &OsString| {
            arg.to_string_lossy().starts_with("--addr") || arg.to_string_lossy().starts_with("--listen")
        };
        if !args.iter().any(own) {
            args.push("--addr=:8080".into());
        }
    }
}

/// `HOST:PORT`; without a host it is any.
fn address(text: &str) -> Result<SocketAddr, String> {
    let whole = if text.starts_with(':') { format!("0.0.0.0{text}") } else { text.to_owned() };
    whole.parse().map_err(|_| "an address is IP:PORT or :PORT".to_owned())
}

/// A count of bytes with a unit of 1024: `10GiB`, `500M`, `4096`.
fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].trim_end_matches("iB").trim_end_matches('B') {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err("a unit is KiB, MiB, GiB or TiB".to_owned()),
    };
    let number: u64 = digits.parse().map_err(|_| "a size is a number with a unit, like 10GiB".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "the size is too large".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_table() {
        for (text, want) in [
            ("4096", Some(4096)),
            ("1KiB", Some(1024)),
            ("2G", Some(2 << 30)),
            ("1TB", Some(1 << 40)),
            ("x", None),
            ("1X", None),
            ("99999999T", None),
        ] {
            assert_eq!(bytes(text).ok(), want, "{text}");
        }
    }

    #[test]
    fn the_original_name_means_its_own_address() {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        for (typed, want) in [
            ("epoch serve", "epoch registry serve --legacy --addr=:8080"),
            ("epoch serve --addr :9090", "epoch registry serve --legacy --addr :9090"),
            ("epoch ls", "epoch registry ls"),
        ] {
            let mut args = words(typed);
            epoch(&mut args);
            assert_eq!(args, words(want));
        }
        assert_eq!(address(":8080").unwrap().to_string(), "0.0.0.0:8080");
    }
}
