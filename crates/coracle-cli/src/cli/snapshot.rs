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
    /// Save the memory and disk of a VM at one instant; the VM keeps its state
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
    /// Show all details of snapshots
    Inspect {
        /// Output format: json, yaml, name or jsonpath=TEMPLATE
        #[arg(short, long, default_value = "json", value_name = "FORMAT", hide_possible_values = true)]
        output: Format,
        /// Names, as ls shows them
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Allow a namespace of the cluster, which --namespace names, to create VMs from a snapshot of this node
    Share {
        /// Name, as ls shows it
        name: String,
        /// Revoke the grant
        #[arg(long)]
        revoke: bool,
    },
    /// Remove snapshots; VMs that were created from them keep running
    Rm {
        /// Names, as ls shows them
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Write a snapshot as one archive, for another node
    Export {
        /// Name, as ls shows it
        name: String,
        /// File to write; - is standard output
        file: PathBuf,
    },
    /// Push a snapshot to a registry, in chunks; it contains the memory of a guest
    Push {
        /// Name, as ls shows it
        name: String,
        /// Reference to push to; credentials are the node's docker configuration
        reference: String,
        /// How to show progress
        #[arg(long, value_enum, default_value_t)]
        progress: ProgressMode,
    },
    /// Pull a snapshot from a registry
    Pull {
        /// Reference to pull from
        reference: String,
        /// Name of the snapshot [default: that of the repository and the tag]
        #[arg(long)]
        name: Option<String>,
        /// How to show progress
        #[arg(long, value_enum, default_value_t)]
        progress: ProgressMode,
    },
    /// Import a snapshot from an archive
    Import {
        /// Archive; - is standard input
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
    /// Name of the new VM [default: the name of the VM that was saved]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub name: String,
    /// Source of a volume of the snapshot: a directory or file of the node, or the name of a disk; may be repeated
    #[arg(long, value_name = "NAME=SOURCE", value_parser = volume_source)]
    pub volume: Vec<(String, String)>,
    /// Destinations that the guest may reach besides those outside of the node
    #[arg(long, value_enum, value_delimiter = ',')]
    pub reach: Vec<super::ReachChoice>,
    /// Keep name, MAC, machine id and, if it is free, address of the saved VM, which must not exist any more
    #[arg(long, conflicts_with = "name")]
    pub same_identity: bool,
}

/// Parses `NAME=SOURCE` of `--volume`.
fn volume_source(text: &str) -> Result<(String, String), String> {
    let (name, source) = text.split_once('=').ok_or("not NAME=SOURCE")?;
    Ok((name.to_owned(), source.parse::<super::volume::Source>()?.0))
}

#[derive(Args, Debug)]
pub struct ForkArgs {
    /// Name or id
    pub vm: String,
    /// Number of copies
    #[arg(default_value_t = 1)]
    pub count: u32,
    /// Prefix of their names [default: the VM's name]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub prefix: String,
}

#[derive(Args, Debug)]
pub struct CommitArgs {
    /// Name or id of a running VM, or of a stopped disk image VM
    pub vm: String,
    /// Name of the new image
    pub reference: String,
    /// Also push the image to its registry
    #[arg(long)]
    pub push: bool,
    /// How to show progress
    #[arg(long, value_enum, default_value_t)]
    pub progress: ProgressMode,
}
