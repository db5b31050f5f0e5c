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
        /// The image is a disk: write it to this local file, without the node
        #[arg(long, value_name = "FILE")]
        disk: Option<PathBuf>,
        #[command(flatten)]
        registries: RegistryFlags,
        /// How to show progress
        #[arg(long, value_enum, default_value_t)]
        progress: ProgressMode,
    },
    /// Build a disk image by operating a VM: keys, waits, screenshots, serial console
    Build(ImageBuildArgs),
    /// Push an image of the node to a registry, or with --disk a local disk in chunks, each verified alone
    Push(ImagePushArgs),
    /// Add a name to an image
    Tag {
        /// Image reference
        reference: String,
        /// Name to add
        name: String,
    },
    /// Write an image as one archive, which docker, podman and skopeo can load
    Export {
        /// Image reference
        reference: String,
        /// File to write; - is standard output
        file: PathBuf,
    },
    /// Import an image from oci:DIR[:TAG] or docker-archive:FILE
    Import {
        /// Source, on the file system of the node
        source: String,
        /// Name of the image
        reference: Option<String>,
    },
    /// Show all details of an image
    Inspect {
        /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
        #[arg(short, long, default_value = "json", value_name = "FORMAT", hide_possible_values = true)]
        output: Format,
        /// Image reference
        reference: String,
    },
    /// Remove a name of an image
    Rm {
        /// Also remove images that VMs or snapshots use
        #[arg(short, long)]
        force: bool,
        /// Image references
        #[arg(required = true)]
        references: Vec<String>,
    },
    /// Remove content that belongs to no image name and no VM
    Prune {
        /// Only print what would be removed
        #[arg(long)]
        dry_run: bool,
    },
}

#[derive(Args, Debug)]
pub struct ImageBuildArgs {
    /// YAML file with the image to start from and the steps
    pub file: PathBuf,
    /// Also push the image
    #[arg(long)]
    pub push: bool,
    /// Keep the VM when a step fails, for coracle vnc and coracle console
    #[arg(long)]
    pub keep: bool,
    /// Write a screenshot after each step into this directory
    #[arg(long, value_name = "DIR")]
    pub record: Option<PathBuf>,
    /// How to show progress
    #[arg(long, value_enum, default_value_t)]
    pub progress: ProgressMode,
}
