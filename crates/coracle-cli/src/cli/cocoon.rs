//! Flags of the operator for CocoonSets, and the flags and variables of the original operator and webhook.

use std::path::PathBuf;

use clap::Args;
use jiff::SignedDuration;

/// Flags of the controllers for CocoonSets and CocoonHibernations, and of the webhook for their pods.
#[derive(Args, Debug, Clone)]
pub struct CocoonFlags {
    /// Registry of saved VMs: http://HOST[:PORT] or https://HOST[:PORT] [default: $EPOCH_URL, or none: nothing is saved or removed]
    #[arg(long, env = "CORACLE_OPERATOR_COCOON_REGISTRY", value_name = "URL", help_heading = SETS)]
    pub cocoon_registry: Option<String>,
    /// Token for the removal of saved VMs [default: $EPOCH_TOKEN]
    #[arg(long, env = "CORACLE_OPERATOR_COCOON_REGISTRY_TOKEN", value_name = "TOKEN", hide_env_values = true, help_heading = SETS)]
    pub cocoon_registry_token: Option<String>,
    /// File with PEM certificates to trust for the registry, besides the system's
    #[arg(long, env = "CORACLE_OPERATOR_COCOON_REGISTRY_CA", value_name = "FILE", help_heading = SETS)]
    pub cocoon_registry_ca: Option<PathBuf>,
    /// Replace pods that differ from the spec of their CocoonSet
    #[arg(long, env = "CORACLE_OPERATOR_COCOON_DRIFT", help_heading = SETS)]
    pub cocoon_drift: bool,
    /// Rebuild sub-agents that ended, up to four times
    #[arg(long, env = "CORACLE_OPERATOR_COCOON_REBUILD", help_heading = SETS)]
    pub cocoon_rebuild: bool,
    /// Move the main agent when spec.nodeName changes
    #[arg(long, env = "CORACLE_OPERATOR_COCOON_MIGRATE", help_heading = SETS)]
    pub cocoon_migrate: bool,
    /// Keep the snapshots of deleted pods when their CocoonSet is deleted
    #[arg(long, env = "CORACLE_OPERATOR_COCOON_KEEP_SNAPSHOTS", help_heading = SETS)]
    pub cocoon_keep_snapshots: bool,
    /// Do not assign slots and nodes to pods at their creation
    #[arg(long, env = "CORACLE_OPERATOR_COCOON_NO_STICKY", help_heading = SETS)]
    pub cocoon_no_sticky: bool,
    /// Refuse pods that run as VMs and do not belong to a CocoonSet
    #[arg(long, env = "CORACLE_OPERATOR_COCOON_STRICT", help_heading = SETS)]
    pub cocoon_strict: bool,
    /// Run every pod with the toleration as a VM, and take its image from the first container unless an annotation names one.
    /// Otherwise pods without an annotation of a VM run containers
    #[arg(long, env = "CORACLE_OPERATOR_COCOON_IMAGE_ANNOTATION", help_heading = SETS)]
    pub cocoon_image_annotation: bool,
}

const SETS: &str = "CocoonSets";

/// Flags and variables of the original operator, with its defaults.
#[derive(Args, Debug)]
pub struct CocoonOperatorArgs {
    /// Address of metrics; 0: none
    #[arg(long, env = "METRICS_ADDR", default_value = ":8080", value_name = "ADDR")]
    pub metrics_bind_address: String,
    /// Address of health
    #[arg(long, env = "PROBE_ADDR", default_value = ":8081", value_name = "ADDR")]
    pub health_probe_bind_address: String,
    /// Work only while holding the Lease
    #[arg(long, env = "LEADER_ELECT", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "true", value_parser = parse_go_bool, action = clap::ArgAction::Set)]
    pub leader_elect: bool,
    /// CocoonSets reconciled at a time
    #[arg(long, env = "COCOONSET_CONCURRENCY", default_value_t = 4, value_name = "COUNT")]
    pub cocoonset_concurrency: u16,
    /// CocoonHibernations reconciled at a time
    #[arg(long, env = "HIBERNATION_CONCURRENCY", default_value_t = 4, value_name = "COUNT")]
    pub hibernation_concurrency: u16,
    /// Kubeconfig of the cluster
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Log level
    #[arg(long, env = "OPERATOR_LOG_LEVEL", default_value = "info", value_name = "LEVEL")]
    pub log: String,
    /// Registry of saved VMs
    #[arg(
        long,
        env = "EPOCH_URL",
        default_value = "http://epoch.cocoon-system.svc:8080",
        value_name = "URL"
    )]
    pub epoch_url: String,
    /// Token of the registry
    #[arg(long, env = "EPOCH_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    pub epoch_token: Option<String>,
    /// File with certificates to trust for the registry
    #[arg(long, env = "EPOCH_CA_CERT", value_name = "FILE")]
    pub epoch_ca_cert: Option<PathBuf>,
    /// Registry that replaces the one above, under the name of later releases
    #[arg(long, env = "OCI_REGISTRY", value_name = "URL")]
    pub oci_registry: Option<String>,
}

/// Variables of the original webhook, with its defaults.
#[derive(Args, Debug)]
pub struct CocoonWebhookArgs {
    /// Address of the webhook
    #[arg(long, env = "LISTEN_ADDR", default_value = ":8443", value_name = "ADDR")]
    pub listen: String,
    /// Address of metrics; 0: none
    #[arg(long, env = "METRICS_ADDR", default_value = ":9090", value_name = "ADDR")]
    pub metrics: String,
    /// Certificate of the webhook
    #[arg(long, env = "TLS_CERT", default_value = "/etc/cocoon/webhook/certs/tls.crt", value_name = "FILE")]
    pub tls_cert: PathBuf,
    /// Key of the certificate
    #[arg(long, env = "TLS_KEY", default_value = "/etc/cocoon/webhook/certs/tls.key", value_name = "FILE")]
    pub tls_key: PathBuf,
    /// Log level
    #[arg(long, env = "WEBHOOK_LOG_LEVEL", default_value = "info", value_name = "LEVEL")]
    pub log: String,
    /// Kubeconfig of the cluster
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Interval of the search for reservations whose pods are gone
    #[arg(long, env = "REAPER_INTERVAL", default_value = "5m", value_name = "DURATION")]
    pub reaper_interval: SignedDuration,
    /// How long a reservation is kept after its pod is gone
    #[arg(long, env = "REAPER_GRACE", default_value = "30m", value_name = "DURATION")]
    pub reaper_grace: SignedDuration,
    /// Users that may create the pods of CocoonSets; if set, all other pods that run as VMs are refused
    #[arg(long, env = "POD_CREATORS", value_name = "USER", value_delimiter = ',')]
    pub pod_creators: Vec<String>,
}

/// Command that the name of the original operator stands for.
pub(super) const OPERATOR: &str = "cocoon-operator";
/// Command that the name of the original webhook stands for.
pub(super) const WEBHOOK: &str = "cocoon-webhook";

/// Parses a boolean in the forms that Go accepts.
fn parse_go_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(false),
        _ => Err("must be true or false".to_owned()),
    }
}
