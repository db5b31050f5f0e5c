//! `coracle template …`.

use clap::{Args, Subcommand};

use super::Format;

#[derive(Args, Debug)]
pub struct TemplateArgs {
    #[command(subcommand)]
    pub command: TemplateCommand,
}

#[derive(Subcommand, Debug)]
pub enum TemplateCommand {
    /// List templates
    Ls {
        /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
        #[arg(short, long, default_value = "table", value_name = "FORMAT", hide_possible_values = true)]
        output: Format,
    },
    /// Create the template of a shape now instead of after its first boot
    Warm {
        /// Number of CPUs
        #[arg(long, default_value_t = 1)]
        cpus: u32,
        /// Memory in MiB
        #[arg(short, long, default_value_t = 256, value_name = "MIB")]
        memory: u64,
        /// Size in MiB of the blank disk that is mounted in the template; a VM with another size mounts its disk after the
        /// clone started [default: 10240]
        #[arg(long, value_name = "MIB")]
        disk: Option<u64>,
        /// Use this kernel
        #[arg(long, default_value = "")]
        kernel: String,
    },
    /// Remove templates; VMs that were cloned from them keep running
    Rm {
        /// Keys, as ls shows them
        #[arg(required = true)]
        keys: Vec<String>,
    },
}
