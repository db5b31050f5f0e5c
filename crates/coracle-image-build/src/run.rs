//! Runs the steps of a build in a VM.

use std::path::Path;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::build_file::{BuildFile, Picture, Step};
use crate::keys;
use crate::screen::{Frame, Screen, ScreenError};
use crate::serial::Serial;

/// Pause between two key events: keyboards of VMs have small buffers.
const BETWEEN_KEYS: Duration = Duration::from_millis(40);
/// Share of pixels that may differ on a screen that counts as unchanged: a blinking cursor.
const CURSOR_SHARE: f64 = 0.001;
/// Number of characters of the serial console in an error.
const TAIL: usize = 200;

/// Running VM.
#[derive(Debug)]
pub struct Machine {
    /// Screen of the VM.
    pub screen: Screen,
    /// Serial console of the VM.
    pub serial: Serial,
    /// Becomes true when the VM is off.
    pub off: watch::Receiver<bool>,
}

/// Step that failed.
#[derive(Debug, thiserror::Error)]
#[error("step {number} of {count}, {step}: {why}{console}")]
pub struct StepError {
    /// Number of the step, counted from 1.
    pub number: usize,
    count: usize,
    step: String,
    why: Why,
    console: String,
}

#[derive(Debug, thiserror::Error)]
enum Why {
    #[error("{}", chain(.0))]
    Screen(#[from] ScreenError),
    #[error("{0}")]
    Serial(&'static str),
    #[error("{0}")]
    Keys(String),
    #[error("not within {} s", .0.as_secs())]
    Late(Duration),
    #[error("the machine is off")]
    Off,
}

fn chain(error: &ScreenError) -> String {
    let source = std::error::Error::source(error);
    source.map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}

/// Runs all steps. Calls `begins` with number and step before each step, and writes a screenshot to the directory `record`
/// after each step. Not cancel-safe: text may be typed in part.
///
/// # Errors
/// The first step that failed or exceeded its time limit.
pub async fn run(
    file: &BuildFile,
    machine: &mut Machine,
    mut begins: impl FnMut(usize, &Step),
    record: Option<&Path>,
) -> Result<(), StepError> {
    for (number, step) in (1..).zip(&file.steps) {
        begins(number, step);
        let done = match (machine.step(step, file.timeout()).await, record) {
            (Ok(()), Some(dir)) => machine.record(&dir.join(format!("{number:03}.png"))).await,
            (done, _) => done,
        };
        if let Err(why) = done {
            let tail = machine.serial.tail(TAIL);
            let console = if tail.trim().is_empty() {
                String::new()
            } else {
                format!("; serial console: {}", tail.trim())
            };
            return Err(StepError { number, count: file.steps.len(), step: step.to_string(), why, console });
        }
    }
    Ok(())
}

impl Machine {
    async fn step(&mut self, step: &Step, limit: Duration) -> Result<(), Why> {
        if matches!(step, Step::WaitForOff) {
            let off = timeout(limit, self.off.wait_for(|off| *off)).await;
            return off.map(drop).map_err(|_| Why::Late(limit));
        }
        let mut off = self.off.clone();
        tokio::select! {
            // Polls the step first, so that text printed before the VM went off is found.
            biased;
            done = self.act(step, limit) => done,
            _ = off.wait_for(|off| *off) => Err(Why::Off),
        }
    }

    async fn act(&mut self, step: &Step, limit: Duration) -> Result<(), Why> {
        match step {
            Step::Type(text) => {
                for event in keys::parse(text).map_err(Why::Keys)? {
                    self.screen.key(event).await?;
                    sleep(BETWEEN_KEYS).await;
                }
            }
            Step::TypeSerial(text) => self.serial.enter(text).await.map_err(Why::Serial)?,
            Step::Wait(time) => sleep(time.unsigned_abs()).await,
            Step::WaitForSerial(text) => {
                let found = timeout(limit, self.serial.wait_for(text)).await;
                found.map_err(|_| Why::Late(limit))?.map_err(Why::Serial)?;
            }
            Step::WaitForStill(time) => {
                let still = timeout(limit, self.wait_until_still(time.unsigned_abs())).await;
                still.map_err(|_| Why::Late(limit))??;
            }
            Step::WaitForPicture(picture) => {
                let wanted = Frame::read_png(&picture.file)?;
                let shown = timeout(limit, self.wait_for_picture(picture, &wanted)).await;
                shown.map_err(|_| Why::Late(limit))??;
            }
            Step::Screenshot(file) => self.screen.refresh().await?.write_png(file)?,
            Step::WaitForOff => {}
        }
        Ok(())
    }

    /// Writes a screenshot, unless the VM is off.
    async fn record(&mut self, path: &Path) -> Result<(), Why> {
        match *self.off.borrow() {
            true => Ok(()),
            false => Ok(self.screen.refresh().await?.write_png(path)?),
        }
    }

    async fn wait_until_still(&mut self, time: Duration) -> Result<(), ScreenError> {
        let mut last = self.screen.refresh().await?.clone();
        let mut since = Instant::now();
        while since.elapsed() < time {
            let frame = self.screen.refresh().await?;
            if frame.difference(&last, None) > CURSOR_SHARE {
                (last, since) = (frame.clone(), Instant::now());
            }
        }
        Ok(())
    }

    async fn wait_for_picture(&mut self, picture: &Picture, wanted: &Frame) -> Result<(), ScreenError> {
        while self.screen.refresh().await?.difference(wanted, picture.area) > picture.tolerance {}
        Ok(())
    }
}
