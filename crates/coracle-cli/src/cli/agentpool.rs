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
    /// Show what the last pass over a pool decided
    Plan(PoolArgs),
    /// Say how each VM of a pool came to be as it is, and what to do
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

/// Flags of the controllers of VsphereAgentPools, under either name of the binary.
#[derive(Args, Debug, Clone)]
pub struct PoolFlags {
    /// How a discovery ISO on a datastore is checked: by its size, or read back whole
    #[arg(long, env = "CORACLE_OPERATOR_ISO_VERIFY", value_enum, default_value_t, help_heading = POOLS)]
    pub iso_verify: IsoVerify,
    /// Authorities in PEM of the image service, besides the system's
    #[arg(long, env = "CORACLE_OPERATOR_ISO_CA_FILE", value_name = "FILE", help_heading = POOLS)]
    pub iso_ca_file: Option<PathBuf>,
    /// Let pools use Secrets of other namespaces without those Secrets' consent
    #[arg(long, env = "CORACLE_OPERATOR_ALLOW_CROSS_NAMESPACE_SECRETS", help_heading = POOLS)]
    pub allow_cross_namespace_secrets: bool,
    /// VMs of one vCenter that are made at once
    #[arg(long, env = "CORACLE_OPERATOR_VCENTER_CREATES", value_name = "COUNT", default_value_t = 8, help_heading = POOLS)]
    pub vcenter_creates: usize,
    /// VMs of one vCenter that are destroyed at once
    #[arg(long, env = "CORACLE_OPERATOR_VCENTER_DESTROYS", value_name = "COUNT", default_value_t = 4, help_heading = POOLS)]
    pub vcenter_destroys: usize,
}

const POOLS: &str = "VsphereAgentPools";

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IsoVerify {
    /// By its size
    #[default]
    Size,
    /// By its digest
    Full,
}

/// The flags and defaults of the original operator.
#[derive(Args, Debug)]
pub struct AgentForgeArgs {
    /// Where metrics are served; 0: nowhere
    #[arg(long, default_value = "0", value_name = "ADDR")]
    pub metrics_bind_address: String,
    /// Where health is served
    #[arg(long, default_value = ":8081", value_name = "ADDR")]
    pub health_probe_bind_address: String,
    /// Work only while holding the Lease
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false)]
    pub leader_elect: bool,
    /// Metrics by HTTPS, for those who may GET /metrics
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = true)]
    pub metrics_secure: bool,
    /// Directory of the metrics' certificate; empty: one is made
    #[arg(long, default_value = "", value_name = "DIR")]
    pub metrics_cert_path: String,
    /// File of the certificate
    #[arg(long, default_value = "tls.crt", value_name = "FILE")]
    pub metrics_cert_name: String,
    /// File of its key
    #[arg(long, default_value = "tls.key", value_name = "FILE")]
    pub metrics_cert_key: String,
    /// Cluster to work for
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Readable log lines, and more of them
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false)]
    pub zap_devel: bool,
    /// json or console
    #[arg(long, default_value = "")]
    pub zap_encoder: String,
    /// debug, info, warn, error, panic or a number
    #[arg(long, default_value = "")]
    pub zap_log_level: String,
    /// What is accepted and means nothing here
    #[command(flatten)]
    pub ignored: Ignored,
    #[command(flatten)]
    pub pools: PoolFlags,
}

/// Flags of the original without effect here: a webhook does not exist, and the rest is always on.
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

/// The command that the original's name stands for.
pub(super) const AGENT_FORGE: &str = "agent-forge-operator";

/// Go's flags as ours: one dash or two mean the same, and a switch takes its value by `=` alone. Pure.
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

/// Switches of the original.
const SWITCHES: [&str; 4] = ["leader-elect", "metrics-secure", "enable-http2", "zap-devel"];

/// Go reads more words as a truth value than clap does.
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
