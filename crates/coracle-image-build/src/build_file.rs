//! Build file: describes how a disk image is built. Pure.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::SignedDuration;
use serde::Deserialize;

use crate::keys;

/// Description of how an image is built.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BuildFile {
    /// Disk image that the VM boots: a reference, or a path relative to the build file.
    pub from: String,
    /// Name of the image that is made of the VM's disk. Without a name the steps run, and nothing is kept.
    #[serde(default)]
    pub image: Option<String>,
    /// CPUs of the VM.
    #[serde(default = "one")]
    pub cpus: u32,
    /// Memory of the VM, MiB.
    #[serde(default = "default_memory")]
    pub memory: u64,
    /// Size of the VM's disk, MiB. Default: that of the image.
    #[serde(default)]
    pub disk: Option<u64>,
    /// Firmware of the VM: auto, bios or uefi.
    #[serde(default)]
    pub firmware: String,
    /// Display of the VM.
    #[serde(default = "default_display")]
    pub display: String,
    /// File `user-data` of the disk with the label `CIDATA`, relative to the build file. For cloud-init, or a script that a
    /// step runs.
    #[serde(default)]
    pub user_data: Option<PathBuf>,
    /// Volumes of the VM, in the form of `coracle run --volume`: for example the disk onto which an installer writes.
    #[serde(default)]
    pub volumes: Vec<String>,
    /// Time limit of each wait.
    #[serde(default = "default_timeout", rename = "timeout")]
    timeout: SignedDuration,
    /// Steps, executed in this order.
    pub steps: Vec<Step>,
}

/// Step of a build.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Step {
    /// Types text on the keyboard. Keys are in angle brackets, as in `root<enter>` or `<leftCtrlOn>c<leftCtrlOff>`.
    Type(String),
    /// Types text on the serial console.
    TypeSerial(String),
    /// Waits for a fixed time.
    Wait(SignedDuration),
    /// Waits until the serial console prints this text, after the text that earlier waits have found.
    WaitForSerial(String),
    /// Waits until the screen has not changed for this time.
    WaitForStill(SignedDuration),
    /// Waits until the screen shows a picture.
    WaitForPicture(Picture),
    /// Waits until the VM is off.
    WaitForOff,
    /// Writes the screen to a PNG file.
    Screenshot(PathBuf),
}

/// Picture that the screen is compared with.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Picture {
    /// PNG file of the whole screen, as a screenshot writes it.
    pub file: PathBuf,
    /// Part of the screen that is compared. Default: the whole screen.
    #[serde(default)]
    pub area: Option<Area>,
    /// Share of pixels that may differ, from 0 to 1.
    #[serde(default)]
    pub tolerance: f64,
}

/// Part of the screen, in pixels from the upper left corner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Area {
    /// Left edge.
    pub x: u32,
    /// Upper edge.
    pub y: u32,
    /// Width.
    pub width: u32,
    /// Height.
    pub height: u32,
}

fn one() -> u32 {
    1
}

fn default_memory() -> u64 {
    1024
}

fn default_display() -> String {
    "1024x768".to_owned()
}

fn default_timeout() -> SignedDuration {
    SignedDuration::from_mins(10)
}

impl BuildFile {
    /// Parses a build file in the directory `dir`. Relative paths become paths below `dir`.
    ///
    /// # Errors
    /// The error and its position.
    pub fn parse(text: &str, dir: &Path) -> Result<Self, String> {
        let mut file: Self = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        if file.timeout <= SignedDuration::ZERO {
            return Err("timeout: not longer than nothing".to_owned());
        }
        file.user_data = file.user_data.map(|path| dir.join(path));
        if ["./", "../"].iter().any(|start| file.from.starts_with(start)) {
            file.from = dir.join(&file.from).display().to_string();
        }
        for (n, step) in (1..).zip(&mut file.steps) {
            step.resolve(dir).map_err(|why| format!("step {n}: {why}"))?;
        }
        if file.image.is_some() && !file.steps.contains(&Step::WaitForOff) {
            return Err(
                "image: a disk is whole when its machine is off, and no step is waitForOff".to_owned()
            );
        }
        Ok(file)
    }

    /// Time limit of each wait.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout.unsigned_abs()
    }
}

