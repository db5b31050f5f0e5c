//! `coracle agentpool …`, the operator's flags for pools, and the flags of the original operator.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::Format;

#[derive(Args, Debug)]
pub struct AgentPoolArgs {
    #[command(subcommand)]
    pub command: AgentPoolCommand,
}

#[derive(Subcommand, Debug)]
pub enum AgentPoolCommand {
    /// Show a pool: demand, capacity, conditions and its VMs
    Status(PoolArgs),
    /// Show what the last reconciliation of a pool decided
    Plan(PoolArgs),
    /// Explain the state of each VM of a pool, and what to do about it
    Explain(PoolArgs),
}

#[derive(Args, Debug)]
pub struct PoolArgs {
    /// Name of the VsphereAgentPool
    pub pool: String,
    /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
    #[arg(short, long, default_value = "table", value_name = "FORMAT", hide_possible_values = true)]
    pub output: Format,
}

/// Flags of the VsphereAgentPool controllers, under either name of the binary.
#[derive(Args, Debug, Clone)]
pub struct PoolFlags {
    /// How to verify a discovery ISO on a datastore: by its size, or by reading it back
    #[arg(long, env = "CORACLE_OPERATOR_ISO_VERIFY", value_enum, default_value_t, help_heading = POOLS)]
    pub iso_verify: IsoVerify,
    /// File with PEM authorities for the image service, besides the system's
    #[arg(long, env = "CORACLE_OPERATOR_ISO_CA_FILE", value_name = "FILE", help_heading = POOLS)]
    pub iso_ca_file: Option<PathBuf>,
    /// Let pools use Secrets of other namespaces without the consent of those Secrets
    #[arg(long, env = "CORACLE_OPERATOR_ALLOW_CROSS_NAMESPACE_SECRETS", help_heading = POOLS)]
    pub allow_cross_namespace_secrets: bool,
    /// VMs of one vCenter that are created at a time
    #[arg(long, env = "CORACLE_OPERATOR_VCENTER_CREATES", value_name = "COUNT", default_value_t = 8, help_heading = POOLS)]
    pub vcenter_creates: usize,
    /// VMs of one vCenter that are destroyed at a time
    #[arg(long, env = "CORACLE_OPERATOR_VCENTER_DESTROYS", value_name = "COUNT", default_value_t = 4, help_heading = POOLS)]
    pub vcenter_destroys: usize,
}

const POOLS: &str = "VsphereAgentPools";

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IsoVerify {
    /// Compare the size
    #[default]
    Size,
    /// Compare the digest
    Full,
}

/// Flags of the original operator, with its defaults.
#[derive(Args, Debug)]
pub struct AgentForgeArgs {
    /// Address of metrics; 0: none
    #[arg(long, default_value = "0", value_name = "ADDR")]
    pub metrics_bind_address: String,
    /// Address of health
    #[arg(long, default_value = ":8081", value_name = "ADDR")]
    pub health_probe_bind_address: String,
    /// Work only while holding the Lease
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false)]
    pub leader_elect: bool,
    /// Serve metrics by HTTPS, to callers that may GET /metrics
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = true)]
    pub metrics_secure: bool,
    /// Directory with the certificate of metrics; empty: a certificate is generated
    #[arg(long, default_value = "", value_name = "DIR")]
    pub metrics_cert_path: String,
    /// File name of the certificate
    #[arg(long, default_value = "tls.crt", value_name = "FILE")]
    pub metrics_cert_name: String,
    /// File name of its key
    #[arg(long, default_value = "tls.key", value_name = "FILE")]
    pub metrics_cert_key: String,
    /// Kubeconfig of the cluster
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Human-readable logs at a more verbose level
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false)]
    pub zap_devel: bool,
    /// Log format: json or console
    #[arg(long, default_value = "")]
    pub zap_encoder: String,
    /// Log level: debug, info, warn, error, panic or a number
    #[arg(long, default_value = "")]
    pub zap_log_level: String,
    /// Flags that are accepted and have no effect
    #[command(flatten)]
    pub ignored: Ignored,
    #[command(flatten)]
    pub pools: PoolFlags,
}

/// Flags of the original without effect here: there is no webhook, and the rest is always enabled.
#[derive(Args, Debug)]
pub struct Ignored {
    #[arg(long, default_value = "")]
    pub webhook_cert_path: String,
    #[arg(long, default_value = "tls.crt")]
    pub webhook_cert_name: String,
    #[arg(long, default_value = "tls.key")]
    pub webhook_cert_key: String,
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false)]
    pub enable_http2: bool,
    #[arg(long, default_value = "")]
    pub zap_stacktrace_level: String,
    #[arg(long, default_value = "")]
    pub zap_time_encoding: String,
}

/// Command that the name of the original stands for.
pub(super) const AGENT_FORGE: &str = "agent-forge-operator";

/// Converts flags in Go's syntax to clap's: `-flag` and `--flag` mean the same, and a switch takes a value only after `=`.
/// Pure.
pub(super) fn go_flags(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let two_dashes = |arg: OsString| match arg.to_str().and_then(|text| text.strip_prefix('-')) {
        Some(rest) if rest.starts_with(|c: char| c.is_ascii_alphabetic()) && rest.len() > 1 => {
            format!("--{}", go_bool(rest)).into()
        }
        Some(rest) if rest.starts_with('-') => format!("-{}", go_bool(rest)).into(),
        _ => arg,
    };
    args.into_iter().map(two_dashes).collect()
}

/// Boolean flags of the original.
const SWITCHES: [&str; 4] = ["leader-elect", "metrics-secure", "enable-http2", "zap-devel"];

/// Converts a boolean flag's value: Go accepts more words than clap does.
fn go_bool(flag: &str) -> String {
    match flag.trim_start_matches('-').split_once('=') {
        Some((name, value)) if SWITCHES.contains(&name) => {
            let value = match value {
                "1" | "t" | "T" | "TRUE" | "True" => "true",
                "0" | "f" | "F" | "FALSE" | "False" => "false",
                other => other,
            };
            format!("{}={value}", flag.split('=').next().unwrap_or_default())
        }
        _ => flag.to_owned(),
    }
}
