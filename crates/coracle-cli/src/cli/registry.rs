//! `coracle registry …`, and the command line under the name `epoch`.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::WorkerThreads;

#[derive(Args, Debug)]
pub struct RegistryArgs {
    #[command(subcommand)]
    pub command: RegistryCommand,
}

#[derive(Subcommand, Debug)]
pub enum RegistryCommand {
    /// Serve an OCI registry from the state directory
    Serve(Box<RegistryServeArgs>),
    /// Push a snapshot of the original runtime, or a disk image, to a registry
    Push(RegistryPushArgs),
    /// Pull a snapshot into the original runtime, or a snapshot or disk into a file
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
    /// Show all details of NAME[:TAG] in the registry, as JSON
    Inspect(RegistryNameArgs),
    /// Add a tag to NAME[:TAG]
    Tag {
        /// Repository, and a tag unless it is latest
        name: String,
        /// Tag to add
        tag: String,
        #[command(flatten)]
        server: RegistryServer,
    },
    /// Remove a tag
    Rm(RegistryNameArgs),
}

/// Registry of client commands, from the environment variables of the original client.
#[derive(Args, Debug)]
pub struct RegistryServer {
    /// Address of the registry
    #[arg(long, env = "EPOCH_SERVER", value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub server: String,
    /// Token for writes and private reads; better in the environment
    #[arg(long, env = "EPOCH_REGISTRY_TOKEN", value_name = "TOKEN", hide_env_values = true)]
    pub token: Option<String>,
    /// File with certificates to trust besides the system's
    #[arg(long, env = "EPOCH_CA_CERT", value_name = "FILE")]
    pub ca_cert: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub struct RegistryNameArgs {
    /// Repository, and a tag unless it is latest
    pub name: String,
    #[command(flatten)]
    pub server: RegistryServer,
}

#[derive(Args, Debug)]
pub struct RegistryPushArgs {
    /// Repository, and a tag unless it is latest
    pub name: String,
    /// Disk (raw or qcow2) or archive of a snapshot; - is an archive on standard input [default: the snapshot of that name,
    /// exported by the original runtime]
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Write large files of a snapshot in compressed chunks, which older clients cannot read
    #[arg(long)]
    pub chunked: bool,
    /// Program of the original runtime
    #[arg(long, env = "EPOCH_COCOON_BINARY", value_name = "FILE", default_value = "cocoon")]
    pub cocoon: PathBuf,
    #[command(flatten)]
    pub server: RegistryServer,
}

#[derive(Args, Debug)]
pub struct RegistryPullArgs {
    /// Repository, and a tag unless it is latest
    pub name: String,
    /// File for the disk or the archive of the snapshot; - is standard output, for an archive [default: import the snapshot
    /// into the original runtime]
    #[arg(short = 'f', long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Program of the original runtime
    #[arg(long, env = "EPOCH_COCOON_BINARY", value_name = "FILE", default_value = "cocoon")]
    pub cocoon: PathBuf,
    #[command(flatten)]
    pub server: RegistryServer,
}

#[derive(Args, Debug)]
pub struct RegistryServeArgs {
    #[command(flatten)]
    pub threads: WorkerThreads,
    /// Address to listen at
    #[arg(long, visible_alias = "addr", env = "CORACLE_REGISTRY_LISTEN", value_name = "ADDR", value_parser = address, default_value = "127.0.0.1:5000")]
    pub listen: SocketAddr,
    /// Database of names and tokens: postgres://… [default: SQLite in the state directory]
    #[arg(long, env = "CORACLE_REGISTRY_DSN", value_name = "ADDRESS")]
    pub dsn: Option<String>,
    /// Keep blobs and manifests in this S3-compatible store, like https://HOST [default: files in the state directory]
    #[arg(long, env = "CORACLE_REGISTRY_S3_ENDPOINT", value_name = "URL", requires = "s3_bucket")]
    pub s3_endpoint: Option<String>,
    /// Bucket of the object store, which must exist
    #[arg(long, env = "CORACLE_REGISTRY_S3_BUCKET", value_name = "NAME")]
    pub s3_bucket: Option<String>,
    /// Region that requests to the object store are signed for
    #[arg(long, env = "CORACLE_REGISTRY_S3_REGION", value_name = "NAME", default_value = "us-east-1")]
    pub s3_region: String,
    /// Prefix of all keys in the bucket
    #[arg(long, env = "CORACLE_REGISTRY_S3_PREFIX", value_name = "PATH", default_value = "")]
    pub s3_prefix: String,
    /// Access key of the object store
    #[arg(
        long,
        env = "CORACLE_REGISTRY_S3_ACCESS_KEY",
        value_name = "KEY",
        default_value = "",
        hide_env_values = true
    )]
    pub s3_access_key: String,
    /// Secret key of the object store; better in the environment, where other users do not see it
    #[arg(
        long,
        env = "CORACLE_REGISTRY_S3_SECRET_KEY",
        value_name = "KEY",
        default_value = "",
        hide_env_values = true
    )]
    pub s3_secret_key: String,
    /// Certificate of the registry; without one it serves plain HTTP
    #[arg(long, env = "CORACLE_REGISTRY_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Key of the certificate
    #[arg(long, env = "CORACLE_REGISTRY_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Address of metrics and health
    #[arg(long, env = "CORACLE_REGISTRY_ADMIN_LISTEN", value_name = "ADDR")]
    pub admin_listen: Option<SocketAddr>,
    /// Require a token for reads: snapshots contain the memory of guests
    #[arg(long, env = "CORACLE_REGISTRY_PRIVATE_READS")]
    pub private_reads: bool,
    /// Allow writes without a token
    #[arg(long, env = "CORACLE_REGISTRY_OPEN_WRITES")]
    pub open_writes: bool,
    /// URL at which clients reach the registry [default: from the Host header of the request]
    #[arg(long, env = "CORACLE_REGISTRY_PUBLIC_URL", value_name = "URL")]
    pub public_url: Option<String>,
    /// Accept an index whose manifests are not all in the repository
    #[arg(long, env = "CORACLE_REGISTRY_ALLOW_SPARSE_INDEXES")]
    pub allow_sparse_indexes: bool,
    /// Limit of all blobs together, like 500GiB [default: no limit]
    #[arg(long, env = "CORACLE_REGISTRY_QUOTA", value_name = "SIZE", value_parser = bytes)]
    pub quota: Option<u64>,
    /// Limit of the blobs of one repository [default: no limit]
    #[arg(long, env = "CORACLE_REGISTRY_REPOSITORY_QUOTA", value_name = "SIZE", value_parser = bytes)]
    pub repository_quota: Option<u64>,
    /// Limit of one upload
    #[arg(long, env = "CORACLE_REGISTRY_UPLOAD_MAX", value_name = "SIZE", value_parser = bytes, default_value = "40GiB")]
    pub upload_max: u64,
    /// Remove an upload without progress for this long
    #[arg(long, env = "CORACLE_REGISTRY_UPLOAD_AGE", value_name = "DURATION", default_value = "24h")]
    pub upload_age: jiff::SignedDuration,
    /// Longest wait for the next byte of a request
    #[arg(long, env = "CORACLE_REGISTRY_IDLE", value_name = "DURATION", default_value = "30s")]
    pub idle: jiff::SignedDuration,
    /// Interval of garbage collection
    #[arg(long, env = "CORACLE_REGISTRY_GC_EVERY", value_name = "DURATION", default_value = "10m")]
    pub gc_every: jiff::SignedDuration,
    /// Time that an unreferenced blob is kept
    #[arg(long, env = "CORACLE_REGISTRY_GC_GRACE", value_name = "DURATION", default_value = "24h")]
    pub gc_grace: jiff::SignedDuration,
    /// Remove manifests without a tag for this long [default: never]
    #[arg(long, env = "CORACLE_REGISTRY_GC_UNTAGGED", value_name = "DURATION")]
    pub gc_untagged: Option<jiff::SignedDuration>,
    /// Log level or filter
    #[arg(long, env = "CORACLE_REGISTRY_LOG", default_value = "info")]
    pub log: String,
    /// Started under the name of the original registry
    #[arg(long, hide = true)]
    pub legacy: bool,
}

