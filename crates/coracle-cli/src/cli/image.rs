//! `coracle image`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{Format, ImagePushArgs, ProgressMode, RegistryFlags};

#[derive(Args, Debug)]
pub struct ImageArgs {
    #[command(subcommand)]
    pub command: ImageCommand,
}

#[derive(Subcommand, Debug)]
pub enum ImageCommand {
    /// List images
    Ls {
        /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
        #[arg(short, long, default_value = "table", value_name = "FORMAT", hide_possible_values = true)]
        output: Format,
    },
    /// Fetch an image from a registry
    Pull {
        /// Image reference
        reference: String,
        /// It is a disk: write it to this file here, without the node
        #[arg(long, value_name = "FILE")]
        disk: Option<PathBuf>,
        #[command(flatten)]
        registries: RegistryFlags,
        /// How to show progress
        #[arg(long, value_enum, default_value_t)]
        progress: ProgressMode,
    },
    /// Build a disk image by operating a machine: keys, waits, screenshots, its serial console
    Build(ImageBuildArgs),
    /// Push an image of the node to a registry, or with --disk a disk, in chunks that are transferred and verified alone
    Push(ImagePushArgs),
    /// Give an image one more name
    Tag {
        /// Image reference
        reference: String,
        /// Its other name
        name: String,
    },
    /// Write an image as one archive that docker, podman and skopeo load, too
    Export {
        /// Image reference
        reference: String,
        /// Where to write it; - is the standard output
        file: PathBuf,
    },
    /// Take an image from oci:DIR[:TAG] or docker-archive:FILE
    Import {
        /// Where it is, on the node's file system
        source: String,
        /// Its name here
        reference: Option<String>,
    },
    /// Show everything about an image
    Inspect {
        /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
        #[arg(short, long, default_value = "json", value_name = "FORMAT", hide_possible_values = true)]
        output: Format,
        /// Image reference
        reference: String,
    },
    /// Remove a name of an image
    Rm {
        /// Also when VMs or snapshots use it
        #[arg(short, long)]
        force: bool,
        /// Image references
        #[arg(required = true)]
        references: Vec<String>,
    },
    /// Remove what no name and no VM refers to
    Prune {
        /// Only say what would go
        #[arg(long)]
        dry_run: bool,
    },
}

#[derive(Args, Debug)]
pub struct ImageBuildArgs {
    /// YAML file with the image to start from and the steps
    pub file: PathBuf,
    /// Push the image, too
    #[arg(long)]
    pub push: bool,
    /// Keep the machine when a step fails: coracle vnc and coracle console show it
    #[arg(long)]
    pub keep: bool,
    /// Write a screenshot after each step into this directory
    #[arg(long, value_name = "DIR")]
    pub record: Option<PathBuf>,
    /// How to show progress
    #[arg(long, value_enum, default_value_t)]
    pub progress: ProgressMode,
}
