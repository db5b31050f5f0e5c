//! `coracle snapshot …`, restore and fork.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{Format, ProgressMode};

#[derive(Args, Debug)]
pub struct SnapshotArgs {
    #[command(subcommand)]
    pub command: SnapshotCommand,
}

#[derive(Subcommand, Debug)]
pub enum SnapshotCommand {
    /// Copy memory and disk of a VM at one instant; the VM continues in its state
    Save {
        /// Name or id
        vm: String,
        /// Name of the snapshot [default: made from the VM's name and the time]
        #[arg(long, default_value = "", hide_default_value = true)]
        name: String,
    },
    /// List snapshots
    Ls {
        /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
        #[arg(short, long, default_value = "table", value_name = "FORMAT", hide_possible_values = true)]
        output: Format,
    },
    /// Show everything about snapshots
    Inspect {
        /// Output format: json, yaml, name or jsonpath=TEMPLATE
        #[arg(short, long, default_value = "json", value_name = "FORMAT", hide_possible_values = true)]
        output: Format,
        /// Names, as ls shows them
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Let VMs of a namespace of the cluster, which --namespace names, be made from a snapshot of this node
    Share {
        /// Name, as ls shows it
        name: String,
        /// Take the grant back
        #[arg(long)]
        revoke: bool,
    },
    /// Remove snapshots; VMs that were made from them keep running
    Rm {
        /// Names, as ls shows them
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Write a snapshot as one archive, for another node
    Export {
        /// Name, as ls shows it
        name: String,
        /// Where to write it; - is the standard output
        file: PathBuf,
    },
    /// Push a snapshot to a registry, in chunks; it contains the memory of a guest
    Push {
        /// Name, as ls shows it
        name: String,
        /// Where to, in a registry; credentials are the node's docker configuration
        reference: String,
        /// How to show progress
        #[arg(long, value_enum, default_value_t)]
        progress: ProgressMode,
    },
    /// Take a snapshot from a registry
    Pull {
        /// Where it is
        reference: String,
        /// Name of the snapshot [default: that of the repository and the tag]
        #[arg(long)]
        name: Option<String>,
        /// How to show progress
        #[arg(long, value_enum, default_value_t)]
        progress: ProgressMode,
    },
    /// Take a snapshot from an archive
    Import {
        /// The archive; - is the standard input
        file: PathBuf,
        /// Name of the snapshot [default: that of the file]
        #[arg(long)]
        name: Option<String>,
    },
}

#[derive(Args, Debug)]
pub struct RestoreArgs {
    /// Name of the snapshot, as coracle snapshot ls shows it
    pub snapshot: String,
    /// Name of the new VM [default: that of the VM that the snapshot was taken of]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub name: String,
    /// Source of a volume of the snapshot: a directory or file of the node, or the name of a disk. Repeatable
    #[arg(long, value_name = "NAME=SOURCE", value_parser = volume_source)]
    pub volume: Vec<(String, String)>,
    /// What the guest may reach beside what is outside of the node
    #[arg(long, value_enum, value_delimiter = ',')]
    pub reach: Vec<super::ReachChoice>,
    /// Keep name, MAC, machine id and, where it is free, address of the snapshot's VM, which no longer exists
    #[arg(long, conflicts_with = "name")]
    pub same_identity: bool,
}

/// `NAME=SOURCE` of `--volume`.
fn volume_source(text: &str) -> Result<(String, String), String> {
    let (name, source) = text.split_once('=').ok_or("not NAME=SOURCE")?;
    Ok((name.to_owned(), source.parse::<super::volume::Source>()?.0))
}

#[derive(Args, Debug)]
pub struct ForkArgs {
    /// Name or id
    pub vm: String,
    /// How many copies
    #[arg(default_value_t = 1)]
    pub count: u32,
    /// What their names begin with [default: the VM's name]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub prefix: String,
}

#[derive(Args, Debug)]
pub struct CommitArgs {
    /// Name or id of a VM that runs, or of one that runs a disk image and is off
    pub vm: String,
    /// Name of the new image
    pub reference: String,
    /// Also push it to its registry
    #[arg(long)]
    pub push: bool,
    /// How to show progress
    #[arg(long, value_enum, default_value_t)]
    pub progress: ProgressMode,
}