#[derive(Args, Debug)]
pub struct ImagePushArgs {
    /// Image reference; credentials are docker's
    pub reference: String,
    /// Reference to push to [default: the image reference]
    #[arg(conflicts_with = "disk")]
    pub target: Option<String>,
    /// Push this raw disk, without the node
    #[arg(long, value_name = "FILE")]
    pub disk: Option<PathBuf>,
    /// Chunk size; doubled until the disk has fewer than a thousand chunks [default: 64MiB, less for a disk below 32GiB]
    #[arg(long, value_name = "SIZE", value_parser = bytes, requires = "disk")]
    pub chunk_size: Option<u64>,
    /// Format of the disk: chunks, containerdisk (KubeVirt), cloud-image (epoch) or tart; pull reads all of them
    #[arg(long, value_enum, default_value_t, requires = "disk")]
    pub format: WrittenAs,
    /// Chunks at a time; each takes up to twice its size of memory, at most 128 MiB [default: 16, of 256 MiB together]
    #[arg(long, value_name = "COUNT", requires = "disk")]
    pub parallel: Option<usize>,
    /// How to show progress
    #[arg(long, value_enum, default_value_t)]
    pub progress: super::ProgressMode,
    #[command(flatten)]
    pub registries: super::RegistryFlags,
}

/// Format of a disk in a registry.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WrittenAs {
    #[default]
    Chunks,
    #[value(name = "containerdisk")]
    ContainerDisk,
    CloudImage,
    Tart,
}

/// Translates a command line under the name `epoch` to `coracle registry …`, with the defaults of the original.
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

/// Parses `IP:PORT`; `:PORT` means all addresses.
fn address(text: &str) -> Result<SocketAddr, String> {
    let whole = if text.starts_with(':') { format!("0.0.0.0{text}") } else { text.to_owned() };
    whole.parse().map_err(|_| "an address is IP:PORT or :PORT".to_owned())
}

/// Parses a number of bytes with a unit of 1024: `10GiB`, `500M`, `4096`.
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
    fn epoch_serve_defaults_to_the_original_address() {
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
