//! `coracle volume …`, and the volumes of `coracle run`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};

use super::Format;

#[derive(Args, Debug)]
pub struct VolumeArgs {
    #[command(subcommand)]
    pub command: VolumeCommand,
}

#[derive(Subcommand, Debug)]
pub enum VolumeCommand {
    /// Attach a disk or a directory of the node to a VM: at once if it runs, else at its next start
    Attach {
        /// Name or id
        vm: String,
        /// Directory or raw disk image of the node, or name of a disk that the node keeps
        source: Source,
        /// Path in the guest [default: /mnt/NAME; /dev/NAME for a disk without a file system]
        #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
        target: String,
        /// Name of the volume in the VM [default: made from the source]
        #[arg(long, default_value = "", hide_default_value = true)]
        name: String,
        /// Deny writes by the guest
        #[arg(long)]
        read_only: bool,
        /// Create the disk of that name with this size in MiB, if the node has none
        #[arg(long, value_name = "MIB")]
        size: Option<u64>,
    },
    /// Detach a volume from a VM; its content is kept
    Detach {
        /// Name or id
        vm: String,
        /// Name of the volume, as ls shows it
        volume: String,
    },
    /// List the volumes of a VM
    Ls {
        /// Name, id or unique prefix
        vm: String,
        /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
        #[arg(short, long, default_value = "table", value_name = "FORMAT", hide_possible_values = true)]
        output: Format,
    },
}

/// Source of a volume in the form that the node expects: an absolute path, or the name of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source(pub String);

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.contains('/') && text != "." && text != ".." {
            return Ok(Self(text.to_owned()));
        }
        let path = std::path::absolute(PathBuf::from(text)).map_err(|e| e.to_string())?;
        path.into_os_string().into_string().map(Self).map_err(|_| "the path is not UTF-8".to_owned())
    }
}

/// Volume of `coracle run` in the usual form of container tools: `SOURCE[:TARGET[:OPTION,…]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeFlag {
    pub source: String,
    pub target: String,
    pub read_only: bool,
    pub size_mib: u64,
}

impl FromStr for VolumeFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.splitn(3, ':');
        let source = parts.next().unwrap_or_default().parse::<Source>()?.0;
        if source.is_empty() {
            return Err("a source is missing before the colon".to_owned());
        }
        let target = parts.next().unwrap_or_default().to_owned();
        let mut flag = Self { source, target, read_only: false, size_mib: 0 };
        for option in parts.next().into_iter().flat_map(|all| all.split(',')) {
            match option.split_once('=') {
                None if option == "ro" => flag.read_only = true,
                None if option == "rw" => flag.read_only = false,
                Some(("size", mib)) => {
                    flag.size_mib =
                        mib.parse().map_err(|_| format!("invalid size {mib:?}: want a number of MiB"))?;
                }
                _ => return Err(format!("invalid volume option {option:?}: ro, rw or size=MIB")),
            }
        }
        Ok(flag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flag(source: &str, target: &str, read_only: bool, size_mib: u64) -> Result<VolumeFlag, String> {
        Ok(VolumeFlag { source: source.into(), target: target.into(), read_only, size_mib })
    }

    #[test]
    fn volume_flag_is_parsed_or_refused() {
        let here = std::env::current_dir().unwrap();
        let below = here.join("www").display().to_string();
        for (text, want) in [
            ("/srv", flag("/srv", "", false, 0)),
            ("/srv:/www", flag("/srv", "/www", false, 0)),
            ("/srv::ro", flag("/srv", "", true, 0)),
            ("./www:/www:ro", flag(&below, "/www", true, 0)),
            (".", flag(&here.display().to_string(), "", false, 0)),
            ("data:/data:size=1024,ro", flag("data", "/data", true, 1024)),
            (":/data", Err("a source is missing before the colon".into())),
            ("/srv:/www:z", Err("invalid volume option \"z\": ro, rw or size=MIB".into())),
            ("data:/data:size=1G", Err("invalid size \"1G\": want a number of MiB".into())),
        ] {
            assert_eq!(text.parse(), want, "{text}");
        }
    }
}