impl Step {
    fn resolve(&mut self, dir: &Path) -> Result<(), String> {
        match self {
            Self::Type(text) => keys::parse(text).map(drop),
            Self::Wait(time) | Self::WaitForStill(time) if time.is_negative() => {
                Err("a negative time".to_owned())
            }
            Self::WaitForSerial(text) if text.is_empty() => Err("no text to wait for".to_owned()),
            Self::WaitForPicture(picture) => {
                picture.file = dir.join(&picture.file);
                let tolerance = picture.tolerance;
                if (0.0..=1.0).contains(&tolerance) {
                    Ok(())
                } else {
                    Err(format!("tolerance {tolerance} is not from 0 to 1"))
                }
            }
            Self::Screenshot(file) => {
                *file = dir.join(&*file);
                Ok(())
            }
            Self::TypeSerial(_)
            | Self::Wait(_)
            | Self::WaitForSerial(_)
            | Self::WaitForStill(_)
            | Self::WaitForOff => Ok(()),
        }
    }
}

/// Formats one line for progress and errors. Typed text is not shown, because it can be a password.
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Type(_) => f.write_str("type at the screen"),
            Self::TypeSerial(_) => f.write_str("type at the serial console"),
            Self::Wait(time) => write!(f, "wait {time:#}"),
            Self::WaitForSerial(text) => write!(f, "wait for {text:?} at the serial console"),
            Self::WaitForStill(time) => write!(f, "wait for a screen that is still for {time:#}"),
            Self::WaitForPicture(Picture { file, .. }) => {
                write!(f, "wait for the picture {}", file.display())
            }
            Self::WaitForOff => f.write_str("wait until the machine is off"),
            Self::Screenshot(file) => write!(f, "write {}", file.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_file_paths_are_relative_to_the_file() {
        let text = "
from: ./base.qcow2
image: localhost/base/debian:12
userData: provision.sh
timeout: 3m
steps:
- waitForSerial: 'login: '
- typeSerial: \"root\\n\"
- wait: 1s
- waitForPicture: {file: language.png, area: {x: 1, y: 2, width: 3, height: 4}, tolerance: 0.01}
- type: 'a<enter>'
- screenshot: /tmp/out.png
- waitForOff
";
        let file = BuildFile::parse(text, Path::new("/b")).unwrap();
        assert_eq!((file.from.as_str(), file.cpus, file.memory), ("/b/./base.qcow2", 1, 1024));
        assert_eq!(file.user_data.as_deref(), Some(Path::new("/b/provision.sh")));
        assert_eq!(file.timeout(), Duration::from_secs(180));
        let Some(Step::WaitForPicture(picture)) = file.steps.get(3) else { panic!("{:?}", file.steps) };
        assert_eq!(picture.file, Path::new("/b/language.png"));
        assert_eq!(file.steps.get(5), Some(&Step::Screenshot("/tmp/out.png".into())));
        assert_eq!(file.steps.last(), Some(&Step::WaitForOff));
        assert!(!file.steps.iter().any(|step| step.to_string().contains("root")), "it can be a password");
    }

    #[test]
    fn invalid_build_step_is_named_in_the_error() {
        for (steps, want) in [
            ("- type: '<entre>'", "step 1: unknown key <entre>"),
            ("- wait: 1s\n- type: 'a<enter'", "step 2: \"<enter\" has no end"),
            ("- waitForSerial: ''", "step 1: no text to wait for"),
            ("- wait: -1s", "step 1: a negative time"),
            ("- waitForPicture: {file: a.png, tolerance: 2}", "step 1: tolerance 2 is not from 0 to 1"),
            ("- sleep: 1s", "unknown variant"),
            ("- waitForPicture: {file: a.png, colour: red}", "unknown field"),
        ] {
            let error = BuildFile::parse(&format!("from: a\nsteps:\n{steps}"), Path::new("/")).unwrap_err();
            assert!(error.contains(want), "{steps}: {error}");
        }
        assert!(
            BuildFile::parse("from: a\nimage: b\nsteps: []", Path::new("/"))
                .unwrap_err()
                .contains("waitForOff")
        );
        assert!(BuildFile::parse("from: a\ntimeout: 0s\nsteps: []", Path::new("/")).is_err());
        assert!(BuildFile::parse("steps: []", Path::new("/")).is_err());
    }
}
